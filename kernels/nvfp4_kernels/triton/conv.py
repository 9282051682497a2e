"""PyTorch tensors in and out of the kernels of the depthwise causal convolution with SiLU."""

from __future__ import annotations

import torch

from nvfp4_kernels.triton.shapes import document_ids

# Channels of a program and its warps: four channels a lane, whose rows of a warp are 256 contiguous bytes in bf16.
WIDTH, WARPS = 256, 2
# Tokens of a program, and those that it reads at once. A chunk of the backward pass is one addend of the weight's gradient.
FORWARD, BACKWARD = {"CHUNK": 128, "ROWS": 8}, {"CHUNK": 256, "ROWS": 4}
LARGEST_KERNEL = BACKWARD["ROWS"] + 1

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _kernels():
    from nvfp4_kernels.triton import conv_kernels

    return conv_kernels


def _arguments(x: torch.Tensor, weight: torch.Tensor, seq_idx: torch.Tensor | None, sizes: tuple[int, ...]):
    """Grid without chunks, and what both kernels are told of x."""
    k = weight.shape[-1]
    if x.stride(-1) != 1 or not 1 <= k <= LARGEST_KERNEL or sum(sizes) != x.shape[-1]:
        raise ValueError(
            f"the convolution's kernels take contiguous channels, 1 to {LARGEST_KERNEL} taps and parts that make up "
            f"the channels, not strides {x.stride()}, {k} taps, parts {sizes} of {x.shape[-1]}"
        )
    blocks = sum(-(-size // WIDTH) for size in sizes)
    constants = dict(zip("ABC", sizes, strict=True)) | {"K": k, "MASKED": seq_idx is not None, "WIDTH": WIDTH}
    return (
        blocks,
        (x.shape[1], x.stride(0), x.stride(1)),
        constants | {"num_warps": WARPS, "enable_fp_fusion": True},
    )


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    seq_idx: torch.Tensor | None,
    sizes: tuple[int, int, int],
) -> Parts:
    """SiLU(bias + causal convolution), computed in fp32 and rounded once to x's dtype, as three parts of the channels.

    x: bf16 or fp32 [B, S, C], channels contiguous, other strides free; weight: fp32 [C, 1, k], k <= 5, whose last tap
    multiplies the current token; bias: fp32 [C]; seq_idx: int32 [B, S] or None, taps don't reach into another document;
    sizes: three numbers of channels, together C. Returns contiguous [B, S, size] each. Raises ValueError for what the
    kernel can't take.
    """
    batch, length, _ = x.shape
    blocks, shape, constants = _arguments(x, weight, seq_idx, sizes)
    out = tuple(torch.empty(batch, length, size, dtype=x.dtype, device=x.device) for size in sizes)
    _kernels().conv_kernel[(blocks, -(-length // FORWARD["CHUNK"]), batch)](
        x, weight.contiguous(), bias, document_ids(seq_idx), *out, *shape, **constants, **FORWARD
    )
    return out


def backward(
    grads: Parts,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    seq_idx: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x (in its dtype), weight and bias (fp32) of `forward`, from those of its results.

    out: where that of x goes, as x with strides of its own; else into a new contiguous tensor.
    What precedes SiLU is computed again, and nothing but dx is rounded. The weight's gradient is a sum over tokens inside
    chunks, then over chunks, in a fixed order: the same bits every time.
    """
    batch, length, channels = x.shape
    k, chunks = weight.shape[-1], -(-length // BACKWARD["CHUNK"])
    blocks, shape, constants = _arguments(x, weight, seq_idx, tuple(grad.shape[-1] for grad in grads))
    dx = torch.empty(batch, length, channels, dtype=x.dtype, device=x.device) if out is None else out
    sums = torch.empty(batch * chunks, k + 1, channels, dtype=torch.float32, device=x.device)
    _kernels().conv_backward_kernel[(blocks, chunks, batch)](
        x, weight.contiguous(), bias, document_ids(seq_idx), *(grad.contiguous() for grad in grads), dx, sums, *shape,
        *dx.stride()[:2], **constants, **BACKWARD,
    )  # fmt: skip
    total = sums.sum(0)
    return dx, total[:k].T.contiguous()[:, None], total[k]
