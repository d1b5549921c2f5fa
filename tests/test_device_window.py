"""`ActorClient.push_device`: batches that the daemon counts where they lie, exactly once as all others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotuned.client import (
    ActorClient,
    BatchRejected,
    CapturingStream,
    DeviceBusy,
    DeviceNotShared,
    FlushTimeout,
    InvalidActions,
    LearnerClient,
    WindowFull,
)
from cotuned.client.device_window import Ring, device_of
from cotuned.service.recorder import read_record
from cotuned.wire.codec import DeviceBatch, encode_batch
from tests.daemon_process import DaemonProcess, wait_until

StartDaemon = Callable[..., DaemonProcess]


@given(st.integers(1, 300), st.lists(st.tuples(st.integers(1, 120), st.integers(0, 6)), max_size=60))
def test_a_ring_gives_each_byte_to_one_batch(size: int, wishes: list[tuple[int, int]]) -> None:
    ring, live = Ring(size), dict[int, tuple[int, int]]()
    for number, (wanted, kept) in enumerate(wishes, 1):
        begin = ring.find(wanted)
        if begin is None:
            assert live or wanted > size  # an empty ring takes whatever fits at all
        else:
            assert 0 <= begin <= size - wanted
            assert all(begin + wanted <= low or high <= begin for low, high in live.values())
            ring.take(number, begin, wanted)
            live[number] = (begin, begin + wanted)
        durable = number - kept
        ring.release(durable)
        live = {n: place for n, place in live.items() if n > durable}


def test_a_ring_that_was_emptied_takes_a_batch_of_its_size() -> None:
    ring = Ring(64)
    ring.take(1, 0, 40)
    assert ring.find(64) is None
    ring.release(1)
    assert ring.find(64) == 0


@pytest.mark.parametrize("actions", [np.arange(3), [1, 2], None, "012"])
def test_actions_in_host_memory_are_refused(start_daemon: StartDaemon, actions: Any) -> None:
    daemon = start_daemon(device="cpu")
    with ActorClient(daemon.endpoint) as actor:
        with pytest.raises(InvalidActions, match="push\\(\\) takes the others"):
            actor.push_device(actions)
        assert actor.push([1]) == 1


def test_a_batch_in_memory_that_the_daemon_has_not_mapped_is_not_taken(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(device="cpu")
    actor = ActorClient(daemon.endpoint, run="r")
    actor._delivery.send(encode_batch(DeviceBatch(actor.stream, 1, 0, 0, 0, 100, 1)), 1)
    with pytest.raises(FlushTimeout):
        actor.flush(0.5)
    with LearnerClient(daemon.endpoint, run="r") as learner:
        stats = learner.stats()
        assert (stats.batches, stats.batches_rejected) == (0, 0)
        assert stats.batches_early > 0
    actor.abandon()


@pytest.fixture
def cuda_daemon(start_daemon: StartDaemon, cupy: Any) -> DaemonProcess:
    return start_daemon(device="cuda")


def counts(daemon: DaemonProcess, run: str = "default") -> dict[str, Any]:
    with LearnerClient(daemon.endpoint, run=run) as learner:
        stats, entropy = learner.stats(), learner.entropy()
    return {
        "train": stats.actions_train,
        "prefill": stats.actions_prefill,
        "batches": stats.batches,
        "rejected": stats.batches_rejected,
        "pooled": stats.pooled_counts,
        "observations": stats.observations,
        "entropy": entropy.entropy,
    }


SLOW = r"""
extern "C" __global__ void fill_late(unsigned char* actions, int n, unsigned long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do { __nanosleep(1000); asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < nanoseconds);
    for (int i = threadIdx.x; i < n; i += blockDim.x) actions[i] = i % 11;
}
"""


def fill_late(cupy: Any, actions: Any, seconds: float) -> None:
    """Writes uniform actions over K = 11, on the current stream, after a while."""
    kernel = cupy.RawKernel(SLOW, "fill_late")
    kernel((1,), (128,), (actions, np.int32(actions.size), np.uint64(int(seconds * 1e9))))


@pytest.mark.gpu
class TestPushDevice:
    @pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint64"])
    def test_counts_what_push_counts(self, cuda_daemon: DaemonProcess, cupy: Any, dtype: str) -> None:
        with ActorClient(cuda_daemon.endpoint, run="host") as a, ActorClient(cuda_daemon.endpoint, run="device") as b:
            for step, n in enumerate([1, 7, 64, 1000, 1024, 5000, 100_003, 3]):
                actions = np.random.default_rng(step).integers(0, 11, n).astype(dtype)
                phase: Any = "prefill" if step % 3 == 0 else "train"
                assert a.push(actions, phase=phase) == step + 1
                if step == 3:  # both ways in one stream, in order
                    assert b.push(actions, phase=phase) == step + 1
                else:
                    assert b.push_device(cupy.asarray(actions), phase=phase) == step + 1
            a.flush()
            b.flush()
        assert counts(cuda_daemon, "device") == counts(cuda_daemon, "host")

    def test_takes_torch_tensors_strided_ones_and_wide_ones(self, cuda_daemon: DaemonProcess, torch: Any) -> None:
        actions = torch.randint(0, 11, (300, 40), device="cuda")
        with ActorClient(cuda_daemon.endpoint, run="device") as b, ActorClient(cuda_daemon.endpoint, run="host") as a:
            for part in (actions, actions.T, actions[::2, 1::3], actions.int(), actions.to(torch.uint8), actions[:0]):
                a.push(part.reshape(-1))
                b.push_device(part)
        assert counts(cuda_daemon, "device") == counts(cuda_daemon, "host")

    @pytest.mark.parametrize("k", [2, 200, 256, 4096])
    def test_other_numbers_of_actions(self, start_daemon: StartDaemon, cupy: Any, k: int) -> None:
        daemon = start_daemon(device="cuda", n_actions=k)
        actions = np.random.default_rng(k).integers(0, k, 50_000)
        with ActorClient(daemon.endpoint, run="host") as a, ActorClient(daemon.endpoint, run="device") as b:
            a.push(actions)
            b.push_device(cupy.asarray(actions))
            if k > 128:
                with pytest.raises(InvalidActions, match="int8"):
                    b.push_device(cupy.zeros(4, "int8"))
        assert counts(daemon, "device") == counts(daemon, "host")

    @pytest.mark.parametrize("library", ["cupy", "torch"])
    def test_counts_what_the_current_stream_will_have_written(
        self, cuda_daemon: DaemonProcess, cupy: Any, torch: Any, library: str
    ) -> None:
        with ActorClient(cuda_daemon.endpoint) as actor:
            if library == "cupy":
                with cupy.cuda.Stream(non_blocking=True):
                    actions = cupy.zeros(1100, "uint8")
                    fill_late(cupy, actions, 0.05)
                    actor.push_device(actions)
                    actions[:] = 0  # may be overwritten at once
            else:
                with torch.cuda.stream(torch.cuda.Stream()):
                    tensor = torch.zeros(1100, dtype=torch.uint8, device="cuda")
                    with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
                        fill_late(cupy, cupy.from_dlpack(tensor), 0.05)
                    actor.push_device(tensor)
                    tensor.zero_()
            actor.flush()
        assert counts(cuda_daemon)["entropy"] == np.float32(np.log(11))

    def test_work_that_does_not_end_in_time_is_said_and_counts_for_nothing(
        self, cuda_daemon: DaemonProcess, cupy: Any
    ) -> None:
        with ActorClient(cuda_daemon.endpoint) as actor:
            actions = cupy.zeros(1100, "uint8")
            actor.push_device(actions)  # so that everything is compiled and shared
            fill_late(cupy, actions, 0.5)
            with pytest.raises(DeviceBusy, match="not sent"):
                actor.push_device(actions, timeout=0.05)
            with pytest.raises(DeviceBusy):
                actor.push_device(actions, timeout=0.05)
            assert actor.push_device(actions) == 2
        assert counts(cuda_daemon)["train"] == 2200

    def test_an_index_out_of_range_comes_back_with_its_number(self, cuda_daemon: DaemonProcess, cupy: Any) -> None:
        actor = ActorClient(cuda_daemon.endpoint)
        actor.push_device(cupy.arange(11))
        actor.push_device(cupy.asarray([1, 2, 11, 3]))
        with pytest.raises(BatchRejected, match=r"executed\[2\]: got 11, expected .* 0 to 10") as caught:
            actor.flush()
        assert (caught.value.sequence, caught.value.code) == (2, "action_out_of_range")
        actor.push_device(cupy.asarray([1, -1], "int16"))
        with pytest.raises(BatchRejected, match="signed: -1"):
            actor.flush()
        actor.close()
        assert [counts(cuda_daemon)[name] for name in ("train", "batches", "rejected")] == [11, 1, 2]

    def test_a_place_outside_the_shared_memory_is_rejected(self, cuda_daemon: DaemonProcess, cupy: Any) -> None:
        actor = ActorClient(cuda_daemon.endpoint, device_window_bytes=4096)
        actor.push_device(cupy.arange(11))
        for number, (offset, n, size) in enumerate([(4096, 1, 1), (4088, 2, 8), (0, 2**62, 8), (2**62, 1, 8)], 2):
            actor._delivery.send(encode_batch(DeviceBatch(actor.stream, number, 0, 0, offset, n, size)), 1)
            with pytest.raises(BatchRejected) as caught:
                actor.flush()
            # A cudaMalloc may be larger than was asked for; what lies in it is the actor's own all the same.
            assert caught.value.code in ("outside_shared_memory", "action_out_of_range"), (offset, n)
        actor.close()
        assert [counts(cuda_daemon)[name] for name in ("train", "batches", "rejected")] == [11, 1, 4]

    def test_a_restarted_daemon_maps_the_memory_again(self, cuda_daemon: DaemonProcess, cupy: Any) -> None:
        with ActorClient(cuda_daemon.endpoint, timeout=30) as actor:
            for _ in range(10):
                actor.push_device(cupy.arange(11))
            actor.flush()
            cuda_daemon.kill()
            for _ in range(5):
                actor.push_device(cupy.arange(11))
            cuda_daemon.restart()
            for _ in range(5):
                actor.push_device(cupy.arange(11))
            actor.flush()
        assert [counts(cuda_daemon)[name] for name in ("batches", "train")] == [20, 220]

    def test_an_actor_that_is_killed_leaves_the_daemon_well(self, cuda_daemon: DaemonProcess, cupy: Any) -> None:
        script = (
            "import sys, cupy; from cotuned.client import ActorClient\n"
            "actor = ActorClient(sys.argv[1], run='killed')\n"
            "while True: actor.push_device(cupy.arange(1100) % 11)\n"
        )
        child = subprocess.Popen([sys.executable, "-c", script, cuda_daemon.endpoint], env={**os.environ})

        def pushed() -> bool:
            with LearnerClient(cuda_daemon.endpoint, run="killed") as learner:
                return "killed" in learner.status().runs and learner.stats().batches > 50

        wait_until(pushed, 60)
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        with ActorClient(cuda_daemon.endpoint) as actor:
            actor.push_device(cupy.arange(1100) % 11)
        assert counts(cuda_daemon)["entropy"] == np.float32(np.log(11))
        killed = counts(cuda_daemon, "killed")
        assert killed["train"] == 1100 * killed["batches"]

    def test_a_full_window_in_gpu_memory_waits_and_says_so(self, cuda_daemon: DaemonProcess, cupy: Any) -> None:
        with ActorClient(cuda_daemon.endpoint, device_window_bytes=10_000, timeout=20) as actor:
            actions = cupy.arange(1100) % 11  # 8 800 bytes
            for _ in range(20):  # each waits for the one before it
                actor.push_device(actions)
            actor.flush()
            cuda_daemon.process.send_signal(signal.SIGSTOP)
            actor.push_device(actions)
            with pytest.raises(WindowFull, match="10000 bytes of GPU memory"):
                actor.push_device(actions, timeout=0.3)
            with pytest.raises(InvalidActions, match="device_window_bytes"):
                actor.push_device(cupy.zeros(2000, "int64"))
            cuda_daemon.process.send_signal(signal.SIGCONT)
            actor.push_device(actions)
        assert counts(cuda_daemon)["batches"] == 22

    def test_what_cannot_be_pushed_is_refused(self, cuda_daemon: DaemonProcess, cupy: Any) -> None:
        with ActorClient(cuda_daemon.endpoint) as actor:
            with pytest.raises(InvalidActions, match="float32"):
                actor.push_device(cupy.zeros(3, "float32"))
            with pytest.raises(InvalidActions, match="bool"):
                actor.push_device(cupy.zeros(3, "bool"))
            with pytest.raises(InvalidActions, match="phase"):
                actor.push_device(cupy.zeros(3, "uint8"), phase="warm-up")  # type: ignore[arg-type]
            actions, stream = cupy.zeros(3, "uint8"), cupy.cuda.Stream(non_blocking=True)
            with stream:
                stream.begin_capture()
                with pytest.raises(CapturingStream, match="outside capture"):
                    actor.push_device(actions)
                stream.end_capture()
            assert actor.push_device(actions) == 1

    def test_a_daemon_on_the_host_refuses_and_push_goes_on(self, start_daemon: StartDaemon, cupy: Any) -> None:
        daemon = start_daemon(device="cpu")
        with ActorClient(daemon.endpoint) as actor:
            with pytest.raises(DeviceNotShared, match="host memory"):
                actor.push_device(cupy.arange(11))
            assert actor.push(cupy.arange(11)) == 1
        assert counts(daemon)["train"] == 11

    def test_the_record_has_the_actions(self, start_daemon: StartDaemon, cupy: Any, tmp_path: Any) -> None:
        daemon = start_daemon(device="cuda", record=str(tmp_path / "record"))
        with ActorClient(daemon.endpoint) as actor:
            actor.push([3, 4])
            actor.push_device(cupy.asarray([1, 2, 10]), step=5, phase="prefill")
        daemon.terminate()
        batches = [recorded.batch for recorded in read_record(tmp_path / "record")]
        assert [batch.executed for batch in batches] == [bytes([3, 4]), bytes([1, 2, 10])]
        assert (batches[1].step, batches[1].phase) == (5, 1)


def test_device_of_says_what_came() -> None:
    with pytest.raises(InvalidActions, match="got a ndarray in host memory"):
        device_of(np.zeros(3))
