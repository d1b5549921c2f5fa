"""Gymnasium's Pendulum-v1 with its torque in 11 levels, several environments stepped together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import gymnasium
import numpy as np
import numpy.typing as npt

N_ACTIONS = 11
HOLD = 5
"""Index of zero torque: what a gate puts in the place of an action that it does not trust."""
TORQUES = np.linspace(-2.0, 2.0, N_ACTIONS, dtype=np.float32)
"""Torque of each action index; N·m."""
OBSERVATION_SIZE = 3
EPISODE_STEPS = 200
_OBSERVATION_SCALE = np.array([1.0, 1.0, 1.0 / 8.0], dtype=np.float32)
"""Brings (cos θ, sin θ, dθ/dt) to about ±1 each; the pendulum's speed is clipped at 8 rad/s."""

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Transitions:
    """One step of n environments."""

    observations: Float32Array
    """[n, 3] before the step."""
    rewards: Float32Array
    """[n], Pendulum's own: −16.3 to 0."""
    next_observations: Float32Array
    """[n, 3] after the step and before any reset: the pendulum never terminates, so learners bootstrap from it."""


class PendulumVector:
    """n pendulums that start their next episode by themselves.

    The first episodes are cut at different lengths. Otherwise all environments would swing up and balance in step, and
    the histogram of actions over the environments would show the phase of the episode, not the policy.

    Args:
        n_envs: n.
        seed: of the initial states; environment i gets its own stream.
    """

    def __init__(self, n_envs: int, seed: int) -> None:
        self._envs = [gymnasium.make("Pendulum-v1", max_episode_steps=EPISODE_STEPS) for _ in range(n_envs)]
        seeds = np.random.SeedSequence(seed).generate_state(n_envs)
        first = [env.reset(seed=int(number))[0] for env, number in zip(self._envs, seeds, strict=True)]
        self._observations = cast(Float32Array, np.stack(first) * _OBSERVATION_SCALE)
        self._steps_left = [EPISODE_STEPS * (i + 1) // n_envs for i in range(n_envs)]
        self._whole = [left == EPISODE_STEPS for left in self._steps_left]
        self._returns = np.zeros(n_envs)
        self._finished: list[float] = []

    @property
    def observations(self) -> Float32Array:
        """[n, 3], what the policy sees now."""
        return self._observations

    def step(self, actions: npt.NDArray[Any]) -> Transitions:
        """Applies one action index to each environment."""
        before, after = self._observations, np.empty_like(self._observations)
        rewards = np.empty(len(self._envs), dtype=np.float32)
        for i, env in enumerate(self._envs):
            observation, reward, *_ = env.step(TORQUES[actions[i], None])
            after[i], rewards[i] = observation, reward
        after *= _OBSERVATION_SCALE
        self._returns += rewards
        self._observations = after.copy()
        for i in range(len(self._envs)):
            self._steps_left[i] -= 1
            if self._steps_left[i] == 0:
                self._start_episode(i)
        return Transitions(before, rewards, after)

    def _start_episode(self, i: int) -> None:
        if self._whole[i]:  # a first episode that was cut says nothing about the return
            self._finished.append(float(self._returns[i]))
        self._whole[i], self._returns[i], self._steps_left[i] = True, 0.0, EPISODE_STEPS
        self._observations[i] = self._envs[i].reset()[0] * _OBSERVATION_SCALE

    def take_returns(self) -> list[float]:
        """Returns of the whole episodes that ended since the last call, undiscounted, in Pendulum's own units."""
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Closes the environments."""
        for env in self._envs:
            env.close()
