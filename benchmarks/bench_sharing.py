"""What a daemon on a busy GPU costs and answers: query times, memory, start; `device: cuda` beside `device: cpu`.

Starts real daemons and asks them over their sockets from this process, one query at a time: `cotune` with a new step
each, which waits until it is durable (state is on, in a temporary folder), and a plain read of slot 583, which does
not. Meanwhile nothing else runs, or another process multiplies matrices on the same GPU or launches small kernels
without pause; and with each of these an actor pushes batches of 64 actions, or does not.

Device memory is what `cudaMemGetInfo` says is free before a daemon is started less what it says when it is ready (or
has been asked everything), seen from this process, which has a context of its own before the first look. Nothing else
may use the GPU meanwhile. Host memory is VmRSS of /proc.

Usage, from the repository root: python -m benchmarks.bench_sharing [--out FILE.json] [--seconds S]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.children import Children
from benchmarks.limits import Limit
from cotuned.client import DaemonUnreachable, LearnerClient, Slot
from cotuned.kernels.cuda_modules import import_cupy
from cotuned.wire.errors import DeviceUnavailable

LOADS = {
    "idle": None,
    "bfloat16 products": "bfloat16",
    "float32 products": "float32",
    "small kernels": "kernels",
}
"""What runs beside the daemon, and what gpu_load.py calls it."""

PUSHED_A_SECOND = 2000
MOST_QUERIES = 1000
WARM_UP = 20
"""Queries of a kind that are not counted."""

ANSWER_SECONDS = 10.0
START_SECONDS = 90.0
MIB = 2**20


class Gpu:
    """The GPU's free memory, seen from a process that has a context already."""

    def __init__(self) -> None:
        self._runtime = import_cupy().cuda.runtime
        self._runtime.free(0)
        properties = self._runtime.getDeviceProperties(0)
        self.name = properties["name"].decode()

    def free(self) -> int:
        """Bytes, once they have stood still for a while: what an ended process had comes back a little later."""
        seen = [self._runtime.memGetInfo()[0]]
        for _ in range(50):
            time.sleep(0.05)
            seen.append(self._runtime.memGetInfo()[0])
            if len(seen) > 6 and len(set(seen[-6:])) == 1:
                break
        return int(seen[-1])


def find_gpu() -> Gpu | None:
    """The GPU; None, and a line that says why, where there is none."""
    try:
        return Gpu()
    except (DeviceUnavailable, RuntimeError) as error:
        print(f"no GPU, so `device: cpu` alone is measured: {error}")
        return None


class Daemon:
    """A `cotuned serve` of its own settings, ready when the constructor returns.

    Args:
        children: who starts it.
        device: ``cuda`` or ``cpu``.
        folder: where CuPy keeps compiled kernels, and daemons their state, each in a folder of its own.
    """

    def __init__(self, children: Children, device: str, folder: Path) -> None:
        self.name, self._children = f"daemon-{device}", children
        ports = [f"--endpoints.{name}=tcp://127.0.0.1:0" for name in ("actions", "queries", "watch")]
        ports.append("--http.endpoint=http://127.0.0.1:0")
        state = f"--state.directory={tempfile.mkdtemp(dir=folder)}"
        begin = time.monotonic()
        arguments = ("-m", "cotuned.service", "serve", f"--device={device}", *ports, state)
        self.pid = children.start(self.name, *arguments, CUPY_CACHE_DIR=str(folder / "cupy"))
        self.endpoint: str = children.wait_for(self.name, self._ready, START_SECONDS)["endpoints"]["queries"]
        self.ready_seconds = time.monotonic() - begin

    def _ready(self) -> dict[str, Any] | None:
        for text in self._children.text(self.name, "err").splitlines():
            if '"ready"' in text and text.endswith("}"):
                return json.loads(text)
        return None

    def rss(self) -> float:
        """MiB of host memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def stop(self) -> None:
        """Ends it."""
        self._children.stop(self.name)


def progress(children: Children, name: str) -> tuple[int, float] | None:
    """The last complete line of a child that prints how much is done, and when; None: it has printed none yet."""
    lines = [line for line in children.text(name, "out").splitlines(keepends=True) if line.endswith("\n")]
    if not lines:
        return None
    done, when = lines[-1].split()
    return int(done), float(when)


def rate(children: Children, name: str, during: Callable[[], Any]) -> float:
    """How much a child did a second while `during` ran, or a little longer."""
    before = children.wait_for(name, lambda: progress(children, name), START_SECONDS)
    during()

    def later() -> tuple[int, float] | None:
        now = progress(children, name)
        return now if now != before else None

    after = children.wait_for(name, later, ANSWER_SECONDS)
    return (after[0] - before[0]) / (after[1] - before[1])


def ask(query: Callable[[int], Any], seconds: float) -> dict[str, float]:
    """p50, p99 and longest of one query after another, in microseconds.

    One without an answer within `ANSWER_SECONDS` counts as that long, and is the last.
    """
    times: list[float] = []
    end = time.monotonic() + seconds
    for i in range(WARM_UP + MOST_QUERIES):
        begin, answered = time.perf_counter(), True
        try:
            query(i)
        except DaemonUnreachable:
            answered = False
        times.append((time.perf_counter() - begin) * 1e6)
        if not answered or (time.monotonic() > end and i >= 2 * WARM_UP):
            break
    times = times[WARM_UP:] or times
    p50, p99 = np.percentile(times, [50, 99])
    return {"p50": float(p50), "p99": float(p99), "max": max(times), "n": len(times)}


def ask_both(endpoint: str, seconds: float) -> dict[str, Any]:
    """Times of `cotune` and of `read`, by a new learner session."""
    with LearnerClient(endpoint, timeout=ANSWER_SECONDS) as learner:
        learner.cotune(0, 1.0)
        return {
            "cotune": ask(lambda i: learner.cotune(i + 1, 1.0), seconds),
            "read": ask(lambda i: learner.read(Slot.RL_ACTION_ENTROPY_EMA_INDEX), seconds),
        }


def cell(children: Children, daemon: Daemon, load: str | None, pushing: bool, seconds: float) -> dict[str, Any]:
    """Both queries beside one load, with or without an actor; what the load and the actor did a second meanwhile."""
    row: dict[str, Any] = {}
    if pushing:
        children.start("actor", "-m", "benchmarks.paced_actor", daemon.endpoint, str(PUSHED_A_SECOND))
        children.wait_for("actor", lambda: progress(children, "actor"), START_SECONDS)

    def asked() -> None:
        row.update(ask_both(daemon.endpoint, seconds))

    def with_actor() -> None:
        if pushing:
            row["pushed_a_second"] = rate(children, "actor", asked)
        else:
            asked()

    if load is None:
        with_actor()
    else:
        row["load_a_second"] = rate(children, "load", with_actor)
    if pushing:
        children.stop("actor")
    return row


def all_cells(children: Children, daemons: dict[str, Daemon], seconds: float, loads: list[str]) -> list[dict[str, Any]]:
    """The rows of the table, printed as they come."""
    head = ("cotune p50", "p99", "max", "read p50", "p99", "max", "queries", "pushed/s", "load/s", "of alone")
    print(f"\n{'beside it':20}{'pushes':8}{'device':8}" + "".join(f"{name:>12}" for name in head))
    rows: list[dict[str, Any]] = []
    for name in loads:
        load = LOADS[name]
        alone: float | None = None
        if load is not None:
            children.start("load", "-m", "benchmarks.gpu_load", load)
            alone = rate(children, "load", lambda: time.sleep(1.0))
        for pushing in (False, True):
            for device, daemon in daemons.items():
                row = {"beside": name, "pushing": pushing, "device": device, "load_alone_a_second": alone}
                row |= cell(children, daemon, load, pushing, seconds)
                rows.append(row)
                figures = [row[kind][key] for kind in ("cotune", "read") for key in ("p50", "p99", "max")]
                figures += [row["cotune"]["n"] + row["read"]["n"], row.get("pushed_a_second", 0.0)]
                cells = [f"{value:12.0f}" for value in figures]
                if alone is not None:
                    cells += [f"{row['load_a_second']:12.1f}", f"{row['load_a_second'] / alone:12.3f}"]
                print(f"{name:20}{'yes' if pushing else 'no':8}{device:8}" + "".join(cells), flush=True)
        if load is not None:
            children.stop("load")
    return rows


def nvidia_smi(pid: int) -> str:
    """MiB that nvidia-smi lists for a process."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known ({type(error).__name__})"
    found = [line.split(",")[1].strip() for line in lines if line.split(",")[0].strip() == str(pid)]
    return f"{found[0]} MiB" if found else "not listed"


