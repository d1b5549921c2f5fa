"""One actor process: steps pendulums, and tells the daemon which actions were really executed. By hand::

python examples/pendulum/actor.py --run from-583 --index 0 --seed 1
"""

from __future__ import annotations

import argparse
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from channel import ActorChannel
from confidence import confidence
from cotuned.client import ActorClient, ConfidenceGate, GateChain
from distillation import entropy, log_softmax
from env import HOLD, N_ACTIONS, OBSERVATION_SIZE, PendulumVector
from networks import FloatArray
from sac import SacSettings, critic_network, policy_network

Phase = Literal["train", "prefill"]


class Actor:
    """Samples from the policy, lets the gate overrule, steps, and pushes what came out of the gate.

    Args:
        client: the daemon's actor client.
        seed: of the environments and of the sampling.
        index: of this actor; each has its own random streams.
        n_envs: environments stepped together, hence actions a batch.
        threshold: confidence below which the gate holds.
    """

    def __init__(self, client: ActorClient, seed: int, index: int, n_envs: int, threshold: float) -> None:
        self._client = client
        self._env = PendulumVector(n_envs, seed=1000 * seed + index)
        self._rng = np.random.default_rng([seed, index])
        self._gates = GateChain([ConfidenceGate(threshold, hold=HOLD)])
        settings = SacSettings()
        # The initial weights never act: each order brings the learner's.
        self._policy = policy_network(self._rng, OBSERVATION_SIZE, N_ACTIONS, settings)
        self._critics = critic_network(self._rng, OBSERVATION_SIZE, N_ACTIONS, settings)

    def play(self, order: dict[str, Any]) -> dict[str, Any]:
        """Plays one round with the weights in the order; returns the transitions of all its steps."""
        self._policy.load(order["policy"])
        self._critics.load(order["critics"])
        rounds = [self._step(order["phase"], order["step"]) for _ in range(order["n_steps"])]
        columns = [np.concatenate(column) for column in zip(*(r[:4] for r in rounds), strict=True)]
        names = ("observations", "actions", "rewards", "next_observations")
        return {
            "kind": "transitions",
            "round": order["round"],
            **dict(zip(names, columns, strict=True)),
            "policy_entropy": float(np.mean([r[4] for r in rounds])),
            "returns": self._env.take_returns(),
        }

    def _step(self, phase: Phase, step: int) -> tuple[FloatArray, npt.NDArray[np.int64], FloatArray, FloatArray, float]:
        observations = self._env.observations
        n = len(observations)
        if phase == "prefill":
            # There are no trained critics to ask yet: everything is proposed alike and everything passes.
            log_probs = np.full((n, N_ACTIONS), -np.log(N_ACTIONS))
            trust = np.ones(n)
        else:
            log_probs = log_softmax(self._policy(observations)[0].astype(np.float64))
            trust = confidence(self._critics(observations))
        probs = np.exp(log_probs)
        proposed = sample(self._rng, probs)
        outcome = self._gates(proposed, probs, confidence=trust)
        played = self._env.step(outcome.executed)
        self._client.push(outcome.executed, proposed=proposed, probs=outcome.probs, step=step, phase=phase)
        entropy_before_gates = float(entropy(log_probs).mean())
        return played.observations, outcome.executed, played.rewards, played.next_observations, entropy_before_gates

    def close(self) -> None:
        """Closes the environments."""
        self._env.close()


def sample(rng: np.random.Generator, probs: FloatArray) -> npt.NDArray[np.int64]:
    """One index from each row of probabilities [n, K], by inverting the cumulative sums."""
    cumulative = np.cumsum(probs, axis=1)
    points = rng.random(len(probs)) * cumulative[:, -1]
    return np.minimum((cumulative <= points[:, None]).sum(axis=1), probs.shape[1] - 1).astype(np.int64)


def main() -> None:
    """Plays what the learner orders until it says stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--daemon", default="tcp://127.0.0.1:5584", help="queries endpoint (%(default)s)")
    parser.add_argument("--learner", default="tcp://127.0.0.1:5590", help="the learner's endpoint (%(default)s)")
    parser.add_argument("--run", default="from-583", help="name of the run (%(default)s)")
    parser.add_argument("--index", type=int, default=0, help="of this actor, from 0 (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--envs", type=int, default=32, help="environments, hence actions a batch (%(default)s)")
    parser.add_argument("--threshold", type=float, default=0.74, help="confidence under which to hold (%(default)s)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for the learner (%(default)s)")
    options = parser.parse_args()

    channel = ActorChannel(options.learner, options.index, options.timeout)
    name = f"pendulum-{options.index}"
    try:
        with ActorClient(options.daemon, run=options.run, actor=name, n_actions=N_ACTIONS, timeout=15.0) as client:
            actor = Actor(client, options.seed, options.index, options.envs, options.threshold)
            while (order := channel.receive()) is not None:
                channel.send(actor.play(order))
            actor.close()
    finally:
        channel.close()


if __name__ == "__main__":
    main()
