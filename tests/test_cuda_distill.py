"""`q_pi_distill_grad` on a GPU: beside torch's autograd in float64, beside the NumPy reference, and within graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cotuned.config.settings import Settings
from cotuned.kernels import Parameter, run_parameters
from cotuned.kernels.cuda_distill import launch_q_pi_distill_grad
from cotuned.kernels.cuda_modules import compiled
from cotuned.kernels.cuda_sources import RecordLayout
from cotuned.kernels.q_pi_distill_grad import q_pi_distill_grad
from cotuned.kernels.sac_cotune import initialize_tuner, sac_cotune
from cotuned.wire.slots import Counter, Slot
from tests.test_q_pi_distill_grad import rows

pytestmark = pytest.mark.gpu

BOUNDS = {"float32": 1e-5, "bfloat16": 2**-8, "float16": 2**-10}
"""Largest ‖result − reference‖ / ‖reference‖ of a gradient in that type: one rounding of it, for the shorter ones."""

N_SLOTS = 1024


def torch_slots(torch: Any, alpha: float, tau: float) -> Any:
    slots = torch.full((N_SLOTS,), torch.nan, device="cuda")
    slots[Slot.ALPHA], slots[Slot.TAU] = alpha, tau
    return slots


def float64_autograd(torch: Any, z: Any, q: Any, slots: Any, mask: Any) -> tuple[Any, Any]:
    """Gradient and loss from the definitions, in float64, by autograd."""
    alpha, tau = slots[Slot.ALPHA].double(), slots[Slot.TAU].double()
    legal = ~z.isneginf() if mask is None else (mask != 0) & ~z.isneginf()
    leaf = z.double().requires_grad_()
    log_pi = leaf.masked_fill(~legal, -torch.inf).log_softmax(-1).masked_fill(~legal, 0.0)
    pi = log_pi.exp() * legal
    target = (q.double() / tau).masked_fill(~legal, -torch.inf).softmax(-1)
    loss = -(target * log_pi).sum(-1) + alpha * (pi * log_pi).sum(-1)
    loss.sum().backward()
    return leaf.grad, loss.detach()


def assert_close(torch: Any, got: Any, expected: Any, bound: float) -> None:
    assert got.isfinite().all()
    difference = (got.double() - expected).norm() / expected.norm()
    assert difference <= bound, f"{difference:.2e}"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("n", "k"),
    [(1, 1), (1000, 2), (65_537, 11), (333, 16), (77, 32), (300, 33), (511, 64), (40, 300), (33, 1024), (9, 4096)],
)
def test_agrees_with_autograd_in_float64(torch: Any, n: int, k: int, dtype: str, masked: bool) -> None:
    from cotuned.kernels.torch_autograd import q_pi_distill

    torch.manual_seed(n + k)
    slots = torch_slots(torch, 0.37, 0.9)
    z = (2 * torch.randn(n, k, device="cuda")).to(getattr(torch, dtype))
    q = (3 * torch.randn(n, k, device="cuda")).to(z.dtype)
    mask = None
    if masked:
        mask = torch.rand(n, k, device="cuda") < 0.5
        mask[torch.arange(n), torch.randint(0, k, (n,))] = True
    expected, expected_loss = float64_autograd(torch, z, q, slots, mask)
    logits = z.clone().requires_grad_()
    loss = q_pi_distill(logits, q, slots, mask)
    loss.sum().backward()
    if k == 1:
        assert not logits.grad.any()
        assert not loss.any()
        return
    assert logits.grad.dtype == z.dtype
    assert_close(torch, logits.grad, expected, BOUNDS[dtype])
    assert_close(torch, loss, expected_loss, 1e-5)
    assert mask is None or not logits.grad[~mask].any()


@pytest.mark.parametrize(
    ("z_dtype", "q_dtype"), [("bfloat16", "float32"), ("float16", "bfloat16"), ("float32", "float16")]
)
@pytest.mark.parametrize("k", [11, 64])
def test_mixed_types_with_the_gradient_in_float32(torch: Any, k: int, z_dtype: str, q_dtype: str) -> None:
    slots = torch_slots(torch, 0.1, 2.0)
    z = torch.randn(100, k, device="cuda").to(getattr(torch, z_dtype))
    q = torch.randn(100, k, device="cuda").to(getattr(torch, q_dtype))
    gradient = torch.full((100, k), torch.nan, device="cuda")
    launch_q_pi_distill_grad(z, q, slots, gradient, stream=torch.cuda.current_stream().cuda_stream)
    assert_close(torch, gradient, float64_autograd(torch, z, q, slots, None)[0], 1e-5)


@pytest.mark.parametrize("k", [5, 11, 64, 66, 1024, 1500])
def test_rows_that_lie_apart_and_off_boundaries(cupy: Any, k: int) -> None:
    n = 130
    z, q, mask = (np.asarray(x) for x in rows(n, k + 3, seed=k))
    slots = cupy.full(N_SLOTS, 0.5, dtype=cupy.float32)
    wide = [cupy.asarray(x, dtype=t) for x, t in ((z, "f4"), (q, "f4"), (mask, "u1"))]
    results = cupy.full((n, k + 3), 7.0, dtype=cupy.float32)
    for left in (1, 2):
        cut = [x[:, left : left + k] for x in wide]
        cut[2][:, 0] = 1
        launch_q_pi_distill_grad(cut[0], cut[1], slots, results[:, left : left + k], mask=cut[2])
        expected, _ = q_pi_distill_grad(*(x.get() for x in cut[:2]), 0.5, 0.5, cut[2].get())
        np.testing.assert_allclose(results[:, left : left + k].get(), expected, rtol=1e-5, atol=1e-6)
    assert (results[:, [0, k + 2]] == 7).all()


@pytest.mark.parametrize("k", [3, 16, 400, 2048])
def test_rows_at_the_edge(cupy: Any, k: int) -> None:
    z, q, mask = rows(12, k, seed=k)
    z[0], z[1, 1:], z[2, :2] = -np.inf, -np.inf, (3e38, -3e38)
    z[3, 0], q[4, 0], q[5] = 1e30, 1e30, 5.0
    z[6, 0], z[7, 0], q[8, 0], mask[8, 0] = np.nan, -np.inf, np.nan, False
    mask[9], mask[10], mask[10, 2] = False, False, True
    mask[:9, :] |= np.arange(k) < 2  # rows 0 to 8: nothing but their own peculiarity
    mask[8, 0] = False
    z[6:8, 0], q[7, 0] = (np.nan, -np.inf), np.nan
    given = [np.asarray(z, np.float32), np.asarray(q, np.float32)]
    for alpha, tau in ((0.2, 1.0), (0.0, 1e-38), (1.0, 1e-45), (0.5, 1e30)):
        slots = np.zeros(N_SLOTS, np.float32)
        slots[Slot.ALPHA], slots[Slot.TAU] = alpha, tau
        gradient, loss = cupy.full((12, k), 7.0, dtype="f4"), cupy.full(12, 7.0, dtype="f4")
        arrays = [cupy.asarray(x) for x in (*given, slots)]
        launch_q_pi_distill_grad(*arrays, gradient, mask=cupy.asarray(mask), loss=loss)
        expected, expected_loss = q_pi_distill_grad(*given, alpha, tau, mask)
        np.testing.assert_allclose(gradient.get(), expected, rtol=1e-5, atol=1e-6)
        finite = np.abs(expected_loss) < 1e30
        np.testing.assert_allclose(loss.get()[finite], expected_loss[finite], rtol=1e-5, atol=1e-6)
        assert np.isnan(loss.get()).nonzero()[0].tolist() == [6]
        assert not gradient.get()[[0, 1, 9, 10]].any()
        assert not gradient.get()[~mask].any()  # beside NaN too


@pytest.mark.parametrize("k", [11, 64, 4096])
def test_the_same_bits_each_time_in_place_too(cupy: Any, k: int) -> None:
    z, q, _ = (cupy.asarray(x, dtype="f4") for x in rows(257, k))
    slots = cupy.full(N_SLOTS, 0.7, dtype="f4")
    first, again = cupy.empty_like(z), cupy.empty_like(z)
    launch_q_pi_distill_grad(z, q, slots, first)
    for _ in range(100):
        launch_q_pi_distill_grad(z, q, slots, again)
        assert (again == first).all()
    launch_q_pi_distill_grad(z, q, slots, z)
    assert (z == first).all()


def test_more_than_two_to_the_31_elements(torch: Any) -> None:
    n, k = 2**28 + 5, 9
    z = torch.empty(n, k, device="cuda", dtype=torch.bfloat16).normal_()
    gradient, slots = torch.full_like(z, torch.nan), torch_slots(torch, 0.2, 1.0)
    launch_q_pi_distill_grad(z, z, slots, gradient, stream=torch.cuda.current_stream().cuda_stream)
    for part in (slice(0, 999), slice(n // 2, n // 2 + 999), slice(n - 999, n)):
        expected, _ = float64_autograd(torch, z[part], z[part], slots, None)
        assert_close(torch, gradient[part], expected, BOUNDS["bfloat16"])


def test_runs_in_the_order_of_the_callers_stream(torch: Any) -> None:
    slots, side = torch_slots(torch, 0.2, 1.0), torch.cuda.Stream()
    fresh, q = torch.randn(4096, 11, device="cuda"), torch.randn(4096, 11, device="cuda")
    z, gradient = torch.zeros_like(fresh), torch.empty_like(fresh)
    launch_q_pi_distill_grad(z, q, slots, gradient, stream=torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # some 30 ms, in which any other stream would be through
        z.copy_(fresh)
        launch_q_pi_distill_grad(z, q, slots, gradient, stream=side.cuda_stream)
        result = gradient.clone()
    side.synchronize()
    assert_close(torch, result, float64_autograd(torch, fresh, q, slots, None)[0], 1e-5)


def test_a_captured_training_step_sees_new_slots(torch: Any) -> None:
    from cotuned.kernels.torch_autograd import q_pi_distill

    slots = torch_slots(torch, 0.2, 1.0)
    weights = torch.randn(5, 11, device="cuda", requires_grad=True)
    states, q = torch.randn(8, 32, 5, device="cuda"), torch.randn(8, 32, 11, device="cuda")
    weights.grad = torch.zeros_like(weights)

    def step() -> None:
        weights.grad.zero_()
        q_pi_distill(states @ weights, q, slots).mean().backward()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for alpha, tau in ((0.2, 1.0), (1.5, 0.1), (0.01, 7.0)):
        new = torch.tensor([alpha, 0.0, tau]).pin_memory()  # ALPHA, LOG_ALPHA, TAU
        slots[Slot.ALPHA : Slot.TAU + 1].copy_(new, non_blocking=True)
        graph.replay()
        z = (states @ weights).detach().reshape(256, 11)
        expected, _ = float64_autograd(torch, z, q.reshape(256, 11), slots, None)
        expected = states.reshape(256, 5).double().T @ expected / 256
        assert_close(torch, weights.grad, expected, 1e-4)  # of a product in float32


def test_a_captured_graph_follows_sac_cotune(cupy: Any) -> None:
    """Both kernels in one graph, on a bus record of its own; between replays only observations are copied in."""
    n, k = 64, 11
    layout = RecordLayout.of(N_SLOTS, k)
    record = np.zeros(layout.size, np.uint8)
    slots = record[: 4 * N_SLOTS].view(np.float32)
    counters = record[layout.counters :][: 8 * len(Counter)].view(np.int64)
    parameters: npt.NDArray[np.float64] = record[layout.parameters :][: 8 * len(Parameter)].view(np.float64)
    parameters[:] = run_parameters(Settings(n_actions=k), "")
    initialize_tuner(slots, parameters)
    bus = cupy.asarray(record)
    device_slots = bus[: 4 * N_SLOTS].view(cupy.float32)
    z, q, _ = rows(n, k)
    z, q = z.astype(np.float32), q.astype(np.float32)
    device_z, device_q = cupy.asarray(z), cupy.asarray(q)
    gradient, nothing = cupy.empty_like(device_z), cupy.full(1, cupy.nan)
    tune = compiled(cupy, "sac_cotune", k, N_SLOTS).get_function("sac_cotune")
    launch_q_pi_distill_grad(device_z, device_q, device_slots, gradient)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        tune((1,), (1,), (bus, np.int64(0), nothing))
        launch_q_pi_distill_grad(device_z, device_q, device_slots, gradient)
        graph = stream.end_capture()
    seen = set()
    for observation, entropy in enumerate((2.3, 0.4, 0.4, 1.9), start=1):
        slots[Slot.RL_ACTION_ENTROPY_EMA_INDEX] = entropy
        counters[Counter.OBSERVATIONS] = observation
        with stream:
            device_slots[Slot.RL_ACTION_ENTROPY_EMA_INDEX : Slot.RL_ACTION_ENTROPY_EMA_INDEX + 1].set(
                slots[Slot.RL_ACTION_ENTROPY_EMA_INDEX :][:1], stream=stream
            )
            bus[layout.counters : layout.counters + 8].set(record[layout.counters :][:8], stream=stream)
        graph.launch(stream)
        stream.synchronize()
        sac_cotune(slots, counters, parameters, None)
        alpha, tau = float(slots[Slot.ALPHA]), float(slots[Slot.TAU])
        seen.add((alpha, tau))
        np.testing.assert_allclose(device_slots[[Slot.ALPHA, Slot.TAU]].get(), [alpha, tau], rtol=1e-6)
        expected, _ = q_pi_distill_grad(z, q, alpha, tau)
        np.testing.assert_allclose(gradient.get(), expected, rtol=1e-5, atol=1e-6)
    assert len(seen) == 4
