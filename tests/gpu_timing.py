"""A short look at the speed of `CudaBus`: kernels in graph replay (CUDA events), and whole calls (wall clock)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cotuned.config.settings import Settings
from cotuned.kernels import Drain, HostBus, run_parameters
from cotuned.kernels.cuda_bus import CudaBus
from cotuned.kernels.drain import plan, reject
from cotuned.kernels.upload import Layout, pack, tabulate

IN_GRAPH = 100


def replay(cupy: Any, stream: Any, launch: Callable[[], None]) -> float:
    """Microseconds of one `launch` within a graph of `IN_GRAPH`; median of 30 replays."""
    stream.begin_capture()
    with stream:
        for _ in range(IN_GRAPH):
            launch()
    graph = stream.end_capture()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    times: list[float] = []
    for _ in range(35):
        begin.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) * 1000 / IN_GRAPH)
    return statistics.median(times[5:])


def wall(call: Callable[[], Any], repeats: int = 500) -> str:
    """p50 and p99 of a call in microseconds."""
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return f"p50 {np.percentile(times, 50):8.1f}  p99 {np.percentile(times, 99):8.1f} µs"


def device_time(bus: Any, drain: Drain) -> float:
    """Microseconds of the kernels of one drain whose upload lies on the device already."""
    cut = plan(drain, reject(drain, bus._n_actions), bus._pool_actions, bus._pool_min_actions)
    tables = tabulate(drain, [], cut, bus._piece_actions(int(drain.lengths.sum())))
    layout = Layout.of(tables, bus._dtype)
    pack(bus._staging.buffer(layout.size), layout, tables, drain, cut, bus._dtype)
    base = bus._staging.upload(layout.size, bus._stream)
    bus._stream.synchronize()
    with bus._stream:
        bus._launch(base, layout, tables)  # whatever it needs to allocate, now
    bus._stream.synchronize()
    return replay(bus._cupy, bus._stream, lambda: bus._launch(base, layout, tables))


def main() -> None:
    start = time.perf_counter()
    settings = Settings()
    CudaBus(settings).close()
    print(f"open, kernels perhaps compiled before: {time.perf_counter() - start:.2f} s")
    start = time.perf_counter()
    bus: Any = CudaBus(settings)
    print(f"open again: {time.perf_counter() - start:.3f} s   {bus.device}")
    rng = np.random.default_rng(0)
    empty = bus._cupy.RawKernel('extern "C" __global__ void empty() {}', "empty")
    print(f"{'empty kernel':32}{replay(bus._cupy, bus._stream, lambda: empty((1,), (1,), ())):9.2f} µs")
    for k in (11, 64, 300, 4096):
        other: Any = CudaBus(Settings(n_actions=k))
        other.open_row(0, run_parameters(settings, ""))
        for n in (16, 1024, 2**14, 2**20, 2**24):
            drain = Drain.of(0, [rng.integers(0, k, n).astype(other._dtype)])
            print(f"{f'K = {k}, one batch of {n}':32}{device_time(other, drain):9.2f} µs")
        other.close()
    for row in range(8):
        bus.open_row(row, run_parameters(settings, f"run{row}"))
    many = Drain(
        rng.integers(0, 11, 4096 * 64).astype(np.uint8),
        np.full(4096, 64),
        np.repeat(np.arange(8), 512),
        np.zeros(4096, dtype=np.bool_),
    )
    print(f"{'4096 × 64 over 8 runs':32}{device_time(bus, many):9.2f} µs")
    cell = np.uint64(bus._policy_entropy.ptr)
    tune = replay(
        bus._cupy, bus._stream, lambda: bus._sac_cotune((1,), (1,), (np.uint64(bus._bus.ptr), np.int64(0), cell))
    )
    print(f"{'sac_cotune (nothing new)':32}{tune:9.2f} µs")
    host = HostBus(settings)
    for row in range(8):
        host.open_row(row, run_parameters(settings, f"run{row}"))
    small, large = (Drain.of(0, [rng.integers(0, 11, n).astype(np.uint8)]) for n in (1024, 2**20))
    for name, b in (("cuda", bus), ("host", host)):
        print(f"{name}: observe 1 × 1024      {wall(lambda b=b: b.observe(small))}")
        print(f"{name}: observe 1 × 2^20      {wall(lambda b=b: b.observe(large), 50)}")
        print(f"{name}: observe 4096 × 64     {wall(lambda b=b: b.observe(many), 100)}")
        print(f"{name}: cotune                {wall(lambda b=b: b.cotune(0, None))}")
        print(f"{name}: cotune after observe  {wall(lambda b=b: (b.observe(small), b.cotune(0, 2.0)))}")
        print(f"{name}: row                   {wall(lambda b=b: b.row(0))}")


if __name__ == "__main__":
    main()
