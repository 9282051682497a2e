"""What sharding does to a run's numbers and traffic, on CPUs over gloo: `python scripts/prove_sharding.py OUT [part ...]`.

Trains quickstart with torchrun (uncompiled, and in micro-batches of 2 sequences, so that up to 4 ranks share a step) and
prints tables in Markdown. Parts, all but the last with sequences of 64 tokens:

    fp32      50 steps in fp32 under 1, 2 and 4 processes: the largest relative difference of the losses
    nvfp4     the same in nvfp4: first losses, where the final ones lie among those of 32 seeds, and seeds in pairs
    resume    25 steps under 4 processes, 25 more from that checkpoint under 4, 2 and 1, beside 50 under 4 without a break
    codes     the 4-bit codes and scales that 4 ranks gather, beside those of the whole weights, new and after 50 steps
    traffic   bytes a rank sends in a step, measured and planned, of each weight_gather and grad_reduce
    quality   held-out loss after `TOKENS` with all traffic in BF16 and in NVFP4
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

TOKENS = float(os.environ.get("TOKENS", "3e5"))
QUICKSTART = [
    "+experiment=quickstart",
    "training.micro_batch_size=2",
    "training.sample_tokens=0",
    "training.validate_every=0",
    "training.compile=off",
]
SHORT = [
    "training.max_steps=50",
    "training.log_every=1",
    "training.validate_tokens=20000",
    "training.seq_len=64",
]
SEEDS = (1234, *range(1, 32))
PACKED = ["parallel.weight_gather=nvfp4", "parallel.grad_reduce=nvfp4"]


def run(out: Path, name: str, ranks: int | None, *words: str, resumed: str | None = None) -> list[dict]:
    """The steps' records of one run; `ranks` None: without torchrun. A folder that is there already is taken as it is.

    `resumed`: the run whose folder this one goes on from.
    """
    folder = out / name
    if not (folder / "plots" / "training.png").exists():
        shutil.rmtree(folder, ignore_errors=True)
        if resumed:
            shutil.copytree(out / resumed, folder, ignore=shutil.ignore_patterns("plots"))
        launcher = [sys.executable, "-m"]
        if ranks is not None:
            launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        subprocess.run(
            [*launcher, "nvfp4_train.pretrain", *QUICKSTART, *words, f"run_dir={folder}"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "loss" in record]


def valid(records: list[dict]) -> float:
    return records[-1]["valid/heldout/loss"]


def head(*names: str) -> None:
    print(f"\n| {' | '.join(names)} |\n|{' --- |' * len(names)}")


def fp32(out: Path) -> None:
    words = ["precision=fp32", *SHORT]
    one = run(out, "fp32_alone", None, *words)
    head("processes", "first loss", "loss of step 50", "largest relative difference of 50 losses")
    for ranks in (None, 1, 2, 4):
        records = run(out, f"fp32_{ranks or 'alone'}", ranks, *words)
        worst = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(records, one, strict=True))
        print(
            f"| {ranks or '1, no torchrun'} | {records[0]['loss']:.7f} | {records[-1]['loss']:.7f} | {worst:.1e} |"
        )


def nvfp4(out: Path) -> None:
    def train(ranks: int | None, seed: int, traffic: list[str]) -> list[dict]:
        name = f"nvfp4_{ranks or 'alone'}_{seed}{'_packed' * bool(traffic)}"
        return run(out, name, ranks, *SHORT, f"training.seed={seed}", *traffic)

    seeds = {seed: valid(train(None, seed, [])) for seed in SEEDS}
    mean, deviation = statistics.mean(seeds.values()), statistics.stdev(seeds.values())
    print(
        f"\nOne process, {len(seeds)} seeds: held-out loss {mean:.4f} +- {deviation:.4f} (standard deviation), ",
        end="",
    )
    print(
        f"{min(seeds.values()):.4f} to {max(seeds.values()):.4f}:",
        *(f"{loss:.4f}" for loss in seeds.values()),
    )
    head(
        "processes",
        "traffic",
        "first loss",
        "loss of step 50",
        "held-out loss",
        "deviations from the seeds' mean",
    )
    for ranks, traffic in ((None, []), (1, []), (2, []), (4, []), (2, PACKED), (4, PACKED)):
        records = train(ranks, SEEDS[0], traffic)
        print(
            f"| {ranks or '1, no torchrun'} | {'nvfp4' if traffic else 'bf16, fp32'} | {records[0]['loss']!r} | "
            f"{records[-1]['loss']:.4f} | {valid(records):.4f} | {(valid(records) - mean) / deviation:+.2f} |"
        )
    head("seed", "one process", "two, traffic in nvfp4", "difference")
    for seed in SEEDS[:9]:
        two = valid(train(2, seed, PACKED))
        print(f"| {seed} | {seeds[seed]:.4f} | {two:.4f} | {two - seeds[seed]:+.4f} |")


def resume(out: Path) -> None:
    head(
        "run",
        "resumed under",
        "largest relative difference of a loss after the break",
        "held-out loss",
        "without a break",
    )
    arms = {"fp32": ["precision=fp32"], "nvfp4": [], "nvfp4, 4-bit traffic": PACKED}
    for arm, words in arms.items():
        name = f"resume_{list(arms).index(arm)}"
        whole = run(out, f"{name}_whole", 4, *SHORT, *words)
        run(out, f"{name}_saved", 4, *SHORT, "training.max_steps=25", *words)
        for ranks in (4, 2, 1):
            records = run(out, f"{name}_at_{ranks}", ranks, *SHORT, *words, resumed=f"{name}_saved")
            pairs = list(zip(records, whole, strict=True))
            assert all(a["loss"] == b["loss"] for a, b in pairs[:25])
            worst = max(abs(a["loss"] / b["loss"] - 1) for a, b in pairs[25:])
            equal = all(a[key] == b[key] for a, b in pairs for key in ("loss", "grad_norm"))
            difference = "0: losses and gradient norms bit-equal" if equal else f"{worst:.1e}"
            print(
                f"| {arm} | {ranks} | {difference} | {valid(records):.4f} | {valid(whole):.4f} |", flush=True
            )


def codes(out: Path) -> None:
    run(out, "nvfp4_4_1234_packed", 4, *SHORT, "training.seed=1234", *PACKED)
    trained = out / "nvfp4_4_1234_packed" / "checkpoints" / "step_00000050"
    head(
        "weights",
        "codes and scales that arrived",
        "bytes that differ from the whole weight's",
        "amax differs",
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    subprocess.run([*launcher, __file__, str(trained), "codes_of_rank"], check=True)


def codes_of_rank(trained: Path) -> None:
    """In one rank of several: gather every layer, compare, print a row of the table on rank 0."""
    import torch
    import torch.distributed as dist
    from nvfp4_kernels import quantize

    from nvfp4_train.config.layout import layout_of, world_size
    from nvfp4_train.config.load import compose_config
    from nvfp4_train.distributed import checkpoint, processes
    from nvfp4_train.distributed.fsdp import ShardedModel
    from nvfp4_train.model.hybrid import HybridModel
    from nvfp4_train.model.init import initialize_
    from nvfp4_train.precision import apply_recipe
    from nvfp4_train.training.memory import compute_dtype

    cfg = compose_config([*QUICKSTART, *PACKED])
    here = processes.start(torch.device("cpu"), layout_of(cfg, world_size()))
    model = HybridModel(cfg.model, "meta", compute_dtype(cfg))
    sharded = ShardedModel(model, here, cfg, torch.device("cpu"))
    initialize_(model, cfg.training.seed)
    apply_recipe(model, cfg.precision, len(cfg.model.pattern), cfg.training.seed, sharded.prepare_weights)
    for name in ("new", "after 50 steps"):
        if name != "new":
            checkpoint.load(checkpoint.open_checkpoint(trained), {"model": dict(model.named_parameters())})
            sharded.prepare_weights()
        # Before a layer is gathered its parameters are shards, each of which can give the whole.
        whole = {id(m): m.weight.full_tensor() for m in model.modules() if hasattr(m, "fprop_weight")}
        layers = size = wrong = amaxes = 0
        for weight in (w for w in sharded._weights if w.coded):
            arrived = weight.payload.new_empty(here.size, weight.payload.numel())
            processes.all_gather(arrived, weight.payload)
            rows, columns = weight.parameter._orig_size
            split = rows * columns // 2 // here.size
            q = quantize(whole[id(weight.linear)].to(torch.bfloat16), (16, 16))
            expected = (q.codes, q.scales.view(torch.uint8)[::16])
            parts = (arrived[:, :split], rows, columns // 2), (arrived[:, split:], rows // 16, columns // 16)
            for part, bytes_ in zip(parts, expected, strict=True):
                wrong += int((weight._join(*part) != bytes_).sum())
                size += bytes_.numel()
            amaxes += int(not torch.equal(weight.amax, q.amax))
            layers += 1
        if dist.get_rank() == 0:
            print(f"| {name} | {layers} layers, {size:,} bytes | {wrong} | {amaxes} |", flush=True)
    here.stop()


def traffic(out: Path) -> None:
    from nvfp4_train.config.layout import layout_of
    from nvfp4_train.config.load import compose_config
    from nvfp4_train.distributed.traffic import plan
    from nvfp4_train.model.hybrid import HybridModel

    head("weight_gather", "grad_reduce", "bytes a step and rank", "measured", "planned")
    short = [*SHORT[1:], "training.max_steps=3"]
    for gather, reduce in (("bf16", "fp32"), ("bf16", "bf16"), ("bf16", "fp8"), ("nvfp4", "nvfp4")):
        words = [f"parallel.weight_gather={gather}", f"parallel.grad_reduce={reduce}"]
        record = run(out, f"traffic_{gather}_{reduce}", 2, *short, *words)[1]
        cfg = compose_config([*QUICKSTART, *words, "parallel.fsdp=2"])
        shapes = {name: tuple(p.shape) for name, p in HybridModel(cfg.model, "meta").named_parameters()}
        for purpose, planned in sorted(plan(shapes, cfg, layout_of(cfg)).items()):
            measured = int(record[f"traffic/{purpose}"])
            print(f"| {gather} | {reduce} | {purpose} | {measured:,} | {planned:,} |")


def quality(out: Path) -> None:
    words = [f"training.max_tokens={TOKENS:g}"]
    arms = {
        "bf16 weights, bf16 gradients": ["parallel.grad_reduce=bf16"],
        "nvfp4 weights, nvfp4 gradients": PACKED,
    }
    head("traffic", "held-out loss", "against BF16")
    base = None
    for i, (name, traffic) in enumerate(arms.items()):
        loss = valid(run(out, f"quality_{i}", 2, *words, *traffic))
        base = base or loss
        print(f"| {name} | {loss:.4f} | {100 * (loss / base - 1):+.2f} % |", flush=True)


PARTS = {
    "fp32": fp32,
    "nvfp4": nvfp4,
    "resume": resume,
    "codes": codes,
    "traffic": traffic,
    "quality": quality,
}

if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    if names == ["codes_of_rank"]:
        codes_of_rank(Path(folder))
    else:
        for part in names or PARTS:
            PARTS[part](Path(folder))
