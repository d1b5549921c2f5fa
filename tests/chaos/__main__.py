"""make chaos: tries every fault, prints the table, writes it as JSON. python -m tests.chaos [--json FILE] [NAME …]"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

from .faults import FAULTS
from .outcome import Outcome, print_table
from .scene import CannotTry, folder


def main() -> int:
    """Exit code 0 if every promise was kept under every fault that could be tried."""
    names = [fault.__name__ for fault in FAULTS]
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Tries the daemon under faults.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these of {', '.join(names)}")
    parser.add_argument("--json", type=Path, default=Path("out/chaos.json"), help="where the table goes as JSON")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(names)
    if unknown:
        parser.error(f"got {', '.join(sorted(unknown))}, known are {', '.join(names)}")
    outcomes = []
    for fault in FAULTS:
        if arguments.names and fault.__name__ not in arguments.names:
            continue
        outcome = Outcome((fault.__doc__ or fault.__name__).splitlines()[0])
        begun = time.monotonic()
        with folder() as path:
            try:
                fault(outcome, path)
            except CannotTry as error:
                outcome.skipped = str(error)
            except Exception as error:  # one scene that breaks does not end the others, and is no success
                outcome.wrong.append(f"{type(error).__name__}: {error}")
        word = (outcome.skipped and "not tried") or ("good" if outcome.good else "NOT good")
        print(f"{outcome.fault}: {word} ({time.monotonic() - begun:.1f} s)", file=sys.stderr, flush=True)
        outcomes.append(outcome)
    print_table(outcomes)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    machine = {"python": platform.python_version(), "machine": platform.platform(), "date": time.strftime("%F")}
    arguments.json.write_text(json.dumps({"machine": machine, "faults": [o.as_json() for o in outcomes]}, indent=1))
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
