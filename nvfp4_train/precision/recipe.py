"""What runs in which format: rules over module name, block, operand and training phase.

A linear layer's step has three GEMMs and six operands (arXiv 2509.25149, figure 5):

    fprop  y  = x W^T      fprop.input   fprop.weight
    dgrad  dx = dy W       dgrad.grad    dgrad.weight
    wgrad  dW = dy^T x     wgrad.grad    wgrad.input
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from nvfp4_train.config.schema import PhaseConfig, PrecisionConfig, RuleConfig
from nvfp4_train.errors import ConfigError

OPERANDS = ("fprop.input", "fprop.weight", "dgrad.grad", "dgrad.weight", "wgrad.grad", "wgrad.input")
QUANTIZED_FORMATS = ("nvfp4", "mxfp4", "fp8")
FORMATS = (*QUANTIZED_FORMATS, "bf16")
FOUR_OVER_SIX = ("none", "weights", "activations", "all")
BACKWARDS = ("standard", "ms_eden")
MAIN_PHASE = PhaseConfig(name="main", start=0.0)


@dataclass(frozen=True)
class LinearPlan:
    """How one linear layer computes: which operands are in `format` (the others are bf16), and how they are rounded."""

    quantized: frozenset[str] = frozenset()
    stochastic_gradients: bool = True
    hadamard: bool = True
    square_weights: bool = True
    format: str = "nvfp4"
    four_over_six: str = "none"
    backward: str = "standard"
    hardware_rounding: bool = False

    @property
    def rotates_wgrad(self) -> bool:
        """Whether wgrad's operands go through the Hadamard transform: both are quantized, and it is on."""
        return self.hadamard and self.format != "fp8" and {"wgrad.grad", "wgrad.input"} <= self.quantized

    @property
    def stochastic(self) -> bool:
        """Whether gradients are rounded stochastically; FP8's are rounded to nearest."""
        return self.stochastic_gradients and self.format != "fp8"

    @property
    def ms_eden(self) -> bool:
        """Whether the backward GEMMs' operands are MS-EDEN's."""
        return self.backward == "ms_eden" and bool(self.quantized)

    @property
    def has_tensor_scale(self) -> bool:
        """Whether operands carry an amax that the product is multiplied with."""
        return self.format == "nvfp4"

    @property
    def has_square_codes(self) -> bool:
        """Whether one set of codes in 16x16 blocks, made of the weight alone, serves both of its GEMMs."""
        square = (
            self.format == "nvfp4" and self.square_weights and self.four_over_six not in ("weights", "all")
        )
        return square and {"fprop.weight", "dgrad.weight"} <= self.quantized

    @property
    def spec(self) -> str:
        """The plan as text, for custom operators; `from_spec` is its inverse."""
        flags = (self.stochastic_gradients, self.hadamard, self.square_weights, self.hardware_rounding)
        words = (self.format, self.four_over_six, self.backward)
        return ";".join((",".join(sorted(self.quantized)), "".join("01"[f] for f in flags), *words))

    @staticmethod
    @functools.cache
    def from_spec(spec: str) -> LinearPlan:
        """Read back `spec`."""
        operands, flags, *words = spec.split(";")
        *rounding, hardware = (f == "1" for f in flags)
        return LinearPlan(frozenset(filter(None, operands.split(","))), *rounding, *words, hardware)


BF16_PLAN = LinearPlan()


def block_range(text: str, n_blocks: int) -> range:
    """Parse a rule's `blocks`: all | first:N | last:N | N | N-M (inclusive). Raises ConfigError."""
    if text == "all":
        return range(n_blocks)
    if m := re.fullmatch(r"(first|last):(\d+)", text):
        n = min(int(m[2]), n_blocks)
        return range(n) if m[1] == "first" else range(n_blocks - n, n_blocks)
    if m := re.fullmatch(r"(\d+)(?:-(\d+))?", text):
        first, last = int(m[1]), int(m[2] or m[1])
        if first <= last < n_blocks:
            return range(first, last + 1)
    raise ConfigError(
        f"precision.rules: blocks={text!r} names no blocks of this model; write all, first:N, last:N, N or N-M "
        f"with blocks 0 to {n_blocks - 1}."
    )


