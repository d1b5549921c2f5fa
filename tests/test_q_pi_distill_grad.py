"""The NumPy reference of `q_pi_distill_grad` beside finite differences and closed forms, and what needs no GPU."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest

from cotuned.kernels.cuda_distill import MAX_ACTIONS, Variant, _widest, launch_q_pi_distill_grad
from cotuned.kernels.device_arrays import DeviceArray
from cotuned.kernels.q_pi_distill_grad import q_pi_distill_grad

Array = npt.NDArray[np.float64]


def rows(n: int, k: int, seed: int = 0) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
    """Random logits, Q, and a mask with a legal action in each row."""
    rng = np.random.default_rng(seed)
    mask = rng.random((n, k)) < 0.6
    mask[np.arange(n), rng.integers(0, k, n)] = True
    return 2 * rng.normal(size=(n, k)), 3 * rng.normal(size=(n, k)), mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("alpha", "tau"), [(0.2, 1.0), (0.0, 0.3), (3.0, 5.0)])
def test_gradient_is_that_of_the_loss(alpha: float, tau: float, masked: bool) -> None:
    z, q, mask = rows(6, 7)
    legal = mask if masked else None
    gradient, _ = q_pi_distill_grad(z, q, alpha, tau, legal)
    step = 1e-5
    for action in range(7):
        moved = np.zeros(7)
        moved[action] = step
        above, below = (q_pi_distill_grad(z + d, q, alpha, tau, legal)[1] for d in (moved, -moved))
        np.testing.assert_allclose(gradient[:, action], (above - below) / (2 * step), rtol=1e-6, atol=1e-9)


def test_closed_forms() -> None:
    k, alpha = 11, 0.3
    gradient, loss = q_pi_distill_grad(np.full((1, k), 7.0), np.full((1, k), -2.0), alpha, 0.5)  # all uniform
    np.testing.assert_allclose(loss, (1 - alpha) * np.log(k))
    np.testing.assert_allclose(gradient, 0.0, atol=1e-15)
    _, q, _ = rows(4, k)
    tau = 0.7
    gradient, _ = q_pi_distill_grad(q / tau + 5.0, q, 0.0, tau)  # π = π*
    np.testing.assert_allclose(gradient, 0.0, atol=1e-15)
    z, q = np.array([[0.4, -0.9]]), np.array([[1.1, 0.2]])  # two actions: a sigmoid
    p, target = 1 / (1 + np.exp(-1.3)), 1 / (1 + np.exp(-0.9 / tau))
    gradient, loss = q_pi_distill_grad(z, q, alpha, tau)
    slope = p - target + alpha * p * (1 - p) * 1.3  # dH/dp = −ln p/(1 − p) = −(z₀ − z₁)
    np.testing.assert_allclose(gradient, [[slope, -slope]])
    np.testing.assert_allclose(
        loss,
        -target * np.log(p) - (1 - target) * np.log(1 - p) + alpha * (p * np.log(p) + (1 - p) * np.log(1 - p)),
    )


def test_gradients_of_a_row_add_up_to_zero_and_a_shift_changes_nothing() -> None:
    z, q, mask = rows(50, 9)
    gradient, loss = q_pi_distill_grad(z, q, 0.4, 0.8, mask)
    np.testing.assert_allclose(gradient.sum(axis=1), 0.0, atol=1e-14)
    assert not gradient[~mask].any()
    for other in (q_pi_distill_grad(z + 3.0, q - 8.0, 0.4, 0.8, mask), q_pi_distill_grad(z, q, 0.4, 0.8, 3 * mask)):
        np.testing.assert_allclose(other[0], gradient, atol=1e-13)
        np.testing.assert_allclose(other[1], loss, atol=1e-13)
    silent = np.where(mask, z, -np.inf)
    noise = np.where(mask, q, np.nan)
    for other in (q_pi_distill_grad(silent, noise, 0.4, 0.8), q_pi_distill_grad(silent, noise, 0.4, 0.8, mask)):
        assert all(np.array_equal(a, b) for a, b in zip(other, (gradient, loss), strict=True))


def test_rows_at_the_edge() -> None:
    inf = np.inf
    z = np.array([[3.0, -inf, -inf], [-inf] * 3, [1e38, -3e38, 0.0], [3e38, 0.0, -3e38], [0.0, 0.0, np.nan]])
    gradient, loss = q_pi_distill_grad(z, np.array([[1.0, 9.0, 2.0]] * 5), 0.2, 0.5)
    assert not gradient[:2].any()
    assert not loss[:2].any()
    assert np.isfinite(gradient[2:4]).all()
    assert np.isnan(gradient[4]).all()
    greedy = q_pi_distill_grad(np.zeros((1, 3)), np.array([[1.0, 2.0, 2.0]]), 0.0, 1e-30)[0]
    for tau in (1e-6, 0.0, -1.0):
        np.testing.assert_allclose(
            q_pi_distill_grad(np.zeros((1, 3)), np.array([[1.0, 2.0, 2.0]]), 0.0, tau)[0], greedy
        )
    np.testing.assert_allclose(greedy, [[1 / 3, -1 / 6, -1 / 6]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_row_fits_its_threads(dtype: str) -> None:
    for k in range(1, MAX_ACTIONS + 1):
        for vector in [v for v in (1, 2, 4, 8) if k % v == 0 and v * (4 if dtype == "float32" else 2) <= 16]:
            variant = Variant(k, dtype, dtype, dtype, vector, False)
            lanes = variant.lanes
            assert lanes & (lanes - 1) == 0
            assert lanes <= 256
            assert -(-k // (lanes * vector)) * vector <= 32
            assert variant.staged == (k <= 32 and vector < 4)
    assert (
        f"#define LANES {Variant(64, 'float32', 'float32', 'float32', 4, True).lanes}\n"
        in Variant(64, "float32", "float32", "float32", 4, True).source()
    )


def array(dtype: str = "float32", shape: tuple[int, ...] = (8, 64), strides: tuple[int, ...] = (64, 1), **at: int):  # type: ignore[no-untyped-def]
    return DeviceArray(at.get("address", 512), dtype, at.get("device", 0), shape, strides)


def test_accesses_are_as_wide_as_every_array_allows() -> None:
    assert _widest(64, array(), array(), array()) == 4
    assert _widest(64, *[array("bfloat16")] * 3, array("bool")) == 8
    assert _widest(64, *[array("bfloat16")] * 2, array()) == 8
    assert _widest(64, array("bfloat16"), array()) == 4
    assert _widest(66, array(), array(strides=(66, 1))) == 2
    assert _widest(64, array(address=520), array()) == 2
    assert _widest(64, array(strides=(65, 1)), array()) == 1
    assert _widest(64, array(), array(), array("bool", address=514)) == 2
    assert _widest(11, array(), array()) == 1


SLOTS = array(shape=(1024,), strides=(1,))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"logits": array(shape=(8,), strides=(1,))}, r"logits: got shape \(8,\), expected \[n, K\]"),
        ({"logits": array(shape=(8, 4097))}, "K from 1 to 4096"),
        ({"logits": array("float64")}, "logits: got float64, expected float32 or bfloat16 or float16"),
        ({"q": array(shape=(8, 63))}, r"q: got shape \(8, 63\), expected that of the logits, \(8, 64\)"),
        ({"q": array(strides=(1, 8))}, "q: got elements of a row that lie 8 apart"),
        ({"q": array(device=1)}, "q: got GPU 1, expected that of the logits, 0"),
        ({"gradient": array("bfloat16")}, "gradient: got bfloat16, expected float32;"),
        ({"mask": array("int32")}, "mask: got int32, expected bool or uint8"),
        ({"slots": array(shape=(500,), strides=(1,))}, "slots: got float32 .500,., expected float32 with at least 588"),
        ({"loss": array(shape=(7,), strides=(1,))}, "loss: got .* at least 8 elements"),
        ({"loss": array(shape=(8,), strides=(2,))}, "loss: got elements that lie 2 apart"),
        ({"q": np.zeros((8, 64), np.float32)}, "q: got an array in host memory"),
        ({"q": [[0.0]]}, "q: got list, expected a CuPy array or a torch tensor"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(wrong: dict[str, object], message: str) -> None:
    arguments = {"logits": array(), "q": array(), "slots": SLOTS, "gradient": array()} | wrong
    with pytest.raises((TypeError, ValueError), match=message):
        launch_q_pi_distill_grad(**arguments)


def test_the_core_imports_neither_torch_nor_cupy() -> None:
    text = "import sys, cotuned.kernels.cuda_distill; sys.exit(bool({'torch', 'cupy'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)


def test_no_rows_need_no_kernel() -> None:
    none = array(shape=(0, 64))
    launch_q_pi_distill_grad(none, none, SLOTS, none, loss=array(shape=(0,), strides=(1,)))
