"""What durable state costs: the same daemon with state on and off, side by side, in turns.

python benchmarks/bench_state.py [SECONDS OF EACH PART]

Two numbers of each: the median time of a `cotune` (with state on it waits for a commit), and the batches of 64 actions
that one `ActorClient` gets counted in a second, `flush` included. Checked: every batch is counted.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml

from cotuned.client import ActorClient, LearnerClient

ROUNDS = 5


def start(folder: Path, directory: str) -> tuple[subprocess.Popen[str], str]:
    """A daemon on free ports; returns it and its queries endpoint once it is ready."""
    folder.mkdir()
    file = folder / "cotuned.yaml"
    endpoints = dict.fromkeys(("actions", "queries", "watch"), "tcp://127.0.0.1:0")
    file.write_text(yaml.safe_dump({"device": "cpu", "endpoints": endpoints, "state": {"directory": directory}}))
    command = [sys.executable, "-m", "cotuned.service", "serve", "--config", str(file)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if '"ready"' in line:
            return process, yaml.safe_load(line)["endpoints"]["queries"]
    raise SystemExit("the daemon did not start")


def cotunes(endpoint: str, seconds: float) -> list[float]:
    """Seconds that each `cotune` of a new step took, while nothing else is asked."""
    taken: list[float] = []
    with LearnerClient(endpoint) as learner:
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            learner.cotune(len(taken))
            taken.append(time.perf_counter() - began)
    return taken


def pushes(endpoint: str, seconds: float) -> float:
    """Batches a second from one actor."""
    batch = (np.arange(64) % 11).astype(np.uint8)
    with LearnerClient(endpoint) as learner, ActorClient(endpoint, timeout=30) as actor:
        learner.cotune(0)
        before, n = learner.stats().batches, 0
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            for _ in range(256):
                actor.push(batch)
            n += 256
        actor.flush()
        taken = time.perf_counter() - began
        assert learner.stats().batches == before + n
    return n / taken


def main() -> None:
    """Prints one line a measurement."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
    with tempfile.TemporaryDirectory(prefix="cotuned-bench-", dir=".") as name:
        folder = Path(name)
        daemons = {
            "off": start(folder / "off", ""),
            "on": start(folder / "on", str(folder / "on" / "state")),
        }
        try:
            asked: dict[str, list[float]] = {"off": [], "on": []}
            pushed: dict[str, list[float]] = {"off": [], "on": []}
            for _ in range(ROUNDS):
                for state, (_, endpoint) in daemons.items():
                    asked[state] += cotunes(endpoint, seconds / ROUNDS)
                    pushed[state].append(pushes(endpoint, seconds))
        finally:
            for process, _ in daemons.values():
                process.terminate()
                process.wait(10)
    for state, times in asked.items():
        p99 = statistics.quantiles(times, n=100)[98]
        print(f"cotune, state {state:3}: p50 {statistics.median(times) * 1e6:6.0f} µs, p99 {p99 * 1e6:6.0f} µs")
    for state, rates in pushed.items():
        print(f"pushing, state {state:3}: {statistics.median(rates) / 1e3:6.1f} k batches/s (median of {ROUNDS})")
    print(f"pushing, on / off: {statistics.median(pushed['on']) / statistics.median(pushed['off']):.3f}")


if __name__ == "__main__":
    main()
