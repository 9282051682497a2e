"""The scan's backward kernel against the gradients of its formula, in fp64. Without a GPU: `test_triton_without_gpu.py`."""

import pytest
import torch

DOCUMENTS = torch.tensor(
    [[0] * 30 + [1] * 100 + [2] * 70, [5] * 150 + [6] * 50]
)  # ends inside blocks and chunks
BATCH, LENGTH, CHUNKS, CHUNK = 2, 200, 2, 128  # the second chunk is cut short


def cut(t, chunk=CHUNK):
    """[B, S, ...] -> [B, chunks, chunk, ...] with zeros past the end."""
    end = t.new_zeros(len(t), -t.shape[1] % chunk, *t.shape[2:])
    return torch.cat((t, end), 1).unflatten(1, (-1, chunk))


def inputs(dtype, heads=4, groups=2, head_dim=20, state=16, length=LENGTH, chunk=CHUNK):
    """x, dy, dt, decay, b, c, dstates, d as a model has them: x, b and c are slices of one tensor."""
    gen = torch.Generator().manual_seed(0)
    wide = torch.randn(BATCH, length, heads * head_dim + 2 * groups * state + 24, generator=gen).to(dtype)
    x, b, c, _ = wide.split((heads * head_dim, groups * state, groups * state, 24), -1)
    dy = torch.randn(BATCH, length, heads, head_dim, generator=gen).to(dtype)
    chunks = -(-length // chunk)
    dt = torch.rand(BATCH, heads, chunks * chunk, generator=gen)
    dt[..., length:] = 0
    dt = dt.unflatten(-1, (chunks, chunk)).contiguous()
    dstates = torch.randn(BATCH, chunks, heads, head_dim, state, generator=gen).to(dtype)
    b, c = (t.unflatten(-1, (groups, state)) for t in (b, c))
    d = torch.randn(heads, generator=gen)
    return [x.unflatten(-1, (heads, head_dim)), dy, dt, (-0.1 * dt).cumsum(-1), b, c, dstates, d]


def expected(x, dy, dt, decay, b, c, dstates, d, ids):
    """What `inside_chunks_backward` returns, by autograd, and the sizes of the terms that make up dx."""
    chunks, chunk = dt.shape[2:]
    same = torch.ones(BATCH, chunks, chunk, chunk, dtype=torch.bool)
    if ids is not None:
        ids = cut(ids + 1, chunk)
        ids = torch.where(ids == 0, ids.amax(-1, keepdim=True), ids)
        same = ids[..., :, None] == ids[..., None, :]
    x, dy, b, c, dt, decay, d = (
        t.double().requires_grad_() for t in (*(cut(t, chunk) for t in (x, dy, b, c)), dt, decay, d)
    )
    heads_a_group = x.shape[3] // b.shape[3]
    exponent = decay[..., :, None] - decay[..., None, :]  # [B, heads, chunks, i, j]
    fade = exponent.masked_fill(~same.tril()[:, None], -torch.inf).exp()
    scores = torch.einsum("bcign,bcjgn->bcgij", c, b)
    scores.retain_grad()
    weights = scores.repeat_interleave(heads_a_group, 2).transpose(1, 2) * fade
    y = torch.einsum("bhcij,bhcj,bcjhp->bcihp", weights, dt, x) + d[:, None] * x
    (ddecay,) = torch.autograd.grad((y * dy).sum(), decay, retain_graph=True)
    left = (decay[..., -1:] - decay).masked_fill(~same[:, None, :, -1], -torch.inf).exp()
    states = torch.einsum("bhcj,bcjhp,bcjhn->bchpn", left * dt, x, b.repeat_interleave(heads_a_group, 3))
    ((y * dy).sum() + (states * dstates).sum()).backward()
    wanted = x.grad, dt.grad, ddecay, scores.grad.transpose(-1, -2), d.grad
    read = torch.einsum("bhcij,bhcj,bcihp->bcjhp", weights.abs(), dt, dy.abs())
    return [t.detach() for t in (*wanted, read)]


def check(ids, dtype, device, **sizes):
    from nvfp4_kernels.triton.scan_inside import inside_chunks_backward

    tensors = inputs(dtype, **sizes)
    *wanted, read = expected(*tensors, ids)
    on_device = [t.to(device) for t in (*tensors, *([] if ids is None else [ids]))]
    on_device += [None] if ids is None else []
    got, again = (inside_chunks_backward(*on_device) for _ in range(2))
    # fp32 sums of up to 128 x 80 products, of the largest result. With bf16 the weights of dy and dx itself are rounded,
    # each by at most 2^-8 of its size, as are dscores; ddt has the same weights, times x, in sums over head_dim.
    bf16 = 0.0 if dtype == torch.float32 else 2.0**-8
    chunk = tensors[2].shape[-1]
    x = cut(tensors[0], chunk).double().abs()
    allowed = {
        "dx": read + wanted[0].abs(),
        "ddt": torch.einsum("bcjhp,bcjhp->bhcj", read / dt_of(tensors), x),
        "dscores": wanted[3].abs(),
    }
    for name, result, same, want in zip(
        ("dx", "ddt", "ddecay", "dscores", "dd"), got, again, wanted, strict=True
    ):
        assert torch.equal(result, same), name
        result = cut(result.double().cpu(), chunk) if name == "dx" else result.double().cpu()
        assert result.shape == want.shape, name
        limit = 1e-5 * want.abs().max() + bf16 * 1.01 * allowed.get(name, torch.zeros(()))
        excess = ((result - want).abs() - limit).max()
        assert excess <= 0, f"{name}: {excess} beyond its bound"


def dt_of(tensors):
    """dt [B, chunks, chunk, heads, 1]; 1 past the end, where nothing is read."""
    dt = tensors[2].double().permute(0, 2, 3, 1)[..., None]
    return torch.where(dt == 0, 1.0, dt)


# Chunks cut short, and whole ones of both sizes, with heads that are whole parts.
SHAPES = [{"head_dim": 32}, {"head_dim": 64}, {"head_dim": 80}]
SHAPES += [{"head_dim": 64, "length": 192, "chunk": 64}, {"head_dim": 80, "length": 128}]


def on_the_device(check):
    """The test that `check` holds on a GPU, in bf16, for all SHAPES."""

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test(masked, shape):
        ids = DOCUMENTS[:, : shape.get("length", LENGTH)] if masked else None
        check(ids, torch.bfloat16, "cuda", heads=16, groups=2, state=128, **shape)

    return test


test_equals_its_formula_on_the_device = on_the_device(check)


def test_refuses_other_chunks():
    from nvfp4_kernels.triton.scan_inside import inside_chunks_backward

    x, dy, dt, decay, *rest = inputs(torch.float32)
    with pytest.raises(ValueError, match="chunks of 64 or 128 tokens, not 16"):
        inside_chunks_backward(x, dy, dt.reshape(BATCH, 4, -1, 16), decay, *rest, None)
