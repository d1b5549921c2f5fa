"""Actor processes side by side, and the books that their daemon must have at the end."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cotuned.client import LearnerClient

from . import actor
from .outcome import Outcome

UNPOOLED = {"observation": {"pool_min_actions": 2**40}}
"""Settings under which every count stays in the pool, where it can be read."""


@dataclass(frozen=True)
class Plan:
    """What the actors push."""

    processes: int
    clients: int
    """In each process."""
    batches: int
    """By each client."""
    size: int

    def expected(self) -> npt.NDArray[np.int64]:
        """Counts a bin of all batches of all clients."""
        period = actor.K * actor.K
        rounds, rest = divmod(self.batches, period)
        total = np.zeros(actor.K, dtype=np.int64)
        for index in range(self.processes * self.clients):
            one_round = [actor.counts(index, number, self.size) for number in range(1, period + 1)]
            total += rounds * np.sum(one_round, axis=0)
            for counts in one_round[:rest]:
                total += counts
        return total


class Load:
    """The actor processes of a plan, started at once; in a with block, killed at its end if they still run."""

    def __init__(self, endpoint: str, plan: Plan) -> None:
        self._endpoint, self._plan = endpoint, plan
        self._processes = [self._start(number) for number in range(plan.processes)]
        self._last: list[dict[str, Any]] = [{"sent": 0} for _ in self._processes]
        self._readers = [threading.Thread(target=self._read, args=(n,), daemon=True) for n in range(plan.processes)]
        for reader in self._readers:
            reader.start()

    def _start(self, number: int) -> subprocess.Popen[str]:
        plan = self._plan
        numbers = (number * plan.clients, plan.clients, plan.batches, plan.size)
        command = [sys.executable, "-m", "tests.chaos.actor", self._endpoint, *map(str, numbers)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def _read(self, number: int) -> None:
        for line in self._processes[number].stdout or ():
            self._last[number] = json.loads(line)

    @property
    def sent(self) -> int:
        """Batches pushed so far, as far as the actors have said."""
        return sum(last["sent"] for last in self._last)

    @property
    def ended(self) -> bool:
        """Whether no process runs any more."""
        return all(process.poll() is not None for process in self._processes)

    def kill_one(self, number: int) -> None:
        """SIGKILL."""
        self._processes[number].kill()
        self._processes[number].wait(10)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills whatever still runs."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait(10)

    def settle(self, outcome: Outcome, timeout: float) -> None:
        """Waits for the actors' ends and books what they sent and what the daemon has."""
        try:
            codes = [process.wait(timeout) for process in self._processes]
        except subprocess.TimeoutExpired:
            self.close()
            outcome.wrong.append(f"the actors did not end within {timeout:g} s; {self.sent} batches were sent")
            return
        for reader in self._readers:
            reader.join(10)
        outcome.expect(codes == [0] * len(codes), f"actors ended with {codes}")
        with LearnerClient(self._endpoint, timeout=30) as learner:
            stats = learner.stats()
        outcome.book(self.sent, stats.batches, sum(last.get("durable", 0) for last in self._last))
        counts = self._plan.expected().tolist()
        outcome.expect(stats.pooled_counts == counts, f"counts are {stats.pooled_counts}, expected {counts}")
        outcome.expect(stats.batches_rejected == 0, f"{stats.batches_rejected} batches were rejected")
