"""Measure a trained model on text or on benchmarks.

python -m nvfp4_train.evaluate run=DIR [data=FILE_OR_FOLDER] [bf16=true]
python -m nvfp4_train.evaluate run=DIR tasks=NAMES_OR_FILES
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvfp4_train import cli, units
from nvfp4_train.errors import ConfigError

if TYPE_CHECKING:
    from nvfp4_train.training.inference import TrainedRun


@dataclass(frozen=True)
class Options:
    run: str = cli.option(
        "folder of the run: its newest checkpoint is measured (or one of its checkpoints/step_..., or a Hugging Face folder)"
    )
    data: str | None = cli.option(
        "text to measure on, a file or folder; without it the run's held-out text", None
    )
    corpus: str | None = cli.option("whose held-out text, where the run has data.corpora: a name in it", None)
    bf16: bool = cli.option("measure with every layer in BF16 as well", False)
    max_tokens: int | None = cli.option("measure on the first so many tokens; without it on all", None)
    tasks: str | None = cli.option(
        "instead of text: lm-evaluation-harness tasks, comma-separated names, YAML files or folders of them",
        None,
    )
    few_shot: int | None = cli.option("tasks: examples before each question; without it the task's own", None)
    limit: int | None = cli.option("tasks: the first so many questions of each", None)
    device: str = cli.option("auto, cpu or cuda", "auto")


def main(argv: list[str]) -> None:
    """Print loss and bits per byte of the model as it was trained, and of general compressors on the same text; or the
    results of benchmark tasks."""
    options = cli.parse(argv, Options, "nvfp4_train.evaluate")
    if options is None:
        return
    for name in ("max_tokens", "limit"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1.")
    if options.tasks is not None and options.data is not None:
        raise ConfigError(f"tasks={options.tasks} and data={options.data}: give one of them.")
    if options.tasks is not None and importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            f"tasks={options.tasks} needs lm-evaluation-harness: install it with pip install 'nvfp4-train[eval]'."
        )
    from nvfp4_train.training import inference  # after the checks: importing torch takes seconds

    run = inference.load_run(
        options.run, options.device, warn=lambda text: print(f"WARNING  {text}", file=sys.stderr)
    )
    (_on_text if options.tasks is None else _on_tasks)(run, options)


def _on_tasks(run: TrainedRun, options: Options) -> None:
    from nvfp4_train.training.harness import evaluate_tasks

    results = evaluate_tasks(run, options.tasks, options.few_shot, options.limit)
    rows = _what_ran(run)
    for task, metrics in results.items():
        for name, value in metrics.items():
            metric, _, kind = name.partition(",")
            error = metrics.get(f"{metric}_stderr,{kind}")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                spread = f" +- {error:.4f}" if isinstance(error, float) else ""
                rows.append((task, f"{metric} {value:.4f}{spread}"))
    print(units.table(rows, indent=""))


def _what_ran(run: TrainedRun) -> list[tuple[str, str]]:
    rows = [("model", run.title), ("precision", run.precision.summary())]
    return [*rows, ("kernels", run.kernels)] if run.device.type == "cuda" else rows


def _on_text(run: TrainedRun, options: Options) -> None:
    from nvfp4_train.training import evaluation

    if options.data is None and run.checkpoint is None:
        raise ConfigError(
            f"run={options.run} is no run of this program, so nothing says which text was held out: give one with "
            "data=FILE_OR_FOLDER."
        )
    if options.data is None:
        text = evaluation.held_out_text(
            run, report=lambda line: print(line, file=sys.stderr), corpus=options.corpus
        )
    else:
        text = evaluation.read_text(options.data, run.tokenizer, options.max_tokens)
    scores = {"as trained": evaluation.score(run.model, run.cfg, text.stream, options.max_tokens, _progress)}
    if options.bf16:
        with run.precision.all_bf16():
            scores["all in BF16"] = evaluation.score(
                run.model, run.cfg, text.stream, options.max_tokens, _progress
            )
    first = scores["as trained"]
    rows = _what_ran(run)
    rows.append(("text", f"{text.name}: {units.count(first.tokens)} tokens, {units.size(first.n_bytes)}"))
    for name, score in scores.items():
        gap = "" if score is first else f"  (as trained {100 * (first.loss / score.loss - 1):+.2f} %)"
        rows.append((name, f"loss {score.loss:.4f}  {score.bits_per_byte:.3f} bits per byte{gap}"))
    if options.max_tokens is None:  # of the whole text
        rows += [
            (f"{name} -9", f"{'':11}  {value:.3f} bits per byte") for name, value in text.baselines.items()
        ]
    print(units.table(rows, indent=""))


def _progress(share: float) -> None:
    if sys.stderr.isatty():
        end = "\r\x1b[K" if share >= 1.0 else ""
        print(f"\r{100 * share:3.0f}%{end}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
