"""The choice of scan, convolution and attention: on a GPU the kernels themselves, without one their place in the model."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from nvfp4_kernels.triton import scan
from torch._inductor import config as inductor

from nvfp4_train.errors import ConfigError
from nvfp4_train.model import flex, mamba_ssm_scan, triton_conv, triton_scan
from nvfp4_train.model.attention import Attention, attend
from nvfp4_train.model.conv import conv_silu, split_conv_silu
from nvfp4_train.model.hybrid import HybridModel, document_numbers
from nvfp4_train.model.init import initialize_
from nvfp4_train.model.kernels import choose_kernels
from nvfp4_train.model.mamba_ssm_scan import ssd_mamba_ssm
from nvfp4_train.model.ssd import ssd_chunked
from nvfp4_train.model.triton_conv import split_conv_silu_triton
from nvfp4_train.model.triton_scan import ssd_triton

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def inputs(dtype=torch.float32, device="cpu", length=40):
    gen = torch.Generator().manual_seed(0)
    shapes = [(2, length, 4, 16), (2, length, 4), (4,), (2, length, 2, 16), (2, length, 2, 16), (4,)]
    x, dt, a, B, C, D = (torch.randn(s, generator=gen).to(device) for s in shapes)
    leaves = [x.to(dtype), dt.sigmoid(), -a.exp(), B.to(dtype), C.to(dtype), D]
    return [t.detach().requires_grad_() for t in leaves]


def documents(device="cpu", length=40):
    return (torch.arange(length, device=device) // 13)[None].expand(2, -1).contiguous()


def reference_gradients(dy, inputs, chunk_size, seq_idx):
    leaves = [t.detach().requires_grad_() for t in inputs]

    def gradients():
        return torch.autograd.grad(ssd_chunked(*leaves, chunk_size, seq_idx), leaves, dy)

    with ThreadPoolExecutor(1) as pool:  # inside an operator this thread has no autograd
        return pool.submit(gradients).result()


class Stub:
    """Has our kernels' two functions, computed by the reference."""

    @staticmethod
    def forward(x, dt, A, B, C, D, chunk_size, seq_idx):
        chunks = -(-x.shape[1] // chunk_size)
        kept = dt.new_empty(x.shape[0], x.shape[2], chunks, chunk_size)
        states = C.new_empty(x.shape[0], chunks, *x.shape[2:], C.shape[-1])
        return ssd_chunked(x, dt, A, B, C, D, chunk_size, seq_idx), kept, kept.clone(), states

    @staticmethod
    def backward(dy, x, dt, A, B, C, D, steps, decay, states, seq_idx):
        return reference_gradients(dy, (x, dt, A, B, C, D), 64, seq_idx)


class PackageStub:
    """Has mamba-ssm's two functions, likewise."""

    @staticmethod
    def _mamba_chunk_scan_combined_fwd(x, dt, A, B, C, chunk_size, D, seq_idx):
        return ssd_chunked(x, dt, A, B, C, D, chunk_size, seq_idx), None

    @staticmethod
    def _mamba_chunk_scan_combined_bwd(dy, x, dt, A, B, C, y, chunk_size, D, seq_idx):
        assert y.shape == x.shape
        return (*reference_gradients(dy, (x, dt, A, B, C, D), chunk_size, seq_idx), None)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scan", [ssd_triton, ssd_mamba_ssm])
def test_the_operator_passes_everything_through(monkeypatch, scan, compiled, masked):
    monkeypatch.setattr(mamba_ssm_scan, "_package", PackageStub)
    monkeypatch.setattr(triton_scan, "scan", Stub)
    seq_idx = documents() if masked else None
    scan = torch.compile(scan, backend="aot_eager", fullgraph=True) if compiled else scan
    results = []
    for function in (scan, ssd_chunked):
        leaves = inputs()
        y = function(*leaves, 64, seq_idx)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def conv_inputs(dtype=torch.float32, device="cpu", length=40, sizes=(64, 32, 32)):
    """A slice of a wider projection, as the model has it; weight, bias."""
    gen = torch.Generator().manual_seed(0)
    channels = sum(sizes)
    shapes = [(2, length, channels + 72), (channels, 1, 4), (channels,)]
    x, weight, bias = (torch.randn(s, generator=gen).to(device) for s in shapes)
    return [t.detach().requires_grad_() for t in (x.to(dtype), weight, bias)]


def conv_results(function, leaves, seq_idx, sizes=(64, 32, 32)):
    """The parts of the split, and the gradients of a sum that weighs every element of them otherwise."""
    parts = function(*leaves, seq_idx, 64, sizes)
    gen = torch.Generator().manual_seed(1)
    # Numbers of bf16: the gradients that bf16 parts receive are rounded to it.
    loss = sum((p.float() * torch.randn(p.shape, generator=gen).bfloat16().to(p.device)).sum() for p in parts)
    return [*parts, *torch.autograd.grad(loss, leaves)]


class ConvStub:
    """Has the kernels' two functions, computed by the reference."""

    forward = staticmethod(lambda *arguments: tuple(part.contiguous() for part in conv_silu(*arguments)))

    @staticmethod
    def backward(grads, x, weight, bias, seq_idx, out):
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]

        def gradients():
            parts = conv_silu(*leaves, seq_idx, tuple(grad.shape[-1] for grad in grads))
            return torch.autograd.grad(parts, leaves, grads)

        with ThreadPoolExecutor(1) as pool:  # inside an operator this thread has no autograd
            dx, dweight, dbias = pool.submit(gradients).result()
        out.copy_(dx)
        return out, dweight.contiguous(), dbias


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_convolutions_operator_passes_everything_through(monkeypatch, compiled, masked):
    monkeypatch.setattr(triton_conv, "conv", ConvStub)
    function = split_conv_silu_triton
    function = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    seq_idx = documents() if masked else None
    got, want = (conv_results(f, conv_inputs(), seq_idx) for f in (function, split_conv_silu))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_why_the_package_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setattr(mamba_ssm_scan, "_package", None)
    if importlib.util.find_spec("mamba_ssm") is None:
        assert mamba_ssm_scan.load() == "mamba-ssm is not installed"
    package = tmp_path / "mamba_ssm"
    (package / "ops" / "triton").mkdir(parents=True)
    for folder in (package, package / "ops", package / "ops" / "triton"):
        (folder / "__init__.py").write_text("import selective_scan_cuda\n" if folder is package else "")
    monkeypatch.syspath_prepend(tmp_path)
    version = "2.2.6"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    try:
        assert mamba_ssm_scan.load() == "mamba-ssm 2.2.6 is older than 2.3"
        version = "2.3.2.post1"
        assert (
            "can't be imported (No module named 'mamba_ssm.ops.triton.ssd_combined'" in mamba_ssm_scan.load()
        )
        functions = "".join(f"def _mamba_chunk_scan_combined_{way}(): ...\n" for way in ("fwd", "bwd"))
        (package / "ops" / "triton" / "ssd_combined.py").write_text(functions)
        importlib.invalidate_caches()
        assert mamba_ssm_scan.load() is None
        assert mamba_ssm_scan._package.__name__ == "mamba_ssm.ops.triton.ssd_combined"
        assert "selective_scan_cuda" not in sys.modules
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]:
            del sys.modules[name]