def bare_context(children: Children, gpu: Gpu) -> float:
    """MiB of device memory that a process takes which imports CuPy and makes a context, and nothing else."""
    before = gpu.free()
    script = "import cupy, time; cupy.cuda.runtime.free(0); print(1, 1.0, flush=True); time.sleep(60)"
    children.start("context", "-c", script)
    children.wait_for("context", lambda: progress(children, "context"), START_SECONDS)
    taken = before - gpu.free()
    children.stop("context")
    return taken / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench_sharing.json"), help="where the JSON goes")
    parser.add_argument("--seconds", type=float, default=1.5, help="longest time of one kind of query in one row")
    options = parser.parse_args()
    gpu = find_gpu()
    report: dict[str, Any] = {"device": gpu.name if gpu else "none", "date": time.strftime("%Y-%m-%d")}
    limits: list[Limit] = []
    with tempfile.TemporaryDirectory() as name, Children(Path(name)) as children:
        folder, daemons, memory = Path(name), {}, {}
        if gpu:
            memory["bare context MiB"] = bare_context(children, gpu)
            cold = Daemon(children, "cuda", folder)
            limits.append(Limit("ready, device cuda, empty kernel cache", cold.ready_seconds, 5, "s"))
            cold.stop()
            before = gpu.free()
            daemons["cuda"] = Daemon(children, "cuda", folder)
            memory["device MiB when ready"] = (before - gpu.free()) / MIB
            limits.append(Limit("ready, device cuda, warm kernel cache", daemons["cuda"].ready_seconds, 3, "s"))
        daemons["cpu"] = Daemon(children, "cpu", folder)
        limits.append(Limit("ready, device cpu", daemons["cpu"].ready_seconds, 2, "s"))
        report["rows"] = all_cells(children, daemons, options.seconds, list(LOADS) if gpu else ["idle"])
        if gpu:
            memory["device MiB after all that"] = (before - gpu.free()) / MIB
            memory["device, by nvidia-smi"] = nvidia_smi(daemons["cuda"].pid)
        for device, daemon in daemons.items():
            memory[f"host RSS MiB, device {device}"] = daemon.rss()
            daemon.stop()
    limits.append(Limit("host RSS, device cpu", memory["host RSS MiB, device cpu"] * MIB / 1e6, 150, "MB"))
    print()
    for name, value in memory.items():
        print(f"{name:32}{value:>14.1f}" if isinstance(value, float) else f"{name:32}{value:>14}")
    print("\n" + "\n".join(map(str, limits)))
    report |= {"memory": memory, "limits": [limit.as_json() for limit in limits]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\nas JSON: {options.out}")


if __name__ == "__main__":
    main()
