"""CuPy, imported only by who asks for GPU memory, and the GPU that client and daemon have in common."""

from __future__ import annotations

import importlib
from typing import Any

from ..wire.errors import DeviceUnavailable
from ..wire.host import WITHOUT_SHARED_MEMORY


def import_cupy() -> Any:
    """The module `cupy`.

    Raises:
        DeviceUnavailable: it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module("cupy")
    except Exception as error:  # whatever a broken CUDA installation raises
        raise DeviceUnavailable(
            f"CuPy, which attach_device() and push_device() need, cannot be imported: got {error!r}; install "
            f"cotuned[cuda12] or cotuned[cuda13] as the driver allows, or {WITHOUT_SHARED_MEMORY}"
        ) from error


def gpu_uuid(cupy: Any, device: int) -> str:
    """UUID of this process's CUDA device `device`: 32 hexadecimal digits."""
    return bytes(cupy.cuda.runtime.getDeviceProperties(device)["uuid"]).hex()


def find_gpu(cupy: Any, uuid: str, name: str) -> int:
    """The number that the GPU with this UUID has in this process.

    Args:
        cupy: the module.
        uuid: 32 hexadecimal digits.
        name: what the daemon calls it, for the error.

    Raises:
        DeviceUnavailable: this process does not see that GPU.
    """
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceUnavailable(
            f"this process sees no GPU ({error}), the daemon's bus lies on {name}; {WITHOUT_SHARED_MEMORY}"
        ) from error
    seen = [gpu_uuid(cupy, device) for device in range(count)]
    if uuid not in seen:
        raise DeviceUnavailable(
            f"the daemon's bus lies on {name}, UUID {uuid}; this process sees {', '.join(seen)}. Start it on that GPU "
            f"(CUDA_VISIBLE_DEVICES), or {WITHOUT_SHARED_MEMORY}"
        )
    return seen.index(uuid)
