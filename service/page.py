"""The page at /: one line a run, for people."""

from __future__ import annotations

from html import escape

from ..wire.slots import Counter, Slot
from .report import Report, RunReport

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem;color:#222}table{border-collapse:collapse}"
    "td,th{padding:.25rem .9rem;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child"
    "{text-align:left}.trouble{color:#a00}@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}"
    "td,th{border-color:#333}}"
)
_COLUMNS = ("run", "executed H", "policy H", "E_s[H]", "gate rate", "target", "α", "τ", "observations", "updates")
_MORE_COLUMNS = ("batches", "rejected", "actors")


def html(report: Report) -> str:
    """The whole page; it loads itself again every two seconds."""
    head = "".join(f"<th>{escape(name)}</th>" for name in (*_COLUMNS, *_MORE_COLUMNS))
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _cells(run))}</tr>" for run in report.runs)
    troubles = "".join(f'<p class="trouble">{escape(trouble)}</p>' for trouble in report.troubles)
    about = f"{report.device} · K = {report.n_actions} · {report.actors} actors · up {report.uptime:.0f} s"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="2">'
        f'<meta name="viewport" content="width=device-width"><title>cotuned</title><style>{_STYLE}</style>'
        f"<h1>cotuned</h1><p>{escape(about)}</p>{troubles}"
        f"<table><tr>{head}</tr>{rows}</table><p>Entropies in nats. <a href=/metrics>metrics</a></p></html>"
    )


def _cells(run: RunReport) -> list[str]:
    slots, counters = run.row.slots, run.row.counters

    def shown(slot: Slot, seen: Counter) -> str:
        value = run.row.if_seen(slot, seen)
        return "–" if value is None else f"{value:.3f}"

    batches = counters[Counter.BATCHES_TRAIN] + counters[Counter.BATCHES_PREFILL]
    numbers = (counters[Counter.OBSERVATIONS], counters[Counter.UPDATES], batches, counters[Counter.BATCHES_REJECTED])
    return [
        run.name,
        shown(Slot.RL_ACTION_ENTROPY_EMA_INDEX, Counter.OBSERVATIONS),
        shown(Slot.RL_POLICY_ENTROPY_EMA_INDEX, Counter.POLICY_OBSERVATIONS),
        shown(Slot.CONDITIONAL_ENTROPY_EMA, Counter.CONDITIONAL_OBSERVATIONS),
        shown(Slot.GATE_RATE_EMA, Counter.GATE_OBSERVATIONS),
        shown(Slot.EFFECTIVE_TARGET, Counter.UPDATES),
        f"{slots[Slot.ALPHA]:.4g}",
        f"{slots[Slot.TAU]:.4g}",
        *(f"{int(number):,}" for number in numbers),
        str(run.actors),
    ]
