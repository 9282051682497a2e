"""FlexAttention: its masks and its place in compiled blocks anywhere, the kernels themselves on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex

from nvfp4_train.config.load import compose_config
from nvfp4_train.model import flex
from nvfp4_train.model.attention import attend
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.init import initialize_
from nvfp4_train.model.kernels import _set_attention, choose_kernels
from nvfp4_train.precision import apply_recipe
from nvfp4_train.training.compilation import compile_blocks
from tests.tiny import every_block

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def numbers(*rows):
    """Document numbers of rows that consist of documents of these lengths."""
    return torch.stack([torch.repeat_interleave(torch.arange(len(r)), torch.tensor(r)) for r in rows]).int()


@settings(max_examples=30)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.booleans())
@example([128, 256, 128], True)
@example([1], True)
def test_the_mask_is_that_of_all_pairs_of_tokens(lengths, documents):
    seq_idx = numbers(lengths, lengths[::-1])
    length = seq_idx.shape[1]

    def visible(b, h, q, k):
        return (q >= k) & (seq_idx[b, q] == seq_idx[b, k]) if documents else q >= k

    want = torch_flex.create_block_mask(visible, 2 if documents else None, None, length, length, "cpu")
    got = flex.block_mask(seq_idx if documents else None, seq_idx)
    assert (got.shape, got.BLOCK_SIZE) == (want.shape, want.BLOCK_SIZE)
    for kind in ("kv", "full_kv", "q", "full_q"):
        for name in (f"{kind}_num_blocks", f"{kind}_indices"):
            torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=0, atol=0)


@pytest.fixture
def on_cpu(monkeypatch):
    """PyTorch's check refuses gradients on a CPU; its plain form, which "aot_eager" runs, computes them."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kernel", [flex.repeatable, flex.fastest])
def test_in_compiled_blocks_it_is_the_reference(kernel):
    """Loss and gradients, with document masks and without, recomputed; batches of other documents compile nothing."""
    torch._dynamo.reset()  # other tests' compilations of the same code count towards the compiler's limit
    results = []
    backend = CompileCounterWithBackend("aot_eager")
    for flexed in (False, True):
        cfg = every_block()
        cfg.pattern, cfg.head_dim = "*-*", 16
        model = HybridModel(cfg)
        initialize_(model, 0)
        model.double().recompute_blocks = flexed
        if flexed:
            mask = flex.block_mask if kernel is flex.repeatable else flex.documents_mask
            _set_attention(model, kernel, mask)
            for layer in model.layers:
                layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False, backend=backend)
        tokens = torch.randint(97, (2, 200), generator=torch.Generator().manual_seed(0))
        results.append([])
        for seq_idx in (numbers([30, 150, 20], [200]), numbers([1, 199], [60, 60, 80]), None):
            loss = model.loss(tokens, tokens, seq_idx)[0]
            results[-1] += [loss, *torch.autograd.grad(loss, list(model.parameters()))]
            if seq_idx is not None and flexed:
                assert backend.frame_count == 2, "one attention, one MLP"
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12)


def test_outside_of_compiled_blocks_it_is_compiled_by_itself(monkeypatch):
    """Also where the blocks are told to run eagerly."""
    backend = CompileCounterWithBackend("eager")
    compiled = torch.compile(torch_flex.flex_attention, backend=backend, fullgraph=True)
    monkeypatch.setattr(flex, "_compiled", compiled)
    q, k = torch.randn(2, 4, 50, 16), torch.randn(2, 2, 50, 16)
    seq_idx = numbers([50], [20, 30])
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        y = flex.repeatable(q, k, k, flex.block_mask(seq_idx, seq_idx))
    assert backend.frame_count == 1
    torch.testing.assert_close(y, attend(q, k, k, seq_idx))


# On a GPU

SHAPES = [(300, 4, 2, 64), (256, 6, 2, 80), (1025, 4, 4, 128)]  # tokens, heads, kv_heads, head_dim
DOCUMENTS = {
    300: ([1, 127, 2, 170], [299, 1]),
    256: ([128, 128], [3, 253]),
    1025: ([1000, 25], [300, 1, 724]),
}


def leaves(length, heads, kv_heads, dim):
    """Slices of one projection, as the model has them, and the gradient of the output."""
    gen = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(2, length, heads + 2 * kv_heads, dim, device="cuda", generator=gen).bfloat16()
    dy = torch.randn(2, length, heads, dim, device="cuda", generator=gen).bfloat16().transpose(1, 2)
    return qkv.requires_grad_(), dy


def run(function, qkv, dy, kv_heads, mask):
    heads = qkv.shape[2] - 2 * kv_heads
    y = function(*qkv.transpose(1, 2).split((heads, kv_heads, kv_heads), dim=1), mask)
    return y.detach(), torch.autograd.grad(y, qkv, dy)[0]


