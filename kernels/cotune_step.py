"""`CotuneStep`: one learner step of `sac_cotune` on a stream of the learner's own, eager or within a CUDA graph."""

from __future__ import annotations

from typing import Any

from .cuda_modules import Arguments
from .device_arrays import DeviceArray


class CotuneStep:
    """Launches ``sac_cotune.cu`` for one run; made by `CudaBus.cotune_step`.

    Whether there is something new to act on is decided on the device, so a graph that captured a launch goes on being
    right. Launches of one run, and everything else that reads or writes its row, must be ordered by the caller (one
    stream, or events). There are no steps and no sessions here: each launch, and each replay, is one new step.

    Args:
        cupy: the module.
        device: the CUDA device of the bus.
        kernel: the compiled kernel.
        bus: device address of the bus.
        row: the run's row.
        nothing: device address of a NaN, what a learner that reports no policy entropy reports.
    """

    def __init__(self, cupy: Any, device: Any, kernel: Any, bus: int, row: int, nothing: int) -> None:
        self._kernel = kernel  # keeps the module loaded
        self._function, self._launch = int(kernel.kernel.ptr), cupy.cuda.driver.launchKernel
        self._device, self._nothing = device, nothing
        self._arguments = Arguments(bus, row, nothing)

    def launch(self, stream: Any, policy_entropy: Any = None) -> None:
        """Enqueues one step; waits for nothing. What comes later in the stream sees α, τ and the rest.

        Args:
            stream: a CuPy stream, or the address of a CUDA stream (e.g. ``torch.cuda.current_stream().cuda_stream``).
            policy_entropy: the mean policy entropy of this step, nats: a CuPy array or torch tensor of one float64 on
                the device of the bus; it is read when the step runs, so a captured graph reads it at each replay, and
                must live as long. None: not reported. NaN: not reported either.

        Raises:
            TypeError, ValueError: it is no such array.
        """
        reported = self._nothing
        if policy_entropy is not None:
            array = DeviceArray.of(policy_entropy, "policy_entropy")
            if array.dtype != "float64" or array.shape not in ((), (1,)) or array.device != self._device.id:
                raise ValueError(
                    f"policy_entropy: got {array.dtype} {array.shape} on cuda:{array.device}, expected one float64 on "
                    f"cuda:{self._device.id}"
                )
            reported = array.address
        self._arguments.values[2] = reported
        pointer = stream if type(stream) is int else stream.ptr
        self._launch(self._function, 1, 1, 1, 1, 1, 1, 0, pointer, self._arguments.address, 0)
