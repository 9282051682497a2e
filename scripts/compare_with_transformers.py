"""Export drawn models, load them with transformers, and print how far the two implementations are apart.

    python scripts/compare_with_transformers.py [--models 10] [--run DIR]

fp32 on the CPU, transformers' PyTorch path. With --run also: that run's NVFP4 checkpoint as compressed-tensors reads it
back, against the operands that training multiplies with.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import Tensor

from nvfp4_train.config.schema import ModelConfig
from nvfp4_train.data.tokenizer import Tokenizer, train
from nvfp4_train.interop.export import export
from nvfp4_train.interop.nemotron_h import tensor_keys
from nvfp4_train.interop.tensor_files import TensorFolder
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.init import initialize_
from nvfp4_train.training.inference import inference_plans, load_run
from nvfp4_train.training.sampling import sample_tokens

NEW_TOKENS = 64


class Difference(NamedTuple):
    """`logits`: largest difference over the largest logit; `gradients`: of the worst parameter, in 2-norms; `same_text`:
    whether greedy decoding with both caches writes the same `NEW_TOKENS` tokens."""

    pattern: str
    logits: float
    gradients: float
    same_text: bool
    kinds_of_tokens: int


def draw(seed: int, vocab_size: int) -> ModelConfig:
    """A small model: every kind of block, groups and head counts of every kind, ragged chunks."""
    rng = random.Random(seed)
    blocks = [*"M*-", *rng.choices("MM*-", k=rng.randint(0, 2))]
    rng.shuffle(blocks)
    kv, groups = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    return ModelConfig(
        pattern="".join(blocks),
        hidden_size=rng.choice([24, 32, 40]),
        intermediate_size=rng.choice([40, 64]),
        num_attention_heads=kv * rng.choice([1, 2, 3]),
        num_key_value_heads=kv,
        head_dim=rng.choice([8, 12, 16]),
        mamba_num_heads=groups * rng.choice([1, 2]),
        mamba_head_dim=rng.choice([8, 12, 16]),
        n_groups=groups,
        ssm_state_size=rng.choice([5, 8, 16]),
        conv_kernel=rng.choice([2, 3, 4]),
        chunk_size=rng.choice([8, 16, 64]),
        vocab_size=vocab_size,
    )


def compare(seed: int, folder: Path, tokenizer: Tokenizer) -> Difference:
    """Draw a model, export it into `folder` (which must not be there) and load it with transformers."""
    cfg = draw(seed, tokenizer.vocab_size)
    ours = HybridModel(cfg, compute_dtype=torch.float32)
    initialize_(ours, seed)
    _vary(ours, seed)
    weights = dict(ours.named_parameters())
    export(folder, cfg, lambda name: weights[name].detach(), tokenizer, 64, "fp32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens = torch.randint(cfg.vocab_size, (2, 37), generator=torch.Generator().manual_seed(seed))
    logits, expected = ours(tokens), theirs(tokens, use_cache=False).logits
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    logits.backward(upstream)
    expected.backward(upstream)
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    gradients = [
        float((p.grad[rows] - want).norm() / want.norm())
        for name, p in ours.named_parameters()
        for key, rows in tensor_keys(name, cfg)
        for want in (wanted[key.replace("backbone.", "model.", 1)],)
    ]
    prompt = tokens[:1, :11]
    written = list(sample_tokens(ours, prompt[0].tolist(), NEW_TOKENS, 0.0, 1.0, 0, "cpu"))
    # Without the mask transformers may take tokens of the prompt for padding.
    generated = theirs.eval().generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    return Difference(
        cfg.pattern,
        float((logits - expected).abs().max() / expected.abs().max()),
        max(gradients),
        generated[0, prompt.shape[1] :].tolist() == written,
        len(set(written)),
    )


@torch.no_grad()
def _vary(model: HybridModel, seed: int) -> None:
    """Norms and D start at 1, which would hide a wrong order; larger embeddings and head make text that varies."""
    for name, p in model.named_parameters():
        if p.ndim == 1 and not name.endswith(("A_log", "dt_bias")):
            p += 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name) + seed))
        elif name.startswith(("embeddings", "lm_head")):
            p *= 4


def read_back(run: Path, folder: Path) -> dict[str, int]:
    """Export `run` in NVFP4 into `folder`, read it with compressed-tensors: how many bytes and weights differ."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    trained = load_run(run, "cpu", print)
    plans = inference_plans(trained)
    export(folder, trained.cfg.model, trained.weights, trained.tokenizer, 1, "bf16", plans)
    files = TensorFolder(folder)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    counts = {"layers": 0, "weights": 0, "operands that differ": 0, "weights that differ in bf16": 0}
    for name, plan in plans.items():
        if "fprop.weight" not in plan.quantized:
            continue
        linear = trained.precision.linears[name]
        scale = linear.weight_amax / torch.tensor(2688.0)
        counts["layers"] += 1
        for key, rows in tensor_keys(f"{name}.weight", trained.cfg.model):
            stem = key.removesuffix(".weight")
            state = {
                n: files.read(f"{stem}.{n}") for n in ("weight_packed", "weight_scale", "weight_global_scale")
            }
            operand = linear.fprop_weight[rows]
            # e2m1 x scale, exact in bf16: equal operands mean equal codes and scales, wherever the code is not 0
            unscaled = compressor.decompress(state | {"weight_global_scale": torch.ones(1)}, scheme)["weight"]
            weight = compressor.decompress(state, scheme)["weight"]
            counts["weights"] += operand.numel()
            counts["operands that differ"] += _unequal(unscaled, operand)
            counts["weights that differ in bf16"] += _unequal(weight, operand.float() * scale)
    return counts


def _unequal(a: Tensor, b: Tensor) -> int:
    return int((a.bfloat16() != b.bfloat16()).sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=10)
    parser.add_argument("--run", type=Path)
    args = parser.parse_args()
    tokenizer = Tokenizer(train([Path(__file__).read_text()] * 4, 384))
    print("| seed | pattern | logits | gradients | greedy text equal |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as root:
        for seed in range(args.models):
            d = compare(seed, Path(root) / str(seed), tokenizer)
            print(
                f"| {seed} | `{d.pattern}` | {d.logits:.1e} | {d.gradients:.1e} | {d.same_text} |", flush=True
            )
        if args.run is not None:
            print(read_back(args.run, Path(root) / "nvfp4"))


if __name__ == "__main__":
    main()
