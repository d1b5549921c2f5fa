"""One actor and one learner that take turns, so that an uninterrupted run and one full of faults must agree to the bit.

The order of everything that moves a slot is fixed by the script: some batches, a flush, one `cotune`. What a fault
interrupts is sent or asked again by the clients themselves; the script knows nothing of faults.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cotuned.client import ActorClient, CotuneAnswer, LearnerClient, StateUnavailable
from tests.run_state import counters, slot_bits

K = 11
BATCHES_A_STEP = 3
PATIENCE = 60.0
"""Seconds that a client may wait: longer than any fault lasts."""


@dataclass
class Book:
    """What the script saw, and what it left on the bus."""

    steps: int = 0
    sent: int = 0
    answers: list[tuple[float, float, float]] = field(default_factory=list)
    """(α, τ, slot 583) of each step."""
    slots: bytes = b""
    """`run_state.SLOTS` at the end, bit for bit."""
    counters: dict[str, Any] = field(default_factory=dict)
    confirmed_at: float = 0.0
    """When the last flush or answer came; monotonic seconds."""


def batch(number: int) -> dict[str, Any]:
    """Batch `number`: executed, proposed and probs, all of them following from the number."""
    rng = np.random.default_rng(number)
    n = int(rng.integers(1, 400))
    probs = rng.dirichlet(np.full(K, 0.2 + number % 7), n).astype(np.float32)
    proposed = rng.integers(0, K, n)
    executed = np.where(rng.random(n) < (number % 10) / 10, 0, proposed)
    return {"executed": executed, "proposed": proposed, "probs": probs}


BATCHES = [batch(number) for number in range(512)]
"""Made once; the script goes round."""


def run(endpoint: str, steps: int | Callable[[int], bool], actions_endpoint: str | None = None) -> Book:
    """Runs the script: for `steps` steps, or while `steps(step)` is true."""
    book = Book()
    with (
        ActorClient(endpoint, timeout=PATIENCE, actions_endpoint=actions_endpoint) as actor,
        LearnerClient(endpoint, session=1, timeout=PATIENCE) as learner,
    ):
        while steps(book.steps) if callable(steps) else book.steps < steps:
            step = book.steps
            for _ in range(BATCHES_A_STEP):
                phase: Any = "prefill" if step < 20 else "train"
                actor.push(**BATCHES[book.sent % len(BATCHES)], step=step, phase=phase)
                book.sent += 1
            actor.flush()
            answer = _ask(learner, step)
            book.confirmed_at = time.monotonic()
            book.answers.append((answer.alpha, answer.tau, answer.entropy))
            book.steps += 1
        book.slots, book.counters = slot_bits(learner), counters(learner)
    return book


def _ask(learner: LearnerClient, step: int) -> CotuneAnswer:
    """Asks until the daemon's disk takes the answer, as `StateUnavailable` says to."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return learner.cotune(step, policy_entropy=1.0 + step % 13 / 10)
        except StateUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def differences(faulty: Book, calm: Book) -> list[str]:
    """Where a run under faults differs from the uninterrupted one, in words; bit by bit."""
    found = [
        f"answer of step {step}: {one} instead of {other}"
        for step, (one, other) in enumerate(zip(faulty.answers, calm.answers, strict=True))
        if one != other
    ][:1]
    if faulty.slots != calm.slots:
        one, other = (np.frombuffer(book.slots, np.uint32) for book in (faulty, calm))
        found.append(f"{(one != other).sum()} slots differ at the end")
    found += [
        f"{name}: {faulty.counters[name]} instead of {calm.counters[name]}"
        for name in calm.counters
        if faulty.counters[name] != calm.counters[name]
    ]
    return found


class InThread(threading.Thread):
    """The script in a thread of its own, while this one makes faults; `book()` waits for its end."""

    def __init__(self, endpoint: str, actions_endpoint: str | None = None) -> None:
        super().__init__(daemon=True)
        self._endpoint, self._actions_endpoint = endpoint, actions_endpoint
        self._more, self._step = True, 0
        self._book: Book | None = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """See `threading.Thread`."""
        try:
            self._book = run(self._endpoint, self._again, self._actions_endpoint)
        except BaseException as error:
            self._error = error

    def _again(self, step: int) -> bool:
        self._step = step
        return self._more

    def wait_for_progress(self, timeout: float = PATIENCE) -> float:
        """Seconds until the script has done one whole step that began after this call."""
        begun, step = time.monotonic(), self._step
        while self._step < step + 2:
            if self._error is not None:
                raise self._error
            if time.monotonic() - begun > timeout:
                raise AssertionError(f"no step was done within {timeout:g} s")
            time.sleep(0.001)
        return time.monotonic() - begun

    def book(self) -> Book:
        """Ends the script after its current step."""
        self._more = False
        self.join(2 * PATIENCE)
        if self._error is not None:
            raise self._error
        assert self._book is not None
        return self._book
