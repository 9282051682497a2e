"""Output head and cross entropy together, a slice of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from nvfp4_kernels.gemm import scaled_matmul
from nvfp4_kernels.triton.cross_entropy import cross_entropy
from torch import Tensor

from nvfp4_train.model.norm import accumulation_dtype

# Elements of one slice's logits: on a CPU their fp32 copy should stay in the last-level cache.
SLICE_ELEMENTS = {"cpu": 2**21, "cuda": 2**28}

PARTS = 16  # of hidden's gradient when it is scaled

# (hidden [t, H], weight [V, H] in hidden's dtype, targets [t], keep [t], with gradient or not) -> (the slice's summed loss,
# its gradient with respect to the logits [t, V] in hidden's dtype, or None)
SliceLoss = Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


def slice_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, keep: Tensor, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The reference: logits in hidden's dtype, everything after them in the accumulation dtype."""
    acc = accumulation_dtype(hidden.dtype)
    log_probabilities = (hidden @ weight.T).log_softmax(-1, dtype=acc)
    loss = -(log_probabilities.gather(-1, targets[:, None])[:, 0] * keep).sum()
    if not gradient:
        return loss, None
    grad = log_probabilities.exp_()
    grad.scatter_add_(-1, targets[:, None], grad.new_full((1, 1), -1.0).expand(len(targets), 1))
    return loss, (grad * keep[:, None]).to(hidden.dtype)


def slice_loss_triton(
    hidden: Tensor, weight: Tensor, targets: Tensor, keep: Tensor, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """`slice_loss` on a GPU in one kernel, which writes the gradient over the logits: these alone are in memory."""
    logits = hidden @ weight.T
    loss = cross_entropy(logits, targets, keep, gradient).sum()
    return loss, logits if gradient else None


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    slice_loss: SliceLoss = slice_loss,
) -> Tensor:
    """The summed negative log likelihood of targets under softmax(hidden @ weight^T).

    Args:
        hidden: [T, H] in the compute dtype.
        weight: [V, H] fp32; the product is taken in hidden's dtype, softmax and sums in fp32.
        targets: [T] int64 in [0, V).
        mask: None or bool [T]; tokens where it is False count nothing.
        slice_loss: what computes a slice.

    Returns a scalar in the accumulation dtype. At no time are there more than SLICE_ELEMENTS logits. With gradients
    enabled both gradients are made in the same pass over the logits and kept, so that backward computes nothing
    but a scaling; the sum over slices runs in a fixed order.
    """
    keep = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask
    return _HeadLoss.apply(hidden, weight, targets, keep, slice_loss)


def _add_product(total: Tensor | None, grad: Tensor, hidden: Tensor) -> Tensor:
    """total [V, H] (None: 0) + grad^T [V, t] hidden [t, H], in place and in the accumulation dtype. On a GPU a product of
    bf16 matrices is added on its fp32 sums; elsewhere it is rounded to bf16 before."""
    if hidden.device.type == "cuda" and hidden.dtype == torch.bfloat16:
        return scaled_matmul(grad.T, hidden.T, None, torch.float32, total)
    product = grad.T @ hidden
    return product.to(accumulation_dtype(hidden.dtype)) if total is None else total.add_(product)


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient x factor (a scalar on the device), rounded once: on a GPU torch would first round the factor to bf16, by up
    to 2^-8, and with it every gradient but the head's. In parts, whose copies in factor's precision take little memory."""
    scaled = torch.empty_like(gradient)
    for part, out in zip(gradient.chunk(PARTS), scaled.chunk(PARTS), strict=True):
        torch.mul(part.to(factor.dtype), factor, out=out)
    return scaled


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, keep: Tensor, slice_loss: SliceLoss
    ) -> Tensor:
        needs_grad = any(ctx.needs_input_grad[:2])
        acc = accumulation_dtype(hidden.dtype)
        compute_weight = weight.to(hidden.dtype)
        rows = max(1, SLICE_ELEMENTS[hidden.device.type] // weight.shape[0])
        loss = torch.zeros((), dtype=acc, device=hidden.device)
        if needs_grad:
            grad_hidden, grad_weight = torch.empty_like(hidden), None
        for i in range(0, len(hidden), rows):
            part = slice(i, i + rows)
            part_loss, grad = slice_loss(hidden[part], compute_weight, targets[part], keep[part], needs_grad)
            loss += part_loss
            if needs_grad:
                torch.mm(grad, compute_weight, out=grad_hidden[part])
                grad_weight = _add_product(grad_weight, grad, hidden[part])
        if needs_grad:
            ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            _scaled(grad_hidden, grad),
            grad_weight * grad.to(grad_weight.dtype),
            None,
            None,
            None,
        )
