"""Distilling Q into the policy: the NumPy reference. The CUDA kernel stands in ``q_pi_distill_grad.cu``.

With π = softmax(z) and π* = softmax(Q/τ), both over the legal actions of a row:

    L     = CE(π*, π) − α·H(π) = −Σ π* ln π + α Σ π ln π
    dL/dz = (π − π*) + α·π·(ln π + H(π))

π* is a target: no gradient goes to Q. All arithmetic is float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]


def q_pi_distill_grad(
    logits: npt.NDArray[Any], q: npt.NDArray[Any], alpha: float, tau: float, mask: npt.NDArray[Any] | None = None
) -> tuple[Float64Array, Float64Array]:
    """Gradient and loss of each row: sums over actions, neither summed over rows nor divided by n.

    An action is legal unless `mask` is 0 there or its logit is −inf; an action that is not legal has gradient 0,
    whatever its Q. A row with one legal action, or none, has gradient 0 and loss 0. With τ → 0 the target becomes the
    greedy one, shared by ties; τ ≤ 0 is taken as that. NaN in a legal action, and Q = −inf in all of them, make the
    row NaN.

    Args:
        logits: [n, K].
        q: [n, K].
        alpha: entropy coefficient, ≥ 0.
        tau: temperature of the target.
        mask: bool or uint8 [n, K]; None: all actions are legal.

    Returns:
        dL/dz, float64 [n, K], and L, float64 [n].
    """
    legal = ~np.isneginf(logits)
    if mask is not None:
        legal &= mask != 0
    with np.errstate(invalid="ignore", over="ignore"):
        log_pi, pi = _log_softmax(logits.astype(np.float64), legal, 1.0)
        _, target = _log_softmax(q.astype(np.float64), legal, tau)
        entropy = -(pi * log_pi).sum(axis=1, keepdims=True)
        gradient = (pi - target) + alpha * pi * (log_pi + entropy)
        loss = -(target * log_pi).sum(axis=1) - alpha * entropy[:, 0]
    return np.where(legal, gradient, 0.0), np.where(legal.any(axis=1), loss, 0.0)


def _log_softmax(x: Float64Array, legal: npt.NDArray[np.bool_], tau: float) -> tuple[Float64Array, Float64Array]:
    """ln softmax(x/τ) and softmax(x/τ) over what is legal; both 0 elsewhere."""
    x = np.where(legal, x, -np.inf)
    top = x.max(axis=1, keepdims=True)
    scaled = np.where(legal, (x - top) / max(tau, float(np.finfo(np.float32).tiny)), -np.inf)
    exps = np.exp(scaled)
    total = np.maximum(exps.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    # Finite where exp underflows, so that 0 · ln 0 is 0.
    logs = np.where(legal, np.maximum(scaled, np.finfo(np.float64).min) - np.log(total), 0.0)
    return logs, exps / total
