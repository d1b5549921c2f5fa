"""A report as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from ..wire.slots import Counter, Slot
from .report import Report, RunReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_GAUGES: dict[str, tuple[Slot, Counter | None, str]] = {
    "executed_entropy_nats": (
        Slot.RL_ACTION_ENTROPY_EMA_INDEX,
        Counter.OBSERVATIONS,
        "EMA of the entropy of the executed actions, slot 583.",
    ),
    "policy_entropy_nats": (
        Slot.RL_POLICY_ENTROPY_EMA_INDEX,
        Counter.POLICY_OBSERVATIONS,
        "EMA of the policy entropy that the learner reports, slot 420.",
    ),
    "conditional_entropy_nats": (
        Slot.CONDITIONAL_ENTROPY_EMA,
        Counter.CONDITIONAL_OBSERVATIONS,
        "EMA of the mean entropy of the reported post-gate rows.",
    ),
    "gate_rate": (Slot.GATE_RATE_EMA, Counter.GATE_OBSERVATIONS, "EMA of the share of actions that the gates changed."),
    "target_entropy_nats": (Slot.EFFECTIVE_TARGET, Counter.UPDATES, "What the last update steered to."),
    "alpha": (Slot.ALPHA, None, "SAC entropy coefficient."),
    "tau": (Slot.TAU, None, "Softmax temperature of the distillation target."),
}
"""Name: slot, the counter that says whether it was ever written, and help."""

_COUNTERS: dict[str, tuple[Counter, str]] = {
    "observations": (Counter.OBSERVATIONS, "Observations of executed actions."),
    "updates": (Counter.UPDATES, "Updates of alpha and tau."),
    "batches_rejected": (Counter.BATCHES_REJECTED, "Batches that were rejected."),
}

_PHASES = {
    "batches": ((Counter.BATCHES_TRAIN, "train"), (Counter.BATCHES_PREFILL, "prefill")),
    "actions": ((Counter.ACTIONS_TRAIN, "train"), (Counter.ACTIONS_PREFILL, "prefill")),
}

_TALLY = {
    "malformed": ("frames_malformed", "Frames that were no batch."),
    "unknown": ("frames_unknown", "Batches of streams that are not open."),
    "queries": ("queries", "Control messages answered."),
    "undeliverable": ("answers_undeliverable", "Answers whose asker was gone."),
}


def exposition(report: Report) -> bytes:
    """The report in Prometheus's text format."""
    registry = CollectorRegistry()  # one of its own for each scrape: nothing is global
    registry.register(_OfReport(report))
    return generate_latest(registry)


class _OfReport(Collector):
    def __init__(self, report: Report) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        report = self._report
        about = {"version": version("cotuned"), "device": report.device, "n_actions": str(report.n_actions)}
        yield InfoMetricFamily("cotuned", "The daemon.", about)
        yield GaugeMetricFamily("cotuned_ready", "1 if it takes new work.", float(not report.troubles))
        yield GaugeMetricFamily("cotuned_uptime_seconds", "Seconds since the start.", report.uptime)
        for name, (metric, text) in _TALLY.items():
            yield CounterMetricFamily(f"cotuned_{metric}", text, getattr(report.tally, name))
        yield from self._of_runs(report.runs)

    def _of_runs(self, runs: list[RunReport]) -> Iterator[Metric]:
        for name, (slot, seen, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"cotuned_{name}", text, labels=["run"])
            for run in runs:
                if seen is None or run.row.counters[seen]:
                    gauge.add_metric([run.name], _shortest(run.row.slots[slot]))
            yield gauge
        for name, (counter, text) in _COUNTERS.items():
            yield self._counter(name, text, ((run, (), run.row.counters[counter]) for run in runs))
        for name, phases in _PHASES.items():
            values = ((run, (phase,), run.row.counters[counter]) for run in runs for counter, phase in phases)
            yield self._counter(name, f"Accepted {name}.", values, "phase")
        for name in ("batches_duplicate", "batches_early"):
            yield self._counter(
                name, "Batches that came twice or too early.", ((r, (), getattr(r, name)) for r in runs)
            )
        actors = GaugeMetricFamily("cotuned_actors", "Open streams.", labels=["run"])
        for run in runs:
            actors.add_metric([run.name], run.actors)
        yield actors

    def _counter(self, name: str, text: str, values: Any, *labels: str) -> CounterMetricFamily:
        family = CounterMetricFamily(f"cotuned_{name}", text, labels=["run", *labels])
        for run, more, value in values:
            family.add_metric([run.name, *more], int(value))
        return family


def _shortest(value: np.float32) -> float:
    """0.2 for the float32 nearest to 0.2, and not 0.20000000298023224."""
    return float(str(value))
