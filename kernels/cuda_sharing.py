"""Memory that several processes see on one GPU, by CUDA IPC: the bus for learners, actors' memory for the daemon."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config.settings import Settings
from ..wire.answers import AttachAnswer
from ..wire.codec import DeviceBatch, action_dtype
from ..wire.errors import DeviceNotShared
from ..wire.host import host
from ..wire.messages import Share
from ..wire.slots import Counter
from .cuda_modules import cuda_errors
from .cuda_sources import RecordLayout
from .drain import Rejection

if TYPE_CHECKING:
    from .cuda_bus import CudaBus
    from .entropy_step import EntropyStep


_NOT_COUNTED = "nothing of this batch was counted"


class SharedMemory:
    """An actor's allocation, mapped here. It stays readable when the actor frees it or dies.

    Args:
        cupy: the module.
        share: what the actor offered.

    Raises:
        DeviceNotShared: CUDA cannot map it, or it is smaller than the actor says.
    """

    def __init__(self, cupy: Any, share: Share) -> None:
        self._runtime = cupy.cuda.runtime
        try:
            self.address = int(self._runtime.ipcOpenMemHandle(share.handle))
        except self._runtime.CUDARuntimeError as error:
            raise DeviceNotShared(
                f"share: CUDA does not map the actor's memory into the daemon ({error}). Both need the same host and "
                "GPU and, in containers, one IPC namespace (docker: ipc: host); an actor within the daemon's own "
                "process pushes without push_device"
            ) from error
        self.size = _allocation_size(self.address)
        if self.size < share.size:
            self.close()
            raise DeviceNotShared(f"share: got {share.size} bytes in an allocation of {self.size}; send its own size")

    def close(self) -> None:
        """Unmaps it. Nothing on the GPU may be reading it any more."""
        self._runtime.ipcCloseMemHandle(self.address)


def _allocation_size(address: int) -> int:
    """Bytes of the allocation that begins at `address`: the runtime has no call for it, the driver has."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    if driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)) != 0:
        return 0
    return int(size.value) - (address - int(base.value))


class DeviceSharing:
    """What a `CudaBus` shares with other processes on its GPU.

    Args:
        bus: the bus; its thread is the only one that calls this.
        cupy: the module.
        device: where the bus lies.
        stream: the stream that the bus works on.
        memory: the bus's allocation.
        layout: of its records.
        settings: n_actions and bus.n_slots are used.
    """

    def __init__(
        self, bus: CudaBus, cupy: Any, device: Any, stream: Any, memory: Any, layout: RecordLayout, settings: Settings
    ) -> None:
        self._bus, self._cupy, self._device, self._stream, self._memory = bus, cupy, device, stream, memory
        self._layout, self._n_actions, self._n_slots = layout, settings.n_actions, settings.bus.n_slots
        self._steps: dict[tuple[int, bool], EntropyStep] = {}
        with cuda_errors(cupy, "sharing the bus by CUDA IPC"), device:
            self.gpu = bytes(cupy.cuda.runtime.getDeviceProperties(device.id)["uuid"]).hex()
            # An index that is out of range for every K and item size: what a batch outside its memory is counted as.
            self._invalid = cupy.full(8, 0xFF, dtype=np.uint8)
            device.synchronize()

    def export(self, row: int) -> AttachAnswer:
        """Where a row lies, for another process on this GPU.

        Raises:
            DeviceNotShared: CUDA cannot export memory here.
        """
        runtime = self._cupy.cuda.runtime
        try:
            with self._device:
                handle = runtime.ipcGetMemHandle(self._memory.ptr)
        except runtime.CUDARuntimeError as error:
            raise DeviceNotShared(f"attach: CUDA does not export the daemon's memory here ({error})") from error
        return AttachAnswer(self._bus.device, self.gpu, host(), handle, row * self._layout.size, self._n_slots)

    def open(self, share: Share) -> SharedMemory:
        """Maps an actor's memory.

        Raises:
            DeviceNotShared: it lies on another host or GPU, or CUDA cannot map it.
        """
        if share.host != host():
            raise DeviceNotShared("share: the actor runs on another host than the daemon; push actions instead")
        if share.gpu != self.gpu:
            raise DeviceNotShared(
                f"share: the actor's memory lies on the GPU {share.gpu}, the daemon's bus on {self.gpu} "
                f"({self._bus.device}); push actions instead"
            )
        with self._device:
            return SharedMemory(self._cupy, share)

    def observe(self, row: int, memory: SharedMemory, batch: DeviceBatch) -> Rejection | None:
        """Counts one batch out of an actor's memory, as `IsvBus.observe` does; the rejection if it was rejected."""
        step = self._step(row, prefill=batch.phase == 1)
        rejected_before = self._rejected(row)
        fits = batch.offset + batch.n * batch.item_bytes <= memory.size
        step.prepare(f"u{batch.item_bytes}")
        with cuda_errors(self._cupy, "a batch out of an actor's memory"), self._device:
            if fits:
                step.enqueue(self._stream.ptr, memory.address + batch.offset, batch.n, batch.item_bytes)
            else:
                step.enqueue(self._stream.ptr, int(self._invalid.data.ptr), 1, batch.item_bytes)
        if self._rejected(row) == rejected_before:
            return None
        if not fits:
            return Rejection(
                0,
                "outside_shared_memory",
                f"executed: got {batch.n} actions of {batch.item_bytes} bytes at {batch.offset}, expected them "
                f"within the {memory.size} bytes that the actor shares; {_NOT_COUNTED}",
            )
        return Rejection(0, "action_out_of_range", self._what_is_out_of_range(memory, batch))

    def _what_is_out_of_range(self, memory: SharedMemory, batch: DeviceBatch) -> str:
        """A sentence about the first one, if it is among the first million; whether it was signed is not known."""
        indices, k = self._download(memory, batch._replace(n=min(batch.n, 2**20))), self._n_actions
        found = ""
        for at in np.flatnonzero(indices >= k)[:1]:
            value, top = int(indices[at]), 1 << 8 * batch.item_bytes
            found = f"[{at}]: got {value}" + (f" (signed: {value - top})" if value >= top // 2 else "")
        return (
            f"executed{found or ': got another'}, expected an action index from 0 to {k - 1} (K = {k}); {_NOT_COUNTED}"
        )

    def _step(self, row: int, *, prefill: bool) -> EntropyStep:
        step = self._steps.get((row, prefill))
        if step is None:
            step = self._steps[row, prefill] = self._bus.entropy_step(row, prefill=prefill)
        return step

    def _rejected(self, row: int) -> int:
        return int(self._bus.row(row).counters[Counter.BATCHES_REJECTED])

    def _download(self, memory: SharedMemory, batch: DeviceBatch) -> np.ndarray:
        indices = np.empty(batch.n, dtype=f"u{batch.item_bytes}")
        runtime = self._cupy.cuda.runtime
        with cuda_errors(self._cupy, "reading an actor's memory"), self._device:
            address = memory.address + batch.offset
            runtime.memcpy(indices.ctypes.data, address, indices.nbytes, runtime.memcpyDeviceToHost)
        return indices

    def download(self, memory: SharedMemory, batch: DeviceBatch) -> bytes:
        """The actions of a batch that was not rejected, as they are on the wire; for the record."""
        return self._download(memory, batch).astype(action_dtype(self._n_actions)).tobytes()
