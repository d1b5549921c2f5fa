"""What the two runs' numbers say, in words that are computed from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from env import N_ACTIONS

Values = npt.NDArray[np.float64]
History = Mapping[str, Values]

SOURCES = {"from-420": ("policy entropy", "policy_entropy"), "from-583": ("executed entropy", "entropy")}
"""What the tuner of each run reads, in words and as a column of the history."""
_LEVELS = ("policy_entropy", "entropy", "conditional_entropy", "gate_rate", "alpha", "tau", "episode_return")
_NEAR = 0.2
"""Nats within which an entropy counts as being at the target: about its noise from step to step."""
_FAR = 0.5
"""Nats below the target that count as far below."""
_MOVED = 1.1
"""α and τ count as having moved if they changed by more than this factor."""


def figures(histories: Mapping[str, History]) -> dict[str, Any]:
    """The numbers behind the sentences, run by run; `mean_…` and `error_…` are over the last third of the steps."""
    return {run: _figures_of(history) for run, history in histories.items()}


def _figures_of(history: History) -> dict[str, Any]:
    n = len(history["step"])
    last_third = {name: history[name][n - max(1, n // 3) :] for name in history}
    target = float(history["target_entropy"][-1])
    numbers: dict[str, Any] = {"learner_steps": n, "target_entropy": _number(target)}
    for name in _LEVELS:
        numbers[f"first_{name}"] = _number(history[name][0])
        numbers[f"final_{name}"] = _number(history[name][-1])
        numbers[f"mean_{name}"] = _mean(last_third[name])
    for name in ("alpha", "tau"):
        numbers[f"lowest_{name}"], numbers[f"highest_{name}"] = (_number(f(history[name])) for f in (np.min, np.max))
    for name in ("policy_entropy", "entropy"):
        numbers[f"error_{name}"] = _mean(np.abs(last_third[name] - target))
    g = numbers["mean_gate_rate"]
    numbers["reachable_entropy"] = None if g is None else _number(reachable(g))
    return numbers | _hidden(history, target)


def _hidden(history: History, target: float) -> dict[str, Any]:
    """Where policy entropy is above the target and executed entropy far below it: there the two slots say opposite
    things, and what α and τ were multiplied by in just those steps shows which one the tuner listened to."""
    hidden = (history["policy_entropy"] > target) & (history["entropy"] < target - _FAR)
    factors = {
        f"hidden_factor_{name}": _number(math.exp(float(np.diff(np.log(history[name]))[hidden[1:]].sum())))
        for name in ("alpha", "tau")
    }
    return {"hidden_steps": int(hidden.sum()), **factors}


def reachable(gate_rate: float) -> float:
    """Largest executed entropy under a gate that holds with this rate whatever the policy says; nats.

    h(g) + (1 − g)·ln(K − 1), and ln K where the rate is so low that the policy can fill the Hold bin itself.
    """
    if gate_rate <= 1 / N_ACTIONS:
        return math.log(N_ACTIONS)
    binary = sum(-p * math.log(p) for p in (gate_rate, 1 - gate_rate) if p > 0)
    return binary + (1 - gate_rate) * math.log(N_ACTIONS - 1)


def sentences(numbers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The summary of `figures`, one line a statement."""
    lines: list[str] = []
    for run in numbers:
        lines += [*_run_sentences(run, numbers[run]), ""]
    return [*lines, *_comparison(list(numbers), *numbers.values())]


def _run_sentences(run: str, n: Mapping[str, Any]) -> list[str]:
    name, column = SOURCES[run]
    target = n["target_entropy"]
    lines = [
        f"{run}: the tuner reads {name}; target {target:.2f} nats, {n['learner_steps']} learner steps.",
        f"  All steps: α {_path(n, 'alpha')}, τ {_path(n, 'tau')}.",
        f"  Last third, means: policy {_shown(n['mean_policy_entropy'])}, executed {_shown(n['mean_entropy'])}, "
        f"executed given the state {_shown(n['mean_conditional_entropy'])} nats; "
        f"gate rate {_shown(n['mean_gate_rate'], '.0%')}; episode return {_shown(n['mean_episode_return'], '.0f')}.",
        f"  Last third, mean |H − T|: policy {_distance(n, 'policy_entropy')}, executed {_distance(n, 'entropy')}.",
    ]
    if n["hidden_steps"]:
        lines.append(
            f"  In {n['hidden_steps']} steps policy entropy was above the target while executed entropy was more than "
            f"{_FAR} nats below it; in these the tuner multiplied α by {n['hidden_factor_alpha']:.2g} and τ by "
            f"{n['hidden_factor_tau']:.2g}."
        )
    if n[f"error_{column}"] > _NEAR:
        lines.append(f"  So {name}, which this tuner steers, was not held at the target.")
    if n["mean_entropy"] < target - _NEAR:
        lines.append(
            f"  Executed entropy was below the target; a gate that holds at this rate whatever the policy says would "
            f"leave at most {_shown(n['reachable_entropy'])} nats."
        )
    return lines


def _comparison(runs: Sequence[str], first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    a, b = first["error_entropy"], second["error_entropy"]
    lines = [
        f"Executed entropy was {a:.2f} nats off the target in {runs[0]} and {b:.2f} in {runs[1]} (last third): "
        + (f"{runs[int(b < a)]} came closer." if abs(a - b) >= 0.005 else "as good as the same."),
    ]
    returns = first["mean_episode_return"], second["mean_episode_return"]
    if None not in returns:
        close = abs(returns[0] - returns[1]) < 0.5
        word = "they did alike" if close else f"{runs[int(returns[1] > returns[0])]} did better"
        lines.append(
            f"Mean episode return was {returns[0]:.0f} and {returns[1]:.0f}: {word}, "
            "in this one pair of runs with this seed."
        )
    return lines


def _path(n: Mapping[str, Any], name: str) -> str:
    first, final = n[f"first_{name}"], n[f"final_{name}"]
    word = "rose" if final > first * _MOVED else "fell" if final < first / _MOVED else "ended about where it began"
    between = f"between {n[f'lowest_{name}']:.2g} and {n[f'highest_{name}']:.2g}"
    return f"{word} ({first:.2g} → {final:.2g}, {between})"


def _distance(n: Mapping[str, Any], column: str) -> str:
    error = n[f"error_{column}"]
    return f"{error:.2f} ({'near' if error <= _NEAR else 'not near'} the target)"


def _number(value: float) -> float | None:
    return round(float(value), 6) if math.isfinite(value) else None


def _mean(values: Values) -> float | None:
    known = values[np.isfinite(values)]
    return _number(float(known.mean())) if len(known) else None


def _shown(value: float | None, pattern: str = ".2f") -> str:
    return "not known" if value is None else format(value, pattern)
