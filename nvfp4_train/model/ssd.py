"""Mamba-2's selective scan (state space duality, arXiv 2405.21060), two ways.

The recurrence, for head h in group g = h // (H / G), state S [P, N], zero at a document's start:

    S[t] = exp(dt[t] A) S[t-1] + dt[t] x[t] B[t]^T
    y[t] = S[t] C[t] + D x[t]

`ssd_recurrence` is that, token by token. `ssd_chunked` is the same sum as matrix products over chunks.

Shapes of both: x [B, L, H, P]; dt [B, L, H], after softplus, in the accumulation dtype (fp32, or fp64 for fp64
x); A [H] (negative); B and C [B, L, G, N] in x's dtype; D [H]; seq_idx None or integer [B, L], in every row
non-decreasing, one number a document. They return y [B, L, H, P] in the accumulation dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def ssd_step(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: state [B, H, P, N], x [B, H, P], dt [B, H], B and C [B, G, N] -> y [B, H, P], the next state."""
    heads_a_group = x.shape[1] // B.shape[1]
    acc = dt.dtype
    x = x.to(acc)
    B = B.to(acc).repeat_interleave(heads_a_group, dim=1)
    C = C.to(acc).repeat_interleave(heads_a_group, dim=1)
    state = state * (dt * A).exp()[..., None, None] + (x * dt[..., None])[..., None] * B[:, :, None]
    return (state * C[:, :, None]).sum(-1) + D[:, None] * x, state


def ssd_recurrence(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, seq_idx: Tensor | None = None
) -> Tensor:
    """The definition, one token after the other: what `ssd_chunked` must equal."""
    batch, length, heads, p = x.shape
    state = dt.new_zeros(batch, heads, p, B.shape[-1])
    ys = []
    for t in range(length):
        if seq_idx is not None and t > 0:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        y, state = ssd_step(state, x[:, t], dt[:, t], A, B[:, t], C[:, t], D)
        ys.append(y)
    return torch.stack(ys, dim=1)


