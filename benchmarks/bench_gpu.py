"""The entropy step on a GPU beside what limits it and what else could count: checked first, then timed, one table.

The limit of a row is measured in the same run: an empty kernel in graph replay, or the batch's bytes at the bandwidth
of a device-to-device copy (bytes read and written), whichever takes longer. "cold" rotates among buffers of more than
`ROTATION_BYTES` together, so that nothing is left in the L2 cache; "warm" uses one buffer, as a step does that comes
right after the gates. Times are medians in microseconds.

Usage: python benchmarks/bench_gpu.py [--out FILE.json] [--quick]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cotuned.config.settings import Settings
from cotuned.kernels import run_parameters
from cotuned.kernels.cuda_bus import CudaBus
from cotuned.wire.slots import Counter, Slot

K = 11
DTYPES = ("uint8", "int16", "int32", "int64")
SIZES = (16, 2**10, 2**14, 2**17, 2**20, 2**24, 2**28)
ROTATION_BYTES = 2**28
COPY_BYTES = 2**30
LIMITS = {  # the design's §7: (dtype, size, which time) → microseconds, or share of the copy bandwidth
    ("int32", 2**10, "warm"): 1.6,
    ("int32", 2**20, "warm"): 4.5,
    ("int32", 2**20, "cold"): 4.5,
    ("int32", 2**28, "share"): 0.97,
    ("uint8", 2**28, "share"): 0.90,
    ("int32", 2**10, "× empty"): 1.3,
}

Launch = Callable[[], Any]


class Bench:
    """A bus with one row, a step into it, and ways to time."""

    def __init__(self) -> None:
        self.settings = Settings(n_actions=K, observation={"pool_min_actions": 1})  # type: ignore[arg-type]
        self.bus: Any = CudaBus(self.settings)
        self.bus.open_row(0, run_parameters(self.settings, ""))
        self.cupy = self.bus._cupy
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self.step = self.bus.entropy_step(0)
        self.empty = self.cupy.RawKernel('extern "C" __global__ void empty() {}', "empty")
        for dtype in DTYPES:
            self.step.prepare(dtype)

    def once(self, launch: Launch) -> float:
        """Microseconds of what `launch` puts on the stream."""
        begin, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        begin.record(self.stream)
        launch()
        end.record(self.stream)
        end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(begin, end)) * 1000

    def elapsed(self, launch: Launch, per: int, repeats: int) -> float:
        """Median microseconds of one of the `per` things that `launch` does, over `repeats`, two to warm up apart."""
        return statistics.median([self.once(launch) / per for _ in range(repeats + 2)][2:])

    def replay(self, launches: Sequence[Launch], in_graph: int) -> float:
        """Microseconds of one launch in a graph of `in_graph` that takes the launches in turn."""
        self.stream.begin_capture()
        with self.stream:
            for i in range(in_graph):
                launches[i % len(launches)]()
        graph = self.stream.end_capture()
        return self.elapsed(lambda: graph.launch(self.stream), in_graph, 100)

    def eager(self, launch: Launch, calls: int, repeats: int) -> float:
        """Microseconds of one launch among many from Python."""
        with self.stream:
            return self.elapsed(lambda: times(launch, calls), calls, repeats)

    def eager_beside_empty(self, launch: Launch, calls: int) -> tuple[float, float]:
        """The same, and how many times an empty CuPy RawKernel that is; the two in turn, for a host's speed wanders."""
        ours: list[float] = []
        ratios: list[float] = []
        with self.stream:
            for _ in range(40):
                empty = self.once(lambda: times(self.launch_empty, 300)) / 300
                ours.append(self.once(lambda: times(launch, calls)) / calls)
                ratios.append(ours[-1] / empty)
        return statistics.median(ours), statistics.median(ratios)

    def launch_empty(self) -> None:
        """An empty CuPy RawKernel."""
        self.empty((1,), (1,), ())

    def copy_bandwidth(self) -> float:
        """Bytes read and written a microsecond."""
        cuda = self.cupy.cuda
        source, target = cuda.Memory(COPY_BYTES), cuda.Memory(COPY_BYTES)
        cuda.runtime.memset(source.ptr, 7, COPY_BYTES)
        kind = cuda.runtime.memcpyDeviceToDevice

        def copy() -> None:
            cuda.runtime.memcpyAsync(target.ptr, source.ptr, COPY_BYTES, kind, self.stream.ptr)

        return 2 * COPY_BYTES / self.elapsed(copy, 1, 25)

    def enqueue(self, actions: Any) -> Launch:
        """A launch without the refusal of capture: only here are graphs made of entropy steps."""
        address, n, size = actions.data.ptr, actions.size, actions.itemsize
        return lambda: self.step.enqueue(self.stream.ptr, address, n, size)


