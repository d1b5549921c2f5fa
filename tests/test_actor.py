"""`ActorClient` against a real daemon: what push, flush and close promise."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq

from cotuned.client import (
    ActionCountMismatch,
    ActorClient,
    BatchRejected,
    ClientClosed,
    ClientInUse,
    CotunedError,
    DaemonUnreachable,
    FlushTimeout,
    InvalidActions,
    LearnerClient,
    LimitReached,
    StatsAnswer,
    WindowFull,
)
from cotuned.wire import Batch, encode_batch
from tests.daemon_process import DaemonProcess, wait_until


def stats(daemon: DaemonProcess, run: str = "default") -> StatsAnswer:
    with LearnerClient(daemon.endpoint, run=run) as learner:
        return learner.stats()


def test_phases_and_actions_are_counted_apart(daemon: DaemonProcess) -> None:
    with ActorClient(daemon.endpoint) as actor:
        assert actor.n_actions == 11
        assert actor.push([1, 2, 3], phase="prefill") == 1
        assert actor.push(np.array([4, 5], np.uint8), step=7) == 2
        assert actor.push([]) == 2  # changes nothing, is not sent
        actor.flush()
        assert actor.unconfirmed == 0
        counted = stats(daemon)
    assert (counted.batches_prefill, counted.actions_prefill) == (1, 3)
    assert (counted.batches_train, counted.actions_train) == (1, 2)
    assert (counted.batches, counted.actions) == (2, 5)
    assert counted.pooled_counts == [0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert counted.actors == 1
    assert stats(daemon).actors == 0  # closed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"executed": [0.5]}, "got dtype float64"),
        ({"executed": [11]}, "got 11"),
        ({"executed": [-1]}, "got -1"),
        ({"executed": 3}, "expected \\[n\\]"),
        ({"executed": [1, 2], "proposed": [1]}, "proposed: got 1 actions, expected 2"),
        ({"executed": [1], "proposed": [99]}, "proposed\\[0\\]: got 99"),
        ({"executed": [1], "probs": [[1.0]]}, "probs: got shape"),
        ({"executed": [1], "phase": "warmup"}, "phase: got 'warmup'"),
        ({"executed": [1], "step": -1}, "step: got -1"),
        ({"executed": [1], "step": 1.5}, "step: got 1.5"),
        ({"executed": [1], "step": 2**63}, "step: got 9223372036854775808"),
        ({"executed": np.zeros(20 * 2**20, np.uint8)}, "limits.max_frame_bytes"),
    ],
)
def test_a_bad_batch_is_not_sent(daemon: DaemonProcess, arguments: Any, says: str) -> None:
    with ActorClient(daemon.endpoint) as actor:
        with pytest.raises(InvalidActions, match=says):
            actor.push(**arguments)
        assert actor.push([1], step=np.int64(3)) == 1  # type: ignore[arg-type]
    assert stats(daemon).batches == 1


def test_a_wide_action_space(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon(n_actions=300)
    with ActorClient(daemon.endpoint, n_actions=300) as actor:
        actor.push([0, 255, 256, 299])
        with pytest.raises(InvalidActions):
            actor.push([300])
    assert np.flatnonzero(stats(daemon).pooled_counts).tolist() == [0, 255, 256, 299]


def test_another_number_of_actions_is_refused(daemon: DaemonProcess) -> None:
    with pytest.raises(ActionCountMismatch, match="built for 4 actions, this daemon for 11"):
        ActorClient(daemon.endpoint, n_actions=4)


def test_two_actors_of_one_name_are_told_apart(daemon: DaemonProcess) -> None:
    with ActorClient(daemon.endpoint, actor="same") as one, ActorClient(daemon.endpoint, actor="same") as other:
        for _ in range(3):
            one.push([1])
            other.push([2])
    assert stats(daemon).pooled_counts[1:3] == [3, 3]


def test_an_actor_limit_is_an_error_with_advice(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon(limits={"max_actors": 1, "actor_expiry": 0.2})
    first = ActorClient(daemon.endpoint)
    with pytest.raises(LimitReached, match="limits.max_actors"):
        ActorClient(daemon.endpoint)
    first.abandon()  # as if killed: the stream stays open until it is stale
    time.sleep(0.3)
    ActorClient(daemon.endpoint).close()


def test_a_daemon_that_is_not_there() -> None:
    with pytest.raises(DaemonUnreachable, match="tcp://127.0.0.1:1 within 0.2 s"):
        ActorClient("tcp://127.0.0.1:1", timeout=0.2)


def test_the_wrong_one_of_our_sockets_is_an_error_within_the_timeout(daemon: DaemonProcess) -> None:
    with pytest.raises(DaemonUnreachable, match="is this its queries endpoint"):
        ActorClient(daemon.endpoints["actions"], timeout=0.5)


def test_a_full_window_blocks_then_raises_and_loses_nothing(daemon: DaemonProcess) -> None:
    with ActorClient(daemon.endpoint, window=4, timeout=0.3) as actor:
        os.kill(daemon.process.pid, signal.SIGSTOP)
        try:
            for _ in range(4):
                actor.push([1])
            with pytest.raises(WindowFull, match=r"4 batches .* This batch was not sent"):
                actor.push([2])
            with pytest.raises(FlushTimeout, match="4 of 4 batches were not durable within 0.3 s"):
                actor.flush()
        finally:
            os.kill(daemon.process.pid, signal.SIGCONT)
        assert actor.push([2], timeout=10) == 5
        actor.flush(10)
    assert stats(daemon).pooled_counts[:3] == [0, 4, 1]
    assert stats(daemon).batches == 5


def test_sigkill_in_mid_push_raises_by_the_deadline(daemon: DaemonProcess) -> None:
    actor = ActorClient(daemon.endpoint, window=100, timeout=0.5)
    actor.push([1])
    daemon.kill()
    began = time.monotonic()
    with pytest.raises(WindowFull):
        for _ in range(1000):
            actor.push([1])
    assert time.monotonic() - began < 10
    with pytest.raises(FlushTimeout):
        actor.close()
    actor.close()  # closed all the same


def test_rejections_come_back_with_number_code_and_sentence(daemon: DaemonProcess) -> None:
    """The client checks before it sends, so a rejection needs a client that lies: one that believes in 12 actions."""
    actor = ActorClient(daemon.endpoint)
    actor.n_actions = 12
    actor.push([1])
    actor.push([3, 11])
    actor.push([2])
    with pytest.raises(BatchRejected, match=r"executed\[1\]: got 11, expected an action index from 0 to 10") as caught:
        actor.flush()
    assert (caught.value.sequence, caught.value.code) == (2, "action_out_of_range")
    actor.flush()  # said once
    counted = stats(daemon)
    assert (counted.batches, counted.batches_rejected) == (2, 1)
    assert counted.pooled_counts[:4] == [0, 1, 1, 0]
    actor.close()


def test_rejections_go_to_the_callback(daemon: DaemonProcess) -> None:
    seen: list[BatchRejected] = []
    with ActorClient(daemon.endpoint, on_rejected=seen.append) as actor:
        actor.n_actions = 12
        for action in (11, 1, 11):
            actor.push([action])
    assert [rejection.sequence for rejection in seen] == [1, 3]


def test_an_error_in_the_body_keeps_its_traceback(daemon: DaemonProcess) -> None:
    with pytest.raises(ZeroDivisionError), ActorClient(daemon.endpoint) as actor:
        actor.push([1])
        raise ZeroDivisionError
    assert stats(daemon).batches == 1  # what was pushed is flushed all the same


def test_a_client_does_not_survive_a_fork(daemon: DaemonProcess) -> None:
    actor = ActorClient(daemon.endpoint)
    child = os.fork()
    if child == 0:
        try:
            actor.push([1])
        except ClientClosed:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    actor.push([2])
    actor.close()
    assert stats(daemon).pooled_counts[:3] == [0, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"window": 0}, "window: got 0"),
        ({"window": 2**31}, "window: got 2147483648"),
        ({"window": 1.5}, "window: got 1.5, expected an integer"),
        ({"window_bytes": 0}, "0 bytes"),
        ({"timeout": -1}, "timeout: got -1"),
        ({"timeout": "5"}, "timeout: got '5'"),
        ({"timeout": None}, "timeout: got None"),
        ({"timeout": 1e300}, "timeout: got 1e\\+300"),
        ({"actor": ""}, "actor name ''"),
        ({"actor": 5}, "actor name 5"),
        ({"run": "a b"}, "run name 'a b'"),
        ({"run": None}, "run name None"),
        ({"n_actions": True}, "n_actions: got True"),
        ({"on_rejected": 5}, "on_rejected: got 5"),
    ],
)
def test_bad_arguments_are_refused_and_open_nothing(daemon: DaemonProcess, arguments: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ActorClient(daemon.endpoint, **arguments)
    with LearnerClient(daemon.endpoint) as learner:
        assert learner.status().actors == 0


@pytest.mark.parametrize("endpoint", ["foo", "tcp://127.0.0.1:99999", "tcp://127.0.0.1", 5])
def test_endpoints_that_are_none_are_named(daemon: DaemonProcess, endpoint: Any) -> None:
    with pytest.raises(CotunedError, match="endpoint: got"):
        ActorClient(endpoint)
    with pytest.raises(CotunedError, match="endpoint: got"):
        ActorClient(daemon.endpoint, actions_endpoint=endpoint)
    with LearnerClient(daemon.endpoint) as learner:
        assert learner.status().actors == 0


class RawActor:
    """Speaks the protocol by hand, so that it can break it."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.client = ActorClient(daemon.endpoint)
        self.push: zmq.Socket[bytes] = self.client._delivery._push

    def __del__(self) -> None:
        self.client.abandon()

    def send(self, sequence: int, executed: bytes = b"\1", **fields: Any) -> None:
        self.push.send(encode_batch(Batch(self.client.stream, sequence, 0, 0, executed, **fields)))


