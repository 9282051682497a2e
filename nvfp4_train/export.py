"""Write a trained model for other programs: `python -m nvfp4_train.export run=DIR format=hf|nvfp4 out=DIR`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from nvfp4_train import cli, units
from nvfp4_train.config.checks import one_of
from nvfp4_train.errors import ConfigError


@dataclass(frozen=True)
class Options:
    run: str = cli.option(
        "folder of the run (its newest checkpoint), a checkpoints/step_... of it, or a model"
    )
    out: str = cli.option("folder to write; it must not be there yet")
    format: str = cli.option(
        "hf: NemotronHForCausalLM; nvfp4: the same with NVFP4 weights (compressed-tensors)", "hf"
    )
    dtype: str = cli.option("bf16, or fp32 to go on training with the exact master weights", "bf16")
    shard_gb: float = cli.option("size of one weight file at most, in 10^9 bytes", 5.0)


def main(argv: list[str]) -> None:
    """Write the folder and say what is in it."""
    options = cli.parse(argv, Options, "nvfp4_train.export")
    if options is None:
        return
    one_of("format", options.format, ["hf", "nvfp4"])
    one_of("dtype", options.dtype, ["bf16", "fp32"])
    if not 0 < options.shard_gb < float("inf"):
        raise ConfigError(f"shard_gb={options.shard_gb:g} must be a positive number.")
    from nvfp4_train.interop.export import export  # after the checks: importing torch takes seconds
    from nvfp4_train.training import inference

    opened = inference.open_model(options.run, warn=lambda text: print(f"WARNING  {text}", file=sys.stderr))
    plans = inference.inference_plans(opened) if options.format == "nvfp4" else None
    done = export(
        Path(options.out).expanduser(),
        opened.cfg.model,
        opened.weights,
        opened.tokenizer,
        opened.cfg.training.seq_len,
        options.dtype,
        plans,
        int(options.shard_gb * 1e9),
        _progress,
    )
    _progress("")
    files = f"{len(done.files)} file{'s' * (len(done.files) > 1)}, {units.size(done.n_bytes)}"
    rows = [("model", opened.title), ("written", f"{options.out}: {files}")]
    if plans is not None:
        rows.append(("NVFP4", f"{len(done.nvfp4)} of {len(plans)} linear layers; activations in 16 bits"))
    print(units.table(rows, indent=""))


def _progress(name: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{name}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
