"""What durable state costs: the same daemon with state on and off, side by side, in turns.

python benchmarks/bench_state.py [SECONDS OF EACH PART]

Three numbers of each: the median time of a `cotune` (with state on it waits for a commit), the batches of 64 actions
that one `ActorClient` gets counted in a second, `flush` included, and those that the daemon takes from one sender whose
frames were packed beforehand, until all of them are durable, while `STREAMS` streams are open. Checked: every batch is
counted.
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
from cotuned.wire import AcknowledgeAnswer, Batch, HelloAnswer, encode_batch
from cotuned.wire.connection import Connection
from cotuned.wire.messages import Acknowledge, Hello

ROUNDS = 7
STREAMS = 4096
FRAMES = 200_000


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


def open_streams(endpoint: str) -> None:
    """Opens `STREAMS` streams, as many actors would that then do nothing."""
    connection = Connection(endpoint, 10)
    for number in range(STREAMS):
        connection.ask(Hello(f"idle-{number}", number, 0), HelloAnswer)
    connection.close()


def ingest(endpoint: str) -> float:
    """Batches a second from frames that were packed beforehand, from the first one sent until all are durable."""
    actor = ActorClient(endpoint, timeout=60)
    executed = (np.arange(64) % 11).astype(np.uint8).tobytes()
    frames = [encode_batch(Batch(actor.stream, number, 0, 0, executed)) for number in range(1, FRAMES + 1)]
    push = actor._delivery._push
    began = time.perf_counter()
    for frame in frames:
        push.send(frame)
    answer = actor._connection.ask(Acknowledge(actor.stream, FRAMES, 30_000), AcknowledgeAnswer, 60)
    taken = time.perf_counter() - began
    assert answer.applied == answer.durable == FRAMES
    actor.abandon()
    return FRAMES / taken


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
            alone: dict[str, list[float]] = {"off": [], "on": []}
            asked: dict[str, list[float]] = {"off": [], "on": []}
            pushed: dict[str, list[float]] = {"off": [], "on": []}
            taken: dict[str, list[float]] = {"off": [], "on": []}
            for _ in range(ROUNDS):
                for state, (_, endpoint) in daemons.items():
                    alone[state] += cotunes(endpoint, seconds / ROUNDS)
            for _, endpoint in daemons.values():
                open_streams(endpoint)
            for _ in range(ROUNDS):
                for state, (_, endpoint) in daemons.items():
                    taken[state].append(ingest(endpoint))
                    asked[state] += cotunes(endpoint, seconds / ROUNDS)
                    pushed[state].append(pushes(endpoint, seconds))
        finally:
            for process, _ in daemons.values():
                process.terminate()
                process.wait(10)
    for what, all_times in (("no stream", alone), (f"{STREAMS} streams", asked)):
        for state, times in all_times.items():
            p50, p99 = statistics.median(times) * 1e6, statistics.quantiles(times, n=100)[98] * 1e6
            print(f"cotune, {what} open, state {state:3}: p50 {p50:6.0f} µs, p99 {p99:6.0f} µs")
    for what, rates in (("one ActorClient", pushed), ("packed frames", taken)):
        off, on = (statistics.median(rates[state]) for state in ("off", "on"))
        ratios = [one / other for one, other in zip(rates["on"], rates["off"], strict=True)]
        print(
            f"{what}: {off / 1e3:.1f} k batches/s off, {on / 1e3:.1f} k on; on / off {on / off:.3f}, "
            f"median of pairs {statistics.median(ratios):.3f} (lowest {min(ratios):.3f}, highest {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
