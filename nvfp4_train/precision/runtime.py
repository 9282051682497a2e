"""Applies a recipe to a model and keeps it going from step to step."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator

import torch
from nvfp4_kernels import backend_report, gemm_report
from nvfp4_kernels.native import self_test
from torch import nn

from nvfp4_train.config.schema import PrecisionConfig
from nvfp4_train.errors import ConfigError
from nvfp4_train.precision import health
from nvfp4_train.precision.backends import BACKENDS, NATIVE, choose
from nvfp4_train.precision.gpu import this_machine
from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.native import NativeLinear
from nvfp4_train.precision.native_fp8 import Fp8Linear
from nvfp4_train.precision.recipe import BF16_PLAN, LinearPlan, check_rules, phase_at, phases_of, plan_for
from nvfp4_train.precision.te import TransformerEngine

SEED, STEP, MICROBATCH, TENSOR = range(4)


class PrecisionRuntime:
    """Sets every `Linear`'s plan for the current phase, and its counters for the current step and micro-batch.

    The trainer calls `set_phase` and `begin_step` before a step, `begin_microbatch` before each forward pass and
    `prepare_weights` after each change of the weights. All state follows from (seed, step), but for what `state` returns.
    """

    def __init__(
        self,
        model: nn.Module,
        cfg: PrecisionConfig,
        n_blocks: int,
        seed: int,
        prepare_weights: Callable[[], None] | None = None,
    ):
        """`prepare_weights` takes the place of each layer's own preparation where the model is sharded."""
        self.cfg, self.n_blocks, self._prepare_weights = cfg, n_blocks, prepare_weights
        self.linears = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
        check_rules(cfg, n_blocks, list(self.linears))
        device = next(iter(self.linears.values())).weight.device
        # One row a layer, in the order of the model's modules; a layer's row number is its tensor number.
        self.counters = torch.zeros(len(self.linears), 4, dtype=torch.int64, device=device)
        self.counters[:, SEED] = seed & 0xFFFFFFFF
        self.counters[:, TENSOR] = torch.arange(len(self.linears), device=device)
        self.phase: str | None = None
        self._kept_bf16: frozenset[str] = frozenset()  # names of layers, beyond the recipe's
        self._recorder: health.HealthRecorder | None = None
        self.te: TransformerEngine | None = None
        self.backend, self.why = self._engage()
        self.set_phase(0.0)

    def set_phase(self, progress: float, bf16: Collection[str] = ()) -> bool:
        """Adopt the phase at `progress` = tokens / max_tokens, but for the layers named in `bf16`, which run in BF16.

        Returns whether anything changed (weights are then prepared anew).
        """
        phase = phase_at(self.cfg, progress)
        if (phase, frozenset(bf16)) == (self.phase, self._kept_bf16):
            return False
        self.phase, self._kept_bf16 = phase, frozenset(bf16)
        self._adopt({name: self._plan(name) for name in self.linears})
        return True

    def forward_pass(self) -> contextlib.AbstractContextManager:
        """Around the forward pass of a micro-batch."""
        return self.te.forward_pass() if self.te else contextlib.nullcontext()

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """What a backend carries from step to step, by layer, the tensors in use: TE's delayed scaling alone has any."""
        engines = {name: linear.engine for name, linear in self.linears.items()}
        return {name: engine.state() for name, engine in engines.items() if self.te and engine.state()}

    @contextlib.contextmanager
    def keeping_state(self) -> Iterator[None]:
        """Afterwards `state()` is as it was: around a validation, whose maxima delayed scaling would take for training's."""
        tensors = [tensor for state in self.state().values() for tensor in state.values()]
        before = [tensor.clone() for tensor in tensors]
        try:
            yield
        finally:
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)

    def begin_step(self, step: int) -> None:
        """Counters of step `step`, micro-batch 0."""
        self.counters[:, STEP] = step
        self.counters[:, MICROBATCH] = 0

    def begin_microbatch(self, index: int) -> None:
        """Counters of the global batch's micro-batch `index`."""
        self.counters[:, MICROBATCH] = index

    def prepare_weights(self) -> None:
        """Quantize all weights as they are now: once an optimizer step."""
        if self._prepare_weights is not None:
            self._prepare_weights()
            return
        for linear in self.linears.values():
            linear.prepare_weight()

    @contextlib.contextmanager
    def all_bf16(self) -> Iterator[None]:
        """Everything in BF16 inside, as before outside (for a second validation)."""
        self._adopt(dict.fromkeys(self.linears, BF16_PLAN))
        try:
            yield
        finally:
            self._adopt({name: self._plan(name) for name in self.linears})

    @contextlib.contextmanager
    def recording_health(self) -> Iterator[None]:
        """Record inside, anew, what quantization does to every operand: around a training step, every n steps.

        Each operand is quantized once more, so such a step takes longer; its results are the same bits. No host sync.
        """
        self._recorder = health.active = health.HealthRecorder(len(self.linears), self.counters.device)
        try:
            yield
        finally:
            health.active = None

    def health(
        self, reduce: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums
    ) -> dict[str, torch.Tensor]:
        """`health/LAYER/{forward,dgrad,wgrad}/{sqnr_db,underflow,saturation}` of the last recording, as device scalars.

        `reduce` adds a tensor up over the ranks, in place: then the values are of all ranks' micro-batches, alike on each.
        Empty before the first; NaN for a GEMM that did not run inside (backward ones in a validation).
        """
        if self._recorder is None:
            return {}
        reduce(self._recorder.sums)
        return self._recorder.metrics(list(self.linears), [m.plan.quantized for m in self.linears.values()])

    def summary(self) -> str:
        """One line for the log: how many layers are quantized, where the arithmetic runs and why."""
        if self.cfg.name == "fp32":
            return "fp32 everywhere"
        quantized = sum(bool(m.plan.quantized) for m in self.linears.values())
        if not quantized:
            return f"bf16: {len(self.linears)} linear layers"
        text = BACKENDS[self.backend].text
        if self.backend == "te":
            kernels = f"recipe {type(self.te.recipe).__name__}, Transformer Engine {self.te.version}"
        elif self.backend in NATIVE:
            rounding = ", stochastic rounding by cvt.rs" if self.cfg.hardware_rounding else ""
            kernels = f"quantize kernels native{rounding}; self-test passed"
        else:
            text = gemm_report(self.counters.device)
            kernels = f"quantize kernels {backend_report(self.counters.device)}"
        return (
            f"{self.cfg.name}: {quantized} of {len(self.linears)} linear layers, phase {self.phase!r}; "
            f"GEMM {self.backend} ({text}; {self.why}); {kernels}"
        )

    def _engage(self) -> tuple[str, str]:
        """Choose the backend and give every layer its engine. Raises ConfigError when it cannot run here."""
        device = self.counters.device
        plans = [
            self._recipe_plan(name, phase.name) for phase in phases_of(self.cfg) for name in self.linears
        ]
        backend, why = choose(self.cfg, this_machine(device.type), plans)
        if backend in NATIVE:
            fp8 = self.cfg.name == "fp8"
            problem = self_test.fp8_problem(device) if fp8 else self_test.problem(backend, device)
            hardware = self.cfg.hardware_rounding  # promised, so nothing may take its place
            if problem and self.cfg.backend == "auto" and not hardware:
                return (
                    "emulated",
                    f"auto: {backend} fails its self-test on this GPU ({problem}); please report it",
                )
            if problem:
                raise ConfigError(
                    f"precision.backend={backend} fails its self-test on this GPU ({problem}): use "
                    "precision.backend=emulated, and report it."
                )
            if hardware and (problem := self_test.rounding_problem(device)):
                raise ConfigError(
                    f"precision.hardware_rounding=true: cvt.rs does not round by our rule on this GPU ({problem}): leave it "
                    "at false, and report it."
                )
            for linear in self.linears.values():
                linear.engine = Fp8Linear(backend) if fp8 else NativeLinear(backend)
        elif backend == "te":
            self.te = TransformerEngine(self.cfg)
            for linear in self.linears.values():
                linear.engine = self.te.linear(linear.in_features, linear.out_features)
        return backend, why

    def quantized_layers(self) -> list[str]:
        """Names of the layers that have a quantized operand in the present phase, by the recipe alone."""
        return [name for name in self.linears if self._recipe_plan(name).quantized]

    def _plan(self, name: str) -> LinearPlan:
        return BF16_PLAN if name in self._kept_bf16 else self._recipe_plan(name)

    def _recipe_plan(self, name: str, phase: str | None = None) -> LinearPlan:
        block = int(re.search(r"\d+", name)[0])
        return plan_for(self.cfg, name, block, self.n_blocks, phase or self.phase)

    def _adopt(self, plans: dict[str, LinearPlan]) -> None:
        for row, (name, linear) in enumerate(self.linears.items()):
            linear.set_plan(plans[name], self.counters[row])
        self.prepare_weights()


def apply_recipe(
    model: nn.Module,
    cfg: PrecisionConfig,
    n_blocks: int,
    seed: int,
    prepare_weights: Callable[[], None] | None = None,
) -> PrecisionRuntime:
    """Give every quantizable linear of `model` its plan. Raises ConfigError for rules that match nothing."""
    return PrecisionRuntime(model, cfg, n_blocks, seed, prepare_weights)
