from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from nvfp4_train import units
from nvfp4_train.config.layout import layout_of
from nvfp4_train.config.load import CONFIG_DIR, compose_config, option_names
from nvfp4_train.config.schema import Config, PhaseConfig, RuleConfig
from nvfp4_train.training import dry_run
from nvfp4_train.training.memory import estimate

# Parameters and GFLOP a token at 8192 tokens, as published or computed elsewhere for the released models.
PUBLISHED = {
    "8b_hybrid": (8_100_852_736, 46.7),
    "12b_hybrid": (12_310_001_152, 72.1),
    "56b_hybrid": (56_324_350_464, 340.2),
}


def rows(text: str) -> dict[str, str]:
    """{name: value} of all tables; a name that comes twice has its last value."""
    return dict(re.findall(r"^  (\S.*?)  +(\S.*)$", text, re.MULTILINE))


@pytest.mark.parametrize("experiment", option_names("experiment"))
def test_every_experiment_has_its_published_size(experiment):
    table = rows(dry_run.describe(compose_config([f"+experiment={experiment}"])))
    if experiment in PUBLISHED:
        gflops, _, unit = table["arithmetic"].partition(" ")
        assert (table["parameters"], round(float(gflops), 1)) == (
            f"{PUBLISHED[experiment][0]:,}",
            PUBLISHED[experiment][1],
        )
        assert unit.startswith("GFLOP a token at 8192 tokens")
    # What the model's YAML says of itself: "8,100,852,736 parameters", "344.3 M parameters", "0.988 B".
    comment = (CONFIG_DIR / "model" / f"{experiment}.yaml").read_text()
    said, unit = re.search(r"([\d.,]+)(?: ([MB]))? parameters", comment.replace("\n# ", " ")).groups()
    parameters = int(table["parameters"].replace(",", ""))
    scaled = parameters / {"M": 1e6, "B": 1e9, None: 1}[unit]
    digits = len(said.partition(".")[2])
    assert round(scaled, digits) == float(said.replace(",", ""))


def test_the_plan_of_12b():
    text = dry_run.describe(compose_config(["+experiment=12b_hybrid"]))
    table = rows(text)
    assert table["model"].startswith("62 blocks: 28 Mamba-2, 6 attention, 28 MLP")
    assert table["parameters"] == "12,310,001,152"
    assert table["arithmetic"].startswith("72.10 GFLOP a token at 8192")
    assert table["step"].startswith("6,029,312 tokens")
    assert table["run"].startswith("1,658,565 steps, 10.0T tokens")
    assert table["in BF16"] == "blocks 0-1, 54-61"
    assert re.search(r"^82\.8 % of the linear layers", table["in NVFP4"])
    for name, size in {"weights": "45.9", "moments": "91.7", "gradients": "45.9", "operands": "20.4"}.items():
        assert table[name].startswith(f"{size} GiB")
    assert table["peak"].split()[:2] == ["4.50e-04", "8.00B"]
    assert table["anneal"].split()[1] == "8.00T"
    assert "floor" not in table


def test_tells_where_the_staged_schedule_reaches_its_floor():
    staged = ["+experiment=12b_hybrid", "schedule=staged", "schedule.warmup_tokens=0", "schedule.floor=0.01"]
    floor = rows(dry_run.describe(compose_config(staged)))["floor"]
    assert floor.split()[1] == "1.45T"  # 29 stages of 50 B tokens
    shorter = [*staged, "training.max_tokens=1e12"]
    assert rows(dry_run.describe(compose_config(shorter)))["floor"].endswith("never")


@pytest.fixture
def cfg() -> Config:
    cfg = compose_config(["+experiment=quickstart"])
    precision = replace(cfg.precision, first_blocks_bf16=1, last_blocks_bf16=1)
    return replace(cfg, model=replace(cfg.model, pattern="-----"), precision=precision)


