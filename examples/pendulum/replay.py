"""Replay buffer: the last transitions, in arrays, sampled uniformly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from networks import FloatArray


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Transitions with the actions that were really executed, which is what the critics must learn about.

    Arrays may have a leading axis [E]: one minibatch for each critic.
    """

    observations: FloatArray
    actions: npt.NDArray[np.int64]
    rewards: FloatArray
    next_observations: FloatArray


class Replay:
    """A ring of transitions.

    Args:
        capacity: transitions kept.
        observation_size: numbers in an observation.
    """

    def __init__(self, capacity: int, observation_size: int) -> None:
        self._observations = np.zeros((capacity, observation_size), dtype=np.float32)
        self._actions = np.zeros(capacity, dtype=np.int64)
        self._rewards = np.zeros(capacity, dtype=np.float32)
        self._next_observations = np.zeros_like(self._observations)
        self._next = 0
        self._filled = 0

    def __len__(self) -> int:
        return self._filled

    def add(
        self,
        observations: FloatArray,
        actions: npt.NDArray[np.int64],
        rewards: FloatArray,
        next_observations: FloatArray,
    ) -> None:
        """Appends n transitions in place of the oldest."""
        capacity, n = len(self._actions), len(actions)
        places = (self._next + np.arange(n)) % capacity
        self._observations[places] = observations
        self._actions[places] = actions
        self._rewards[places] = rewards
        self._next_observations[places] = next_observations
        self._next = (self._next + n) % capacity
        self._filled = min(self._filled + n, capacity)

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Minibatch:
        """Transitions drawn with replacement, laid out in `shape`."""
        places = rng.integers(self._filled, size=shape)
        return Minibatch(
            self._observations[places],
            self._actions[places],
            self._rewards[places],
            self._next_observations[places],
        )
