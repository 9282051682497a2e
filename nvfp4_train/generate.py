"""Write text with a trained model: `python -m nvfp4_train.generate run=DIR prompt="any text, as typed"`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from nvfp4_train import cli, units
from nvfp4_train.errors import ConfigError


@dataclass(frozen=True)
class Options:
    run: str = cli.option(
        "folder of the run; its newest checkpoint writes (or one of its checkpoints/step_... folders)"
    )
    prompt: str = cli.option("text to continue, every character as typed; empty: a new document", "")
    max_new_tokens: int = cli.option("tokens to write, fewer if the document ends", 200)
    temperature: float = cli.option("0: always the likeliest token", 0.8)
    top_p: float = cli.option("choose among the likeliest tokens of this joint probability", 0.95)
    seed: int = cli.option("the same seed writes the same text", 0)
    device: str = cli.option("auto, cpu or cuda", "auto")


def main(argv: list[str]) -> None:
    """Prompt and continuation go to standard output as they come, everything about them to standard error."""
    options = cli.parse(argv, Options, "nvfp4_train.generate")
    if options is None:
        return
    _check(options)
    from nvfp4_train.training import sampling  # after the check: importing torch takes seconds
    from nvfp4_train.training.inference import load_run

    run = load_run(options.run, options.device, warn=lambda text: _say(f"WARNING  {text}"))
    prompt = sampling.start_document(run.tokenizer, options.prompt)
    _say(f"{run.title}; {run.precision.summary().split(';')[0]}")
    started = time.monotonic()
    n = 0

    def counted():
        nonlocal n
        tokens = sampling.sample_tokens(
            run.model,
            prompt,
            options.max_new_tokens,
            options.temperature,
            options.top_p,
            options.seed,
            run.device,
        )
        for n, token in enumerate(tokens, start=1):  # noqa: B007 - n is read below
            yield token

    show = units.printable if sys.stdout.isatty() else str
    print(show(options.prompt), end="", flush=True)
    for text in sampling.stream_text(counted(), run.tokenizer):
        print(show(text), end="", flush=True)
    print()
    seconds = time.monotonic() - started
    _say(
        f"{n} tokens in {units.duration(seconds)} ({units.rate((len(prompt) + n) / seconds)}, the prompt included)"
    )


def _check(options: Options) -> None:
    if options.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={options.max_new_tokens} must be at least 1.")
    if not 0 <= options.temperature < float("inf"):
        raise ConfigError(f"temperature={options.temperature:g} must be 0 or more.")
    if not 0 < options.top_p <= 1:
        raise ConfigError(f"top_p={options.top_p:g} must be above 0 and at most 1.")
    if not 0 <= options.seed < 1 << 63:
        raise ConfigError(f"seed={options.seed} must be between 0 and 2^63 - 1.")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(cli.exit_code(main))