def times(launch: Launch, calls: int) -> None:
    """Calls it so often."""
    for _ in range(calls):
        launch()


def draw(cupy: Any, n: int, dtype: str, seed: int) -> Any:
    """Skewed actions: two uniform draws, the smaller of them."""
    random = cupy.random.RandomState(seed)
    actions = cupy.empty(n, dtype=dtype)
    for begin in range(0, n, 2**26):
        part = min(2**26, n - begin)
        one, other = (random.randint(0, K, part, dtype=np.int32) for _ in range(2))
        actions[begin : begin + part] = cupy.minimum(one, other)
    return actions


def check(bench: Bench) -> None:
    """Every dtype and size, aligned and not, against counts of CuPy and an entropy in float64."""
    actions_before = 0
    for dtype in DTYPES:
        for n in SIZES:
            batch = draw(bench.cupy, n + 5, dtype, n)
            for first, length in ((0, n), (3, n), (1, n - 7)):
                part = batch[first : first + length]
                counts = sum(
                    bench.cupy.bincount(part[i : i + 2**26].astype(np.int32), minlength=K).get()
                    for i in range(0, length, 2**26)
                )
                used = [int(count) for count in counts if count]
                expected = math.log(length) - math.fsum(count * math.log(count) for count in used) / length
                bench.cupy.cuda.runtime.deviceSynchronize()
                bench.step.launch(bench.stream, part)
                bench.stream.synchronize()
                row = bench.bus.row(0)
                entropy = float(row.slots[Slot.ACTION_ENTROPY])
                counted = int(row.counters[Counter.ACTIONS_TRAIN]) - actions_before
                actions_before += counted
                if not (math.isfinite(entropy) and abs(entropy - expected) <= 1e-6 and counted == length):
                    raise SystemExit(f"WRONG: {dtype} n = {length}: H = {entropy}, expected {expected}; n = {counted}")
    bench.cupy.get_default_memory_pool().free_all_blocks()
    print(f"checked: {len(DTYPES) * len(SIZES) * 3} batches within 1e-6 of the float64 entropy\n")


def others(bench: Bench, actions: Any) -> dict[str, float | None]:
    """What CuPy and torch take to count the same batch, eager."""
    times: dict[str, float | None] = {"cupy.bincount": None, "torch.bincount": None, "torch.histc": None}
    calls, repeats = (10, 7) if actions.size <= 2**20 else (1, 3)
    times["cupy.bincount"] = bench.eager(lambda: bench.cupy.bincount(actions, minlength=K), calls, repeats)
    try:
        import torch
    except ImportError:
        return times
    with torch.cuda.stream(torch.cuda.ExternalStream(bench.stream.ptr)):
        tensor = torch.as_tensor(actions, device="cuda")
        times["torch.bincount"] = bench.eager(lambda: torch.bincount(tensor, minlength=K), calls, repeats)
        if actions.itemsize == 1 and actions.size > 2**24:
            return times  # torch.histc of bytes takes seconds
        try:
            times["torch.histc"] = bench.eager(lambda: torch.histc(tensor, K, 0, K - 1), calls, repeats)
        except RuntimeError:  # not for this dtype
            floats = tensor.float()
            times["torch.histc"] = bench.eager(lambda: torch.histc(floats, K, 0, K - 1), calls, repeats)
    return times


