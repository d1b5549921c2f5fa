"""Everything on the GPU, checked against its reference and then timed beside what limits it: `make bench-gpu`.

Times are medians of CUDA events in microseconds. The limit of a row of the entropy step is measured in the same run: an
empty kernel in graph replay, or the batch's bytes at the bandwidth of a device-to-device copy (bytes read and written),
whichever takes longer; "share" is that limit over the time. "cold" rotates among buffers of at least 256 MiB together,
so that nothing is left in the L2 cache; "warm" uses one buffer, as a step does that comes right after the gates.
"eager" is one launch among hundreds from Python, "× empty" how many launches of an empty CuPy RawKernel that is. torch
is optional: where it is missing its columns say so.

Usage, from the repository root: python -m benchmarks.bench_gpu [--out FILE.json] [--quick]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks import bench_distill, bench_drains, bench_entropy_step
from benchmarks.gpu_timer import GpuTimer, import_torch
from cotuned.kernels.cuda_modules import import_cupy


def machine(cupy: Any) -> dict[str, Any]:
    """What the figures belong to."""
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    torch = import_torch()
    return {
        "device": properties["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cupy": cupy.__version__,
        "torch": torch.__version__ if torch else "not installed",
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench_gpu.json"), help="where the JSON goes")
    parser.add_argument("--quick", action="store_true", help="only rows with a limit, and one of each other table")
    options = parser.parse_args()
    timer = GpuTimer(import_cupy())
    report = machine(timer.cupy)
    print("; ".join(f"{name} {value}" for name, value in report.items()))
    bandwidth = timer.copy_bandwidth()  # first: it brings the clocks up
    empty = timer.replay([timer.launch_empty], 128)
    empty_eager = timer.eager(timer.launch_empty, 300, 15)
    print(f"empty kernel: {empty:.2f} µs in graph replay, {empty_eager:.2f} eager; copy: {bandwidth / 1e6:.3f} TB/s\n")
    report |= {"empty": empty, "empty_eager": empty_eager, "copy_bytes_per_us": bandwidth}
    report["entropy_step"], limits = bench_entropy_step.run(timer, empty, bandwidth, quick=options.quick)
    report["drains"], more = bench_drains.run(timer, quick=options.quick)
    report["q_pi_distill_grad"] = bench_distill.run(timer, quick=options.quick)
    limits += more
    print("\n" + "\n".join(map(str, limits)))
    report["limits"] = [limit.as_json() for limit in limits]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\nas JSON: {options.out}")


if __name__ == "__main__":
    main()
