"""The picture: what both runs did, over learner steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from env import N_ACTIONS
from summary import SOURCES

History = Mapping[str, npt.NDArray[np.float64]]

_COLOURS = ("#c0504d", "#2f6db5")
"""One colour a run, in order."""
_ENTROPIES = (
    ("policy_entropy", "policy, before the gate (slot 420)", "#e08a1e"),
    ("entropy", "executed, behind the gate (slot 583)", "#1b4f8a"),
    ("conditional_entropy", "executed given the state, $E_s[H]$", "#5aa02c"),
)
_SMOOTHING = 25
"""Learner steps averaged into the strong lines; the faint ones are the values as they came."""


def draw(histories: Mapping[str, History], file: Path) -> None:
    """Writes the picture of both runs to `file`."""
    figure, axes = plt.subplot_mosaic(
        [["first", "first", "second", "second"], ["alpha", "tau", "gate_rate", "episode_return"]],
        figsize=(15, 8.4),
        height_ratios=(1.35, 1),
        layout="constrained",
    )
    for place, (run, history) in zip(("first", "second"), histories.items(), strict=True):
        _draw_entropies(axes[place], run, history)
    for name, title in (
        ("alpha", "α, entropy coefficient"),
        ("tau", "τ, distillation temperature"),
        ("gate_rate", "gate rate, share of actions held"),
        ("episode_return", "return, mean of the last 64 episodes"),
    ):
        _draw_both(axes[name], histories, name, title)
    for name in ("alpha", "tau"):
        axes[name].set_yscale("log")
        axes[name].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes[name].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes[name].yaxis.set_minor_formatter(NullFormatter())
    axes["gate_rate"].set_ylim(0, 1)
    handles, labels = axes["first"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(
        "Pendulum-v1, 11 torques, a confidence gate that holds: one training, same seeds, tuned from two slots"
    )
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _draw_entropies(axes: Axes, run: str, history: History) -> None:
    for name, label, colour in _ENTROPIES:
        _draw_line(axes, history["step"], history[name], label, colour)
    axes.axhline(float(history["target_entropy"][-1]), color="black", linestyle="--", label="target")
    axes.axhline(math.log(N_ACTIONS), color="grey", linestyle=":", label="ln 11, the most there is")
    axes.set(title=f"{run}: the tuner reads {SOURCES[run][0]}", ylim=(-0.05, 2.5), xlabel="learner step", ylabel="nats")
    axes.grid(alpha=0.25)


def _draw_both(axes: Axes, histories: Mapping[str, History], name: str, title: str) -> None:
    for (run, history), colour in zip(histories.items(), _COLOURS, strict=True):
        _draw_line(axes, history["step"], history[name], run, colour)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("learner step")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def _draw_line(
    axes: Axes, steps: npt.NDArray[np.float64], values: npt.NDArray[np.float64], label: str, colour: str
) -> None:
    axes.plot(steps, values, color=colour, alpha=0.2, linewidth=0.8)
    axes.plot(steps, smooth(values), color=colour, linewidth=1.8, label=label)


def smooth(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Centred mean over `_SMOOTHING` steps; near the ends over what there is, and NaN where nothing is known."""
    window = np.ones(_SMOOTHING)
    known = np.isfinite(values)
    total = np.convolve(np.where(known, values, 0.0), window, mode="full")
    count = np.convolve(known.astype(np.float64), window, mode="full")
    start = (_SMOOTHING - 1) // 2
    middle = slice(start, start + len(values))
    return np.where(known, total[middle] / np.maximum(count[middle], 1), np.nan)
