"""An actor process for tests: pushes numbered batches whose contents follow from the actor's index and their number.

python tests/pusher.py ENDPOINT INDEX BATCHES
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from cotuned.client import ActorClient

N_ACTIONS = 11


def batches(index: int, count: int) -> list[npt.NDArray[np.int64]]:
    """The batches of actor `index`: 1 to 200 actions each, from a distribution of its own that drifts."""
    rng = np.random.default_rng(index)
    lengths = rng.integers(1, 201, count)
    skew = np.arange(N_ACTIONS)[None, :] * np.linspace(-0.5, 0.5, count)[:, None] * (index + 1) / 4
    weights = np.exp(skew)
    weights /= weights.sum(axis=1, keepdims=True)
    edges = weights.cumsum(axis=1)[:, :-1]
    return [np.searchsorted(edges[i], rng.random(n)) for i, n in enumerate(lengths)]


def main() -> None:
    """Pushes, flushes and ends with exit code 0."""
    endpoint, index, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with ActorClient(endpoint, actor=f"pusher-{index}", timeout=60) as actor:
        for step, batch in enumerate(batches(index, count)):
            actor.push(batch, step=step, phase="prefill" if step < count // 10 else "train")
        actor.flush(60)


if __name__ == "__main__":
    main()
