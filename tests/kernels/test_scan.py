"""The whole scan of our kernels against PyTorch's, in fp32. In bf16: tests/model/test_kernels.py."""

import torch

from nvfp4_train.model.ssd import ssd_chunked


def check(masked, chunk, heads=4, groups=2, head_dim=20, state=16, length=200):
    """Results and gradients in fp32 against fp64's: sums of some hundred terms, each within 1e-5 of the largest result."""
    from nvfp4_kernels.triton import scan

    gen = torch.Generator().manual_seed(0)
    bc = (2, length, groups, state)
    shapes = [(2, length, heads, head_dim), (2, length, heads), (heads,), bc, bc, (heads,)]
    x, dt, a, b, c, d = (torch.randn(shape, generator=gen) for shape in shapes)
    inputs = x, dt.sigmoid(), -a.exp(), b, c, d
    ids = (torch.arange(length) // 37).int()[None].expand(2, -1) if masked else None
    y, *kept = scan.forward(*inputs, chunk, ids)
    leaves = [t.double().requires_grad_() for t in inputs]
    want = ssd_chunked(*leaves, chunk, ids)
    dy = torch.randn(y.shape, generator=gen)
    grads = scan.backward(dy, *inputs, *kept, ids)
    wanted = torch.autograd.grad(want, leaves, dy.double())
    for got, exact in zip((y, *grads), (want, *wanted), strict=True):
        assert got.shape == exact.shape
        assert (got - exact).abs().max() <= 1e-5 * exact.abs().max()