def exact_and_bounds(qkv, dy, kv_heads, documents):
    """y and the gradient of qkv in fp64, each document by itself, with what rounding to bf16 may add to them.

    A kernel rounds to bf16 (2^-9 relative) the weights P, dS = P (dP - delta), y, delta = sum(y dy) and its results; all
    else is fp32. u is four times that, for kernels that round more and for sums and the exponential in fp32.
    """
    u, heads = 2.0**-7, dy.shape[1]
    q, k, v = qkv.detach().double().transpose(1, 2).split((heads, kv_heads, kv_heads), dim=1)
    share = heads // kv_heads
    k, v = (t.repeat_interleave(share, dim=1) for t in (k, v))
    scale = q.shape[-1] ** -0.5
    out = [torch.zeros_like(dy, dtype=torch.float64) for _ in range(2)]
    grads = [torch.zeros(*q.shape[:3], q.shape[3], device="cuda", dtype=torch.float64) for _ in range(6)]
    for row, lengths in enumerate(documents):
        start = 0
        for length in lengths:
            part = (row, slice(None), slice(start, start + length))
            q1, k1, v1, dy1 = q[part], k[part], v[part], dy[part].double()
            causal = torch.ones(length, length, device="cuda", dtype=torch.bool).tril()
            P = (scale * q1 @ k1.mT).masked_fill(~causal, -torch.inf).softmax(-1)
            y, dP = P @ v1, dy1 @ v1.mT
            delta = (y * dy1).sum(-1, keepdim=True)
            dS = P * (dP - delta)
            y_error = u * (P @ v1.abs())
            delta_error = ((y_error + u * y.abs()) * dy1.abs()).sum(-1, keepdim=True) + u * delta.abs()
            dS_error = P * (delta_error + u * (dP.abs() + delta.abs()))
            out[0][part], out[1][part] = y, y_error + u * y.abs()
            values = (scale * dS @ k1, scale * dS.mT @ q1, P.mT @ dy1)
            errors = (scale * dS_error @ k1.abs(), scale * dS_error.mT @ q1.abs(), u * P.mT @ dy1.abs())
            for target, value in zip(grads, (*values, *errors), strict=True):
                target[part] = value
            start += length
    for i in (1, 2, 4, 5):  # heads that share a key and value add up
        grads[i] = grads[i].unflatten(1, (kv_heads, share)).sum(2)
    value, error = (torch.cat(part, dim=1).transpose(1, 2) for part in (grads[:3], grads[3:]))
    return (out[0], value), (out[1], error + share * u * value.abs() + 1e-6)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("length", "heads", "kv_heads", "dim"), SHAPES)
def test_each_kernel_is_attention_and_the_repeatable_ones_repeat_their_bits(
    length, heads, kv_heads, dim, masked
):
    qkv, dy = leaves(length, heads, kv_heads, dim)
    documents = DOCUMENTS[length] if masked else ([length], [length])
    seq_idx = numbers(*documents).cuda() if masked else None
    want, bounds = exact_and_bounds(qkv, dy, kv_heads, documents)
    masks = {
        flex.repeatable: flex.block_mask(seq_idx, qkv),
        flex.fastest: flex.documents_mask(seq_idx, qkv),
        flex.products: seq_idx,
    }
    for kernel, mask in masks.items():
        if kernel is flex.fastest and masked:
            continue  # that is flex.repeatable
        compiled = kernel
        if kernel is not flex.products:  # as in a block
            compiled = torch.compile(kernel, fullgraph=True, dynamic=False)
        results = [run(compiled, qkv, dy, kv_heads, mask) for _ in range(4)]
        for name, value, exact, bound in zip(("y", "gradient"), results[0], want, bounds, strict=True):
            worst = ((value.double() - exact).abs() / (bound + 1e-6)).max().item()
            assert worst <= 1, f"{kernel.__name__}: {name} is {worst:.3g} times its bound off"
            assert (value.double() - exact).norm() <= 2**-7 * exact.norm()  # rounding errors do not add up
        if kernel is not flex.fastest:
            assert all(torch.equal(a, b) for again in results for a, b in zip(again, results[0], strict=True))


@needs_gpu
@pytest.mark.gpu
def test_it_runs_by_itself_where_nothing_is_compiled():
    for length, heads, kv_heads, dim in SHAPES[::2]:
        qkv, dy = leaves(length, heads, kv_heads, dim)
        seq_idx = numbers(*DOCUMENTS[length]).cuda()
        want, bounds = exact_and_bounds(qkv, dy, kv_heads, DOCUMENTS[length])
        with torch.compiler.set_stance("force_eager"):
            got = run(flex.repeatable, qkv, dy, kv_heads, flex.block_mask(seq_idx, qkv))
        for value, exact, bound in zip(got, want, bounds, strict=True):
            assert ((value.double() - exact).abs() <= bound + 1e-6).all()


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "masked"), [("bf16", True), ("nvfp4", False)])
def test_a_step_has_the_same_gradients_bit_by_bit(precision, masked):
    """Two blocks of each kind, compiled as the trainer does."""
    cfg = compose_config(
        [
            "+experiment=125m_hybrid",
            "data.source=unused",
            f"precision={precision}",
            "model.pattern=M-*M-*-",
            "training.seq_len=1024",
        ]
    )
    device = torch.device("cuda")
    model = HybridModel(cfg.model, device)
    initialize_(model, 0)
    apply_recipe(model, cfg.precision, len(cfg.model.pattern), 0)
    choose_kernels(model, "auto", device)
    compile_blocks(model, "on", device)
    gen = torch.Generator().manual_seed(0)
    tokens = torch.randint(cfg.model.vocab_size, (4, 1025), generator=gen).cuda()
    seq_idx = numbers(*[[700, 324], [1, 1023], [1024], [300] * 3 + [124]]).cuda() if masked else None
    steps = []
    for _ in range(4):
        model.zero_grad()
        loss, _ = model.loss(tokens[:, :-1], tokens[:, 1:], seq_idx)
        loss.backward()
        steps.append({"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}})
    for again in steps[1:]:
        differ = [name for name, value in steps[0].items() if not torch.equal(value, again[name])]
        assert not differ, f"the first of {len(differ)}, in the order of the forward pass: {differ[0]}"
