"""Head and cross entropy a slice at a time, against the whole logits."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_train.model import loss
from nvfp4_train.model.loss import head_loss

TOKENS, HIDDEN, VOCAB = 37, 16, 101


@pytest.fixture(params=[5, 2**21], ids=["slices of 5 tokens", "one slice"])
def rows(request, monkeypatch):
    monkeypatch.setattr(loss, "SLICE_ELEMENTS", {"cpu": request.param * VOCAB})


def sample(dtype):
    gen = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=gen, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=gen, dtype=torch.float64)
    weight = weight.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    return (
        hidden,
        weight,
        torch.randint(VOCAB, (TOKENS,), generator=gen),
        torch.rand(TOKENS, generator=gen) < 0.7,
    )


def reference(hidden, weight, targets, mask):
    nll = F.cross_entropy(hidden.double() @ weight.double().T, targets, reduction="none")
    return (nll if mask is None else nll[mask]).sum()


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_equals_cross_entropy_with_gradients(dtype, rtol, masked):
    hidden, weight, targets, mask = sample(dtype)
    mask = mask if masked else None
    got = head_loss(hidden, weight, targets, mask)
    want = reference(hidden, weight, targets, mask)
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=0)
    # A factor, as gradient accumulation applies one.
    grads = (
        torch.autograd.grad(got * 0.25, (hidden, weight)),
        torch.autograd.grad(want * 0.25, (hidden, weight)),
    )
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max() <= rtol * b.abs().max()
    if masked:
        assert not grads[0][0][~mask].any()


@pytest.mark.usefixtures("rows")
def test_without_gradients_the_same_loss():
    hidden, weight, targets, mask = sample(torch.float32)
    with_gradients = head_loss(hidden, weight, targets, mask)
    with torch.no_grad():
        assert torch.equal(head_loss(hidden, weight, targets, mask), with_gradients)


def test_logits_too_large_for_exp_stay_finite():
    hidden, weight, targets, _ = sample(torch.float32)
    value = head_loss(hidden * 1e3, weight, targets)
    torch.testing.assert_close(
        value.double(), reference(hidden * 1e3, weight, targets, None), rtol=1e-5, atol=0
    )


class Largest(TorchDispatchMode):
    """The size of the largest tensor of logits, or as wide, that any operation returns (the transposed head aside)."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor) and t.shape[-1:] == (VOCAB,) and t.shape != (HIDDEN, VOCAB):
                self.elements = max(self.elements, t.numel())
        return out


def test_no_more_than_a_slice_of_logits_exists(monkeypatch):
    monkeypatch.setattr(loss, "SLICE_ELEMENTS", {"cpu": 5 * VOCAB})
    hidden, weight, targets, mask = sample(torch.bfloat16)
    with Largest() as largest:
        head_loss(hidden, weight, targets, mask).backward()
    assert largest.elements == 5 * VOCAB < TOKENS * VOCAB
