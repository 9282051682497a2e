"""Output head and cross entropy together, a slice of tokens at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_train.model.norm import accumulation_dtype

# Elements of one slice's logits: on a CPU their fp32 copy should stay in the last-level cache.
SLICE_ELEMENTS = {"cpu": 2**21, "cuda": 2**28}


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """The summed negative log likelihood of targets under softmax(hidden @ weight^T).

    Args:
        hidden: [T, H] in the compute dtype.
        weight: [V, H] fp32; the product is taken in hidden's dtype, softmax and sums in fp32.
        targets: [T] int64 in [0, V).
        mask: None or bool [T]; tokens where it is False count nothing.

    Returns a scalar in the accumulation dtype. At no time are there more than SLICE_ELEMENTS logits. With gradients
    enabled both gradients are made in the same pass over the logits and kept, so that backward computes nothing
    but a scaling; the sum over slices runs in a fixed order.
    """
    keep = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask
    return _HeadLoss.apply(hidden, weight, targets, keep)


def slice_loss(hidden: Tensor, weight: Tensor, targets: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """One slice: its summed loss, and the gradient with respect to its logits [t, V] in hidden's dtype."""
    acc = accumulation_dtype(hidden.dtype)
    log_probabilities = (hidden @ weight.T).log_softmax(-1, dtype=acc)
    loss = -(log_probabilities.gather(-1, targets[:, None])[:, 0] * keep).sum()
    grad = log_probabilities.exp_()
    grad.scatter_add_(-1, targets[:, None], grad.new_full((1, 1), -1.0).expand(len(targets), 1))
    return loss, (grad * keep[:, None]).to(hidden.dtype)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, keep: Tensor) -> Tensor:
        needs_grad = any(ctx.needs_input_grad[:2])
        acc = accumulation_dtype(hidden.dtype)
        compute_weight = weight.to(hidden.dtype)
        rows = max(1, SLICE_ELEMENTS[hidden.device.type] // weight.shape[0])
        loss = torch.zeros((), dtype=acc, device=hidden.device)
        if needs_grad:
            grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for i in range(0, len(hidden), rows):
            part = slice(i, i + rows)
            part_loss, grad = slice_loss(hidden[part], compute_weight, targets[part], keep[part])
            loss += part_loss
            if needs_grad:
                torch.mm(grad, compute_weight, out=grad_hidden[part])
                grad_weight += grad.T @ hidden[part]
        if needs_grad:
            ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            (grad_hidden * grad).to(grad_hidden.dtype),
            grad_weight * grad.to(grad_weight.dtype),
            None,
            None,
        )
