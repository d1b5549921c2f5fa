"""The same training twice, tuned from slot 420 and from slot 583, and one picture of both.

    python examples/pendulum/demo.py --out out/demo

Starts the daemon, and for each run a learner and four actors, as processes of their own. Both runs train at the same
time, with the same seeds, against the same daemon. Writes demo.png, demo.json and summary.txt.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import numpy as np
from rich.console import Console
from rich.live import Live

from cotuned.client import DaemonUnreachable, LearnerClient
from processes import ChildDied, Children, free_endpoints
from table import ProgressFile, progress_line, progress_table

HERE = Path(__file__).parent
RUNS = ("from-420", "from-583")
ACTORS = 4
_READY_SECONDS = 20.0
_LINE_SECONDS = 10.0


def start_daemon(children: Children) -> str:
    """Starts ``cotuned serve`` on free ports; returns its queries endpoint when it answers.

    Raises:
        ChildDied: it ended, or did not answer in time.
    """
    actions, queries, watch = free_endpoints(3)
    arguments = ["-m", "cotuned.service", "serve", "--config", HERE / "cotuned.yaml"]
    arguments += ["--state.directory", ""]  # each demo is a training of its own and begins at the initial α and τ
    arguments += ["--endpoints.actions", actions, "--endpoints.queries", queries, "--endpoints.watch", watch]
    children.start("daemon", arguments)
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        children.check(needed=["daemon"])
        with LearnerClient(queries, timeout=0.5) as client:
            try:
                client.status()
                return queries
            except DaemonUnreachable:
                continue
    raise ChildDied(f"the daemon did not answer at {queries} within {_READY_SECONDS:g} s")


def start_run(children: Children, run: str, daemon: str, out: Path, options: argparse.Namespace) -> None:
    """Starts one learner and its actors."""
    (endpoint,) = free_endpoints(1)
    common = ["--daemon", daemon, "--run", run, "--seed", str(options.seed)]
    learner = ["--bind", endpoint, "--actors", str(ACTORS), "--steps", str(options.steps)]
    children.start(_learner(run), [HERE / "learner.py", *common, *learner, "--out", out / f"{run}.npz"])
    for index in range(ACTORS):
        actor = ["--learner", endpoint, "--index", str(index)]
        children.start(f"{run}-actor-{index}", [HERE / "actor.py", *common, *actor])


def watch(children: Children, runs: Sequence[str], console: Console) -> None:
    """Shows the table until all learners have ended.

    Raises:
        ChildDied: at once, if any process failed.
    """
    files = {run: ProgressFile(children.output(_learner(run))) for run in runs}
    line_at = time.monotonic() + _LINE_SECONDS
    with Live(console=console, refresh_per_second=4) as live:
        while True:
            children.check(needed=["daemon"])
            ended = [children.has_ended(_learner(run)) for run in runs]
            for file in files.values():
                file.read()
            latest = {run: file.latest for run, file in files.items()}
            live.update(progress_table(runs, latest))
            if all(ended):
                return
            if not console.is_terminal and time.monotonic() >= line_at:
                line_at += _LINE_SECONDS
                for run in runs:
                    console.print(progress_line(run, latest[run]), soft_wrap=True)
            time.sleep(0.2)


def _learner(run: str) -> str:
    return f"{run}-learner"


def train(out: Path, options: argparse.Namespace, console: Console) -> None:
    """Both runs, from the daemon's start to its end."""
    with Children(out / "logs") as children:
        daemon = start_daemon(children)
        for run in RUNS:
            start_run(children, run, daemon, out, options)
        watch(children, RUNS, console)


def main() -> int:
    """Returns the exit code: 0, 1 if a process failed, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the results (%(default)s)")
    parser.add_argument("--steps", type=int, default=3500, help="learner steps of each run (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of both runs (%(default)s)")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _as_interrupt)
    console = Console()
    started = time.monotonic()
    try:
        train(options.out, options, console)
    except ChildDied as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; all processes were stopped", file=sys.stderr)
        return 130
    trained = time.monotonic() - started
    from picture import draw  # Matplotlib takes a second to load, so not before it is needed
    from summary import figures, sentences

    histories = {run: dict(np.load(options.out / f"{run}.npz")) for run in RUNS}
    draw(histories, options.out / "demo.png")
    runs = figures(histories)
    numbers = {"seed": options.seed, "training_seconds": round(trained, 1), "runs": runs}
    text = "\n".join(sentences(runs))
    (options.out / "demo.json").write_text(json.dumps(numbers, indent=2) + "\n", "utf-8")
    (options.out / "summary.txt").write_text(text + "\n", "utf-8")
    console.print(f"\n{text}", highlight=False, soft_wrap=True)
    wall = time.monotonic() - started
    console.print(f"\n{options.out / 'demo.png'} after {wall:.0f} s", highlight=False, soft_wrap=True)
    return 0


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
