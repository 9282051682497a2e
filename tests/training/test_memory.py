from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nvfp4_train.config.load import compose_config
from nvfp4_train.config.schema import Config
from nvfp4_train.model.flops import parameter_count
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.init import initialize_
from nvfp4_train.model.kernels import choose_kernels
from nvfp4_train.precision import apply_recipe
from nvfp4_train.precision.linear import Linear
from nvfp4_train.training import memory
from nvfp4_train.training.compilation import compile_blocks
from nvfp4_train.training.optimizer import build_optimizer

SIZES = {"pattern": "M*-M-", "hidden_size": 64, "intermediate_size": 256, "head_dim": 16, "chunk_size": 16}
SIZES |= {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 22, "n_groups": 1, "vocab_size": 512}


def config(precision: str, resets: bool = False) -> Config:
    cfg = compose_config(["+experiment=quickstart", f"precision={precision}", "training.compile=off"])
    training = replace(cfg.training, seq_len=64, micro_batch_size=2, global_batch_size=4)
    data = replace(cfg.data, reset_state_at_documents=resets)
    return replace(cfg, model=replace(cfg.model, **SIZES), training=training, data=data)


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("precision", ["nvfp4", "bf16", "fp32"])
def test_activations_and_operands_are_what_autograd_keeps(precision, resets):
    cfg = config(precision, resets)
    model = HybridModel(cfg.model, "cpu", memory.compute_dtype(cfg))
    initialize_(model, 1)
    runtime = apply_recipe(model, cfg.precision, len(cfg.model.pattern), 1)
    runtime.prepare_weights()
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    x = torch.randn(2, 64, 64).to(model.compute_dtype).requires_grad_()
    seq_idx = torch.zeros(2, 64, dtype=torch.int32) if resets else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer in model.layers:
            x = layer(x, seq_idx)
    kept = {
        p: s for p, s in kept.items() if p not in {t.untyped_storage().data_ptr() for t in model.parameters()}
    }
    prepared = {
        b.untyped_storage().data_ptr() for name, b in model.named_buffers() if name.endswith("_weight")
    }
    need = memory.estimate(cfg, "cpu")
    measured = sum(s.nbytes() for p, s in kept.items() if p not in prepared)
    measured += sum(m.fprop_weight.nbytes for m in runtime.linears.values() if m.plan.quantized)
    assert need.activations + need.operands == pytest.approx(measured, rel=0.01)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compiled", ["off", "auto"])
@pytest.mark.parametrize("precision", ["nvfp4", "bf16", "fp8"])
def test_activations_are_what_a_gpu_holds(precision, compiled):
    cfg = config(precision)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "head_dim": 64,
        "ssm_state_size": 64,
        "mamba_head_dim": 64,
    }
    training = replace(cfg.training, seq_len=2048, micro_batch_size=4, compile=compiled)
    cfg = replace(cfg, model=replace(cfg.model, **sizes), training=training)
    device = torch.device("cuda")
    model = HybridModel(cfg.model, device, memory.compute_dtype(cfg))
    initialize_(model, 1)
    apply_recipe(model, cfg.precision, len(cfg.model.pattern), 1).prepare_weights()
    choose_kernels(model, "auto", device)
    compile_blocks(model, compiled, device)

    def kept() -> int:
        x = torch.randn(4, 2048, 256, device=device).bfloat16().requires_grad_()
        before = torch.cuda.memory_allocated() - x.nbytes
        for layer in model.layers:
            x = layer(x)
        return torch.cuda.memory_allocated() - before - x.nbytes

    kept()
    copies = sum(
        2 * m.weight.numel() for m in model.modules() if isinstance(m, Linear) and not m.plan.quantized
    )
    assert memory.estimate(cfg, "cuda").activations == pytest.approx(kept() - copies, rel=0.03)


