"""What the tests of both buses share: the buses, a short way to talk to them, and oracles in closed form."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cotuned.config.settings import Settings
from cotuned.kernels import Drain, HostBus, IsvBus, Rejection, RowState, run_parameters
from cotuned.wire.errors import DeviceUnavailable
from cotuned.wire.slots import Counter, PoolColumn, Slot

BUSES = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]
LN11 = math.log(11)


@cache
def why_no_cuda() -> str:
    """Why no `CudaBus` can be opened here; empty where one can."""
    from cotuned.kernels.cuda_bus import CudaBus

    try:
        CudaBus(Settings()).close()
    except DeviceUnavailable as error:
        return str(error)
    return ""


def new_bus(kind: str, settings: Settings) -> IsvBus:
    """A bus of that kind; skips the test, saying why, where it cannot be had."""
    if kind == "host":
        return HostBus(settings)
    if why_no_cuda():
        pytest.skip(f"CudaBus: {why_no_cuda()}")
    from cotuned.kernels.cuda_bus import CudaBus

    return CudaBus(settings)


class Bench:
    """A bus with `runs` open rows, and the settings it was made with."""

    def __init__(
        self, kind: str, runs: int = 1, *, pool: int = 1, blend: float = 0.4, k: int = 11, **tuner: Any
    ) -> None:
        self.settings = Settings(
            n_actions=k,
            observation={"pool_min_actions": pool, "ema_blend": blend},
            tuner=tuner,
            bus={"max_runs": max(runs, 2)},
        )  # type: ignore[arg-type]
        self.bus = new_bus(kind, self.settings)
        for row in range(runs):
            self.open(row)

    def open(self, row: int) -> None:
        self.bus.open_row(row, run_parameters(self.settings, f"run{row}"))

    def push(self, *batches: Any, row: int = 0, prefill: bool = False) -> list[Rejection]:
        """One drain of batches of one run."""
        return self.bus.observe(
            Drain.of(row, [np.asarray(batch, dtype=np.int64) for batch in batches], prefill=prefill)
        )

    def slot(self, slot: Slot, row: int = 0) -> np.float32:
        return self.bus.row(row).slots[slot]

    def counters(self, row: int = 0) -> dict[str, int]:
        """The counters that are not 0."""
        counters = self.bus.row(row).counters
        assert counters.dtype == np.int64
        return {counter.name: int(counters[counter]) for counter in Counter if counters[counter]}

    def pool(self, row: int = 0) -> tuple[list[int], dict[str, int]]:
        """Counts, and the columns that are not 0."""
        pool = self.bus.row(row).pool
        counts, columns = pool[: -len(PoolColumn)], pool[-len(PoolColumn) :]
        return counts.tolist(), {column.name: int(columns[column]) for column in PoolColumn if columns[column]}

    def drain(self, *batches: tuple[int, Any, Any, float | None]) -> list[Rejection]:
        """One drain of (row, executed, proposed or None, row entropy or None)."""
        rows, executed, proposed, entropy = zip(*batches, strict=True)
        told = np.array([batch is not None for batch in proposed])
        columns = [np.zeros(len(e)) if p is None else np.asarray(p) for e, p in zip(executed, proposed, strict=True)]
        return self.bus.observe(
            Drain(
                np.concatenate([np.asarray(batch, dtype=np.int64) for batch in executed]),
                np.array([len(batch) for batch in executed], dtype=np.int64),
                np.array(rows, dtype=np.int64),
                np.zeros(len(rows), dtype=np.bool_),
                np.concatenate(columns).astype(np.int64),
                told,
                np.array([np.nan if value is None else value for value in entropy]),
            )
        )


def closed_entropy(counts: Iterable[int]) -> float:
    """ln n − (Σ c ln c) / n, summed exactly: a closed form that shares nothing with the code under test."""
    used = [count for count in counts if count]
    n = sum(used)
    return math.log(n) - math.fsum(count * math.log(count) for count in used) / n


def entropy_of(actions: Any) -> float:
    """`closed_entropy` of a batch."""
    return closed_entropy(np.unique(np.asarray(actions), return_counts=True)[1].tolist())


def ema(values: Iterable[float], blend: float) -> float:
    """Slot 583 after these entropies, in float64."""
    slot = 0.0
    for value in values:
        slot = value if slot == 0.0 else (1 - blend) * slot + blend * value
    return slot


def same(first: RowState, second: RowState) -> bool:
    """Whether two rows have the same bits."""
    return all(
        getattr(first, name).tobytes() == getattr(second, name).tobytes() for name in ("slots", "counters", "pool")
    )


def assert_agree(first: RowState, second: RowState, within: float = 1e-6) -> None:
    """Finite, slots within `within`, integers equal."""
    finite: npt.NDArray[np.bool_] = np.isfinite(first.slots) & np.isfinite(second.slots)
    assert finite.all()
    np.testing.assert_allclose(first.slots, second.slots, rtol=0, atol=within)
    np.testing.assert_array_equal(first.counters, second.counters)
    np.testing.assert_array_equal(first.pool, second.pool)
