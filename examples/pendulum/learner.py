"""The learner process: trains the discrete SAC and asks the daemon for α and τ at every step.

    python examples/pendulum/learner.py --run from-583 --steps 3500 --out out/from-583.npz

While it runs it prints one JSON object a line: what the live table shows.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from channel import LearnerChannel
from cotuned.client import CotuneAnswer, LearnerClient
from env import N_ACTIONS, OBSERVATION_SIZE
from replay import Replay
from sac import DiscreteSac, SacSettings

_RETURNS_SHOWN = 64
"""Episodes in the mean return: each environment of four actors about once."""
COLUMNS = (
    "step",
    "policy_entropy",
    "entropy",
    "conditional_entropy",
    "gate_rate",
    "target_entropy",
    "alpha",
    "tau",
    "episode_return",
)
"""What is recorded of each learner step; NaN where nothing was known yet."""


class Learner:
    """The training loop of one run.

    Args:
        channel: to the actors.
        client: to the daemon.
        seed: of the weights and of the sampling from the replay buffer.
        round_steps: environment steps that each actor makes for one learner step.
        batch: transitions in a minibatch.
        capacity: transitions that the replay buffer keeps.
    """

    def __init__(
        self, channel: LearnerChannel, client: LearnerClient, seed: int, round_steps: int, batch: int, capacity: int
    ) -> None:
        self._channel, self._client = channel, client
        self._rng = np.random.default_rng([seed, 10_000])
        self._sac = DiscreteSac(self._rng, OBSERVATION_SIZE, N_ACTIONS, SacSettings())
        self._replay = Replay(capacity, OBSERVATION_SIZE)
        self._round_steps, self._batch = round_steps, batch
        self._round = 0
        self._returns: deque[float] = deque(maxlen=_RETURNS_SHOWN)
        self.history: list[tuple[float, ...]] = []

    def prefill(self, transitions: int) -> None:
        """Has the actors play at random until the replay buffer holds so many transitions."""
        while len(self._replay) < transitions:
            self._play("prefill", 0)
        self._returns.clear()

    def step(self, step: int, updates: int) -> CotuneAnswer:
        """One learner step: a round of the actors, `cotune`, and gradient steps with the α and τ that it answered."""
        policy_entropy = self._play("train", step)
        answer = self._client.cotune(step, policy_entropy=policy_entropy)
        shape = (self._sac.settings.members, self._batch)
        for _ in range(updates):
            self._sac.update(self._replay.sample(self._rng, shape), answer.alpha, answer.tau)
        self.history.append(self._row(answer))
        return answer

    def _play(self, phase: str, step: int) -> float:
        """Mean entropy of the policy before the gates, over the states in which the actors acted; nats."""
        order: dict[str, Any] = {
            "kind": "act",
            "round": self._round,
            "step": step,
            "phase": phase,
            "n_steps": self._round_steps,
            "policy": self._sac.policy.parameters,
            "critics": self._sac.critics.parameters,
        }
        answers = self._channel.ask(order)
        self._round += 1
        for answer in answers:
            self._replay.add(*(answer[k] for k in ("observations", "actions", "rewards", "next_observations")))
            self._returns.extend(answer["returns"])
        return float(np.mean([answer["policy_entropy"] for answer in answers]))

    def _row(self, answer: CotuneAnswer) -> tuple[float, ...]:
        known = {"episode_return": float(np.mean(self._returns)) if self._returns else math.nan}
        values = (known.get(name, getattr(answer, name, None)) for name in COLUMNS)
        return tuple(math.nan if value is None else float(value) for value in values)


def show(row: tuple[float, ...], steps: int, answer: CotuneAnswer) -> None:
    """Prints one line of progress."""
    values = {k: None if math.isnan(v) else v for k, v in zip(COLUMNS, row, strict=True)}
    print(json.dumps({"run": answer.run, "steps": steps, "reason": answer.reason, **values}), flush=True)


def main() -> None:
    """Trains, prints progress, and writes the recorded columns to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--daemon", default="tcp://127.0.0.1:5584", help="queries endpoint (%(default)s)")
    parser.add_argument("--bind", default="tcp://127.0.0.1:5590", help="where the actors connect to (%(default)s)")
    parser.add_argument("--run", default="from-583", help="name of the run (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--actors", type=int, default=4, help="how many take part (%(default)s)")
    parser.add_argument("--steps", type=int, default=3500, help="learner steps (%(default)s)")
    parser.add_argument("--updates", type=int, default=4, help="gradient steps a learner step (%(default)s)")
    parser.add_argument("--round-steps", type=int, default=2, help="environment steps a learner step (%(default)s)")
    parser.add_argument("--prefill", type=int, default=10_240, help="transitions played at random (%(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="transitions in a minibatch (%(default)s)")
    parser.add_argument("--capacity", type=int, default=200_000, help="of the replay buffer (%(default)s)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for actors (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="file for the recorded columns (.npz)")
    options = parser.parse_args()

    channel = LearnerChannel(options.bind, options.actors, options.timeout)
    try:
        with LearnerClient(options.daemon, run=options.run, timeout=15.0) as client:
            channel.wait_for_actors()
            learner = Learner(channel, client, options.seed, options.round_steps, options.batch, options.capacity)
            learner.prefill(options.prefill)
            shown_at = 0.0
            for step in range(1, options.steps + 1):
                answer = learner.step(step, options.updates)
                if time.monotonic() - shown_at >= 0.25 or step == options.steps:
                    shown_at = time.monotonic()
                    show(learner.history[-1], options.steps, answer)
    finally:
        channel.close()
    table = np.array(learner.history, dtype=np.float64)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.out, allow_pickle=False, **{name: table[:, i] for i, name in enumerate(COLUMNS)})


if __name__ == "__main__":
    main()
