import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from nvfp4_train.config.schema import ClippingConfig, OptimizerConfig
from nvfp4_train.errors import ConfigError
from nvfp4_train.training.clipping import build_clipper, global_norm
from nvfp4_train.training.finite import update_is_finite
from nvfp4_train.training.optimizer import apply_update, build_optimizer

CFG = OptimizerConfig(lr=1e-2)
ONE = torch.tensor(1.0)
ZERO = torch.tensor(0.0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(11, 6)
        self.conv1d = nn.Conv1d(6, 6, 4, groups=6)
        self.A_log = nn.Parameter(torch.zeros(6))
        self.norm = nn.RMSNorm(6)
        self.out_proj = nn.Linear(6, 7, bias=False)


def make(seed=0):
    torch.manual_seed(seed)
    return Model()


def set_gradients(model, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).mul_(scale).to(p.device)


def everything(model, optimizer):
    """Copies of weights, moments and step counters."""
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            state[f"{name}.{key}"] = value.clone()
    return state


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_decay_acts_on_matrices_and_convolutions_only():
    model = make()
    decay, plain = build_optimizer(model, CFG).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decay["params"]} == {
        "embeddings.weight",
        "conv1d.weight",
        "out_proj.weight",
    }
    assert {names[id(p)] for p in plain["params"]} == {"conv1d.bias", "A_log", "norm.weight"}
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_frozen_parameters_are_left_out():
    model = make()
    model.embeddings.weight.requires_grad_(False)
    groups = build_optimizer(model, CFG).param_groups
    assert sum(len(group["params"]) for group in groups) == 5


def test_follows_the_adamw_formula_with_clipped_gradients():
    model = make()
    optimizer = build_optimizer(model, CFG)
    expected = {name: [p.detach().double(), 0.0, 0.0] for name, p in model.named_parameters()}
    for step, (lr, coefficient) in enumerate([(1e-3, 1.0), (1e-2, 0.3), (5e-3, 0.07)], start=1):
        set_gradients(model, step)
        for name, p in model.named_parameters():
            w, m, v = expected[name]
            g = p.grad.double() * coefficient
            m = 0.9 * m + 0.1 * g
            v = 0.95 * v + 0.05 * g * g
            w = w * (1 - lr * (0.1 if p.ndim >= 2 else 0.0))
            w = w - lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
            expected[name] = [w, m, v]
        apply_update(optimizer, lr, torch.tensor(coefficient), ONE)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().double(), expected[name][0], rtol=1e-5, atol=1e-6)


def test_factor_one_is_bit_equal_to_plain_adamw():
    ours, theirs = make(), make()
    optimizer = build_optimizer(ours, CFG)
    plain = build_optimizer(theirs, CFG)
    for step in range(5):
        for model in (ours, theirs):
            set_gradients(model, step)
        apply_update(optimizer, CFG.lr, ONE, ONE)
        plain.step()
    assert equal(everything(ours, optimizer), everything(theirs, plain))


def test_factor_scales_gradients_within_two_roundings():
    model = make()
    optimizer = build_optimizer(model, CFG)
    for seed, coefficient in enumerate(torch.rand(20, generator=torch.Generator().manual_seed(0))):
        set_gradients(model, seed)
        exact = {name: p.grad.double() * coefficient.double() for name, p in model.named_parameters()}
        apply_update(optimizer, CFG.lr, coefficient, ONE)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad.double(), exact[name], rtol=2**-23, atol=0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("bad_step", [0, 3])
def test_skipped_step_leaves_all_bits_and_training_goes_on_as_if_it_had_not_been(bad, bad_step):
    hit, spared = make(), make()
    optimizers = build_optimizer(hit, CFG), build_optimizer(spared, CFG)
    for step in range(6):
        if step == bad_step:
            before = {name: p.detach().clone() for name, p in hit.named_parameters()}
            state = everything(hit, optimizers[0]) if step else None
            set_gradients(hit, 99)
            for p in hit.parameters():
                p.grad.view(-1)[0] = bad
            apply_update(optimizers[0], CFG.lr, ONE, ZERO)
            assert all(torch.equal(p, before[name]) for name, p in hit.named_parameters())
            assert all(s["step"].item() == step for s in optimizers[0].state.values())
            if state:
                assert equal(everything(hit, optimizers[0]), state)
        for model, optimizer in zip((hit, spared), optimizers, strict=True):
            set_gradients(model, step)
            apply_update(optimizer, CFG.lr, ONE, ONE)
    assert equal(everything(hit, optimizers[0]), everything(spared, optimizers[1]))
    assert all(s["step"].item() == 6 for s in optimizers[0].state.values())


