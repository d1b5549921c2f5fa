"""The daemon is killed at random moments, again and again; what it then holds is what it would have held without.

``TEST_KILLS`` (10) and ``TEST_SEED`` (random, printed by a failure) make it a long run, or the same one again.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotuned.client import ActorClient, LearnerClient
from cotuned.wire.answers import CotuneAnswer
from tests import pusher
from tests.daemon_process import DaemonProcess
from tests.run_state import counters, slot_bits

KILLS = int(os.environ.get("TEST_KILLS", "10"))
SEED = int(os.environ.get("TEST_SEED", "0")) or random.randrange(1, 2**31)
START = Callable[..., DaemonProcess]
# Batches of a few hundred actions: most kills find a pool that is part full.
SETTINGS: dict[str, Any] = {"tuner": {"lr_alpha": 0.01, "target_entropy": 2.0}}


def held(daemon: DaemonProcess) -> tuple[bytes, dict[str, Any]]:
    """The bits of the slots, and every counter but those that count what the transport does."""
    with LearnerClient(daemon.endpoint) as learner:
        return slot_bits(learner), counters(learner)


class Killer:
    """Kills the daemon at random moments and starts it again, `kills` times, in a thread."""

    def __init__(self, daemon: DaemonProcess, kills: int, longest: float) -> None:
        self._daemon, self._left, self._longest = daemon, kills, longest
        self._random = random.Random(SEED)
        self._thread = threading.Thread(target=self._run)
        self._failure: BaseException | None = None

    def _run(self) -> None:
        try:
            while self._left:
                time.sleep(self._random.uniform(0, self._longest))
                self._daemon.kill()
                self._left -= 1
                self._daemon.restart()
        except BaseException as failure:
            self._failure = failure

    @property
    def working(self) -> bool:
        """Whether it will kill once more."""
        return self._thread.is_alive()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Ends when all kills are done and the daemon runs again."""
        self._thread.start()
        yield
        self._thread.join(60 + 10 * self._left)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure


def lockstep(daemon: DaemonProcess, go_on: Callable[[int], bool]) -> list[CotuneAnswer]:
    """One actor and one learner, in turns; everything they do follows from the step."""
    answers: list[CotuneAnswer] = []
    with (
        ActorClient(daemon.endpoint, timeout=60, window=16) as actor,
        LearnerClient(daemon.endpoint, timeout=60, session=1) as learner,
    ):
        while go_on(len(answers)):
            rng = np.random.default_rng(len(answers))
            for _ in range(rng.integers(1, 6)):
                n = int(rng.integers(1, 400))
                executed, width = rng.integers(0, int(rng.integers(1, 12)), n), rng.random()
                proposed = np.where(rng.random(n) < width, executed, 0) if rng.random() < 0.5 else None
                probs = rng.dirichlet(np.ones(11), n) if rng.random() < 0.3 else None
                actor.push(executed, proposed, probs, phase="prefill" if rng.random() < 0.2 else "train")
            actor.flush()
            answers.append(learner.cotune(len(answers), float(rng.uniform(0, 2)) if rng.random() < 0.7 else None))
            if rng.random() < 0.2:
                learner.write(7, float(rng.normal()))
    return answers


def test_lockstep_over_kills_is_bit_equal_to_an_uninterrupted_run(start_daemon: START) -> None:
    killed, whole = start_daemon(**SETTINGS), start_daemon(**SETTINGS)
    killer = Killer(killed, KILLS, 0.6)
    with killer.at_work():
        answers = lockstep(killed, lambda step: killer.working or step < 100)
    expected = lockstep(whole, lambda step: step < len(answers))
    assert answers == expected, f"TEST_SEED={SEED}"
    assert held(killed) == held(whole), f"TEST_SEED={SEED}"
    assert held(killed)[1]["updates"] > 30
    assert len(killed.events("state restored")) >= KILLS - 1  # the first kill may come before anything was kept


def test_a_stream_at_full_speed_over_kills_is_bit_equal(start_daemon: START) -> None:
    """Nobody flushes in between: most kills find batches that are applied and not durable, and some in flight."""
    killed, whole = start_daemon(), start_daemon()
    killer = Killer(killed, max(3, KILLS // 2), 0.8)
    batches = pusher.batches(2, 400)
    count = 0
    with ActorClient(killed.endpoint, timeout=60, window=512) as actor:
        with killer.at_work():
            while killer.working or count < 5000:
                actor.push(batches[count % 400])
                count += 1
                if count % 50 == 0:
                    time.sleep(0.001)
        actor.flush(60)
    with ActorClient(whole.endpoint, timeout=60) as actor:
        for number in range(count):
            actor.push(batches[number % 400])
    assert held(killed) == held(whole), f"TEST_SEED={SEED}"
    assert held(killed)[1]["batches_train"] == count


@pytest.mark.slow
def test_several_actors_over_kills_are_counted_exactly(start_daemon: START) -> None:
    daemon = start_daemon()
    killer = Killer(daemon, max(3, KILLS // 2), 0.8)
    actors, count = 3, 6000
    script = str(Path(pusher.__file__))
    with killer.at_work(), LearnerClient(daemon.endpoint, timeout=60) as learner:
        processes = [
            subprocess.Popen([sys.executable, script, daemon.endpoint, str(index), str(count)])
            for index in range(actors)
        ]
        told: dict[int, CotuneAnswer] = {}
        while killer.working or any(process.poll() is None for process in processes):
            told[len(told)] = learner.cotune(len(told))
            assert learner.cotune(len(told) - 1) == told[len(told) - 1]
            time.sleep(0.01)
        assert [process.wait(1) for process in processes] == [0] * actors
    counted = held(daemon)[1]
    pushed = [pusher.batches(index, count) for index in range(actors)]
    assert counted["batches_train"] + counted["batches_prefill"] == actors * count, f"TEST_SEED={SEED}"
    assert counted["batches_prefill"] == actors * count // 10
    assert counted["actions_train"] + counted["actions_prefill"] == sum(b.size for batches in pushed for b in batches)
    observations = [answer.observations for answer in told.values()]
    assert observations == sorted(observations)  # no answer told of something that was lost afterwards
    assert counted["observations"] >= observations[-1] > 0
