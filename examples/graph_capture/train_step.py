"""A training step as one CUDA graph that follows the bus: α and τ change between replays of the same graph.

Needs a GPU, CuPy and torch. python examples/graph_capture/train_step.py [--updates 400]
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

K, BATCH, FEATURES = 11, 2048, 16
HOLD = 0
RISK = 0.5
"""The gate: in a state whose first feature is above this, three in ten, the action becomes Hold."""


class Learner:
    """A small policy and Q network with the bus in the same process, and three graphs: act, prefill, train."""

    def __init__(self, torch: Any) -> None:
        from cotuned.config.settings import Settings
        from cotuned.kernels import run_parameters
        from cotuned.kernels.cuda_bus import CudaBus

        self.torch = torch
        torch.manual_seed(1)
        self.policy = torch.nn.Linear(FEATURES, K).cuda()
        self.q = torch.nn.Linear(FEATURES, K).cuda().requires_grad_(False)
        self.q.bias.normal_()  # all states prefer much the same actions, so that τ shows in the executed entropy
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2, capturable=True)
        settings = Settings(n_actions=K, tuner={"target_entropy": 1.8, "lr_tau": 0.05, "lr_alpha": 1e-2})
        self.bus = CudaBus(settings)
        self.bus.open_row(0, run_parameters(settings, ""))
        self.slots = torch.from_dlpack(self.bus.slots(0))
        self.entropy_step = {
            phase: self.bus.entropy_step(0, prefill=phase == "prefill") for phase in ("prefill", "train")
        }
        self.cotune_step = self.bus.cotune_step(0)
        # What a graph reads and writes has an address for life; a new batch is copied in.
        self.states = torch.zeros(BATCH, FEATURES, device="cuda")
        self.executed = torch.zeros(BATCH, dtype=torch.int64, device="cuda")
        self.policy_entropy = torch.zeros(1, dtype=torch.float64, device="cuda")
        self.act_graph = self._captured(self._act)
        self.train_graph = self._captured(self._train)

    def _act(self) -> None:
        """Sample, then the gate: what is executed. No entropy step in here."""
        torch = self.torch
        probabilities = self.policy(self.states).softmax(-1)
        proposed = torch.multinomial(probabilities, 1).squeeze(1)
        self.executed.copy_(torch.where(self.states[:, 0] > RISK, HOLD, proposed))

    def _train(self) -> None:
        """sac_cotune, then a policy step by q_pi_distill_grad: both read and write the bus on the device."""
        from cotuned.kernels.torch_autograd import q_pi_distill

        torch = self.torch
        self.cotune_step.launch(torch.cuda.current_stream().cuda_stream, self.policy_entropy)
        logits = self.policy(self.states)
        with torch.no_grad():
            log_pi = logits.log_softmax(-1)
            self.policy_entropy.copy_(-(log_pi.exp() * log_pi).sum(-1).mean())
        self.optimizer.zero_grad(set_to_none=False)
        q_pi_distill(logits, self.q(self.states), self.slots).mean().backward()
        self.optimizer.step()

    def _captured(self, work: Any) -> Any:
        torch = self.torch
        for parameter in self.policy.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()  # compiles kernels and makes the optimizer's state, which a capture must not
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph

    def rollout(self, phase: str) -> None:
        """New states, the act graph, and behind its last gate, outside every graph, the entropy step."""
        self.states.normal_()
        self.act_graph.replay()
        self.entropy_step[phase].launch(self.torch.cuda.current_stream().cuda_stream, self.executed)

    def update(self) -> None:
        """One replay of the training step."""
        self.train_graph.replay()

    def tuned(self) -> tuple[float, float, float]:
        """α, τ and slot 583 as they stand; waits for the GPU."""
        from cotuned.client import Slot

        values = self.slots[[int(Slot.ALPHA), int(Slot.TAU), int(Slot.RL_ACTION_ENTROPY_EMA_INDEX)]].tolist()
        return values[0], values[1], values[2]


def refused_in_capture(learner: Learner) -> str:
    """What an entropy step says that is launched into a graph."""
    from cotuned.wire.errors import CapturingStream

    torch, said = learner.torch, ""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        learner.executed.add_(0)
        try:
            learner.entropy_step["train"].launch(torch.cuda.current_stream().cuda_stream, learner.executed)
        except CapturingStream as error:
            said = str(error)
    return said


def train(torch: Any, updates: int) -> list[tuple[float, float, float]]:
    """Prefill, then training; (α, τ, slot 583) before the first update and after each twentieth."""
    learner = Learner(torch)
    for _ in range(10):
        learner.rollout("prefill")
    course = [learner.tuned()]
    print("an entropy step within a capture:", refused_in_capture(learner))
    print(f"{'update':>8}{'α':>10}{'τ':>10}{'executed H':>12}")
    for update in range(1, updates + 1):
        learner.rollout("train")
        learner.update()
        if update % 20 == 0:
            course.append(learner.tuned())
            print(f"{update:8}{course[-1][0]:10.4f}{course[-1][1]:10.4f}{course[-1][2]:12.4f}")
    torch.cuda.synchronize()
    learner.bus.close()
    return course


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 if the captured step followed the bus; 2 without GPU, CuPy or torch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=400)
    updates = parser.parse_args(arguments).updates
    try:
        import cupy
        import torch

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        print(f"this example needs a GPU, CuPy and torch: {error}", file=sys.stderr)
        return 2
    course = train(torch, updates)
    moved = len({tau for _, tau, _ in course})
    print(f"τ took {moved} values in {len(course)} looks, from one captured graph")
    return 0 if moved > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
