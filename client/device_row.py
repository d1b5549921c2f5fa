"""`DeviceRow`: a run's row of the bus, mapped from the daemon's GPU memory into the learner's process."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from ..wire.answers import AttachAnswer
from ..wire.errors import AttachmentLost, DeviceUnavailable
from ..wire.host import WITHOUT_SHARED_MEMORY, host
from .gpu import find_gpu, import_cupy


class DeviceRow:
    """A run's slots as its learner's kernels read them: no copy, no question, no host in between.

    What a reader may rely on:

    - When `cotune` has returned, what it says stands in the row, for every kernel launched afterwards on any stream.
    - α and τ change only within a `cotune` of a new step, so between two of them they stand still.
    - Slot 583 and its neighbours change whenever the daemon has taken batches in. Each slot is written as a whole; two
      slots may be of two different observations.
    - A captured CUDA graph reads the row when it is replayed.

    It is read-only by contract: CUDA IPC cannot forbid a write, and one would make the daemon's answers wrong.

    When the daemon ends, however it ends, the memory stays mapped, readable, and as it was last. `LearnerClient.cotune`
    notices that another daemon answers and raises `AttachmentLost`, after which `slots` and `tensor` raise it too;
    attach again to go on. The memory is unmapped with the last array made from it.

    Made by `LearnerClient.attach_device`.
    """

    def __init__(self, answer: AttachAnswer, run: str, generation: int | None) -> None:
        if answer.host != host():
            raise DeviceUnavailable(
                f"the daemon's bus lies in a GPU of another host ({answer.device}); {WITHOUT_SHARED_MEMORY}"
            )
        cupy = import_cupy()
        self.run = run
        self.generation = generation
        """Which life of the daemon it belongs to."""
        self.device = find_gpu(cupy, answer.gpu, answer.device)
        """Number of the GPU in this process."""
        mapping = _Mapping(cupy, self.device, answer)
        memory = cupy.cuda.UnownedMemory(mapping.address, mapping.size, mapping, self.device)
        with cupy.cuda.Device(self.device):
            pointer = cupy.cuda.MemoryPointer(memory, answer.offset)
            self._slots: Any = cupy.ndarray((answer.n_slots,), cupy.float32, pointer)
        self._lost = ""

    @property
    def slots(self) -> Any:
        """CuPy array, float32 [n_slots]; what `q_pi_distill_grad` takes as `slots`.

        Raises:
            AttachmentLost: the daemon has ended; arrays taken before stand still.
        """
        self.check()
        return self._slots

    def tensor(self) -> Any:
        """The same memory as a torch tensor, float32 [n_slots]. Raises as `slots`, and ImportError without torch."""
        import torch  # pyright: ignore[reportMissingImports] - the user's own

        self.check()
        return torch.from_dlpack(self._slots)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def lose(self, why: str) -> None:
        """From now on `slots` and `tensor` raise AttachmentLost with this sentence."""
        self._lost = why

    def check(self) -> None:
        """Raises AttachmentLost if `lose` or `close` was called; asks nobody."""
        if self._lost:
            raise AttachmentLost(self._lost)

    def close(self) -> None:
        """Lets go of the row; the memory is unmapped when the last array or tensor made from it is gone."""
        self._slots = None
        self._lost = self._lost or f"the attachment to run {self.run!r} was closed; call attach_device() again"


class _Mapping:
    """The daemon's allocation in this process; unmapped when nothing refers to it any more."""

    def __init__(self, cupy: Any, device: int, answer: AttachAnswer) -> None:
        self._runtime, self._device = cupy.cuda.runtime, cupy.cuda.Device(device)
        self.size = answer.offset + 4 * answer.n_slots
        try:
            with self._device:
                self.address = int(self._runtime.ipcOpenMemHandle(answer.handle))
        except self._runtime.CUDARuntimeError as error:
            raise DeviceUnavailable(
                f"CUDA does not map the daemon's bus on {answer.device} into this process ({error}). In containers "
                "both need one IPC namespace (docker: ipc: host, or ipc: container:…); the daemon's own process cannot "
                f"attach to it either. Or {WITHOUT_SHARED_MEMORY}"
            ) from error

    def __del__(self) -> None:
        if hasattr(self, "address") and not sys.is_finalizing():
            with contextlib.suppress(Exception), self._device:  # the CUDA context may be gone already
                self._runtime.ipcCloseMemHandle(self.address)