def ssd_chunked(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """The scan as four matrix products a chunk and one between chunks; any length, ragged last chunk included.

    Where bf16 rounds (x in bf16): C B^T, then C B^T x decay; x dt and x dt x decay; the chunks' own states; the
    states that enter chunks; and the two products that make y. Decays, their sums, the passing of states from
    chunk to chunk and the sum of y's parts are fp32. Decay exponents are masked before exp, never after: a
    masked exponent may be large and positive, and inf * 0 would poison the gradient.
    """
    return _chunked(x, dt, A, B, C, D, chunk_size, seq_idx)[0]


def ssd_prefill(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """`ssd_chunked`'s y, and the state after the last token, [B, H, P, N] in the accumulation dtype."""
    y, entering, states, total = _chunked(x, dt, A, B, C, D, chunk_size, None)
    batch, groups, n, _ = states.shape
    heads = total.shape[-1]
    entering, states = (
        t.to(dt.dtype).reshape(batch, groups, n, heads // groups, -1) for t in (entering, states)
    )
    decay = total.exp().view(batch, groups, 1, heads // groups, 1)
    return y, (entering * decay + states).permute(0, 1, 3, 4, 2).reshape(batch, heads, -1, n)


def _chunked(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, chunk_size: int, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y; and of the last chunk the entering state and its own, [b, g, n, heads a group * p], and its decay's log [b, h]."""
    length, q = x.shape[1], min(chunk_size, x.shape[1])
    pad = -length % q
    if pad:  # dt = 0: padded tokens neither decay nor feed the state
        x, B, C = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (x, B, C))
        dt = F.pad(dt, (0, 0, 0, pad))
        seq_idx = None if seq_idx is None else F.pad(seq_idx, (0, pad), value=-1)
    batch, padded, heads, p = x.shape
    groups, n = B.shape[2:]
    shape = (batch, padded // q, q)  # b, c, q
    x = x.reshape(*shape, heads, p)
    dt = dt.reshape(*shape, heads).transpose(2, 3)  # [b, c, h, q]
    B, C = (t.reshape(*shape, groups, n).transpose(2, 3) for t in (B, C))  # [b, c, g, q, n]
    ids = None if seq_idx is None else seq_idx.reshape(shape)

    a = (dt * A[:, None]).cumsum(3)  # log of the decay from the chunk's start through token q
    within = _within_chunks(x, dt, a, B, C, ids)
    states = _chunk_states(x, dt, a, B, ids)
    entering = _pass_states(states, a[..., -1], ids)
    carried = (C @ entering).transpose(2, 3).reshape(x.shape)
    into = a if ids is None else a.masked_fill((ids != _previous_last(ids))[:, :, None], -torch.inf)
    y = within + carried * into.exp().transpose(2, 3)[..., None] + x * D[:, None]
    y = y.reshape(batch, padded, heads, p)
    return y[:, :length] if pad else y, entering[:, -1], states[:, -1], a[:, -1, :, -1]


def _within_chunks(x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor, ids: Tensor | None) -> Tensor:
    """What tokens get from their own chunk, [b, c, q, h, p].

    The decay matrix is constant to autograd. Its gradient flows through the factors 1 + drift of the rows and
    1 - drift of the columns, exactly 1 in value, so that it costs sums over p instead of sums over q x q. What a
    token gets from itself doesn't decay; apart from the matrix, it adds no rounding error to that gradient.
    """
    q, heads, groups = x.shape[2], x.shape[3], B.shape[2]
    fixed = a.detach()
    drift = a - fixed  # 0
    seen = torch.ones(q, q, dtype=torch.bool, device=x.device).tril(-1)
    if ids is not None:
        seen = seen & (ids[..., :, None] == ids[..., None, :])[:, :, None]
    decay = (fixed[..., :, None] - fixed[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    weights = (C @ B.transpose(-1, -2))[:, :, :, None] * decay.unflatten(2, (groups, heads // groups))
    fed = (x.transpose(2, 3) * (dt * (1 - drift))[..., None]).to(x.dtype)
    y = weights.to(x.dtype).flatten(2, 3) @ fed
    own = (C.to(dt.dtype) * B.to(dt.dtype)).sum(-1).repeat_interleave(heads // groups, dim=2)
    y = y * (1 + drift)[..., None] + x.transpose(2, 3) * (own * dt)[..., None]
    return y.transpose(2, 3)


def _chunk_states(x: Tensor, dt: Tensor, a: Tensor, B: Tensor, ids: Tensor | None) -> Tensor:
    """The state that each chunk's last document leaves at the chunk's end, [b, c, g, n, heads a group * p]."""
    left = a[..., -1:] - a
    if ids is not None:
        left = left.masked_fill((ids != ids[:, :, -1:])[:, :, None], -torch.inf)
    fed = (x * (left.exp() * dt).transpose(2, 3)[..., None]).to(x.dtype)
    fed = fed.unflatten(3, (B.shape[2], -1)).flatten(4)  # [b, c, q, g, heads a group * p]
    return B.transpose(-1, -2) @ fed.transpose(2, 3)


def _pass_states(states: Tensor, total: Tensor, ids: Tensor | None) -> Tensor:
    """The state that enters each chunk, from the chunks' own states and decays total [b, c, h] (logs).

    entering[z] = sum_{c < z} exp(total[c+1] + ... + total[z-1]) states[c], a product with a strictly lower
    triangular matrix. Its exponents are summed term by term, since differences of one long running sum would
    lose digits as it grows.
    """
    chunks, heads, groups = total.shape[1], total.shape[2], states.shape[2]
    before = torch.ones(chunks, chunks, dtype=torch.bool, device=total.device).tril(-1)  # [z, c]: c < z
    terms = total.transpose(1, 2)[..., None].expand(-1, -1, -1, chunks).masked_fill(~before, 0)
    exponents = F.pad(terms.cumsum(2)[:, :, :-1], (0, 0, 1, 0))
    if ids is not None:
        before = before & (_previous_last(ids) == ids[:, None, :, -1])[:, None]
    carry = exponents.masked_fill(~before, -torch.inf).exp()  # [b, h, z, c]
    by_head = states.unflatten(4, (heads // groups, -1)).permute(0, 2, 4, 1, 3, 5)  # [b, g, h, c, n, p]
    passed = carry @ by_head.flatten(1, 2).flatten(3).to(total.dtype)
    return passed.reshape(by_head.shape).permute(0, 3, 1, 4, 2, 5).reshape(states.shape).to(states.dtype)


def _previous_last(ids: Tensor) -> Tensor:
    """The document at the end of the chunk before, [b, c, 1]; of the first chunk (nothing enters it) its own."""
    return torch.cat((ids[:, :1, :1], ids[:, :-1, -1:]), dim=1)
