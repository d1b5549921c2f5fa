"""The bus and the kernels that work on it, on the host and on a GPU. CuPy is imported only when a GPU is asked for."""

from .bus import IsvBus, RowState, open_bus
from .cuda_sharing import DeviceSharing, SharedMemory
from .drain import Drain, Rejection
from .host_bus import HostBus
from .parameters import Parameter, run_parameters

__all__ = [
    "DeviceSharing",
    "Drain",
    "HostBus",
    "IsvBus",
    "Parameter",
    "Rejection",
    "RowState",
    "SharedMemory",
    "open_bus",
    "run_parameters",
]
