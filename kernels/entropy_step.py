"""`EntropyStep`: one batch of executed actions that lies on the GPU already, into a row of the bus.

The kernels stand in ``entropy_step.cu`` (K ≤ 16) and ``entropy_step_wide.cu``; what they do is what
`action_entropy.observe_pools` does to a batch of its own, with the range check and the pool rule on the device, since
nothing is read back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..wire.errors import CapturingStream, InvalidActions
from .cuda_modules import Arguments, compiled, cuda_errors
from .cuda_sources import (
    MAX_BIT_PLANE_ACTIONS,
    STEP_ACTIONS,
    STEP_THREADS,
    TINY_ACTIONS,
    count_threads,
    step_blocks,
    step_groups,
)
from .device_arrays import DeviceArray

ONE_BLOCK_ACTIONS = STEP_ACTIONS * STEP_THREADS
"""Most actions that ``step_small`` counts; it has one block."""

WIDE_BLOCK_ACTIONS = 4096
"""Actions worth a block of their own where K > 16."""

_INTEGERS = "bBhHiIlLqQ"
"""NumPy's codes of the integer types."""

_SIGNED_BYTE_ACTIONS = 128
"""Most actions that an int8 can name: beyond, −1 would pass for 255."""


class EntropyStep:
    """Launches the entropy step of one run; made by `CudaBus.entropy_step`.

    A launch counts a batch, checks its range, pools it or makes an observation of it and of what was pooled. It waits
    for nothing: its effect is there for whatever comes later in the same stream. Launches of one run, and everything
    else that reads or writes its row, must be ordered by the caller (one stream, or events).

    Args:
        cupy: the module.
        device: the CUDA device of the bus.
        record: device address of the run's record.
        n_actions: K.
        n_slots: slots of the bus.
        pool_min_actions: least actions of an observation.
        prefill: whether the batches count as of the prefill phase.
    """

    def __init__(
        self, cupy: Any, device: Any, record: int, n_actions: int, n_slots: int, pool_min_actions: int, prefill: bool
    ) -> None:
        self._cupy, self._device = cupy, device
        self._n_actions, self._n_slots = n_actions, n_slots
        self._wide = n_actions > MAX_BIT_PLANE_ACTIONS
        self._n_multiprocessors = int(device.attributes["MultiProcessorCount"])
        self._is_capturing = cupy.cuda.runtime.streamIsCapturing
        self._launch_kernel = cupy.cuda.driver.launchKernel
        self._array = cupy.ndarray
        self._functions: dict[int, dict[str, Any]] = {}
        self._addresses: dict[tuple[str, int], int] = {}
        self._shape: tuple[int, int, tuple[int, int, int]] = (-1, 0, (0, 0, 0))
        self._sizes = {code: np.dtype(code).itemsize for code in _INTEGERS}  # a dtype's own hash is slow
        if n_actions > _SIGNED_BYTE_ACTIONS:
            del self._sizes["b"]
        with cuda_errors(cupy, "making an entropy step"), device:
            size = 8 * (1 + MAX_BIT_PLANE_ACTIONS * 2 * self._n_multiprocessors)
            if self._wide:
                size = 8 * n_actions + 4 * n_actions * 2 * self._n_multiprocessors
            self._scratch = cupy.cuda.Memory(size)
            cupy.cuda.runtime.memset(self._scratch.ptr, 0, size)
            cupy.cuda.runtime.deviceSynchronize()
        scratch, pool, phase = int(self._scratch.ptr), int(pool_min_actions), int(prefill)
        totals, partials = scratch, scratch + 8 * n_actions
        self._step = Arguments(record, 0, 0, scratch, pool, phase)
        self._observe = Arguments(record, 0, 0, pool, phase)
        self._count = Arguments(0, 0, partials)
        self._merge = Arguments(partials, 0, totals)
        self._finish = Arguments(record, totals, 0, pool, phase)

    def prepare(self, dtype: Any) -> None:
        """Compiles and loads what batches of this dtype need; else the first such launch does, in a second or so."""
        size = self._sizes[np.dtype(dtype).char]
        if size in self._functions:
            return
        names = (
            ("observe_batch", "count_blocks", "merge_blocks", "finish_batch")
            if self._wide
            else ("step_tiny", "step_small", "step_large")
        )
        with cuda_errors(self._cupy, f"compiling the entropy step for {np.dtype(dtype)}"), self._device:
            source = "entropy_step_wide" if self._wide else "entropy_step"
            module = compiled(self._cupy, source, self._n_actions, self._n_slots, size)
            kernels = {name: module.get_function(name).kernel for name in names}
        self._functions[size] = kernels  # keeps the modules loaded
        self._addresses |= {(name, size): int(kernel.ptr) for name, kernel in kernels.items()}

    def launch(self, stream: Any, actions: Any) -> None:
        """Enqueues the entropy step of one batch.

        Args:
            stream: a CuPy stream, or the address of a CUDA stream (e.g. ``torch.cuda.current_stream().cuda_stream``).
            actions: the batch, contiguous, on the device of the bus: a CuPy array, or anything with
                ``__cuda_array_interface__`` or DLPack, of an integer dtype. It must live, and not change, until the
                stream has passed the launch. An empty one changes nothing; one index outside [0, K) makes the whole
                batch a rejected one, which only ``BATCHES_REJECTED`` shows.

        Raises:
            CapturingStream: the stream captures a graph.
            InvalidActions: these are no such actions.
        """
        pointer = stream if type(stream) is int else stream.ptr
        if self._is_capturing(pointer):
            raise CapturingStream(
                "entropy step: got a stream that captures a CUDA graph, expected one that does not. A graph would "
                "replay this batch's address and length for ever, and observe again what it has observed. Launch "
                "it outside capture, after the last gate; sac_cotune and q_pi_distill_grad can be captured"
            )
        if type(actions) is self._array:
            size = self._sizes.get(actions.dtype.char, 0)
            address, n, contiguous = actions.data.ptr, actions.size, actions.flags.c_contiguous
            device = actions.data.device_id
        else:
            address, n, dtype, contiguous, device = self._described(actions)
            size = self._sizes.get(dtype.char, 0)
        if not size or not contiguous or address % size or (device != self._device.id and n):
            raise self._refusal(actions, size, contiguous, device)
        if n:
            if size not in self._functions:
                self.prepare(np.dtype(f"u{size}"))
            self.enqueue(pointer, address, n, size)

    def _described(self, actions: Any) -> tuple[int, int, Any, bool, int]:
        if not hasattr(actions, "__dlpack__") and hasattr(actions, "__cuda_array_interface__"):
            actions = self._cupy.asarray(actions)  # a view
        try:
            array = DeviceArray.of(actions, "actions")
            dtype = np.dtype(array.dtype)
        except TypeError as error:
            raise InvalidActions(f"entropy step: {error}") from error
        n, contiguous = 1, True
        for length, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
            contiguous = contiguous and (length <= 1 or stride == n)
            n *= length
        return array.address, n, dtype, contiguous or n == 0, array.device

    def _refusal(self, actions: Any, size: int, contiguous: bool, device: int) -> InvalidActions:
        dtype = getattr(actions, "dtype", "another dtype")
        if not size:
            expected = " (int8 cannot name all of them)" if "b" not in self._sizes else ""
            return InvalidActions(
                f"entropy step: got {dtype}, expected an integer dtype for K = {self._n_actions}{expected}"
            )
        if device != self._device.id:
            return InvalidActions(f"entropy step: got actions on cuda:{device}, expected cuda:{self._device.id}")
        what = "an address that is no multiple of the item size" if contiguous else "strides"
        return InvalidActions(f"entropy step: got actions with {what}, expected contiguous ones; pass a copy")

    def enqueue(self, stream: int, address: int, n: int, size: int) -> None:
        """`launch` without its checks, for n ≥ 1 actions of `size` bytes; `prepare` has been called."""
        if self._wide:
            self._enqueue_wide(stream, address, n, size)
            return
        if n != self._shape[0] or size != self._shape[1]:
            self._shape = (n, size, self._launch_shape(n, size))
        function, blocks, threads = self._shape[2]
        values = self._step.values
        values[1], values[2] = address, n
        self._launch_kernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, self._step.address, 0)

    def _launch_shape(self, n: int, size: int) -> tuple[int, int, int]:
        if n <= TINY_ACTIONS:
            return self._addresses["step_tiny", size], 1, TINY_ACTIONS // 4 + 32
        if n <= ONE_BLOCK_ACTIONS:
            return self._addresses["step_small", size], 1, 32 * -(-n // (32 * STEP_ACTIONS))
        a_thread = STEP_ACTIONS * step_groups(size)
        threads = STEP_THREADS
        while threads > 128 and n <= threads // 2 * a_thread * self._n_multiprocessors:
            threads //= 2
        blocks = min(-(-n // (threads * a_thread)), step_blocks(size) * self._n_multiprocessors)
        return self._addresses["step_large", size], blocks, threads

    def _enqueue_wide(self, stream: int, address: int, n: int, size: int) -> None:
        threads, launch = count_threads(self._n_actions), self._launch_kernel
        if n <= WIDE_BLOCK_ACTIONS:
            self._observe.values[1], self._observe.values[2] = address, n
            function = self._addresses["observe_batch", size]
            launch(function, 1, 1, 1, threads, 1, 1, 0, stream, self._observe.address, 0)
            return
        blocks = min(-(-n // WIDE_BLOCK_ACTIONS), 2 * self._n_multiprocessors)
        self._count.values[0], self._count.values[1] = address, n
        self._merge.values[1], self._finish.values[2] = blocks, n
        bins = -(-self._n_actions // 32)
        for name, grid, block, arguments in (
            ("count_blocks", blocks, threads, self._count),
            ("merge_blocks", bins, 512, self._merge),
            ("finish_batch", 1, 512, self._finish),
        ):
            launch(self._addresses[name, size], grid, 1, 1, block, 1, 1, 0, stream, arguments.address, 0)
