"""CURVE on real daemons: who gets in, who may ask what, and what happens when a key goes."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket as sockets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from cotuned.client import ActorClient, AuthenticationFailed, DaemonUnreachable, Forbidden, LearnerClient
from cotuned.config import Settings
from cotuned.service.daemon import Daemon
from cotuned.wire import Batch, encode_batch
from cotuned.wire.keys import Keys
from tests.curve_keys import KeyFolder, StartDaemon, ask, ask_on, peer
from tests.daemon_process import DaemonProcess, wait_until

LOOK = 3.0
"""Seconds within which a change of the folder is in force, on a slow machine too; the daemon looks once a second."""


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path / "keys")


@pytest.fixture
def guarded(start_daemon: StartDaemon, keys: KeyFolder) -> DaemonProcess:
    return start_daemon(security=keys.settings)


def batch(stream: int, number: int) -> bytes:
    return encode_batch(Batch(stream, number, 0, 0, bytes([1, 2, 3]), None, None))


# -- who may ask what ------------------------------------------------------------------------------------------------

REQUESTS: dict[str, dict[str, Any]] = {
    "hello": {"actor": "a", "stream": 77, "base": 0, "run": "r"},
    "acknowledge": {"stream": 77},
    "share": {"stream": 77, "handle": bytes(64), "size": 1, "gpu": "0" * 32, "host": "h"},
    "goodbye": {"stream": 77},
    "cotune": {"session": 1, "step": 0, "run": "r"},
    "write": {"slot": 7, "value": 1.5, "run": "r"},
    "attach": {"run": "r"},
    "read": {"slot": 583, "run": "r"},
    "entropy": {"run": "r"},
    "stats": {"run": "r"},
    "status": {},
}
ALLOWED = {
    "actor": {"hello", "acknowledge", "share", "goodbye", "status"},
    "learner": {"cotune", "write", "attach", "read", "entropy", "stats", "status"},
    "observer": {"read", "entropy", "stats", "status"},
}


def test_every_role_may_ask_what_it_may_and_nothing_else(guarded: DaemonProcess, keys: KeyFolder) -> None:
    ask(guarded, keys.of("learner"), "cotune", **REQUESTS["cotune"])  # so that the run is there
    for role, allowed in ALLOWED.items():
        with peer(zmq.DEALER, guarded.endpoint, keys.of(role)) as socket:
            for op, fields in REQUESTS.items():
                answer = ask_on(socket, op, **fields)
                code = answer.get("error", {}).get("code")
                if op not in allowed:
                    assert code == "forbidden", (role, op, answer)
                    assert f"has the role {role}, expected " in answer["error"]["message"]
                else:  # the bus in host memory cannot be shared, whoever asks
                    assert code == ("device_not_shared" if op in ("attach", "share") else None), (role, op, answer)


def test_what_is_forbidden_changes_nothing(guarded: DaemonProcess, keys: KeyFolder) -> None:
    for op in ("cotune", "write", "attach"):
        assert ask(guarded, keys.of("actor"), op, **REQUESTS[op])["error"]["code"] == "forbidden"
    assert ask(guarded, keys.of("learner"), "hello", **REQUESTS["hello"])["error"]["code"] == "forbidden"
    status = ask(guarded, keys.of("observer"), "status")["answer"]
    assert (status["runs"], status["actors"]) == ([], 0)


def test_the_clients_work_with_keys(guarded: DaemonProcess, keys: KeyFolder) -> None:
    with ActorClient(guarded.endpoint, keys=keys.of("actor")) as actor:
        for _ in range(50):
            actor.push(np.arange(11).repeat(100))
        actor.flush()
    with LearnerClient(guarded.endpoint, keys=keys.of("learner")) as learner:
        assert learner.stats().batches == 50
        assert learner.cotune(0).fresh
    with pytest.raises(Forbidden, match="hello: the key of this connection has the role learner, expected actor"):
        ActorClient(guarded.endpoint, keys=keys.of("learner"))
    with LearnerClient(guarded.endpoint, keys=keys.of("observer")) as watcher:
        assert watcher.entropy().observations > 0
        with pytest.raises(Forbidden, match="expected learner"):
            watcher.cotune(1)


def test_keys_come_from_the_environment(
    guarded: DaemonProcess, keys: KeyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in keys.environment("learner").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COTUNED_ENDPOINT", guarded.endpoint)
    with LearnerClient() as learner:
        assert learner.status().n_actions == 11
    monkeypatch.delenv("COTUNED_SERVER_KEY")
    with pytest.raises(ValueError, match="COTUNED_SERVER_KEY is not set; set both"):
        LearnerClient()


def test_curve_does_not_break_what_streams_promise(guarded: DaemonProcess, keys: KeyFolder) -> None:
    """A daemon that is killed and comes back takes every batch once, over connections that shake hands anew."""
    with ActorClient(guarded.endpoint, keys=keys.of("actor"), timeout=20) as actor:
        actor.push([1])
        actor.flush()
        guarded.kill()
        for _ in range(20):
            actor.push([2])
        guarded.restart()
        actor.flush()
    with LearnerClient(guarded.endpoint, keys=keys.of("learner")) as learner:
        assert learner.stats().batches == 21


def test_a_stream_still_belongs_to_its_key_after_the_daemon_was_killed(guarded: DaemonProcess, keys: KeyFolder) -> None:
    other = keys.make("other", "actor")
    with ActorClient(guarded.endpoint, keys=keys.of("actor"), timeout=20) as actor:
        actor.push([1])
        actor.flush()
        guarded.kill()
        guarded.restart()
        refused = ask(guarded, other, "acknowledge", stream=actor.stream)
        assert refused["error"]["code"] == "forbidden"
        actor.push([2])
    with LearnerClient(guarded.endpoint, keys=keys.of("learner")) as learner:
        assert (learner.stats().batches, learner.status().frames_unknown) == (2, 0)


def test_streams_opened_with_keys_go_on_when_the_daemon_comes_back_without(
    guarded: DaemonProcess, keys: KeyFolder
) -> None:
    with ActorClient(guarded.endpoint, keys=keys.of("actor")) as actor:
        actor.push([1])
        actor.flush()
        stream = actor.stream
        actor.abandon()
    guarded.kill()
    del guarded.settings["security"]
    guarded.restart()
    with peer(zmq.PUSH, guarded.endpoints["actions"], None) as push:
        push.send(batch(stream, 2))
        with LearnerClient(guarded.endpoint) as learner:
            wait_until(lambda: learner.stats().batches == 2)


def test_clients_that_were_refused_come_in_once_their_key_is_back(guarded: DaemonProcess, keys: KeyFolder) -> None:
    """libzmq does not connect again after a refusal, so a client that did nothing would be lost."""
    files = {role: keys.folder / "clients" / role / f"{role}.key" for role in ("actor", "learner")}
    actor = ActorClient(guarded.endpoint, keys=keys.of("actor"), timeout=10)
    learner = LearnerClient(guarded.endpoint, keys=keys.of("learner"))
    actor.push([1])
    actor.flush()
    guarded.kill()
    for file in files.values():
        file.rename(file.with_suffix(".away"))
    guarded.restart()
    for _ in range(2):  # at first while libzmq tries, then when it has given up
        actor.push([2])
        with pytest.raises(AuthenticationFailed):
            actor.flush()
        with pytest.raises(AuthenticationFailed):
            learner.cotune(0)
    for file in files.values():
        file.with_suffix(".away").rename(file)
    time.sleep(1.1)
    actor.flush(20)
    assert learner.cotune(0).owner
    assert learner.stats().batches == 3
    learner.close()
    actor.close()


# -- a stream belongs to a key ---------------------------------------------------------------------------------------


def test_an_actor_cannot_touch_the_stream_of_another(guarded: DaemonProcess, keys: KeyFolder) -> None:
    thief = keys.make("thief", "actor")
    with ActorClient(guarded.endpoint, keys=keys.of("actor")) as actor:
        actor.push([1])
        actor.flush()
        time.sleep(1.1)  # the daemon has seen the new key
        with peer(zmq.PUSH, guarded.endpoints["actions"], thief) as push:
            push.send(batch(actor.stream, 2))
            wait_until(lambda: ask(guarded, thief, "status")["answer"]["frames_unknown"] == 1)
        for op in ("hello", "acknowledge", "share", "goodbye"):
            fields = {**REQUESTS[op], "stream": actor.stream, **({"run": "default"} if op == "hello" else {})}
            error = ask(guarded, thief, op, **fields)["error"]
            assert error["code"] == "forbidden", op
            assert "opened with another key" in error["message"]
        actor.push([5])
        actor.flush()
    stats = ask(guarded, keys.of("learner"), "stats")["answer"]
    assert (stats["batches_train"], stats["actions_train"]) == (2, 2)


def test_batches_come_from_actors_only(guarded: DaemonProcess, keys: KeyFolder) -> None:
    with ActorClient(guarded.endpoint, keys=keys.of("actor")) as actor:
        for role in ("learner", "observer"):
            with peer(zmq.PUSH, guarded.endpoints["actions"], keys.of(role)) as push:
                push.send(batch(actor.stream, 1))
                time.sleep(0.4)
    wait_until(lambda: guarded.events("peer refused"))
    assert guarded.events("peer refused")[0]["socket"] == "actions"
    status = ask(guarded, keys.of("observer"), "status")["answer"]
    assert (status["batches"], status["frames_unknown"]) == (0, 0)


# -- keys that do not fit --------------------------------------------------------------------------------------------


def wrong_server(keys: KeyFolder) -> Keys:
    own = keys.of("actor")
    return Keys(zmq.curve_keypair()[0], own.public, own.secret)


@pytest.mark.parametrize("who", ["stranger", "wrong server", "nobody"])
def test_keys_that_do_not_fit_are_named_within_2_seconds(guarded: DaemonProcess, keys: KeyFolder, who: str) -> None:
    given = {"stranger": keys.stranger, "wrong server": wrong_server(keys), "nobody": None}[who]
    says = {"stranger": "does not know this client's key", "wrong server": "the key that this client expects"}
    for open_client in (ActorClient, lambda *a, **k: LearnerClient(*a, **k).cotune(0)):
        begun = time.monotonic()
        with pytest.raises(AuthenticationFailed, match=says.get(who, "wants keys")) as caught:
            open_client(guarded.endpoint, keys=given, timeout=30)
        assert time.monotonic() - begun < 2
        assert isinstance(caught.value, DaemonUnreachable)
        assert "keygen" in str(caught.value)


def test_keys_where_none_are_wanted(daemon: DaemonProcess, keys: KeyFolder) -> None:
    with pytest.raises(AuthenticationFailed, match="does not use CURVE"):
        ActorClient(daemon.endpoint, keys=keys.of("actor"), timeout=30)


@pytest.mark.parametrize("with_keys", [True, False])
def test_a_daemon_that_is_absent_is_only_unreachable(keys: KeyFolder, with_keys: bool) -> None:
    """Nothing there, something that hangs up as a port mapping before a dead daemon does, and something mute."""
    given = keys.of("actor") if with_keys else None
    with sockets.create_server(("127.0.0.1", 0)) as hangs_up, sockets.create_server(("127.0.0.1", 0)) as mute:
        threading.Thread(target=_hang_up, args=(hangs_up,), daemon=True).start()
        for port in (hangs_up.getsockname()[1], mute.getsockname()[1], _free_port()):
            begun = time.monotonic()
            learner = LearnerClient(f"tcp://127.0.0.1:{port}", keys=given, timeout=1.5)
            with learner, pytest.raises(DaemonUnreachable) as caught:
                learner.cotune(0)
            assert type(caught.value) is DaemonUnreachable
            assert 1.4 < time.monotonic() - begun < 2.5


def _free_port() -> int:
    with sockets.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _hang_up(server: sockets.socket) -> None:
    while True:
        try:
            server.accept()[0].close()
        except OSError:
            return


def test_a_daemon_that_hangs_is_only_unreachable(guarded: DaemonProcess, keys: KeyFolder) -> None:
    with LearnerClient(guarded.endpoint, keys=keys.of("learner"), timeout=1.5) as learner:
        learner.cotune(0)
        guarded.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(DaemonUnreachable) as caught:
                learner.cotune(1)
            assert type(caught.value) is DaemonUnreachable
        finally:
            guarded.process.send_signal(signal.SIGCONT)
        assert learner.cotune(1).step == 1


def test_neither_plain_peers_nor_random_bytes_get_anything_in(guarded: DaemonProcess, keys: KeyFolder) -> None:
    for name, kind in (("actions", zmq.PUSH), ("queries", zmq.DEALER), ("watch", zmq.SUB)):
        endpoint = guarded.endpoints[name]
        with peer(kind, endpoint, None) as plain:
            if kind == zmq.SUB:
                plain.subscribe(b"")
            else:
                plain.send(batch(1, 1))
            assert not plain.poll(300, zmq.POLLIN if kind != zmq.PUSH else 0)
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01"
        curve = greeting[:-1] + b"\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
        for head in (b"", greeting, greeting + b"NULL".ljust(20, b"\0") + bytes(32), curve):
            for _ in range(10):
                raw = sockets.create_connection((host, int(port)), timeout=5)
                with raw, contextlib.suppress(OSError):  # hung up on in the middle: as it should be
                    raw.sendall(head + secrets.token_bytes(2000))
    status = ask(guarded, keys.of("observer"), "status")["answer"]
    assert status["batches"] == status["frames_malformed"] == status["frames_unknown"] == status["actors"] == 0
    with ActorClient(guarded.endpoint, keys=keys.of("actor")) as actor:  # and it works as before
        actor.push([1])


def test_watching_needs_an_observers_key(guarded: DaemonProcess, keys: KeyFolder) -> None:
    endpoint = guarded.endpoints["watch"]
    with (
        peer(zmq.SUB, endpoint, keys.of("observer")) as watcher,
        peer(zmq.SUB, endpoint, None) as plain,
        peer(zmq.SUB, endpoint, keys.stranger) as stranger,
        peer(zmq.SUB, endpoint, keys.of("actor")) as actor,
    ):
        for socket in (watcher, plain, stranger, actor):
            socket.subscribe(b"")
        write_until(guarded, keys, lambda: watcher.poll(0))
        assert not any(socket.poll(100) for socket in (plain, stranger, actor))


def write_until(daemon: DaemonProcess, keys: KeyFolder, condition: Any) -> None:
    """Makes the daemon publish until the condition holds: a subscription takes its time."""
    with LearnerClient(daemon.endpoint, keys=keys.of("learner")) as learner:

        def written() -> bool:
            learner.write(7, 1.0)
            time.sleep(0.05)
            return bool(condition())

        wait_until(written)


# -- keys that come and go -------------------------------------------------------------------------------------------


def test_a_new_key_gets_in_without_a_restart(guarded: DaemonProcess, keys: KeyFolder) -> None:
    new = keys.make("new", "actor")
    time.sleep(1.1)
    with ActorClient(guarded.endpoint, keys=new) as actor:
        actor.push([1])
    assert not guarded.events("client key refused")


def test_a_key_that_is_taken_away_ends_open_connections(guarded: DaemonProcess, keys: KeyFolder) -> None:
    keys.make("other", "actor")
    time.sleep(1.1)
    actor = ActorClient(guarded.endpoint, keys=keys.of("actor"))
    other = ActorClient(guarded.endpoint, keys=keys.of("other"))
    learner = LearnerClient(guarded.endpoint, keys=keys.of("learner"))
    actor.push([1])
    actor.flush()
    learner.cotune(0)
    keys.revoke("actor", "actor")
    keys.revoke("learner", "learner")
    wait_until(lambda: len(guarded.events("client keys read")) >= 3, LOOK)
    with pytest.raises(Forbidden, match=r"no role \(any more\)"):
        learner.cotune(1)
    with pytest.raises(Forbidden, match=r"no role \(any more\)"):
        actor.push([1])
        actor.flush()
    status = ask(guarded, keys.of("observer"), "status")["answer"]
    assert (status["batches"], status["frames_unknown"]) == (1, 1)
    other.push([2])  # is not disturbed
    other.flush()
    with pytest.raises(AuthenticationFailed):
        ActorClient(guarded.endpoint, keys=keys.of("actor"))
    actor.abandon()
    learner.close()
    other.close()


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_watcher_whose_key_is_taken_away_hears_no_more(
    start_daemon: StartDaemon, keys: KeyFolder, tmp_path: Path, transport: str
) -> None:
    endpoints = dict.fromkeys(("actions", "queries", "watch"), "tcp://127.0.0.1:0")
    if transport == "ipc":
        endpoints["watch"] = f"ipc://{tmp_path}/watch"
    guarded = start_daemon(security=keys.settings, endpoints=endpoints)
    staying = keys.make("staying", "observer")
    time.sleep(1.1)
    with (
        peer(zmq.SUB, guarded.endpoints["watch"], keys.of("observer")) as leaving_socket,
        peer(zmq.SUB, guarded.endpoints["watch"], staying) as staying_socket,
    ):
        for socket in (leaving_socket, staying_socket):
            socket.subscribe(b"")
        write_until(guarded, keys, lambda: leaving_socket.poll(0) and staying_socket.poll(0))
        read = len(guarded.events("client keys read"))
        keys.revoke("observer", "observer")
        wait_until(lambda: len(guarded.events("client keys read")) > read, LOOK)
        time.sleep(0.2)
        _empty(leaving_socket)
        _empty(staying_socket)
        write_until(guarded, keys, lambda: staying_socket.poll(0))
        assert not leaving_socket.poll(200)


def _empty(socket: zmq.Socket[bytes]) -> None:
    while socket.poll(0):
        socket.recv_multipart()


def test_a_key_file_that_cannot_be_read_refuses_its_key_and_says_so(guarded: DaemonProcess, keys: KeyFolder) -> None:
    """pyzmq's own reload keeps every key that it had when one file is broken, the revoked ones too."""
    actors = keys.folder / "clients" / "actor"
    keys.revoke("actor", "actor")
    (actors / "broken.key").write_text("no key")
    os.mkfifo(actors / "pipe.key")  # must not hold up who reads it
    (keys.folder / "clients" / "learner" / "double.key").write_bytes(
        (keys.folder / "clients" / "observer" / "observer.key").read_bytes()
    )
    wait_until(lambda: len(guarded.events("client key refused")) >= 3, LOOK)
    events = guarded.events("client key refused")
    assert {event["level"] for event in events} == {"error"}
    assert any("pipe.key is not a key file" in event["why"] for event in events)
    assert any("broken.key is not a key file" in event["why"] for event in events)
    assert any("folder of another role" in event["why"] for event in events)
    for name in ("actor", "observer"):
        with pytest.raises(AuthenticationFailed):
            LearnerClient(guarded.endpoint, keys=keys.of(name)).status()
    time.sleep(2.2)
    assert len(guarded.events("client key refused")) == len(events)  # said once, not each second
    with LearnerClient(guarded.endpoint, keys=keys.of("learner")) as learner:
        learner.cotune(0)


