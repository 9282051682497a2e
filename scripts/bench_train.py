"""Speed and memory of training steps, one arm after the other on the same random tokens.

    python scripts/bench_train.py +experiment=1b_hybrid training.micro_batch_size=4 [--arms bf16 nvfp4] [--steps 10]

An arm is an option of the group `precision`, with more words after it where it differs in more:
--arms bf16 "bf16 training.deterministic=false" "nvfp4 training.recompute=block". Each runs in a process of its own, with one
micro-batch a step, the whole optimizer step included, and measures the machine's ceilings after it; its row is printed as
soon as it is there. The first arm is what the others are compared with. --profile adds where each arm's time goes, by kind
of kernel, beside the least time that kind could take (ceilings.py). --out DIR keeps the Markdown, and with --profile the
kernels one by one. MFU counts Megatron-LM's FLOPs of a hybrid model (model/flops.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch is imported, as the entry points do

import torch
from ceilings import floor, wait
from ceilings import measure as measure_ceilings

from nvfp4_train.atomic import write_text
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

# Kinds of kernels by what stands in their names, the first that fits; in lower case. torch.compile names its own after all
# that they fuse ("triton_poi_fused__to_copy_add"): those are OTHER whatever they contain.
OTHER = "elementwise, norms, other"
KINDS = {
    OTHER: ("triton_poi", "triton_red", "triton_per", "norm_kernel", "norm_backward_kernel"),
    "scan": ("scan_", "chunk", "ssd", "_state", "bmm_"),
    "attention": ("flash", "fmha", "attention", "cudnn_generated", "cudnn::fusion", "sdpa"),
    "convolution": ("conv",),
    "quantize": ("quantize", "amax_", "hadamard", "operand", "expand", "nvfp4", "scale_product"),
    "GEMM": (
        "gemm",
        "cutlass",
        "nvjet",
        "cublas",
        "xmma",
        "splitk",
        "::mm",
        "::addmm",
        "::bmm",
        "mkldnn",
        "triton_tem",
    ),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "softmax, loss": ("softmax", "nll", "cross_entropy"),
    "copies": ("copy", "memcpy", "memset", "::cat", "fill"),
}
SAMPLES = 3  # of `--steps` steps each; the median counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", default=["bf16", "nvfp4"])
    parser.add_argument("--steps", type=int, default=10, help=f"a sample, of which there are {SAMPLES}")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for the Markdown")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the arm of a child process
    args, words = parser.parse_known_args()
    if args.one is not None:
        try:
            print(json.dumps(measure(configuration(words, args.one), args.steps, args.warmup, args.profile)))
        except UserError as error:
            print(f"Error: {error}", file=sys.stderr)
            return error.exit_code
        return 0
    results, failure = {}, 0
    for arm in args.arms:
        options = ["--one", arm, "--steps", str(args.steps), "--warmup", str(args.warmup)]
        options += ["--profile"] if args.profile else []
        begin = time.monotonic()
        command = [sys.executable, __file__, *words, *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print(f"{arm}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        if done.returncode:  # the others' rows are worth having
            failure = failure or done.returncode
            continue
        results[arm] = json.loads(done.stdout.splitlines()[-1])
        print(("" if len(results) > 1 else f"{TABLE}\n") + row(arm, results), flush=True)
        if args.out:
            keep(args.out, results)
    if results:
        print(f"\n{report(results)}", flush=True)
    return failure


def keep(out: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write what is there so far."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "bench_train.md", report(results) + "\n")
    for i, (arm, r) in enumerate(results.items()):
        lines = [f"{ms:9.3f} ms {count:6} x  {kind_of(name):26} {name}" for name, ms, count in r["kernels"]]
        write_text(out / f"kernels_{i}_{arm.split()[0]}.txt", "\n".join([arm, *lines]) + "\n")


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
        "kernels": choose_kernels(model, cfg.training.kernels, device, cfg.training.deterministic),
        "recomputes": apply_recompute(model, cfg.training.recompute, cfg.training.recompute_budget),
        # As in a run: Transformer Engine's layers stand between the compiled parts.
        "compile": compile_blocks(model, cfg.training.compile, device, whole=precision.backend != "te"),
    }
    batches = random_batches(cfg, device)
    run = Steps(state, precision, batches, cfg)
    begin = time.perf_counter()
    run.take(warmup)
    lines["warm-up"] = f"{time.perf_counter() - begin:.1f} s for {warmup} steps, compilation included"
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    loss, samples = run.take(steps), []
    peak_bytes = _peak_memory(device)  # before the profiler
    for _ in range(SAMPLES):
        wait(device)
        begin = time.perf_counter()
        loss = run.take(steps)
        samples.append((time.perf_counter() - begin) / steps)
    seconds = sorted(samples)[SAMPLES // 2]
    kernels = run.kernels() if profile else []
    ceilings = measure_ceilings(device, cfg.model, cfg.training.seq_len)
    least = floor(cfg, ceilings)
    tokens = cfg.training.micro_batch_size * cfg.training.seq_len
    tflops = tokens / seconds * flops_per_token(cfg.model, cfg.training.seq_len) / 1e12
    peak, mfu_line = peaks.peak(device, cfg.logging.peak_tflops)
    return {
        "model": f"{cfg.model.name} {cfg.model.pattern}: {parameter_count(cfg.model):,} parameters",
        "step": f"{cfg.training.micro_batch_size} sequences of {cfg.training.seq_len} tokens, one micro-batch, fp32 master "
        "weights, AdamW and clipping included",
        "device": machine.describe(device),
        "torch": torch.__version__,
        "mfu_is": mfu_line,
        "lines": lines | {"ceilings": ceilings.describe()},
        "linears": [sum(bool(m.plan.quantized) for m in precision.linears.values()), len(precision.linears)],
        "seconds": seconds,
        "spread": (max(samples) - min(samples)) / seconds,
        "tokens_per_second": tokens / seconds,
        "floor": least,
        "floor_tokens_per_second": tokens / sum(least.values()),
        "tflops": tflops,
        "mfu": None if peak is None else tflops / peak,
        "peak_gib": peak_bytes / 2**30,
        "loss": loss,
        "kernels": kernels,
    }


def random_batches(cfg: Config, device: torch.device) -> list[Batch]:
    """Four batches of random tokens, the same for every arm."""
    gen = torch.Generator().manual_seed(0)
    shape = (cfg.training.micro_batch_size, cfg.training.seq_len + 1)
    windows = [torch.randint(cfg.model.vocab_size, shape, generator=gen).to(device) for _ in range(4)]
    return [Batch(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in windows]


class Steps:
    """Training steps on the batches in turn."""

    def __init__(
        self, state: TrainState, precision: PrecisionRuntime, batches: list[Batch], cfg: Config
    ) -> None:
        self.state, self.precision, self.batches = state, precision, batches
        self.size, self.taken = cfg.training.micro_batch_size, 0

    def take(self, n: int) -> float:
        """n steps one after the other, as a run takes them: only the last is waited for. Its loss."""
        loss = torch.nan
        for _ in range(n):
            batch = self.batches[self.taken % len(self.batches)]
            loss = train_step(self.state, self.precision, batch, self.size, 1e-5)["loss"]
            self.taken += 1
        return float(loss)

    def kernels(self) -> list[tuple[str, float, int]]:
        """(name, milliseconds a step, calls) of every kernel (of every operator, on a CPU), most first."""
        on_gpu = self.batches[0].tokens.is_cuda
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as profiler:
            self.take(1)
        times = [
            (e.key, (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e3, e.count)
            for e in profiler.key_averages()
        ]
        return sorted((t for t in times if t[1] > 0), key=lambda t: -t[1])


def _peak_memory(device: torch.device) -> int:
    """Bytes: of a GPU the most allocated in a measured step, of a CPU the most that was ever resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def kind_of(name: str) -> str:
    """The kind of the kernel or operator called so."""
    name = name.lower()
    return next((kind for kind, words in KINDS.items() if any(w in name for w in words)), OTHER)


