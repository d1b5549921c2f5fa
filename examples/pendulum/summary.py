"""What the two runs' numbers say, in words that are computed from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from env import N_ACTIONS

History = Mapping[str, npt.NDArray[np.float64]]

_SOURCES = {"from-420": ("policy entropy", "policy_entropy"), "from-583": ("executed entropy", "entropy")}
_LEVELS = ("policy_entropy", "entropy", "conditional_entropy", "gate_rate", "alpha", "tau", "episode_return")
_NEAR = 0.2
"""Nats within which an entropy counts as being at the target: several times its noise from step to step."""
_MOVED = 1.1
"""α and τ count as having moved if they changed by more than this factor."""


def figures(histories: Mapping[str, History]) -> dict[str, Any]:
    """The numbers behind the sentences, run by run; `mean_…` and `error_…` are over the last third of the steps."""
    return {run: _figures_of(history) for run, history in histories.items()}


def _figures_of(history: History) -> dict[str, Any]:
    n = len(history["step"])
    last_third = {name: history[name][n - max(1, n // 3) :] for name in history}
    target = float(history["target_entropy"][-1])
    numbers: dict[str, Any] = {"learner_steps": n, "target_entropy": target}
    for name in _LEVELS:
        numbers[f"first_{name}"] = _number(history[name][0])
        numbers[f"final_{name}"] = _number(history[name][-1])
        numbers[f"mean_{name}"] = _mean(last_third[name])
    for name in ("policy_entropy", "entropy"):
        numbers[f"error_{name}"] = _mean(np.abs(last_third[name] - target))
    g = numbers["mean_gate_rate"]
    # Were the gate independent of the policy, no policy could bring the executed entropy above this.
    numbers["reachable_entropy"] = None if g is None else reachable(g)
    return numbers


def reachable(gate_rate: float) -> float:
    """Largest executed entropy under an independent gate of this rate: h(g) + (1 − g)·ln(K − 1), at most ln K; nats."""
    if gate_rate <= 1 / N_ACTIONS:
        return math.log(N_ACTIONS)
    binary = sum(-p * math.log(p) for p in (gate_rate, 1 - gate_rate) if p > 0)
    return binary + (1 - gate_rate) * math.log(N_ACTIONS - 1)


def sentences(histories: Mapping[str, History]) -> list[str]:
    """The summary, one line a statement."""
    numbers = figures(histories)
    lines = ["What is seen (means over the last third of the steps):"]
    for run in histories:
        lines += ["", *_run_sentences(run, numbers[run])]
    first, second = (numbers[run] for run in histories)
    return [*lines, "", *_comparison(list(histories), first, second)]


def _run_sentences(run: str, n: Mapping[str, Any]) -> list[str]:
    name, column = _SOURCES[run]
    off, target = n[f"error_{column}"], n["target_entropy"]
    verdict = "held near the target" if off <= _NEAR else "not held at the target"
    lines = [
        f"{run} steers by {name}, which was {verdict} {target:.2f}: {n[f'mean_{column}']:.2f} nats, "
        f"mean |H − T| {off:.2f}.",
        f"  policy {n['mean_policy_entropy']:.2f}, executed {n['mean_entropy']:.2f}, executed given the state "
        f"{n['mean_conditional_entropy']:.2f} nats; the gate overruled {n['mean_gate_rate']:.0%}; "
        f"mean return {_shown(n['mean_episode_return'], '.0f')}.",
        f"  α {_direction(n, 'alpha')}, τ {_direction(n, 'tau')}.",
    ]
    gap = n["mean_policy_entropy"] - n["mean_entropy"]
    if gap > _NEAR:
        lines.append(
            f"  The policy reads {gap:.2f} nats more than what is executed: the gate hides this from slot 420."
        )
    elif gap < -_NEAR:
        lines.append(
            f"  The executed histogram reads {-gap:.2f} nats more than the policy: it mixes states that want different "
            "actions, so it says little about exploration in any one state; E_s[H] does."
        )
    if n["error_entropy"] > _NEAR and n["mean_entropy"] < target:
        lines.append(
            f"  Executed entropy stayed below the target; a gate of this rate that held at random would allow at most "
            f"{n['reachable_entropy']:.2f} nats."
        )
    return lines


def _comparison(runs: Sequence[str], first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    a, b = first["error_entropy"], second["error_entropy"]
    closer = runs[1] if b < a else runs[0]
    lines = [
        f"Executed entropy was off the target by {a:.2f} nats in {runs[0]} and by {b:.2f} in {runs[1]}: "
        f"{closer} came closer."
    ]
    returns = (first["mean_episode_return"], second["mean_episode_return"])
    if None not in returns:
        better = runs[int(returns[1] > returns[0])]
        lines.append(
            f"Mean return was {returns[0]:.0f} in {runs[0]} and {returns[1]:.0f} in {runs[1]}: {better} did better at "
            "the task, in this one pair of runs with this seed."
        )
    return lines


def _direction(n: Mapping[str, Any], name: str) -> str:
    first, final = n[f"first_{name}"], n[f"final_{name}"]
    word = "rose" if final > first * _MOVED else "fell" if final < first / _MOVED else "stayed about where it was"
    return f"{word} ({first:.3g} → {final:.3g})"


def _number(value: float) -> float | None:
    return round(float(value), 6) if math.isfinite(value) else None


def _mean(values: npt.NDArray[np.float64]) -> float | None:
    known = values[np.isfinite(values)]
    return round(float(known.mean()), 6) if len(known) else None


def _shown(value: float | None, pattern: str) -> str:
    return "not known" if value is None else format(value, pattern)
