"""Arrays of any library in GPU memory, seen through DLPack: an address and a shape; nothing is copied or awaited."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import numpy as np

CUDA_DEVICES = (2, 13)
"""DLPack's numbers for CUDA memory, plain and managed."""

_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}

_NAMES = {np.dtype(code).char: np.dtype(code).name for code in "?bBhHiIlLqQefd"}
"""Names of the common dtypes: asking a dtype for its name is slow."""

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("n_dimensions", ctypes.c_int32),
        ("kind", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("n_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DeviceArray(NamedTuple):
    """Where an array lies on a GPU. It keeps nothing alive."""

    address: int
    dtype: str
    """As NumPy and torch call it: float32, bfloat16, bool …"""
    device: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""

    @classmethod
    def of(cls, array: Any, name: str) -> DeviceArray:
        """Views a CuPy array, a torch tensor, or whatever else has ``__dlpack__``.

        Nothing is put on any stream: that the array is ready on the stream that it is used on is the caller's doing.

        Args:
            array: the array.
            name: what the error calls it.

        Raises:
            TypeError: it has no ``__dlpack__``, or does not lie on a GPU.
        """
        if isinstance(array, DeviceArray):
            return array
        if type(array).__name__ == "ndarray" and type(array).__module__.startswith("cupy"):
            return cls._of_cupy(array)
        if hasattr(array, "data_ptr") and getattr(array, "is_cuda", False):
            return cls.of_tensor(array)
        if not hasattr(array, "__dlpack__"):
            raise TypeError(f"{name}: got {type(array).__name__}, expected a CuPy array or a torch tensor on a GPU")
        in_host_memory = f"{name}: got an array in host memory, expected one on a GPU; copy it there first"
        if isinstance(array, np.ndarray):
            raise TypeError(in_host_memory)
        return cls._by_dlpack(array, in_host_memory)

    @classmethod
    def _of_cupy(cls, array: Any) -> DeviceArray:
        """What DLPack would say, without its price: a launch describes five arrays."""
        memory, itemsize = array.data, array.itemsize
        strides = tuple([stride // itemsize for stride in array.strides])
        return cls(memory.ptr, _NAMES.get(array.dtype.char) or array.dtype.name, memory.device_id, array.shape, strides)

    @classmethod
    def of_tensor(cls, tensor: Any) -> DeviceArray:
        """A torch tensor on a GPU; one that requires a gradient need not be detached."""
        dtype = _torch_name_of(tensor.dtype)
        return cls(tensor.data_ptr(), dtype, tensor.get_device(), tuple(tensor.shape), tensor.stride())

    @classmethod
    def _by_dlpack(cls, array: Any, in_host_memory: str) -> DeviceArray:
        capsule = array.__dlpack__(stream=-1)  # −1: do not synchronize
        tensor = _Tensor.from_address(_pointer_of(capsule, b"dltensor"))
        if tensor.device_type not in CUDA_DEVICES:
            raise TypeError(in_host_memory)
        shape = tuple(tensor.shape[: tensor.n_dimensions])
        strides = tuple(tensor.strides[: tensor.n_dimensions]) if tensor.strides else _dense(shape)
        bits = "" if _KINDS.get(tensor.kind) == "bool" else tensor.bits
        dtype = f"{_KINDS.get(tensor.kind, f'DLPack kind {tensor.kind}, bits ')}{bits}"
        return cls(tensor.data + tensor.byte_offset, dtype, tensor.device, shape, strides)


@cache
def _torch_name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))
