"""What this machine does at most, measured, and the least time that a training step takes under it.

The floor takes each part of a step at its ceiling: the GEMMs' FLOPs at the rate of a large product, attention's at that of
the fastest kernel, everything else at the rate of a copy, each tensor read and written once. Work that no design avoids; a
step that overlaps parts could still be shorter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nvfp4_train.config.schema import Config, ModelConfig
from nvfp4_train.model.flops import block_flops_per_token, linear_layers, linear_parameters, parameter_count
from nvfp4_train.precision.recipe import phases_of, plan_for

REPEATS = 10


@dataclass(frozen=True)
class Ceilings:
    """Of one device. Rates a second; None for what it doesn't have."""

    copy: float  # bytes read and written
    bf16: float  # FLOPs of a large product with fp32 sums
    fp8: float | None  # the same in E4M3, one scale a tensor
    attention: float  # FLOPs (backward twice the forward) of causal attention, forward and backward

    def describe(self) -> str:
        """One line for people."""
        fp8 = "" if self.fp8 is None else f", FP8 {self.fp8 / 1e12:.4g}"
        return (
            f"copy {self.copy / 1e12:.4g} TB/s read and written; GEMM BF16 {self.bf16 / 1e12:.4g}{fp8} TFLOP/s; "
            f"attention {self.attention / 1e12:.4g} TFLOP/s"
        )


def measure(device: torch.device, model: ModelConfig, seq_len: int) -> Ceilings:
    """Measure them, attention at the model's heads and `seq_len`; random data, in a few seconds."""
    on_gpu = device.type == "cuda"
    n, size = (8192, 1 << 31) if on_gpu else (512, 1 << 26)
    copy = _copy(device, size)
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    bf16 = 2 * n**3 / seconds(lambda: a @ b.t(), device)
    fp8 = None
    if on_gpu and torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.ones((), device=device)
        left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        product = lambda: torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)  # noqa: E731
        fp8 = 2 * n**3 / seconds(product, device)
    return Ceilings(copy, bf16, fp8, _attention(device, model, seq_len if on_gpu else min(seq_len, 256)))


def _copy(device: torch.device, size: int) -> float:
    """Bytes a second, of so many copied."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)


def _attention(device: torch.device, model: ModelConfig, seq_len: int) -> float:
    """FLOP/s of the fastest of PyTorch's kernels."""
    heads, kv_heads, dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    batch = max(1, 32768 // seq_len) if device.type == "cuda" else 1
    q, k, v, dy = (
        torch.randn(batch, n, seq_len, dim, device=device).bfloat16().requires_grad_()
        for n in (heads, kv_heads, kv_heads, heads)
    )

    def step() -> None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        torch.autograd.grad(y, (q, k, v), dy)

    times = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        if times and backend == SDPBackend.MATH:
            continue  # it holds all scores: only where there is nothing else
        try:
            with sdpa_kernel(backend):
                times.append(seconds(step, device))
        except RuntimeError:  # not for this device
            continue
    return 3 * 2 * seq_len * heads * dim * batch * seq_len / min(times)


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Mean time of a call after warm-up, waited for."""
    for _ in range(3):
        call()
    wait(device)
    begin = time.perf_counter()
    for _ in range(REPEATS):
        call()
    wait(device)
    return (time.perf_counter() - begin) / REPEATS


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def floor(cfg: Config, ceilings: Ceilings) -> dict[str, float]:
    """{kind of work, named as in bench_train.KINDS: least seconds} of a step of one micro-batch without recomputation."""
    model, pattern = cfg.model, cfg.model.pattern
    tokens = cfg.training.micro_batch_size * cfg.training.seq_len
    rates = {"fp8": ceilings.fp8 or ceilings.bf16}
    gemm = 6 * tokens * model.vocab_size * model.hidden_size / ceilings.bf16
    quantized = 0.0
    phase = phases_of(cfg.precision)[0].name
    for layer in linear_layers(model):
        plan = plan_for(cfg.precision, layer.name, layer.block, len(pattern), phase)
        n_out, n_in = layer.out_features, layer.in_features
        name = plan.format if plan.quantized else "bf16"
        gemm += 6 * tokens * n_out * n_in / rates.get(name, ceilings.bf16)
        x, dy, weight = quantize_bytes(name)
        quantized += tokens * (n_in * x + n_out * dy) + n_out * n_in * weight
    mixing = pattern.count("*") * (
        block_flops_per_token("*", model, cfg.training.seq_len) - 2 * linear_parameters("*", model)
    )
    work = {
        "GEMM": gemm,
        "attention": 3 * tokens * mixing / ceilings.attention,
        "scan": tokens * scan_bytes(model) / ceilings.copy,
        "quantize": quantized / ceilings.copy,
        "optimizer": 32 * parameter_count(model) / ceilings.copy,  # norm 4; AdamW reads 16, writes 12
        "elementwise, norms, other": tokens * elementwise_bytes(model) / ceilings.copy,
    }
    return {kind: value for kind, value in work.items() if value}


def quantize_bytes(name: str) -> tuple[float, float, float]:
    """Bytes that quantizing moves: a token and element of a linear's input, of its output's gradient, and a weight a step.

    x's amax comes from its producer. NVFP4: x -> operand, codes (4.5625), later codes -> operand (2.5625); dy: its amax (2),
    two operands (6); weights: amax (4), fp32 -> bf16 operand (6). MXFP4 has no amax. FP8, native: codes both ways.
    """
    return {
        "nvfp4": (7.125, 8, 10),
        "mxfp4": (7.0625, 6, 6),
        "fp8": (4, 4, 6),
        "bf16": (0, 0, 6),  # the weight itself, to bf16
    }[name]


def scan_bytes(model: ModelConfig) -> int:
    """A token, all layers: x, B, C -> y forward; those and dy -> their gradients backward, bf16."""
    inner, channels = _widths(model)
    return model.pattern.count("M") * 2 * (3 * channels + 2 * inner)


def elementwise_bytes(model: ModelConfig) -> int:
    """A token, all layers, bf16: norms and residual additions, convolution, gated norm, squared ReLU, softmax, embedding.

    Forward and backward, in elements: a block's norm with the addition before it 4 + 4 of the width; convolution and SiLU
    2 + 3; gated norm 3 + 5; squared ReLU 2 + 3; final norm and embedding 8 + 4; logits to their gradient 2.
    """
    inner, channels = _widths(model)
    count, width = model.pattern.count, model.hidden_size
    elements = (8 * len(model.pattern) + 12) * width + 2 * model.vocab_size
    elements += count("M") * (5 * channels + 8 * inner) + count("-") * 5 * model.intermediate_size
    return 2 * elements


def _widths(model: ModelConfig) -> tuple[int, int]:
    inner = model.mamba_num_heads * model.mamba_head_dim
    return inner, inner + 2 * model.n_groups * model.ssm_state_size
