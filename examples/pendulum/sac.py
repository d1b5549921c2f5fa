"""A small discrete Soft Actor-Critic whose policy is distilled from Q at the temperature τ.

Critics regress r + γ·V(s′) with the soft value V = Σ π·(min Q − α·ln π). The policy follows softmax(min Q / τ) with an
entropy bonus α (`distillation`). So α and τ both steer exploration, and both come from outside at every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distillation import distillation_gradient, log_softmax
from networks import Adam, EnsembleMlp, FloatArray
from replay import Minibatch


@dataclass(frozen=True, slots=True)
class SacSettings:
    """Sizes and rates of the training."""

    hidden: int = 64
    """Units of each of the two hidden layers."""
    members: int = 2
    """Critics."""
    gamma: float = 0.97
    """Discount a step."""
    critic_rate: float = 1e-3
    """Adam's learning rate of the critics."""
    policy_rate: float = 1e-3
    """Adam's learning rate of the policy."""
    target_blend: float = 0.01
    """Fraction of the way that the target critics follow, a step."""
    reward_scale: float = 0.1
    """Rewards are multiplied by this; it sets the scale of Q, hence of the τ and α that matter."""


def critic_network(rng: np.random.Generator, inputs: int, actions: int, settings: SacSettings) -> EnsembleMlp:
    """Q(s, ·) of all critics: [E, n, K]."""
    return EnsembleMlp(rng, [inputs, settings.hidden, settings.hidden, actions], settings.members)


def policy_network(rng: np.random.Generator, inputs: int, actions: int, settings: SacSettings) -> EnsembleMlp:
    """Logits z of the policy: [1, n, K]; nearly uniform at the start."""
    return EnsembleMlp(rng, [inputs, settings.hidden, settings.hidden, actions], last_scale=0.01)


class DiscreteSac:
    """Critics, their targets, the policy, and one step of training.

    Args:
        rng: source of the initial weights.
        inputs: numbers in an observation.
        actions: K.
        settings: sizes and rates.
    """

    def __init__(self, rng: np.random.Generator, inputs: int, actions: int, settings: SacSettings) -> None:
        self.settings = settings
        self.critics = critic_network(rng, inputs, actions, settings)
        self.policy = policy_network(rng, inputs, actions, settings)
        self._targets = critic_network(rng, inputs, actions, settings)
        self._targets.load(self.critics.parameters)
        self._critic_adam = Adam(self.critics.parameters, settings.critic_rate)
        self._policy_adam = Adam(self.policy.parameters, settings.policy_rate)

    def update(self, batch: Minibatch, alpha: float, tau: float) -> float:
        """One step of critics, policy and targets.

        Args:
            batch: [E, n, …], one minibatch for each critic; the policy learns from the first.
            alpha: SAC entropy coefficient α.
            tau: temperature τ of softmax(Q/τ).

        Returns:
            Mean squared error of the critics.
        """
        error = self._update_critics(batch, alpha)
        self._update_policy(batch.observations[0], alpha, tau)
        self._targets.follow(self.critics, self.settings.target_blend)
        return error

    def soft_targets(self, batch: Minibatch, alpha: float) -> FloatArray:
        """r + γ·V(s′), shape [E, n]."""
        members, n, size = batch.next_observations.shape
        flat = batch.next_observations.reshape(members * n, size)
        log_probs = log_softmax(self.policy(flat)[0])
        q = self._targets(flat).min(axis=0)
        value = (np.exp(log_probs) * (q - alpha * log_probs)).sum(axis=-1)
        return batch.rewards * self.settings.reward_scale + self.settings.gamma * value.reshape(members, n)

    def _update_critics(self, batch: Minibatch, alpha: float) -> float:
        wanted = self.soft_targets(batch, alpha)
        activations = self.critics.forward(batch.observations)
        chosen = batch.actions[..., None]
        error = np.take_along_axis(activations[-1], chosen, axis=-1)[..., 0] - wanted
        gradient = np.zeros_like(activations[-1])
        np.put_along_axis(gradient, chosen, (error / error.shape[-1])[..., None].astype(gradient.dtype), axis=-1)
        self._critic_adam.step(self.critics.backward(activations, gradient))
        return float(np.square(error).mean())

    def _update_policy(self, observations: FloatArray, alpha: float, tau: float) -> None:
        q = self.critics(observations).min(axis=0)
        activations = self.policy.forward(observations)
        gradient = distillation_gradient(activations[-1], q[None], alpha, tau) / len(observations)
        self._policy_adam.step(self.policy.backward(activations, gradient.astype(q.dtype)))
