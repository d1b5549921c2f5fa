"""`LearnerClient` against a real daemon: steps, sessions, slots, and every refusal."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cotuned.client import (
    ActorClient,
    ClientClosed,
    CotunedError,
    DaemonUnreachable,
    InvalidRequest,
    LearnerClient,
    LimitReached,
    Slot,
    SlotReadOnly,
    UnknownRun,
    UnknownSlot,
)
from tests.daemon_process import DaemonProcess, wait_until

UNIFORM = np.arange(1100) % 11


@pytest.fixture
def learner(daemon: DaemonProcess) -> Iterator[LearnerClient]:
    with LearnerClient(daemon.endpoint) as client:
        yield client


def push(daemon: DaemonProcess, *batches: Any, **options: Any) -> None:
    with ActorClient(daemon.endpoint, **options) as actor:
        for batch in batches:
            actor.push(batch)


def test_before_the_first_observation_nothing_moves(learner: LearnerClient) -> None:
    answer = learner.cotune(0)
    assert (answer.alpha, answer.tau) == (pytest.approx(0.2), 1.0)
    assert not answer.ready
    assert not answer.fresh
    assert answer.owner
    assert answer.error is None
    assert answer.target_entropy == pytest.approx(0.98 * math.log(11))
    assert "0 of 1024 actions are pooled" in answer.reason


def test_all_hold_from_the_start_raises_both(daemon: DaemonProcess, learner: LearnerClient) -> None:
    """The worst case: H = 0, so slot 583 stays 0.0 although it was observed."""
    push(daemon, np.full(1024, 5))
    before, after = learner.cotune(0), learner.cotune(1)
    assert before.ready
    assert before.fresh
    assert before.entropy == 0.0
    assert before.alpha > 0.2
    assert before.tau > 1.0
    assert not after.fresh  # nothing new since
    assert (after.alpha, after.tau) == (before.alpha, before.tau)


def test_uniform_actions_above_the_target_lower_both(daemon: DaemonProcess, learner: LearnerClient) -> None:
    push(daemon, UNIFORM)
    answer = learner.cotune(0)
    assert answer.entropy == pytest.approx(math.log(11), abs=1e-6)
    assert answer.alpha < 0.2
    assert answer.tau < 1.0
    assert answer.alpha == pytest.approx(math.exp(answer.log_alpha), rel=1e-6)
    assert answer.tau == pytest.approx(math.exp(answer.log_tau), rel=1e-6)


def test_a_step_moves_them_once(daemon: DaemonProcess, learner: LearnerClient) -> None:
    push(daemon, UNIFORM)
    first = learner.cotune(10, 2.0)
    push(daemon, UNIFORM)
    assert learner.cotune(10, 1.0) == first
    assert learner.cotune(3, 1.0) == first
    assert learner.stats().updates == 1
    assert learner.entropy().policy_entropy == 2.0
    second = learner.cotune(11)
    assert second.fresh
    assert second.step == 11
    assert learner.stats().updates == 2


def test_the_newest_session_owns_tuning(daemon: DaemonProcess, learner: LearnerClient) -> None:
    push(daemon, UNIFORM)
    first = learner.cotune(1000)
    push(daemon, UNIFORM)
    with LearnerClient(daemon.endpoint) as restarted:
        answer = restarted.cotune(5)  # from an older checkpoint
        assert answer.owner
        assert answer.fresh
        assert answer.alpha < first.alpha  # carried on, not begun again
        old = learner.cotune(1001)
        assert not old.owner
        assert not old.fresh
        assert old.alpha == answer.alpha
        push(daemon, UNIFORM)
        assert not learner.cotune(1002).owner
        assert learner.stats().updates == 2
        assert restarted.cotune(6).fresh


def test_ranks_of_one_session_share_the_step(daemon: DaemonProcess) -> None:
    push(daemon, UNIFORM)
    with (
        LearnerClient(daemon.endpoint, session=7) as rank0,
        LearnerClient(daemon.endpoint, session=7) as rank1,
    ):
        assert rank0.cotune(1, 2.0) == rank1.cotune(1, 2.0)
        assert rank0.stats().updates == 1


def test_the_policy_entropy_is_an_ema_that_starts_with_its_first_value(learner: LearnerClient) -> None:
    assert learner.cotune(0, 2.398 - 0.001).policy_entropy == pytest.approx(2.397, abs=1e-6)
    assert learner.cotune(1, 1.0).policy_entropy == pytest.approx(0.6 * 2.397 + 0.4 * 1.0, abs=1e-6)
    assert learner.read(420) == learner.read(Slot.RL_POLICY_ENTROPY_EMA_INDEX)


def test_the_source_is_a_setting_of_each_run(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon(
        runs={"from-420": {"source": "policy", "target_entropy": 2.0}, "from-583": {"target_entropy": 2.0}}
    )
    for run in ("from-420", "from-583"):
        push(daemon, np.full(1024, 5), run=run)
    with (
        LearnerClient(daemon.endpoint, run="from-420") as wrong,
        LearnerClient(daemon.endpoint, run="from-583") as right,
    ):
        lowered, raised = wrong.cotune(0, 2.39), right.cotune(0, 2.39)
    assert lowered.alpha < 0.2 < raised.alpha
    assert lowered.tau < 1.0 < raised.tau
    assert "but the executed actions read 0.000 nats" in lowered.reason
    assert (lowered.source, raised.source) == ("policy", "executed")


def test_the_conditional_source_waits_for_rows(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon(tuner={"source": "conditional", "target_entropy": 1.0})
    with LearnerClient(daemon.endpoint) as learner, ActorClient(daemon.endpoint) as actor:
        actor.push(UNIFORM)
        actor.flush()
        assert "no post-gate rows were reported" in learner.cotune(0).reason
        rows = np.eye(11)[UNIFORM]  # a deterministic policy over varied states: the marginal reads ln K
        actor.push(UNIFORM, proposed=np.full(1100, 5), probs=rows)
        actor.flush()
        answer = learner.cotune(1)
    assert answer.entropy == pytest.approx(math.log(11), abs=1e-6)
    assert answer.conditional_entropy == 0.0
    assert answer.gate_rate == pytest.approx(10 / 11)
    assert answer.alpha > 0.2


def test_slots_by_number_and_name(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon(bus={"slot_names": {"critic_loss": 12}})
    with LearnerClient(daemon.endpoint) as learner:
        assert learner.write("critic_loss", 0.1) == float(np.float32(0.1))
        assert learner.read(12) == learner.read("critic_loss") == float(np.float32(0.1))
        assert learner.read("TAU") == 1.0
        assert learner.write(np.int64(1023), np.float32(2)) == 2.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda c: c.write(583, 1.0), SlotReadOnly, "583 belongs to the daemon"),
        (lambda c: c.write("ALPHA", 1.0), SlotReadOnly, "585 belongs"),
        (lambda c: c.write(420, 1.0), SlotReadOnly, "report it with cotune"),
        (lambda c: c.read(1024), UnknownSlot, "got 1024, allowed are 0 to 1023"),
        (lambda c: c.read(-1), InvalidRequest, "slot: got -1"),
        (lambda c: c.read(10**30), InvalidRequest, "slot: got 1000"),
        (lambda c: c.read(None), InvalidRequest, "slot: got None, expected an integer"),
        (lambda c: c.read("alpha"), UnknownSlot, "did you mean ALPHA"),
        (lambda c: c.read("nope"), UnknownSlot, "got the name 'nope'"),
        (lambda c: c.read("b d"), InvalidRequest, "slot name 'b d' cannot be used"),
        (lambda c: c.write(1, math.nan), InvalidRequest, "value: got nan"),
        (lambda c: c.write(1, 1e39), InvalidRequest, r"value: got 1e\+39"),
        (lambda c: c.cotune(-1), InvalidRequest, "step: got -1"),
        (lambda c: c.cotune(2**63), InvalidRequest, "step: got 9223372036854775808"),
        (lambda c: c.cotune(0, math.nan), InvalidRequest, "policy_entropy: got nan"),
        (lambda c: c.cotune(0, math.inf), InvalidRequest, "policy_entropy: got inf"),
        (lambda c: c.cotune(0, -0.1), InvalidRequest, "policy_entropy: got -0.1"),
        (lambda c: c.cotune(0, 3.3), InvalidRequest, r"allowed is \[0, ln K\]"),
        (lambda c: c.cotune(0.5), InvalidRequest, "step: got 0.5, expected an integer"),
        (lambda c: c.cotune(True), InvalidRequest, "step: got True"),
        (lambda c: c.cotune(0, "1.5"), InvalidRequest, "policy_entropy: got '1.5', expected a number"),
        (lambda c: c.write(0, True), InvalidRequest, "value: got True, expected a number"),
        (lambda c: c.entropy(), UnknownRun, "no actor and no cotune has named"),
        (lambda c: c.stats(), UnknownRun, "known are none yet"),
    ],
)
def test_a_bad_call_is_refused_and_leaves_no_trace(
    learner: LearnerClient, call: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        call(learner)
    assert learner.status().runs == []


def test_more_runs_than_rows_are_refused(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon(bus={"max_runs": 2})
    for run in ("a", "b"):
        with LearnerClient(daemon.endpoint, run=run) as learner:
            learner.cotune(0)
    with LearnerClient(daemon.endpoint, run="c") as learner, pytest.raises(LimitReached, match="bus.max_runs"):
        learner.cotune(0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"run": "a b"}, "run name"),
        ({"session": -1}, "session: got -1"),
        ({"timeout": 0}, "timeout: got 0"),
        ({"timeout": math.inf}, "timeout: got inf"),
    ],
)
def test_bad_arguments_are_refused_before_a_socket_is_opened(arguments: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LearnerClient(**arguments)


def test_an_endpoint_that_is_none_is_named() -> None:
    with pytest.raises(CotunedError, match="got 'localhost', which ZeroMQ cannot connect to"):
        LearnerClient("localhost")


def test_a_daemon_that_is_not_there_is_named_within_the_timeout() -> None:
    with LearnerClient("tcp://127.0.0.1:1", timeout=0.3) as learner:
        began = time.monotonic()
        with pytest.raises(DaemonUnreachable, match=r"nothing answered at tcp://127.0.0.1:1 within 0.3 s"):
            learner.cotune(0)
        assert time.monotonic() - began < 5


def test_a_late_answer_is_not_taken_for_another_ones(daemon: DaemonProcess) -> None:
    import os
    import signal

    with LearnerClient(daemon.endpoint, timeout=0.3) as learner:
        learner.write(1, 1.0)
        learner.write(2, 2.0)
        os.kill(daemon.process.pid, signal.SIGSTOP)
        with pytest.raises(DaemonUnreachable):
            learner.read(1)
        os.kill(daemon.process.pid, signal.SIGCONT)
        time.sleep(0.2)  # now the answer to read(1) lies in the socket
        assert learner.read(2) == 2.0


def test_a_closed_client_says_so(daemon: DaemonProcess) -> None:
    learner = LearnerClient(daemon.endpoint)
    learner.close()
    learner.close()
    with pytest.raises(ClientClosed, match="is closed"):
        learner.cotune(0)


def test_a_daemon_that_comes_back_is_found_again(daemon: DaemonProcess) -> None:
    with LearnerClient(daemon.endpoint, timeout=10) as learner:
        learner.cotune(0)
        daemon.kill()
        daemon.restart()
        assert not learner.cotune(1).ready


def test_a_learner_that_is_asking_survives_restarts_of_the_daemon(daemon: DaemonProcess) -> None:
    """A request that is under way when the daemon dies is lost with it, and must be asked again."""
    failures: list[BaseException] = []
    answered = [0]
    ended = threading.Event()

    def ask() -> None:
        try:
            with LearnerClient(daemon.endpoint, timeout=20) as learner:
                while not ended.is_set():
                    answered[0] += 1
                    assert learner.cotune(answered[0]).step == answered[0]
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(4):
            before = answered[0]
            wait_until(lambda before=before: answered[0] > before + 50 or failures, timeout=20)
            daemon.kill()
            daemon.restart()
    finally:
        ended.set()
        thread.join(30)
    assert not failures
