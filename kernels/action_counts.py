"""`count_segments`: how often each action occurs in each segment of a drain, on the host.

Idea: with few actions, counting in bit planes. Each bit of the indices becomes a plane of one bit an action; action k
is where all planes agree with the bits of k, and a population count of 64 of them costs as much as one addition. It is
what ``bit_planes.cuh`` does on the device. With many actions one bincount over (segment, action) is faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

MOST_IN_PLANES = 16 if hasattr(np, "bitwise_count") else 0
"""Most actions for which planes pay; NumPy counts bits from 2.0 on."""
BLOCK_ACTIONS = 2**18
"""Actions at a time: what is made of them stays in the cache."""


def count_segments(actions: npt.NDArray[np.integer[Any]], ends: Int64Array, n_actions: int) -> Int64Array:
    """Histograms of consecutive segments.

    Args:
        actions: [N] indices in [0, K); any integer dtype.
        ends: int64 [S], where each segment ends; it never falls, and the last is N.
        n_actions: K.

    Returns:
        int64 [S, K].
    """
    if actions.dtype != np.uint8 or n_actions > MOST_IN_PLANES:
        lengths = np.diff(ends, prepend=0)
        cell = np.repeat(np.arange(ends.size) * n_actions, lengths) + actions
        return np.bincount(cell, minlength=ends.size * n_actions).reshape(ends.size, n_actions)
    indices: npt.NDArray[np.uint8] = actions.view(np.uint8)
    counts = np.zeros((ends.size, n_actions), dtype=np.int64)
    for begin in range(0, indices.size, BLOCK_ACTIONS):
        block = indices[begin : begin + BLOCK_ACTIONS]
        first, last = np.searchsorted(ends, (begin, begin + block.size), side="left")
        cuts = np.minimum(ends[first : last + 1] - begin, block.size)
        counts[first : last + 1] += np.diff(_running_counts(block, cuts, n_actions), axis=0, prepend=0)
    return counts


def _running_counts(actions: npt.NDArray[np.uint8], cuts: Int64Array, n_actions: int) -> Int64Array:
    """int64 [len(cuts), K]: how often each action occurs before each cut."""
    n_bits = max(1, (n_actions - 1).bit_length())
    planes = [_plane(actions & np.uint8(1 << bit)) for bit in range(n_bits)]
    inverse = [~plane for plane in planes]
    word, rest = cuts >> 6, (cuts & 63).astype(np.uint64)
    word_of_rest = np.minimum(word, planes[0].size - 1)
    before = (np.uint64(1) << rest) - np.uint64(1)  # bits of the cut's own word that lie before it
    running = np.empty((cuts.size, n_actions), dtype=np.int64)
    sums = np.zeros(planes[0].size + 1, dtype=np.int64)
    for action in range(n_actions):
        is_action = planes[0] if action & 1 else inverse[0]
        for bit in range(1, n_bits):
            is_action = is_action & (planes[bit] if action >> bit & 1 else inverse[bit])
        np.cumsum(np.bitwise_count(is_action), out=sums[1:])
        running[:, action] = sums[word] + np.bitwise_count(is_action[word_of_rest] & before)
    return running


def _plane(bits: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """One bit for each byte that is not 0, the first byte's the lowest of the first word."""
    packed = np.packbits(bits, bitorder="little")
    padded = np.zeros(-(-packed.size // 8) * 8, dtype=np.uint8)
    padded[: packed.size] = packed
    return padded.view("<u8")
