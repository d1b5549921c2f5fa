"""Launches ``q_pi_distill_grad.cu`` on arrays of CuPy, torch or any other library that speaks DLPack."""

from __future__ import annotations

import contextlib
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

from ..wire.slots import Slot, slot_defines
from .cuda_modules import Arguments, cuda_errors, import_cupy
from .device_arrays import DeviceArray

COMPILE_OPTIONS = ("--std=c++17",)
"""CuPy adds -ftz=true. Multiplications and additions may fuse: the reference is float64 anyway."""

MAX_ACTIONS = 4096
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The element types of logits, Q and gradient."""

C_TYPES = {"float32": "float", "bfloat16": "bfloat16", "float16": "float16"}
ADVICE = "a learner on this GPU may go on with the formula in its own framework; see q_pi_distill_grad.py"

LANE_BYTES = 32
"""Most bytes of logits of a thread where several rows share a warp: with few registers many loads are under way."""

WARP_LANE_BYTES = 64
"""Most where a row has a whole warp or, if that is too much for it, a block."""

BLOCK_THREADS = 128
ENOUGH_BLOCKS = 256
"""With fewer, blocks are made smaller, down to a warp, so that a small batch still meets most multiprocessors."""

MAX_BLOCKS = 2**31 - 1


class Variant(NamedTuple):
    """What the kernel is compiled for."""

    n_actions: int
    logits: str
    q: str
    gradient: str
    vector: int
    """Elements of one access."""
    masked: bool
    dense: bool = False
    """Whether no array has gaps between its rows."""

    @property
    def staged(self) -> bool:
        """Whether a thread does a row, its warp moving 32 of them through shared memory."""
        return self.n_actions <= 32 and self.vector < 4

    @property
    def lanes(self) -> int:
        """Threads of a row: as few as read 64 bytes side by side and hold no more than is allowed above."""
        if self.staged:
            return 1
        narrow, wide = sorted((BYTES[self.logits], BYTES[self.q]))
        side_by_side = 64 // (self.vector * narrow)
        lanes = min(side_by_side, 1 << (-(-self.n_actions // self.vector) - 1).bit_length())
        while -(-self.n_actions // lanes) * wide > (LANE_BYTES if lanes < 32 else WARP_LANE_BYTES):
            lanes *= 2
        return lanes

    def source(self) -> str:
        """The whole text, ready to be compiled."""
        constants = {
            **slot_defines(),
            "N_ACTIONS": self.n_actions,
            "MASKED": int(self.masked),
            "VECTOR": self.vector,
            "LANES": self.lanes,
            "STAGED": int(self.staged),
            "DENSE": int(self.dense),
            "logit_t": C_TYPES[self.logits],
            "q_t": C_TYPES[self.q],
            "gradient_t": C_TYPES[self.gradient],
        }
        head = "".join(f"#define {key} {value}\n" for key, value in constants.items())
        file = "q_pi_distill_grad.cu"
        return f'{head}#line 1 "{file}"\n{(files(__name__.rpartition(".")[0]) / file).read_text("utf-8")}'


def launch_q_pi_distill_grad(
    logits: Any, q: Any, slots: Any, gradient: Any, *, mask: Any = None, loss: Any = None, stream: int | None = None
) -> None:
    """Puts one kernel on a stream that writes dL/dz, and L where asked; `q_pi_distill_grad` says what they are.

    The gradient is each row's own, not divided by n: scale it as the loss is reduced. α and τ are read when the kernel
    runs, so a captured graph follows the bus. Capturable, once a call with the same K, types and alignment has been
    made (the first one compiles); nothing is allocated or awaited. The same inputs give the same bits. The arrays must
    live until the kernel has run.

    Args:
        logits: float32, bfloat16 or float16 [n, K], K ≤ 4096; rows may lie apart, their elements side by side.
        q: likewise; its type need not be that of `logits`.
        slots: float32, a run's row of the bus (slots ALPHA and TAU of it are read).
        gradient: [n, K] for the result: of the type of `logits`, or float32; may be `logits` itself.
        mask: bool or uint8 [n, K], 0 where an action is not legal; None: a logit of −inf says so.
        loss: float32 [n] for the loss; None: it is not computed.
        stream: a ``cudaStream_t`` as a number (CuPy's ``stream.ptr``, torch's ``stream.cuda_stream``); None: CuPy's
            current stream, which is not torch's.

    Raises:
        TypeError, ValueError: an array does not fit; the message says which and why.
        DeviceUnavailable: CuPy is missing, or the kernel cannot be compiled or launched.
    """
    z, others = DeviceArray.of(logits, "logits"), (DeviceArray.of(q, "q"), DeviceArray.of(gradient, "gradient"))
    row = DeviceArray.of(slots, "slots")
    legal = None if mask is None else DeviceArray.of(mask, "mask")
    losses = None if loss is None else DeviceArray.of(loss, "loss")
    arrays = (z, *others, row, legal, losses)
    # What is launched follows from all but the addresses, and from how these are aligned: checked once for each such.
    plan = _plan(
        tuple([array and array[1:] for array in arrays]), tuple([array and array.address & 15 for array in arrays])
    )
    if plan is None:
        return
    arguments = plan.free.pop() if plan.free else Arguments(*[0] * 11)  # one for each thread that is in here
    strides, (target_q, target) = plan.strides, others
    arguments.values[:] = (
        row.address,
        z.address,
        strides[0],
        target_q.address,
        strides[1],
        0 if legal is None else legal.address,
        strides[3],
        target.address,
        strides[2],
        0 if losses is None else losses.address,
        z.shape[0],
    )
    cupy = import_cupy()
    pointer = cupy.cuda.get_current_stream().ptr if stream is None else stream
    launch = cupy.cuda.driver.launchKernel
    try:
        with contextlib.nullcontext() if cupy.cuda.runtime.getDevice() == z.device else cupy.cuda.Device(z.device):
            launch(plan.function, plan.grid, 1, 1, plan.threads, 1, 1, 0, pointer, arguments.address, 0)
    except RuntimeError:
        with cuda_errors(cupy, "q_pi_distill_grad", ADVICE):
            raise
    plan.free.append(arguments)


class _Plan(NamedTuple):
    """What a launch of one kind is."""

    kernel: Any
    """Keeps the module loaded."""
    function: int
    grid: int
    threads: int
    strides: tuple[int, int, int, int]
    """Of the rows of logits, Q, gradient and mask; elements."""
    free: list[Arguments]


@lru_cache(maxsize=1024)
def _plan(rests: tuple[Any, ...], alignments: tuple[Any, ...]) -> _Plan | None:
    """Checks arrays that are described by all but their addresses (of which the last bits are given); None: no rows."""
    described: list[Any] = [
        None if rest is None else DeviceArray(bits, *rest) for bits, rest in zip(alignments, rests, strict=True)
    ]
    z, q, gradient, row, mask, loss = described
    if len(z.shape) != 2 or not 1 <= z.shape[1] <= MAX_ACTIONS:
        raise ValueError(f"logits: got shape {z.shape}, expected [n, K] with K from 1 to {MAX_ACTIONS}")
    n, k = z.shape
    for name, array in (("logits", z), ("q", q), ("gradient", gradient)):
        _check_rows(name, array, z, tuple(BYTES) if name != "gradient" else (z.dtype, "float32"))
    if mask is not None:
        _check_rows("mask", mask, z, ("bool", "uint8"))
    _check_vector("slots", row, z, Slot.TAU + 1)
    if loss is not None:
        _check_vector("loss", loss, z, n)
    if n == 0:
        return None
    matrices = [array for array in (z, q, gradient, mask) if array is not None]
    dense = all(array.strides[0] == k for array in matrices)
    variant = Variant(k, z.dtype, q.dtype, gradient.dtype, _widest(k, *matrices), mask is not None)
    variant = variant._replace(dense=dense and variant.staged)
    grid, threads = _shape(variant, n)
    cupy = import_cupy()
    with cuda_errors(cupy, "q_pi_distill_grad", ADVICE), cupy.cuda.Device(z.device):
        kernel = _kernel(z.device, variant)
        function = int(kernel.kernel.ptr)
    strides = (z.strides[0], q.strides[0], gradient.strides[0], 0 if mask is None else mask.strides[0])
    return _Plan(kernel, function, grid, threads, strides, [])


@cache
def _kernel(device: int, variant: Variant) -> Any:
    """The compiled kernel, loaded on `device`, the current one. CuPy keeps the machine code on disk."""
    module = import_cupy().RawModule(code=variant.source(), options=COMPILE_OPTIONS)
    return module.get_function("q_pi_distill_grad")


def _check_rows(name: str, array: DeviceArray, logits: DeviceArray, dtypes: tuple[str, ...]) -> None:
    if array.dtype not in dtypes:
        raise TypeError(f"{name}: got {array.dtype}, expected {' or '.join(dict.fromkeys(dtypes))}; convert it first")
    if array.shape != logits.shape:
        raise ValueError(f"{name}: got shape {array.shape}, expected that of the logits, {logits.shape}")
    if array.strides[1] != 1 and array.shape[1] > 1:
        raise ValueError(
            f"{name}: got elements of a row that lie {array.strides[1]} apart, expected them side by side; "
            "make it contiguous first"
        )
    if abs(array.strides[0]) >= 2**31:
        raise ValueError(f"{name}: got rows that lie {array.strides[0]} elements apart, expected less than 2^31")
    _check_device(name, array, logits)


def _check_vector(name: str, vector: DeviceArray, logits: DeviceArray, size: int) -> None:
    """A float32 vector of at least `size` elements that lie side by side."""
    if vector.dtype != "float32" or len(vector.shape) != 1 or vector.shape[0] < size:
        raise ValueError(f"{name}: got {vector.dtype} {vector.shape}, expected float32 with at least {size} elements")
    if vector.strides[0] != 1 and size > 1:
        raise ValueError(f"{name}: got elements that lie {vector.strides[0]} apart, expected them side by side")
    _check_device(name, vector, logits)


def _check_device(name: str, array: DeviceArray, logits: DeviceArray) -> None:
    if array.device != logits.device:
        raise ValueError(f"{name}: got GPU {array.device}, expected that of the logits, {logits.device}")


def _widest(n_actions: int, *arrays: DeviceArray) -> int:
    """The most elements, 8, 4, 2 or 1, that every array gives in aligned accesses of at most 16 bytes.

    Float32 beside 2-byte types goes by 4: 8 would be two accesses.
    """
    sizes = [BYTES.get(array.dtype, 1) for array in arrays]
    for vector in (8, 4, 2):
        if n_actions % vector == 0 and vector * max(sizes[:2]) <= 16:
            bytes_apart = (
                (array.address | array.strides[0] * size) % min(16, vector * size)
                for array, size in zip(arrays, sizes, strict=True)
            )
            if not any(bytes_apart):
                return vector
    return 1


def _shape(variant: Variant, n: int) -> tuple[int, int]:
    """Blocks, and threads of a block."""
    if variant.lanes > 32:
        return min(n, MAX_BLOCKS), variant.lanes
    threads = BLOCK_THREADS
    while threads > 32 and n * variant.lanes < threads * ENOUGH_BLOCKS:
        threads //= 2
    return min(-(-n * variant.lanes // threads), MAX_BLOCKS), threads