def test_share_of_flops_by_phase_and_operand(cfg):
    rules = [
        RuleConfig(phase="tail", operands=["dgrad.*", "wgrad.input"], format="bf16"),
        RuleConfig(phase="end", format="bf16"),
    ]
    phases = [PhaseConfig("main", 0.0), PhaseConfig("tail", 0.8), PhaseConfig("end", 0.9)]
    cfg = replace(cfg, precision=replace(cfg.precision, rules=rules, phases=phases))
    assert dry_run.nvfp4_share(cfg, "main") == pytest.approx(3 / 5)
    assert dry_run.nvfp4_share(cfg, "tail") == pytest.approx(
        3 / 5 / 3
    )  # a GEMM with one bf16 operand is bf16
    assert dry_run.nvfp4_share(cfg, "end") == 0
    main, tail, end = re.split(r"precision from .*\n", dry_run.describe(cfg))[1:]
    assert "blocks 0, 4" in rows(main)["in BF16"]
    assert "blocks 1-3" in rows(tail)["partly quantized"]
    assert "blocks 0-4" in rows(end)["in BF16"]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_baselines_have_no_nvfp4(cfg, precision):
    cfg = replace(cfg, precision=replace(cfg.precision, name=precision))
    assert dry_run.nvfp4_share(cfg, "main") == 0
    text = dry_run.describe(cfg)
    assert "NVFP4" not in text
    assert rows(text)["all"] == precision


def test_tells_what_this_machine_lacks(cfg):
    text = dry_run.describe(replace(cfg, data=replace(cfg.data, source="no/such/folder")))
    assert re.search(r"what this machine lacks for the run\n  data +needs", text)
    assert "lacks" not in dry_run.describe(cfg)


def test_columns_are_aligned_and_lines_fit(cfg):
    for table in dry_run.describe(cfg).split("\n\n"):
        title, *lines = table.splitlines()
        assert not title.startswith(" ")
        assert max(map(len, lines)) <= 130
        assert all(line == line.rstrip() for line in lines)
        starts = {re.match(r"  \S.*?  +", line).end() for line in lines if re.match(r"  \S", line)}
        assert len({min(starts), *starts}) <= 2


def test_shards_and_traffic_of_256_ranks_are_planned_and_checked_against_pytorch():
    words = ["training.global_batch_size=768", "parallel.fsdp=64", "parallel.replicate=4"]
    packed = ["parallel.weight_gather=nvfp4", "parallel.grad_reduce=nvfp4"]
    cfg = compose_config(["+experiment=12b_hybrid", "device=cpu", "dry_run=true", *words, *packed])
    text = dry_run.describe(cfg)
    assert "4 copies of the model, each in 64 shards" in text
    assert f"{12_310_001_152 // 64:,} parameters on rank 0" in text
    assert "28 by columns" in text  # in_proj has 1416 blocks of rows
    assert re.search(r"weights/quantized .* 25\.\d % of BF16's", text)
    assert re.search(r"gradients/quantized .* 28\.\d % of BF16's", text)
    assert re.search(r"weights +734 MiB", text)
    # On a GPU the copies for saving and rewinds lie in the machine's memory.
    assert float(re.search(r"total +(\d+) GiB  and working memory", text)[1]) == pytest.approx(101, abs=2)
    assert estimate(cfg, "cuda", layout_of(cfg)).total / 2**30 == pytest.approx(63, abs=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_plans_for_one():
    words = ["training.global_batch_size=768", "parallel.fsdp=64", "parallel.replicate=4", "device=cuda"]
    cfg = compose_config(["+experiment=12b_hybrid", "dry_run=true", *words])
    text = dry_run.describe(cfg)
    total = estimate(cfg, "cuda", layout_of(cfg)).total
    assert re.search(rf"total +{units.size(total)}  and working memory .*; this machine has no GPU", text)
    assert "for saving and 2 snapshots (recovery.snapshots), in the machine's memory" in text
    assert re.search(r"device +needs  a CUDA device, since device=cuda\n +has    none that torch sees", text)