@inductor.patch(deterministic=False)
@pytest.mark.parametrize(("deterministic", "kernel"), [(True, flex.repeatable), (False, flex.fastest)])
def test_the_attention_of_a_gpu(tiny, deterministic, kernel):
    tiny.ssm_state_size = 256
    tiny.head_dim = 16
    model = HybridModel(tiny, "meta")
    line = choose_kernels(model, "auto", torch.device("cuda"), deterministic)
    assert line.startswith("scan in PyTorch (the scan's state=256 is more than 128); convolution ")
    word = str(deterministic).lower()
    assert ("attention by cuDNN" in line) != deterministic
    assert f"training.deterministic={word}" in line
    assert [layer.mixer.attend for layer in model.layers if isinstance(layer.mixer, Attention)] == [kernel]
    assert inductor.deterministic == deterministic
    numbers = torch.zeros(2, 5, dtype=torch.int32)
    assert model.attention_mask(numbers, numbers).shape == (2, 1, 5, 5)
    assert (model.attention_mask(None, numbers) is None) != deterministic
    # Attention is not one of training.kernels, which name the scan and the convolution.
    line = choose_kernels(model, "torch", torch.device("cuda"), deterministic)
    assert line.startswith(
        "scan, convolution and cross entropy in PyTorch (training.kernels=torch); attention by "
    )
    choose_kernels(model, "auto", torch.device("cpu"))
    assert model.attention_mask(numbers, numbers) is numbers


def test_a_gpu_that_the_scan_does_not_fit_into(monkeypatch):
    errors = pytest.importorskip("triton.runtime.errors")

    def full(*arguments):
        raise errors.OutOfResources(123392, 101376, "shared memory")

    monkeypatch.setattr(scan, "forward", full)
    reason = scan.unfit(4, 16, 2, 16, 64, torch.device("cpu"))
    assert reason.startswith(
        "the scan's kernels don't fit into this GPU (out of resource: shared memory, Required: 123392"
    )


@inductor.patch(deterministic=False)
def test_heads_too_small_for_the_kernel(tiny):
    tiny.ssm_state_size = 256
    model = HybridModel(tiny, "meta")
    for deterministic, how in ((True, "in matrix products"), (False, "as PyTorch chooses")):
        line = choose_kernels(model, "auto", torch.device("cuda"), deterministic)
        assert f"; attention {how} (model.head_dim=8 is less than FlexAttention's 16)" in line


