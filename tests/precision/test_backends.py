import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from nvfp4_kernels.native import fp8, quantize
from nvfp4_kernels.native import gemm as native

from nvfp4_train.config.load import compose_config
from nvfp4_train.config.schema import PrecisionConfig
from nvfp4_train.config.validate import validate
from nvfp4_train.errors import ConfigError
from nvfp4_train.precision.backends import (
    CHIPS,
    FORWARD_OPERANDS,
    FP8_CHIP,
    FP8_CUDA,
    ROUNDING_CHIPS,
    check_plan,
    choose,
)
from nvfp4_train.precision.gpu import Machine
from nvfp4_train.precision.recipe import OPERANDS, LinearPlan
from tests.tiny import TINY_MODEL

WORDS = [
    *TINY_MODEL,
    "training.max_tokens=1e5",
    "training.global_batch_size=4",
    "training.micro_batch_size=4",
    "optimizer.lr=1e-3",
    "schedule.warmup_tokens=1e3",
    "checkpoint.every_steps=10",
]
TE = {"te": "2.20.2", "te_core": "2.20.2", "te_torch": "2.20.2"}
LAPTOP = Machine(triton="3.7.1")
HOPPER = Machine("NVIDIA H200", (9, 0), (13, 0), "3.6.0", **TE)
BLACKWELL = Machine("NVIDIA B200", (10, 0), (13, 0), "3.7.1", **TE)
WORKSTATION = Machine("NVIDIA RTX PRO 6000", (12, 0), (13, 0), "3.7.1")
OLD_CUDA = Machine("NVIDIA B200", (10, 0), (12, 6), "3.6.0")


def precision(name="nvfp4", backend="auto", **keys):
    return PrecisionConfig(name=name, backend=backend, **keys)


@pytest.mark.parametrize(
    ("cfg", "machine", "backend", "why"),
    [
        (precision(), LAPTOP, "emulated", "no FP4 tensor cores here"),
        (precision(), HOPPER, "emulated", "no FP4 tensor cores here"),
        (precision(), BLACKWELL, "triton", "NVIDIA B200"),
        (precision(backend="emulated"), BLACKWELL, "emulated", "as configured"),
        (precision(backend="triton"), BLACKWELL, "triton", "as configured"),
        (precision(backend="cublas"), BLACKWELL, "cublas", "as configured"),
        (precision(backend="te"), BLACKWELL, "te", "as configured"),
        (precision("fp8", "te"), HOPPER, "te", "as configured"),
        (precision("fp8"), HOPPER, "cublas", "NVIDIA H200"),
        (precision("fp8", "cublas"), HOPPER, "cublas", "as configured"),
        (precision("fp8", "emulated"), HOPPER, "emulated", "as configured"),
        (precision("fp8"), BLACKWELL, "emulated", "auto: block-scaled FP8 products are Hopper's"),
        (precision("fp8"), replace(HOPPER, cuda=(12, 8)), "emulated", "from CUDA 12.9 on"),
        (precision("fp8"), replace(HOPPER, processes=2), "emulated", "2 were started"),
        (precision("mxfp4"), HOPPER, "emulated", "auto"),
        (precision(hardware_rounding=True), BLACKWELL, "triton", "NVIDIA B200"),
        (precision(backend="cublas", hardware_rounding=True), BLACKWELL, "cublas", "as configured"),
        (precision("bf16"), BLACKWELL, "torch", "nothing is quantized"),
    ],
)
def test_the_backend_follows_from_what_is_asked_and_what_is_there(cfg, machine, backend, why):
    chosen, reason = choose(cfg, machine)
    assert chosen == backend
    assert why in reason