@pytest.mark.parametrize("precision", ["nvfp4", "bf16", "fp8"])
def test_the_kernels_of_a_gpu_keep_less(precision):
    """The scan keeps states, not what is between them, and a norm its input; and torch.compile finds little to recompute."""
    cfg = config(precision)
    in_torch = replace(cfg, training=replace(cfg.training, kernels="torch"))
    compiled = replace(cfg, training=replace(cfg.training, compile="auto"))
    with_kernels, without = (memory.estimate(c, "cuda").activations for c in (cfg, in_torch))
    assert without == memory.estimate(cfg, "cpu").activations
    assert 0.2 * without < with_kernels < 0.9 * without
    # A norm computed in PyTorch keeps two fp32 results of its input's size, one computed by kernel or Inductor the input.
    rows = 2 * 64 * 64
    norms = {"nvfp4": 1, "bf16": 5, "fp8": 5}[precision]  # in front of layers whose input no kernel measures
    saved = with_kernels - memory.estimate(compiled, "cuda").activations
    assert saved == pytest.approx(norms * rows * (4 + 4 - 2), rel=0.05)


def test_weights_moments_and_gradients_are_the_optimizers():
    cfg = config("bf16")
    model = HybridModel(cfg.model)
    initialize_(model, 1)
    optimizer = build_optimizer(model, cfg.optimizer)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    need = memory.estimate(cfg, "cpu")
    assert need.weights == sum(p.nbytes for p in model.parameters())
    assert need.gradients == sum(p.grad.nbytes for p in model.parameters())
    states = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    assert need.moments == sum(t.nbytes for t in states)
    assert need.total == sum(vars(need).values())
    assert (need.saving, need.snapshots) == (need.weights + need.moments, 2 * (need.weights + need.moments))
    without = replace(cfg, recovery=replace(cfg.recovery, name="skip_nonfinite"))
    assert memory.estimate(without, "cpu").snapshots == 0
    assert memory.host_copies(cfg) == need.saving + need.snapshots
    assert memory.estimate(cfg, "cuda").snapshots == 0  # these are in the host's memory


def test_grows_with_what_it_should():
    cfg = config("nvfp4")
    small, large = (
        memory.estimate(replace(cfg, training=replace(cfg.training, micro_batch_size=n)), "cpu")
        for n in (1, 4)
    )
    assert large.activations == pytest.approx(4 * small.activations, rel=0.01)
    assert (large.weights, large.operands) == (small.weights, small.operands)
    separate = replace(cfg, precision=replace(cfg.precision, weight_blocks_2d=False))
    assert memory.estimate(separate, "cpu").operands > small.operands
    assert memory.estimate(config("bf16"), "cpu").activations > memory.estimate(cfg, "cpu").activations


@pytest.mark.parametrize("precision", ["nvfp4", "bf16"])
def test_recomputation_saves_what_it_says(precision):
    cfg = config(precision)
    none, relu, block = (
        memory.estimate(replace(cfg, training=replace(cfg.training, recompute=mode)), "cpu").activations
        for mode in ("none", "squared_relu", "block")
    )
    in_bf16 = 2 if precision == "bf16" else 1  # MLPs that keep their wide input: the last block always does
    assert none - relu == in_bf16 * 2 * 64 * 256 * 2
    kept = [memory.kept_bytes(letter, config("bf16"), {}) for letter in "M*-"]
    assert block < relu
    assert 5 * 2 * 64 * 64 * 2 < block <= 5 * 2 * 64 * 64 * 2 + 2 * max(kept)
    compiled = replace(cfg.training, compile="auto", recompute="budget", recompute_budget=0.4)
    share = memory.COMPILED_SHARE * 0.4
    assert memory.estimate(replace(cfg, training=compiled), "cpu").activations == round(share * none)


def test_the_kernel_of_the_loss_has_one_copy_of_the_logits():
    cfg = config("bf16")
    torch_path = replace(cfg, training=replace(cfg.training, kernels="torch"))
    saved = memory.estimate(torch_path, "cuda").head - memory.estimate(cfg, "cuda").head
    assert saved == 2 * 64 * 512 * (4 + 2 + 4)  # fp32 logits, and gradients in both dtypes
    assert memory.estimate(config("fp32"), "cuda").head == memory.estimate(config("fp32"), "cpu").head


def test_nothing_is_allocated_for_the_largest_model():
    cfg = compose_config(["+experiment=56b_hybrid"])
    assert memory.estimate(cfg, "cuda").weights == 4 * parameter_count(cfg.model) > 200e9
