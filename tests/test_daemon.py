"""The daemon as a process: start, refusal to start, signals, endpoints, command line, watchers, logs."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zmq

from cotuned.client import ActorClient, LearnerClient
from cotuned.service import read_record
from cotuned.wire import Counter, Slot, decode_control, encode_control
from tests.daemon_process import DaemonProcess, wait_until


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("COTUNED_")}
    with tempfile.TemporaryDirectory() as folder:  # a daemon keeps its state where it is started
        return subprocess.run(
            [sys.executable, "-m", "cotuned.service", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={**clean, **environment},
            cwd=folder,
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_cleanly(daemon: DaemonProcess, number: int) -> None:
    with ActorClient(daemon.endpoint) as actor:
        actor.push([1])
    assert daemon.terminate(number) == 0
    assert daemon.events("stopped")[0]["batches"] == 1


def test_sigterm_ends_process_1(tmp_path: Path) -> None:
    """In a container the daemon may be process 1, for which signals without a handler do nothing."""
    probe = subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True)
    if probe.returncode != 0:
        pytest.skip("needs the right to make a pid namespace")
    ports = [f"--endpoints.{name}=tcp://127.0.0.1:0" for name in ("actions", "queries", "watch")]
    ports.append("--http.endpoint=http://127.0.0.1:0")
    process = subprocess.Popen(
        ["unshare", "--pid", "--fork", sys.executable, "-m", "cotuned.service", "serve", "--device=cpu", *ports],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stderr is not None
    assert json.loads(process.stderr.readline())["event"] == "ready"
    child = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    os.kill(child, signal.SIGTERM)
    assert process.wait(10) == 0
    assert '"stopped"' in process.stderr.read()


def test_what_has_arrived_is_taken_in_before_it_stops(daemon: DaemonProcess) -> None:
    actor = ActorClient(daemon.endpoint)
    for _ in range(1000):
        actor.push([1] * 64)
    time.sleep(0.3)
    daemon.terminate()
    assert daemon.events("stopped")[0]["batches"] == 1000
    actor.abandon()


def test_a_waiting_acknowledgement_does_not_hold_up_the_stop(daemon: DaemonProcess) -> None:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(daemon.endpoint)
    actor = ActorClient(daemon.endpoint)
    socket.send(
        encode_control(
            {
                "id": 1,
                "op": "acknowledge",
                "stream": actor.stream,
                "wait_for": 5,
                "wait_ms": 60_000,
                "rejections_seen": 0,
            }
        )
    )
    time.sleep(0.2)
    assert daemon.terminate(timeout=5) == 0
    assert socket.poll(2000)
    assert decode_control(socket.recv())["answer"]["applied"] == 0
    socket.close(0)
    actor.abandon()


def test_five_daemons_on_port_0_each_say_where(start_daemon: Callable[..., DaemonProcess]) -> None:
    endpoints = [endpoint for _ in range(5) for endpoint in start_daemon().endpoints.values()]
    assert len(set(endpoints)) == 15
    assert all(endpoint.startswith("tcp://127.0.0.1:") for endpoint in endpoints)


def test_a_taken_endpoint_is_named(daemon: DaemonProcess) -> None:
    result = command(
        "serve", "--device", "cpu", "--endpoints.queries", daemon.endpoint, "--endpoints.actions", "tcp://127.0.0.1:0"
    )
    assert result.returncode == 1
    assert f"cannot bind {daemon.endpoint}: Address already in use" in result.stderr
    assert "Traceback" not in result.stderr


def test_faults_in_the_settings_end_the_start(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("observation: {ema_blend: 0.3}\nn_actoins: 4\n")
    result = command("serve", "--config", str(file))
    assert result.returncode == 1
    assert "observation.ema_blend: got 0.3" in result.stderr
    assert "did you mean n_actions?" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_flag_is_refused() -> None:
    result = command("serve", "--tuner.lr_tua", "3")
    assert result.returncode == 2
    assert "--tuner.lr_tua" in result.stderr


def test_a_gpu_that_is_asked_for_and_not_there_ends_the_start() -> None:
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception:
        result = command("serve", "--device", "cuda")
        assert result.returncode == 1
        assert "device: cpu" in result.stderr
        assert "Traceback" not in result.stderr
    else:
        pytest.skip("there is a GPU here")


def test_status_is_a_health_check(daemon: DaemonProcess) -> None:
    healthy = command("status", "--endpoint", daemon.endpoint, "--json")
    assert healthy.returncode == 0
    assert json.loads(healthy.stdout)["n_actions"] == 11
    assert command("status", COTUNED_ENDPOINT=daemon.endpoint).returncode == 0
    assert command("status", COTUNED_ENDPOINTS__QUERIES=daemon.endpoint).returncode == 0
    os.kill(daemon.process.pid, signal.SIGSTOP)
    hung = command("status", "--endpoint", daemon.endpoint, "--timeout", "0.3")
    os.kill(daemon.process.pid, signal.SIGCONT)
    assert hung.returncode == 1
    assert "within 0.3 s" in hung.stderr
    daemon.kill()
    assert command("status", "--endpoint", daemon.endpoint, "--timeout", "0.3").returncode == 1


def test_read_prints_a_slot(daemon: DaemonProcess) -> None:
    with LearnerClient(daemon.endpoint, run="a") as learner:
        learner.write(7, 1.5)
    assert command("read", "7", "--run", "a", "--endpoint", daemon.endpoint).stdout == "1.5\n"
    assert command("read", "TAU", "--run", "a", "--endpoint", daemon.endpoint).stdout == "1.0\n"
    unknown = command("read", "7", "--run", "b", "--endpoint", daemon.endpoint)
    assert unknown.returncode == 1
    assert "known are a" in unknown.stderr


def test_config_commands(tmp_path: Path) -> None:
    shown = command("config", "show", "--tuner.lr_tau", "0.5")
    assert "lr_tau: 0.5" in shown.stdout
    file = tmp_path / "shown.yaml"
    file.write_text(shown.stdout)
    assert command("config", "check", str(file)).returncode == 0  # what is shown can be used
    file.write_text("runs: 3")
    refused = command("config", "check", str(file))
    assert refused.returncode == 1
    assert "runs: got 3" in refused.stderr
    assert json.loads(command("config", "schema").stdout)["properties"]["n_actions"]["maximum"] == 4096


def test_ipc_sockets_are_for_this_user_and_this_daemon(
    start_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    endpoints = {name: f"ipc://{tmp_path}/{name}" for name in ("actions", "queries", "watch")}
    umask = os.umask(0)
    try:
        daemon = start_daemon(endpoints=endpoints)
    finally:
        os.umask(umask)
    mode = (tmp_path / "queries").stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert not mode & (stat.S_IRWXG | stat.S_IRWXO)
    with ActorClient(daemon.endpoint) as actor:
        actor.push([1])
    second = command("serve", "--device", "cpu", *(f"--endpoints.{n}={e}" for n, e in endpoints.items()))
    assert second.returncode == 1
    assert "is another daemon running there" in second.stderr
    with LearnerClient(daemon.endpoint) as learner:
        assert learner.stats().batches == 1
    daemon.kill()
    daemon.restart()  # a lock file left by a killed daemon is none


def test_watchers_get_rows_as_they_change(daemon: DaemonProcess) -> None:
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(daemon.endpoints["watch"])
    socket.subscribe(b"a\0")
    time.sleep(0.3)
    for run in ("ab", "a"):
        with ActorClient(daemon.endpoint, run=run) as actor:
            actor.push(np.arange(1100) % 11)
    assert socket.poll(5000)
    topic, frame = socket.recv_multipart()
    message = decode_control(frame)
    assert topic == b"a\0"
    assert message["run"] == "a"
    assert set(message["slots"]) == set(Slot.__members__)
    assert set(message["counters"]) == set(Counter.__members__)
    assert message["counters"]["ACTIONS_TRAIN"] == 1100
    socket.close(0)


def test_one_line_a_second_under_load_and_none_at_rest(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon(log={"interval": 0.3})
    with ActorClient(daemon.endpoint) as actor:
        for _ in range(3000):
            actor.push([1])
    wait_until(lambda: sum(line.get("batches", 0) for line in daemon.events("load")) == 3000)
    time.sleep(0.4)
    lines = len(daemon.lines)
    time.sleep(1)
    assert len(daemon.lines) == lines < 30


def test_an_exposed_endpoint_reminds(start_daemon: Callable[..., DaemonProcess]) -> None:
    endpoints = {"actions": "tcp://0.0.0.0:0", "queries": "tcp://0.0.0.0:0", "watch": "tcp://127.0.0.1:0"}
    daemon = start_daemon(endpoints=endpoints, insecure=True)
    wait_until(lambda: daemon.events("insecure"))
    assert len(daemon.events("insecure")[0]["endpoints"]) == 2
    endpoint = daemon.endpoint.replace("0.0.0.0", "127.0.0.1")
    with ActorClient(endpoint) as actor:  # is told 0.0.0.0, pushes to the host that it knows
        actor.push([1])


def test_a_client_that_asks_and_goes_leaves_the_daemon_alive(daemon: DaemonProcess) -> None:
    for _ in range(20):
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(daemon.endpoint)
        socket.send(encode_control({"id": 1, "op": "status"}))
        socket.close(50)
    with LearnerClient(daemon.endpoint) as learner:
        assert learner.status().n_actions == 11


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"rubbish", "bad_frame"),
        (encode_control({"id": 1, "op": "explode"}), "invalid_request"),
        (encode_control({"id": 1}), "invalid_request"),
        (encode_control({"op": "status"}), "bad_frame"),
        (encode_control({"id": 1, "op": "status", "extra": 1}), "invalid_request"),
        (encode_control({"id": 1, "op": "cotune", "session": "1", "step": 0}), "invalid_request"),
        (encode_control({"id": 1, "op": "cotune", "session": 1, "step": 0.0}), "invalid_request"),
        (encode_control({"id": 1, "op": "cotune", "session": 1, "step": True}), "invalid_request"),
        (encode_control({"id": 1, "op": "cotune", "session": 1}), "invalid_request"),
        (encode_control({"id": 1, "op": "write", "slot": 1, "value": float("nan")}), "invalid_request"),
        (encode_control({"id": 1, "op": "write", "slot": 1, "value": 1e300}), "invalid_request"),
        (encode_control({"id": 1, "op": "hello", "actor": "a" * 999, "stream": 1, "base": 0}), "invalid_request"),
        (encode_control({"id": 1, "op": "hello", "actor": "a", "stream": 1, "base": -1}), "invalid_request"),
        (b"\x82\xa1v\x09\xa2id\x01", "protocol_mismatch"),
    ],
)
def test_a_bad_request_gets_an_error_and_changes_nothing(daemon: DaemonProcess, frame: bytes, code: str) -> None:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(daemon.endpoint)
    socket.send(frame)
    assert socket.poll(5000)
    error = decode_control(socket.recv())["error"]
    assert error["code"] == code
    assert error["message"]
    socket.close(0)
    with LearnerClient(daemon.endpoint) as learner:
        assert learner.status().runs == []


def test_the_record_is_what_counted_in_order(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    daemon = start_daemon(record=str(tmp_path / "record"))
    with ActorClient(daemon.endpoint, actor="me", run="r") as actor:
        actor.n_actions = 12
        for action in (3, 11, 4):
            actor.push([action], step=action, phase="prefill")
        with pytest.raises(Exception, match="rejected"):
            actor.flush()
    daemon.terminate()
    recorded = list(read_record(tmp_path / "record"))
    assert [(r.run, r.actor, r.batch.executed, r.batch.sequence, r.batch.step, r.batch.phase) for r in recorded] == [
        ("r", "me", b"\3", 1, 3, 1),
        ("r", "me", b"\4", 3, 4, 1),
    ]


def test_a_record_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    result = command("serve", "--device", "cpu", "--record", str(tmp_path / "none" / "record"))
    assert result.returncode == 1
    assert "cannot append to" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["read", "9" * 30], "slot: got 9999"),
        (["read", "²"], "slot name '²' cannot be used"),
        (["status", "--timeout", "1e300"], "timeout: got 1e+300"),
        (["status", "--endpoint", "tcp://127.0.0.1:99999"], "endpoint: got 'tcp://127.0.0.1:99999'"),
        (["config", "check", "/nonexistent"], "cannot read the settings file"),
    ],
)
def test_a_bad_argument_gets_a_sentence_and_no_traceback(
    daemon: DaemonProcess, arguments: list[str], says: str
) -> None:
    result = command(*arguments, COTUNED_ENDPOINT=daemon.endpoint)
    assert result.returncode == 1
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_a_flag_is_not_taken_for_the_beginning_of_another() -> None:
    result = command("serve", "--n_action", "4")
    assert result.returncode == 2
    assert "--n_action" in result.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_takes(unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "cotuned.service", "config", "show"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert process.returncode == 1
    assert "No space left" in process.stderr
    assert "Traceback" not in process.stderr


def test_a_full_disk_ends_the_record_and_not_the_daemon(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon(record="/dev/full", log={"interval": 0.1})
    with ActorClient(daemon.endpoint) as actor:
        for _ in range(100):
            actor.push([1])
    wait_until(lambda: daemon.events("record ended"))
    assert daemon.events("record ended")[0]["path"] == "/dev/full"
    with LearnerClient(daemon.endpoint) as learner:
        assert learner.stats().batches == 100
    assert daemon.terminate() == 0


def test_the_record_is_on_disk_within_a_log_interval(
    start_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    daemon = start_daemon(record=str(tmp_path / "record"), log={"interval": 0.1})
    with ActorClient(daemon.endpoint) as actor:
        for _ in range(10):
            actor.push([1])
    wait_until(lambda: len(list(read_record(tmp_path / "record"))) == 10)
    daemon.kill()
    daemon.restart()  # appends
    assert len(list(read_record(tmp_path / "record"))) == 10


def test_a_file_that_is_no_record_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a record")
    result = command("serve", "--device", "cpu", "--record", str(file))
    assert result.returncode == 1
    assert "is not a record" in result.stderr
    assert file.read_text() == "not a record"


def test_too_few_files_for_the_actors_is_said(tmp_path: Path) -> None:
    script = "ulimit -n 128; exec " + sys.executable + " -m cotuned.service serve --device cpu"
    ports = " ".join(f"--endpoints.{name}=tcp://127.0.0.1:0" for name in ("actions", "queries", "watch"))
    process = subprocess.Popen(["bash", "-c", f"{script} {ports}"], stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stderr is not None
    line = json.loads(process.stderr.readline())
    process.terminate()
    process.wait(10)
    process.stderr.close()
    assert (line["event"], line["limit"], line["actors"]) == ("few files", 128, 32)


def test_a_typo_in_a_learners_run_is_hinted_at(daemon: DaemonProcess) -> None:
    with ActorClient(daemon.endpoint), LearnerClient(daemon.endpoint, run="defualt") as learner:
        assert "no actor has opened the run 'defualt', runs are: default, defualt" in learner.cotune(0).reason
    with ActorClient(daemon.endpoint), LearnerClient(daemon.endpoint) as learner:
        assert "no actor" not in learner.cotune(0).reason
