"""Speed and memory of training steps, one arm after the other on the same random tokens.

    python scripts/bench_train.py +experiment=1b_hybrid training.micro_batch_size=4 [--arms bf16 nvfp4] [--steps 10]

An arm is an option of the group `precision`, with more words after it where it differs in more:
--arms bf16 nvfp4 "nvfp4 training.recompute=block". Each runs in a process of its own, with one micro-batch a step, the whole
optimizer step included. The first arm is what the others are compared with. --profile adds where each arm's time goes, by
kind of kernel. MFU counts Megatron-LM's FLOPs of a hybrid model (model/flops.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch is imported, as the entry points do

import torch

from nvfp4_train import units
from nvfp4_train.config.load import compose_config
from nvfp4_train.config.schema import Config
from nvfp4_train.config.validate import validate
from nvfp4_train.data.batch import Batch
from nvfp4_train.errors import UserError
from nvfp4_train.model.flops import flops_per_token, parameter_count
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.init import initialize_
from nvfp4_train.model.kernels import choose_kernels
from nvfp4_train.model.recompute import apply_recompute
from nvfp4_train.precision import PrecisionRuntime, apply_recipe
from nvfp4_train.training import machine, peaks
from nvfp4_train.training.clipping import build_clipper
from nvfp4_train.training.compilation import compile_blocks
from nvfp4_train.training.detection import SpikeDetector
from nvfp4_train.training.finite import SkipCounter
from nvfp4_train.training.history import History
from nvfp4_train.training.memory import compute_dtype
from nvfp4_train.training.optimizer import build_optimizer
from nvfp4_train.training.recovery import Recovery
from nvfp4_train.training.state import TrainState
from nvfp4_train.training.step import train_step

# Kinds of kernels by what stands in their names, the first that fits; in lower case.
KINDS = {
    "scan": ("chunk", "ssd", "_state", "bmm_"),
    "attention": ("flash", "fmha", "attention", "cudnn_generated", "sdpa"),
    "quantize": ("quantize", "amax", "hadamard", "operand", "nvfp4"),
    "GEMM": ("gemm", "cutlass", "nvjet", "cublas", "xmma", "::mm", "::addmm", "::bmm", "mkldnn"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "softmax, loss": ("softmax", "nll"),
    "copies": ("copy", "memcpy", "memset", "::cat", "fill"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", default=["bf16", "nvfp4"])
    parser.add_argument("--steps", type=int, default=10, help="that are measured")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the arm of a child process
    args, words = parser.parse_known_args()
    if args.one is not None:
        try:
            print(json.dumps(measure(configuration(words, args.one), args.steps, args.warmup, args.profile)))
        except UserError as error:
            print(f"Error: {error}", file=sys.stderr)
            return error.exit_code
        return 0
    results = {}
    for arm in args.arms:
        print(f"{arm} ...", file=sys.stderr, flush=True)
        options = ["--one", arm, "--steps", str(args.steps), "--warmup", str(args.warmup)]
        options += ["--profile"] if args.profile else []
        command = [sys.executable, __file__, *words, *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return done.returncode
        results[arm] = json.loads(done.stdout.splitlines()[-1])
    print(report(results))
    return 0


def configuration(words: list[str], arm: str) -> Config:
    """The configuration of an arm, checked: the command line's words, then the arm's."""
    precision, *more = arm.split()
    cfg = compose_config([*words, f"precision={precision}", *more, "run_dir=unused", "data.source=unused"])
    cfg.training.global_batch_size = cfg.training.micro_batch_size
    validate(cfg)
    return cfg


def measure(cfg: Config, steps: int, warmup: int, profile: bool) -> dict[str, Any]:
    """Run `warmup` + `steps` training steps; speed over the latter, as a dict that JSON holds."""
    device = machine.resolve_device(cfg.device)
    if device.type == "cpu":
        machine.keep_freed_memory()
    model = HybridModel(cfg.model, device, compute_dtype(cfg))
    initialize_(model, cfg.training.seed)
    state = TrainState(
        model,
        build_optimizer(model, cfg.optimizer),
        build_clipper(cfg.clipping, device, sum(1 for _ in model.parameters())),
        SpikeDetector(cfg.recovery, device),
        SkipCounter(device),
        Recovery(cfg.recovery, History()),
        cfg.training.seed,
        None,  # the data: random batches
    )
    precision = apply_recipe(model, cfg.precision, len(cfg.model.pattern), cfg.training.seed)
    lines = {
        "precision": precision.summary(),
        "kernels": choose_kernels(model, cfg.training.kernels, device),
        "recomputes": apply_recompute(model, cfg.training.recompute, cfg.training.recompute_budget),
        "compile": compile_blocks(model, cfg.training.compile, device),
    }
    batches = random_batches(cfg, device)
    for i in range(warmup):
        train_step(state, precision, batches[i % len(batches)], cfg.training.micro_batch_size, 1e-5)
    loss, seconds = _timed(state, precision, batches, cfg, steps, device)
    tokens = cfg.training.micro_batch_size * cfg.training.seq_len
    rate = tokens / seconds
    tflops = rate * flops_per_token(cfg.model, cfg.training.seq_len) / 1e12
    peak, mfu_line = peaks.peak(device, cfg.logging.peak_tflops)
    return {
        "model": f"{cfg.model.name} {cfg.model.pattern}: {parameter_count(cfg.model):,} parameters",
        "step": f"{cfg.training.micro_batch_size} sequences of {cfg.training.seq_len} tokens, one micro-batch",
        "device": machine.describe(device),
        "torch": torch.__version__,
        "mfu_is": mfu_line,
        "lines": lines,
        "linears": [sum(bool(m.plan.quantized) for m in precision.linears.values()), len(precision.linears)],
        "tokens_per_second": rate,
        "tflops": tflops,
        "mfu": None if peak is None else tflops / peak,
        "peak_gib": _peak_memory(device) / 2**30,
        "loss": loss,
        "profile": _profile(state, precision, batches, cfg) if profile else None,
    }


def random_batches(cfg: Config, device: torch.device) -> list[Batch]:
    """Four batches of random tokens, the same for every arm."""
    gen = torch.Generator().manual_seed(0)
    shape = (cfg.training.micro_batch_size, cfg.training.seq_len + 1)
    windows = [torch.randint(cfg.model.vocab_size, shape, generator=gen).to(device) for _ in range(4)]
    return [Batch(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in windows]


def _timed(
    state: TrainState,
    precision: PrecisionRuntime,
    batches: list[Batch],
    cfg: Config,
    steps: int,
    device: torch.device,
) -> tuple[float, float]:
    """Loss of the last step, and the median of the steps' seconds, each waited for."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for i in range(steps):
        begin = time.perf_counter()
        metrics = train_step(state, precision, batches[i % len(batches)], cfg.training.micro_batch_size, 1e-5)
        loss = float(metrics["loss"])
        times.append(time.perf_counter() - begin)
    return loss, sorted(times)[len(times) // 2]


def _peak_memory(device: torch.device) -> int:
    """Bytes: of a GPU the most allocated in a measured step, of a CPU the most that was ever resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _profile(
    state: TrainState, precision: PrecisionRuntime, batches: list[Batch], cfg: Config
) -> dict[str, float]:
    """Seconds a step by kind of kernel (of operator, on a CPU), most first."""
    on_gpu = batches[0].tokens.is_cuda
    kinds = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profiler:
        float(train_step(state, precision, batches[0], cfg.training.micro_batch_size, 1e-5)["loss"])
    seconds: dict[str, float] = {}
    for event in profiler.key_averages():
        micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kind = kind_of(event.key)
        seconds[kind] = seconds.get(kind, 0.0) + micros / 1e6
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def kind_of(name: str) -> str:
    """The kind of the kernel or operator called so."""
    name = name.lower()
    return next(
        (kind for kind, words in KINDS.items() if any(w in name for w in words)), "elementwise, norms, other"
    )


def report(results: dict[str, dict[str, Any]]) -> str:
    """The table, one row an arm, with what it was measured on above and the profiles below."""
    first = next(iter(results.values()))
    head = [("model", first["model"]), ("step", first["step"]), ("device", first["device"])]
    head += [("torch", first["torch"]), ("MFU", first["mfu_is"])]
    lines = [units.table(head), ""]
    lines += [
        "| arm | linears quantized | tokens/s | of the first | TFLOP/s | MFU | peak GiB | of the first |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, r in results.items():
        speed, memory = (r[key] / first[key] for key in ("tokens_per_second", "peak_gib"))
        mfu = "" if r["mfu"] is None else f"{r['mfu']:.3f}"
        lines.append(
            f"| {arm} | {r['linears'][0]} of {r['linears'][1]} | {r['tokens_per_second']:,.0f} | {speed:.2f} | "
            f"{r['tflops']:.4g} | {mfu} | {r['peak_gib']:.2f} | {memory:.2f} |"
        )
    for arm, r in results.items():
        lines += ["", arm, units.table(list(r["lines"].items()))]
        if r["profile"]:
            total = sum(r["profile"].values())
            rows = [
                (kind, f"{1e3 * s:9.2f} ms  {100 * s / total:4.1f} %") for kind, s in r["profile"].items()
            ]
            lines.append(units.table(rows))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