def test_a_folder_that_cannot_be_read_lets_nobody_in(guarded: DaemonProcess, keys: KeyFolder) -> None:
    assert _ready(guarded) == (200, "ready\n")
    clients = keys.folder / "clients"
    clients.rename(keys.folder / "away")
    wait_until(lambda: _ready(guarded)[0] == 503, LOOK)
    assert "nobody is let in" in _ready(guarded)[1]
    with pytest.raises(AuthenticationFailed):
        LearnerClient(guarded.endpoint, keys=keys.of("learner")).status()
    (keys.folder / "away").rename(clients)
    wait_until(lambda: _ready(guarded)[0] == 200, LOOK)
    with LearnerClient(guarded.endpoint, keys=keys.of("learner")) as learner:
        learner.cotune(0)


def _ready(daemon: DaemonProcess) -> tuple[int, str]:
    return _get_ready(daemon.settings["http"]["endpoint"])


def _get_ready(endpoint: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(endpoint + "/readyz", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


# -- when the authenticator dies, and many contexts --------------------------------------------------------------------


@pytest.fixture
def inside(keys: KeyFolder) -> Iterator[Daemon]:
    """A daemon in this process, to break from within."""
    daemon = Daemon(
        Settings(
            device="cpu",
            endpoints=dict.fromkeys(("actions", "queries", "watch"), "tcp://127.0.0.1:0"),
            http={"endpoint": "http://127.0.0.1:0"},
            security=keys.settings,
        )
    )
    thread = threading.Thread(target=daemon.run)
    thread.start()
    yield daemon
    daemon.stop()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_if_zaps_thread_dies_nobody_new_gets_in(
    inside: Daemon, keys: KeyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cotuned.service import gatekeeper

    with LearnerClient(inside.endpoints["queries"], keys=keys.of("learner")) as inside_already:
        inside_already.cotune(0)
        monkeypatch.setattr(gatekeeper._Credentials, "callback", lambda *_: 1 / 0)
        late = LearnerClient(inside.endpoints["queries"], keys=keys.of("observer"), timeout=3)
        with late, pytest.raises(DaemonUnreachable):
            late.status()
        monkeypatch.undo()  # the thread is dead all the same
        assert _get_ready(inside.endpoints["http"]) == (
            503,
            "the thread that checks keys has died, so no new peer is let in\n",
        )
        late = LearnerClient(inside.endpoints["queries"], keys=keys.of("observer"), timeout=3)
        with late, pytest.raises(AuthenticationFailed, match="admits nobody at present"):
            late.status()
        assert inside_already.cotune(1).step == 1  # who is in stays in


@pytest.mark.slow
def test_300_curve_contexts(guarded: DaemonProcess, keys: KeyFolder) -> None:
    given = keys.of("learner")
    files = len(os.listdir(f"/proc/{guarded.process.pid}/fd"))
    for step in range(300):
        with LearnerClient(guarded.endpoint, keys=given) as learner:
            if step % 3:
                learner.cotune(step)  # and every third is closed in mid-handshake, or before
    wait_until(lambda: len(os.listdir(f"/proc/{guarded.process.pid}/fd")) <= files + 10)
    assert guarded.process.poll() is None
    with LearnerClient(guarded.endpoint, keys=given) as learner:
        assert learner.status().n_actions == 11
