"""The daemon under fire: two sockets that send without pause, a guarded run, and what must not happen."""

from __future__ import annotations

import contextlib
import random
import socket
import time
import urllib.request
from collections import Counter
from typing import Any

import msgpack
import numpy as np
import psutil
import zmq

from cotuned.client import ActorClient, LearnerClient
from tests.daemon_process import DaemonProcess
from tests.run_state import slot_bits

from .inputs import RUNS, STREAMS, Input

GUARDED = "guarded"
PIPELINED = 200
"""Requests under way at a time."""
ANSWER_SECONDS = 20.0

SETTINGS: dict[str, Any] = {"limits": {"max_actors": 64}, "log": {"interval": 60.0}}


class Target:
    """A daemon with its guarded run.

    Args:
        daemon: started with `SETTINGS`.
    """

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.sent: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """Error answers by code."""
        self.answered = 0
        self._context = zmq.Context()
        self._sockets = {
            "actions": self._socket(zmq.PUSH, daemon.endpoints["actions"]),
            "queries": self._socket(zmq.DEALER, daemon.endpoint),
        }
        self._waiting = 0
        with ActorClient(daemon.endpoint, run=GUARDED) as actor, LearnerClient(daemon.endpoint, run=GUARDED) as learner:
            actor.push(np.arange(1500) % 7, proposed=np.zeros(1500, int))
            actor.flush()
            learner.cotune(3, policy_entropy=1.5)
            learner.write(7, 3.25)
        for run, stream in zip(RUNS, STREAMS, strict=True):
            hello = {"v": 1, "id": 1, "op": "hello", "actor": "fuzz", "stream": stream, "base": 0, "run": run}
            self.send(Input("hello", "queries", [msgpack.packb(hello)]))
        self.settle()
        self.before = self.guarded()

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        opened.linger = 0
        opened.sndtimeo = int(1000 * ANSWER_SECONDS)
        opened.connect(endpoint)
        return opened

    def send(self, thing: Input) -> None:
        """Sends it; takes answers as they come."""
        self._sockets[thing.socket].send_multipart(thing.frames)
        self.sent[thing.kind] += 1
        if thing.socket == "queries":
            self._waiting += 1
            while self._waiting >= PIPELINED:
                self._take(ANSWER_SECONDS)
            while self._waiting and self._sockets["queries"].poll(0):
                self._take(0)

    def _take(self, seconds: float) -> None:
        queries = self._sockets["queries"]
        assert queries.poll(int(1000 * seconds) or 1), f"{self._waiting} requests got no answer within {seconds:g} s"
        answer = msgpack.unpackb(queries.recv())
        self._waiting -= 1
        self.answered += 1
        if "error" in answer:
            assert answer["error"]["message"], answer
            self.refused[answer["error"]["code"]] += 1

    def settle(self) -> None:
        """Returns when every request has its answer: there is somebody to answer, so there is one."""
        while self._waiting:
            self._take(ANSWER_SECONDS)

    def raw(self, moments: random.Random) -> None:
        """Connections that are none: half open, with a wrong greeting, with half a handshake, to every port."""
        endpoints = [*self.daemon.endpoints.values(), self.daemon.settings["http"]["endpoint"]]
        host, _, port = moments.choice(endpoints).rpartition("://")[2].rpartition(":")
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
        noise = [b"", b"GET / HTTP/1.1\r\n", b"GET /" + b"a" * 70_000, moments.randbytes(200), greeting, greeting[:20]]
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5) as connection:
            connection.sendall(
                moments.choice(noise) + (greeting if moments.random() < 0.3 else b"") + moments.randbytes(30)
            )
            connection.settimeout(0.002)
            connection.recv(100)
        self.sent["raw TCP"] += 1

    def guarded(self) -> tuple[Any, ...]:
        """Everything of the guarded run that can be read."""
        with LearnerClient(self.daemon.endpoint, run=GUARDED, timeout=ANSWER_SECONDS) as learner:
            return slot_bits(learner), learner.stats(), learner.entropy()

    def check(self) -> None:
        """The daemon lives, serves everywhere, and the guarded run is as it was, to the bit."""
        self.settle()
        assert self.daemon.process.poll() is None, f"the daemon ended with {self.daemon.process.poll()}"
        with urllib.request.urlopen(self.daemon.settings["http"]["endpoint"] + "/readyz", timeout=30) as answer:
            assert answer.status == 200
        assert self.guarded() == self.before, "the guarded run changed"
        bad = [
            line for line in self.daemon.lines if line.get("level") in ("error", "critical") or line["event"] == "text"
        ]
        assert not bad, bad[:3]

    @property
    def resident(self) -> float:
        """Memory of the daemon; MiB."""
        return psutil.Process(self.daemon.process.pid).memory_info().rss / 2**20

    def close(self) -> None:
        """Closes the sockets."""
        for opened in self._sockets.values():
            opened.close(0)
        self._context.term()


def run(target: Target, supply: Any, count: int, every: int, moments: random.Random) -> list[float]:
    """Throws `count` inputs, checks after each `every`; the daemon's memory at each check, MiB."""
    memory = [target.resident]
    for number in range(1, count + 1):
        if number % 500 == 0:
            target.raw(moments)
        else:
            target.send(supply.next())
        if number % every == 0 or number == count:
            target.check()
            memory.append(target.resident)
    return memory


def wait_for_drain(target: Target, seconds: float = 30.0) -> None:
    """Returns when the daemon has looked at all frames that were pushed at it."""
    deadline, seen = time.monotonic() + seconds, -1
    with LearnerClient(target.daemon.endpoint, timeout=ANSWER_SECONDS) as learner:
        while time.monotonic() < deadline:
            status = learner.status()
            now = status.frames_malformed + status.frames_unknown + status.batches + status.batches_rejected
            if now == seen:
                return
            seen = now
            time.sleep(0.2)
