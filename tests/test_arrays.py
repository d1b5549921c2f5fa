"""What users hand in: every kind that is accepted, and a sentence for the rest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cotuned.client.arrays import as_actions, as_rows, row_entropies
from cotuned.wire.errors import InvalidActions


class TorchLike:
    """The part of a torch tensor's surface that is used, on a "GPU"."""

    def __init__(self, values: Any, dtype: str = "torch.int64") -> None:
        self.values, self.dtype, self.moved = np.asarray(values), dtype, False

    def detach(self) -> TorchLike:
        return self

    def cpu(self) -> TorchLike:
        self.moved = True
        return self

    def float(self) -> TorchLike:
        self.dtype = "torch.float32"
        return self

    def numpy(self) -> Any:
        assert self.moved
        assert self.dtype != "torch.bfloat16"  # NumPy has none, torch raises
        return self.values


class CupyLike:
    """The part of a CuPy array's surface that is used."""

    __cuda_array_interface__ = {"version": 3}  # noqa: RUF012

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def get(self) -> Any:
        return self.values


@pytest.mark.parametrize(
    "values",
    [
        [1, 2, 3],
        (1, 2, 3),
        np.array([1, 2, 3], np.uint8),
        np.array([1, 2, 3], np.int64),
        np.array([0, 1, 9, 2, 9, 3])[1::2],
        TorchLike([1, 2, 3]),
        CupyLike([1, 2, 3]),
    ],
)
def test_accepted_kinds(values: Any) -> None:
    result = as_actions(values, 11)
    assert result.shape == (3,)
    assert result.dtype.kind in "iu"
    if not isinstance(values, np.ndarray):
        assert result.tolist() == [1, 2, 3]


def test_an_empty_batch_is_one_of_no_actions() -> None:
    assert as_actions([], 11).size == 0


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([1.0, 2.0], "got dtype float64"),
        ([True, False], "got dtype bool"),
        (["hold"], "got dtype <U4"),
        (3, r"got shape \[\], expected \[n\].*wrap a single action"),
        ([[1], [2]], r"got shape \[2, 1\]"),
        ([[1, 2], [3]], "is no array"),
        ([0, -1], r"executed\[1\]: got -1, expected an action index from 0 to 10"),
        ([0, 11], r"executed\[1\]: got 11"),
        (np.array([0, 2**40]), "got 1099511627776"),
        (np.array([1, 2], dtype=object), "got Python objects"),
        (None, "got a NoneType"),
        ("hold", "got a str"),
        (iter([1, 2]), "got a list_iterator"),
        ({1, 2}, "got a set"),
        (np.ma.array([1, 2], mask=[0, 1]), "got a masked array"),
        (np.empty(0), "got dtype float64"),
        ([2**70], "beyond 64 bits"),
        (TorchLike([0.5], "torch.float32"), "got dtype float64"),
    ],
)
def test_the_rest_gets_a_sentence(values: Any, says: str) -> None:
    with pytest.raises(InvalidActions, match=says):
        as_actions(values, 11)


def test_rows_are_normalised_within_the_tolerance() -> None:
    rows = as_rows(np.full((2, 4), 0.25005, np.float32), 2, 4)
    assert rows.sum(axis=1) == pytest.approx([1, 1], abs=1e-15)
    assert as_rows(TorchLike(np.full((1, 2), 0.5, np.float32), "torch.bfloat16"), 1, 2).tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([[0.5, 0.5]], r"got shape \[1, 2\], expected \[2, 2\]"),
        ([[0.5, 0.5], [0.9, 0.2]], r"probs\[1\]: got a row that sums to 1.1"),
        ([[0.5, 0.5], [math.nan, 1]], r"probs\[1\]"),
        ([[1.5, -0.5], [1, 0]], r"probs\[0\].*not negative"),
        ([["a", "b"], ["c", "d"]], "got dtype <U1"),
    ],
)
def test_rows_that_are_no_probabilities(values: Any, says: str) -> None:
    with pytest.raises(InvalidActions, match=says):
        as_rows(values, 2, 2)


def test_row_entropies_in_closed_form() -> None:
    rows = np.array([[1, 0, 0, 0], [0.25] * 4, [0.5, 0.5, 0, 0]])
    result = row_entropies(rows)
    assert result[0] == 0.0
    assert math.copysign(1, result[0]) == 1
    assert result[1:] == pytest.approx([math.log(4), math.log(2)], abs=1e-15)
