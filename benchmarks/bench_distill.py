"""`q_pi_distill_grad` beside a copy of as many bytes and beside torch's composed operations: checked, then timed.

Loss and gradient of unmasked logits, gradient in the type of the logits. Bytes are those of logits, Q, gradient and
loss, each moved once; "copy" is a device-to-device copy that reads and writes as many. All but the eager column are
medians over replays of a CUDA graph, microseconds a call, rotating among buffers of up to `ROTATION_BYTES` together.

Usage: python benchmarks/bench_distill.py [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cotuned.kernels.cuda_distill import launch_q_pi_distill_grad
from cotuned.wire.slots import Slot

DTYPES = ("float32", "bfloat16")
SIZES = [(n, k) for k in (11, 64, 1024) for n in (256, 4096, 65_536)]
ROTATION_BYTES = 2**28
MAX_SETS = 32
BOUNDS = {"float32": 1e-5, "bfloat16": 2**-8}

Launch = Callable[[], Any]


def in_graph(launches: Sequence[Launch], repeats: int = 30) -> float:
    """Median microseconds of one of `launches`, replayed as a graph of at least 20."""
    launches = list(launches) * -(-20 // len(launches))
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    for _ in range(repeats + 3):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(launches))
    return statistics.median(times[3:])


def eager(launch: Launch, repeats: int = 200) -> float:
    """Median microseconds from call to call, the device waited for only at the end."""
    for _ in range(20):
        launch()
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        launch()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


class Case:
    """One size and type: buffers to rotate among, and the ways to do the work."""

    def __init__(self, n: int, k: int, dtype: str) -> None:
        self.dtype = dtype
        kind = getattr(torch, dtype)
        self.bytes = n * (3 * k * kind.itemsize + 4)
        self.slots = torch.zeros(1024, device="cuda")
        self.slots[Slot.ALPHA], self.slots[Slot.TAU] = 0.2, 0.9
        self.sets = [
            (
                (2 * torch.randn(n, k, device="cuda")).to(kind),
                torch.randn(n, k, device="cuda").to(kind),
                torch.full((n, k), torch.nan, device="cuda", dtype=kind),
                torch.full((n,), torch.nan, device="cuda"),
            )
            for _ in range(min(MAX_SETS, max(1, ROTATION_BYTES // self.bytes)))
        ]
        half = self.bytes // 2
        self.copies = [torch.zeros(2, half, dtype=torch.uint8, device="cuda") for _ in self.sets]

    def ours(self, z: Any, q: Any, gradient: Any, loss: Any) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        launch_q_pi_distill_grad(z, q, self.slots, gradient, loss=loss, stream=stream)

    def composed(self, z: Any, q: Any, *_: Any) -> tuple[Any, Any]:
        """What a learner writes in torch: the loss by its definition, the gradient by autograd."""
        alpha, tau = self.slots[Slot.ALPHA], self.slots[Slot.TAU]
        leaf = z.detach().requires_grad_()
        log_pi = leaf.float().log_softmax(-1)
        loss = -((q.float() / tau).softmax(-1) * log_pi).sum(-1) + alpha * (log_pi.exp() * log_pi).sum(-1)
        return torch.autograd.grad(loss.sum(), leaf)[0], loss

    def check(self) -> float:
        """‖ours − float64‖ / ‖float64‖; raises where it is above the bound."""
        z, q, gradient, loss = self.sets[0]
        self.ours(z, q, gradient, loss)
        rows = slice(0, 4096)
        expected = self.composed_in_float64(z[rows], q[rows])
        error = float((gradient[rows].double() - expected).norm() / expected.norm())
        if not (gradient.isfinite().all() and loss.isfinite().all() and error <= BOUNDS[self.dtype]):
            raise SystemExit(f"wrong gradient: error {error}, expected at most {BOUNDS[self.dtype]}")
        return error

    def composed_in_float64(self, z: Any, q: Any) -> Any:
        alpha, tau = self.slots[Slot.ALPHA].double(), self.slots[Slot.TAU].double()
        log_pi = z.double().log_softmax(-1)
        pi, target = log_pi.exp(), (q.double() / tau).softmax(-1)
        entropy = -(pi * log_pi).sum(-1, keepdim=True)
        return pi - target + alpha * pi * (log_pi + entropy)

    def measure(self) -> dict[str, float]:
        row = {"error": self.check()}
        row["ours"] = in_graph([lambda s=s: self.ours(*s) for s in self.sets])
        row["copy"] = in_graph([lambda c=c: c[1].copy_(c[0]) for c in self.copies])
        row["torch"] = in_graph([lambda s=s: self.composed(*s) for s in self.sets[:4]], 10)
        row["eager"] = eager(lambda: self.ours(*self.sets[0]))
        row["torch_eager"] = eager(lambda: self.composed(*self.sets[0]), 50)
        row["ours_gbps"], row["copy_gbps"] = (self.bytes / row[name] / 1000 for name in ("ours", "copy"))
        row["share"] = row["copy"] / row["ours"]
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="writes the numbers as JSON too")
    out = parser.parse_args().out
    results: list[dict[str, Any]] = []
    print(torch.cuda.get_device_name())
    print(f"{'type':9}{'n':>7}{'K':>6}{'error':>10}{'ours':>9}{'GB/s':>7}{'copy':>9}{'GB/s':>7}{'share':>7}", end="")
    print(f"{'torch':>10}{'× ours':>8}{'eager':>8}{'torch':>8}")
    for dtype in DTYPES:
        for n, k in SIZES:
            r = Case(n, k, dtype).measure()
            results.append({"dtype": dtype, "n": n, "k": k, **r})
            print(f"{dtype:9}{n:7}{k:6}{r['error']:10.1e}{r['ours']:9.2f}{r['ours_gbps']:7.0f}{r['copy']:9.2f}", end="")
            print(f"{r['copy_gbps']:7.0f}{r['share']:7.2f}{r['torch']:10.2f}{r['torch'] / r['ours']:8.1f}", end="")
            print(f"{r['eager']:8.1f}{r['torch_eager']:8.1f}", flush=True)
    if out:
        out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
