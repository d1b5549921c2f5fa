"""`q_pi_distill_grad` beside a copy of as many bytes and beside torch's composed operations.

Part of bench_gpu.py. Loss and gradient of unmasked logits, gradient in the type of the logits; checked against the
NumPy reference in float64. Bytes are those of logits, Q, gradient and loss, each moved once; "copy" is a
device-to-device copy that reads and writes as many. All but the eager columns are graph replays that rotate among
buffers of up to `ROTATION_BYTES` together, at least two.
"""

from __future__ import annotations

import statistics
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.gpu_timer import GpuTimer, import_torch
from benchmarks.limits import shown
from cotuned.kernels.cuda_distill import launch_q_pi_distill_grad
from cotuned.kernels.q_pi_distill_grad import q_pi_distill_grad
from cotuned.wire.slots import Slot

SIZES = [(n, k) for k in (11, 64, 1024) for n in (256, 4096, 65_536)]
ROTATION_BYTES = 2**28
MAX_SETS = 32
BYTES = {"float32": 4, "bfloat16": 2}
BOUNDS = {"float32": 1e-5, "bfloat16": 2**-8}
"""Largest ‖ours − float64‖ / ‖float64‖ of the gradient; half a unit in the last place of a bfloat16 is 2^-9."""

ALPHA, TAU = 0.2, 0.9
COLUMNS = ("error", "ours", "GB/s", "copy", "share", "eager", "× empty", "torch", "torch eager", "× torch")


