"""The text that NVRTC compiles: injected constants, ``isv_bus.cuh``, then one ``.cu`` file. Needs no GPU and no CuPy.

Slots, counters, pool columns, parameters, the fields of the tables and the layout of a bus record are all written here
from their Python definitions, so that the two languages cannot drift apart.
"""

from __future__ import annotations

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

_C_TYPES = {1: "unsigned char", 2: "unsigned short"}


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


def defines(n_actions: int, n_slots: int) -> dict[str, int | float | str]:
    """The constants that every ``.cu`` file may use."""
    layout = RecordLayout.of(n_slots, n_actions)
    action_bytes = np.dtype(action_dtype(n_actions)).itemsize
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
        "MAX_PIECE_ACTIONS": MAX_PIECE_ACTIONS,
        "FEW_ACTIONS": FEW_ACTIONS,
        "COUNT_THREADS": count_threads(n_actions),
        "FINISH_THREADS": FINISH_THREADS,
        "RUN_FIELDS": f"long long {', '.join(RUN_FIELDS)};",
        "SEGMENT_FIELDS": f"long long {', '.join(SEGMENT_FIELDS)};",
    }


@cache
def source(name: str, n_actions: int, n_slots: int) -> str:
    """The whole text of ``<name>.cu`` for K = `n_actions`, ready to be compiled."""
    head = "".join(f"#define {key} {value}\n" for key, value in defines(n_actions, n_slots).items())
    folder = files(__name__.rpartition(".")[0])
    body = "".join(f'#line 1 "{file}"\n{(folder / file).read_text("utf-8")}' for file in ("isv_bus.cuh", f"{name}.cu"))
    return head + body
