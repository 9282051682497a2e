"""`precision.backend`: the implementations of the linear layers' GEMMs, and whether this machine can run them.

One that is asked for by name and cannot run is refused, with the reason and what can; none is ever replaced by another.
Torch is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nvfp4_train.config.schema import PrecisionConfig
from nvfp4_train.errors import ConfigError
from nvfp4_train.precision.gpu import Machine, this_machine
from nvfp4_train.precision.recipe import OPERANDS, LinearPlan

CHIPS = ((10, 0), (10, 3), (12, 0))  # with FP4 tensor cores: nvfp4_kernels.native.gemm.CHIPS
FP8_CHIP = (9, 0)  # whose cuBLAS has block-scaled FP8 products: nvfp4_kernels.native.fp8.CHIP
FP8_CUDA = (12, 9)  # from this version on: nvfp4_kernels.native.fp8.CUDA
NATIVE = ("triton", "cublas")
ROUNDING_CHIPS = ((10, 0), (10, 3))  # that have cvt.rs: nvfp4_kernels.native.quantize.ROUNDING_CHIPS
FORWARD_OPERANDS = frozenset(o for o in OPERANDS if o.startswith("fprop"))
_INSTALL = 'docs/operations.md, "Transformer Engine", says how'


@dataclass(frozen=True)
class Backend:
    """One way of multiplying. `problem(precision, machine)`: why it cannot run there, None when it can."""

    name: str
    formats: tuple[str, ...]  # values of precision.name
    text: str  # for the log
    problem: Callable[[PrecisionConfig, Machine], str | None]


def _none(cfg: PrecisionConfig, machine: Machine) -> str | None:
    return None


def _triton(cfg: PrecisionConfig, machine: Machine) -> str | None:
    missing = None if machine.triton else "Triton is not installed (pip install triton)"
    return _fp4_chip(machine) or missing or _sharded(machine)


def _cublas(cfg: PrecisionConfig, machine: Machine) -> str | None:
    fp8 = cfg.name == "fp8"
    if reason := _fp8_chip(machine) if fp8 else _fp4_chip(machine):
        return reason
    first = FP8_CUDA if fp8 else (12, 8)
    if machine.cuda is None or machine.cuda < first:
        there = "no CUDA" if machine.cuda is None else f"CUDA {machine.cuda[0]}.{machine.cuda[1]}"
        what = "FP8 in blocks" if fp8 else "FP4"
        return f"cuBLAS multiplies {what} from CUDA {first[0]}.{first[1]} on, and this torch has {there}"
    return _sharded(machine)


def _sharded(machine: Machine) -> str | None:
    if machine.processes == 1:
        return None
    return f"it computes in one process so far, without sharded weights, and {machine.processes} were started"


def _fp4_chip(machine: Machine) -> str | None:
    if machine.capability in CHIPS:
        return None
    chips = " or ".join(f"{major}.{minor}" for major, minor in CHIPS)
    return f"it needs FP4 tensor cores (compute capability {chips}), and {machine.describe()}"


def _fp8_chip(machine: Machine) -> str | None:
    if machine.capability == FP8_CHIP:
        return None
    return f"block-scaled FP8 products are Hopper's (compute capability 9.0), and {machine.describe()}"


def _te(cfg: PrecisionConfig, machine: Machine) -> str | None:
    if machine.te is None:
        return f"Transformer Engine is not installed ({_INSTALL})"
    if machine.te_core is None:
        return f"of Transformer Engine only the Python part is there, not its library transformer_engine_cu13 ({_INSTALL})"
    if machine.te_torch is None:
        return f"Transformer Engine's torch part, transformer_engine_torch, is missing: it is built from source ({_INSTALL})"
    if len(found := {machine.te, machine.te_core, machine.te_torch}) > 1:
        return f"Transformer Engine's parts have different versions, {', '.join(sorted(found))} ({_INSTALL})"
    if machine.capability is None:
        return f"Transformer Engine needs CUDA, and {machine.describe()}"
    # The sentences of Transformer Engine's own checks (2.20, pytorch/quantization.py).
    if cfg.name == "nvfp4" and machine.capability < (10, 0):
        reason = "Device compute capability 10.0 or higher required for NVFP4 execution."
        return f'{machine.describe()}, and Transformer Engine says: "{reason}"'
    if cfg.name == "fp8" and cfg.te_recipe == "block" and machine.capability < (9, 0):
        reason = "FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA >= 12.9."
        return f'{machine.describe()}, and Transformer Engine says: "{reason}"'
    if cfg.name == "fp8" and machine.capability < (8, 9):
        reason = "Device compute capability 8.9 or higher required for FP8 execution."
        return f'{machine.describe()}, and Transformer Engine says: "{reason}"'
    return _sharded(machine)


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("emulated", ("nvfp4", "mxfp4", "fp8"), "exact bf16 operands, fp32 sums", _none),
        Backend("triton", ("nvfp4",), "FP4 tensor cores, Triton's kernel", _triton),
        Backend("cublas", ("nvfp4", "fp8"), "codes and scales on tensor cores by cuBLAS", _cublas),
        Backend("te", ("nvfp4", "fp8"), "Transformer Engine's linear layers", _te),
    )
}
NAMES = ("auto", *BACKENDS)
AUTO = {"nvfp4": "triton", "fp8": "cublas"}  # the native backend that auto takes


def choose(cfg: PrecisionConfig, machine: Machine, plans: Iterable[LinearPlan] = ()) -> tuple[str, str]:
    """(the backend that runs, why) for layers with `plans` on `machine`; for bf16 and fp32 it is "torch".

    auto takes the format's native backend (`AUTO`) where it can run and the plans allow it, else `emulated`. Raises
    ConfigError for one that cannot run there, and for hardware rounding that the chip or the backend does not have.
    """
    backend, why = _choose(cfg, machine, plans)
    if cfg.hardware_rounding:
        if backend not in NATIVE:
            able = "the native backends (triton, cublas) alone round by cvt.rs"
            raise ConfigError(
                f"precision.hardware_rounding=true: {able}, and {backend} runs here ({why}); leave it at false."
            )
        if machine.capability not in ROUNDING_CHIPS:
            chips = " or ".join(f"{major}.{minor}" for major, minor in ROUNDING_CHIPS)
            raise ConfigError(
                f"precision.hardware_rounding=true: cvt.rs is in GPUs of compute capability {chips}, and "
                f"{machine.describe()}; leave it at false."
            )
    return backend, why


def _choose(cfg: PrecisionConfig, machine: Machine, plans: Iterable[LinearPlan]) -> tuple[str, str]:
    if cfg.backend not in NAMES:
        raise ConfigError(f"precision.backend={cfg.backend} must be one of {', '.join(NAMES)}.")
    able = [b.name for b in BACKENDS.values() if cfg.name in b.formats]
    if not able:
        if cfg.backend not in ("auto", "emulated"):
            raise ConfigError(
                f"precision.backend={cfg.backend}: precision={cfg.name} quantizes nothing; leave it at auto."
            )
        return "torch", "nothing is quantized"
    if cfg.backend == "auto":
        native = AUTO.get(cfg.name)
        if native is None:
            return "emulated", "auto"
        if cfg.name == "nvfp4" and machine.capability not in CHIPS:
            return "emulated", "auto: no FP4 tensor cores here"
        reasons = (BACKENDS[native].problem(cfg, machine), *(plan_problem(native, cfg, p) for p in plans))
        reason = next(filter(None, reasons), None)
        return (native, f"auto: {machine.gpu}") if reason is None else ("emulated", f"auto: {reason}")
    if cfg.backend not in able:
        raise ConfigError(
            f"precision.backend={cfg.backend} does not do precision={cfg.name}; {_alternative(cfg, machine)}."
        )
    if reason := BACKENDS[cfg.backend].problem(cfg, machine):
        raise ConfigError(
            f"precision.backend={cfg.backend} can't run here: {reason}; {_alternative(cfg, machine)}."
        )
    return cfg.backend, "as configured"


def plan_problem(backend: str, cfg: PrecisionConfig, plan: LinearPlan) -> str | None:
    """Why `backend` cannot compute a layer with this plan; None when it can."""
    quantized = plan.quantized
    if backend in (*NATIVE, "te") and (plan.four_over_six != "none" or plan.ms_eden):
        return "precision.four_over_six and precision.backward=ms_eden are emulated alone"
    if backend in NATIVE:
        for gemm in ("fprop", "dgrad", "wgrad"):
            if len([o for o in quantized if o.startswith(gemm)]) == 1:
                return f"tensor cores multiply two {cfg.name.upper()} operands, and the rules leave one of {gemm}'s in bf16"
    if backend == "te" and quantized not in (frozenset(), frozenset(OPERANDS)):
        if quantized != FORWARD_OPERANDS:
            return "Transformer Engine quantizes all six operands of a layer, or the two of fprop, or none"
        if cfg.name == "fp8" and cfg.te_recipe == "delayed":
            return "Transformer Engine's delayed scaling quantizes all six operands of a layer, or none"
    return None


def check_plan(cfg: PrecisionConfig, layer: str, plan: LinearPlan) -> None:
    """Raise ConfigError when the backend asked for cannot compute `layer` with its plan."""
    if reason := plan_problem(cfg.backend, cfg, plan):
        raise ConfigError(
            f"precision.backend={cfg.backend} can't compute {layer} by precision.rules: {reason}; change the rules, or use "
            "precision.backend=emulated."
        )


def check(cfg: PrecisionConfig, device: str) -> None:
    """Raise ConfigError when `precision.backend` or `precision.hardware_rounding` cannot be had on this machine."""
    if cfg.backend not in ("auto", "emulated") or cfg.hardware_rounding:
        choose(cfg, this_machine(device))


def _alternative(cfg: PrecisionConfig, machine: Machine) -> str:
    others = [b for b in BACKENDS.values() if cfg.name in b.formats and b.name != cfg.backend]
    if able := [b.name for b in others if b.problem(cfg, machine) is None]:
        return f"use precision.backend={' or '.join(able)}"
    return "use precision=nvfp4 or precision=bf16"
