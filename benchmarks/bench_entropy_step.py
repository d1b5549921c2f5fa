"""The entropy step of a batch that lies on the GPU, beside what limits it and what else could count.

Part of bench_gpu.py. Checked against counts of CuPy and an entropy in float64, then timed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks.gpu_timer import GpuTimer, Launch, import_torch
from benchmarks.limits import Limit, shown
from cotuned.config.settings import Settings
from cotuned.kernels import run_parameters
from cotuned.kernels.cuda_bus import CudaBus
from cotuned.wire.slots import Counter, Slot

K = 11
DTYPES = ("uint8", "int16", "int32", "int64")
SIZES = (16, 2**10, 2**14, 2**17, 2**20, 2**24, 2**28)
ROTATION_BYTES = 2**28
MAX_BUFFERS = 64
"""A batch that needs more of them to leave the cache is timed warm only."""

PART = 2**26
SLOW = 20_000.0
"""Microseconds of a rival's call beyond which one call is enough."""

OTHERS = ("cupy.bincount", "torch.bincount", "torch.histc")
COLUMNS = ("warm", "cold", "eager", "× empty", "limit", "share", *OTHERS, "× best other")
LIMITS = {  # (dtype, size, which time): limit
    ("int32", 2**10, "warm"): 1.6,
    ("int32", 2**20, "warm"): 4.5,
    ("int32", 2**20, "cold"): 4.5,
    ("int32", 2**28, "share"): 0.97,
    ("uint8", 2**28, "share"): 0.90,
    ("int32", 2**10, "× empty"): 1.3,
}
UNITS = {"share": "of copy bandwidth", "× empty": "× an empty RawKernel's"}


