"""The last thing a run prints: what came of it, where it lies, how to go on."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from nvfp4_train import units

_BASELINE_NAMES = {"gzip": "gzip -9, each document alone", "xz": "xz -9, all together"}


def final_summary(
    *,
    run_dir: str | Path,
    steps: int,
    tokens: float,
    launch_tokens: float,
    launch_seconds: float,
    loss: float,
    precision: str,
    checkpoint: str | Path,
    plot: str | Path | None = None,
    held_out: Mapping[str, Mapping[str, float | None]] | None = None,
    baselines: Mapping[str, float] | None = None,
    skipped: int = 0,
    prompt: str = "",
    sample: str = "",
    more_command: str = "",
) -> str:
    """The summary as aligned text.

    `steps` and `tokens` are the run's, `launch_tokens` and `launch_seconds` (training alone) this launch's; losses
    are nats a token, `loss` averaged over the last steps; `held_out` has by name of the text its "loss", "bits_per_byte"
    and "loss_bf16" (with all layers in BF16; None where not measured); `baselines` are bits per byte of compressors on
    the only such text; `skipped` counts updates that were not
    finite; `sample` begins with `prompt`; `more_command` trains on for more tokens (`more_tokens_command`).
    """
    rows = [
        ("trained", _trained(steps, tokens, launch_tokens, launch_seconds)),
        ("training loss", f"{loss:.4f}"),
    ]
    for name, value in (held_out or {}).items():
        of = f" {name}" if len(held_out) > 1 else ""
        rows.append((f"held-out loss{of}", _held_out(value["loss"], value["loss_bf16"])))
        rows.append((f"bits per byte{of}", _bits_per_byte(value["bits_per_byte"], baselines or {})))
    rows.append(("precision", precision))
    if skipped:
        rows.append(("skipped", f"{skipped} update{'s' * (skipped > 1)} that were not finite"))
    rows.append(("checkpoint", str(checkpoint)))
    if plot is not None:
        rows.append(("plot", str(plot)))
    parts = ["Finished\n" + units.table(rows)]
    if sample:
        quoted = "\n".join(f"  | {line}".rstrip() for line in units.printable(sample).split("\n"))
        parts.append(f"Sample{f' after {prompt!r}' if prompt else ''}\n{quoted}")
    generate = f"python -m nvfp4_train.generate run={shlex.quote(str(run_dir))} prompt={shlex.quote(prompt or 'import ')}"
    go_on = [("write text", generate)]
    if more_command:
        go_on.append(("train longer", more_command))
    parts.append("To go on\n" + units.table(go_on))
    return "\n\n".join(parts)


def more_tokens_command(overrides: Sequence[str], tokens: float) -> str:
    """The command line that resumes a run started with `overrides` and takes it to `tokens` tokens."""
    replaced = ("training.max_tokens", "training.max_steps")
    kept = [o for o in overrides if o.lstrip("+").split("=")[0] not in replaced]
    return shlex.join(["python", "-m", "nvfp4_train.pretrain", *kept, f"training.max_tokens={tokens:.0f}"])


def _trained(steps: int, tokens: float, launch_tokens: float, launch_seconds: float) -> str:
    if not launch_tokens:  # killed after its last checkpoint, or the budget was lowered
        return f"{units.count(tokens)} tokens in {steps} steps, none of them in this launch"
    pace = f"{units.duration(launch_seconds)} ({units.rate(launch_tokens / launch_seconds)})"
    if launch_tokens == tokens:
        return f"{units.count(tokens)} tokens in {steps} steps, {pace}"
    return (
        f"{units.count(tokens)} tokens in {steps} steps; this launch {units.count(launch_tokens)} in {pace}"
    )


def _held_out(loss: float, loss_bf16: float | None) -> str:
    if loss_bf16 is None:
        return f"{loss:.4f}"
    return f"{loss:.4f}  ({loss_bf16:.4f} with all layers in BF16: {100 * (loss / loss_bf16 - 1):+.2f} %)"


def _bits_per_byte(value: float, baselines: Mapping[str, float]) -> str:
    lines = [f"{value:.3f}"]
    for name, other in baselines.items():
        share = 100 * abs(1 - value / other)
        verdict = f"beaten by {share:.1f} %" if value < other else f"not beaten, {share:.1f} % ahead"
        lines.append(f"{other:.3f}  {_BASELINE_NAMES.get(name, name)}: {verdict}")
    return "\n".join(lines)
