"""Keeps a GPU busy until it is stopped, as a training beside the daemon does. Part of bench_sharing.py.

Two rounds of work are always queued, so that the GPU never waits for Python. After each round it prints how many
products or kernels are done, and when (seconds).

Usage, from the repository root: python -m benchmarks.gpu_load bfloat16 | float32 | kernels
"""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.gpu_timer import Launch, import_torch
from cotuned.kernels.cuda_modules import import_cupy

SIDE = 8192
IN_GRAPH = 512
GRAPHS = 8
LONGEST = 300.0
"""Seconds after which it ends by itself."""

SMALL = r"""
extern "C" __global__ void small(float* x) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    x[i] = x[i] * 0.999f + 1.0f;
}
"""


def products(cupy: Any, stream: Any, dtype: str) -> tuple[Launch, int]:
    """A round of products of two `SIDE` × `SIDE` matrices, and how many those are; float32 without TF32."""
    rounds = 16 if dtype == "bfloat16" else 2  # some 25 ms on an H200
    torch = import_torch()
    if torch is None:
        if dtype != "float32":
            raise SystemExit("torch is not installed, and CuPy has no bfloat16")
        one, other = (cupy.random.default_rng(i).standard_normal((SIDE, SIDE), dtype="float32") for i in (1, 2))
        product = cupy.empty_like(one)
        return lambda: [cupy.matmul(one, other, out=product) for _ in range(rounds)], rounds
    one, other = (torch.randn(SIDE, SIDE, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
    product, ours = torch.empty_like(one), torch.cuda.ExternalStream(stream.ptr)

    def launch() -> None:
        with torch.cuda.stream(ours):
            for _ in range(rounds):
                torch.matmul(one, other, out=product)

    return launch, rounds


def small_kernels(cupy: Any, stream: Any) -> tuple[Launch, int]:
    """A round of kernels of 4 096 threads, in graphs, one right after the other; and how many those are."""
    kernel, x = cupy.RawKernel(SMALL, "small"), cupy.zeros(4096, dtype="float32")
    kernel((16,), (256,), (x,))
    cupy.cuda.runtime.deviceSynchronize()
    stream.begin_capture()
    for _ in range(IN_GRAPH):
        kernel((16,), (256,), (x,))
    graph = stream.end_capture()
    return lambda: [graph.launch(stream) for _ in range(GRAPHS)], IN_GRAPH * GRAPHS


def main() -> None:
    what, cupy = sys.argv[1], import_cupy()
    stream = cupy.cuda.Stream(non_blocking=True)
    begin = time.monotonic()
    with stream:
        launch, per_round = small_kernels(cupy, stream) if what == "kernels" else products(cupy, stream, what)
        cupy.cuda.runtime.deviceSynchronize()
        events = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        for event in events:
            launch()
            event.record(stream)
        done = 0
        while time.monotonic() - begin < LONGEST:
            event = events[done // per_round % 2]
            event.synchronize()
            done += per_round
            print(done, time.monotonic(), flush=True)
            launch()
            event.record(stream)


if __name__ == "__main__":
    main()
