"""What a run would be: size, arithmetic, precision, memory and learning rate, without a weight allocated."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from nvfp4_kernels import backend_report, gemm_report

from nvfp4_train import units
from nvfp4_train.config.blocking import plans
from nvfp4_train.config.checks import BLOCKS
from nvfp4_train.config.layout import layout_of, micro_batches_a_rank
from nvfp4_train.config.schema import Config, PrecisionConfig
from nvfp4_train.data.mixture import describe as mixed
from nvfp4_train.data.mixture import planned
from nvfp4_train.distributed.traffic import bf16_plan, gradient_parts, plan
from nvfp4_train.errors import ConfigError
from nvfp4_train.model.flops import flops_per_token, linear_layers, parameter_count
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.precision.backends import BACKENDS, choose
from nvfp4_train.precision.gpu import this_machine
from nvfp4_train.precision.recipe import OPERANDS, QUANTIZED_FORMATS, LinearPlan, phases_of, plan_for
from nvfp4_train.training import machine
from nvfp4_train.training.memory import compiled_share, estimate, host_copies, snapshots_kept
from nvfp4_train.training.requirements import checkpoint_bytes, find_problems, rows_of
from nvfp4_train.training.resume import total_steps
from nvfp4_train.training.schedule import build_schedule

Rows = list[tuple[str, str]]


def describe(cfg: Config) -> str:
    """The plan of the run that a valid `cfg` describes, for people: several aligned tables.

    Builds the model on the meta device and compares its parameters with the closed form of `flops`.
    Raises ConfigError where find_problems does: for several processes.
    """
    parameters = sum(p.numel() for p in HybridModel(cfg.model, "meta").parameters())
    if parameters != parameter_count(cfg.model):
        raise AssertionError(
            f"the model has {parameters} parameters, flops.py counts {parameter_count(cfg.model)}"
        )
    problems = find_problems(cfg)
    sections: dict[str, Rows] = {
        f"{cfg.experiment} (dry run)": _run(cfg, parameters),
        **_precision(cfg),
        **_sharding(cfg),
        "memory on one device": _memory(cfg),
        f"learning rate ({cfg.schedule.name})": _schedule(cfg),
        "this machine": _machine(cfg),
    }
    if problems:
        sections["what this machine lacks for the run"] = rows_of(problems)
    return "\n\n".join(f"{title}\n{units.table(rows)}" for title, rows in sections.items())


def nvfp4_share(cfg: Config, phase: str) -> float:
    """Share of the linear layers' FLOPs, forward and backward, whose GEMM has both operands quantized."""
    layers, n_blocks = linear_layers(cfg.model), len(cfg.model.pattern)
    weights = [layer.out_features * layer.in_features for layer in layers]
    plans = [plan_for(cfg.precision, layer.name, layer.block, n_blocks, phase) for layer in layers]
    return sum(w * _nvfp4_gemms(plan) for w, plan in zip(weights, plans, strict=True)) / (3 * sum(weights))


def _run(cfg: Config, parameters: int) -> Rows:
    model, training = cfg.model, cfg.training
    flops = flops_per_token(model, training.seq_len)
    step_tokens = training.global_batch_size * training.seq_len
    steps = total_steps(training)
    tokens = steps * step_tokens
    blocks = ", ".join(f"{n} {name}" for letter, name in BLOCKS.items() if (n := model.pattern.count(letter)))
    micro_batches = training.global_batch_size // training.micro_batch_size
    return [
        (
            "model",
            f"{len(model.pattern)} blocks: {blocks}; {model.hidden_size} wide, vocabulary {model.vocab_size}",
        ),
        ("parameters", f"{parameters:,}"),
        (
            "arithmetic",
            f"{_gflops(flops)} GFLOP a token at {training.seq_len} tokens a sequence, forward and backward",
        ),
        (
            "step",
            f"{step_tokens:,} tokens: {training.global_batch_size} sequences, {training.micro_batch_size} a micro-batch "
            f"({micro_batches} micro-batches)",
        ),
        ("run", f"{steps:,} steps, {units.count(tokens)} tokens, {flops * tokens:.3g} FLOP"),
        (
            "checkpoints",
            f"{units.size(checkpoint_bytes(cfg))} each, every {cfg.checkpoint.every_steps} steps",
        ),
        ("data", _data(cfg, step_tokens)),
    ]


