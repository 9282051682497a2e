"""torchrun that knows this project's exit codes:

    python -m nvfp4_train.torchrun --nproc-per-node 8 --max-restarts 100 -m nvfp4_train.pretrain +experiment=NAME ...

The words are torchrun's. Where torchrun starts the ranks again after any failure, and itself ends with 1, this one ends at
once when a rank was refused (exit code 2), gave up (76) or was stopped (75), and with that code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable

import psutil

from nvfp4_train.errors import ConfigError, RecoveryGaveUp, StoppedBySignal
from nvfp4_train.training.signals import ending_at_once


def outcome(codes: Iterable[int]) -> int:
    """What the ranks' exit codes (-n: by signal n) mean together: 0, 2, 75 or 76, and 1 for what a restart may help.

    A stop (75) may be the answer to torchrun's own SIGTERM after another rank has failed: it counts where all say so. A rank
    that SIGTERM finds before it handles signals is stopped too.
    """
    failed = {code for code in codes if code}
    for code in (ConfigError.exit_code, RecoveryGaveUp.exit_code):
        if code in failed:
            return code
    if failed <= {StoppedBySignal.exit_code, -signal.SIGTERM}:
        return StoppedBySignal.exit_code if failed else 0
    return 1


def main() -> int:
    """Run torchrun on the command line's words; returns the exit code."""
    with ending_at_once():  # until torchrun starts ranks and takes signals itself
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.launcher import api

        class Agent(api.LocalElasticAgent):
            """Private names, the same from torch 2.11 to 2.13; torchrun has no setting for this."""

            def run(self, *role):
                try:
                    return super().run(*role)
                except RendezvousError:
                    if self._pcontext is None:
                        raise
                    # The first machine's torchrun has ended, and with it the store. What our ranks say to that counts.
                    ranks = self._pcontext.subprocess_handlers.values()
                    sys.exit(outcome(rank.proc.returncode for rank in ranks))

            def _monitor_workers(self, worker_group):
                result = super()._monitor_workers(worker_group)
                if result.is_failed() and outcome(_codes(result.failures)) != 1:
                    self._remaining_restarts = 0
                return result

        api.LocalElasticAgent = Agent
        try:
            run.main()
        except ChildFailedError as error:
            code = outcome(_codes(error.failures))
            print(f"torchrun: the ranks ended with {code}" if code != 1 else error, file=sys.stderr)
            return code
        except SignalException as stop:  # handed on to the ranks, which had their time to save
            _stop_forgotten(stop.sigval)
            return StoppedBySignal.exit_code
    return 0


def _stop_forgotten(number: signal.Signals) -> None:
    """Stop ranks that torchrun was starting when the signal came: it does not know them yet, and would leave them behind."""
    ranks = psutil.Process().children()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(number)
    _, left = psutil.wait_procs(ranks, timeout=float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")))
    for rank in left:
        rank.kill()


def _codes(failures: dict) -> list[int]:
    return [failure.exitcode for failure in failures.values()]


if __name__ == "__main__":
    sys.exit(main())