class StepBench:
    """A bus with one row, a step into it, and batches to take it.

    Args:
        timer: what times.
    """

    def __init__(self, timer: GpuTimer) -> None:
        self.timer, self.cupy = timer, timer.cupy
        settings = Settings(n_actions=K, observation={"pool_min_actions": 1})  # type: ignore[arg-type]
        self.bus: Any = CudaBus(settings)
        self.bus.open_row(0, run_parameters(settings, ""))
        self.step = self.bus.entropy_step(0)
        for dtype in DTYPES:
            self.step.prepare(dtype)
        self.drawn = self._draw(2 * max(SIZES))
        self.torch = import_torch()

    def _draw(self, n: int) -> Any:
        """Skewed actions as bytes: two uniform draws, the smaller of them."""
        random = self.cupy.random.RandomState(7)
        actions = self.cupy.empty(n, dtype="uint8")
        for begin in range(0, n, PART):
            one, other = (random.randint(0, K, PART, dtype=np.int32) for _ in range(2))
            actions[begin : begin + PART] = self.cupy.minimum(one, other)
        return actions

    def free(self) -> None:
        """Gives the memory of arrays that are gone back to CUDA."""
        self.cupy.get_default_memory_pool().free_all_blocks()

    def enqueue(self, actions: Any) -> Launch:
        """A launch without the refusal of capture: only here are graphs made of entropy steps."""
        address, n, size = actions.data.ptr, actions.size, actions.itemsize
        return lambda: self.step.enqueue(self.timer.stream.ptr, address, n, size)

    def check(self) -> int:
        """Every dtype and size, aligned and not; the number of batches. Ends the program at a wrong one."""
        counted_before = checked = 0
        for dtype in DTYPES:
            for n in SIZES:
                batch = self.drawn[: n + 5].astype(dtype)
                for first, length in ((0, n), (3, n), (1, n - 7)):
                    expected = self._entropy(batch[first : first + length])
                    self.cupy.cuda.runtime.deviceSynchronize()
                    self.step.launch(self.timer.stream, batch[first : first + length])
                    self.timer.stream.synchronize()
                    row = self.bus.row(0)
                    entropy = float(row.slots[Slot.ACTION_ENTROPY])
                    counted = int(row.counters[Counter.ACTIONS_TRAIN]) - counted_before
                    counted_before += counted
                    if not (math.isfinite(entropy) and abs(entropy - expected) <= 1e-6 and counted == length):
                        raise SystemExit(
                            f"WRONG: {dtype} n = {length}: H = {entropy}, expected {expected}; counted {counted}"
                        )
                    checked += 1
                del batch
            self.free()
        return checked

    def _entropy(self, actions: Any) -> float:
        parts = (actions[i : i + PART].astype(np.int32) for i in range(0, actions.size, PART))
        counts = sum(self.cupy.bincount(part, minlength=K).get() for part in parts)
        used = [int(count) for count in counts if count]
        return math.log(actions.size) - math.fsum(count * math.log(count) for count in used) / actions.size

    def measure(self, dtype: str, n: int, empty: float, bandwidth: float) -> dict[str, Any]:
        """One row of the table."""
        size = np.dtype(dtype).itemsize
        n_buffers = max(2, -(-ROTATION_BYTES // (n * size)))
        n_buffers = n_buffers if n_buffers <= MAX_BUFFERS else 1
        buffers = [self.drawn[i * n : (i + 1) * n].astype(dtype) for i in range(n_buffers)]
        self.cupy.cuda.runtime.deviceSynchronize()
        launches = [self.enqueue(buffer) for buffer in buffers]
        in_graph, repeats = (128, 100) if n * size <= 2**24 else (8, 30)
        row: dict[str, Any] = {"dtype": dtype, "n": n}
        row["warm"] = self.timer.replay(launches[:1], in_graph, repeats)
        row["cold"] = self.timer.replay(launches, max(in_graph, n_buffers), repeats) if n_buffers > 1 else None
        calls = 300 if n <= 2**20 else 5
        step, stream = self.step, self.timer.stream
        row["eager"], ratio = self.timer.eager_beside_empty(lambda: step.launch(stream, buffers[0]), calls)
        row["× empty"] = ratio if n <= 2**20 else None  # beyond, the launch is not what takes the time
        row["limit"] = max(empty, n * size / bandwidth)
        row["share"] = row["limit"] / (row["cold"] or row["warm"])
        row |= self._others(buffers[0])
        row["× best other"] = min(row[name] for name in OTHERS if isinstance(row[name], float)) / row["eager"]
        return row

    def _others(self, actions: Any) -> dict[str, float | str | None]:
        """What CuPy and torch take to count the same batch, eager."""
        timer, torch = self.timer, self.torch
        calls, repeats = (10, 7) if actions.size <= 2**20 else (1, 3)
        row: dict[str, float | str | None] = dict.fromkeys(OTHERS, None if torch else "not installed")
        row["cupy.bincount"] = timer.eager(lambda: self.cupy.bincount(actions, minlength=K), calls, repeats)
        if torch is None:
            return row
        with torch.cuda.stream(torch.cuda.ExternalStream(timer.stream.ptr)):
            tensor = torch.as_tensor(actions, device="cuda")
            row["torch.bincount"] = timer.eager(lambda: torch.bincount(tensor, minlength=K), calls, repeats)
            try:
                torch.histc(tensor, K, 0, K - 1)
            except RuntimeError:  # not for this dtype
                tensor = tensor.float()
            once = timer.once(lambda: torch.histc(tensor, K, 0, K - 1))
            slow = once > SLOW
            row["torch.histc"] = once if slow else timer.eager(lambda: torch.histc(tensor, K, 0, K - 1), calls, repeats)
        return row


def run(timer: GpuTimer, empty: float, bandwidth: float, *, quick: bool) -> tuple[list[dict[str, Any]], list[Limit]]:
    """Checks, measures and prints; the rows, and the limits that concern them."""
    bench = StepBench(timer)
    print(f"entropy step, K = {K}; checked: {bench.check()} batches within 1e-6 of the float64 entropy, counts exact")
    print(f"{'dtype':6} {'n':>10} " + " ".join(f"{name:>14}" for name in COLUMNS))
    rows: list[dict[str, Any]] = []
    wanted = {(dtype, n) for dtype, n, _ in LIMITS}
    for dtype in DTYPES:
        for n in SIZES:
            if quick and (dtype, n) not in wanted:
                continue
            row = bench.measure(dtype, n, empty, bandwidth)
            rows.append(row)
            print(f"{dtype:6} {n:>10} " + " ".join(f"{shown(row[name]):>14}" for name in COLUMNS), flush=True)
            bench.free()
    return rows, [limit(rows, *key) for key in LIMITS]


def limit(rows: list[dict[str, Any]], dtype: str, n: int, which: str) -> Limit:
    """One of `LIMITS` beside what was measured."""
    value = next(row for row in rows if (row["dtype"], row["n"]) == (dtype, n))[which]
    what = f"entropy step, {dtype}, n = {n}, {'eager' if which == '× empty' else which}"
    return Limit(what, value, LIMITS[dtype, n, which], UNITS.get(which, "µs"), at_least=which == "share")
