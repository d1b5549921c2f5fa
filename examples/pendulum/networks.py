"""Small multilayer perceptrons in NumPy, with backward passes by hand, and Adam.

A framework would bring gigabytes to a demo whose networks have five thousand parameters each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]


class EnsembleMlp:
    """E perceptrons of one shape side by side: one matrix product serves all members.

    Hidden layers are rectified, the last one is linear. Members differ by their random start and by what they are
    trained on.

    Args:
        rng: source of the initial weights.
        sizes: units of each layer, inputs first, outputs last.
        members: E.
        last_scale: factor on the last layer's initial weights; small means outputs near 0.
        dtype: float32 to train, float64 where gradients are checked.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        sizes: Sequence[int],
        members: int = 1,
        last_scale: float = 1.0,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        self.parameters: list[FloatArray] = []
        """Weights [E, in, out] and biases [E, 1, out], layer by layer."""
        last = len(sizes) - 2
        for layer, (n_in, n_out) in enumerate(pairwise(sizes)):
            scale = np.sqrt(2.0 / n_in) * (last_scale if layer == last else 1.0)
            self.parameters.append((scale * rng.standard_normal((members, n_in, n_out))).astype(dtype))
            self.parameters.append(np.zeros((members, 1, n_out), dtype=dtype))

    def __call__(self, inputs: FloatArray) -> FloatArray:
        """Outputs [E, n, out] of inputs [n, in], or of [E, n, in] where each member has its own."""
        return self.forward(inputs)[-1]

    def forward(self, inputs: FloatArray) -> list[FloatArray]:
        """What enters each layer, and the outputs last: all that `backward` needs."""
        activations = [inputs]
        n_layers = len(self.parameters) // 2
        for layer in range(n_layers):
            weights, biases = self.parameters[2 * layer : 2 * layer + 2]
            outputs = activations[-1] @ weights + biases
            activations.append(outputs if layer == n_layers - 1 else np.maximum(outputs, 0))
        return activations

    def backward(self, activations: list[FloatArray], gradient: FloatArray) -> list[FloatArray]:
        """Gradients in the order of `parameters`, from `gradient` = dL/d outputs [E, n, out]."""
        gradients: list[FloatArray] = []
        for layer in reversed(range(len(self.parameters) // 2)):
            entering = activations[layer]
            gradients.append(gradient.sum(axis=1, keepdims=True))
            gradients.append(np.swapaxes(entering, -1, -2) @ gradient)
            if layer > 0:
                gradient = (gradient @ np.swapaxes(self.parameters[2 * layer], -1, -2)) * (entering > 0)
        gradients.reverse()
        return gradients

    def load(self, parameters: Sequence[FloatArray]) -> None:
        """Takes over another network's parameters, by copy.

        Raises:
            ValueError: the shapes are not this network's.
        """
        got, expected = [p.shape for p in parameters], [p.shape for p in self.parameters]
        if got != expected:
            raise ValueError(f"parameters: got shapes {got}, expected {expected}")
        for mine, other in zip(self.parameters, parameters, strict=True):
            mine[...] = other

    def follow(self, other: EnsembleMlp, blend: float) -> None:
        """Moves the fraction `blend` of the way to the other network (Polyak averaging)."""
        for mine, theirs in zip(self.parameters, other.parameters, strict=True):
            mine += blend * (theirs - mine)


class Adam:
    """Adam (Kingma & Ba 2015) on a list of parameters, which it changes in place.

    Args:
        parameters: what is trained.
        rate: learning rate.
    """

    def __init__(self, parameters: list[FloatArray], rate: float) -> None:
        self._parameters, self._rate = parameters, rate
        self._first = [np.zeros_like(p) for p in parameters]
        self._second = [np.zeros_like(p) for p in parameters]
        self._steps = 0

    def step(self, gradients: list[FloatArray]) -> None:
        """One step against the gradients."""
        self._steps += 1
        rate = self._rate * np.sqrt(1 - 0.999**self._steps) / (1 - 0.9**self._steps)
        for p, g, m, v in zip(self._parameters, gradients, self._first, self._second, strict=True):
            m += 0.1 * (g - m)
            v += 0.001 * (g * g - v)
            p -= (rate * m / (np.sqrt(v) + 1e-8)).astype(p.dtype, copy=False)