def test_duplicates_gaps_and_reordering_count_once(daemon: DaemonProcess) -> None:
    raw = RawActor(daemon)
    for sequence in (1, 1, 2, 4, 5, 3, 4, 2, 6, 5):
        raw.send(sequence)
    wait_until(lambda: stats(daemon).batches == 5)
    time.sleep(0.1)
    counted = stats(daemon)
    assert counted.pooled_counts[1] == 5  # 1 to 5
    assert counted.batches_early == 3  # 4 and 5 before 3, 6 before 5
    assert counted.batches_duplicate == 2


def test_the_client_fills_a_gap(daemon: DaemonProcess) -> None:
    with ActorClient(daemon.endpoint) as actor:
        actor.push([1])
        delivery = actor._delivery
        frame = encode_batch(Batch(actor.stream, 2, 0, 0, b"\2"))
        delivery._frames.append((2, frame))  # a frame that the transport loses
        delivery._bytes += len(frame)
        delivery._cursor += 1
        actor.push([3])
        actor.flush()
    counted = stats(daemon)
    assert counted.pooled_counts[1:4] == [1, 1, 1]
    assert counted.batches_early >= 1


@pytest.mark.parametrize(
    ("frame", "tally"),
    [
        (b"", "frames_malformed"),
        (b"\x00\xff" * 50, "frames_malformed"),
        (encode_batch(Batch(12345, 1, 0, 0, b"\1")), "frames_unknown"),
    ],
)
def test_frames_that_nobody_can_be_told_about_are_counted(daemon: DaemonProcess, frame: bytes, tally: str) -> None:
    raw = RawActor(daemon)
    raw.push.send(frame)
    with LearnerClient(daemon.endpoint) as learner:
        wait_until(lambda: getattr(learner.status(), tally) == 1)
        assert learner.stats().batches == 0


