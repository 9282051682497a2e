"""Write text with a trained model: `python -m nvfp4_train.generate run=DIR prompt="any text, as typed"`."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nvfp4_train import cli, units
from nvfp4_train.errors import ConfigError, DataError


@dataclass(frozen=True)
class Options:
    run: str = cli.option(
        "folder of the run; its newest checkpoint writes (or one of its checkpoints/step_..., or a Hugging Face folder)"
    )
    prompt: str = cli.option("text to continue, every character as typed; empty: a new document", "")
    prompts: str | None = cli.option("instead of a prompt: a text file with one a line", None)
    samples: int = cli.option("texts for each prompt, with the seeds seed, seed + 1, ...", 1)
    max_new_tokens: int = cli.option("tokens to write, fewer if the document ends", 200)
    temperature: float = cli.option("0: always the likeliest token", 0.8)
    top_p: float = cli.option("choose among the likeliest tokens of this joint probability", 0.95)
    seed: int = cli.option("the same seed writes the same text", 0)
    device: str = cli.option("auto, cpu or cuda", "auto")


def main(argv: list[str]) -> None:
    """Prompt and continuation go to standard output as they come, everything about them to standard error.

    Several texts are written together and shown one after the other.
    """
    options = cli.parse(argv, Options, "nvfp4_train.generate")
    if options is None:
        return
    _check(options)
    prompts = [options.prompt] if options.prompts is None else _read_prompts(options.prompts)
    from nvfp4_train.training import sampling  # after the check: importing torch takes seconds
    from nvfp4_train.training.inference import load_run

    run = load_run(options.run, options.device, warn=lambda text: _say(f"WARNING  {text}"))
    texts = [text for text in prompts for _ in range(options.samples)]
    starts = [sampling.start_document(run.tokenizer, text) for text in texts]
    _say(f"{run.title}; {run.precision.summary().split(';')[0]}")
    started = time.monotonic()
    steps = sampling.sample_batch(
        run.model,
        starts,
        options.max_new_tokens,
        options.temperature,
        options.top_p,
        [options.seed + i % options.samples for i in range(len(texts))],
        run.device,
        ends=lambda written: all(run.tokenizer.eos_id in tokens for tokens in written),
    )
    show = units.printable if sys.stdout.isatty() else str
    written: list[list[int]] = [[] for _ in texts]

    def first() -> Iterator[int]:
        for tokens in steps:
            for sequence, token in zip(written, tokens, strict=True):
                sequence.append(token)
            yield tokens[0]

    if len(texts) == 1:
        print(show(texts[0]), end="", flush=True)
        for text in sampling.stream_text(first(), run.tokenizer):
            print(show(text), end="", flush=True)
        print()
    else:
        collections.deque(first(), maxlen=0)
        for i, (text, tokens) in enumerate(zip(texts, written, strict=True), start=1):
            continued = "".join(sampling.stream_text(iter(tokens), run.tokenizer))
            print(f"--- {i} of {len(texts)}\n{show(text + continued)}")
    seconds = time.monotonic() - started
    n = sum(map(len, written))
    rate = units.rate((sum(map(len, starts)) + n) / seconds)
    _say(f"{n} tokens in {units.duration(seconds)} ({rate}, the prompt included)")


def _read_prompts(path: str) -> list[str]:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"prompts={path} can't be read ({error}): give a UTF-8 text file with one prompt a line."
        ) from error
    if not lines:
        raise DataError(f"prompts={path} is empty: write one prompt a line.")
    return lines


def _check(options: Options) -> None:
    if options.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={options.max_new_tokens} must be at least 1.")
    if options.samples < 1:
        raise ConfigError(f"samples={options.samples} must be at least 1.")
    if options.prompts is not None and options.prompt:
        raise ConfigError(f"prompts={options.prompts} and prompt={options.prompt!r}: give one of them.")
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