@pytest.mark.parametrize(
    ("cfg", "machine", "message"),
    [
        (precision(backend="triton"), LAPTOP, "triton can't run here: .*no CUDA GPU.*backend=emulated"),
        (
            precision(backend="cublas"),
            HOPPER,
            "cublas can't run here: .*H200, compute capability 9.0.*backend=emulated",
        ),
        (
            precision(backend="cublas"),
            OLD_CUDA,
            "from CUDA 12.8 on, and this torch has CUDA 12.6; .*emulated or triton",
        ),
        (
            precision(backend="te"),
            HOPPER,
            'says: "Device compute capability 10.0 or higher required for NVFP4 execution."; use precision.backend=emulated',
        ),
        (precision(backend="te"), LAPTOP, "Transformer Engine is not installed .*docs/operations.md"),
        (precision(backend="te"), Machine(te="2.20.2"), "not its library"),
        (precision(backend="te"), Machine(te="2.20.2", te_core="2.20.2"), "torch part.*built from source"),
        (
            precision(backend="te"),
            Machine(te="2.20.2", te_core="2.19.0", te_torch="2.20.2"),
            "2.19.0, 2.20.2",
        ),
        (precision(backend="te"), Machine(**TE), "needs CUDA, and no CUDA GPU"),
        (precision("fp8", "te"), Machine("A100", (8, 0), (13, 0), None, **TE), "compute capability 9.0"),
        (
            precision("fp8", "te", te_recipe="current"),
            Machine("A100", (8, 0), (13, 0), None, **TE),
            "8.9 or higher",
        ),
        (
            precision("fp8", "triton"),
            BLACKWELL,
            "does not do precision=fp8; use precision.backend=emulated or te",
        ),
        (
            precision("fp8", "cublas"),
            BLACKWELL,
            r"cublas can't run here: .* Hopper's .*B200.*backend=emulated or te",
        ),
        (
            precision("fp8", "cublas"),
            LAPTOP,
            "cublas can't run here: .*no CUDA GPU is found; .*backend=emulated",
        ),
        (
            precision("fp8", "cublas"),
            replace(HOPPER, processes=2),
            "in one process so far.* 2 were started; .*backend=emulated",
        ),
        (
            precision(backend="triton"),
            replace(BLACKWELL, processes=8),
            "in one process so far.* 8 were started",
        ),
        (precision("fp8", "te"), replace(HOPPER, processes=2), "in one process so far.* 2 were started"),
        (precision("bf16", "te"), BLACKWELL, "precision=bf16 quantizes nothing"),
        (
            precision(hardware_rounding=True),
            LAPTOP,
            r"hardware_rounding=true: .*emulated runs here \(auto: no FP4 tensor cores here\); leave it at false",
        ),
        (precision(backend="te", hardware_rounding=True), BLACKWELL, r"te runs here \(as configured\)"),
        (
            precision(backend="triton", hardware_rounding=True),
            WORKSTATION,
            r"cvt\.rs is in GPUs of compute capability 10\.0 or 10\.3, and this is a .*12\.0; leave it at false",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason_and_what_can(cfg, machine, message):
    with pytest.raises(ConfigError, match=message):
        choose(cfg, machine)


HALF_A_GEMM = LinearPlan(frozenset(OPERANDS) - {"wgrad.grad"})
WITHOUT_WGRAD = LinearPlan(frozenset(o for o in OPERANDS if not o.startswith("wgrad")))


@pytest.mark.parametrize(
    ("cfg", "plan", "message"),
    [
        (precision(backend="triton"), HALF_A_GEMM, "layers.3.up.*leave one of wgrad's in bf16"),
        (precision(backend="te"), WITHOUT_WGRAD, "all six operands of a layer, or the two of fprop"),
        (precision("fp8", "te", te_recipe="delayed"), LinearPlan(FORWARD_OPERANDS), "delayed scaling"),
        (precision("fp8", "cublas"), HALF_A_GEMM, "two FP8 operands, .*leave one of wgrad's in bf16"),
    ],
)
def test_rules_that_a_backend_cannot_follow_are_refused(cfg, plan, message):
    with pytest.raises(ConfigError, match=message):
        check_plan(cfg, "layers.3.up", plan)


@pytest.mark.parametrize("plan", [LinearPlan(), LinearPlan(frozenset(OPERANDS)), WITHOUT_WGRAD])
def test_whole_gemms_can_be_native(plan):
    check_plan(precision(backend="triton"), "layers.3.up", plan)


def test_auto_stays_emulated_where_the_rules_leave_half_a_gemm():
    backend, why = choose(precision(), BLACKWELL, [LinearPlan(), HALF_A_GEMM])
    assert backend == "emulated"
    assert "wgrad" in why


def test_auto_stays_emulated_where_weights_are_sharded():
    backend, why = choose(precision(), replace(BLACKWELL, processes=8))
    assert backend == "emulated"
    assert "8 were started" in why


def test_hardware_rounding_is_never_left_out_silently():
    with pytest.raises(ConfigError, match=r"emulated runs here \(auto: .*wgrad"):
        choose(precision(hardware_rounding=True), BLACKWELL, [HALF_A_GEMM])


def test_both_lists_of_chips_are_one():
    assert (CHIPS, ROUNDING_CHIPS) == (native.CHIPS, quantize.ROUNDING_CHIPS)
    assert (FP8_CHIP, FP8_CUDA) == (fp8.CHIP, fp8.CUDA)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        *(
            (f"precision.backend={b}", rf"{b} can't run here: .*use precision\.backend=emulated")
            for b in ("te", "triton", "cublas")
        ),
        ("precision.hardware_rounding=true", "emulated runs here .*leave it at false"),
    ],
)
def test_pretrain_refuses_before_it_imports_torch(word, message, tmp_path):
    code = (
        "import sys\nfrom nvfp4_train import cli, pretrain\n"
        "code = cli.exit_code(pretrain.main)\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    words = [*WORDS, "device=cpu", f"run_dir={tmp_path}/run", word]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=os.environ, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert re.search(message, done.stderr)
    assert not (tmp_path / "run").exists()


def test_delayed_scaling_and_recomputed_blocks_exclude_each_other(tmp_path):
    words = [
        *WORDS,
        f"run_dir={tmp_path}",
        "precision=fp8",
        "precision.backend=te",
        "precision.te_recipe=delayed",
        "training.recompute=block",
    ]
    with pytest.raises(ConfigError, match=r"training\.recompute=block would count maxima twice"):
        validate(compose_config(words))
