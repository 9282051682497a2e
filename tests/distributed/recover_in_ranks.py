"""pretrain as one rank of several; what this rank saw and decided goes to a file of its own."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import torch

from nvfp4_train import cli, pretrain
from nvfp4_train.distributed.failures import START_TIMEOUT
from nvfp4_train.training import step, trainer
from nvfp4_train.training.rewinding import Rewinder


def main(out: Path) -> None:
    seen: list[dict] = []
    rewind, train_step = Rewinder.rewind, step.train_step

    def told_rewind(self, trouble):
        if self._group:  # one rank may check a large checkpoint while the others wait
            assert self._group._get_backend(torch.device("cpu")).options._timeout == START_TIMEOUT
        plan = rewind(self, trouble)
        seen.append({"trouble": asdict(trouble), "plan": asdict(plan), "state": self._state.step})

    def told_step(*args, **kwargs):
        metrics = train_step(*args, **kwargs)
        seen.append({"lr": args[4], "loss": metrics["loss"].item(), "skipped": metrics["skipped"].item()})
        return metrics

    with (
        mock.patch.object(Rewinder, "rewind", told_rewind),
        mock.patch.object(trainer, "train_step", told_step),
    ):
        code = cli.exit_code(pretrain.main)
    out.write_text(json.dumps({"code": code, "seen": seen}))


if __name__ == "__main__":
    main(Path(sys.argv.pop(1)) / f"rank{os.environ['RANK']}.json")
