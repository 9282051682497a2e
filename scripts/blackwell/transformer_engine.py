"""Transformer Engine's NVFP4 against ours: quantizers, and a linear's three products."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from blackwell.report import CUDA, Failed, Skip, table, te_problem
from nvfp4_kernels import SIGNS, CounterKey, amax
from nvfp4_kernels.native.quantize import quantize_rows_and_columns, quantize_square
from nvfp4_kernels.swizzle import unswizzle

from nvfp4_train.config.schema import PrecisionConfig
from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.recipe import OPERANDS, LinearPlan
from nvfp4_train.precision.te import TransformerEngine

# Its transform sums in another order, which may round a bf16 value otherwise (5 of a million of very uneven data).
TRANSFORMED = 1e-4
# Of 16 draws of two million elements: some five standard errors of a gain, more than ten of a share.
DRAWS, GAIN, SHARE = 16, 2.5e-4, 2e-3


def quantizer(**options: bool) -> Any:
    """TE's NVFP4Quantizer, both ways unless told otherwise."""
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    return NVFP4Quantizer(**options)


def parts(theirs: Any, way: str, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [rows, cols/2], scales [rows, cols/16], amax), bytes but for amax, of `way` of a tensor of theirs."""
    codes = getattr(theirs, f"_{way}_data").view(torch.uint8).reshape(rows, cols // 2)
    scales = getattr(theirs, f"_{way}_scale_inv").view(torch.uint8)
    if theirs._with_gemm_swizzled_scales:
        scales = unswizzle(scales.flatten(), rows, cols // 16)
    return codes, scales[:rows, : cols // 16], getattr(theirs, f"_amax_{way}").reshape(())


def quantizers(args: argparse.Namespace) -> str:
    """Transformer Engine's quantizer against ours"""
    if reason := te_problem():
        raise Skip(reason)
    x = torch.randn(1024, 2048, device=CUDA).bfloat16()
    both = amax(x, SIGNS)
    ours = {
        "1x16": (quantize_rows_and_columns(x, (both[0], None), (both[1], None), SIGNS), True),
        "16x16": (quantize_square(x, both[0]), False),
    }
    lines, wrong = [], False
    for name, (sides, rotates) in ours.items():
        options = {"with_rht": rotates, "with_post_rht_amax": rotates, "with_2d_quantization": not rotates}
        theirs = quantizer(**options)(x)
        for way, side in zip(("rowwise", "columnwise"), sides, strict=True):
            transformed = rotates and way == "columnwise"
            allowed = TRANSFORMED if transformed else 0.0
            plain = side.plain()
            codes, scales, value = parts(theirs, way, *side.shape)
            shares = [
                float((got != expected).float().mean())
                for got, expected in ((codes, plain.codes), (scales, plain.scales.view(torch.uint8)))
            ]
            same_amax = bool(value == side.amax)
            wrong |= max(shares) > allowed or not (same_amax or transformed)
            title = f"{name}, {way}{', transformed' if transformed else ''}"
            lines.append([title, *(f"{s:.1e}" for s in shares), same_amax, f"{allowed:g}"])
    text = table(["what", "bytes of codes that differ", "of scales", "amax equal", "allowed"], lines)
    draws = stochastic(x, both[0])
    rows = [[side, f"{gain:.5f}", f"{share:.4f}"] for side, (gain, share) in draws.items()]
    text += (
        "\n\nStochastic rounding cannot be compared bit for bit: its bits follow its kernels' tiling. Instead, on average "
        f"of {DRAWS} draws:\n\n"
        + table(["whose", "gain x.q / x.x", "bytes of codes unlike the draw before"], rows)
    )
    off = [abs(a - b) for a, b in zip(*draws.values(), strict=True)]
    if wrong or not (off[0] < GAIN and off[1] < SHARE):
        raise Failed(text)
    return text


def stochastic(x: torch.Tensor, value: torch.Tensor) -> dict[str, list[float]]:
    """Of the stochastic draws q of each side, on average: gain x.q / x.x, share of bytes that differ from the last draw."""
    draw, square = quantizer(columnwise=False, stochastic_rounding=True), x.double().square().sum()
    found, last = {"ours": [0.0, 0.0], "theirs": [0.0, 0.0]}, {}
    for step in range(DRAWS + 1):
        ours = quantize_rows_and_columns(x, (value, CounterKey(1, step, 3, 4)), None)[0].plain()
        codes, scales, _ = parts(draw(x), "rowwise", *x.shape)
        theirs = type(ours)(codes, scales.contiguous().view(torch.float8_e4m3fn), value, ours.block)
        for side, q in (("ours", ours), ("theirs", theirs)):
            if step:
                found[side][0] += float((q.dequantize(torch.float64) * x.double()).sum() / square) / DRAWS
                found[side][1] += float((q.codes != last[side]).double().mean()) / DRAWS
            last[side] = q.codes.clone()
    return found


def linear_layer(args: argparse.Namespace) -> str:
    """A linear's output and gradients by Transformer Engine against ours, all rounded to nearest"""
    if reason := te_problem():
        raise Skip(reason)
    engine = TransformerEngine(PrecisionConfig(name="nvfp4", backend="te", stochastic_gradients=False))
    plan = LinearPlan(frozenset(OPERANDS), stochastic_gradients=False)
    x, dy = (torch.randn(1024, n, device=CUDA).bfloat16() for n in (2048, 4096))
    weight = torch.randn(4096, 2048, device=CUDA).bfloat16().float() / 64
    results = []
    for by in (None, engine.linear(2048, 4096)):
        linear = Linear(2048, 4096, device="cuda")
        linear.weight.data.copy_(weight)
        linear.engine = by
        linear.set_plan(plan, torch.tensor([1, 2, 3, 4], device=CUDA))
        linear.prepare_weight()
        leaf = x.clone().requires_grad_()
        y = linear(leaf)
        y.backward(dy)
        results.append((y.detach(), leaf.grad, linear.weight.grad))
    lines, limit = [], 2**-7  # theirs are bf16, all three
    for name, ours, theirs in zip(("y, fprop", "dx, dgrad", "dW, wgrad"), *results, strict=True):
        lines.append([name, float((theirs.float() - ours.float()).norm() / ours.float().norm())])
    text = table(
        ["2048 -> 4096, 1024 tokens", "relative difference"], [[n, f"{error:.1e}"] for n, error in lines]
    )
    if not all(error < limit for _, error in lines):
        raise Failed(f"{text}\n\nAt most {limit:g} is allowed.")
    return text


CHECKS = [quantizers, linear_layer]
