"""What the two runs' numbers say, in words that are computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

History = Mapping[str, npt.NDArray[np.float64]]


def figures(histories: Mapping[str, History]) -> dict[str, Any]:
    raise NotImplementedError


def sentences(histories: Mapping[str, History]) -> list[str]:
    raise NotImplementedError