COLUMNS = (
    "arm", "linears quantized", "tokens/s", "of the first", "spread", "floor, tokens/s", "of the floor",
    "TFLOP/s", "MFU", "peak GiB", "of the first",
)  # fmt: skip
TABLE = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"


def row(arm: str, results: dict[str, dict[str, Any]]) -> str:
    """An arm's line of the table."""
    r, first = results[arm], next(iter(results.values()))
    rate, least = r["tokens_per_second"], r["floor_tokens_per_second"]
    mfu = "" if r["mfu"] is None else f"{r['mfu']:.3f}"
    return (
        f"| {arm} | {r['linears'][0]} of {r['linears'][1]} | {rate:,.0f} | {rate / first['tokens_per_second']:.3f} | "
        f"{100 * r['spread']:.1f} % | {least:,.0f} | {100 * rate / least:.0f} % | {r['tflops']:.4g} | {mfu} | "
        f"{r['peak_gib']:.2f} | {r['peak_gib'] / first['peak_gib']:.3f} |"
    )


def report(results: dict[str, dict[str, Any]]) -> str:
    """The table in Markdown, with what it was measured on above and the profiles below."""
    first = next(iter(results.values()))
    lines = [f"- {key}: {first[key]}" for key in ("model", "step", "device", "torch")]
    lines += [f"- MFU: {first['mfu_is']}", "", TABLE, *(row(arm, results) for arm in results)]
    for arm, r in results.items():
        lines += ["", f"### {arm}", "", *(f"- {key}: {text}" for key, text in r["lines"].items())]
        lines += ["", *profile(r)]
    return "\n".join(lines)


def profile(result: dict[str, Any]) -> list[str]:
    """Where the time of a step goes, in Markdown; the floor's parts alone where no kernels were recorded."""
    spent: dict[str, float] = {}
    for name, ms, _ in result["kernels"]:
        spent[kind_of(name)] = spent.get(kind_of(name), 0.0) + ms
    least = {kind: 1e3 * seconds for kind, seconds in result["floor"].items()}
    whole = 1e3 * result["seconds"]
    lines = ["| kind of kernel | ms a step | of the step | floor, ms |", "| --- | --- | --- | --- |"]
    for kind in sorted({*spent, *least}, key=lambda k: -spent.get(k, 0.0)):
        took = (
            f"{spent.get(kind, 0.0):.1f} | {100 * spent.get(kind, 0.0) / whole:.1f} %" if spent else "- | -"
        )
        lines.append(
            f"| {kind} | {took} | {least[kind]:.1f} |" if kind in least else f"| {kind} | {took} | |"
        )
    busy = f"{sum(spent.values()):.1f} | {100 * sum(spent.values()) / whole:.1f} %" if spent else "- | -"
    lines.append(f"| together | {busy} | {sum(least.values()):.1f} |")
    lines.append(f"| the step | {whole:.1f} | | |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
