"""`CudaBus`: the bus in the memory of a GPU, worked on by ``action_entropy.cu`` and ``sac_cotune.cu`` through CuPy.

The host decides which batches count and where observations end (`drain`), from numbers that it knows: lengths, index
ranges, and a mirror of how many actions are in each run's pool. So a drain is one copy up and one or two launches, and
nothing is read back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..config.settings import Settings
from ..wire.errors import DeviceUnavailable
from ..wire.slots import Counter, PoolColumn
from .bus import RowState
from .cotune_step import CotuneStep
from .cuda_modules import OPENING, Pinned, Staging, compiled, cuda_errors, import_cupy, power_of_two
from .cuda_sharing import DeviceSharing
from .cuda_sources import FEW_ACTIONS, FINISH_THREADS, RecordLayout, count_threads
from .drain import Drain, Int64Array, Plan, Rejection, plan, reject
from .entropy_step import EntropyStep
from .parameters import run_parameters
from .sac_cotune import initialize_tuner
from .upload import MAX_PIECE_ACTIONS, Layout, Tables, action_dtype, pack, split, tabulate

PART_ACTIONS = 2**24
"""Most actions that are uploaded at a time; a larger drain goes in parts, a larger batch as a whole."""

PART_COUNTS = 2**23
"""Most counts of pieces that lie on the device at a time (32 MiB)."""

MERGE_SEGMENTS = 1024
"""Most segments that ``merge_segments`` gives blocks of their own."""

MIN_PIECE_ACTIONS = 4096
"""Fewer actions are not worth a block of their own."""


class CudaBus:
    """An `IsvBus` on CUDA device 0 (choose another with ``CUDA_VISIBLE_DEVICES``).

    Args:
        settings: n_actions, bus and observation are used.

    Raises:
        DeviceUnavailable: there is no CuPy, no device, or the kernels do not work on it; the message says which.
    """

    def __init__(self, settings: Settings) -> None:
        self._cupy = import_cupy()
        self._settings = settings
        self._sharing: DeviceSharing | None = None
        self._n_actions = settings.n_actions
        self._n_slots = settings.bus.n_slots
        self._pool_min_actions = settings.observation.pool_min_actions
        self._pool_actions: Int64Array = np.zeros(settings.bus.max_runs, dtype=np.int64)  # mirror of the device's
        self._stepped: set[int] = set()  # rows whose pools an EntropyStep may have changed behind the mirror
        self._layout = RecordLayout.of(self._n_slots, self._n_actions)
        self._dtype = action_dtype(self._n_actions)
        with cuda_errors(self._cupy, "opening the CUDA device", OPENING):
            self._allocate(settings.bus.max_runs)
            self._compile()
            self._try_out(settings)

    def _errors(self, doing: str) -> Any:
        return cuda_errors(self._cupy, doing)

    def _allocate(self, max_runs: int) -> None:
        cuda = self._cupy.cuda
        self._runtime = cuda.runtime
        self._device = cuda.Device(0)
        with self._device:
            properties = self._runtime.getDeviceProperties(self._device.id)
            self._name = properties["name"].decode()
            self._n_multiprocessors = int(properties["multiProcessorCount"])
            self._stream = cuda.Stream(non_blocking=True)
            # A cudaMalloc of its own, outside CuPy's pool: CUDA IPC exports whole allocations.
            self._bus = cuda.Memory(max_runs * self._layout.size)
            self._partials = cuda.Memory(4 * 2**16)
            self._policy_entropy = cuda.Memory(8)
            self._nothing = self._cupy.full(1, self._cupy.nan, dtype=self._cupy.float64)
            self._staging = Staging(self._cupy, 2**16)
            self._record = Pinned(self._cupy, self._layout.size)
            self._cell = Pinned(self._cupy, 8)
            self._cotune_graphs: dict[int, Any] = {}

    def _compile(self) -> None:
        with self._device:
            entropy = compiled(self._cupy, "action_entropy", self._n_actions, self._n_slots)
            tuner = compiled(self._cupy, "sac_cotune", self._n_actions, self._n_slots)
            self._count_pieces = entropy.get_function("count_pieces")
            self._merge_segments = entropy.get_function("merge_segments")
            self._finish_runs = entropy.get_function("finish_runs")
            self._observe_piece = entropy.get_function("observe_piece")
            self._sac_cotune = tuner.get_function("sac_cotune")

    def _try_out(self, settings: Settings) -> None:
        """Runs every kernel once, so that the first real drain finds them loaded, and checks what they counted."""
        self._clear()
        self.open_row(0, run_parameters(settings, ""))
        last = self._n_actions - 1
        for n, batches in ((1, 1), (MAX_PIECE_ACTIONS, 2)):
            executed = np.full(n * batches, last, dtype=self._dtype)
            lengths = np.full(batches, n, dtype=np.int64)
            rows, flags = np.zeros(batches, dtype=np.int64), np.ones(batches, dtype=np.bool_)
            self.observe(Drain(executed, lengths, rows, flags, np.zeros_like(executed), flags))
        state = self.cotune(0, None)
        counted = int(state.counters[Counter.ACTIONS_PREFILL])
        pooled = int(state.pool[: self._n_actions].sum())
        if (
            counted != 1 + 2 * MAX_PIECE_ACTIONS
            or pooled != self._pool_actions[0]
            or not np.isfinite(state.slots).all()
        ):
            raise DeviceUnavailable(
                f"{self.device} gave wrong results in the self-test: counted {counted} actions with {pooled} of them "
                f"pooled, expected {1 + 2 * MAX_PIECE_ACTIONS} and {self._pool_actions[0]}; {OPENING}"
            )
        self._clear()

    def _clear(self) -> None:
        with self._device:
            self._runtime.memsetAsync(self._bus.ptr, 0, self._bus.size, self._stream.ptr)
            self._stream.synchronize()
        self._pool_actions[:] = 0

    @property
    def device(self) -> str:
        """See `IsvBus`."""
        return f"cuda:{self._device.id} ({self._name}, CuPy {self._cupy.__version__})"

    def open_row(self, row: int, parameters: npt.NDArray[np.float64]) -> None:
        """See `IsvBus`."""
        record = self._record.bytes
        record[:] = 0
        record[self._layout.parameters :][: parameters.nbytes].view(np.float64)[:] = parameters
        initialize_tuner(record[: 4 * self._n_slots].view(np.float32), parameters)
        with self._errors(f"opening row {row} of the bus"), self._device:
            self._copy(self._row_address(row), self._record.address, self._layout.size)
            self._stream.synchronize()
        self._pool_actions[row] = 0

    def restore(self, row: int, state: RowState) -> None:
        """See `IsvBus`."""
        record, layout = self._record.bytes, self._layout
        record[: 4 * self._n_slots].view(np.float32)[:] = state.slots
        record[layout.counters : layout.pool].view(np.int64)[:] = state.counters
        record[layout.pool : layout.parameters].view(np.int64)[:] = state.pool
        with self._errors(f"restoring row {row} of the bus"), self._device:
            self._copy(self._row_address(row), self._record.address, layout.parameters)
            self._stream.synchronize()
        self._pool_actions[row] = state.pool[self._n_actions + PoolColumn.ACTIONS]

    def observe(self, drain: Drain) -> list[Rejection]:
        """See `IsvBus`."""
        if self._stepped:
            self._read_pools()
        rejections: list[Rejection] = []
        max_batches = max(1, PART_COUNTS // (self._n_actions + 1))
        for first, part in split(drain, max_batches, PART_ACTIONS):
            rejected = reject(part, self._n_actions)
            cut = plan(part, rejected, self._pool_actions, self._pool_min_actions)
            tables = tabulate(part, rejected, cut, self._piece_actions(int(part.lengths.sum())))
            if tables.runs.size:
                with self._errors("a drain on the GPU"), self._device, self._stream:
                    self._process(part, cut, tables)
                self._follow_pools(tables)
            rejections += [bad._replace(batch=first + bad.batch) for bad in rejected]
        return rejections

    def entropy_step(self, row: int, *, prefill: bool = False) -> EntropyStep:
        """A launcher for batches of an open row that lie on the device already.

        It may be mixed with `observe` and the other calls for that row: each sees the launches of which the caller
        knows that they are finished (`stream.synchronize()`, or an event).
        """
        self._stepped.add(row)
        record, pool = self._row_address(row), self._pool_min_actions
        return EntropyStep(self._cupy, self._device, record, self._n_actions, self._n_slots, pool, prefill)

    def _read_pools(self) -> None:
        place = self._n_actions + PoolColumn.ACTIONS
        for row in self._stepped:
            self._pool_actions[row] = self.row(row).pool[place]

    def _piece_actions(self, n_actions: int) -> int:
        """Pieces small enough to occupy the whole chip twice, and large enough to be worth a block."""
        share = -(-n_actions // (2 * self._n_multiprocessors))
        return min(max(power_of_two(share), MIN_PIECE_ACTIONS), MAX_PIECE_ACTIONS)

    def _process(self, drain: Drain, cut: Plan, tables: Tables) -> None:
        layout = Layout.of(tables, self._dtype)
        pack(self._staging.buffer(layout.size), layout, tables, drain, cut, self._dtype)
        base = self._staging.upload(layout.size, self._stream)
        self._launch(base, layout, tables)

    def _launch(self, base: int, layout: Layout, tables: Tables) -> None:
        actions = np.uint64(base + layout.actions)
        proposed = np.uint64(base + layout.proposed if layout.proposed >= 0 else 0)
        bus, segments = np.uint64(self._bus.ptr), np.uint64(base + layout.segments)
        if tables.n_pieces == 1 and tables.runs.size == 1:
            arguments = (bus, tables.runs, tables.segments, actions, proposed)  # the tables' one entry, by value
            self._observe_piece((1,), (count_threads(self._n_actions),), arguments)
            return
        needed = 4 * tables.n_pieces * (self._n_actions + 1)
        if self._partials.size < needed:
            self._partials = self._cupy.cuda.Memory(power_of_two(needed))
        partials = np.uint64(self._partials.ptr)
        if tables.n_pieces:
            arguments = (actions, proposed, np.uint64(base + layout.piece_start), partials)
            self._count_pieces((tables.n_pieces,), (count_threads(self._n_actions),), arguments)
        if self._n_actions > FEW_ACTIONS and tables.n_pieces > (tables.segments["n_pieces"] > 0).sum():
            grid = (-(-(self._n_actions + 1) // 32), min(tables.segments.size, MERGE_SEGMENTS))
            arguments = (segments, np.int64(tables.segments.size), partials)
            self._merge_segments(grid, (FINISH_THREADS,), arguments)
        arguments = (bus, np.uint64(base + layout.runs), segments, partials)
        self._finish_runs((tables.runs.size,), (FINISH_THREADS,), arguments)

    def _follow_pools(self, tables: Tables) -> None:
        runs, segments = tables.runs[tables.runs["n_segments"] > 0], tables.segments
        rows, last = runs["row"], runs["first_segment"] + runs["n_segments"] - 1
        before = np.where(segments["takes_pool"][last] > 0, self._pool_actions[rows], 0)
        self._pool_actions[rows] = np.where(segments["complete"][last] > 0, 0, before + segments["actions"][last])

    def cotune(self, row: int, policy_entropy: float | None) -> RowState:
        """See `IsvBus`."""
        self._cell.bytes.view(np.float64)[0] = np.nan if policy_entropy is None else policy_entropy
        with self._errors("sac_cotune on the GPU"), self._device:
            graph = self._cotune_graphs.get(row) or self._capture_cotune(row)
            graph.launch(self._stream)
            self._stream.synchronize()
        return self._row_state()

    def _capture_cotune(self, row: int) -> Any:
        """What a query does, as one graph: no address in it changes for the life of the bus."""
        with self._stream:
            self._stream.begin_capture()
            try:
                # A copy, since a kernel that reads the cell where it lies waits longer for it (31 µs a query, not 25).
                self._copy(self._policy_entropy.ptr, self._cell.address, 8)
                arguments = (np.uint64(self._bus.ptr), np.int64(row), np.uint64(self._policy_entropy.ptr))
                self._sac_cotune((1,), (1,), arguments)
                self._copy_row_down(row)
            finally:
                graph = self._stream.end_capture()
        self._cotune_graphs[row] = graph
        return graph

    def cotune_step(self, row: int) -> CotuneStep:
        """A launcher of `sac_cotune` for an open row, on the caller's streams and within the caller's graphs.

        It may be mixed with the other calls for that row: each sees the launches of which the caller knows that they
        are finished.
        """
        cupy, bus = self._cupy, int(self._bus.ptr)
        return CotuneStep(cupy, self._device, self._sac_cotune, bus, row, int(self._nothing.data.ptr))

    def slots(self, row: int) -> Any:
        """A row's slots as the kernels of this process see them: a CuPy array, float32 [n_slots], no copy.

        The user's slots may be written there; the others belong to the kernels. It must not be used after `close`.
        """
        with self._device:
            place = self._cupy.cuda.MemoryPointer(self._bus, row * self._layout.size)
            return self._cupy.ndarray((self._n_slots,), self._cupy.float32, place)

    def row(self, row: int) -> RowState:
        """See `IsvBus`."""
        with self._errors(f"reading row {row} of the bus"), self._device:
            self._copy_row_down(row)
            self._stream.synchronize()
        return self._row_state()

    def _copy_row_down(self, row: int) -> None:
        origin, size, kind = self._row_address(row), self._layout.parameters, self._runtime.memcpyDeviceToHost
        self._runtime.memcpyAsync(self._record.address, origin, size, kind, self._stream.ptr)

    def _row_state(self) -> RowState:
        """What was copied down last."""
        record, layout = self._record.bytes, self._layout
        return RowState(
            record[: 4 * self._n_slots].view(np.float32).copy(),
            record[layout.counters : layout.pool].view(np.int64).copy(),
            record[layout.pool : layout.parameters].view(np.int64).copy(),
        )

    def write(self, row: int, slot: int, value: float) -> np.float32:
        """See `IsvBus`."""
        written = np.float32(value)
        self._cell.bytes[:4].view(np.float32)[0] = written
        with self._errors(f"writing slot {slot} of row {row}"), self._device:
            self._copy(self._row_address(row) + 4 * slot, self._cell.address, 4)
            self._stream.synchronize()
        return written

    def _row_address(self, row: int) -> int:
        return int(self._bus.ptr) + row * self._layout.size

    def _copy(self, target: int, origin: int, size: int) -> None:
        self._runtime.memcpyAsync(target, origin, size, self._runtime.memcpyHostToDevice, self._stream.ptr)

    @property
    def sharing(self) -> DeviceSharing:
        """See `IsvBus`."""
        if self._sharing is None:
            cupy, memory, layout = self._cupy, self._bus, self._layout
            self._sharing = DeviceSharing(self, cupy, self._device, self._stream, memory, layout, self._settings)
        return self._sharing

    def close(self) -> None:
        """See `IsvBus`. Everything that CUDA gave goes back when its last reference goes."""
        for name in (
            "_sharing",
            "_cotune_graphs",
            "_bus",
            "_partials",
            "_policy_entropy",
            "_nothing",
            "_staging",
            "_record",
            "_cell",
            "_stream",
        ):
            self.__dict__.pop(name, None)
