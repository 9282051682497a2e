"""Rehearses faults with recovery off and on, and prints the table of docs/results/recovery.md.

    python scripts/fault_scenarios.py [--out runs/faults] [--only NAME,NAME] [key=value ...]

A tiny model trains in NVFP4 for 240 steps. Every scenario is one `faults=[...]`, but for `killed`, where the
process also ends while it rewinds and is started again; `stuck` runs in a process of its own, which recovery off never ends.
Everything goes by the command line; of recovery's settings those differ from their defaults that the short run asks for.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from nvfp4_train import cli, pretrain
from nvfp4_train.training.metrics import MetricsWriter, read_metrics

STEPS, BATCH, LENGTH = 240, 8, 32
SHARED = 120  # steps that all runs have in common: they resume a copy of one run
SETTINGS = f"""
    model=quickstart data=stdlib model.pattern=*- model.hidden_size=32 model.intermediate_size=64 model.num_attention_heads=2
    model.num_key_value_heads=1 model.head_dim=16 model.mamba_num_heads=2 model.mamba_head_dim=16 model.ssm_state_size=15
    model.chunk_size=16 model.vocab_size=384 training.seq_len={LENGTH} training.global_batch_size={BATCH}
    training.micro_batch_size={BATCH} training.max_tokens={STEPS * BATCH * LENGTH} training.log_every=5
    training.validate_every=60 training.validate_tokens=8e3 training.sample_tokens=0 training.compile=off
    optimizer.lr=2e-3 schedule=wsd schedule.warmup_tokens=5e3 checkpoint.every_steps=60 data.valid_fraction=0.1
    recovery=auto recovery.window=40 recovery.snapshot_every=30 recovery.skip_margin=4 recovery.careful_steps=30
    recovery.forget_after=90 recovery.slow_window=80 precision.health_every=50
""".split()


@dataclass(frozen=True)
class Scenario:
    """A row of the table. `recoverable`: whether training can go on without a person."""

    name: str
    what: str
    faults: str
    recoverable: bool = True
    words: tuple[str, ...] = ()


SCENARIOS = [
    Scenario("nan", "NaN in the gradients of one step", "{kind:nan,step:140}"),
    Scenario("nan_6", "NaN in the gradients of 6 steps", "{kind:nan,step:140,steps:6}"),
    Scenario(
        "nan_weight",
        "a weight becomes infinite (bit 30 of a norm)",
        "{kind:bit_flip,step:140,tensor:norm_f*}",
    ),
    Scenario("flip_mlp", "bit 30 of a weight of an MLP flips", "{kind:bit_flip,step:140,tensor:'*up_proj*'}"),
    Scenario(
        "flip_embedding", "bit 29 of an embedding flips", "{kind:bit_flip,step:140,tensor:'emb*',bit:29}"
    ),
    Scenario("gradient", "gradients x 10,000 in one step", "{kind:gradient,step:140,factor:1e4}"),
    Scenario("gradient_8", "gradients x 100 in 8 steps", "{kind:gradient,step:140,steps:8,factor:100}"),
    Scenario("repeated", "a batch of one token, repeated", "{kind:repeated_tokens,step:140}"),
    Scenario("repeated_12", "12 such batches", "{kind:repeated_tokens,step:140,steps:12}"),
    Scenario("random", "a batch of random tokens", "{kind:random_tokens,step:140}"),
    Scenario("random_12", "12 such batches", "{kind:random_tokens,step:140,steps:12}"),
    Scenario("lr", "learning rate x 1000 for 3 steps", "{kind:lr,step:140,steps:3,factor:1e3}"),
    Scenario("lr_100", "learning rate x 100 for 20 steps", "{kind:lr,step:140,steps:20,factor:100}"),
    Scenario("lr_30", "learning rate x 30 for 30 steps", "{kind:lr,step:140,steps:30,factor:30}"),
    Scenario(
        "killed",
        "learning rate x 1000 for 3 steps, and a kill while it rewinds",
        "{kind:lr,step:140,steps:3,factor:1e3}",
    ),
    Scenario("read_error", "a batch can't be read twice", "{kind:read_error,step:140,steps:2}"),
    Scenario("data_gone", "a batch can never be read", "{kind:read_error,step:140,steps:99}", False),
    Scenario(
        "nan_always", "NaN from step 140 on, always", "{kind:nan,step:140,steps:999,repeat:true}", False
    ),
    Scenario(
        "lr_always",
        "learning rate x 1000 from step 140 on, always",
        "{kind:lr,step:140,steps:999,factor:1e3,repeat:true}",
        False,
    ),
    Scenario(
        "stuck",
        "the process hangs in step 140",
        "{kind:stuck,step:140}",
        False,
        ("recovery.hang_seconds=20",),
    ),
]


@dataclass(frozen=True)
class Result:
    """How a run ended. `loss`: held-out, None where it didn't get there; `lost`: steps whose work was thrown away."""

    exit_code: int | None  # None: had to be ended
    loss: float | None
    rewinds: int
    skipped: int
    lost: int
    report: str


