"""The norms' kernels on a CUDA device, at the widths of real models: against fp64, and the same bits every time."""

import pytest
import torch
from nvfp4_kernels import SIGNS, amax, producers
from nvfp4_kernels.triton import ops

from nvfp4_train.precision.producers import rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1024, 1003])
@pytest.mark.parametrize(
    ("cols", "groups", "gated"), [(2048, 1, False), (4096, 8, True), (5120, 1, False), (10240, 8, True)]
)
def test_norm_and_its_gradients(cols, groups, gated, rows, dtype):
    """A bf16 result is rounded once; before that a sum of fp32 numbers loses at most a bit for each of its serial additions,
    64 in a chunk of rows, and the sigmoid's argument as many as its size has."""
    signs = SIGNS if rows % 16 == 0 else None
    generator = torch.Generator("cuda").manual_seed(cols)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=generator)

    x, weight, dy = normal(rows, cols).to(dtype), normal(cols), normal(rows, cols).bfloat16()
    gate = normal(rows, cols + 2112).bfloat16()[:, :cols] if gated else None

    def results():
        y, rstd, both = producers.rms_norm(x, gate, weight, 1e-5, groups, signs)
        unmeasured, _, none = producers.rms_norm(x, gate, weight, 1e-5, groups, measured=False)
        assert torch.equal(y, unmeasured)
        assert none.numel() == 0
        return y, *producers.rms_norm_backward(dy, x, gate, rstd, weight), both

    y, dx, dgate, dweight, both = results()
    for a, b in zip(results(), (y, dx, dgate, dweight, both), strict=True):
        assert a is b is None or torch.equal(a, b)
    assert torch.equal(both.cpu(), amax(y.cpu(), signs, backend="reference"))
    leaves = [t.double().requires_grad_() for t in (x, weight, gate) if t is not None]
    exact = rms_norm(*leaves[:2], 1e-5, gate=leaves[2] if gated else None, groups=groups)
    wanted = exact, *torch.autograd.grad(exact, leaves, dy.double())
    for got, want in zip((y, dx, dweight, dgate)[: len(wanted)], wanted, strict=True):
        assert got.is_contiguous()
        step = 2**-8 if got.dtype == torch.bfloat16 else 0
        torch.testing.assert_close(got.double(), want, rtol=step, atol=2e-5 * want.abs().max().item())


def test_a_compiled_norm_reads_its_gate_where_it_is(monkeypatch):
    strides, word_rows = [], ops._word_rows

    def watched(gate):
        strides.append(gate.stride())
        return word_rows(gate)

    def norm(y, projected, weight):
        return rms_norm(y, weight, 1e-5, gate=projected[..., :512], groups=4, fused=True)

    monkeypatch.setattr(ops, "_word_rows", watched)
    leaves = [
        torch.randn(shape, device="cuda").to(dtype).requires_grad_()
        for shape, dtype in (
            ((2, 48, 512), torch.bfloat16),
            ((2, 48, 1040), torch.bfloat16),
            ((512,), torch.float32),
        )
    ]
    dy = torch.randn(2, 48, 512, device="cuda").bfloat16()
    results = []
    for function in (norm, torch.compile(norm, fullgraph=True)):
        y = function(*leaves)
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    assert strides == [(1040, 1)] * 2
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
