"""`cotuned` with a GPU that fails on SIGUSR1: a kernel of this process then reads an address that is none, after which
every CUDA call of the process fails, as after an Xid 31. python -m tests.chaos.failing_gpu serve …"""

from __future__ import annotations

import signal
import sys
import threading

from cotuned.service.cli import main


def fail() -> None:
    """Makes CUDA's context of this process unusable."""
    import cupy
    import numpy as np

    kernel = cupy.RawKernel('extern "C" __global__ void fail(int* p) { *p = 1; }', "fail")
    kernel((1,), (1,), (np.uint64(0xDEAD0000),))


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=fail, daemon=True).start())
    sys.exit(main())