def measure(bench: Bench, dtype: str, n: int, empty: float, bandwidth: float) -> dict[str, Any]:
    """One row of the table."""
    size = np.dtype(dtype).itemsize
    n_buffers = max(2, -(-ROTATION_BYTES // (n * size)))
    n_buffers = n_buffers if n_buffers <= 64 else 1  # too small to ever leave the cache
    buffers = [draw(bench.cupy, n, dtype, seed) for seed in range(n_buffers)]
    bench.cupy.cuda.runtime.deviceSynchronize()
    launches = [bench.enqueue(buffer) for buffer in buffers]
    in_graph = 128 if n * size <= 2**24 else 8
    row: dict[str, Any] = {"dtype": dtype, "n": n}
    row["warm"] = bench.replay(launches[:1], in_graph)
    row["cold"] = bench.replay(launches, max(in_graph, n_buffers)) if n_buffers > 1 else None
    calls = 300 if n <= 2**20 else 5
    row["eager"], row["× empty"] = bench.eager_beside_empty(lambda: bench.step.launch(bench.stream, buffers[0]), calls)
    if n > 2**20:
        row["× empty"] = None  # the launch is not what takes the time
    row["limit"] = max(empty, n * size / bandwidth)
    row["share"] = row["limit"] / (row["cold"] or row["warm"])
    return row | others(bench, buffers[0])


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """The design's limits, and whether this run met them."""
    lines = []
    for (dtype, n, what), limit in LIMITS.items():
        value = next(row for row in rows if row["dtype"] == dtype and row["n"] == n)[what]
        met = value >= limit if what == "share" else value <= limit
        bound = {"share": "of copy bandwidth, at least", "× empty": "× an empty launch (eager), at most"}
        unit = bound.get(what, f"µs ({what}), at most")
        lines.append(f"{'met   ' if met else 'MISSED'} {dtype:6} n = {n:<10} {value:6.2f} {unit} {limit}")
    return lines


def shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench_gpu.json"), help="where the JSON goes")
    parser.add_argument("--quick", action="store_true", help="only the rows with a limit")
    options = parser.parse_args()
    bench = Bench()
    check(bench)
    bandwidth = bench.copy_bandwidth()  # first: it brings the clocks up
    empty = bench.replay([bench.launch_empty], 128)
    empty_eager = bench.eager(bench.launch_empty, 300, 15)
    print(f"{bench.bus.device}, K = {K}; {time.strftime('%Y-%m-%d')}")
    print(f"empty kernel: {empty:.2f} µs in graph replay, {empty_eager:.2f} eager; copy: {bandwidth / 1e6:.3f} TB/s\n")
    columns = ("warm", "cold", "eager", "× empty", "limit", "share", "cupy.bincount", "torch.bincount", "torch.histc")
    print(f"{'dtype':6} {'n':>10} " + " ".join(f"{name:>13}" for name in (*columns, "× best other")))
    rows = []
    wanted = {(dtype, n) for dtype, n, _ in LIMITS}
    for dtype in DTYPES:
        for n in SIZES:
            if options.quick and (dtype, n) not in wanted:
                continue
            row = measure(bench, dtype, n, empty, bandwidth)
            rivals = [row[name] for name in columns[-3:] if row[name] is not None]
            row["best_other_ratio"] = min(rivals) / row["eager"]
            cells = [shown(row[name]) for name in (*columns, "best_other_ratio")]
            print(f"{dtype:6} {n:>10} " + " ".join(f"{cell:>13}" for cell in cells), flush=True)
            rows.append(row)
            bench.cupy.get_default_memory_pool().free_all_blocks()
    lines = verdicts(rows)
    print("\n" + "\n".join(lines))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    run = {"device": bench.bus.device, "date": time.strftime("%Y-%m-%d"), "k": K, "empty": empty}
    run |= {"empty_eager": empty_eager, "copy_bytes_per_us": bandwidth, "rows": rows, "limits": lines}
    options.out.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
