"""Health, readiness, metrics and the page of a real daemon."""

from __future__ import annotations

import http.client
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cotuned.client import ActorClient, BatchRejected, LearnerClient
from cotuned.config import load
from cotuned.wire.errors import ConfigError
from tests.daemon_process import DaemonProcess, wait_until

StartDaemon = Callable[..., DaemonProcess]


def get(daemon: DaemonProcess, path: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(daemon.settings["http"]["endpoint"] + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scrape(daemon: DaemonProcess, **headers: str) -> dict[tuple[str, ...], float]:
    """Every sample of /metrics by name and label values, in the order of the labels' names."""
    code, text = get(daemon, "/metrics", **headers)
    assert code == 200, text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_what_the_run_is(daemon: DaemonProcess) -> None:
    assert get(daemon, "/healthz") == (200, "alive\n")
    assert get(daemon, "/readyz") == (200, "ready\n")
    assert ("cotuned_alpha", "default") not in scrape(daemon)
    with ActorClient(daemon.endpoint) as actor, LearnerClient(daemon.endpoint) as learner:
        actor.push(np.arange(1100) % 11, phase="prefill")
        actor.push([0] * 1100, proposed=[1] * 550 + [0] * 550)
        actor.push([1] * 5)
        actor.flush()
        actor.push([0], probs=np.full((1, 11), 1 / 11))
        actor._delivery.send(b"\x00", 1)
        answer = learner.cotune(0)
        actor.abandon()
    found = scrape(daemon)
    assert found["cotuned_alpha", "default"] == pytest.approx(answer.alpha, rel=1e-6)
    assert found["cotuned_tau", "default"] == pytest.approx(answer.tau, rel=1e-6)
    assert found["cotuned_executed_entropy_nats", "default"] == pytest.approx(answer.entropy, rel=1e-6)
    assert found["cotuned_gate_rate", "default"] == 0.5
    assert ("cotuned_policy_entropy_nats", "default") not in found  # never reported: absent, not 0
    assert found["cotuned_actions_total", "prefill", "default"] == 1100
    assert found["cotuned_actions_total", "train", "default"] >= 1105
    assert found["cotuned_observations_total", "default"] == 2
    assert found["cotuned_updates_total", "default"] == 1
    assert found["cotuned_ready",] == 1
    wait_until(lambda: scrape(daemon)["cotuned_frames_malformed_total",] == 1)


def test_a_rejected_batch_is_counted(daemon: DaemonProcess) -> None:
    with ActorClient(daemon.endpoint) as actor, pytest.raises(BatchRejected):
        actor._delivery.send(_frame(actor, [11]), 1)
        actor.flush()
    assert scrape(daemon)["cotuned_batches_rejected_total", "default"] == 1


def _frame(actor: ActorClient, actions: list[int]) -> bytes:
    from cotuned.wire.codec import Batch, encode_batch

    return encode_batch(Batch(actor.stream, 1, 0, 0, bytes(actions)))


class _Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def test_the_page_shows_each_run(daemon: DaemonProcess) -> None:
    with ActorClient(daemon.endpoint, run="night/7") as actor:
        actor.push([0, 1] * 512)
    code, text = get(daemon, "/")
    parser = _Cells()
    parser.feed(text)
    assert code == 200
    assert {"night/7", "0.693", "0.2", "1"} <= set(parser.cells)
    assert "policy H" in parser.cells


def test_other_paths_and_methods_are_refused(daemon: DaemonProcess) -> None:
    assert get(daemon, "/secrets")[0] == 404
    assert get(daemon, "/..%2f..%2fetc/passwd")[0] == 404
    host = daemon.settings["http"]["endpoint"].removeprefix("http://")
    for method, code in (("HEAD", 200), ("POST", 501), ("DELETE", 501)):
        connection = http.client.HTTPConnection(host, timeout=10)
        connection.request(method, "/healthz")
        assert connection.getresponse().status == code
        connection.close()


def test_a_stopped_daemon_is_not_alive_and_a_hung_engine_says_so(daemon: DaemonProcess) -> None:
    daemon.process.send_signal(signal.SIGSTOP)
    with pytest.raises((TimeoutError, urllib.error.URLError)):
        urllib.request.urlopen(daemon.settings["http"]["endpoint"] + "/healthz", timeout=1)
    daemon.process.send_signal(signal.SIGCONT)
    wait_until(lambda: get(daemon, "/healthz")[0] == 200)


def test_an_engine_that_does_not_turn_is_neither_alive_nor_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    from cotuned.config.settings import HttpSettings
    from cotuned.service import http as module
    from cotuned.service.report import Reports

    def never() -> Any:
        raise AssertionError("nobody turns")

    monkeypatch.setattr(module, "LONGEST_SILENCE", 0.2)
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.2)
    server = module.HttpServer(HttpSettings(endpoint="http://127.0.0.1:0"), Reports(never))
    try:
        time.sleep(0.3)
        for path, says in (
            ("/healthz", "not turned for"),
            ("/readyz", "did not answer"),
            ("/metrics", "did not answer"),
        ):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(server.endpoint + path, timeout=5)
            assert caught.value.code == 503
            assert says in caught.value.read().decode()
    finally:
        server.close()


def test_a_token_guards_metrics_and_page_and_not_health(start_daemon: StartDaemon, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a long random word\n")
    daemon = start_daemon(http={"endpoint": "http://127.0.0.1:0", "token_file": str(token)})
    for path in ("/metrics", "/"):
        assert get(daemon, path)[0] == 401
        assert get(daemon, path, Authorization="Bearer another")[0] == 401
        assert get(daemon, path, Authorization="Bearer a long random word")[0] == 200
    assert get(daemon, "/healthz")[0] == get(daemon, "/readyz")[0] == 200


def test_half_open_connections_do_not_keep_others_out_for_long(daemon: DaemonProcess) -> None:
    host, _, port = daemon.settings["http"]["endpoint"].removeprefix("http://").rpartition(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(60)]
    with LearnerClient(daemon.endpoint) as learner:
        assert learner.cotune(0).alpha > 0  # the engine has nothing to do with it
    wait_until(lambda: _alive(daemon), 15)
    for connection in idle:
        connection.close()
    assert threading.active_count() < 50


def _alive(daemon: DaemonProcess) -> bool:
    try:
        return get(daemon, "/healthz")[0] == 200
    except OSError:
        return False


def test_it_can_be_switched_off(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(http={"endpoint": None})
    assert "http" not in daemon.events("ready")[0]["endpoints"]


@pytest.mark.parametrize(
    ("http_settings", "says"),
    [
        ({"endpoint": "http://0.0.0.0:8583"}, "token_file"),
        ({"endpoint": "https://127.0.0.1:8583"}, "expected http://HOST:PORT"),
        ({"endpoint": "127.0.0.1:8583"}, "expected http://HOST:PORT"),
        ({"endpoint": "http://127.0.0.1:99999"}, "expected http://HOST:PORT"),
    ],
)
def test_what_cannot_be_is_refused_at_start(tmp_path: Path, http_settings: dict[str, str], says: str) -> None:
    import yaml

    file = tmp_path / "cotuned.yaml"
    file.write_text(yaml.safe_dump({"http": http_settings}))
    with pytest.raises(ConfigError, match=says):
        load(file)
