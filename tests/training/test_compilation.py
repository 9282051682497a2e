"""Compiled blocks compute what the same blocks do without the compiler."""

import shutil

import pytest
import torch

from nvfp4_train.config.load import compose_config
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.init import initialize_
from nvfp4_train.precision import apply_recipe
from nvfp4_train.training.compilation import compile_blocks
from nvfp4_train.training.memory import compute_dtype


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_attention_compiled_for_this_cpu_is_attention():
    """In the quickstart's shapes: with 512-bit vectors some compilers build the transposed keys wrongly, and all is NaN."""
    cfg = compose_config(["+experiment=quickstart", "run_dir=unused", "precision=bf16", "model.pattern=*"])
    model = HybridModel(cfg.model, "cpu", compute_dtype(cfg))
    initialize_(model, 0)
    apply_recipe(model, cfg.precision, 1, 0)
    gen = torch.Generator().manual_seed(0)
    shape = (cfg.training.micro_batch_size, cfg.training.seq_len, cfg.model.hidden_size)
    x = torch.randn(shape, generator=gen).bfloat16()
    with torch.no_grad():
        expected = model.layers[0](x)
        compile_blocks(model, "on", torch.device("cpu"))
        got = model.layers[0](x)
    # x joins at the end: what is compared is what attention adds. Each stage is rounded to bf16 in one and not always in the
    # other: norm, q, k, v, scores, weights, their products and the sum, each by 2^-9 of itself at most.
    added, wanted = (y.float() - x.float() for y in (got, expected))
    bound = 8 * 2**-9 * wanted.norm()
    assert (added - wanted).norm() < bound
