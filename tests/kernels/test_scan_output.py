"""The scan's kernels of decays and of the output against their formulas, in fp64. Without a GPU:
`test_triton_without_gpu.py`."""

import pytest
import torch

from tests.kernels.test_scan_inside import CHUNK, CHUNKS, LENGTH, cut, inputs

# They end inside blocks, with the chunk, and inside the second chunk.
DOCUMENTS = torch.tensor([[0] * 30 + [1] * 98 + [2] * 72, [5] * 150 + [6] * 50])


def expected(x, dt, decay, b, c, states, d, ids):
    """`chunk_outputs`'s y by chunks, and the sum of the sizes of what tokens get from their own chunk."""
    same = entered = torch.ones(())
    if ids is not None:
        ids = cut(ids + 1)
        same = (ids[..., :, None] == ids[..., None, :])[:, None]
        # The chunk before ends with this document; no chunk is before the first, and its documents all differ from the end.
        before = torch.cat((ids[:, :1, 0], ids[:, :-1, -1]), 1)
        entered = (ids == before[..., None])[:, :, :, None, None]
    x, b, c, dt, decay, states, d = (t.double() for t in (cut(x), cut(b), cut(c), dt, decay, states, d))
    heads_a_group = x.shape[3] // b.shape[3]
    exponent = (decay[..., :, None] - decay[..., None, :]).tril()  # [B, heads, chunks, i, j]
    scores = torch.einsum("bcign,bcjgn->bgcij", c, b).repeat_interleave(heads_a_group, 1)
    weights = (scores * exponent.exp() * dt[..., None, :]).tril() * same
    c = c.repeat_interleave(heads_a_group, 3)
    carried = torch.einsum("bcihn,bchpn,bhci->bcihp", c, states, decay.exp()) * entered
    inside = torch.einsum("bhcij,bcjhp->bcihp", weights, x)
    sizes = torch.einsum("bhcij,bcjhp->bcihp", weights.abs(), x.abs())
    return carried + inside + d[:, None] * x, sizes


def check(ids, dtype, device, tiles=None, **sizes):
    from nvfp4_kernels.triton import scan_output

    x, _, *rest = inputs(dtype, **sizes)
    want, terms = expected(x, *rest, ids)
    on_device = [t.to(device) for t in (x, *rest)] + [None if ids is None else ids.to(device)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_output, "TILES", tiles or scan_output.TILES)
        got, again = (scan_output.chunk_outputs(*on_device) for _ in range(2))
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert torch.equal(got, again)
    # fp32 sums of up to 2 x 128 products; with bf16 the factors of x and y are rounded, each by at most 2^-8 of its size.
    bf16 = 0.0 if dtype == torch.float32 else 2.0**-8
    end = torch.arange(CHUNKS * CHUNK).view(CHUNKS, CHUNK, 1, 1) < LENGTH
    limit = 1e-5 * want.abs().max() + bf16 * 1.01 * (terms + want.abs())
    excess = (((cut(got.double().cpu()) - want).abs() - limit) * end).max()
    assert excess <= 0, f"{excess} beyond its bound"


def check_decay(length, heads, chunk, device):
    """Both functions of `scan_decay`: fp32 sums of `chunk` terms, dA's of as many as there are tokens."""
    from nvfp4_kernels.triton.scan_decay import chunk_decay, chunk_decay_backward

    gen = torch.Generator().manual_seed(0)
    dt = torch.rand(2, length, heads + 3, generator=gen)[..., 3:]  # a slice
    a = -torch.rand(heads, generator=gen)
    chunks = -(-length // chunk)
    shape = (2, heads, chunks, chunk)
    dsteps, ddecay, before, after = (torch.randn(shape, generator=gen) for _ in range(4))
    last = torch.randn(shape[:3], generator=gen)
    leaves = [t.double().requires_grad_() for t in (dt, a)]
    end = leaves[0].new_zeros(2, chunks * chunk - length, heads)
    steps = torch.cat((leaves[0], end), 1).mT.unflatten(2, (chunks, chunk))
    terms = steps * leaves[1][:, None, None]
    decay = terms.cumsum(-1)
    on_device = [t.to(device) for t in (dt, a)]
    got_steps, got_decay = chunk_decay(*on_device, chunk)
    unit = 2.0**-24
    assert torch.equal(got_steps.double().cpu(), steps.detach())
    excess = (got_decay.double().cpu() - decay).abs() - chunk * unit * terms.abs().sum(-1, keepdim=True)
    assert excess.max() <= 0
    for given in ((before, last, after), (None, None, None)):
        more, at_end, left = (torch.zeros(()) if t is None else t.double() for t in given)
        loss = (steps * dsteps).sum() + (decay * (ddecay + more)).sum()
        loss = loss + (decay[..., -1] * at_end).sum() + ((decay[..., -1:] - decay) * left).sum()
        want_ddt, want_da = torch.autograd.grad(loss, leaves, retain_graph=True)
        grads = [None if t is None else t.to(device) for t in (dsteps, ddecay, *given)]
        results = [chunk_decay_backward(*on_device, *grads) for _ in range(2)]
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        got_ddt, got_da = (t.double().cpu() for t in results[0])
        largest = (ddecay.double() + more).abs().sum(-1).max() + at_end.abs().max() + left.abs().sum(-1).max()
        limit = (chunk + 5) * unit * largest
        assert (got_ddt - want_ddt).abs().max() <= limit
        assert (got_da - want_da).abs().max() <= 2 * length * (limit + (chunk + 2 * chunks) * unit * largest)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tiles", [((64, 4, 2),), ((128, 8, 3),)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 80])
def test_equals_its_formula_on_the_device(head_dim, masked, tiles):
    ids = DOCUMENTS if masked else None
    check(ids, torch.bfloat16, "cuda", tiles, heads=16, groups=2, head_dim=head_dim, state=128)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("length", "heads", "chunk"), [(200, 64, 128), (256, 24, 64)])
def test_decays_on_the_device(length, heads, chunk):
    check_decay(length, heads, chunk, "cuda")


def test_refuses_other_chunks():
    from nvfp4_kernels.triton.scan_output import chunk_outputs

    x, _, dt, decay, *rest = inputs(torch.float32)
    with pytest.raises(ValueError, match="chunks of 64 or 128 tokens, not 32"):
        chunk_outputs(x, dt.reshape(2, 4, -1, 32), decay, *rest, None)
