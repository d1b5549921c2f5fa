"""Every batch counts exactly once, from several processes, through a transport that breaks, over a restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cotuned.client import ActorClient, LearnerClient
from cotuned.service import read_record
from tests import pusher
from tests.daemon_process import DaemonProcess, wait_until
from tests.tcp_proxy import TcpProxy

ACTORS, BATCHES = 4, 10_000
BLEND, POOL = 0.4, 1024


def push_from_processes(daemon: DaemonProcess, actors: int, batches: int) -> None:
    script = str(Path(pusher.__file__))
    processes = [
        subprocess.Popen([sys.executable, script, daemon.endpoint, str(index), str(batches)]) for index in range(actors)
    ]
    assert [process.wait(100) for process in processes] == [0] * actors


def expected_ema(batches: list[np.ndarray]) -> tuple[float, int, np.ndarray]:
    """Slot 583 in float64, the observations, and what is left in the pool; from the design, not from the code."""
    ema, observations, pool = 0.0, 0, np.zeros(11)
    for batch in batches:
        pool += np.bincount(batch, minlength=11)
        if pool.sum() >= POOL:
            p = pool[pool > 0] / pool.sum()
            h = float(-(p * np.log(p)).sum())
            ema = h if ema == 0.0 else (1 - BLEND) * ema + BLEND * h
            observations, pool = observations + 1, np.zeros(11)
    return ema, observations, pool


@pytest.mark.slow
def test_four_processes_of_ten_thousand_batches(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    daemon = start_daemon(record=str(tmp_path / "record"))
    push_from_processes(daemon, ACTORS, BATCHES)
    with LearnerClient(daemon.endpoint) as learner:
        counted, entropy = learner.stats(), learner.entropy()
    daemon.terminate()

    pushed = [pusher.batches(index, BATCHES) for index in range(ACTORS)]
    assert counted.batches == ACTORS * BATCHES
    assert counted.batches_prefill == ACTORS * BATCHES // 10
    assert counted.actions == sum(batch.size for batches in pushed for batch in batches)
    assert counted.batches_rejected == 0

    order: list[np.ndarray] = []
    seen = [0] * ACTORS
    for recorded in read_record(tmp_path / "record"):
        index = int(recorded.actor.removeprefix("pusher-"))
        assert recorded.batch.sequence == seen[index] + 1  # each actor's in order, none missing, none twice
        order.append(pushed[index][seen[index]])
        assert recorded.batch.executed == order[-1].astype(np.uint8).tobytes()
        seen[index] += 1
    assert seen == [BATCHES] * ACTORS

    ema, observations, pool = expected_ema(order)
    assert counted.observations == observations
    assert counted.pooled_counts == pool.tolist()
    assert entropy.entropy == pytest.approx(ema, abs=1e-5)


def test_cut_connections_lose_nothing_and_count_nothing_twice(daemon: DaemonProcess) -> None:
    ports = {name: int(endpoint.rpartition(":")[2]) for name, endpoint in daemon.endpoints.items()}
    actions, queries = TcpProxy(ports["actions"]), TcpProxy(ports["queries"])
    batches = pusher.batches(1, 6000)
    with ActorClient(
        f"tcp://127.0.0.1:{queries.port}", actions_endpoint=f"tcp://127.0.0.1:{actions.port}", timeout=30, window=512
    ) as actor:
        for number, batch in enumerate(batches, start=1):
            actor.push(batch)
            if number % 1500 == 0:
                actions.cut()
                if number % 3000 == 0:
                    queries.cut()
        actor.flush()
    for proxy in (actions, queries):
        proxy.close()
    with LearnerClient(daemon.endpoint) as learner:
        counted, entropy = learner.stats(), learner.entropy()
    ema, observations, pool = expected_ema(batches)
    assert counted.batches == len(batches)
    assert (counted.observations, counted.pooled_counts) == (observations, pool.tolist())
    assert entropy.entropy == pytest.approx(ema, abs=1e-5)


def test_without_state_a_killed_daemon_gets_what_it_had_not_confirmed(
    start_daemon: Callable[..., DaemonProcess],
) -> None:
    """The new daemon counts from the first batch that the old had not confirmed."""
    daemon = start_daemon(state={"directory": None})
    assert daemon.events("ready")[0]["state"] == "off: durable means applied"
    batches = pusher.batches(2, 4000)
    with ActorClient(daemon.endpoint, timeout=30, window=256) as actor:
        for batch in batches[:2000]:
            actor.push(batch)
        daemon.kill()
        confirmed = 2000 - actor.unconfirmed
        daemon.restart()
        for batch in batches[2000:]:
            actor.push(batch)
        actor.flush()
    with LearnerClient(daemon.endpoint) as learner:
        counted, entropy = learner.stats(), learner.entropy()
    ema, observations, pool = expected_ema(batches[confirmed:])
    assert counted.batches == len(batches) - confirmed
    assert (counted.observations, counted.pooled_counts) == (observations, pool.tolist())
    assert entropy.entropy == pytest.approx(ema, abs=1e-5)


def test_a_killed_actor_leaves_exact_counts(daemon: DaemonProcess) -> None:
    """Whatever arrived is a prefix of the stream, whole batches of it."""
    count = 30_000
    process = subprocess.Popen([sys.executable, str(Path(pusher.__file__)), daemon.endpoint, "3", str(count)])
    with LearnerClient(daemon.endpoint) as learner:
        wait_until(lambda: learner.status().batches > 100, timeout=60)
        process.kill()
        assert process.wait(10) == -signal.SIGKILL
        time.sleep(0.3)
        counted = learner.stats()
        assert learner.status().frames_malformed == 0
    assert 100 < counted.batches < count
    sizes = [batch.size for batch in pusher.batches(3, count)[: counted.batches]]
    assert counted.actions == sum(sizes)


def test_a_stopped_daemon_is_waited_for(daemon: DaemonProcess) -> None:
    with ActorClient(daemon.endpoint, timeout=30) as actor:
        for number in range(2000):
            actor.push([1] * 16)
            if number == 500:
                os.kill(daemon.process.pid, signal.SIGSTOP)
        time.sleep(3)  # longer than the client waits before it asks and sends again
        os.kill(daemon.process.pid, signal.SIGCONT)
        actor.flush()
    with LearnerClient(daemon.endpoint) as learner:
        assert learner.stats().batches == 2000
