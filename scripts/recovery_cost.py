"""What recovery costs of a step's time, part by part: python scripts/recovery_cost.py [+experiment=quickstart key=value ...]

Times a training step on random tokens, and alone what recovery adds to it: the detector, the host's part, a snapshot every
`recovery.snapshot_every` steps, and a measurement of the layers' health every `precision.health_every` steps.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

from nvfp4_train.config.load import compose_config
from nvfp4_train.data.batch import Batch
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.model.init import initialize_
from nvfp4_train.precision import apply_recipe
from nvfp4_train.training.clipping import build_clipper
from nvfp4_train.training.compilation import compile_blocks
from nvfp4_train.training.detection import SpikeDetector
from nvfp4_train.training.finite import SkipCounter
from nvfp4_train.training.history import History
from nvfp4_train.training.machine import keep_freed_memory, resolve_device
from nvfp4_train.training.memory import compute_dtype
from nvfp4_train.training.optimizer import build_optimizer
from nvfp4_train.training.recovery import Recovery
from nvfp4_train.training.snapshots import Snapshots
from nvfp4_train.training.state import TrainState
from nvfp4_train.training.step import train_step


def seconds(function: Callable[[], object], times: int, device: torch.device) -> float:
    """The median time of a call, the device included."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begin)
    return sorted(taken)[len(taken) // 2]


def main(words: list[str]) -> None:
    cfg = compose_config(words or ["+experiment=quickstart"])
    device = resolve_device(cfg.device)
    if device.type == "cpu":
        keep_freed_memory()
    model = HybridModel(cfg.model, device, compute_dtype(cfg))
    initialize_(model, 1)
    recovery = Recovery(cfg.recovery, History())
    detector = SpikeDetector(cfg.recovery, device)
    clipper = build_clipper(cfg.clipping, device, sum(1 for _ in model.parameters()))
    data = SimpleNamespace(hash="", record=lambda step: {})
    optimizer = build_optimizer(model, cfg.optimizer)
    state = TrainState(model, optimizer, clipper, detector, SkipCounter(device), recovery, 1, data)
    precision = apply_recipe(model, cfg.precision, len(cfg.model.pattern), 1)
    compile_blocks(model, cfg.training.compile, device)
    size = (cfg.training.global_batch_size, cfg.training.seq_len + 1)
    tokens = torch.randint(cfg.model.vocab_size, size, device=device)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def step(record_health: bool = False) -> dict[str, torch.Tensor]:
        return train_step(
            state, precision, batch, cfg.training.micro_batch_size, 1e-4, record_health=record_health
        )

    for _ in range(3):
        metrics = step()
    whole = seconds(step, 15, device)
    measured = seconds(lambda: step(True), 5, device)
    values = [torch.tensor(value, device=device) for value in (3.0, 1.0, 1.0)]
    record = {name: value.item() for name, value in metrics.items()} | {"step": 1}
    snapshots = Snapshots(cfg.recovery.snapshots)
    for _ in range(cfg.recovery.snapshots):
        snapshots.take(state)
    parts = {
        "detector, every step": seconds(lambda: (detector.update(*values), detector.metrics()), 300, device),
        "host's part, every step": seconds(lambda: recovery.look([record]), 300, device),
        f"snapshot, every {cfg.recovery.snapshot_every} steps": seconds(
            lambda: snapshots.take(state), 9, device
        )
        / cfg.recovery.snapshot_every,
        f"health, every {cfg.precision.health_every} steps": (measured - whole) / cfg.precision.health_every,
    }
    print(f"step {1e3 * whole:.1f} ms; one with the layers' health measured {1e3 * measured:.1f} ms\n")
    print("| part | ms a step | share |\n| --- | --- | --- |")
    for name, value in (parts | {"all": sum(parts.values())}).items():
        print(f"| {name} | {1e3 * value:.3f} | {100 * value / whole:.2f} % |")


if __name__ == "__main__":
    main(sys.argv[1:])
