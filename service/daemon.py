"""The daemon's life: bus, sockets and engine opened in order, run, and closed in the other order."""

from __future__ import annotations

import logging
import resource
import signal
from contextlib import ExitStack
from types import FrameType

from ..config.settings import Settings
from ..kernels import open_bus
from .engine import Engine
from .gatekeeper import Gatekeeper
from .http import HttpServer
from .logs import log
from .open_state import open_state
from .recorder import Recorder
from .snapshot import Stored
from .sockets import Sockets
from .state_directory import StateDirectory
from .writer import Writer


class Daemon:
    """Everything that `cotuned serve` runs, usable in a process of one's own too.

    When the constructor returns, the kernels are compiled, the state is restored, the sockets are bound and `endpoints`
    says where; batches and queries wait in the sockets until `run` is called.

    Args:
        settings: all settings.

    Raises:
        DeviceUnavailable, EndpointInUse, ConfigError, StateInUse, StateMismatch: what was opened before is closed
            again.
    """

    def __init__(self, settings: Settings) -> None:
        self._stack = ExitStack()
        http = None
        try:
            bus = open_bus(settings)
            self._stack.callback(bus.close)
            recorder = Recorder(settings.record) if settings.record is not None else None
            if recorder is not None:
                self._stack.callback(recorder.close)
            writer, stored = self._open_state(settings)
            guard = Gatekeeper(settings.security) if settings.security.server_key is not None else None
            sockets = Sockets(settings, guard)
            self._stack.callback(sockets.close)
            self._engine = Engine(settings, bus, sockets, recorder, writer, stored)
            if settings.http.endpoint is not None:
                http = HttpServer(settings.http, self._engine.reports)
                self._stack.callback(http.close)
        except BaseException:
            self._stack.close()
            raise
        self.state = writer.path if writer is not None else "off: durable means applied"
        """The state file, or that nothing is kept."""
        self.device = bus.device
        self.endpoints = dict(sockets.endpoints)
        if http is not None:
            self.endpoints["http"] = http.endpoint
        self.tally = self._engine.tally

    def _open_state(self, settings: Settings) -> tuple[Writer | None, Stored | None]:
        if settings.state.directory is None:
            return None, None
        directory = StateDirectory(settings.state.directory)
        self._stack.callback(directory.close)
        store, stored = open_state(settings, directory)
        writer = Writer(store, settings.state.interval)
        self._stack.callback(writer.close)
        if stored.runs:
            runs, actors = [run.name for run in stored.runs], len(stored.streams)
            log(logging.INFO, "state restored", path=writer.path, runs=runs, actors=actors)
        return writer, stored

    def run(self) -> None:
        """Serves until `stop`, in this thread; then closes everything.

        Raises:
            StateNotKept: the disk did not take the last commit.
        """
        with self._stack:
            self._engine.run()

    def stop(self) -> None:
        """Asks `run` to end; safe in a signal handler and from another thread."""
        self._engine.stop()

    def stop_on_signals(self) -> None:
        """SIGTERM and SIGINT ask `run` to end. Only in the main thread."""

        def ask_to_stop(number: int, frame: FrameType | None) -> None:
            self.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, ask_to_stop)


def allow_many_files(max_actors: int) -> None:
    """Raises the soft limit of open files as far as the settings need and the hard one allows. Every actor takes two,
    and ZeroMQ refuses peers without a word when none are left, so a limit that is too low is said at once."""
    needed = 2 * max_actors + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != resource.RLIM_INFINITY and soft < needed:
        advice = f"limits.max_actors is {max_actors}: raise `ulimit -n` to {needed}, or lower it"
        log(logging.WARNING, "few files", limit=soft, actors=max(0, soft - 64) // 2, advice=advice)


def serve(settings: Settings) -> None:
    """`cotuned serve`: runs a daemon until SIGTERM or SIGINT."""
    allow_many_files(settings.limits.max_actors)
    daemon = Daemon(settings)
    daemon.stop_on_signals()
    log(
        logging.INFO,
        "ready",
        device=daemon.device,
        n_actions=settings.n_actions,
        endpoints=daemon.endpoints,
        state=daemon.state,
    )
    daemon.run()
    log(logging.INFO, "stopped", batches=daemon.tally.batches, rejected=daemon.tally.rejected)
