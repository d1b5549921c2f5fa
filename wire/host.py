"""Which machine a process runs on: what may be shared without a network is shared within one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

WITHOUT_SHARED_MEMORY = "do without: cotune() answers α and τ, push() takes arrays of a GPU too"
"""What to do where client and daemon have no GPU memory in common."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def host() -> str:
    """A name of this machine since its last boot, the same in all its containers; empty where Linux does not tell."""
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""
