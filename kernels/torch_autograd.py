"""`q_pi_distill` for torch: the loss with its gradient, by ``q_pi_distill_grad.cu``. The only module that needs torch.

    loss = q_pi_distill(logits, q, slots).mean()      # slots: the run's row of the bus, on the GPU
    loss.backward()

α and τ are read from `slots` on the device, in the order of the current stream: nothing waits for the host, and a
training step captured in a CUDA graph follows the bus at every replay.
"""

from __future__ import annotations

from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch.autograd.function import once_differentiable  # pyright: ignore[reportMissingImports]

from .cuda_distill import launch_q_pi_distill_grad
from .device_arrays import DeviceArray


def q_pi_distill(
    logits: torch.Tensor, q: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """L = CE(π*, π) − α·H(π) of each row; `q_pi_distill_grad` says more.

    Runs on torch's current stream. Before a graph is captured, call it once with the same shapes and types: that
    compiles the kernel.

    Args:
        logits: float32, bfloat16 or float16 [..., K], K ≤ 4096, on a GPU.
        q: likewise; a target, so no gradient goes to it.
        slots: float32 [n_slots], the run's row of the bus.
        mask: bool or uint8 [..., K], 0 where an action is not legal; None: a logit of −inf says so.

    Returns:
        float32 [...]; the gradient that flows to `logits` has their type.
    """
    loss: torch.Tensor = QPiDistill.apply(logits, q, slots, mask)
    return loss


class QPiDistill(torch.autograd.Function):
    """`q_pi_distill` as a function of autograd. One kernel in the forward pass computes loss and gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, q: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """See `q_pi_distill`."""
        z = _rows(logits)
        gradient = torch.empty_like(z, memory_format=torch.contiguous_format)
        loss = torch.empty(z.shape[0], dtype=torch.float32, device=z.device)
        with torch.cuda.device_of(z):
            launch_q_pi_distill_grad(
                _view(z),
                _view(_rows(q)),
                _view(slots),
                _view(gradient),
                mask=None if mask is None else _view(_rows(mask)),
                loss=_view(loss),
                stream=torch.cuda.current_stream().cuda_stream if z.is_cuda else None,
            )
        ctx.save_for_backward(gradient.view(logits.shape))
        return loss.view(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        """Scales each row's gradient by that of its loss."""
        (gradient,) = ctx.saved_tensors
        return (gradient * loss_gradient.unsqueeze(-1)).to(gradient.dtype), None, None, None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """As [n, K], with the elements of a row side by side."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.numel() else tensor.reshape(0, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _view(tensor: torch.Tensor) -> DeviceArray:
    if not tensor.is_cuda:
        raise TypeError(f"got a tensor on {tensor.device}, expected one on a GPU; move it there first")
    return DeviceArray.of_tensor(tensor)
