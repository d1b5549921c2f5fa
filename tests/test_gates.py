"""Gates: what comes out of the last one, who overruled what, and the rows behind them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cotuned.client import ConfidenceGate, Gate, GateChain, MaskGate

HOLD = 5
UNIFORM = np.full((4, 11), 1 / 11)


def test_a_confidence_gate_holds_the_unsure() -> None:
    chain = GateChain([ConfidenceGate(0.3, HOLD)])
    outcome = chain([1, HOLD, 3, 4], UNIFORM, confidence=[0.1, 0.1, 0.3, math.nan])
    assert outcome.executed.tolist() == [HOLD, HOLD, 3, HOLD]
    assert outcome.overruled_by.tolist() == [0, -1, -1, 0]  # Hold that was proposed is not overruled
    assert outcome.gates == ("confidence",)
    assert outcome.probs is not None
    assert outcome.probs[1].tolist() == np.eye(11)[HOLD].tolist()  # but its row is Hold whatever had been drawn
    assert outcome.probs[2] == pytest.approx(UNIFORM[2])


def test_a_mask_gate_moves_the_mass_of_illegal_actions() -> None:
    legal = np.ones((2, 4), bool)
    legal[0, 1] = legal[0, 2] = False
    outcome = GateChain([MaskGate(fallback=0)])([1, 1], np.full((2, 4), 0.25), mask=legal)
    assert outcome.executed.tolist() == [0, 1]
    assert outcome.overruled_by.tolist() == [0, -1]
    assert outcome.probs is not None
    assert outcome.probs.tolist() == [[0.75, 0, 0, 0.25], [0.25] * 4]


def test_a_chain_names_the_gate_that_set_the_action() -> None:
    chain = GateChain([ConfidenceGate(0.5, hold=2), MaskGate(fallback=0)])
    legal = np.array([[1, 1, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1]], bool)
    outcome = chain([1, 3, 1, 1], confidence=[0.1, 0.9, 0.1, 0.9], mask=legal)
    assert outcome.executed.tolist() == [0, 3, 2, 1]
    assert [(-1, *range(2))[i + 1] for i in outcome.overruled_by] == [1, -1, 0, -1]
    assert outcome.probs is None


def test_overruled_and_put_back_is_not_overruled() -> None:
    chain = GateChain([ConfidenceGate(0.5, hold=2), MaskGate(fallback=0)])
    outcome = chain([0], confidence=[0.1], mask=np.array([[1, 1, 0, 1]], bool))
    assert outcome.executed.tolist() == [0]
    assert outcome.overruled_by.tolist() == [-1]


def test_the_arguments_are_left_alone() -> None:
    proposed, probs = np.array([1, 2, 3, 4]), UNIFORM.copy()
    GateChain([ConfidenceGate(0.5, HOLD)])(proposed, probs, confidence=np.zeros(4))
    assert proposed.tolist() == [1, 2, 3, 4]
    assert (probs == UNIFORM).all()


def test_a_gate_of_ones_own_fits_in() -> None:
    class Never:
        name = "never"

        def __call__(self, proposed: Any, probs: Any, signal: Any) -> Any:
            from cotuned.client.gates import GateOutcome

            return GateOutcome(proposed, np.zeros(proposed.shape, bool), probs)

    gate: Gate = Never()
    assert GateChain([gate])([3], never=None).executed.tolist() == [3]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ConfidenceGate(math.nan, 5), "threshold: got nan"),
        (lambda: ConfidenceGate(0.3, -1), "hold: got -1"),
        (lambda: MaskGate(-1), "fallback: got -1"),
        (lambda: GateChain([MaskGate(0), MaskGate(1)]), "each name once"),
        (lambda: GateChain([ConfidenceGate(0.3, 5)])([1]), "signals: got"),
        (lambda: GateChain([ConfidenceGate(0.3, 5)])([1], confidence=[1], other=1), "signals: got"),
        (lambda: GateChain([ConfidenceGate(0.3, 5)])([1], confidence=[1, 1]), r"got shape \[2\], expected \[1\]"),
        (lambda: GateChain([ConfidenceGate(0.3, 11)])([1], [[0.5, 0.5]], confidence=[0]), "below K = 2"),
        (lambda: GateChain([MaskGate(0)])([1], mask=[True, True]), r"got shape \[2\]"),
        (lambda: GateChain([MaskGate(0)])([2], mask=[[True, True]]), "expected 0 to 1"),
        (lambda: GateChain([MaskGate(0)])([1], mask=[[False, False]]), "is itself illegal in row 0"),
        (lambda: GateChain([MaskGate(0)])([1], [[0.5, 0.5]], mask=[[False, True]]), "is itself illegal in row 0"),
        (lambda: GateChain([MaskGate(2)])([1], mask=[[False, True]]), "fallback: got 2"),
        (lambda: GateChain([MaskGate(0)])([1], [[1.0]], mask=[[True, True]]), r"probs: got shape \[1, 1\]"),
        (lambda: GateChain([MaskGate(0)])([1.5], mask=[[True, True]]), "proposed: got float64"),
        (lambda: GateChain([MaskGate(0)])([1], [1.0], mask=[[True, True]]), r"probs: got shape \[1\]"),
    ],
)
def test_misuse_gets_a_sentence(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize(
    ("mask", "probs", "says"),
    [
        ([[math.nan, 1.0]], None, "mask: got dtype float64, expected bools or 0 and 1"),
        ([[2, 1]], None, "mask: got dtype int64"),
        ([[1, 1]], [[0.5, -0.5]], "not negative"),
        ([[1, 1]], [[2.0, 0.5]], "sums to 2.5"),
    ],
)
def test_what_would_quietly_let_everything_pass_is_refused(mask: Any, probs: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        GateChain([MaskGate(0)])([1], probs, mask=mask)
