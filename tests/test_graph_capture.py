"""What a learner captures follows the bus, and every kernel gives the same bits each time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotuned.config.settings import Settings
from cotuned.kernels import Drain, run_parameters
from cotuned.wire.errors import CapturingStream
from cotuned.wire.slots import Counter, Slot

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "graph_capture" / "train_step.py"


def test_the_example_says_what_it_needs(tmp_path: Path) -> None:
    """On a machine that has all of it the test below runs it."""
    (tmp_path / "cupy.py").write_text("raise ImportError('no CuPy here')")
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}, check=False
    )
    assert ran.returncode == 2
    assert ran.stderr == "this example needs a GPU, CuPy and torch: no CuPy here\n"


@pytest.fixture
def open_bus(cupy: Any) -> Any:
    from cotuned.kernels.cuda_bus import CudaBus

    buses = []

    def make(rows: int = 1, **settings: Any) -> Any:
        checked = Settings(**settings)
        bus = CudaBus(checked)
        for row in range(rows):
            bus.open_row(row, run_parameters(checked, ""))
        buses.append(bus)
        return bus

    yield make
    for bus in buses:
        bus.close()


def record(bus: Any, row: int = 0) -> bytes:
    """Everything that the bus holds for a run."""
    state = bus.row(row)
    return state.slots.tobytes() + state.counters.tobytes() + state.pool.tobytes()


@pytest.mark.gpu
def test_the_example_runs(torch: Any) -> None:
    ran = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "expected one that does not" in ran.stdout
    taus = [float(line.split()[2]) for line in ran.stdout.splitlines() if line.split()[0].isdigit()]
    assert len(set(taus)) > 10


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["train", "prefill"])
def test_a_captured_step_is_bit_for_bit_the_eager_one(cupy: Any, torch: Any, open_bus: Any, path: str) -> None:
    """The entropy step outside, in both paths; in the training path sac_cotune and the gradient in one graph."""
    from cotuned.kernels.torch_autograd import q_pi_distill

    captured, eager = (open_bus(observation={"pool_min_actions": 1}, tuner={"lr_tau": 0.05}) for _ in range(2))
    entropy = torch.zeros(1, dtype=torch.float64, device="cuda")
    z = torch.randn(512, 11, device="cuda")
    q = torch.randn(512, 11, device="cuda")

    def step_of(bus: Any) -> tuple[Callable[[], None], Any]:
        logits = z.clone().requires_grad_()
        logits.grad = torch.zeros_like(z)
        slots, cotune = torch.from_dlpack(bus.slots(0)), bus.cotune_step(0)

        def step() -> None:
            cotune.launch(torch.cuda.current_stream().cuda_stream, entropy)
            logits.grad.zero_()
            q_pi_distill(logits, q, slots).mean().backward()

        return step, logits

    (replayed, its_logits), (launched, other_logits) = step_of(captured), step_of(eager)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        replayed()
        launched()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed()
    taus = set()
    for number in range(60):
        actions = torch.from_numpy(np.random.default_rng(number).integers(0, 2 + number % 9, 300)).cuda()
        entropy.fill_(0.1 + number / 100)
        for bus in (captured, eager):
            bus.entropy_step(0, prefill=path == "prefill").launch(torch.cuda.current_stream().cuda_stream, actions)
        if path == "train":
            graph.replay()
            launched()
        torch.cuda.synchronize()
        assert record(captured) == record(eager)
        assert torch.equal(its_logits.grad, other_logits.grad)
        taus.add(float(captured.row(0).slots[Slot.TAU]))
    counters = captured.row(0).counters
    phase = Counter.BATCHES_PREFILL if path == "prefill" else Counter.BATCHES_TRAIN
    assert counters[phase] == 60
    assert counters[Counter.UPDATES] == (60 if path == "train" else 0)
    assert len(taus) == (60 if path == "train" else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("k", [11, 300])
def test_an_entropy_step_refuses_a_capturing_stream_and_changes_nothing(
    cupy: Any, torch: Any, open_bus: Any, library: str, k: int
) -> None:
    bus = open_bus(n_actions=k)
    step, actions = bus.entropy_step(0), cupy.arange(2000) % 11
    step.launch(cupy.cuda.Stream.null, actions)
    cupy.cuda.Stream.null.synchronize()
    before = record(bus)
    if library == "torch":
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(3, device="cuda").add_(1)
            with pytest.raises(CapturingStream, match="outside capture, after the last gate"):
                step.launch(torch.cuda.current_stream().cuda_stream, actions)
    else:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            with pytest.raises(CapturingStream):
                step.launch(stream, actions)
            stream.end_capture()
    assert record(bus) == before


@pytest.mark.gpu
def test_a_cotune_step_takes_one_float64_or_nothing(cupy: Any, open_bus: Any) -> None:
    bus = open_bus(observation={"pool_min_actions": 1})
    step, stream = bus.cotune_step(0), cupy.cuda.Stream(non_blocking=True)
    for wrong in (cupy.zeros(1, "f4"), cupy.zeros(2), np.zeros(1), 1.5):
        with pytest.raises((TypeError, ValueError), match="policy_entropy"):
            step.launch(stream, wrong)
    step.launch(stream)
    step.launch(stream, cupy.full(1, 1.25))
    step.launch(stream, cupy.asarray(float("nan")))
    stream.synchronize()
    state = bus.row(0)
    assert state.counters[Counter.POLICY_OBSERVATIONS] == 1
    assert state.slots[Slot.RL_POLICY_ENTROPY_EMA_INDEX] == np.float32(1.25)
    twin = open_bus(observation={"pool_min_actions": 1})
    for entropy in (None, 1.25, float("nan")):
        twin.cotune(0, entropy)
    assert record(twin) == record(bus)


@pytest.mark.gpu
def test_a_query_after_the_row_was_opened_again_is_that_of_a_new_row(open_bus: Any) -> None:
    bus, new = open_bus(rows=3), open_bus(rows=3)
    for row in (2, 0, 2):
        bus.observe(Drain.of(row, [np.zeros(2000, np.uint8)]))
        bus.cotune(row, 1.0)
    bus.open_row(2, run_parameters(Settings(), ""))
    for b in (bus, new):
        b.observe(Drain.of(2, [np.arange(2200, dtype=np.uint8) % 11]))
        b.cotune(2, 0.5)
    assert record(bus, 2) == record(new, 2)


@pytest.mark.gpu
class TestTheSameBitsAThousandTimes:
    """Whole records: slots, counters and pool."""

    @pytest.mark.parametrize(("k", "n"), [(11, 1000), (11, 2**17 + 5), (16, 4097), (300, 2**15 + 1), (4096, 3000)])
    def test_entropy_step(self, cupy: Any, open_bus: Any, k: int, n: int) -> None:
        bus = open_bus(n_actions=k, observation={"pool_min_actions": 1})
        parameters, actions = run_parameters(Settings(n_actions=k), ""), cupy.random.default_rng(k).integers(0, k, n)
        step, stream = bus.entropy_step(0), cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        found = set()
        for _ in range(1000):
            bus.open_row(0, parameters)
            step.launch(stream, actions)
            step.launch(stream, actions[: n // 3])
            stream.synchronize()
            found.add(record(bus))
        assert len(found) == 1

    def test_drain_and_cotune(self, open_bus: Any) -> None:
        bus = open_bus(rows=8)
        rng = np.random.default_rng(4)
        drain = Drain(
            rng.integers(0, 11, 4096 * 64).astype(np.uint8),
            np.full(4096, 64),
            np.repeat(np.arange(8), 512),
            rng.random(4096) < 0.1,
        )
        parameters = run_parameters(Settings(), "")
        found = set()
        for _ in range(1000):
            for row in range(8):
                bus.open_row(row, parameters)
            bus.observe(drain)
            for row in range(8):
                bus.cotune(row, 1.0)
            found.add(b"".join(record(bus, row) for row in range(8)))
        assert len(found) == 1

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("k", [11, 64, 1500])
    def test_q_pi_distill_grad(self, torch: Any, open_bus: Any, dtype: str, k: int) -> None:
        from cotuned.kernels.cuda_distill import launch_q_pi_distill_grad

        slots = torch.from_dlpack(open_bus().slots(0))
        torch.manual_seed(k)
        z, q = (torch.randn(513, k, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
        first, again = torch.empty_like(z), torch.empty_like(z)
        loss, loss_again = (torch.empty(513, device="cuda") for _ in range(2))
        stream = torch.cuda.current_stream().cuda_stream
        launch_q_pi_distill_grad(z, q, slots, first, loss=loss, stream=stream)
        same = torch.ones((), dtype=torch.bool, device="cuda")
        for _ in range(1000):
            launch_q_pi_distill_grad(z, q, slots, again, loss=loss_again, stream=stream)
            same &= (first.view(torch.uint8) == again.view(torch.uint8)).all() & (loss == loss_again).all()
        assert same.item()
