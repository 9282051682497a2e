"""A trained run opened on a GPU: the fast kernels compute what the CPU's reference does."""

import contextlib

import pytest
import torch

from nvfp4_train.training.inference import load_run


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("masked", [False, True])
def test_on_a_gpu_as_on_the_cpu(tiny_run, masked):
    on_cpu, on_gpu = (load_run(tiny_run.path, device, pytest.fail) for device in ("cpu", "cuda"))
    assert "cross entropy by nvfp4_kernels" in on_gpu.kernels
    assert on_cpu.kernels.endswith("(the kernels run on GPUs, not on a CPU)")
    tokens = torch.randint(on_cpu.cfg.model.vocab_size, (2, 200), generator=torch.Generator().manual_seed(0))
    seq_idx = (torch.arange(200) // 70)[None].expand(2, -1).int() if masked else None
    for quantized in (False, True):
        with contextlib.ExitStack() as stack:
            if not quantized:
                stack.enter_context(on_cpu.precision.all_bf16())
                stack.enter_context(on_gpu.precision.all_bf16())
            want = on_cpu.model(tokens, seq_idx).float()
            noisy = with_noise(on_cpu.model, tokens, seq_idx)
            got = on_gpu.model(tokens.cuda(), None if seq_idx is None else seq_idx.cuda()).float().cpu()
        # What an ulp of bf16 after each block does: 0.01 of the logits, and 0.12 where it moves 4-bit codes.
        assert (got - want).norm() < 2 * (noisy - want).norm()
        assert (noisy - want).norm() < (0.2 if quantized else 0.02) * want.norm()


def with_noise(model, tokens, seq_idx):
    """The logits where every block's output is off by up to 2^-8 of itself, then rounded to bf16: by at most an ulp."""
    gen = torch.Generator().manual_seed(0)

    def noise(_module, _inputs, output):
        return (output * (1 + 2**-8 * (2 * torch.rand(output.shape, generator=gen) - 1))).to(output.dtype)

    hooks = [layer.register_forward_hook(noise) for layer in model.layers]
    logits = model(tokens, seq_idx).float()
    for hook in hooks:
        hook.remove()
    return logits
