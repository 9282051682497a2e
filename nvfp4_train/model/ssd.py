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

    Where bf16 rounds (x in bf16): C B^T, then C B^T x decay x dt; x x decay x dt; the chunks' own states; the
    states that enter chunks; and the two products that make y. Decays, their sums, the passing of states from
    chunk to chunk and the sum of y's parts are fp32. Decay exponents are masked before exp, never after: a
    masked exponent may be large and positive, and inf * 0 would poison the gradient.
    """
    length, q = x.shape[1], min(chunk_size, x.shape[1])
    pad = -length % q
    if pad:  # dt = 0: padded tokens neither decay nor feed the state
        x, B, C = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (x, B, C))
        dt = F.pad(dt, (0, 0, 0, pad))
        seq_idx = None if seq_idx is None else F.pad(seq_idx, (0, pad), value=-1)
    batch, padded, heads, p = x.shape

    shape = (batch, padded // q, q)  # b, c, q
    x, dt, B, C = (t.reshape(*shape, *t.shape[2:]) for t in (x, dt, B, C))
    ids = None if seq_idx is None else seq_idx.reshape(shape)

    a = (dt * A).cumsum(2)  # log of the decay from the chunk's start through token q
    B, C = B.transpose(2, 3), C.transpose(2, 3)  # [b, c, g, q, n]
    within = _within_chunks(x, dt, a, B, C, ids)
    entering = _pass_states(_chunk_states(x, dt, a, B, ids), a[:, :, -1], ids)
    carried = (C @ entering.transpose(-1, -2)).transpose(2, 3).reshape(x.shape)
    into = a if ids is None else a.masked_fill((ids != _previous_last(ids))[..., None], -torch.inf)
    y = within + carried * into.exp()[..., None] + x * D[:, None]
    y = y.reshape(batch, padded, heads, p)
    return y[:, :length] if pad else y


def _within_chunks(x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor, ids: Tensor | None) -> Tensor:
    """What tokens get from their own chunk, [b, c, q, h, p]."""
    q, heads, groups = x.shape[2], x.shape[3], B.shape[2]
    a, dt = a.transpose(2, 3), dt.transpose(2, 3)  # [b, c, h, q]
    seen = torch.ones(q, q, dtype=torch.bool, device=x.device).tril()
    if ids is not None:
        seen = seen & (ids[..., :, None] == ids[..., None, :])[:, :, None]
    decay = (a[..., :, None] - a[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    weights = (decay * dt[..., None, :]).unflatten(2, (groups, heads // groups))
    weights = ((C @ B.transpose(-1, -2))[:, :, :, None] * weights).to(x.dtype).flatten(2, 3)
    return (weights @ x.transpose(2, 3)).transpose(2, 3)


def _chunk_states(x: Tensor, dt: Tensor, a: Tensor, B: Tensor, ids: Tensor | None) -> Tensor:
    """The state that each chunk's last document leaves at the chunk's end, [b, c, g, heads a group * p, n]."""
    left = a[:, :, -1:] - a
    if ids is not None:
        left = left.masked_fill((ids != ids[:, :, -1:])[..., None], -torch.inf)
    fed = (x * (left.exp() * dt)[..., None]).to(x.dtype)
    fed = fed.unflatten(3, (B.shape[2], -1)).flatten(4)  # [b, c, q, g, heads a group * p]
    return fed.permute(0, 1, 3, 4, 2) @ B


def _pass_states(states: Tensor, total: Tensor, ids: Tensor | None) -> Tensor:
    """The state that enters each chunk, from the chunks' own states and decays total [b, c, h] (logs).

    entering[z] = sum_{c < z} exp(total[c+1] + ... + total[z-1]) states[c], a product with a strictly lower
    triangular matrix. Its exponents are summed term by term, since differences of one long running sum would
    lose digits as it grows.
    """
    batch, chunks, heads = total.shape
    before = torch.ones(chunks, chunks, dtype=torch.bool, device=total.device).tril(-1)  # [z, c]: c < z
    terms = total.transpose(1, 2)[..., None].expand(-1, -1, -1, chunks).masked_fill(~before, 0)
    exponents = F.pad(terms.cumsum(2)[:, :, :-1], (0, 0, 1, 0))
    if ids is not None:
        before = before & (_previous_last(ids) == ids[:, None, :, -1])[:, None]
    carry = exponents.masked_fill(~before, -torch.inf).exp()  # [b, h, z, c]
    flat = states.reshape(batch, chunks, heads, -1).transpose(1, 2).to(total.dtype)
    return (carry @ flat).transpose(1, 2).reshape(states.shape).to(states.dtype)


def _previous_last(ids: Tensor) -> Tensor:
    """The document at the end of the chunk before, [b, c, 1]; of the first chunk (nothing enters it) its own."""
    return torch.cat((ids[:, :1, :1], ids[:, :-1, -1:]), dim=1)