def test_row_entropies_that_cannot_be_are_rejected(daemon: DaemonProcess) -> None:
    raw = RawActor(daemon)
    for sequence, entropy in enumerate((-0.5, 2.5, float("inf"), 2.3), start=1):
        raw.send(sequence, row_entropy=entropy)
    wait_until(lambda: stats(daemon).batches == 1)
    assert stats(daemon).batches_rejected == 3


def test_half_an_index_is_no_batch(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon(n_actions=300)
    raw = RawActor(daemon)
    raw.send(1, b"\1\0\2")
    raw.send(1, b"\1\0")
    wait_until(lambda: stats(daemon).batches == 1)
    with LearnerClient(daemon.endpoint) as learner:
        assert learner.status().frames_malformed == 1


def test_an_oversize_frame_does_not_stop_the_others(start_daemon: Callable[..., DaemonProcess]) -> None:
    """ZeroMQ drops the connection of a peer that sends too much, and what it had queued behind; resending recovers."""
    daemon = start_daemon(limits={"max_frame_bytes": 1024})
    with ActorClient(daemon.endpoint, timeout=10) as actor:
        for i in range(20):
            actor.push([1])
            if i == 10:
                actor._delivery._push.send(b"\0" * 5000)
    assert stats(daemon).batches == 20


def test_a_stream_belongs_to_one_run(daemon: DaemonProcess) -> None:
    from cotuned.wire.answers import HelloAnswer
    from cotuned.wire.messages import Hello

    actor = ActorClient(daemon.endpoint, run="a")
    with pytest.raises(CotunedError, match="open one client for each run"):
        actor._connection.ask(Hello("x", actor.stream, 0, "b"), HelloAnswer)


def test_a_client_that_was_forgotten_does_not_hang(daemon: DaemonProcess) -> None:
    actor = ActorClient(daemon.endpoint)
    actor.push([1])
    with pytest.warns(ResourceWarning, match="was not closed"):
        del actor
        gc.collect()


FORGOTTEN = {
    "never closed": "actor = ActorClient(run='g')\ndef act(): actor.push([1])\nact()",
    "flushed, not closed": "actor = ActorClient(run='g')\ndef act(): actor.push([1]); actor.flush()\nact()",
    "a callback to its owner": (
        "class Owner:\n"
        "    def __init__(self):\n"
        "        self.actor = ActorClient(run='g', on_rejected=self.rejected)\n"
        "    def rejected(self, rejection): pass\n"
        "owner = Owner(); owner.actor.push([1]); owner.me = owner; del owner; gc.collect()"
    ),
    "an error that nobody catches": (
        "class Owner:\n"
        "    def __init__(self): self.actor = ActorClient(run='g')\n"
        "    def run(self): self.actor.push([1]); raise RuntimeError('bug')\n"
        "Owner().run()"
    ),
}


@pytest.mark.parametrize("script", FORGOTTEN.values(), ids=FORGOTTEN.keys())
def test_a_script_that_never_closes_ends_and_delivers(daemon: DaemonProcess, script: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", f"import gc\nfrom cotuned.client import ActorClient\n{script}"],
        env={**os.environ, "COTUNED_ENDPOINT": daemon.endpoint},
        timeout=20,
        capture_output=True,
        text=True,
    )
    assert result.returncode == (1 if "bug" in script else 0), result.stderr
    assert stats(daemon, "g").batches == 1
    assert stats(daemon, "g").actors == 0


def test_what_a_forgotten_client_loses_is_said(daemon: DaemonProcess) -> None:
    actor = ActorClient(daemon.endpoint, timeout=0.3)
    daemon.kill()
    actor.push([1])
    with pytest.warns(RuntimeWarning, match="1 batches may be lost"):
        del actor
        gc.collect()


class Interrupt(KeyboardInterrupt):
    """Ctrl-C, but not pytest's."""


def test_ctrl_c_at_any_moment_leaves_the_window_whole(daemon: DaemonProcess) -> None:
    rng = np.random.default_rng(0)

    def interrupt(number: int, frame: object) -> None:
        raise Interrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    interrupts, taken = 0, 0
    try:
        with ActorClient(daemon.endpoint, window=64, timeout=10) as actor:
            while interrupts < 150:
                delay = float(rng.uniform(1e-5, 2e-3))
                try:
                    signal.setitimer(signal.ITIMER_REAL, delay)  # in here: it may go off at once
                    while True:
                        actor.push([1])
                except Interrupt:
                    interrupts += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            taken = actor.push([2])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    counted = stats(daemon)
    assert counted.batches == taken  # every number was taken once, whatever the interrupts hit
    assert counted.actions == taken


def test_two_threads_in_one_client_are_told(daemon: DaemonProcess) -> None:
    failures: list[Exception] = []
    with ActorClient(daemon.endpoint) as actor:

        def push() -> None:
            for _ in range(3000):
                try:
                    actor.push([1] * 64)
                except ClientInUse as error:
                    failures.append(error)
                    return

        threads = [threading.Thread(target=push) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        actor.flush()
        taken = actor.push([1])
    assert failures
    assert "open one client in each thread" in str(failures[0])
    assert stats(daemon).batches == taken


def test_numpy_integers_are_integers(daemon: DaemonProcess) -> None:
    """Gymnasium's action_space.n is one."""
    ActorClient(daemon.endpoint, n_actions=np.int64(11), window=np.int32(8)).close()  # type: ignore[arg-type]
    with LearnerClient(daemon.endpoint, session=np.int64(3)) as learner:  # type: ignore[arg-type]
        assert learner.cotune(np.int64(0), np.float32(1.5)).policy_entropy == 1.5  # type: ignore[arg-type]


def test_the_first_flush_is_quick(daemon: DaemonProcess) -> None:
    """Not a benchmark: the fault that this keeps away waited half a second in every other client, 5 s here."""
    began = time.monotonic()
    for _ in range(10):
        with ActorClient(daemon.endpoint) as actor:
            actor.push([1])
    assert stats(daemon).batches == 10
    assert time.monotonic() - began < 4
