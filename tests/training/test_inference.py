"""A trained run opened on a GPU: the fast kernels compute what the CPU's reference does."""

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
    want = on_cpu.model(tokens, seq_idx).float()
    got = on_gpu.model(tokens.cuda(), None if seq_idx is None else seq_idx.cuda()).float().cpu()
    assert (got - want).norm() < 0.05 * want.norm()  # bf16 sums in another order move some codes