def default_bf16_blocks(cfg: PrecisionConfig, n_blocks: int) -> tuple[int, int]:
    """(first, last) blocks in BF16: the paper's 2 and 8 of 62 (its FP8 baseline's 1 and 2), in proportion, unless set."""
    shares = (1, 2) if cfg.name == "fp8" else (2, 8)
    first = round(shares[0] * n_blocks / 62) if cfg.first_blocks_bf16 is None else cfg.first_blocks_bf16
    last = max(1, round(shares[1] * n_blocks / 62)) if cfg.last_blocks_bf16 is None else cfg.last_blocks_bf16
    return first, last


def check_rules(cfg: PrecisionConfig, n_blocks: int, module_names: list[str]) -> None:
    """Raise ConfigError for a rule or phase that cannot mean anything, with the key and what is allowed."""
    phases = [p.name for p in phases_of(cfg)]
    for rule in cfg.rules:
        if rule.format not in FORMATS:
            raise ConfigError(f"precision.rules: format={rule.format!r} is not one of {', '.join(FORMATS)}.")
        if cfg.name in QUANTIZED_FORMATS and rule.format not in (cfg.name, "bf16"):
            raise ConfigError(
                f"precision.rules: format={rule.format!r} in a run with precision={cfg.name}: write {cfg.name} or bf16."
            )
        block_range(rule.blocks, n_blocks)
        for glob in rule.operands:
            if not any(fnmatchcase(o, glob) for o in OPERANDS):
                raise ConfigError(
                    f"precision.rules: operands={glob!r} matches none of {', '.join(OPERANDS)}."
                )
        if not any(fnmatchcase(name, rule.modules) for name in module_names):
            raise ConfigError(
                f"precision.rules: modules={rule.modules!r} matches no linear layer; they are named like "
                f"{module_names[0]!r}."
            )
        if not any(fnmatchcase(p, rule.phase) for p in phases):
            raise ConfigError(f"precision.rules: phase={rule.phase!r} matches none of {', '.join(phases)}.")
    starts = [p.start for p in phases_of(cfg)]
    if starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= 1:
        raise ConfigError(f"precision.phases: starts={starts} must begin with 0, increase, and stay below 1.")
    if len(set(phases)) != len(phases):
        raise ConfigError(f"precision.phases: the names {phases} must differ.")


def phases_of(cfg: PrecisionConfig) -> list[PhaseConfig]:
    """The configured phases, or the one phase "main"."""
    return list(cfg.phases) or [MAIN_PHASE]


def phase_at(cfg: PrecisionConfig, progress: float) -> str:
    """Name of the phase at `progress` = tokens / max_tokens."""
    return [p.name for p in phases_of(cfg) if p.start <= progress][-1]


def plan_for(cfg: PrecisionConfig, module: str, block: int, n_blocks: int, phase: str) -> LinearPlan:
    """The plan of the linear layer `module` in block `block` of `n_blocks`, in `phase`. The last matching rule wins."""
    if cfg.name not in QUANTIZED_FORMATS:
        return BF16_PLAN
    first, last = default_bf16_blocks(cfg, n_blocks)
    rules = [
        RuleConfig(format=cfg.name),
        RuleConfig(blocks=f"first:{first}", format="bf16"),
        RuleConfig(blocks=f"last:{last}", format="bf16"),
        *cfg.rules,
    ]
    formats = dict.fromkeys(OPERANDS, "bf16")
    for rule in rules:
        if (
            fnmatchcase(module, rule.modules)
            and block in block_range(rule.blocks, n_blocks)
            and fnmatchcase(phase, rule.phase)
        ):
            for operand in OPERANDS:
                if any(fnmatchcase(operand, glob) for glob in rule.operands):
                    formats[operand] = rule.format
    quantized = frozenset(o for o, f in formats.items() if f != "bf16")
    if not quantized:
        return BF16_PLAN
    plan = LinearPlan(
        quantized,
        cfg.stochastic_gradients,
        cfg.hadamard,
        cfg.weight_blocks_2d,
        cfg.name,
        cfg.four_over_six,
        cfg.backward,
        cfg.hardware_rounding,
    )
    if plan.ms_eden and len(quantized) < len(OPERANDS):
        raise ConfigError(
            f"precision.backward=ms_eden needs all six operands of a layer in NVFP4, but precision.rules leave "
            f"{', '.join(sorted(set(OPERANDS) - quantized))} of {module} in BF16."
        )
    return plan
