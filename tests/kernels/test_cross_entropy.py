"""The kernel of the cross entropy against fp64; test_triton_without_gpu.py runs these checks in Triton's interpreter."""

import pytest
import torch
from nvfp4_kernels.triton import cross_entropy as host
from nvfp4_kernels.triton.cross_entropy import cross_entropy

LARGEST = 30.0  # magnitude of logits


def in_fp64(logits, targets, keep):
    """Losses and gradients."""
    log_probabilities = logits.double().log_softmax(-1)
    grad = log_probabilities.exp()
    grad.scatter_add_(-1, targets[:, None], grad.new_full((1, 1), -1.0).expand(len(targets), 1))
    return -log_probabilities.gather(-1, targets[:, None])[:, 0] * keep, grad * keep[:, None]


def check(rows, vocabulary, dtype, device):
    """Drawn logits with -inf among them; the same bits twice, and with or without the gradient."""
    gen = torch.Generator().manual_seed(rows + vocabulary)
    logits = (torch.randn(rows, vocabulary, generator=gen) * 6).clamp(-LARGEST, LARGEST).to(dtype).to(device)
    targets = torch.randint(vocabulary, (rows,), generator=gen).to(device)
    keep = (torch.rand(rows, generator=gen) < 0.8).to(device)
    absent = (torch.rand(rows, vocabulary, generator=gen) < 0.1).to(device)
    logits[absent.scatter(-1, targets[:, None], False)] = -torch.inf
    loss, grad = in_fp64(logits, targets, keep)

    results = []
    for gradient in (False, True, True):
        at = logits.clone()
        results.append((cross_entropy(at, targets, keep, gradient), at))
    assert torch.equal(results[0][1], logits)
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(a, b) for a, b in zip(*results[1:], strict=True))
    got_loss, got_grad = (t.double() for t in results[1])
    # exp errs by |v| 2^-23 + 2^-21 relative, and is taken for an addend and for each move of its lane's maximum after it,
    # together over |v| <= 2 LARGEST; a sum errs by 2^-24 an addition: those in a lane, then across lanes.
    width = 2 * 16 // logits.element_size()
    blocks = -(-vocabulary // (32 * host.WARPS * width))
    relative = 4 * LARGEST * 2**-23 + (blocks + 2) * 2**-21 + ((width + 2) * blocks + 10) * 2**-24
    torch.testing.assert_close(got_loss, loss, rtol=2**-22, atol=relative + 4 * LARGEST * 2**-24)
    # bf16 rounds to nearest on a device; Triton's interpreter cuts off. The target's is a difference from 1.
    rounding = {torch.float32: 2**-23, torch.bfloat16: 2**-8 if device == "cuda" else 2**-7}[dtype]
    torch.testing.assert_close(got_grad, grad, rtol=2 * relative + rounding, atol=2 * relative + 2**-23)
    small = (grad < 0.5) & (grad >= 0)
    torch.testing.assert_close(got_grad[small], grad[small], rtol=2 * relative + rounding, atol=2**-120)
    assert not got_grad[~keep].any()
    assert not got_loss[~keep].any()


def check_non_finite(vocabulary, device):
    """Losses and gradients are finite, infinite and NaN where those of the definition are, masked rows too."""
    logits = torch.randn(8, vocabulary, generator=torch.Generator().manual_seed(0)).to(device)
    targets = torch.arange(8, device=device) % vocabulary
    keep = torch.arange(8, device=device) < 5
    nan, inf = torch.nan, torch.inf
    logits[0, -1], logits[1, 0], logits[2], logits[3, 3], logits[5, 2], logits[6, 6] = (
        nan,
        inf,
        -inf,
        -inf,
        nan,
        -inf,
    )
    loss, grad = in_fp64(logits, targets, keep)
    got = cross_entropy(logits, targets, keep, True)
    assert got.isfinite().tolist() == [False] * 4 + [True, False, False, True]
    # 1e-5: logits of size below 5, 300 to 70,000 of them.
    torch.testing.assert_close(got.double(), loss, rtol=0, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(logits.double(), grad, rtol=0, atol=1e-5, equal_nan=True)

    logits = torch.zeros(2, vocabulary, device=device)
    outside = torch.tensor([-1, vocabulary], device=device)
    assert cross_entropy(logits, outside, keep[:2], True).isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("rows", "vocabulary", "dtype"),
    [
        (5, 97, torch.bfloat16),
        (300, 1000, torch.bfloat16),
        (37, 50257, torch.bfloat16),
        (700, 65536, torch.bfloat16),
        (50, 262144, torch.bfloat16),
        (5, 97, torch.float32),
        (64, 65536, torch.float32),
    ],
)
def test_equals_fp64_on_the_device(rows, vocabulary, dtype):
    check(rows, vocabulary, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_numbers_that_are_not_finite_on_the_device():
    for vocabulary in (300, 65536):
        check_non_finite(vocabulary, "cuda")


def test_refuses_logits_that_are_not_contiguous():
    logits = torch.zeros(4, 6)[:, :5]
    with pytest.raises(ValueError, match="contiguous bf16 or fp32 logits"):
        cross_entropy(logits, torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool), True)
