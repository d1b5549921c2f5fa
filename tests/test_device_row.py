"""`LearnerClient.attach_device`: the bus of a real daemon, read by kernels of this process."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cotuned.client import (
    ActorClient,
    AttachmentLost,
    DaemonUnreachable,
    DeviceNotShared,
    DeviceRow,
    DeviceUnavailable,
    LearnerClient,
    Slot,
)
from cotuned.client import device_row as device_row_module
from cotuned.wire.answers import AttachAnswer
from cotuned.wire.host import host
from tests.daemon_process import DaemonProcess

StartDaemon = Callable[..., DaemonProcess]
SETTINGS: dict[str, Any] = {"device": "cuda", "observation": {"pool_min_actions": 1}, "tuner": {"lr_tau": 0.05}}


def test_a_bus_in_host_memory_is_not_attached(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(device="cpu")
    with LearnerClient(daemon.endpoint) as learner:
        with pytest.raises(DeviceNotShared, match="host memory.*device: cuda"):
            learner.attach_device()
        with pytest.raises(DeviceUnavailable):  # what a learner with a second way catches
            learner.attach_device()
        assert learner.cotune(0).alpha > 0  # and goes on with


def test_another_host_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = AttachAnswer("cuda:0 (somewhere)", "00" * 16, "another boot", bytes(64), 0, 1024)
    with pytest.raises(DeviceUnavailable, match="another host"):
        DeviceRow(answer, "default", 1)


def test_this_host_has_a_name_that_stays() -> None:
    script = "from cotuned.wire.host import host; print(host())"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == host() != ""


@pytest.fixture
def cuda_daemon(start_daemon: StartDaemon, cupy: Any) -> DaemonProcess:
    return start_daemon(**SETTINGS)


def mixed(step: int, n: int = 500) -> np.ndarray:
    """A batch whose entropy differs from step to step."""
    return np.random.default_rng(step).integers(0, 2 + step % 9, n)


@pytest.mark.gpu
class TestAttached:
    def test_the_row_is_what_cotune_answers(self, cuda_daemon: DaemonProcess, torch: Any) -> None:
        endpoint = cuda_daemon.endpoint
        with (
            LearnerClient(endpoint, run="other") as other,
            LearnerClient(endpoint) as learner,
            ActorClient(endpoint) as a,
        ):
            other.cotune(0)  # so that the run's row is not the first of the bus
            row = learner.attach_device()
            slots, tensor = row.slots, row.tensor()
            for step in range(200):
                a.push(mixed(step))
                a.flush()
                answer = learner.cotune(step, policy_entropy=1.0)
                seen = slots.get()
                assert answer.fresh
                assert seen[Slot.ALPHA] == np.float32(answer.alpha)
                assert seen[Slot.TAU] == np.float32(answer.tau)
                assert seen[Slot.RL_ACTION_ENTROPY_EMA_INDEX] == np.float32(answer.entropy)
                assert tensor[int(Slot.ALPHA)].item() == np.float32(answer.alpha)
                assert learner.write(7, step) == slots[7].get()
            assert slots.shape == (1024,) == tuple(tensor.shape)

    def test_gradients_follow_the_bus_while_the_daemon_updates_it(self, cuda_daemon: DaemonProcess, cupy: Any) -> None:
        from cotuned.kernels.cuda_distill import launch_q_pi_distill_grad

        z, q = (cupy.random.default_rng(i).standard_normal((4096, 11), dtype=cupy.float32) for i in (1, 2))
        got, expected = cupy.empty_like(z), cupy.empty_like(z)
        local = cupy.zeros(1024, cupy.float32)
        stop = threading.Event()

        def push_without_pause() -> None:
            with ActorClient(cuda_daemon.endpoint) as actor:
                step = 0
                while not stop.is_set():
                    actor.push(mixed(step))
                    step += 1

        pusher = threading.Thread(target=push_without_pause)
        pusher.start()
        try:
            with LearnerClient(cuda_daemon.endpoint) as learner:
                row = learner.attach_device()
                launch_q_pi_distill_grad(z, q, row.slots, got)  # compiled before it is captured
                stream = cupy.cuda.Stream(non_blocking=True)
                with stream:
                    stream.begin_capture()
                    launch_q_pi_distill_grad(z, q, row.slots, got)
                    graph = stream.end_capture()
                taus = set()
                for step in range(300):
                    answer = learner.cotune(step)
                    graph.launch(stream)
                    stream.synchronize()
                    local[Slot.ALPHA], local[Slot.TAU] = answer.alpha, answer.tau
                    launch_q_pi_distill_grad(z, q, local, expected)
                    assert (got.view(cupy.uint32) == expected.view(cupy.uint32)).all()
                    taus.add(answer.tau)
                assert len(taus) > 20
        finally:
            stop.set()
            pusher.join()

    def test_a_slot_is_never_seen_half_written(self, start_daemon: StartDaemon, cupy: Any) -> None:
        daemon = start_daemon(**{**SETTINGS, "observation": {"pool_min_actions": 1, "ema_blend": 1.0}})
        sample = cupy.RawKernel(
            """extern "C" __global__ void sample(const volatile float* slot, float* seen, int n) {
                   for (int i = 0; i < n; ++i) { seen[i] = *slot; __nanosleep(200); }
               }""",
            "sample",
        )
        n = 200_000
        seen = cupy.zeros(n, cupy.float32)
        with LearnerClient(daemon.endpoint) as learner, ActorClient(daemon.endpoint) as actor:
            actor.push(np.arange(2))
            actor.flush()
            slots = learner.attach_device().slots
            stream = cupy.cuda.Stream(non_blocking=True)
            sample((1,), (1,), (slots[int(Slot.RL_ACTION_ENTROPY_EMA_INDEX) :], seen, np.int32(n)), stream=stream)
            while not stream.done:
                actor.push(np.arange(11))
                actor.flush()
                actor.push(np.arange(2))
                actor.flush()
        values = set(seen.get().tolist())
        assert values == {float(np.float32(math.log(2))), float(np.float32(math.log(11)))}

    @pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
    def test_when_the_daemon_ends_the_client_says_so_and_nothing_crashes(
        self, cuda_daemon: DaemonProcess, torch: Any, end: int
    ) -> None:
        with LearnerClient(cuda_daemon.endpoint, timeout=1.5) as learner:
            row = learner.attach_device()
            alpha = learner.cotune(0).alpha
            slots, tensor = row.slots, row.tensor()
            cuda_daemon.terminate(end)
            assert slots[Slot.ALPHA].get() == np.float32(alpha) == tensor[int(Slot.ALPHA)].item()
            with pytest.raises(DaemonUnreachable):
                learner.cotune(1)
            assert slots[Slot.ALPHA].get() == np.float32(alpha)
            cuda_daemon.restart()
            with pytest.raises(AttachmentLost, match="attach_device"):
                learner.cotune(2)
            for again in (lambda: row.slots, row.tensor):
                with pytest.raises(AttachmentLost):
                    again()
            answer = learner.cotune(2)
            assert answer.step == 2
            assert slots[Slot.ALPHA].get() == np.float32(alpha)  # stands still, and is no other process's memory
            with ActorClient(cuda_daemon.endpoint) as actor:
                actor.push(mixed(1))
                actor.flush()
            fresh = learner.attach_device().slots
            answer = learner.cotune(3)
            assert answer.alpha != alpha
            assert fresh[Slot.ALPHA].get() == np.float32(answer.alpha)

    def test_a_mapping_outlives_its_row_and_client_as_long_as_an_array_does(
        self, cuda_daemon: DaemonProcess, torch: Any
    ) -> None:
        with LearnerClient(cuda_daemon.endpoint) as learner:
            row = learner.attach_device()
            alpha = learner.cotune(0).alpha
            tensor = row.tensor()
            row.close()
            with pytest.raises(AttachmentLost, match="closed"):
                _ = row.slots
        del row, learner
        assert tensor[int(Slot.ALPHA)].item() == np.float32(alpha)
        del tensor
        for _ in range(50):  # attached again and again: mapped once, and gone with the last one
            with LearnerClient(cuda_daemon.endpoint) as learner:
                assert learner.attach_device().slots[Slot.ALPHA].get() == np.float32(alpha)

    def test_another_gpu_a_bad_handle_and_the_daemons_own_process_get_a_sentence(
        self, cuda_daemon: DaemonProcess, cupy: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from cotuned.config.settings import Settings
        from cotuned.kernels import run_parameters
        from cotuned.kernels.cuda_bus import CudaBus

        answers: list[AttachAnswer] = []

        class Remembering(DeviceRow):
            def __init__(self, answer: AttachAnswer, *rest: Any) -> None:
                answers.append(answer)
                super().__init__(answer, *rest)

        monkeypatch.setattr("cotuned.client.learner.DeviceRow", Remembering)
        with LearnerClient(cuda_daemon.endpoint) as learner:
            learner.attach_device()
        (answer,) = answers
        with pytest.raises(DeviceUnavailable, match="CUDA_VISIBLE_DEVICES"):
            DeviceRow(replace(answer, gpu="ab" * 16), "default", 1)
        with pytest.raises(DeviceUnavailable, match="IPC namespace"):
            DeviceRow(replace(answer, handle=b"\x01" * 64), "default", 1)
        settings = Settings()
        bus = CudaBus(settings)
        bus.open_row(0, run_parameters(settings, ""))
        with pytest.raises(DeviceUnavailable, match="own process"):
            DeviceRow(bus.sharing.export(0), "default", 1)
        bus.close()
        assert float(cupy.arange(10).sum()) == 45  # the refusals left CUDA as it was


def test_without_cupy_the_learner_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    answer = AttachAnswer("cuda:0 (somewhere)", "00" * 16, host(), bytes(64), 0, 1024)
    with pytest.raises(DeviceUnavailable, match=r"cotuned\[cuda12\]"):
        device_row_module.DeviceRow(answer, "default", 1)
