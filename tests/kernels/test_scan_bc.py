"""The scan's gradients of B and C against autograd of the formula, in fp64. Without a GPU: `test_triton_without_gpu.py`."""

import pytest
import torch

from tests.kernels.test_scan_inside import cut, inputs, on_the_device


def arguments(dtype, **sizes):
    """x, dy, dt, decay, b, c, states, dstates, dscores; no state enters the first chunk, no scores i < j or past the end."""
    x, dy, dt, decay, b, c, dstates, _ = inputs(dtype, **sizes)
    gen = torch.Generator().manual_seed(1)
    states = torch.randn(dstates.shape, generator=gen).to(dtype)
    states[:, 0] = 0
    chunks, chunk = dt.shape[2:]
    dscores = torch.randn(len(b), chunks, b.shape[2], chunk, chunk, generator=gen).to(dtype).triu()
    dscores[:, -1, ..., x.shape[1] - (chunks - 1) * chunk :] = 0
    return [x, dy, dt, decay, b, c, states, dstates, dscores]


def expected(x, dy, dt, decay, b, c, states, dstates, dscores, ids):
    """What `bc_gradients` returns, by autograd; the sizes of the terms of dB and dC that are rounded."""
    chunks, chunk = dt.shape[2:]
    x, dy, b, c = (cut(t, chunk).double() for t in (x, dy, b, c))
    states, dstates, dscores = (t.double() for t in (states, dstates, dscores))
    to_end = (decay[..., -1:] - decay).double().requires_grad_()
    from_start = decay.double().requires_grad_()
    stays, reached = torch.ones(2, len(x), 1, chunks, chunk, dtype=torch.bool)
    if ids is not None:
        ids = cut(ids + 1, chunk)
        ids = torch.where(ids == 0, ids.amax(-1, keepdim=True), ids)
        stays = (ids == ids[..., -1:])[:, None]
        before = torch.cat((ids[:, :1, :1], ids[:, :-1, -1:]), 1)
        reached = (ids == before)[:, None]
    b.requires_grad_(), c.requires_grad_()
    fed = to_end.masked_fill(~stays, -torch.inf).exp() * dt
    carried = from_start.masked_fill(~reached, -torch.inf).exp()
    every = x.shape[3] // b.shape[3]
    left = torch.einsum("bhcj,bcjhp,bchpn,bcjhn->", fed, x, dstates, b.repeat_interleave(every, 3))
    met = torch.einsum("bhci,bcihp,bchpn,bcihn->", carried, dy, states, c.repeat_interleave(every, 3))
    inside = torch.einsum("bcgji,bcign,bcjgn->", dscores, c, b)
    (left + met + inside).backward()
    sizes = [
        torch.einsum("bhcj,bcjhp,bchpn->bcjhn", f.detach(), r.abs(), s.abs()).unflatten(3, (-1, every)).sum(4)
        for f, r, s in ((fed, x, dstates), (carried, dy, states))
    ]
    return (b.grad, c.grad, to_end.grad, from_start.grad), sizes


def check(ids, dtype, device, **sizes):
    from nvfp4_kernels.triton.scan_bc import bc_gradients

    tensors = arguments(dtype, **sizes)
    wanted, rounded = expected(*tensors, ids)
    on_device = [None if t is None else t.to(device) for t in (*tensors, ids)]
    got, again = (bc_gradients(*on_device) for _ in range(2))
    # fp32 sums of up to 16 x 80 + 128 products, of the largest result. With bf16 the scaled rows are rounded, each by at
    # most 2^-8 of its size, and dB and dC themselves.
    bf16 = 0.0 if dtype == torch.float32 else 2.0**-8
    for k, name in enumerate(("dB", "dC", "next", "before")):
        assert torch.equal(got[k], again[k]), name
        result, want = got[k].double().cpu(), wanted[k]
        limit = 1e-5 * want.abs().max()
        if k < 2:
            assert got[k].dtype == dtype
            result, limit = cut(result, tensors[2].shape[-1]), limit + bf16 * 1.01 * (rounded[k] + want.abs())
        assert result.shape == want.shape, name
        excess = ((result - want).abs() - limit).max()
        assert excess <= 0, f"{name}: {excess} beyond its bound"


test_equals_its_formula_on_the_device = on_the_device(check)


def test_refuses_other_chunks():
    from nvfp4_kernels.triton.scan_bc import bc_gradients

    x, dy, dt, decay, *rest = arguments(torch.float32)
    with pytest.raises(ValueError, match="multiples of 64 tokens, not 32"):
        bc_gradients(x, dy, dt.unflatten(-1, (-1, 32)).flatten(2, 3), decay, *rest, None)
