"""Gates between the policy and the environment, so that what is pushed is what came out of the last one.

A gate looks at the proposed actions and at one signal of its own (a confidence a row, a legality mask a row) and
overrules some of them. `GateChain` applies gates in order and keeps account of who overruled what::

    gates = GateChain([ConfidenceGate(0.3, hold=5), MaskGate(fallback=5)])
    outcome = gates(proposed, probs, confidence=confidence, mask=legal)
    env.step(outcome.executed)
    actor.push(outcome.executed, proposed=proposed, probs=outcome.probs)

Where the policy's rows are given, each gate also turns them into *post-gate* rows: the distribution from which the
executed action was drawn, given the state. Their mean entropy is E_s[H], which a marginal histogram cannot show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from .arrays import FloatArray, IntArray, as_rows

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class GateOutcome:
    """What one gate did to one batch of n rows."""

    executed: IntArray
    """[n] action indices behind the gate."""
    overruled: BoolArray
    """[n] whether the gate changed the row's action."""
    probs: FloatArray | None
    """[n, K] rows behind the gate; None if none went in."""


class Gate(Protocol):
    """Anything with a name that maps (actions, rows, signal) to a `GateOutcome`."""

    @property
    def name(self) -> str:
        """The keyword under which `GateChain` takes this gate's signal."""
        ...

    def __call__(self, proposed: IntArray, probs: FloatArray | None, signal: Any) -> GateOutcome:
        """Applies the gate to [n] actions and, where given, [n, K] rows."""
        ...


class ConfidenceGate:
    """Holds every row whose confidence is below a threshold.

    Take the confidence from something other than max π: with max π a higher τ means more Holds, so the response of
    executed entropy to τ turns its sign.

    Args:
        threshold: rows with ``confidence < threshold`` are overruled; NaN confidence is overruled too.
        hold: index of the Hold action.
        name: keyword of its signal in a `GateChain`.
    """

    def __init__(self, threshold: float, hold: int, name: str = "confidence") -> None:
        if not np.isfinite(threshold):
            raise ValueError(f"threshold: got {threshold}, expected a finite number")
        if hold < 0:
            raise ValueError(f"hold: got {hold}, expected an action index from 0")
        self.threshold = float(threshold)
        self.hold = int(hold)
        self.name = name

    def __call__(self, proposed: IntArray, probs: FloatArray | None, signal: Any) -> GateOutcome:
        """`signal`: confidence, float [n]."""
        confidence = np.asarray(signal, dtype=np.float64)
        if confidence.shape != proposed.shape:
            raise ValueError(f"{self.name}: got shape {list(confidence.shape)}, expected {list(proposed.shape)}")
        held = ~(confidence >= self.threshold)  # NaN is no confidence
        executed = np.where(held, self.hold, proposed)
        rows = None
        if probs is not None:
            _check_action_exists(self.hold, "hold", probs.shape[1])
            rows = probs.copy()
            rows[held] = 0.0
            rows[held, self.hold] = 1.0
        return GateOutcome(executed, cast(BoolArray, executed != proposed), rows)