@pytest.mark.parametrize("way", ["torch", "distributed checkpoint"])
def test_restored_optimizer_goes_on_bit_equal(way):
    model = make()
    optimizer = build_optimizer(model, CFG)
    for step in range(3):
        set_gradients(model, step)
        apply_update(optimizer, 1e-3 * (step + 1), torch.tensor(0.5), ONE)
    twin = copy.deepcopy(model)
    restored = build_optimizer(twin, CFG)
    if way == "torch":
        restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        weights = {name: p.detach().clone() for name, p in twin.named_parameters()}
        twin.zero_grad()
        set_optimizer_state_dict(twin, restored, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
        assert all(torch.equal(p, weights[name]) for name, p in twin.named_parameters())
    for m, o in ((model, optimizer), (twin, restored)):
        set_gradients(m, 7)
        apply_update(o, 3e-3, ONE, ONE)
    assert equal(everything(model, optimizer), everything(twin, restored))


def train(device, steps=30, bad_steps=(4, 5, 17)):
    """Fit random targets with all parts together; returns losses, optimizer and clipper."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    x, y = torch.randn(64, 8).to(device), torch.randn(64, 1).to(device)
    optimizer = build_optimizer(model, CFG)
    clip = build_clipper(ClippingConfig(name="adaptive"), device)
    losses = []
    for step in range(steps):
        loss = (model(x) - y).square().mean() * (math.nan if step in bad_steps else 1.0)
        loss.backward()
        norm = global_norm(model.parameters())
        finite = update_is_finite(loss.detach(), norm)
        apply_update(optimizer, CFG.lr, clip.update(norm, finite), finite)
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, optimizer, clip


def test_training_survives_bad_steps():
    losses, optimizer, clip = train("cpu")
    assert torch.stack(losses).isnan().nonzero().flatten().tolist() == [4, 5, 17]
    assert losses[-1] < 0.8 * losses[0]
    assert clip.accepted_steps.item() == 27
    assert all(s["step"].item() == 27 for s in optimizer.state.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_is_never_waited_for():
    train("cuda", steps=2)  # libraries start up
    torch.cuda.synchronize()
    torch.manual_seed(0)
    model = make().cuda()
    optimizer = build_optimizer(model, CFG)
    clip = build_clipper(ClippingConfig(name="adaptive"), "cuda")
    set_gradients(model, 0)
    amaxes = [torch.ones((), device="cuda"), torch.ones(3, device="cuda")]
    loss = torch.ones((), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3):
            norm = global_norm(model.parameters())
            finite = update_is_finite(loss, norm, amaxes)
            apply_update(optimizer, 1e-3 * step, clip.update(norm, finite), finite)
            clip.metrics()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_skipped_step_leaves_all_bits_on_cuda():
    model = make().cuda()
    optimizer = build_optimizer(model, CFG)
    one, zero = ONE.cuda(), ZERO.cuda()
    set_gradients(model, 0)
    apply_update(optimizer, CFG.lr, one * 0.3, one)
    before = everything(model, optimizer)
    for p in model.parameters():
        p.grad.fill_(math.nan)
    apply_update(optimizer, CFG.lr, one, zero)
    assert equal(everything(model, optimizer), before)
    set_gradients(model, 1)
    apply_update(optimizer, CFG.lr, one, one)
    assert all(s["step"].item() == 2 for s in optimizer.state.values())
    assert not equal(everything(model, optimizer), before)


def test_master_weights_must_be_fp32():
    model = make()
    model.out_proj.bfloat16()
    with pytest.raises(ConfigError, match=r"out_proj\.weight is torch\.bfloat16"):
        build_optimizer(model, CFG)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"name": "adam"}, "optimizer.name='adam'"),
        ({"betas": [0.9]}, "optimizer.betas"),
        ({"betas": [0.9, 1.0]}, "optimizer.betas"),
        ({"eps": -1.0}, "optimizer.eps=-1"),
        ({"weight_decay": math.nan}, "optimizer.weight_decay=nan"),
    ],
)
def test_impossible_values_are_named(values, key):
    with pytest.raises(ConfigError, match=key):
        build_optimizer(make(), OptimizerConfig(**{"lr": 1e-2} | values))