def test_on_a_cpu_the_reference_runs_and_the_log_says_why(tiny):
    model = HybridModel(tiny, "meta")
    assert choose_kernels(model, "auto", torch.device("cpu")).startswith(
        "scan, convolution, attention and cross entropy in PyTorch (the kernels run on GPUs"
    )
    assert (
        choose_kernels(model, "torch", torch.device("cpu"))
        == "scan, convolution, attention and cross entropy in PyTorch (training.kernels=torch)"
    )
    with pytest.raises(ConfigError, match=r"training\.kernels=mamba_ssm, but"):
        choose_kernels(model, "mamba_ssm", torch.device("cpu"))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scan", [ssd_triton, ssd_mamba_ssm])
def test_equals_the_reference_on_the_device(scan, masked):
    if scan is ssd_mamba_ssm and (missing := mamba_ssm_scan.load()):
        pytest.skip(missing)
    seq_idx = documents("cuda", 300) if masked else None
    results = []
    for function, dtype in (
        (scan, torch.bfloat16),
        (ssd_chunked, torch.bfloat16),
        (ssd_chunked, torch.float32),
    ):
        leaves = inputs(dtype, "cuda", 300)
        y = function(*leaves, 64, seq_idx)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    for fast, reference, exact in zip(*results, strict=True):
        error = (fast.float() - exact.float()).norm() / exact.float().norm()
        assert error < 2 * (reference.float() - exact.float()).norm() / exact.float().norm() + 5e-3


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("length", "sizes"), [(1, (64, 32, 32)), (301, (64, 32, 32)), (515, (520, 24, 264))])
def test_the_convolution_equals_the_reference_on_the_device(masked, compiled, length, sizes):
    function = split_conv_silu_triton
    function = torch.compile(function, fullgraph=True) if compiled else function
    seq_idx = documents("cuda", length) if masked else None
    fast = conv_results(function, conv_inputs(torch.bfloat16, "cuda", length, sizes), seq_idx, sizes)
    again = conv_results(function, conv_inputs(torch.bfloat16, "cuda", length, sizes), seq_idx, sizes)
    # The same numbers in fp32, whose gradients the reference doesn't round on the way.
    exact = [t.float().detach().requires_grad_() for t in conv_inputs(torch.bfloat16, "cuda", length, sizes)]
    for a, b, c in zip(fast, again, conv_results(split_conv_silu, exact, seq_idx, sizes), strict=True):
        assert torch.equal(a, b)
        # bf16 rounds once (2^-9 relative); what precedes it is fp32 sums of up to 2 x 515 numbers below 10.
        torch.testing.assert_close(a.float(), c, rtol=2**-8 if a.dtype == torch.bfloat16 else 0, atol=2e-3)


@needs_gpu
@pytest.mark.gpu
def test_the_model_on_the_device(tiny):
    """The fast paths beside the reference (attention: FlexAttention beside scaled_dot_product_attention)."""
    results = []
    tokens = torch.randint(97, (2, 64), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    for kernels in ("torch", "auto"):
        model, line = model_on_the_device(tiny, kernels)
        for kernel in ("scan", "convolution with SiLU", "gated norm", "cross entropy"):
            assert (f"{kernel} by nvfp4_kernels" in line) == (kernels == "auto")
        loss = model.loss(tokens, tokens)[0]
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        results.append({"logits": model(tokens).detach().float(), "loss": loss.detach(), **grads})
    for name, want in results[0].items():
        bound = {"logits": 0.02, "loss": 1e-3}.get(name, 0.05)
        assert (results[1][name] - want).norm() < bound * want.norm(), name


@needs_gpu
@pytest.mark.gpu
def test_packed_documents_are_as_if_alone_on_the_device(tiny):
    model, _ = model_on_the_device(tiny, "auto")
    alone = torch.randint(97, (2, 96), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    packed = alone.view(1, 192)
    seq_idx = torch.arange(2, device="cuda", dtype=torch.int32).repeat_interleave(96)[None]
    want = model(alone).detach().float().flatten(0, 1)
    distance = [(model(packed, mask)[0].float() - want).norm() / want.norm() for mask in (seq_idx, None)]
    assert distance[0] < 0.02 < distance[1]


def model_on_the_device(cfg, kernels):
    cfg.ssm_state_size, cfg.mamba_head_dim, cfg.head_dim = 16, 16, 16
    model = HybridModel(cfg, "cuda")
    initialize_(model, 0)
    line = choose_kernels(model, kernels, torch.device("cuda"))
    if kernels == "torch":
        model.attention_mask = document_numbers
        for module in model.modules():
            if isinstance(module, Attention):
                module.attend = attend
    return model, line
