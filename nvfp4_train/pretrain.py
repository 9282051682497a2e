"""Train or resume: `python -m nvfp4_train.pretrain +experiment=quickstart [group=OPTION ...] [key=value ...]`."""

from __future__ import annotations

import sys

from nvfp4_train import cli
from nvfp4_train.training.signals import ending_at_once


def main(argv: list[str]) -> None:
    """Compose and check the configuration, then train, or print the plan of the run with dry_run=true."""
    with ending_at_once():  # imports take seconds, and a signal within them is a stop like any other
        _main(argv)


def _main(argv: list[str]) -> None:
    from nvfp4_train.config.load import load
    from nvfp4_train.config.validate import validate
    from nvfp4_train.precision import backends

    cfg = load(argv)
    if cfg is None:
        return
    validate(cfg)
    if cfg.dry_run:
        from nvfp4_train.training.dry_run import describe

        print(describe(cfg))
        return
    backends.check(cfg.precision, cfg.device)
    # After the checks: importing torch takes seconds.
    from nvfp4_train.training import requirements
    from nvfp4_train.training.run import run

    requirements.check(cfg)
    run(cfg, argv)


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