def _data(cfg: Config, step_tokens: int) -> str:
    if not cfg.data.mixture:
        return cfg.data.source
    lines = [f"{name}: {source}" for name, source in cfg.data.corpora.items()]
    segments = planned(cfg.data.mixture, cfg.training.max_tokens, step_tokens)
    return "\n".join([*lines, *(f"from step {s.start:,}: {mixed(s.shares)}" for s in segments)])


def _precision(cfg: Config) -> dict[str, Rows]:
    """{title: rows}, a table for each phase."""
    precision = cfg.precision
    if precision.name not in QUANTIZED_FORMATS:
        return {"precision": [("all", precision.name)]}
    block = {"nvfp4": 16, "mxfp4": 32, "fp8": 128}[precision.name]
    on = {
        "stochastic rounding of gradients": precision.stochastic_gradients and precision.name != "fp8",
        "Hadamard transform in weight gradients": precision.hadamard and precision.name != "fp8",
        f"{block}x{block} weight blocks": precision.weight_blocks_2d,
    }
    improvements = [
        (key, getattr(precision, key))
        for key in ("four_over_six", "backward")
        if getattr(precision, key) != getattr(PrecisionConfig, key)
    ]
    common = [
        ("always BF16/FP32", "embeddings, norms, convolution, scan, attention scores, head"),
        ("recipe", ", ".join(name if used else f"no {name}" for name, used in on.items())),
        *improvements,
    ]
    phases = phases_of(precision)
    if len(phases) == 1:
        return {"precision": _phase(cfg, phases[0].name) + common}
    tables = {
        f"precision from {100 * p.start:g} % of the run ({p.name})": _phase(cfg, p.name) for p in phases
    }
    return {**tables, "precision throughout": common}


def _phase(cfg: Config, phase: str) -> Rows:
    share = nvfp4_share(cfg, phase)
    linear_flops = 6 * sum(layer.out_features * layer.in_features for layer in linear_layers(cfg.model))
    of_model = share * linear_flops / flops_per_token(cfg.model, cfg.training.seq_len)
    flops = f"{100 * share:.1f} % of the linear layers' FLOPs, {100 * of_model:.1f} % of the model's"
    return [
        (f"in {cfg.precision.name.upper()}", flops),
        *((kind, f"blocks {_ranges(blocks)}") for kind, blocks in _other_blocks(cfg, phase)),
    ]


def _sharding(cfg: Config) -> dict[str, Rows]:
    """Shards and traffic of several ranks; the shards are checked against those that PyTorch makes."""
    layout = layout_of(cfg)
    if layout.ranks == 1:
        return {}
    from nvfp4_train.distributed.fsdp import shards_of_rank0

    model = HybridModel(cfg.model, "meta")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    parts = gradient_parts(shapes, cfg, layout)
    shards = shards_of_rank0(model, layout)
    for name, part in parts.items():
        if math.prod(shards[name]) * layout.fsdp != part.numel:
            raise AssertionError(f"PyTorch gives rank 0 {shards[name]} of {name}, the plan {part}")
    held = sum(math.prod(shape) for shape in shards.values())
    columns = [name for name, part in parts.items() if part.dim == 1]
    padding = layout.fsdp * held - sum(math.prod(shape) for shape in shapes.values())
    rows = [
        ("ranks", layout.describe(cfg)),
        ("micro-batches", f"{micro_batches_a_rank(cfg, layout)} a rank and step"),
        (
            "shard",
            f"{held:,} parameters on rank 0, as PyTorch splits them; {padding:,} of padding over all ranks",
        ),
        ("split", f"{len(parts) - len(columns)} parameters by rows, {len(columns)} by columns"),
    ]
    sent, bf16 = plan(shapes, cfg, layout), bf16_plan(shapes, cfg, layout)
    for purpose, n in sent.items():
        share = f"  {100 * n / bf16[purpose]:5.1f} % of BF16's" if bf16.get(purpose) else ""
        rows.append((purpose, f"{units.size(n):>9} sent a rank and step{share}"))
    total, of_bf16 = sum(sent.values()), sum(bf16.values())
    rows.append(
        ("total", f"{units.size(total):>9} sent a rank and step  {100 * total / of_bf16:5.1f} % of BF16's")
    )
    return {"sharding": rows}


