"""The kernels of the scan's states against their formulas in fp64. Without a GPU: `test_triton_without_gpu.py`."""

import pytest
import torch
from nvfp4_kernels.triton import scan_states

CHUNK, CHUNKS, LENGTH = 64, 4, 230  # the last chunk is cut short
# A document of a chunk and more, one that ends with a chunk, ends inside chunks, one that begins in the last chunk.
DOCUMENTS = torch.tensor(
    [[0] * 30 + [1] * 134 + [2] * 66, [5] * 128 + [6] * 80 + [9] * 22], dtype=torch.int32
)


def inputs(dtype, heads, groups, head_dim, state):
    """x, dy, b, c, dt, decay as a model has them: x, b and c are slices of one tensor."""
    gen = torch.Generator().manual_seed(0)
    wide = torch.randn(2, LENGTH, heads * head_dim + 2 * groups * state + 24, generator=gen).to(dtype)
    x, b, c, _ = wide.split((heads * head_dim, groups * state, groups * state, 24), -1)
    dy = torch.randn(2, LENGTH, heads, head_dim, generator=gen).to(dtype)
    dt = torch.rand(2, heads, CHUNKS * CHUNK, generator=gen)
    dt[..., LENGTH:] = 0
    dt = dt.unflatten(-1, (CHUNKS, CHUNK)).contiguous()
    b, c = (t.unflatten(-1, (groups, state)) for t in (b, c))
    return x.unflatten(-1, (heads, head_dim)), dy, b, c, dt, (-0.02 * dt).cumsum(-1)


def tokens_of_chunks(t):
    """[B, S, ...] -> fp64 [B, chunks, chunk, ...] with zeros past the end."""
    end = t.new_zeros(2, CHUNKS * CHUNK - LENGTH, *t.shape[2:])
    return torch.cat((t, end), 1).unflatten(1, (CHUNKS, CHUNK)).double()


def expected(x, dy, b, c, dt, decay, ids):
    """States, their gradients and that of the last sums, from fp64 sums chunk by chunk; states as the backward pass has
    them, rounded to b's dtype."""
    dtype, heads_a_group = b.dtype, x.shape[2] // b.shape[2]
    x, dy, b, c = (tokens_of_chunks(t) for t in (x, dy, b, c))
    b, c = (t.repeat_interleave(heads_a_group, 3) for t in (b, c))
    dt, decay = dt.double(), decay.double()
    ids = torch.zeros(2, LENGTH) if ids is None else ids
    end = ids[:, -1:].expand(-1, CHUNKS * CHUNK - LENGTH)
    ids = torch.cat((ids, end), 1).unflatten(1, (CHUNKS, CHUNK))
    last = ids[:, :, -1]
    fade = decay[..., -1].exp()  # [B, heads, chunks]
    fade[..., 1:] *= (last[:, 1:] == last[:, :-1])[:, None]
    left = (decay[..., -1:] - decay).exp() * dt * (ids == last[..., None])[:, None]
    fed = torch.einsum("bhck,bckhp,bckhn->cbhpn", left, x, b)
    into = decay[:, :, 1:].exp() * (ids[:, 1:] == last[:, :-1, None])[:, None]
    read = torch.einsum("bhck,bckhp,bckhn->cbhpn", into, dy[:, 1:], c[:, 1:])
    states, dstates = [torch.zeros_like(fed[0])], [torch.zeros_like(fed[0])]
    for chunk in range(CHUNKS - 1):
        states.append(fade[..., chunk, None, None] * states[-1] + fed[chunk])
    for chunk in range(CHUNKS - 1, 0, -1):
        dstates.append(fade[..., chunk, None, None] * dstates[-1] + read[chunk - 1])
    states, dstates = torch.stack(states, 1), torch.stack(dstates[::-1], 1)
    dtotal = torch.einsum("bchpn,bchpn,bhc->bhc", states.to(dtype).double(), dstates, fade)
    return states, dstates, dtotal


def check(ids, dtype, device, heads=4, groups=2, head_dim=20, state=24):
    x, dy, b, c, dt, decay = tensors = inputs(dtype, heads, groups, head_dim, state)
    wanted = expected(*tensors, ids)
    # The same sums of the terms' sizes: what rounding the weighted x and dy, each by at most a unit, may do to them.
    sizes = expected(x.abs(), dy.abs(), b.abs(), c.abs(), dt, decay, ids)
    x, dy, b, c, dt, decay = (t.to(device) for t in tensors)
    ids = None if ids is None else ids.to(device)
    rounded = wanted[0].to(dtype).to(device)
    states, again = (scan_states.chunk_states(x, b, dt, decay, ids) for _ in range(2))
    assert torch.equal(states, again)
    got = scan_states.chunk_states_backward(c, dy, decay, rounded, ids)
    for first, second in zip(got, scan_states.chunk_states_backward(c, dy, decay, rounded, ids), strict=True):
        assert torch.equal(first, second)
    assert (states.dtype, got[0].dtype, got[1].dtype) == (dtype, dtype, torch.float32)
    # Terms rounded to bf16, 2^-8, and results too; fp32 sums of at most 4 x 64 terms and decays of a few ulp: 400 x 2^-24.
    # The gradient of a sum takes dstates unrounded.
    bf16, fp32 = 0.0 if dtype == torch.float32 else 2.0**-8, 400 * 2.0**-24
    for name, result, want, size, roundings in zip(
        ("states", "dstates", "dtotal"), (states, *got), wanted, sizes, (2, 2, 1), strict=True
    ):
        assert result.shape == want.shape, name
        excess = (result.double().cpu() - want).abs() - (roundings * 1.01 * bf16 + fp32) * size
        assert excess.max() <= 0, f"{name}: {excess.max()} beyond its bound"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 80])
def test_equals_its_formula_on_the_device(masked, head_dim):
    check(DOCUMENTS if masked else None, torch.bfloat16, "cuda", 16, 2, head_dim, 128)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_single_chunk_has_no_states():
    x, dy, b, c, dt, decay = (t.cuda() for t in inputs(torch.bfloat16, 16, 2, 64, 128))
    x, dy, b, c = (t[:, :50] for t in (x, dy, b, c))
    dt, decay = (t[:, :, :1].contiguous() for t in (dt, decay))
    states = scan_states.chunk_states(x, b, dt, decay, None)
    assert states.shape == (2, 1, 16, 64, 128)
    for result in (states, *scan_states.chunk_states_backward(c, dy, decay, states, None)):
        assert not result.any()


def test_refuses_other_chunks():
    x, dy, b, c, dt, decay = inputs(torch.float32, 4, 2, 20, 24)
    dt, decay = (t.reshape(2, 4, -1, 16) for t in (dt, decay))
    with pytest.raises(ValueError, match="chunks of 64 or 128 tokens, not 16"):
        scan_states.chunk_states(x, b, dt, decay, None)
    with pytest.raises(ValueError, match="chunks of 64 or 128 tokens, not 16"):
        scan_states.chunk_states_backward(c, dy, decay, torch.empty(0), None)
