"""What users hand in (NumPy, torch, CuPy, sequences) becomes checked NumPy arrays, or a sentence that says why not."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ..wire.errors import InvalidActions

IntArray = npt.NDArray[np.integer[Any]]
FloatArray = npt.NDArray[np.float64]

ROW_SUM_TOLERANCE = 1e-3
"""How far a row of probabilities may sum from 1: wide enough for bfloat16 softmax rows of float32 sums."""


_NO_ARRAYS: tuple[type, ...] = (type(None), str, bytes, dict, set, frozenset, Iterator)
"""What np.asarray would wrap into an array of one object."""


def index(name: str, value: Any) -> int:
    """An integer argument as an int: ints and NumPy integers, not bools.

    Raises:
        ValueError: anything else.
    """
    try:
        if not isinstance(value, bool | np.bool_):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"{name}: got {value!r:.80}, expected an integer")


def _to_numpy(values: Any, what: str) -> npt.NDArray[Any]:
    if isinstance(values, _NO_ARRAYS):
        kind = type(cast(object, values)).__name__
        raise InvalidActions(f"{what}: got a {kind}, expected an array, a tensor or a list of integers")
    if isinstance(values, np.ma.MaskedArray):
        raise InvalidActions(f"{what}: got a masked array; push the values that count, e.g. array.compressed()")
    # By duck type, so that neither torch nor CuPy is imported for users who have neither.
    if hasattr(values, "detach") and hasattr(values, "cpu"):  # torch
        values = values.detach().cpu()
        if str(getattr(values, "dtype", "")) in ("torch.bfloat16", "torch.float16"):
            values = values.float()  # NumPy has no bfloat16
        values = values.numpy()
    elif hasattr(values, "__cuda_array_interface__") and hasattr(values, "get"):  # CuPy
        values = values.get()
    try:
        return np.asarray(values)
    except (ValueError, TypeError) as error:
        raise InvalidActions(
            f"{what}: got a {type(values).__name__} that is no array ({error}); "
            "expected an array, a tensor or a flat sequence"
        ) from error


def as_actions(values: Any, n_actions: int, what: str = "executed") -> IntArray:
    """Action indices as a one-dimensional integer array.

    Args:
        values: shape [n], any integer dtype; NumPy, torch or CuPy (copied to the host), or a sequence of ints.
        n_actions: K; every index must lie in [0, K).
        what: the argument's name, for the error text.

    Raises:
        InvalidActions: not integers, not one-dimensional, or an index outside [0, K).
    """
    array = _to_numpy(values, what)
    if array.ndim != 1:
        raise InvalidActions(
            f"{what}: got shape {list(array.shape)}, expected [n], one action index for each environment; "
            + ("wrap a single action in a list" if array.ndim == 0 else "flatten it, or push one batch a step")
        )
    if array.size == 0 and not isinstance(values, np.ndarray):
        return np.empty(0, np.int64)  # an empty list has no dtype of its own
    if array.dtype == object:
        raise InvalidActions(f"{what}: got Python objects or integers beyond 64 bits, expected 0 to {n_actions - 1}")
    if array.dtype.kind not in "iu":
        raise InvalidActions(
            f"{what}: got dtype {array.dtype}, expected integer action indices from 0 to {n_actions - 1}; "
            "for one-hot rows take argmax, for floats that hold integers use astype(int)"
        )
    if array.size == 0:
        return array
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0 or highest >= n_actions:
        bad = int(np.flatnonzero((array < 0) | (array >= n_actions))[0])
        raise InvalidActions(
            f"{what}[{bad}]: got {int(array[bad])}, expected an action index from 0 to {n_actions - 1} "
            f"(K = {n_actions}); nothing of this batch was sent"
        )
    return array


def as_rows(values: Any, n: int, n_actions: int, what: str = "probs") -> FloatArray:
    """Probability rows as float64 [n, K].

    Raises:
        InvalidActions: wrong shape, not finite, negative, or a row that does not sum to 1 within `ROW_SUM_TOLERANCE`.
    """
    array = _to_numpy(values, what)
    if array.shape != (n, n_actions):
        raise InvalidActions(
            f"{what}: got shape {list(array.shape)}, expected [{n}, {n_actions}], one row for each executed action"
        )
    if array.dtype.kind not in "fiub":
        raise InvalidActions(f"{what}: got dtype {array.dtype}, expected probabilities")
    rows = array.astype(np.float64)
    if not np.isfinite(rows).all() or (rows < 0).any():
        row = int(np.flatnonzero(~(np.isfinite(rows) & (rows >= 0)).all(axis=1))[0])
        raise InvalidActions(f"{what}[{row}]: got {rows[row]}, expected finite probabilities that are not negative")
    sums = rows.sum(axis=1)
    off = np.abs(sums - 1) > ROW_SUM_TOLERANCE
    if off.any():
        row = int(np.flatnonzero(off)[0])
        raise InvalidActions(
            f"{what}[{row}]: got a row that sums to {sums[row]:.6g}, expected 1; pass probabilities, not logits"
        )
    return cast(FloatArray, rows / sums[:, None])


def row_entropies(rows: FloatArray) -> FloatArray:
    """Shannon entropy −Σ p ln p of each row of [n, K]; nats, shape [n]. A zero probability contributes 0."""
    logs = np.log(rows, out=np.zeros_like(rows), where=rows > 0)
    return cast(FloatArray, 0.0 - (rows * logs).sum(axis=1))
