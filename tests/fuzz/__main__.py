"""make fuzz: python -m tests.fuzz [--inputs N] [--seed S] [--json FILE]"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.daemon_process import DaemonProcess

from .inputs import Inputs
from .target import SETTINGS, Target, run, wait_for_drain

MOST_GROWTH = 8.0
"""MiB that the daemon may grow after the first tenth of the inputs."""


def main() -> int:
    """Exit code 0 if the daemon lived, answered, did not grow, and the guarded run did not change."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Throws bad input at a real daemon.")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=583, help="the same seed sends the same (%(default)s)")
    parser.add_argument("--json", type=Path, default=Path("out/fuzz.json"), help="where the table goes as JSON")
    arguments = parser.parse_args()
    begun, wrong, memory = time.monotonic(), "", [0.0]
    with tempfile.TemporaryDirectory(prefix="cotuned-fuzz-") as folder:
        daemon = DaemonProcess(Path(folder), **SETTINGS)
        target = Target(daemon)
        try:
            every = max(arguments.inputs // 20, 1)
            memory = run(target, Inputs(arguments.seed), arguments.inputs, every, random.Random(arguments.seed))
            wait_for_drain(target)
            target.check()
        except (AssertionError, OSError, TimeoutError) as error:
            wrong = f"{type(error).__name__}: {error}"
        crashes = int(daemon.process.poll() is not None)
        target.close()
        code = daemon.terminate() if not crashes else daemon.process.returncode
    tenth = memory[min(2, len(memory) - 1)]
    growth = max(memory[2:] or memory) - tenth
    good = not wrong and not crashes and code == 0 and growth <= MOST_GROWTH
    table = Table("kind", "inputs", title=f"{sum(target.sent.values()):,} inputs in {time.monotonic() - begun:.0f} s")
    for kind, count in target.sent.most_common():
        table.add_row(kind, f"{count:,}")
    Console().print(table)
    refused = ", ".join(f"{code} {count:,}" for code, count in target.refused.most_common())
    print(f"answers {target.answered:,}; errors among them: {refused}")
    print(f"crashes {crashes}; bus changes {int('guarded' in wrong)}; exit code after SIGTERM {code}")
    print(f"memory {memory[0]:.1f} MiB at first, {tenth:.1f} after a tenth, {memory[-1]:.1f} at the end")
    print(f"seed {arguments.seed}: {'good' if good else 'NOT good: ' + (wrong or 'see above')}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "seed": arguments.seed,
        "date": time.strftime("%F"),
        "inputs": dict(target.sent),
        "refused": dict(target.refused),
        "crashes": crashes,
        "wrong": wrong,
        "memory_mib": memory,
    }
    arguments.json.write_text(json.dumps(content, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
