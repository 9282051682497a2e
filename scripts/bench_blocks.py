"""Forward and backward of one block of each kind of a model too large for one GPU, in its precision and in BF16; time and
memory, scaled to the whole model beside what is predicted for it.

    python scripts/bench_blocks.py +experiment=12b_hybrid [key=value ...]

Predictions: the floor of ceilings.py, and what training/memory.py says of activations and head. The scaled time has the
blocks and the head's loss on one micro-batch, not the optimizer, nor traffic between ranks. A block keeps its output, the
next one's input; bf16 copies of weights aren't counted. The head's prediction has what comes and goes within it, too.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import torch
from ceilings import floor, measure, seconds

from nvfp4_train import units
from nvfp4_train.config.load import compose_config
from nvfp4_train.config.schema import Config
from nvfp4_train.config.validate import validate
from nvfp4_train.model.flops import linear_layers
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.init import initialize_
from nvfp4_train.model.kernels import choose_kernels
from nvfp4_train.precision import apply_recipe
from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.recipe import phases_of, plan_for
from nvfp4_train.training import machine
from nvfp4_train.training.compilation import compile_blocks
from nvfp4_train.training.memory import estimate

NAMES = {"M": "Mamba-2", "*": "attention", "-": "MLP"}
Cost = tuple[float, int]  # seconds, bytes kept for the backward pass


def main(words: list[str]) -> None:
    cfg = compose_config([*words, "run_dir=unused", "data.source=unused"])
    validate(cfg)
    device = machine.resolve_device(cfg.device)
    tokens = cfg.training.micro_batch_size * cfg.training.seq_len
    print(f"{cfg.model.name} on {machine.describe(device)}, torch {torch.__version__}, {tokens} tokens\n")
    print("| block | precision | forward and backward, ms | kept for backward |\n| --- | --- | --- | --- |")
    costs = {name: blocks(cfg, name, device) for name in dict.fromkeys((cfg.precision.name, "bf16"))}
    quantized = quantized_blocks(cfg)
    total, kept = costs["bf16"]["head"][0], 0
    for number, letter in enumerate(cfg.model.pattern):
        cost = costs[cfg.precision.name if number in quantized else "bf16"][letter]
        total, kept = total + cost[0], kept + cost[1]
    ceilings = measure(device, cfg.model, cfg.training.seq_len)
    least = sum(time for kind, time in floor(cfg, ceilings).items() if kind != "optimizer")
    predicted = estimate(cfg, device.type)
    print(f"\nceilings: {ceilings.describe()}")
    print(f"{len(cfg.model.pattern)} blocks, {len(quantized)} of them quantized, and the head's loss:\n")
    print("| | scaled | predicted |\n| --- | --- | --- |")
    print(f"| a micro-batch, ms | {1e3 * total:.1f} | {1e3 * least:.1f} (floor) |")
    print(f"| tokens/s | {tokens / total:,.0f} | {tokens / least:,.0f} (floor) |")
    print(f"| activations of the blocks | {units.size(kept)} | {units.size(predicted.activations)} |")
    print(f"| head | {units.size(costs['bf16']['head'][1])} | {units.size(predicted.head)} |")


def blocks(cfg: Config, precision: str, device: torch.device) -> dict[str, Cost]:
    """{letter or "head": cost} of one block each in `precision`; prints them."""
    letters = "".join(dict.fromkeys(cfg.model.pattern))
    recipe = dataclasses.replace(
        cfg.precision, name=precision, first_blocks_bf16=0, last_blocks_bf16=0, rules=[]
    )
    model = HybridModel(dataclasses.replace(cfg.model, pattern=letters), device)
    initialize_(model, 0)
    apply_recipe(model, recipe, len(letters), 0)
    choose_kernels(model, cfg.training.kernels, device, cfg.training.deterministic)
    compile_blocks(model, cfg.training.compile, device)
    shape = (cfg.training.micro_batch_size, cfg.training.seq_len)
    x = torch.randn(*shape, cfg.model.hidden_size, device=device).bfloat16().requires_grad_()
    targets = torch.randint(cfg.model.vocab_size, shape, device=device).flatten()
    calls = dict(zip(letters, model.layers, strict=True))
    calls["head"] = lambda x: model.lm_head.loss(x.flatten(0, 1), targets)
    found = {}
    for letter, call in calls.items():
        copies = weight_copies(call)

        def step(call=call, copies=copies) -> int:
            x.grad = None
            model.zero_grad(set_to_none=True)
            before = allocated(device)
            y = call(x)
            kept = max(0, allocated(device) - before - copies)  # a CPU's isn't counted
            y.backward(torch.ones_like(y))
            return kept

        step()
        found[letter] = seconds(step, device), step()
        row = f"{NAMES.get(letter, 'head, loss')} | {precision} | {1e3 * found[letter][0]:.2f}"
        print(f"| {row} | {units.size(found[letter][1])} |", flush=True)
    return found


def weight_copies(call: torch.nn.Module | Callable) -> int:
    """Bytes of the bf16 copies that the layers of a block in BF16 make of their weights."""
    modules = call.modules() if isinstance(call, torch.nn.Module) else ()
    return sum(2 * m.weight.numel() for m in modules if isinstance(m, Linear) and not m.plan.quantized)


def quantized_blocks(cfg: Config) -> set[int]:
    """Numbers of the blocks that have a quantized layer."""
    n, phase = len(cfg.model.pattern), phases_of(cfg.precision)[0].name
    layers = linear_layers(cfg.model)
    return {la.block for la in layers if plan_for(cfg.precision, la.name, la.block, n, phase).quantized}


def allocated(device: torch.device) -> int:
    """Bytes of the device's tensors; 0 on a CPU, which doesn't count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


if __name__ == "__main__":
    main(sys.argv[1:])
