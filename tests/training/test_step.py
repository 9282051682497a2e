"""A whole training step on a GPU."""

import itertools

import pytest
import torch

from nvfp4_train.config.load import compose_config
from nvfp4_train.data.batch import Batch
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.init import initialize_
from nvfp4_train.model.kernels import choose_kernels
from nvfp4_train.precision import apply_recipe
from nvfp4_train.training.clipping import build_clipper
from nvfp4_train.training.detection import SpikeDetector
from nvfp4_train.training.finite import SkipCounter
from nvfp4_train.training.history import History
from nvfp4_train.training.optimizer import build_optimizer
from nvfp4_train.training.recovery import Recovery
from nvfp4_train.training.state import TrainState
from nvfp4_train.training.step import train_step
from tests.tiny import TINY_MODEL

RUN = [
    "model.mamba_num_heads=16",  # in_proj is 560 wide
    "model.ssm_state_size=16",
    "training.max_tokens=1e5",
    "training.global_batch_size=4",
    "training.micro_batch_size=2",
    "optimizer.lr=1e-3",
    "schedule.warmup_tokens=1e3",
    "run_dir=unused",
]


def steps(device, precision, masked, watch):
    """Losses of four steps of two micro-batches; `watch` is called before the third, once all is warm."""
    cfg = compose_config([*TINY_MODEL, *RUN, f"precision={precision}"])
    model = HybridModel(cfg.model, device)
    initialize_(model, 1)
    runtime = apply_recipe(model, cfg.precision, len(cfg.model.pattern), 1)
    choose_kernels(model, "auto", torch.device(device))
    state = TrainState(
        model,
        build_optimizer(model, cfg.optimizer),
        build_clipper(cfg.clipping, device, len(list(model.parameters()))),
        SpikeDetector(cfg.recovery, device),
        SkipCounter(device),
        Recovery(cfg.recovery, History()),
        1,
        None,
    )
    tokens = torch.randint(cfg.model.vocab_size, (4, 65), generator=torch.Generator().manual_seed(0)).to(
        device
    )
    mask = (torch.arange(64) < 60).expand(4, -1).contiguous().to(device) if masked else None
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask)
    losses = []
    for step in range(4):
        if step == 2:
            watch()
        losses.append(train_step(state, runtime, batch, 2, 1e-3)["loss"])
    return losses


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "nvfp4"])
def test_the_device_is_never_waited_for(precision, masked):
    try:
        losses = steps("cuda", precision, masked, lambda: torch.cuda.set_sync_debug_mode("error"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    values = torch.stack(losses).tolist()
    assert all(later < earlier for earlier, later in itertools.pairwise(values))
