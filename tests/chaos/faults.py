"""The faults of `make chaos`, one function each; its docstring's first line is its row in the table."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
import zmq

from cotuned.client import ActorClient, LearnerClient, RequestRefused, UnknownRun
from tests.daemon_process import DaemonProcess, wait_until
from tests.tcp_proxy import TcpProxy

from . import lockstep
from .load import UNPOOLED, Load, Plan
from .outcome import Outcome
from .scene import CannotTry, FailingGpu, compare_with_calm, daemon_in, fill, misbehaving, resident, small_disk, strike

LONG = bool(int(os.environ.get("CHAOS_LONG", "1")))
"""Whether each fault is tried as often as its row promises, or a few times only (a test of the tests)."""

DRAIN_SECONDS = 10.0
"""What a SIGTERM under load may take: the time that container runtimes give before they kill."""


def often(times: int) -> int:
    """`times`, or a tenth of it in a short run."""
    return times if LONG else max(2, times // 10)


def kill_the_daemon(outcome: Outcome, path: Path) -> None:
    """SIGKILL of the daemon, one actor and a learner"""
    with daemon_in(path / "daemon") as daemon:
        script = lockstep.InThread(daemon.endpoint)

        def kill(_: int) -> None:
            daemon.kill()
            daemon.restart()

        strike(outcome, script, often(50), kill)
        book = script.book()
    compare_with_calm(outcome, book, path)


def kill_the_daemon_of_many(outcome: Outcome, path: Path) -> None:
    """SIGKILL of the daemon, four actor processes"""
    plan = Plan(4, 2, often(60_000), 64)
    with daemon_in(path / "daemon", **UNPOOLED) as daemon, Load(daemon.endpoint, plan) as load:
        wait_until(lambda: load.sent > 0, 60)
        pause = np.random.default_rng(583)
        while not load.ended and outcome.times < often(50):
            time.sleep(pause.uniform(0.0, 0.4))
            begun = time.monotonic()
            daemon.kill()
            daemon.restart()
            with LearnerClient(daemon.endpoint, timeout=30) as learner:
                before = _batches(learner)
                wait_until(lambda learner=learner, before=before: _batches(learner) > before or load.ended, 30)
            outcome.recovered.append(time.monotonic() - begun)
            outcome.times += 1
        load.settle(outcome, 300)


def _batches(learner: LearnerClient) -> int:
    """Batches in the counters; 0 for a run that the daemon had not yet made durable when it was killed."""
    try:
        return learner.stats().batches
    except UnknownRun:
        return 0


def kill_actors(outcome: Outcome, path: Path) -> None:
    """SIGKILL of actors"""
    size, killed = 64, 0
    plan = Plan(1, 2, often(60_000), size)
    with daemon_in(path / "daemon", **UNPOOLED) as daemon, Load(daemon.endpoint, plan) as living:
        for number in range(often(20)):
            run = f"killed-{number % 10}"
            command = [sys.executable, "-m", "tests.chaos.actor", daemon.endpoint, "0", "1", "1000000", str(size), run]
            victim = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert victim.stdout is not None
            victim.stdout.readline()  # it is pushing
            time.sleep(0.01 * number)
            victim.kill()
            victim.wait(10)
            killed += 1
        outcome.times = killed
        with LearnerClient(daemon.endpoint, timeout=30) as learner:
            for run in [name for name in learner.status().runs if name.startswith("killed")]:
                with LearnerClient(daemon.endpoint, run=run) as victims:
                    stats = victims.stats()
                outcome.expect(stats.actions == stats.batches * size, f"{run}: a batch was counted in part")
                outcome.expect(sum(stats.pooled_counts) == stats.actions, f"{run}: counts do not add up")
        living.settle(outcome, 300)


def stop_the_daemon(outcome: Outcome, path: Path) -> None:
    """SIGSTOP of the daemon for 10 s"""
    with daemon_in(path / "daemon") as daemon:
        script = lockstep.InThread(daemon.endpoint)

        def stop(_: int) -> None:
            daemon.process.send_signal(signal.SIGSTOP)
            time.sleep(10 if LONG else 2)
            daemon.process.send_signal(signal.SIGCONT)

        strike(outcome, script, often(3), stop)
        book = script.book()
    compare_with_calm(outcome, book, path)


def _through_proxies(outcome: Outcome, path: Path, times: int, fault: Callable[[list[TcpProxy], int], None]) -> None:
    with daemon_in(path / "daemon") as daemon:
        ports = [int(daemon.endpoints[name].rpartition(":")[2]) for name in ("queries", "actions")]
        proxies = [TcpProxy(port) for port in ports]
        endpoints = [f"tcp://127.0.0.1:{proxy.port}" for proxy in proxies]
        script = lockstep.InThread(*endpoints)
        strike(outcome, script, times, lambda number: fault(proxies, number))
        book = script.book()
        for proxy in proxies:
            proxy.close()
    compare_with_calm(outcome, book, path)


def cut_the_network(outcome: Outcome, path: Path) -> None:
    """network: every connection reset, bytes under way lost"""

    def cut(proxies: list[TcpProxy], number: int) -> None:
        for proxy in proxies[number % 3 : 2] or proxies:
            proxy.cut()

    _through_proxies(outcome, path, often(30), cut)


def drop_the_network(outcome: Outcome, path: Path) -> None:
    """network: what is sent for 5 s vanishes, then the connection too"""

    def drop(proxies: list[TcpProxy], number: int) -> None:
        for proxy in proxies:
            proxy.dropping = True
        time.sleep(5 if LONG else 1)
        for proxy in proxies:
            proxy.dropping = False
            proxy.cut()

    _through_proxies(outcome, path, often(6), drop)


def delay_the_network(outcome: Outcome, path: Path) -> None:
    """network: 0 to 300 ms late"""

    def delay(proxies: list[TcpProxy], number: int) -> None:
        for proxy in proxies:
            proxy.delay = 0.3
        time.sleep(3 if LONG else 1)
        for proxy in proxies:
            proxy.delay = 0.0

    _through_proxies(outcome, path, often(6), delay)


def fill_the_disk(outcome: Outcome, path: Path) -> None:
    """a full disk in mid-run, then room again"""
    with small_disk(path / "disk", 8) as disk, daemon_in(path / "daemon", state={"directory": str(disk)}) as daemon:
        script = lockstep.InThread(daemon.endpoint)

        def fill_for_a_while(_: int) -> None:
            ballast = fill(disk)
            time.sleep(1.5)
            ballast.unlink()

        strike(outcome, script, often(5), fill_for_a_while)
        outcome.expect(bool(daemon.events("state not written")), "the daemon did not say that its disk was full")
        book = script.book()
    compare_with_calm(outcome, book, path)


def start_on_a_read_only_disk(outcome: Outcome, path: Path) -> None:
    """a state directory that is read-only at start"""
    with small_disk(path / "disk", 8) as disk, daemon_in(path / "daemon", state={"directory": str(disk)}) as daemon:
        before = lockstep.run(daemon.endpoint, 30)
        outcome.expect(daemon.terminate() == 0, "the daemon did not end well")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        ended = _serve_to_its_end(daemon)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        outcome.expect(ended.returncode == 1, f"exit code {ended.returncode}")
        outcome.expect("ead-only" in ended.stderr, f"no word of it in {ended.stderr[-300:]!r}")
        _compare_after_restart(outcome, daemon, before)


def _serve_to_its_end(daemon: DaemonProcess, **environment: str) -> subprocess.CompletedProcess[str]:
    """Starts a daemon that is expected to refuse."""
    return subprocess.run(
        [sys.executable, "-m", "cotuned.service", "serve", "--config", str(daemon.folder / "cotuned.yaml")],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _compare_after_restart(outcome: Outcome, daemon: DaemonProcess, before: lockstep.Book) -> None:
    daemon.restart()
    outcome.times += 1
    with LearnerClient(daemon.endpoint) as learner:
        stats, entropy = learner.stats(), learner.entropy()
    outcome.expect(
        entropy.entropy == before.answers[-1][2], f"slot 583 is {entropy.entropy}, was {before.answers[-1][2]}"
    )
    outcome.book(before.sent, stats.batches, before.sent)


def jump_the_clock(outcome: Outcome, path: Path) -> None:
    """the wall clock jumps by a year, a day, an hour, both ways"""
    clock = path / "clock"
    clock.write_bytes(struct.pack("<q", 0))
    with misbehaving(path, CHAOS_CLOCK_FILE=str(clock)), daemon_in(path / "daemon") as daemon:
        script = lockstep.InThread(daemon.endpoint)
        jumps = [31_536_000, -86_400, 3_600, -31_536_000, 0]

        def jump(number: int) -> None:
            clock.write_bytes(struct.pack("<q", jumps[number % len(jumps)]))
            if number % 3 == 2:
                daemon.kill()
                daemon.restart()

        strike(outcome, script, often(30), jump)
        book = script.book()
    compare_with_calm(outcome, book, path)


def slow_the_disk(outcome: Outcome, path: Path) -> None:
    """overload: a disk that takes 20 ms a write"""
    plan = Plan(2, 4, often(20_000), 64)
    with (
        misbehaving(path, CHAOS_WRITE_DELAY_US="20000"),
        daemon_in(path / "daemon", **UNPOOLED) as daemon,
        Load(daemon.endpoint, plan) as load,
    ):
        outcome.times = 1
        outcome.notes.append(_queries_under(load, daemon))
        load.settle(outcome, 300)


def push_from_many(outcome: Outcome, path: Path) -> None:
    """overload: 64 actors without pause, a subscriber that never reads"""
    with daemon_in(path / "daemon", **UNPOOLED) as daemon:
        context = zmq.Context()
        deaf = context.socket(zmq.SUB)
        deaf.linger = 0
        deaf.subscribe(b"")
        deaf.connect(daemon.endpoints["watch"])
        with Load(daemon.endpoint, Plan(4, 16, often(8_000), 64)) as load:
            outcome.times = 1
            outcome.notes.append(_queries_under(load, daemon))
            load.settle(outcome, 300)
        deaf.close()
        context.term()


def _queries_under(load: Load, daemon: DaemonProcess) -> str:
    """p50 and p99 of queries, and memory, as long as the load lasts."""
    wait_until(lambda: load.sent > 0 or load.ended, 60)
    took: list[float] = []
    memory = [next(resident([daemon.process.pid]))]
    with LearnerClient(daemon.endpoint, timeout=30) as learner:
        while not load.ended:
            begun = time.monotonic()
            learner.entropy()
            took.append(1000 * (time.monotonic() - begun))
            if len(took) % 50 == 0:
                memory.append(next(resident([daemon.process.pid])))
            time.sleep(0.005)
    p50, p99 = np.percentile(took, [50, 99])
    return (
        f"{len(took):,} queries under load p50 {p50:.2f} p99 {p99:.2f} ms; RSS {memory[0]:.0f} to {max(memory):.0f} MiB"
    )


def end_under_load(outcome: Outcome, path: Path) -> None:
    """SIGTERM under load"""
    ends: list[float] = []
    plan = Plan(4, 4, often(15_000), 64)
    with daemon_in(path / "daemon", **UNPOOLED) as daemon, Load(daemon.endpoint, plan) as load:
        wait_until(lambda: load.sent > 0, 60)
        while not load.ended and outcome.times < often(10):
            time.sleep(0.7)
            begun = time.monotonic()
            code = daemon.terminate(timeout=60)
            ends.append(time.monotonic() - begun)
            outcome.expect(code == 0, f"exit code {code}")
            outcome.expect(ends[-1] < DRAIN_SECONDS, f"the end took {ends[-1]:.1f} s")
            daemon.restart()
            outcome.recovered.append(time.monotonic() - begun)
            outcome.times += 1
        load.settle(outcome, 300)
    outcome.notes.append(f"ended within {max(ends):.2f} s")


def no_gpu_at_start(outcome: Outcome, path: Path) -> None:
    """a GPU that is not there at start"""
    with daemon_in(path / "daemon") as daemon:
        before = lockstep.run(daemon.endpoint, 30)
        outcome.expect(daemon.terminate() == 0, "the daemon did not end well")
        file = daemon.folder / "cotuned.yaml"
        file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "device": "cuda"}))
        ended = _serve_to_its_end(daemon, CUDA_VISIBLE_DEVICES="")
        outcome.expect(ended.returncode == 1, f"exit code {ended.returncode}")
        outcome.expect("device: cpu" in ended.stderr, f"no advice in {ended.stderr[-300:]!r}")
        _compare_after_restart(outcome, daemon, before)


def gpu_fails_in_mid_run(outcome: Outcome, path: Path) -> None:
    """a GPU that fails in mid-run (an illegal address in the daemon's context)"""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise CannotTry(f"there is no GPU ({type(error).__name__})") from error
    with daemon_in(path / "daemon", FailingGpu, device="cuda") as daemon:
        script = lockstep.InThread(daemon.endpoint)

        def fail(_: int) -> None:
            code = daemon.terminate(signal.SIGUSR1, timeout=60)
            outcome.expect(code == 1, f"exit code {code}")
            daemon.restart()

        strike(outcome, script, often(5), fail)
        book = script.book()
    compare_with_calm(outcome, book, path, device="cuda")


def ask_while_the_disk_is_full(outcome: Outcome, path: Path) -> None:
    """a full disk is said to who asks"""
    with small_disk(path / "disk", 4) as disk, daemon_in(path / "daemon", state={"directory": str(disk)}) as daemon:
        with ActorClient(daemon.endpoint) as actor, LearnerClient(daemon.endpoint, timeout=20) as learner:
            actor.push(np.arange(1100) % 11)
            actor.flush()
            learner.cotune(0)
            ballast = fill(disk)
            refused = ""
            for step in range(1, 400):  # what was preallocated takes some steps more
                try:
                    learner.cotune(step, policy_entropy=1.0)
                except RequestRefused as error:
                    refused = error.code
                    break
            outcome.expect(refused == "state_unavailable", f"cotune on a full disk: {refused or 'answered'}")
            outcome.expect(learner.entropy().observations == 1, "a read was not answered")
            ballast.unlink()
            wait_until(lambda: _answers(learner, step), 20)
            outcome.times = 1
            outcome.expect(learner.cotune(0) == learner.cotune(0), "a step was answered twice, differently")
            actor.push([1, 2])
            actor.flush()
        with LearnerClient(daemon.endpoint) as learner:
            outcome.book(2, learner.stats().batches, 2)


def _answers(learner: LearnerClient, step: int) -> bool:
    try:
        learner.cotune(step, policy_entropy=1.0)
    except RequestRefused:
        return False
    return True


FAULTS: list[Callable[[Outcome, Path], Any]] = [
    kill_the_daemon,
    kill_the_daemon_of_many,
    kill_actors,
    stop_the_daemon,
    cut_the_network,
    drop_the_network,
    delay_the_network,
    fill_the_disk,
    ask_while_the_disk_is_full,
    start_on_a_read_only_disk,
    jump_the_clock,
    no_gpu_at_start,
    gpu_fails_in_mid_run,
    push_from_many,
    slow_the_disk,
    end_under_load,
]
