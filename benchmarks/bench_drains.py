"""The daemon's own kernels: a drain that has arrived on the device, `sac_cotune`, and whole calls of both buses.

Part of bench_gpu.py. The first table is kernels alone, in graph replay; the second is wall clock from the caller's
side: packing, copying, launching and, where something is returned, waiting. Checked against `HostBus`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu_timer import GpuTimer
from benchmarks.limits import Limit
from cotuned.config.settings import Settings
from cotuned.kernels import Drain, HostBus, IsvBus, run_parameters
from cotuned.kernels.cuda_bus import CudaBus
from cotuned.kernels.drain import plan, reject
from cotuned.kernels.upload import Layout, pack, tabulate
from cotuned.wire.slots import Counter

RUNS = 8
DRAIN_LIMIT = 30.0
ACTION_COUNTS = (11, 64, 300, 4096)
SIZES = (16, 2**10, 2**14, 2**20, 2**24)
MANY = f"4096 × 64 over {RUNS} runs"


def many_batches() -> Drain:
    """4 096 batches of 64 actions over `RUNS` runs."""
    actions = np.random.default_rng(0).integers(0, 11, 4096 * 64).astype(np.uint8)
    rows = np.repeat(np.arange(RUNS), 4096 // RUNS)
    return Drain(actions, np.full(4096, 64), rows, np.zeros(4096, dtype=np.bool_))


def opened(bus: Any, settings: Settings) -> Any:
    """The bus, with `RUNS` open rows."""
    for row in range(RUNS):
        bus.open_row(row, run_parameters(settings, f"run{row}"))
    return bus


def check(cuda: IsvBus, host: IsvBus, drain: Drain) -> None:
    """Both buses observe and cotune the same; ends the program where they differ."""
    for bus in (cuda, host):
        bus.observe(drain)
    for row in range(RUNS):
        ours, expected = cuda.cotune(row, 1.0), host.cotune(row, 1.0)
        close = np.isfinite(ours.slots).all() and np.abs(ours.slots - expected.slots).max() <= 1e-6
        if not (close and (ours.counters == expected.counters).all() and (ours.pool == expected.pool).all()):
            raise SystemExit(f"WRONG: row {row} of CudaBus differs from HostBus after {MANY}")


def drain_time(timer: GpuTimer, bus: Any, drain: Drain) -> float:
    """Microseconds of the kernels of one drain whose upload lies on the device already."""
    cut = plan(drain, reject(drain, bus._n_actions), bus._pool_actions, bus._pool_min_actions)
    tables = tabulate(drain, [], cut, bus._piece_actions(int(drain.lengths.sum())))
    layout = Layout.of(tables, bus._dtype)
    pack(bus._staging.buffer(layout.size), layout, tables, drain, cut, bus._dtype)
    base = bus._staging.upload(layout.size, bus._stream)
    bus._stream.synchronize()
    with timer.stream:
        bus._launch(base, layout, tables)  # allocates what it needs, now
    timer.stream.synchronize()
    return timer.replay([lambda: bus._launch(base, layout, tables)], 100, 30)


def tuner_times(timer: GpuTimer, settings: Settings) -> dict[str, float]:
    """`sac_cotune` with nothing new, and behind an entropy step, so that it moves α and τ each time."""
    bus: Any = opened(CudaBus(settings), settings)  # of its own: after a step, `observe` asks for the pools each time
    cupy, stream, step, tuner = timer.cupy, timer.stream, bus.entropy_step(0), bus.cotune_step(0)
    actions = cupy.asarray(np.random.default_rng(1).integers(0, 11, 1024), dtype="int32")
    cupy.cuda.runtime.deviceSynchronize()
    step.launch(stream, actions)  # compiles
    tuner.launch(stream)
    stream.synchronize()

    def both() -> None:
        step.enqueue(stream.ptr, actions.data.ptr, actions.size, 4)
        tuner.launch(stream)

    times = {"sac_cotune, nothing new": timer.replay([lambda: tuner.launch(stream)], 100)}
    before = int(bus.row(0).counters[Counter.UPDATES])
    times["entropy step of 1024, then sac_cotune"] = timer.replay([both], 100)
    updates = int(bus.row(0).counters[Counter.UPDATES]) - before
    if updates != 102 * 100:
        raise SystemExit(f"WRONG: sac_cotune made {updates} updates in a graph, expected {102 * 100}")
    bus.close()
    return times


def wall(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """p50 and p99 of a call in microseconds."""
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return float(np.percentile(times, 50)), float(np.percentile(times, 99))


def run(timer: GpuTimer, *, quick: bool) -> tuple[dict[str, Any], list[Limit]]:
    """Checks, measures and prints; the times by name, and the limit."""
    settings = Settings()
    cuda, host, many = opened(CudaBus(settings), settings), opened(HostBus(settings), settings), many_batches()
    check(cuda, host, many)
    kernels = {f"drain of {MANY}": drain_time(timer, cuda, many)} | tuner_times(timer, settings)
    rng = np.random.default_rng(0)
    for k in () if quick else ACTION_COUNTS:
        wide = Settings(n_actions=k)
        other: Any = opened(CudaBus(wide), wide)
        for n in SIZES:
            drain = Drain.of(0, [rng.integers(0, k, n).astype(other._dtype)])
            kernels[f"drain of one batch of {n}, K = {k}"] = drain_time(timer, other, drain)
        other.close()
    print(f"\nthe daemon's kernels, in graph replay (checked: {RUNS} rows like HostBus's within 1e-6, counts exact)")
    for name, value in kernels.items():
        print(f"{name:42}{value:10.2f} µs")
    small, large = (Drain.of(0, [rng.integers(0, 11, n).astype(np.uint8)]) for n in (1024, 2**20))
    calls: dict[str, dict[str, tuple[float, float]]] = {}
    for name, bus in (("cuda", cuda), ("host", host)):
        calls[name] = {
            "observe 1 × 1024": wall(lambda b=bus: b.observe(small), 300),
            "observe 1 × 2^20": wall(lambda b=bus: b.observe(large), 50),
            "observe 4096 × 64": wall(lambda b=bus: b.observe(many), 50),
            "cotune": wall(lambda b=bus: b.cotune(0, None), 500),
            "observe 1 × 1024, cotune": wall(lambda b=bus: (b.observe(small), b.cotune(0, 2.0)), 300),
            "row": wall(lambda b=bus: b.row(0), 500),
        }
    print(f"\n{'whole calls, wall clock':26}{'CudaBus p50':>14}{'p99':>9}{'HostBus p50':>14}{'p99':>9}   µs")
    for name in calls["cuda"]:
        cells = (f"{calls[bus][name][0]:14.1f}{calls[bus][name][1]:9.1f}" for bus in ("cuda", "host"))
        print(f"{name:26}" + "".join(cells))
    cuda.close()
    limit = Limit(f"drain of {MANY}, on the device", kernels[f"drain of {MANY}"], DRAIN_LIMIT, "µs")
    return {"kernels": kernels, "calls": calls}, [limit]
