"""The whole model in fp64: documents, decoding, loss, names, errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from nvfp4_train.errors import ConfigError
from nvfp4_train.model.hybrid import HybridModel, join_caches
from nvfp4_train.model.init import initialize_
from tests.tiny import every_block

EXACT = {"rtol": 1e-11, "atol": 1e-11}


@pytest.fixture
def model(tiny):
    return make_model(3)


def make_model(seed):
    model = HybridModel(every_block())
    initialize_(model, seed)
    return model.double()


def tokens(batch, length, seed=0):
    return torch.randint(97, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_a_packed_document_is_as_if_alone(model):
    lengths = [5, 1, 11, 1, 1, 8, 3]
    row = tokens(1, sum(lengths))
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].int()
    alone = torch.cat([model(part) for part in row.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(model(row, seq_idx), alone, **EXACT)
    assert (model(row) - alone).abs().max() > 1e-3, "without seq_idx documents see each other"


@settings(max_examples=25)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(0, 3))
def test_gradients_of_packed_documents_are_those_of_each_alone(lengths, seed):
    """Convolution, state and attention restart at every boundary, wherever chunks end: forward and backward."""
    model = make_model(seed)
    inputs, targets = tokens(1, sum(lengths), seed), tokens(1, sum(lengths), seed + 9)
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].int()
    packed = model.loss(inputs, targets, seq_idx)[0]
    parts = zip(inputs.split(lengths, dim=1), targets.split(lengths, dim=1), strict=True)
    alone = sum(model.loss(*part)[0] for part in parts)
    torch.testing.assert_close(packed, alone, **EXACT)
    grads = [torch.autograd.grad(loss, list(model.parameters())) for loss in (packed, alone)]
    for (name, _), a, b in zip(model.named_parameters(), *grads, strict=True):
        assert (a - b).norm() <= 1e-10 * b.norm() + 1e-14, name


def test_rows_of_a_batch_are_independent(model):
    batch = tokens(3, 13)
    torch.testing.assert_close(model(batch), torch.cat([model(row[None]) for row in batch]), **EXACT)


def test_no_token_sees_its_future(model):
    row = tokens(1, 21)
    changed = row.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 97
    torch.testing.assert_close(model(changed)[:, :12], model(row)[:, :12], **EXACT)


def test_decoding_step_by_step_equals_the_whole(model):
    batch = tokens(2, 19)
    cache = model.new_cache(2)
    steps = torch.stack([model.step(batch[:, i], cache) for i in range(batch.shape[1])], dim=1)
    torch.testing.assert_close(steps, model(batch), **EXACT)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 13, 16, 19])
def test_prefill_and_steps_equal_the_whole(model, length):
    """Shorter than the convolution, whole chunks, ragged ones, several."""
    batch = tokens(2, length + 4)
    cache = model.new_cache(2)
    logits = [model.prefill(batch[:, :length], cache)]
    logits += [model.step(batch[:, i], cache) for i in range(length, length + 4)]
    torch.testing.assert_close(torch.stack(logits, dim=1), model(batch)[:, length - 1 :], **EXACT)


def test_sequences_of_several_lengths_decode_together_as_alone(model):
    rows = [tokens(1, length, seed=length) for length in (9, 1, 4)]
    caches = [model.new_cache(1) for _ in rows]
    for row, cache in zip(rows, caches, strict=True):
        model.prefill(row, cache)
    together = join_caches(caches)
    more = tokens(3, 5, seed=7)
    steps = torch.stack([model.step(more[:, i], together) for i in range(5)], dim=1)
    for row, extra, got in zip(rows, more, steps, strict=True):
        alone = model(torch.cat((row, extra[None]), dim=1))[0, -5:]
        torch.testing.assert_close(got, alone, **EXACT)


@pytest.mark.parametrize("masked", [False, True])
def test_loss_is_cross_entropy_of_the_logits(model, masked):
    inputs, targets = tokens(2, 11), tokens(2, 11, seed=1)
    mask = torch.rand(2, 11, generator=torch.Generator().manual_seed(2)) < 0.6 if masked else None
    nll, count = model.loss(inputs, targets, mask=mask)
    expected = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
    keep = torch.ones(22, dtype=torch.bool) if mask is None else mask.flatten()
    assert int(count) == int(keep.sum())
    torch.testing.assert_close(nll, expected[keep].sum(), **EXACT)


def test_every_parameter_gets_a_gradient(model):
    model.loss(tokens(2, 11), tokens(2, 11, seed=1))[0].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name
        assert p.grad.abs().sum() > 0, name


def test_bf16_is_near_fp64(tiny, model):
    """Activations in bf16 over fp32 parameters: dtypes of results, and an error of bf16's size."""
    low = HybridModel(tiny)
    initialize_(low, seed=3)
    batch = tokens(2, 24)
    hidden = low.hidden(batch)
    assert hidden.dtype == torch.bfloat16
    assert low(batch).dtype == torch.float32
    assert {p.dtype for p in low.parameters()} == {torch.float32}
    exact = model.hidden(batch)
    assert (hidden - exact).norm() < 0.02 * exact.norm()
    cache = low.new_cache(2)
    steps = torch.stack([low.step(batch[:, i], cache) for i in range(24)], dim=1)
    assert (steps - model(batch)).norm() < 0.02 * model(batch).norm()


def test_names_and_shapes_are_nemotron_hs(tiny):
    """Hugging Face's keys without the prefix "backbone."; q, k and v are one."""
    d_inner, bc, heads = 48, 2 * 2 * 5, 6
    mamba = {
        "in_proj.weight": (2 * d_inner + bc + heads, 32),
        "conv1d.weight": (d_inner + bc, 1, 4),
        "conv1d.bias": (d_inner + bc,),
        "dt_bias": (heads,),
        "A_log": (heads,),
        "D": (heads,),
        "norm.weight": (d_inner,),
        "out_proj.weight": (32, d_inner),
    }
    mixers = {
        "M": mamba,
        "*": {"qkv_proj.weight": ((4 + 2 * 2) * 8, 32), "o_proj.weight": (32, 32)},
        "-": {"up_proj.weight": (48, 32), "down_proj.weight": (32, 48)},
    }
    expected = {"embeddings.weight": (97, 32), "norm_f.weight": (32,), "lm_head.weight": (97, 32)}
    for i, letter in enumerate(tiny.pattern):
        expected[f"layers.{i}.norm.weight"] = (32,)
        expected |= {f"layers.{i}.mixer.{k}": shape for k, shape in mixers[letter].items()}
    assert {k: tuple(v.shape) for k, v in HybridModel(tiny, "meta").state_dict().items()} == expected


def test_unknown_pattern_letter(tiny):
    tiny.pattern = "M-XM"
    with pytest.raises(ConfigError, match=r"model\.pattern='M-XM' has the letter 'X'"):
        HybridModel(tiny, "meta")
