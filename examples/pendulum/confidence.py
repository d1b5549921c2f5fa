"""How much the critics agree about a state: the signal of the demo's confidence gate.

It is taken from the critics and not from max π. With max π more temperature means less confidence and more Holds, so
the response of executed entropy to τ would turn its sign, and a tuner with a fixed sign would run away.
"""

from __future__ import annotations

import numpy as np

from networks import FloatArray


def confidence(q: FloatArray) -> FloatArray:
    """Share of preference in preference + disagreement, one number from 0 to 1 a state.

    Preference is the spread of the critics' mean Q over the actions; disagreement is the spread of Q over the critics
    (half of |Q1 − Q2| for two), root mean square over the actions. What the critics say about the state as a whole is
    taken out first: only differences between actions matter to a choice. The number depends on the state alone, so
    the post-gate distribution of a gated state is exactly "always Hold".

    Args:
        q: Q values [E, n, K] of E critics.

    Returns:
        [n]; 0.5 where the critics disagree as much as they prefer, 0 where they have no preference at all.
    """
    advantages = q - q.mean(axis=-1, keepdims=True)
    preference = advantages.mean(axis=0).std(axis=-1)
    disagreement = np.sqrt(np.square(advantages.std(axis=0)).mean(axis=-1))
    total = preference + disagreement
    return np.divide(preference, total, out=np.zeros_like(total), where=total > 0)