class Case:
    """One size and type: buffers to rotate among, and the ways to do the work.

    Args:
        timer: what times.
        torch: for bfloat16, which CuPy does not have, and for what a learner writes in torch; None: not installed.
    """

    def __init__(self, timer: GpuTimer, torch: ModuleType | None, n: int, k: int, dtype: str) -> None:
        self.timer, self.torch, self.n, self.k, self.dtype = timer, torch, n, k, dtype
        self.bytes = n * (3 * k * BYTES[dtype] + 4)
        slots = np.zeros(1024, np.float32)
        slots[Slot.ALPHA], slots[Slot.TAU] = ALPHA, TAU
        self.slots = timer.cupy.asarray(slots)
        self._torch_slots = torch.as_tensor(self.slots, device="cuda") if torch else None
        count = min(MAX_SETS, max(2, ROTATION_BYTES // self.bytes))
        self._random = timer.cupy.random.default_rng(7)
        self.sets = [self._buffers() for _ in range(count)]
        self.copies = [timer.cupy.full((2, self.bytes // 2), 7, dtype="uint8") for _ in self.sets]
        timer.cupy.cuda.runtime.deviceSynchronize()

    def _buffers(self) -> tuple[Any, Any, Any, Any]:
        """Logits, Q, and where gradient and loss go, full of NaN."""
        cupy, shape = self.timer.cupy, (self.n, self.k)
        z, q = (self._random.standard_normal(shape, dtype="float32") for _ in range(2))
        arrays = 2 * z, q, cupy.full(shape, cupy.nan, dtype="float32")
        loss = cupy.full(self.n, cupy.nan, dtype="float32")
        if self.torch is None:
            return *arrays, loss
        cupy.cuda.runtime.deviceSynchronize()
        kind = getattr(self.torch, self.dtype)
        z, q, gradient = (self.torch.as_tensor(array, device="cuda").to(kind) for array in arrays)
        return z, q, gradient, loss

    def ours(self, z: Any, q: Any, gradient: Any, loss: Any) -> None:
        """One launch."""
        launch_q_pi_distill_grad(z, q, self.slots, gradient, loss=loss, stream=self.timer.stream.ptr)

    def composed(self, z: Any, q: Any, *_: Any) -> tuple[Any, Any]:
        """What a learner writes in torch: the loss by its definition, the gradient by autograd."""
        alpha, tau = self._torch_slots[Slot.ALPHA], self._torch_slots[Slot.TAU]  # type: ignore[index]
        leaf = z.detach().requires_grad_()
        log_pi = leaf.float().log_softmax(-1)
        loss = -((q.float() / tau).softmax(-1) * log_pi).sum(-1) + alpha * (log_pi.exp() * log_pi).sum(-1)
        return self.torch.autograd.grad(loss.sum(), leaf)[0], loss  # type: ignore[union-attr]

    def check(self) -> float:
        """‖ours − float64‖ / ‖float64‖ of the gradient's first rows; ends the program where it is above the bound."""
        z, q, gradient, loss = self.sets[0]
        self.ours(z, q, gradient, loss)
        self.timer.stream.synchronize()
        rows = slice(0, 4096)
        got, got_loss = as_float64(gradient), as_float64(loss)
        expected, expected_loss = q_pi_distill_grad(
            as_float64(z[rows]), as_float64(q[rows]), float(np.float32(ALPHA)), float(np.float32(TAU))
        )
        error = float(np.linalg.norm(got[rows] - expected) / np.linalg.norm(expected))
        loss_error = float(np.linalg.norm(got_loss[rows] - expected_loss) / np.linalg.norm(expected_loss))
        finite = np.isfinite(got).all() and np.isfinite(got_loss).all()
        if not (finite and error <= BOUNDS[self.dtype] and loss_error <= 1e-5):
            raise SystemExit(
                f"WRONG: q_pi_distill_grad, {self.dtype} [{self.n}, {self.k}]: gradient off by {error}, loss by "
                f"{loss_error}, expected at most {BOUNDS[self.dtype]} and 1e-5"
            )
        return error

    def measure(self) -> dict[str, Any]:
        """One row of the table."""
        timer, half = self.timer, self.bytes // 2
        count = -(-20 // len(self.sets)) * len(self.sets)
        row: dict[str, Any] = {"dtype": self.dtype, "n": self.n, "k": self.k, "error": self.check()}
        row["ours"] = timer.replay([lambda s=s: self.ours(*s) for s in self.sets], count, 30)
        copies = [lambda c=c: timer.copy(c.data.ptr + half, c.data.ptr, half) for c in self.copies]
        row["copy"] = timer.replay(copies, count, 30)
        row["GB/s"] = self.bytes / row["ours"] / 1000
        row["share"] = row["copy"] / row["ours"]
        row["eager"], row["× empty"] = timer.eager_beside_empty(lambda: self.ours(*self.sets[0]), 100)
        if self.torch is None:
            return row | dict.fromkeys(("torch", "torch eager", "× torch"), "not installed")
        row["torch"] = self._torch_replay(self.torch)
        with self.torch.cuda.stream(self.torch.cuda.ExternalStream(timer.stream.ptr)):
            row["torch eager"] = timer.eager(lambda: self.composed(*self.sets[0]), 20, 7)
        row["× torch"] = row["torch"] / row["ours"]
        return row

    def _torch_replay(self, torch: ModuleType) -> float:
        """Microseconds of one composed call in a graph; torch captures its own, for its allocator's sake."""
        sets = self.sets[:4] * 5
        for arrays in self.sets[:4]:
            self.composed(*arrays)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for arrays in sets:
                self.composed(*arrays)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times: list[float] = []
        for _ in range(12):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / len(sets))
        return statistics.median(times[2:])


def as_float64(array: Any) -> np.ndarray:
    """An array of CuPy or torch on the host."""
    return array.double().cpu().numpy() if hasattr(array, "cpu") else array.get().astype(np.float64)


def run(timer: GpuTimer, *, quick: bool) -> list[dict[str, Any]]:
    """Checks, measures and prints; the rows."""
    torch = import_torch()
    print(
        "\nq_pi_distill_grad, loss and gradient; GB/s and share: of a copy of as many bytes; × torch: in graph replay"
    )
    print(f"{'dtype':9}{'n':>7}{'K':>6}" + "".join(f"{name:>14}" for name in COLUMNS))
    rows: list[dict[str, Any]] = []
    for dtype in BYTES:
        if dtype == "bfloat16" and torch is None:
            print("bfloat16: torch is not installed")
            continue
        for n, k in SIZES[:1] if quick else SIZES:
            row = Case(timer, torch, n, k, dtype).measure()
            rows.append(row)
            cells = (f"{row[name]:.1e}" if name == "error" else shown(row[name]) for name in COLUMNS)
            print(f"{dtype:9}{n:7}{k:6}" + "".join(f"{cell:>14}" for cell in cells), flush=True)
            timer.cupy.get_default_memory_pool().free_all_blocks()
    return rows
