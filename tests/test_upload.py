"""The tables that the GPU works from say the same as the plan, counted here without a GPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotuned.kernels.drain import Drain, plan, reject
from cotuned.kernels.host_bus import segment_pools
from cotuned.kernels.upload import Layout, Tables, action_dtype, pack, split, tabulate
from cotuned.wire.slots import PoolColumn
from tests.bus_contract import Bench, same

K = 11


def random_drain(seed: int, n_batches: int, longest: int = 40) -> Drain:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest, n_batches)
    n = int(lengths.sum())
    actions = rng.integers(0, K, n)
    if n and seed % 3 == 0:
        actions[rng.integers(0, n)] = K
    proposed = np.where(rng.random(n) < 0.5, actions, rng.integers(0, K, n)) % K
    entropy = np.where(rng.random(n_batches) < 0.5, rng.random(n_batches) * lengths, np.nan)
    rows = np.repeat(rng.permutation(4), 1 + n_batches // 4)[:n_batches]
    return Drain(actions, lengths, rows, rng.random(n_batches) < 0.5, proposed, rng.random(n_batches) < 0.7, entropy)


def count(tables: Tables, actions: npt.NDArray[np.integer], proposed: npt.NDArray[np.integer] | None) -> npt.NDArray:
    """What the kernels make of the tables: pool shares of the segments, piece by piece."""
    pools = np.zeros((tables.segments.size, K + len(PoolColumn)), dtype=np.int64)
    for pool, segment in zip(pools, tables.segments, strict=True):
        for piece in range(segment["first_piece"], segment["first_piece"] + segment["n_pieces"]):
            part = slice(tables.piece_start[piece], tables.piece_start[piece + 1])
            pool[:K] += np.bincount(actions[part], minlength=K)
            if proposed is not None:
                pool[K + PoolColumn.GATED] += (actions[part] != proposed[part]).sum()
        for column in ("actions", "proposed", "rows", "row_entropy"):
            pool[K + PoolColumn[column.upper()]] = segment[column]
    return pools


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 10**6), st.integers(0, 30), st.sampled_from([1, 7, 64]), st.sampled_from([1, 50, 10**6]))
def test_tables_say_what_the_plan_says(seed: int, n_batches: int, piece: int, pool_min: int) -> None:
    drain = random_drain(seed, n_batches)
    rejected = reject(drain, K)
    pooled = np.random.default_rng(seed).integers(0, pool_min, 4)
    cut = plan(drain, rejected, pooled, pool_min)
    tables = tabulate(drain, rejected, cut, piece)
    layout = Layout.of(tables, np.uint8)
    buffer = np.full(layout.size + 5, 0xA5, dtype=np.uint8)
    pack(buffer, layout, tables, drain, cut, np.uint8)
    assert (buffer[layout.size :] == 0xA5).all()
    assert all(offset % 16 == 0 for offset in (layout.segments, layout.runs, layout.actions, max(layout.proposed, 0)))
    n = tables.n_actions
    executed = buffer[layout.actions : layout.actions + n]
    proposed = buffer[layout.proposed : layout.proposed + n] if layout.proposed >= 0 else None
    np.testing.assert_array_equal(count(tables, executed, proposed), segment_pools(drain, cut, K))
    assert np.diff(tables.piece_start).max(initial=0) <= piece
    for run in tables.runs:
        mine = slice(run["first_segment"], run["first_segment"] + run["n_segments"])
        assert (cut.segment_row[mine] == run["row"]).all()
        assert run["n_segments"] == (cut.segment_row == run["row"]).sum()
    assert tables.runs["batches_rejected"].sum() == len(rejected)
    assert tables.runs["actions_train"].sum() + tables.runs["actions_prefill"].sum() == n
    assert tables.runs["batches_train"].sum() + tables.runs["batches_prefill"].sum() == cut.batches.size


@pytest.mark.parametrize(("max_batches", "max_actions"), [(1, 10**9), (3, 10**9), (100, 60), (100, 1), (100, 10**9)])
@pytest.mark.parametrize("pool", [1, 100])
def test_a_drain_in_parts_does_the_same(pool: int, max_batches: int, max_actions: int) -> None:
    drain = random_drain(7, 30)
    whole, parts = Bench("host", 4, pool=pool), Bench("host", 4, pool=pool)
    rejected = whole.bus.observe(drain)
    in_parts = []
    for first, part in split(drain, max_batches, max_actions):
        assert part.lengths.size <= max_batches
        assert part.lengths.size == 1 or part.lengths.sum() <= max_actions
        in_parts += [bad._replace(batch=first + bad.batch) for bad in parts.bus.observe(part)]
    assert in_parts == rejected
    assert all(same(whole.bus.row(row), parts.bus.row(row)) for row in range(4))


def test_action_types() -> None:
    assert action_dtype(256) is np.uint8
    assert action_dtype(257) is np.uint16
