"""CuPy, where it is imported and where its errors become ours; compiled kernels; memory that drains travel through."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import addressof, c_longlong, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from ..wire.errors import DeviceUnavailable
from .cuda_sources import COMPILE_OPTIONS, source

OPENING = "check nvidia-smi, install cotuned[cuda12] or cotuned[cuda13] as the driver allows, or set device: cpu"
RUNNING = "the bus on it is lost; look for Xid errors in dmesg, then restart the daemon, or set device: cpu"


def import_cupy() -> Any:
    """The module `cupy`.

    Raises:
        DeviceUnavailable: it is not installed, or its import fails (an unreadable HOME or a broken CUDA can do that).
    """
    try:
        return importlib.import_module("cupy")
    except Exception as error:
        raise DeviceUnavailable(f"CuPy, which the GPU needs, cannot be imported: got {error!r}; {OPENING}") from error


@contextmanager
def cuda_errors(cupy: Any, doing: str, advice: str = RUNNING) -> Iterator[None]:
    """Whatever CUDA, NVRTC or CuPy report becomes `DeviceUnavailable`; errors of ours pass."""
    try:
        yield
    except (RuntimeError, OSError, ImportError, MemoryError, cupy.cuda.compiler.CompileException) as error:
        raise DeviceUnavailable(f"{doing} failed: got {type(error).__name__}: {error}; {advice}") from error


def compiled(cupy: Any, name: str, n_actions: int, n_slots: int, action_bytes: int = 0) -> Any:
    """The module of ``<name>.cu``. CuPy keeps the machine code in ``CUPY_CACHE_DIR`` (else ``~/.cupy``)."""
    return cupy.RawModule(code=source(name, n_actions, n_slots, action_bytes), options=COMPILE_OPTIONS)


class Arguments:
    """The arguments of one kernel where the driver reads them: 8 bytes each, set by number."""

    def __init__(self, *values: int) -> None:
        self.values = (c_longlong * len(values))(*values)
        base = addressof(self.values)
        self._pointers = (c_void_p * len(values))(*(base + 8 * i for i in range(len(values))))
        self.address = addressof(self._pointers)


class Pinned:
    """Page-locked host memory as bytes.

    Args:
        cupy: the module.
        size: bytes.
    """

    def __init__(self, cupy: Any, size: int) -> None:
        self._memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(size), 0)
        self.address = int(self._memory.ptr)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._memory, dtype=np.uint8, count=size)


class Staging:
    """The way of a drain to the device: page-locked memory, one copy, device memory.

    Two page-locked buffers take turns, so that a drain is packed while the one before it is still copied. All grow by
    powers of two and never shrink.

    Args:
        cupy: the module.
        size: bytes to begin with.
    """

    def __init__(self, cupy: Any, size: int) -> None:
        self._cupy = cupy
        self._pinned = [Pinned(cupy, size), Pinned(cupy, size)]
        self._copied = [cupy.cuda.Event(disable_timing=True) for _ in self._pinned]
        self._device = cupy.cuda.Memory(size)
        self._turn = 0

    def buffer(self, size: int) -> npt.NDArray[np.uint8]:
        """Page-locked memory of at least `size` bytes that nothing reads any more; valid until `upload`."""
        self._turn ^= 1
        self._copied[self._turn].synchronize()
        if self._pinned[self._turn].bytes.size < size:
            self._pinned[self._turn] = Pinned(self._cupy, power_of_two(size))
        return self._pinned[self._turn].bytes

    def upload(self, size: int, stream: Any) -> int:
        """Copies the first `size` bytes of the buffer on `stream`; the device address of the copy."""
        if self._device.size < size:
            self._device = self._cupy.cuda.Memory(power_of_two(size))  # freeing the old one waits for its kernels
        runtime = self._cupy.cuda.runtime
        source_address = self._pinned[self._turn].address
        runtime.memcpyAsync(self._device.ptr, source_address, size, runtime.memcpyHostToDevice, stream.ptr)
        self._copied[self._turn].record(stream)
        return int(self._device.ptr)


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size`."""
    return 1 << max(size - 1, 1).bit_length()
