"""Same data and seed through several precisions:

    python -m nvfp4_train.compare +experiment=NAME arms=[bf16,nvfp4] [out=DIR] [key=value ...]

Each arm is a run of its own under out (default runs/compare/EXPERIMENT), resumed when this is started again; the arms differ
in `precision` alone. An arm is an option of the group `precision`, alone or with settings of it, such as
nvfp4:backward=ms_eden. The first arm is the baseline. Prints a table; writes it and a plot of the losses beside the runs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nvfp4_train import cli
from nvfp4_train.config.load import compose_config
from nvfp4_train.config.validate import validate
from nvfp4_train.errors import ConfigError, UserError

DEFAULT_ARMS = "[bf16,nvfp4]"


def main(argv: list[str]) -> None:
    """Check every arm's configuration, train one after the other, compare."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return
    given = dict(word.split("=", 1) for word in argv if word.startswith(("arms=", "out=")))
    overrides = [word for word in argv if not word.startswith(("arms=", "out="))]
    arms = parse_arms(given.get("arms", DEFAULT_ARMS))
    configs = {}
    for arm in arms:
        configs[arm] = compose_config([*overrides, *arm_overrides(arm)])
    out = Path(given.get("out", f"runs/compare/{next(iter(configs.values())).experiment or 'run'}"))
    for cfg in configs.values():
        validate(cfg)
    for arm in arms:
        words = [*overrides, *arm_overrides(arm), f"run_dir={out / folder_name(arm)}"]
        print(f"\n=== {arm} ===", flush=True)
        if code := subprocess.run([sys.executable, "-m", "nvfp4_train.pretrain", *words]).returncode:
            error = UserError(
                f"the arm {arm} ended with exit code {code}: start the same command to go on from there."
            )
            error.exit_code = code
            raise error
    from nvfp4_train.training import comparison  # after the checks: it imports matplotlib

    runs = {arm: out / folder_name(arm) for arm in arms}
    print("\n" + comparison.write(runs, out))


def parse_arms(text: str) -> list[str]:
    """ "[bf16,nvfp4]" -> ["bf16", "nvfp4"]. Raises ConfigError for fewer than two, or the same twice."""
    arms = [arm.strip() for arm in text.strip("[]").split(",") if arm.strip()]
    if len(arms) < 2 or len(set(arms)) < len(arms):
        raise ConfigError(f"arms={text} must name at least two different arms, such as {DEFAULT_ARMS}.")
    return arms


def arm_overrides(arm: str) -> list[str]:
    """ "nvfp4:backward=ms_eden:hadamard=false" -> the words of the command line that it stands for."""
    name, *settings = arm.split(":")
    for setting in settings:
        if "=" not in setting:
            raise ConfigError(f"arms: {arm!r} has {setting!r}, which is not of the form key=value.")
    return [f"precision={name}", *(f"precision.{setting}" for setting in settings)]


def folder_name(arm: str) -> str:
    """A name for the arm's run folder."""
    return arm.replace(":", "-").replace("=", "_")


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
