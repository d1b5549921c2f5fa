"""Q→π distillation: the policy π = softmax(z) is pulled to π* = softmax(Q/τ), with an entropy bonus α.

L = CE(π*, π) − α·H(π), and its gradient has a closed form: dL/dz = (π − π*) + α·π·(ln π + H(π)).
"""

from __future__ import annotations

import numpy as np

from networks import FloatArray


def log_softmax(logits: FloatArray) -> FloatArray:
    """ln softmax over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def entropy(log_probs: FloatArray) -> FloatArray:
    """Entropy of each row, from its log-probabilities; nats."""
    return -(np.exp(log_probs) * log_probs).sum(axis=-1)


def distillation_loss(logits: FloatArray, q: FloatArray, alpha: float, tau: float) -> FloatArray:
    """L of each row [n], from logits z and Q values [n, K]."""
    log_probs = log_softmax(logits)
    targets = np.exp(log_softmax(q / tau))
    return -(targets * log_probs).sum(axis=-1) - alpha * entropy(log_probs)


def distillation_gradient(logits: FloatArray, q: FloatArray, alpha: float, tau: float) -> FloatArray:
    """dL/dz of each row [n, K]."""
    log_probs = log_softmax(logits)
    probs = np.exp(log_probs)
    targets = np.exp(log_softmax(q / tau))
    return (probs - targets) + alpha * probs * (log_probs + entropy(log_probs)[..., None])
