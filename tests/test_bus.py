"""The contract of the ISV bus, for `HostBus` and `CudaBus` alike: what a drain of executed actions does to it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from cotuned.kernels import Drain
from cotuned.wire.slots import Slot
from tests.bus_contract import BUSES, LN11, Bench, closed_entropy, ema, entropy_of, same

SLOT = Slot.RL_ACTION_ENTROPY_EMA_INDEX
HOLD = [5] * 64
EVEN = list(range(11)) * 8  # H = ln 11
HALF = [0, 1] * 32  # H = ln 2
LN2 = math.log(2)

Open = Callable[..., Bench]


@pytest.fixture(params=BUSES)
def bench(request: pytest.FixtureRequest) -> Open:
    return lambda *args, **kwargs: Bench(request.param, *args, **kwargs)


# The seed's semantics by hand: blend 0.4, every batch an observation; slot 583 after the batches.
SEED_TABLE = {
    "first observation is taken whole": ([EVEN], LN11),
    "the second is blended": ([EVEN, HALF], 0.6 * LN11 + 0.4 * LN2),
    "the third too": ([EVEN, HALF, EVEN], 0.6 * (0.6 * LN11 + 0.4 * LN2) + 0.4 * LN11),
    "H = 0 first leaves 0": ([HOLD], 0.0),
    "H = 0 ten times leaves 0": ([HOLD] * 10, 0.0),
    "0 means unset: the first H other than 0 is taken whole": ([HOLD, HOLD, HALF], LN2),
    "H = 0 later pulls down": ([EVEN, HOLD], 0.6 * LN11),
    "and further down": ([EVEN, HOLD, HOLD], 0.36 * LN11),
    "one action is a batch": ([[3]], 0.0),
}


@pytest.mark.parametrize("case", SEED_TABLE)
@pytest.mark.parametrize("drains", ["one", "many"])
def test_seed_semantics(bench: Open, case: str, drains: str) -> None:
    batches, expected = SEED_TABLE[case]
    b = bench()
    for part in [batches] if drains == "one" else [[batch] for batch in batches]:
        assert b.push(*part) == []
    assert b.slot(SLOT) == pytest.approx(expected, abs=1e-6)
    assert (b.slot(SLOT) == 0.0) == (expected == 0.0)
    assert b.slot(Slot.ACTION_ENTROPY) == pytest.approx(entropy_of(batches[-1]), abs=1e-6)
    n = sum(map(len, batches))
    assert b.counters() == {"OBSERVATIONS": len(batches), "BATCHES_TRAIN": len(batches), "ACTIONS_TRAIN": n}
    assert b.pool() == ([0] * 11, {})


def test_a_slot_that_hold_decayed_to_almost_nothing_is_still_set(bench: Open) -> None:
    b = bench()
    b.push(EVEN, *[HOLD] * 300)  # 0.6^300 ln 11 is subnormal in float32
    assert 0 < float(b.slot(SLOT)) < 1e-40
    b.push(EVEN)
    assert b.slot(SLOT) == pytest.approx(0.4 * LN11, abs=1e-6)


def test_blend_of_one_keeps_the_last(bench: Open) -> None:
    b = bench(blend=1.0)
    b.push(EVEN, HALF, HOLD)
    assert b.slot(SLOT) == 0.0
    b.push(HALF)
    assert b.slot(SLOT) == np.float32(LN2)


@pytest.mark.parametrize("k", [2, 3, 11, 64, 65, 256, 257, 4096])
def test_uniform_reads_ln_k_and_one_hot_exactly_zero(bench: Open, k: int) -> None:
    b = bench(k=k)
    b.push(np.tile(np.arange(k), 3))
    assert b.slot(Slot.ACTION_ENTROPY) == pytest.approx(math.log(k), abs=1e-6)
    for n in (1, 3, 1000, 70_001):
        for action in (0, k // 2, k - 1):
            b.push(np.full(n, action))
            assert b.slot(Slot.ACTION_ENTROPY) == 0.0
            assert not np.signbit(b.slot(Slot.ACTION_ENTROPY))


@pytest.mark.parametrize("k", [11, 64, 300, 4096])
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 255, 1023, 4096, 4097, 61_441, 200_003])
def test_entropy_within_1e_6_of_float64(bench: Open, k: int, n: int) -> None:
    b = bench(k=k)
    rng = np.random.default_rng(n + k)
    for batch in (rng.integers(0, k, n), np.minimum(rng.geometric(0.3, n) - 1, k - 1)):
        b.push(batch)
        assert float(b.slot(Slot.ACTION_ENTROPY)) == pytest.approx(entropy_of(batch), abs=1e-6)
        assert np.isfinite(b.bus.row(0).slots).all()


def test_dyadic_distribution(bench: Open) -> None:
    b = bench(k=11)
    counts = [512, 256, 128, 64, 32, 16, 8, 4, 2, 1, 1]  # H = Σ 2^-i · i ln 2
    b.push(np.repeat(np.arange(11), counts))
    halves = [*range(1, 11), 10]
    assert b.slot(SLOT) == pytest.approx(sum(i * LN2 / 2**i for i in halves), abs=1e-6)


def test_unaligned_batches_of_every_small_size(bench: Open) -> None:
    b = bench(blend=0.5)
    rng = np.random.default_rng(3)
    batches = [rng.integers(0, 11, n) for n in rng.permutation(np.arange(1, 70))]
    b.push(*batches)
    assert b.slot(SLOT) == pytest.approx(ema(map(entropy_of, batches), 0.5), abs=1e-6)
    assert b.counters()["OBSERVATIONS"] == 69


@pytest.mark.parametrize("bad", [[11], [255], [-1], [0, 1, 300], [-(2**62)], [2**62]])
def test_a_batch_out_of_range_changes_nothing_but_its_counter(bench: Open, bad: list[int]) -> None:
    b = bench(pool=100)
    b.push(EVEN, HALF)
    before, counters = b.bus.row(0), b.counters()
    rejections = b.push(bad)
    assert [(r.batch, r.code) for r in rejections] == [(0, "action_out_of_range")]
    assert f"got {bad[-1]}" in rejections[0].message
    assert "K = 11" in rejections[0].message
    after = b.bus.row(0)
    assert before.slots.tobytes() == after.slots.tobytes()
    assert before.pool.tobytes() == after.pool.tobytes()
    assert b.counters() == {**counters, "BATCHES_REJECTED": 1}


def test_neighbours_of_a_rejected_batch_count(bench: Open) -> None:
    b = bench()
    assert [r.batch for r in b.push(EVEN, [0, 11], HALF, [-1], [])] == [1, 3]
    assert b.slot(SLOT) == pytest.approx(0.6 * LN11 + 0.4 * LN2, abs=1e-6)
    assert b.counters() == {
        "OBSERVATIONS": 2,
        "BATCHES_TRAIN": 2,
        "ACTIONS_TRAIN": len(EVEN) + len(HALF),
        "BATCHES_REJECTED": 2,
    }


def test_an_empty_batch_changes_nothing(bench: Open) -> None:
    b = bench()
    b.push(EVEN)
    before = b.bus.row(0)
    assert b.push([]) == []
    assert b.push([], []) == []
    assert same(before, b.bus.row(0))


def test_pooling_does_not_depend_on_how_actions_were_cut(bench: Open) -> None:
    actions = np.random.default_rng(0).integers(0, 11, 512)
    rows = []
    for size in (1, 16, 32, 256):
        one, many = bench(pool=256), bench(pool=256)
        parts = np.split(actions, 512 // size)
        one.push(*parts)
        for part in parts:
            many.push(part)
        rows += [one.bus.row(0), many.bus.row(0)]
    for row in rows:
        assert row.slots.tobytes() == rows[0].slots.tobytes()
        assert row.counters[0] == 2
        assert not row.pool.any()


def test_batches_are_never_split(bench: Open) -> None:
    b = bench(pool=100)
    b.push([0] * 60, [1] * 70, [2] * 99)  # 60 + 70 ≥ 100: one observation of 130; 99 wait
    assert b.slot(SLOT) == pytest.approx(closed_entropy([60, 70]), abs=1e-6)
    assert b.pool() == ([0, 0, 99] + [0] * 8, {"ACTIONS": 99})
    b.push([3])
    assert b.slot(Slot.ACTION_ENTROPY) == pytest.approx(closed_entropy([99, 1]), abs=1e-6)
    assert b.counters()["OBSERVATIONS"] == 2
    assert b.pool() == ([0] * 11, {})


def test_a_batch_of_1024_is_one_observation_and_small_ones_wait(bench: Open) -> None:
    b = bench(pool=1024)
    b.push([0] * 1023)
    assert b.slot(SLOT) == 0.0
    assert "OBSERVATIONS" not in b.counters()
    b.push([1] * 1024)
    assert b.slot(SLOT) == pytest.approx(closed_entropy([1023, 1024]), abs=1e-6)
    b.push(np.arange(1024) % 11, np.arange(4096) % 11)
    assert b.counters()["OBSERVATIONS"] == 3


def test_phases_are_counted_apart_and_observed_alike(bench: Open) -> None:
    b = bench()
    b.push(EVEN, prefill=True)
    b.push(HALF, HALF)
    assert b.counters() == {
        "OBSERVATIONS": 3,
        "BATCHES_PREFILL": 1,
        "ACTIONS_PREFILL": 88,
        "BATCHES_TRAIN": 2,
        "ACTIONS_TRAIN": 128,
    }


def test_gate_rate_and_conditional_entropy(bench: Open) -> None:
    b = bench(pool=1, blend=0.5)
    b.drain((0, [5, 5, 5, 5], [5, 1, 2, 5], 4 * 0.75), (0, HALF, None, None), (0, [5] * 10, [5] * 9 + [4], 2.5))
    assert b.slot(Slot.GATE_RATE) == pytest.approx(0.1, abs=1e-6)
    assert b.slot(Slot.GATE_RATE_EMA) == pytest.approx((0.5 + 0.1) / 2, abs=1e-6)
    assert b.slot(Slot.CONDITIONAL_ENTROPY) == pytest.approx(0.25, abs=1e-6)
    assert b.slot(Slot.CONDITIONAL_ENTROPY_EMA) == pytest.approx((0.75 + 0.25) / 2, abs=1e-6)
    counters = b.counters()
    assert counters["OBSERVATIONS"] == 3
    assert counters["GATE_OBSERVATIONS"] == counters["CONDITIONAL_OBSERVATIONS"] == 2


def test_a_first_gate_rate_of_zero_counts_as_a_value(bench: Open) -> None:
    b = bench(blend=0.5)
    b.drain((0, [1, 2], [1, 2], 0.0))
    b.drain((0, [1, 2], [3, 4], 2.0))
    assert b.slot(Slot.GATE_RATE_EMA) == 0.5
    assert b.slot(Slot.CONDITIONAL_ENTROPY_EMA) == 0.5


def test_reports_are_pooled_over_those_that_reported(bench: Open) -> None:
    b = bench(pool=100)
    b.drain((0, [1] * 30, [1] * 20 + [2] * 10, 3.0), (0, [2] * 30, None, None))
    assert b.pool()[1] == {"ACTIONS": 60, "PROPOSED": 30, "GATED": 10, "ROWS": 30, "ROW_ENTROPY": 3 * 2**24}
    b.drain((0, [3] * 50, [4] * 50, None), (0, [4] * 99, [4] * 99, 9.9))
    assert b.slot(Slot.GATE_RATE_EMA) == pytest.approx(60 / 80, abs=1e-6)
    assert b.slot(Slot.CONDITIONAL_ENTROPY_EMA) == pytest.approx(0.1, abs=1e-6)
    assert b.slot(SLOT) == pytest.approx(closed_entropy([30, 30, 50]), abs=1e-6)
    assert b.pool()[1]["PROPOSED"] == 99


@pytest.mark.parametrize(("proposed", "entropy"), [([1, 11], None), ([-1, 1], None), (None, 5.0), (None, -0.1)])
def test_impossible_reports_reject_the_batch(bench: Open, proposed: list[int] | None, entropy: float | None) -> None:
    b = bench()
    codes = [r.code for r in b.drain((0, [1, 2], proposed, entropy), (0, EVEN, None, None))]
    assert codes == ["action_out_of_range" if proposed else "row_entropy_out_of_range"]
    assert b.counters() == {"OBSERVATIONS": 1, "BATCHES_TRAIN": 1, "ACTIONS_TRAIN": 88, "BATCHES_REJECTED": 1}


@pytest.mark.parametrize("k", [11, 300])
def test_runs_of_one_drain_do_not_meet(bench: Open, k: int) -> None:
    b, rng = bench(5, pool=500, k=k), np.random.default_rng(1)
    by_run = {row: [rng.integers(0, k - row, n) for n in rng.integers(1, 900, 12)] for row in (4, 0, 2)}
    rows = np.repeat(list(by_run), 12)
    batches = [batch for parts in by_run.values() for batch in parts]
    lengths = np.array([batch.size for batch in batches])
    b.bus.observe(Drain(np.concatenate(batches), lengths, rows, np.zeros(36, np.bool_)))
    for row, parts in by_run.items():
        alone = bench(pool=500, k=k)
        for part in parts:
            alone.push(part)
        assert same(b.bus.row(row), alone.bus.row(0))
    assert not b.bus.row(1).counters.any()


def test_integers_are_exact_above_2_24(bench: Open) -> None:
    b = bench(pool=2**40)
    n = 2**24 + 1
    b.bus.observe(Drain.of(0, [np.full(n, 7, dtype=np.uint8)]))
    b.push([7, 7], [0])
    assert b.pool() == ([1] + [0] * 6 + [n + 2] + [0] * 3, {"ACTIONS": n + 3})
    assert b.counters() == {"BATCHES_TRAIN": 3, "ACTIONS_TRAIN": n + 3}


def test_a_new_run_starts_clean_and_the_other_rows_stay(bench: Open) -> None:
    b = bench(2, pool=100)
    for row in (0, 1):
        b.push(EVEN, EVEN, HALF, row=row)
    b.bus.write(0, 7, 1.5)
    before = b.bus.row(1)
    b.open(0)
    assert same(b.bus.row(0), bench(2, pool=100).bus.row(0))
    assert same(before, b.bus.row(1))
    b.push([1] * 99)  # the pool before was this row's old run's
    assert "OBSERVATIONS" not in b.counters()


def test_users_slots(bench: Open) -> None:
    b = bench(2)
    assert b.bus.write(1, 0, 0.1) == np.float32(0.1)
    assert b.bus.write(1, 1023, -3) == -3
    row = b.bus.row(1)
    assert (row.slots[0], row.slots[1023]) == (np.float32(0.1), np.float32(-3))
    assert b.bus.row(0).slots[0] == 0
    assert row.slots.dtype == np.float32
    row.slots[0] = 9  # a copy
    assert b.bus.row(1).slots[0] == np.float32(0.1)
    assert b.bus.device.startswith(("cpu (NumPy", "cuda:0 ("))


def test_a_restored_row_goes_on_bit_for_bit(bench: Open) -> None:
    """With its pool half full, into another bus, whose row was used before."""
    first, second = bench(runs=3, pool=200), bench(runs=3, pool=200)
    first.drain((1, EVEN, [5] * 88, 100.0), (1, HALF * 2, None, None), (1, HALF, HOLD, 20.0))
    first.bus.cotune(1, 1.5)
    first.bus.write(1, 7, -0.0)
    second.push(HOLD * 3, row=2)
    second.bus.restore(2, first.bus.row(1))
    assert same(second.bus.row(2), first.bus.row(1))
    assert first.pool(1) == second.pool(2)
    assert first.pool(1)[1] == {"ACTIONS": 64, "PROPOSED": 64, "GATED": 64, "ROWS": 64, "ROW_ENTROPY": 20 * 2**24}
    assert second.counters(0) == second.counters(1) == {}
    for batch in (HALF, EVEN, HOLD, EVEN, EVEN, EVEN):
        first.push(batch, row=1)
        second.push(batch, row=2)
        assert same(second.bus.cotune(2, 1.0), first.bus.cotune(1, 1.0))
    assert first.counters(1)["UPDATES"] >= 2
