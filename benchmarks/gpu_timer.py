"""Times what is put on a CUDA stream: medians of CUDA events, in graph replay and launched from Python."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

COPY_BYTES = 2**30

Launch = Callable[[], Any]


def import_torch() -> ModuleType | None:
    """torch, where it is installed and finds a GPU."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


class GpuTimer:
    """A stream, and ways to time what `launch` puts on it. All times are microseconds.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._empty = cupy.RawKernel('extern "C" __global__ void empty() {}', "empty")

    def launch_empty(self) -> None:
        """An empty CuPy RawKernel, on the current stream."""
        self._empty((1,), (1,), ())

    def once(self, launch: Launch) -> float:
        """From the first to the last thing that `launch` puts on the stream."""
        begin, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        begin.record(self.stream)
        launch()
        end.record(self.stream)
        end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(begin, end)) * 1000

    def elapsed(self, launch: Launch, per: int, repeats: int) -> float:
        """Median of one of the `per` things that `launch` does, over `repeats`, two to warm up apart."""
        return statistics.median([self.once(launch) / per for _ in range(repeats + 2)][2:])

    def replay(self, launches: Sequence[Launch], in_graph: int, repeats: int = 100) -> float:
        """Median of one launch in a graph of `in_graph` that takes the launches in turn."""
        self.stream.begin_capture()
        with self.stream:
            for i in range(in_graph):
                launches[i % len(launches)]()
        graph = self.stream.end_capture()
        return self.elapsed(lambda: graph.launch(self.stream), in_graph, repeats)

    def eager(self, launch: Launch, calls: int, repeats: int) -> float:
        """Median of one launch among `calls` from Python."""
        with self.stream:
            return self.elapsed(lambda: call(launch, calls), calls, repeats)

    def eager_beside_empty(self, launch: Launch, calls: int) -> tuple[float, float]:
        """The same, and how many times an empty CuPy RawKernel that is; the two in turn, for a host's speed wanders."""
        ours: list[float] = []
        ratios: list[float] = []
        with self.stream:
            for _ in range(40):
                empty = self.once(lambda: call(self.launch_empty, 300)) / 300
                ours.append(self.once(lambda: call(launch, calls)) / calls)
                ratios.append(ours[-1] / empty)
        return statistics.median(ours), statistics.median(ratios)

    def copy(self, target: int, source: int, size: int) -> None:
        """Enqueues a copy of `size` bytes from one device address to another."""
        runtime = self.cupy.cuda.runtime
        runtime.memcpyAsync(target, source, size, runtime.memcpyDeviceToDevice, self.stream.ptr)

    def copy_bandwidth(self) -> float:
        """Bytes read and written a microsecond by a copy of `COPY_BYTES`."""
        cuda = self.cupy.cuda
        source, target = cuda.Memory(COPY_BYTES), cuda.Memory(COPY_BYTES)
        cuda.runtime.memset(source.ptr, 7, COPY_BYTES)
        return 2 * COPY_BYTES / self.elapsed(lambda: self.copy(target.ptr, source.ptr, COPY_BYTES), 1, 25)


def call(launch: Launch, times: int) -> None:
    """Calls it so often."""
    for _ in range(times):
        launch()
