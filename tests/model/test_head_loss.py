"""Head and cross entropy a slice at a time, against the whole logits."""

import functools

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_train.model import loss
from nvfp4_train.model.loss import head_loss, slice_loss, slice_loss_triton

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
    """The size of the largest tensor of logits, or as wide, that any operation returns (the transposed head aside), and the
    dtypes of those tensors."""

    elements = 0

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor) and t.shape[-1:] == (VOCAB,) and t.shape != (HIDDEN, VOCAB):
                self.elements = max(self.elements, t.numel())
                self.dtypes.add(t.dtype)
        return out


def test_no_more_than_a_slice_of_logits_exists(monkeypatch):
    monkeypatch.setattr(loss, "SLICE_ELEMENTS", {"cpu": 5 * VOCAB})
    hidden, weight, targets, mask = sample(torch.bfloat16)
    with Largest() as largest:
        head_loss(hidden, weight, targets, mask).backward()
    assert largest.elements == 5 * VOCAB < TOKENS * VOCAB


def cross_entropy_stub(logits, targets, keep, gradient):
    """The kernel's function, by PyTorch; hidden from whoever watches operations."""
    with torch.utils._python_dispatch._disable_current_modes():
        nll = F.cross_entropy(logits.float(), targets, reduction="none") * keep
        if gradient:
            grad = logits.float().softmax(-1) - F.one_hot(targets, logits.shape[-1])
            logits.copy_(grad * keep[:, None])
        return nll


@pytest.mark.parametrize("masked", [False, True])
def test_around_the_kernel_everything_is_as_in_the_reference(monkeypatch, masked):
    """And the bf16 logits, with the gradient written over them, are all that is as wide."""
    monkeypatch.setattr(loss, "SLICE_ELEMENTS", {"cpu": 5 * VOCAB})
    monkeypatch.setattr(loss, "cross_entropy", cross_entropy_stub)
    hidden, weight, targets, mask = sample(torch.bfloat16)
    mask = mask if masked else None
    results = []
    for function in (slice_loss_triton, slice_loss):
        with Largest() as largest:
            value = head_loss(hidden, weight, targets, mask, function)
        assert (largest.dtypes == {torch.bfloat16}) == (function is slice_loss_triton)
        results.append([value, *torch.autograd.grad(value * 0.25, (hidden, weight))])
        with torch.no_grad():
            assert torch.equal(head_loss(hidden, weight, targets, mask, function), value)
    for got, want in zip(*results, strict=True):
        # Probabilities that differ by an fp32 ulp may round to neighbouring bf16 numbers.
        assert (got - want).abs().max() <= 2**-8 * want.abs().max()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_on_the_device(monkeypatch, request, masked):
    """Three slices, the last of them short: against fp64 arithmetic on the bf16 gradients that the kernel makes."""
    tokens, size, vocab, rows = 1100, 256, 2056, 512
    monkeypatch.setattr(loss, "SLICE_ELEMENTS", {"cuda": rows * vocab})
    # monkeypatch can't undo this one: it isn't in the object's dictionary.
    matmul, name = torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"
    request.addfinalizer(functools.partial(setattr, matmul, name, getattr(matmul, name)))
    setattr(matmul, name, False)
    gen = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, device="cuda")

    hidden = normal(tokens, size).bfloat16().requires_grad_()
    weight = (normal(vocab, size) / 8).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=gen, device="cuda")
    keep = torch.rand(tokens, generator=gen, device="cuda") < (0.7 if masked else 2)
    mask = keep if masked else None

    def run(function):
        value = head_loss(hidden, weight, targets, mask, function)
        return [value.detach(), *torch.autograd.grad(value * 0.25, (hidden, weight))]

    got, again, reference = run(slice_loss_triton), run(slice_loss_triton), run(slice_loss)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    with torch.no_grad():
        assert torch.equal(head_loss(hidden, weight, targets, mask, slice_loss_triton), got[0])
        parts = zip(*(t.split(rows) for t in (hidden, targets, keep)), strict=True)
        grad = torch.cat([slice_loss_triton(h, weight.bfloat16(), t, k, True)[1] for h, t, k in parts])
        grad, exact_hidden, exact_weight = grad.double(), hidden.double(), weight.bfloat16().double()
        # Sums in fp32 of bf16 products, which are exact: each addend is cut off at most once as it is aligned and once as it
        # is added, by 2^-23 of the sum of magnitudes. hidden's gradient is then rounded to bf16. A quarter is exact.
        want, bound = exact_hidden.T @ grad, exact_hidden.abs().T @ grad.abs() * tokens * 2**-22
        assert ((got[2].double().T - want * 0.25).abs() <= bound).all()
        want, bound = grad @ exact_weight, grad.abs() @ exact_weight.abs() * vocab * 2**-22
        assert ((got[1].double() - want * 0.25).abs() <= bound + want.abs() * 2**-8).all()
    # The two paths have the same logits: the losses differ in fp32's last bits, the gradients where bf16 rounds.
    torch.testing.assert_close(got[0], reference[0], rtol=1e-6, atol=0)
    for a, b in zip(got[1:], reference[1:], strict=True):
        assert (a.double() - b.double()).norm() <= 2**-8 * b.double().norm()
    assert not got[1][~keep].any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def test_what_the_loss_is_multiplied_with_is_not_rounded(device):
    gen = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(70, 16, generator=gen).bfloat16(), torch.randn(50, 16, generator=gen)
    hidden, weight = (t.to(device).requires_grad_() for t in (hidden, weight))
    targets = torch.randint(50, (70,), generator=gen).to(device)
    loss = head_loss(hidden, weight, targets)
    (whole,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    third = torch.tensor(1 / 3, device=device)
    (part,) = torch.autograd.grad(loss * third, hidden)
    assert torch.equal(part, (whole.double() * third.double()).float().bfloat16())


@needs_gpu
@pytest.mark.gpu
def test_on_the_device_the_logits_are_the_memory_it_takes():
    tokens, size, vocab = 4096, 64, 65536
    hidden = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, size, device="cuda", requires_grad=True)
    targets = torch.randint(vocab, (tokens,), device="cuda")
    head_loss(hidden, weight, targets, None, slice_loss_triton).backward()  # cuBLAS takes its workspace
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    head_loss(hidden, weight, targets, None, slice_loss_triton).backward()
    logits, head = tokens * vocab * 2, vocab * size * (2 + 4 + 4)
    assert logits <= torch.cuda.max_memory_allocated() - before <= logits + head + tokens * size * 4 + 2**24
