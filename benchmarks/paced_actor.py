"""An actor that pushes batches of 64 actions at a steady pace until it is stopped. Part of bench_sharing.py.

After each tenth of a second's worth it prints how many batches were pushed, and when (seconds).

Usage, from the repository root: python -m benchmarks.paced_actor ENDPOINT BATCHES_A_SECOND
"""

from __future__ import annotations

import sys
import time

import numpy as np

from cotuned.client import ActorClient

LONGEST = 300.0
"""Seconds after which it ends by itself."""


def main() -> None:
    endpoint, rate = sys.argv[1], int(sys.argv[2])
    batch = np.random.default_rng(0).integers(0, 11, 64).astype(np.uint8)
    a_turn = max(1, rate // 100)
    begin = due = time.monotonic()
    pushed = 0
    with ActorClient(endpoint, timeout=30) as actor:
        while time.monotonic() - begin < LONGEST:
            for _ in range(a_turn):
                actor.push(batch)
            pushed += a_turn
            due += a_turn / rate
            if pushed % (10 * a_turn) == 0:
                print(pushed, time.monotonic(), flush=True)
            time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main()