class MaskGate:
    """Replaces illegal actions by a fallback action.

    Args:
        fallback: index of the action taken instead; it must be legal in every row where it is needed.
        name: keyword of its signal in a `GateChain`.
    """

    def __init__(self, fallback: int, name: str = "mask") -> None:
        if fallback < 0:
            raise ValueError(f"fallback: got {fallback}, expected an action index from 0")
        self.fallback = int(fallback)
        self.name = name

    def __call__(self, proposed: IntArray, probs: FloatArray | None, signal: Any) -> GateOutcome:
        """`signal`: legality, bool [n, K]; True is legal."""
        legal = np.asarray(signal)
        if legal.dtype != np.bool_ and not (legal.dtype.kind in "iu" and ((legal == 0) | (legal == 1)).all()):
            raise ValueError(f"{self.name}: got dtype {legal.dtype}, expected bools or 0 and 1; True is legal")
        legal = legal.astype(np.bool_)
        if legal.ndim != 2 or legal.shape[0] != proposed.shape[0]:
            raise ValueError(f"{self.name}: got shape {list(legal.shape)}, expected [{proposed.shape[0]}, K]")
        _check_action_exists(self.fallback, "fallback", legal.shape[1])
        if proposed.size and not 0 <= int(proposed.min()) <= int(proposed.max()) < legal.shape[1]:
            raise ValueError(
                f"proposed: got indices from {int(proposed.min())} to {int(proposed.max())}, "
                f"expected 0 to {legal.shape[1] - 1}, the columns of the mask"
            )
        illegal = ~np.take_along_axis(legal, proposed[:, None].astype(np.intp), axis=1)[:, 0]
        # A row's mass may leak to an illegal fallback even where the sample itself was legal.
        needs_fallback = illegal if probs is None else illegal | ((probs > 0) & ~legal).any(axis=1)
        stuck = needs_fallback & ~legal[:, self.fallback]
        if stuck.any():
            raise ValueError(
                f"{self.name}: the fallback action {self.fallback} is itself illegal in row "
                f"{int(np.flatnonzero(stuck)[0])}; choose a fallback that is always legal"
            )
        executed = np.where(illegal, self.fallback, proposed)
        rows = None
        if probs is not None:
            if probs.shape != legal.shape:
                raise ValueError(f"probs: got shape {list(probs.shape)}, expected the mask's {list(legal.shape)}")
            rows = np.where(legal, probs, 0.0)
            rows[:, self.fallback] += np.where(legal, 0.0, probs).sum(axis=1)
        return GateOutcome(executed, illegal, rows)


@dataclass(frozen=True, slots=True)
class ChainOutcome:
    """What a chain of gates did to one batch of n rows."""

    executed: IntArray
    """[n] action indices behind the last gate: what the environment gets and what is pushed."""
    overruled_by: npt.NDArray[np.int64]
    """[n] place in `gates` of the gate that set the executed action; −1 where the proposed action passed."""
    probs: FloatArray | None
    """[n, K] rows behind the last gate; None if none went in."""
    gates: tuple[str, ...]
    """Names of the gates, in order."""


class GateChain:
    """Gates applied one behind the other; each sees what the one before let through.

    Args:
        gates: in order; their names must differ.
    """

    def __init__(self, gates: Sequence[Gate]) -> None:
        self.gates = tuple(gates)
        self.names = tuple(gate.name for gate in self.gates)
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"gates: got the names {list(self.names)}, expected each name once; pass name=…")

    def __call__(self, proposed: Any, probs: Any = None, **signals: Any) -> ChainOutcome:
        """Applies the gates.

        Args:
            proposed: action indices, int [n].
            probs: the policy's rows, float [n, K], or None.
            signals: one keyword for each gate, under the gate's name.

        Raises:
            ValueError: a signal is missing or unknown, or a gate cannot use what it got.
        """
        if set(signals) != set(self.names):
            raise ValueError(f"signals: got {sorted(signals)}, expected one for each gate: {sorted(self.names)}")
        executed = np.asarray(proposed)
        if executed.ndim != 1 or (executed.size and executed.dtype.kind not in "iu"):
            raise ValueError(f"proposed: got {executed.dtype} {list(executed.shape)}, expected integer indices [n]")
        executed = executed.astype(np.int64)
        rows = None
        if probs is not None:
            shape = np.shape(probs)
            rows = as_rows(probs, executed.shape[0], shape[1] if len(shape) == 2 else 0)
        overruled_by = np.full(executed.shape, -1, dtype=np.int64)
        original = executed
        for place, gate in enumerate(self.gates):
            outcome = gate(executed, rows, signals[gate.name])
            overruled_by[outcome.overruled] = place
            executed, rows = outcome.executed, outcome.probs
        overruled_by[executed == original] = -1  # overruled and put back again is not overruled
        return ChainOutcome(executed, overruled_by, rows, self.names)


def _check_action_exists(action: int, what: str, n_actions: int) -> None:
    if action >= n_actions:
        raise ValueError(f"{what}: got {action}, expected an action index below K = {n_actions}")
