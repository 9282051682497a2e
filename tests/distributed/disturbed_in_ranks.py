"""pretrain as one rank of two that is disturbed as argument 1 says, each time by itself at a moment that it chooses."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from nvfp4_train import cli, pretrain
from tests.tiny import CHECKPOINT_EVERY

RANK, START = int(os.environ.get("RANK", "0")), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def kill_rank_0_then_stop_rank_1_in_a_validation(run: Path) -> None:
    """Rank 0 is killed when the first checkpoint is there; after the restart rank 1 is stopped in step 15's validation."""
    from nvfp4_train.training import trainer

    train_step, score = trainer.train_step, trainer.score

    def step(state, *args, **kwargs):
        if RANK == 0 and START == 0 and state.step == CHECKPOINT_EVERY + 1:
            wait_for(run / "checkpoints" / f"step_{CHECKPOINT_EVERY:08d}")
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(state, *args, **kwargs)

    def scored(model, cfg, dataset, limit, look, *more):
        def progress(share):
            if RANK == 1 and share == 0.5:
                os.kill(os.getpid(), signal.SIGTERM)
            look(share)

        return score(model, cfg, dataset, limit, progress, *more)

    trainer.train_step, trainer.score = step, scored


def stop_rank_1_before_it_meets_rank_0(run: Path) -> None:
    """Rank 0 is about to wait for rank 1, in C++, when rank 1 is stopped in its imports."""
    waits = run.parent / "rank 0 waits"
    if RANK == 0:
        import torch.distributed as dist

        init = dist.init_process_group

        def told_init(*args, **kwargs):
            waits.touch()
            init(*args, **kwargs)

        dist.init_process_group = told_init
        return

    class Stop:
        def find_spec(self, name, path=None, target=None):
            if name == "torch":
                wait_for(waits)
                os.kill(os.getpid(), signal.SIGTERM)

    sys.meta_path.insert(0, Stop())


if __name__ == "__main__":
    deed = sys.argv.pop(1)
    globals()[deed](
        Path(next(word for word in sys.argv if word.startswith("run_dir=")).removeprefix("run_dir="))
    )
    sys.exit(cli.exit_code(pretrain.main))
