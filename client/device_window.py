"""`DeviceWindow`: actions in GPU memory that the daemon reads, kept until they are durable."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

from ..wire.errors import CapturingStream, DeviceBusy, InvalidActions
from ..wire.host import host
from ..wire.messages import Share
from .gpu import gpu_uuid, import_cupy

_SPIN_SECONDS = 0.0005
"""Looking without a pause for this long: most work that makes actions ends sooner than a sleep would."""
_SLEEP_SECONDS = 0.0002
_CUDA = (2, 13)
"""DLPack's numbers for CUDA memory, plain and managed."""
ALIGNMENT = 16
"""Of a batch in the ring; bytes. Wide loads begin at once."""
_SIGNED_BYTE_ACTIONS = 128
"""Most actions that an int8 can name: as the daemon reads it, −1 would be 255."""


def device_of(actions: Any) -> int:
    """Number of the GPU on which an array lies.

    Raises:
        InvalidActions: it lies on none.
    """
    kind, device = actions.__dlpack_device__() if hasattr(actions, "__dlpack_device__") else (0, 0)
    if int(kind) not in _CUDA:
        raise InvalidActions(
            f"push_device: got a {type(actions).__name__}{' in host memory' if kind else ''}, expected a CuPy array or "
            "a torch tensor on the daemon's GPU; push() takes the others"
        )
    return int(device)


class Ring:
    """Which bytes of a ring of `size` are in use: batches come and go in order, each in one piece.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._used: deque[tuple[int, int, int]] = deque()  # number, begin, end

    def find(self, size: int) -> int | None:
        """Where `size` bytes fit now; None: nowhere."""
        if not self._used:
            return 0 if size <= self.size else None
        oldest, newest = self._used[0][1], self._used[-1][2]
        begin = -(-newest // ALIGNMENT) * ALIGNMENT
        if newest <= oldest:  # wrapped round: free is what lies between
            return begin if begin + size <= oldest else None
        if begin + size <= self.size:
            return begin
        return 0 if size <= oldest else None

    def take(self, number: int, begin: int, size: int) -> None:
        """Bytes that `find` found belong to batch `number` from now on; numbers grow."""
        self._used.append((number, begin, begin + size))

    def release(self, durable: int) -> None:
        """Gives back what belongs to batches up to number `durable`."""
        while self._used and self._used[0][0] <= durable:
            self._used.popleft()


class DeviceWindow:
    """A ring in a GPU's memory, shared with the daemon by CUDA IPC.

    Args:
        device: number of the GPU in this process.
        size: bytes of the ring.
        n_actions: K.
    """

    def __init__(self, device: int, size: int, n_actions: int) -> None:
        self._cupy = import_cupy()
        self.device = device
        self.ring = Ring(size)
        self._n_actions = n_actions
        with self._cupy.cuda.Device(device):
            # A cudaMalloc of its own: CUDA IPC exports whole allocations, and nobody else's values with it.
            self._memory = self._cupy.cuda.Memory(size)
            self._stream = self._cupy.cuda.Stream(non_blocking=True)
            self._copied = self._cupy.cuda.Event(disable_timing=True)
        self._behind = False  # whether a copy of a push that gave up may be under way

    def share(self, stream: int) -> Share:
        """The message that offers this memory to the daemon."""
        with self._cupy.cuda.Device(self.device):
            handle = self._cupy.cuda.runtime.ipcGetMemHandle(self._memory.ptr)
        return Share(stream, handle, self.ring.size, gpu_uuid(self._cupy, self.device), host())

    def view(self, actions: Any) -> Any:
        """The actions as a CuPy array [n], without a copy if they are contiguous; `_stream` waits for what makes them.

        Raises:
            InvalidActions: they are not integers on this GPU.
            CapturingStream: the current stream captures a graph.
        """
        cuda = self._cupy.cuda
        self._check_not_capturing()
        with cuda.Device(self.device):
            self._stream.wait_event(cuda.get_current_stream().record())
            try:
                with self._stream:  # so that torch, by DLPack's rules, makes it wait for torch's current stream
                    array = self._cupy.from_dlpack(actions).reshape(-1)
            except (TypeError, ValueError, BufferError, RuntimeError, AttributeError) as error:
                raise InvalidActions(
                    f"push_device: got a {type(actions).__name__} that CuPy cannot view: {error}"
                ) from error
        kind, size = array.dtype.kind, int(array.dtype.itemsize)
        if kind not in "iu":
            raise InvalidActions(f"push_device: got {array.dtype}, expected integers")
        if kind == "i" and size == 1 and self._n_actions > _SIGNED_BYTE_ACTIONS:
            raise InvalidActions(
                f"push_device: got int8, which cannot name {self._n_actions} actions; use uint8 or wider"
            )
        if array.nbytes > self.ring.size:
            raise InvalidActions(
                f"push_device: got {array.nbytes} bytes of actions, the window in GPU memory has {self.ring.size}; "
                "raise device_window_bytes, or push smaller batches"
            )
        return array

    def _check_not_capturing(self) -> None:
        torch: Any = sys.modules.get("torch")
        if self._cupy.cuda.get_current_stream().is_capturing() or (
            torch is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        ):
            raise CapturingStream(
                "push_device: got a current stream that captures a CUDA graph, expected one that does not; a replay "
                "would push nothing. Call it outside capture, after the last gate"
            )

    def copy(self, array: Any, begin: int, deadline: float) -> None:
        """Copies actions to `begin` and returns when the copy is done.

        Raises:
            DeviceBusy: whatever makes them did not end by `deadline`; what is at `begin` counts for nothing.
        """
        self._wait(deadline)
        with self._cupy.cuda.Device(self.device), self._stream:
            pointer = self._cupy.cuda.MemoryPointer(self._memory, begin)
            self._cupy.ndarray(array.shape, array.dtype, pointer)[...] = array
            self._copied.record(self._stream)
        self._behind = True
        self._wait(deadline)

    def _wait(self, deadline: float) -> None:
        """The daemon never waits for an actor's GPU work: what it is told of is there."""
        begun = time.monotonic()
        while self._behind:
            if self._copied.done:
                self._behind = False
                return
            now = time.monotonic()
            if now >= deadline:
                raise DeviceBusy(
                    "push_device: the GPU work that makes the actions did not end within the timeout; the batch was "
                    "not sent, push it again"
                )
            if now - begun > _SPIN_SECONDS:
                time.sleep(_SLEEP_SECONDS)
