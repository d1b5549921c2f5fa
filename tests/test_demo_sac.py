"""The demo's numerics: gradients against finite differences in float64, confidence, and the pendulum's levels."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DEMO = Path(__file__).parent.parent / "examples" / "pendulum"


@pytest.fixture(scope="module")
def demo() -> Any:
    """Imports a module of the demo by name; its modules import each other as siblings, as scripts do."""
    sys.path.insert(0, str(DEMO))
    yield importlib.import_module
    sys.path.remove(str(DEMO))


def numeric_gradient(function: Callable[[], float], at: np.ndarray) -> np.ndarray:
    """Central differences of `function` with respect to the array `at`, which it reads."""
    gradient = np.empty_like(at)
    for place in np.ndindex(at.shape):
        kept = at[place]
        at[place] = kept + 1e-6
        above = function()
        at[place] = kept - 1e-6
        below = function()
        at[place] = kept
        gradient[place] = (above - below) / 2e-6
    return gradient


@pytest.mark.parametrize("inputs_for_each_member", [False, True])
def test_mlp_backward_is_the_gradient(demo: Any, inputs_for_each_member: bool) -> None:
    rng = np.random.default_rng(0)
    network = demo("networks").EnsembleMlp(rng, [3, 6, 5, 4], members=2, dtype=np.float64)
    inputs = rng.standard_normal((2, 7, 3) if inputs_for_each_member else (7, 3))
    weights = rng.standard_normal((2, 7, 4))
    gradients = network.backward(network.forward(inputs), weights)
    assert len(gradients) == len(network.parameters) == 6
    for parameter, gradient in zip(network.parameters, gradients, strict=True):
        expected = numeric_gradient(lambda: float((weights * network(inputs)).sum()), parameter)
        assert gradient.shape == parameter.shape
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("alpha", "tau"), [(0.0, 1.0), (0.2, 0.3), (1.5, 0.05)])
def test_distillation_gradient_is_the_gradient_of_the_loss(demo: Any, alpha: float, tau: float) -> None:
    distillation = demo("distillation")
    rng = np.random.default_rng(1)
    logits, q = 2 * rng.standard_normal((5, 11)), rng.standard_normal((5, 11))
    expected = numeric_gradient(lambda: float(distillation.distillation_loss(logits, q, alpha, tau).sum()), logits)
    gradient = distillation.distillation_gradient(logits, q, alpha, tau)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-7)


def test_distillation_without_bonus_ends_at_softmax_of_q(demo: Any) -> None:
    distillation = demo("distillation")
    q = np.random.default_rng(2).standard_normal((4, 11))
    np.testing.assert_allclose(distillation.distillation_gradient(q / 0.3 + 7, q, 0.0, 0.3), 0, atol=1e-12)


def test_entropy_of_known_rows(demo: Any) -> None:
    distillation = demo("distillation")
    rows = np.array([[0.0] * 11, [500.0] + [0.0] * 10])
    np.testing.assert_allclose(distillation.entropy(distillation.log_softmax(rows)), [np.log(11), 0], atol=1e-12)


def test_adam_finds_a_minimum(demo: Any) -> None:
    x = np.array([3.0, -2.0])
    adam = demo("networks").Adam([x], rate=0.05)
    for _ in range(1000):
        adam.step([2 * (x - np.array([1.0, 0.5]))])
    np.testing.assert_allclose(x, [1.0, 0.5], atol=1e-3)


def test_soft_targets_by_hand(demo: Any) -> None:
    sac, replay = demo("sac"), demo("replay")
    agent = sac.DiscreteSac(np.random.default_rng(3), 3, 11, sac.SacSettings(gamma=0.9, reward_scale=0.1))
    observations = np.random.default_rng(4).standard_normal((2, 1, 3)).astype(np.float32)
    batch = replay.Minibatch(observations, np.zeros((2, 1), np.int64), np.full((2, 1), -5.0), observations)
    got = agent.soft_targets(batch, alpha=0.4)
    for member in range(2):
        z = agent.policy(observations[member])[0, 0].astype(np.float64)
        p = np.exp(z) / np.exp(z).sum()
        q = agent.critics(observations[member])[:, 0].min(axis=0)
        assert got[member, 0] == pytest.approx(-0.5 + 0.9 * (p * (q - 0.4 * np.log(p))).sum(), abs=1e-5)


def test_confidence(demo: Any) -> None:
    confidence = demo("confidence").confidence
    q = np.random.default_rng(5).standard_normal((6, 11))
    offset = np.array([0.0, 3.0])[:, None, None]
    np.testing.assert_allclose(confidence(np.stack([q, q]) + offset), 1.0)  # they agree on every difference
    np.testing.assert_allclose(confidence(np.stack([q, -q])), 0.0, atol=1e-12)  # they prefer opposite things
    np.testing.assert_array_equal(confidence(np.zeros((2, 6, 11))), 0.0)  # they prefer nothing
    noise = np.random.default_rng(6).standard_normal((6, 11))
    falling = np.array([confidence(np.stack([q + s * noise, q - s * noise])) for s in (0.0, 0.1, 0.5, 1.0, 5.0)])
    assert (np.diff(falling, axis=0) < 0).all()
    assert np.isfinite(falling).all()


def test_torque_levels(demo: Any) -> None:
    env = demo("env")
    assert len(env.TORQUES) == env.N_ACTIONS == 11
    assert env.TORQUES[env.HOLD] == 0
    np.testing.assert_allclose(env.TORQUES, [-2, -1.6, -1.2, -0.8, -0.4, 0, 0.4, 0.8, 1.2, 1.6, 2], atol=1e-6)


def test_pendulums_step_as_gymnasium_does(demo: Any) -> None:
    env = demo("env")
    vector = env.PendulumVector(4, seed=7)
    before = vector.observations.copy()
    played = vector.step(np.array([0, 5, 10, 5]))
    np.testing.assert_array_equal(played.observations, before)
    np.testing.assert_array_equal(vector.observations, played.next_observations)
    angle, speed = np.arctan2(before[:, 1], before[:, 0]), before[:, 2] * 8
    torque = np.array([-2.0, 0.0, 2.0, 0.0])
    np.testing.assert_allclose(played.rewards, -(angle**2 + 0.1 * speed**2 + 0.001 * torque**2), atol=1e-4)
    expected_speed = np.clip(speed + (15 * np.sin(angle) + 3 * torque) * 0.05, -8, 8)
    np.testing.assert_allclose(played.next_observations[:, 2] * 8, expected_speed, atol=1e-4)
    vector.close()


def test_episodes_are_staggered_and_only_whole_ones_count(demo: Any) -> None:
    env = demo("env")
    vector = env.PendulumVector(4, seed=8)
    ended = []
    for _ in range(2 * env.EPISODE_STEPS):
        vector.step(np.full(4, env.HOLD))
        ended.append(len(vector.take_returns()))
    assert [step + 1 for step, n in enumerate(ended) for _ in range(n)] == [200, 250, 300, 350, 400]
    vector.close()


def test_same_seed_same_pendulums(demo: Any) -> None:
    env = demo("env")
    vectors = [env.PendulumVector(3, seed=9) for _ in range(2)]
    for _ in range(env.EPISODE_STEPS + 5):
        played = [vector.step(np.array([0, 4, 9])) for vector in vectors]
        np.testing.assert_array_equal(played[0].next_observations, played[1].next_observations)
    for vector in vectors:
        vector.close()


def test_sample_follows_the_rows(demo: Any) -> None:
    sample = demo("actor").sample
    probs = np.tile([0.0, 0.25, 0.0, 0.75, 0.0], (20_000, 1))
    counts = np.bincount(sample(np.random.default_rng(10), probs), minlength=5)
    assert counts[[0, 2, 4]].sum() == 0
    assert counts[1] / 20_000 == pytest.approx(0.25, abs=0.02)


def test_channel_carries_arrays_and_refuses_the_rest(demo: Any) -> None:
    channel = demo("channel")
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array([], dtype=np.int64)]
    message = channel.unpack(channel.pack({"kind": "x", "arrays": arrays, "n": 3}))
    assert message["n"] == 3
    for got, sent in zip(message["arrays"], arrays, strict=True):
        assert got.dtype == sent.dtype
        np.testing.assert_array_equal(got, sent)
    with pytest.raises(TypeError):
        channel.pack({"kind": "x", "objects": np.array([object()])})
    for frame in (b"", b"\xc1", channel.msgpack.packb([1]), channel.msgpack.packb({"n": 1})):
        with pytest.raises(channel.ChannelError):
            channel.unpack(frame)


def test_replay_keeps_the_newest(demo: Any) -> None:
    replay = demo("replay").Replay(5, 1)
    for start in (0, 4):
        numbers = np.arange(start, start + 4)
        replay.add(numbers[:, None], numbers, numbers, numbers[:, None] + 1)
    assert len(replay) == 5
    batch = replay.sample(np.random.default_rng(11), (2, 200))
    assert batch.observations.shape == (2, 200, 1)
    assert set(batch.actions.ravel()) == {3, 4, 5, 6, 7}
    np.testing.assert_array_equal(batch.next_observations[..., 0], batch.actions + 1)


def test_reachable_entropy_of_the_independent_gate(demo: Any) -> None:
    reachable = demo("summary").reachable
    assert [reachable(g) for g in (0.5, 0.8, 0.85)] == pytest.approx([1.844, 0.961, 0.768], abs=5e-4)
    assert reachable(1.0) == 0
    assert reachable(0.0) == reachable(1 / 11) == pytest.approx(np.log(11))


def history_of(executed: float, alpha: float) -> dict[str, np.ndarray]:
    """Thirty steps in which everything stands still but α, which ends at `alpha`."""
    levels = {"policy_entropy": 2.2, "entropy": executed, "conditional_entropy": 0.5, "gate_rate": 0.7}
    levels |= {"target_entropy": 1.3, "tau": 0.1, "episode_return": -900.0}
    columns = {name: np.full(30, level) for name, level in levels.items()}
    return columns | {"step": np.arange(1.0, 31.0), "alpha": np.linspace(0.05, alpha, 30)}


def test_summary_says_what_the_numbers_say_whichever_way_they_go(demo: Any) -> None:
    summary = demo("summary")
    far, near = history_of(0.6, 0.01), history_of(1.25, 0.2)
    text = "\n".join(summary.sentences(summary.figures({"from-420": far, "from-583": near})))
    assert "0.70 nats off the target in from-420 and 0.05 in from-583 (last third): from-583 came closer" in text
    assert "α fell (0.05 → 0.01" in text
    assert "α rose (0.05 → 0.2" in text
    assert "In 30 steps policy entropy was above the target" in text
    assert "multiplied α by 0.2 and τ by 1." in text
    assert "So policy entropy, which this tuner steers, was not held" in text
    text = "\n".join(summary.sentences(summary.figures({"from-420": near, "from-583": far})))
    assert "from-420 came closer" in text
    assert "So executed entropy, which this tuner steers, was not held" in text


def test_summary_and_picture_of_runs_without_a_whole_episode(demo: Any, tmp_path: Path) -> None:
    summary, picture = demo("summary"), demo("picture")
    history = history_of(1.2, 0.05) | {"episode_return": np.full(30, np.nan)}
    histories = {"from-420": history, "from-583": history}
    assert "episode return not known" in "\n".join(summary.sentences(summary.figures(histories)))
    picture.draw(histories, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
