"""Cross entropy of logits and its gradient, a row a program: one pass for maximum and sum, another that writes the gradient
over the logits. The second goes backwards, so that it meets first what the caches still hold of the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nvfp4_kernels.triton.arithmetic import ASM, FLT_MAX


@triton.jit
def exp(v):
    """e^v for v <= 0, to |v| 2^-23 + 2^-21 relative, 0 below 2^-126: two instructions; tl.exp takes more, for subnormals."""
    if ASM:
        e = tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, t; }",
            "=f,f", [v], tl.float32, True, 1,
        )  # fmt: skip
    else:
        e = tl.exp(v)
    return e


@triton.jit
def load(x, at, V):
    """Logits of a row as fp32; -inf beyond it."""
    return tl.load(x + at, at < V, float("-inf")).to(tl.float32)


@triton.jit
def store(x, at, V, probabilities, target, kept):
    """The gradient: probabilities, less `kept` at the target."""
    grad = probabilities - tl.where(at == target, kept, 0.0)
    tl.store(x + at, grad.to(x.dtype.element_ty), at < V, eviction_policy="evict_first")


@triton.jit
def cross_entropy_kernel(
    logits, targets, keep, losses, V,
    GRADIENT: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """logits [rows, V], contiguous: with GRADIENT replaced by (softmax - one hot) * keep; losses fp32 [rows]: -log softmax
    of the target, times keep. targets int64, keep bool [rows]. Of a target outside of [0, V) the loss is NaN.

    Every lane reads WIDTH neighbouring logits twice before it computes (enough reads under way for the memory's speed), and
    has a maximum and a sum of its own until the row's end. The maximum starts at a finite number, so that -inf less it is
    never NaN; NaN and inf in the row reach the sum, and so the loss.
    """
    BLOCK: tl.constexpr = LANES * WIDTH
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * V
    target = tl.load(targets + row)
    kept = tl.load(keep + row).to(tl.float32)
    there = (target >= 0) & (target < V)
    target = tl.where(there, target, 0).to(tl.int32)  # comparisons of 64 bits take more instructions
    chosen = tl.where(there, tl.load(x + target).to(tl.float32), float("nan"))
    column = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    pairs = tl.cdiv(V, 2 * BLOCK)

    largest, total = tl.full((LANES,), -FLT_MAX, tl.float32), tl.zeros((LANES,), tl.float32)
    for i in range(pairs):
        at = 2 * i * BLOCK + column
        a, b = load(x, at, V), load(x, at + BLOCK, V)
        new = tl.maximum(largest, tl.max(tl.maximum(a, b), 1))
        total = total * exp(largest - new) + tl.sum(exp(a - new[:, None]) + exp(b - new[:, None]), 1)
        largest = new
    top = tl.max(largest, 0)
    total = tl.sum(total * exp(largest - top), 0)
    tl.store(losses + row, (tl.log(total) - (chosen - top)) * kept)

    if GRADIENT:
        scale = kept / total
        for i in range(pairs):
            at = 2 * (pairs - 1 - i) * BLOCK + column
            a, b = load(x, at, V), load(x, at + BLOCK, V)
            store(x, at, V, exp(a - top) * scale, target, kept)
            store(x, at + BLOCK, V, exp(b - top) * scale, target, kept)
