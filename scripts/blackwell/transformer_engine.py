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
    both, key = amax(x, SIGNS), CounterKey(1, 2, 3, 4)
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
    draws = stochastic(x, both[0], key)
    text += (
        "\n\nStochastic rounding cannot be compared bit for bit: its bits follow its kernels' tiling. Instead the gain, "
        f"x.q / x.x, of one draw: {', '.join(f'{name} {gain:.5f}' for name, gain in draws.items())}; scales, which are not "
        "drawn, are above."
    )
    if wrong or abs(draws["theirs"] - draws["ours"]) > 1e-3:  # some 10 standard errors of 2 million elements
        raise Failed(text)
    return text


def stochastic(x: torch.Tensor, value: torch.Tensor, key: CounterKey) -> dict[str, float]:
    """Gain x.q / x.x of a stochastic draw q of each side."""
    codes, scales, _ = parts(quantizer(columnwise=False, stochastic_rounding=True)(x), "rowwise", *x.shape)
    ours = quantize_rows_and_columns(x, (value, key), None)[0].plain()
    theirs = type(ours)(codes, scales.contiguous().view(torch.float8_e4m3fn), value, ours.block)
    return {
        name: float((q.dequantize(torch.float64) * x.double()).sum() / x.double().square().sum())
        for name, q in (("ours", ours), ("theirs", theirs))
    }


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
