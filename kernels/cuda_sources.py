"""The text that NVRTC compiles: injected constants, shared ``.cuh`` files, one ``.cu`` file. Needs no GPU and no CuPy.

Slots, counters, pool columns, parameters, the fields of the tables and the layout of a bus record are all written here
from their Python definitions, so that the two languages cannot drift apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from ..wire.slots import ROW_ENTROPY_UNIT, Counter, PoolColumn, slot_defines
from .parameters import Parameter, parameter_defines
from .upload import MAX_PIECE_ACTIONS, RUN_FIELDS, SEGMENT_FIELDS, action_dtype

COMPILE_OPTIONS = ("--std=c++17", "--fmad=false")
"""No fast-math, and no fused multiply-add either: float64 arithmetic rounds as NumPy's does. CuPy adds -ftz=true."""

FEW_ACTIONS = 64
"""Up to this K a thread counts in bytes of its own; beyond, a warp in a histogram of its own."""

FINISH_THREADS = 512
"""Threads of the block that finishes a run."""

STEP_THREADS = 512
"""Most threads of a block of ``entropy_step.cu``."""

TINY_ACTIONS = 1024
"""Most actions that ``step_tiny`` counts: four for each thread but those of the last warp."""

STEP_ACTIONS = 32
"""Actions that a thread of ``entropy_step.cu`` counts at a time."""

MAX_BIT_PLANE_ACTIONS = 16
"""Up to this K ``entropy_step.cu`` is used; beyond, ``entropy_step_wide.cu``."""

_C_TYPES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
_HEADERS = {
    "action_entropy": ("isv_bus.cuh", "entropy.cuh"),
    "entropy_step": ("isv_bus.cuh", "entropy.cuh", "bit_planes.cuh"),
    "entropy_step_wide": ("isv_bus.cuh", "entropy.cuh"),
}


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where things stand in a run's record of the bus; bytes."""

    counters: int
    pool: int
    parameters: int
    size: int

    @classmethod
    def of(cls, n_slots: int, n_actions: int) -> RecordLayout:
        """The layout for this many slots and actions; records keep the alignment of a cudaMalloc, 256 bytes."""
        counters = _aligned(4 * n_slots, 16)
        pool = counters + 8 * len(Counter)
        parameters = pool + 8 * (n_actions + len(PoolColumn))
        return cls(counters, pool, parameters, _aligned(parameters + 8 * len(Parameter), 256))


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def count_threads(n_actions: int) -> int:
    """Threads of a block that counts: with many actions as many warps as have room for a histogram of their own."""
    if n_actions <= FEW_ACTIONS:
        return 256
    shared_bytes, row_bytes, histogram_bytes = 42_000, 4 * (n_actions + 1), 2 * n_actions
    return 32 * min(8, (shared_bytes - row_bytes) // histogram_bytes)


def step_groups(action_bytes: int) -> int:
    """Times `STEP_ACTIONS` that a thread of a large ``entropy_step`` has under way: eight loads or more."""
    return max(1, 4 // action_bytes)


def step_blocks(action_bytes: int) -> int:
    """Blocks of a large ``entropy_step`` on a multiprocessor; int64 needs all registers for one."""
    return 2 if action_bytes <= 4 else 1


def defines(n_actions: int, n_slots: int, action_bytes: int = 0) -> dict[str, int | float | str]:
    """The constants that every ``.cu`` file may use; `action_bytes` 0: actions as drains bring them."""
    layout = RecordLayout.of(n_slots, n_actions)
    action_bytes = action_bytes or np.dtype(action_dtype(n_actions)).itemsize
    return {
        **slot_defines(),
        **parameter_defines(),
        "N_ACTIONS": n_actions,
        "N_SLOTS": n_slots,
        "ACTION_BYTES": action_bytes,
        "action_t": _C_TYPES[action_bytes],
        "ROW_BYTES": f"{layout.size}ll",
        "ROW_COUNTERS": layout.counters,
        "ROW_POOL": layout.pool,
        "ROW_PARAMETERS": layout.parameters,
        "ROW_ENTROPY_UNIT": ROW_ENTROPY_UNIT,
        "LN_N_ACTIONS": repr(math.log(n_actions)),
        "MAX_PIECE_ACTIONS": MAX_PIECE_ACTIONS,
        "FEW_ACTIONS": FEW_ACTIONS,
        "COUNT_THREADS": count_threads(n_actions),
        "FINISH_THREADS": FINISH_THREADS,
        "STEP_THREADS": STEP_THREADS,
        "TINY_ACTIONS": TINY_ACTIONS,
        "STEP_GROUPS": step_groups(action_bytes),
        "STEP_BLOCKS": step_blocks(action_bytes),
        "WIDE_THREADS": count_threads(n_actions),
        "RUN_FIELDS": f"long long {', '.join(RUN_FIELDS)};",
        "SEGMENT_FIELDS": f"long long {', '.join(SEGMENT_FIELDS)};",
    }


@cache
def source(name: str, n_actions: int, n_slots: int, action_bytes: int = 0) -> str:
    """The whole text of ``<name>.cu`` for K = `n_actions`, ready to be compiled."""
    head = "".join(f"#define {key} {value}\n" for key, value in defines(n_actions, n_slots, action_bytes).items())
    folder = files(__name__.rpartition(".")[0])
    parts = (*_HEADERS.get(name, ("isv_bus.cuh",)), f"{name}.cu")
    return head + "".join(f'#line 1 "{part}"\n{(folder / part).read_text("utf-8")}' for part in parts)
