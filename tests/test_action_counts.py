"""`count_segments` in bit planes and by bincount, against counting one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotuned.kernels import action_counts
from cotuned.kernels.action_counts import BLOCK_ACTIONS, MOST_IN_PLANES, count_segments


def one_by_one(actions: np.ndarray, ends: np.ndarray, n_actions: int) -> np.ndarray:
    starts = [0, *ends.tolist()[:-1]]
    return np.array(
        [np.bincount(actions[a:b], minlength=n_actions) for a, b in zip(starts, ends.tolist(), strict=True)],
        dtype=np.int64,
    ).reshape(ends.size, n_actions)


@settings(deadline=None, max_examples=300)
@given(
    n_actions=st.integers(1, 40),
    lengths=st.lists(st.sampled_from([0, 1, 7, 8, 9, 63, 64, 65, 128]) | st.integers(0, 300), min_size=1, max_size=40),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(["u1", "<u2", "i4", "i8"]),
)
def test_segments_of_any_length(n_actions: int, lengths: list[int], seed: int, dtype: str) -> None:
    actions = np.random.default_rng(seed).integers(0, n_actions, sum(lengths)).astype(dtype)
    ends = np.cumsum(lengths)
    counts = count_segments(actions, ends, n_actions)
    assert counts.dtype == np.int64
    assert counts.tolist() == one_by_one(actions, ends, n_actions).tolist()


@pytest.mark.parametrize("n_actions", [2, 11, 16])
@pytest.mark.parametrize("size", [BLOCK_ACTIONS - 1, BLOCK_ACTIONS, BLOCK_ACTIONS + 1, 3 * BLOCK_ACTIONS + 77])
def test_segments_across_the_ends_of_blocks(n_actions: int, size: int) -> None:
    actions = np.random.default_rng(size).integers(0, n_actions, size).astype(np.uint8)
    for ends in ([size], [1, size - 1, size], [BLOCK_ACTIONS - 9, BLOCK_ACTIONS - 1, size], [0, 0, size, size]):
        cuts = np.array(ends)
        assert count_segments(actions, cuts, n_actions).tolist() == one_by_one(actions, cuts, n_actions).tolist()


def test_blocks_that_begin_and_end_with_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action_counts, "BLOCK_ACTIONS", 64)
    actions = np.random.default_rng(3).integers(0, 11, 640).astype(np.uint8)
    for width in (1, 16, 63, 64, 65, 128, 640):
        ends = np.append(np.arange(width, 640, width), 640)
        assert count_segments(actions, ends, 11).tolist() == one_by_one(actions, ends, 11).tolist()


@pytest.mark.skipif(MOST_IN_PLANES == 0, reason="NumPy 1 counts no bits")
def test_actions_that_may_not_be_written_are_counted() -> None:
    actions = np.frombuffer(bytes([3, 3, 15, 0]), np.uint8)
    assert count_segments(actions, np.array([4]), 16).tolist() == [[1, 0, 0, 2, *[0] * 11, 1]]