def _memory(cfg: Config) -> Rows:
    device = machine.planned_device(cfg.device)
    need = estimate(cfg, device.type, layout_of(cfg))
    why = {
        "weights": "fp32 master weights, 4 bytes a parameter",
        "moments": "AdamW's two, fp32, 8 bytes a parameter",
        "gradients": "fp32, 4 bytes a parameter",
        "operands": "linear weights as bf16 operands, kept beside the master weights",
        "activations": f"what autograd keeps of one micro-batch{_share(cfg, device.type)}",
        "gathered": "of a sharded model, what is whole at one time",
        "head": "one slice of logits, gradients of the head and its input",
        "saving": "weights and moments again, which checkpoints are written from",
        "snapshots": f"the same {snapshots_kept(cfg)} times more, for rewinds (recovery.snapshots)",
    }
    rows = [(name, f"{units.size(value):>9}  {why[name]}") for name, value in vars(need).items() if value]
    absent = device.type == "cuda" and not torch.cuda.is_available()
    there = "no GPU" if absent else units.size(machine.memory_bytes(device))
    total = f"{units.size(need.total):>9}  and working memory of single operations; this machine has {there}"
    rows.append(("total", total))
    if device.type == "cuda":
        copies = f"for saving and {snapshots_kept(cfg)} snapshots (recovery.snapshots), in the machine's memory, a rank"
        rows.append(("host", f"{units.size(host_copies(cfg, layout_of(cfg))):>9}  {copies}"))
    return rows


def _share(cfg: Config, device_type: str) -> str:
    share = compiled_share(cfg, device_type)
    return f", x {share:g} as torch.compile recomputes" if share < 1 else ""


def _schedule(cfg: Config) -> Rows:
    schedule = build_schedule(cfg.schedule, cfg.optimizer.lr, cfg.training.max_tokens)
    rows = []
    for name, tokens, lr in schedule.milestones():
        where = (
            "never"
            if tokens is None
            else f"{units.count(tokens):>6} tokens  {100 * tokens / schedule.end:5.1f} %"
        )
        rows.append((name, f"{lr:.2e}  {where}"))
    return rows


def _machine(cfg: Config) -> Rows:
    device = machine.resolve_device("cpu" if cfg.device == "cpu" else "auto")
    rows = [("device", f"{machine.describe(device)}, {units.size(machine.memory_bytes(device))}")]
    if cfg.precision.name in QUANTIZED_FORMATS:
        rows += [("GEMM", _gemm(cfg, device.type)), ("quantize kernels", backend_report(device))]
    return rows


def _gemm(cfg: Config, device: str) -> str:
    """The backend that this machine would take, or why it can't."""
    try:
        backend, why = choose(cfg.precision, this_machine(device), [plan for _, plan in plans(cfg)])
    except ConfigError as error:
        return str(error)
    text = gemm_report(device) if backend == "emulated" else BACKENDS[backend].text
    return f"{backend} ({text}; {why})"


def _other_blocks(cfg: Config, phase: str) -> list[tuple[str, list[int]]]:
    """The blocks that are not all quantized: all BF16, or with operands in either format."""
    n_blocks = len(cfg.model.pattern)
    quantized: dict[int, list[int]] = {block: [] for block in range(n_blocks)}
    for layer in linear_layers(cfg.model):
        plan = plan_for(cfg.precision, layer.name, layer.block, n_blocks, phase)
        quantized[layer.block].append(len(plan.quantized))
    bf16 = [block for block, operands in quantized.items() if not any(operands)]
    mixed = [
        block for block, operands in quantized.items() if any(operands) and min(operands) < len(OPERANDS)
    ]
    return [(kind, blocks) for kind, blocks in (("in BF16", bf16), ("partly quantized", mixed)) if blocks]


def _nvfp4_gemms(plan: LinearPlan) -> int:
    gemms = {operand.split(".")[0] for operand in OPERANDS}
    return sum(all(o in plan.quantized for o in OPERANDS if o.startswith(gemm)) for gemm in gemms)


def _ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 5] as "0-1, 5"."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _gflops(flops: float) -> str:
    """72.10, or 0.0312: four digits."""
    giga = flops / 1e9
    return f"{giga:.2f}" if giga >= 1 else f"{giga:.3g}"