def train(run: Path, words: list[str]) -> int:
    """The exit code of pretrain in this process."""
    argv, error = sys.argv, io.StringIO()
    sys.argv = ["pretrain", *SETTINGS, *words, f"run_dir={run}"]
    try:
        quiet = contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO())
        with quiet[0], quiet[1], mock.patch("nvfp4_train.training.run._plot"):  # which takes as long as a run
            code = cli.exit_code(pretrain.main)
    finally:
        sys.argv = argv
    if code == 2:
        sys.exit(error.getvalue())
    return code


def train_elsewhere(run: Path, words: list[str]) -> int | None:
    """The exit code of pretrain in a process of its own, None where it had to be ended after two minutes."""
    command = [sys.executable, "-m", "nvfp4_train.pretrain", *SETTINGS, *words, f"run_dir={run}"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, timeout=120).returncode
    return None


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def rehearse(scenario: Scenario, mode: str, out: Path, overrides: Sequence[str]) -> Result:
    run = out / f"{scenario.name}_{mode}"
    shutil.copytree(out / "shared", run)
    words = [*overrides, f"recovery.name={mode}", *scenario.words]
    words += [f"faults=[{scenario.faults}]"] if scenario.faults else []
    if scenario.name == "stuck":
        code = train_elsewhere(run, words)
    else:
        if scenario.name == "killed":
            with mock.patch.object(MetricsWriter, "rewind", killed):
                train(run, words)
        code = train(run, words)
    return result_of(run, code)


def result_of(run: Path, code: int | None) -> Result:
    records = read_metrics(run / "metrics.jsonl")
    steps = [r for r in records if "event" not in r]
    rewinds = [r for r in records if r.get("event") == "rollback"]
    loss = steps[-1].get("valid/heldout/loss") if code == 0 else None
    skipped = sum(bool(r["skipped"]) for r in steps)
    report = run / "recovery_report.md"
    return Result(
        code,
        loss,
        len(rewinds),
        skipped,
        sum(r["found"] - r["back_to"] for r in rewinds) + skipped,
        report.read_text() if report.exists() else "",
    )


def row(scenario: Scenario, off: Result, on: Result, healthy: float) -> str:
    cells = [
        scenario.what,
        ending(off, healthy),
        person(off, healthy),
        ending(on, healthy),
        person(on, healthy),
    ]
    cells += [str(on.rewinds), str(on.skipped), str(on.lost), verdict(scenario, on, healthy)]
    return f"| {' | '.join(cells)} |"


def ending(result: Result, healthy: float) -> str:
    if result.exit_code is None:
        return "hangs"
    if result.exit_code:
        return f"exit {result.exit_code}"
    return f"{result.loss:.4f} ({100 * (result.loss / healthy - 1):+.2f} %)"


def person(result: Result, healthy: float) -> str:
    """Whether someone has to look after the run: it ended early, or ends worse than it should."""
    return "no" if result.exit_code == 0 and result.loss <= 1.01 * healthy else "yes"


def verdict(scenario: Scenario, on: Result, healthy: float) -> str:
    if scenario.recoverable:
        return "as it should" if person(on, healthy) == "no" else "**not recovered**"
    cause = re.search(r"^(?!#)\S.*$", on.report, re.MULTILINE)
    return (
        f"report: {cause[0].split(';')[0].split(' (')[0]}"
        if on.exit_code == 76 and cause
        else "**no report**"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/faults"), help="a folder that isn't there yet")
    parser.add_argument("--only", default=",".join(scenario.name for scenario in SCENARIOS))
    args, overrides = parser.parse_known_args()
    train(args.out / "shared", [*overrides, f"training.max_steps={SHARED}"])
    healthy = rehearse(Scenario("healthy", "", ""), "auto", args.out, overrides)
    print(
        f"Undisturbed: held-out loss {healthy.loss:.4f}, {healthy.rewinds} rewinds, {healthy.skipped} skipped.\n"
    )
    head = (
        "fault at step 140 of 240",
        "off",
        "person",
        "on",
        "person",
        "rewinds",
        "skipped",
        "steps lost",
        "",
    )
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for scenario in SCENARIOS:
        if scenario.name in args.only.split(","):
            off, on = (rehearse(scenario, mode, args.out, overrides) for mode in ("off", "auto"))
            print(row(scenario, off, on, healthy.loss), flush=True)


if __name__ == "__main__":
    main()
