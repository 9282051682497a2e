"""PyTorch tensors in and out of the kernel of the cross entropy."""

from __future__ import annotations

import torch

# A program's. Two fill a processor (at 32 registers a lane): on an H200 264 rows are under way, which at 65,536 bf16 logits
# each are 35 MB and fit its second level of cache until they are read again.
WARPS = 32


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, keep: torch.Tensor, gradient: bool
) -> torch.Tensor:
    """-log softmax(logits)[target] of every row, times keep: fp32 [rows], the same bits every time.

    logits: bf16 or fp32 [rows, V], contiguous; with `gradient` they are replaced by the gradient of the losses' sum,
    (softmax - one hot) * keep, computed in fp32 and rounded once. targets: int64 [rows] in [0, V); keep: bool [rows].
    As 0 times a number that isn't finite is none, such a row makes its loss and gradient NaN even where keep is False.
    Raises ValueError for logits that the kernel can't take.
    """
    from nvfp4_kernels.triton.cross_entropy_kernels import cross_entropy_kernel

    if not logits.is_contiguous() or logits.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"the cross entropy's kernel takes contiguous bf16 or fp32 logits, not {logits.dtype} with strides "
            f"{logits.stride()}"
        )
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    cross_entropy_kernel[(rows,)](
        logits, targets.contiguous(), keep.contiguous(), losses, vocabulary,
        GRADIENT=gradient, LANES=32 * WARPS, WIDTH=16 // logits.element_size(), num_warps=WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip
    return losses
