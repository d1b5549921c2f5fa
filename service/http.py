"""HTTP: is the daemon alive, is it ready, its metrics for Prometheus, and a page for people. It changes nothing.

======== ========================================================================== =====
path     answer                                                                     token
======== ========================================================================== =====
/healthz 200 as long as the engine's loop turns, else 503                           no
/readyz  200 if new work may come, else 503 and why not                             no
/metrics Prometheus's text format                                                   yes
/        a page with one line a run                                                 yes
======== ========================================================================== =====

Where a token is set, the rows that say yes want it as ``Authorization: Bearer …``.
"""

from __future__ import annotations

import hmac
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..config.settings import HttpSettings
from ..wire.errors import ConfigError, EndpointInUse
from . import metrics, page
from .report import Report, Reports

LONGEST_SILENCE = 5.0
"""Seconds without a turn of the engine's loop after which the daemon counts as hung."""
ANSWER_SECONDS = 2.0
"""How long a request may wait for the engine."""
CLIENT_SECONDS = 5.0
"""How long a client may take over its request."""
MOST_REQUESTS = 32
"""Requests at a time; more connections are closed at once."""


class HttpServer:
    """Serves in threads of its own from the constructor's return until `close`.

    Args:
        settings: where it listens, and its token; `endpoint` is set.
        reports: how it asks the engine.

    Raises:
        EndpointInUse: the address cannot be bound.
        ConfigError: the token's file cannot be read or is empty.
    """

    def __init__(self, settings: HttpSettings, reports: Reports) -> None:
        assert settings.endpoint is not None
        address = urlsplit(settings.endpoint)
        token = _read_token(settings.token_file)
        try:
            self._server = _Server((address.hostname or "", address.port or 0), reports, token)
        except OSError as error:
            raise EndpointInUse(
                f"cannot bind {settings.endpoint}: {error.strerror}; if something listens there, stop it, choose "
                "another http.endpoint (port 0: any free one), or switch it off with http.endpoint: null"
            ) from error
        host = f"[{address.hostname}]" if self._server.address_family == socket.AF_INET6 else address.hostname
        self.endpoint = f"http://{host}:{self._server.server_address[1]}"
        """Where it listens."""
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening; requests under way end by themselves."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLIENT_SECONDS)


def _read_token(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        token = Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"http.token_file: cannot read {path}: {error}") from error
    if not token:
        raise ConfigError(f"http.token_file: {path} is empty; put a long random word into it")
    return token


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], reports: Reports, token: str | None) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.reports, self.token = reports, token
        self._room = threading.BoundedSemaphore(MOST_REQUESTS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in mid-answer is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = CLIENT_SECONDS
    server_version, sys_version = "cotuned", ""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        match path:
            case "/healthz":
                self._say(*self._health())
            case "/readyz":
                self._say(*self._readiness())
            case "/metrics" | "/":
                self._report(path)
            case _:
                self._say(404, "there is /healthz, /readyz, /metrics and /\n")

    do_HEAD = do_GET  # noqa: N815 - http.server's name for it

    def _health(self) -> tuple[int, str]:
        silent = self.server.reports.silent_for
        if silent > LONGEST_SILENCE:
            return 503, f"the engine's loop has not turned for {silent:.1f} s\n"
        return 200, "alive\n"

    def _readiness(self) -> tuple[int, str]:
        report = self.server.reports.ask(ANSWER_SECONDS)
        if report is None:
            return 503, f"the engine did not answer within {ANSWER_SECONDS:g} s\n"
        if report.troubles:
            return 503, "".join(f"{trouble}\n" for trouble in report.troubles)
        return 200, "ready\n"

    def _report(self, path: str) -> None:
        if not self._may_read():
            self._say(401, "this needs the token: Authorization: Bearer …\n", ("WWW-Authenticate", "Bearer"))
            return
        report: Report | None = self.server.reports.ask(ANSWER_SECONDS)
        if report is None:
            self._say(503, f"the engine did not answer within {ANSWER_SECONDS:g} s\n")
        elif path == "/metrics":
            self._send(200, metrics.CONTENT_TYPE, metrics.exposition(report))
        else:
            self._send(200, "text/html; charset=utf-8", page.html(report).encode())

    def _may_read(self) -> bool:
        token = self.server.token
        given = self.headers.get("Authorization", "")
        return token is None or hmac.compare_digest(given.encode(), f"Bearer {token}".encode())

    def _say(self, code: int, text: str, *headers: tuple[str, str]) -> None:
        self._send(code, "text/plain; charset=utf-8", text.encode(), *headers)

    def _send(self, code: int, kind: str, content: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(code)
        safe = (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"), ("Connection", "close"))
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(content))), *safe, *headers):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: a scrape every few seconds would drown everything else."""
