"""How well a trained model predicts a text: the run's held-out one, or any other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from nvfp4_train.config.schema import Config
from nvfp4_train.data.baselines import Baselines
from nvfp4_train.data.batch import Batch
from nvfp4_train.data.build import prepare
from nvfp4_train.data.dataset import Dataset, open_dataset
from nvfp4_train.data.sources import find_source
from nvfp4_train.data.tokenizer import Tokenizer
from nvfp4_train.data.validation import iterate_valid
from nvfp4_train.distributed.processes import ALONE, Processes
from nvfp4_train.errors import ConfigError, DataError
from nvfp4_train.model.hybrid import HybridModel
from nvfp4_train.training.inference import TrainedRun


class TokenizedText:
    """A text in memory as the held-out part of a data set: documents in order, each followed by eos."""

    def __init__(self, tokens: np.ndarray, tokenizer: Tokenizer) -> None:
        self._tokens, self.tokenizer = tokens, tokenizer

    def n_tokens(self, split: str) -> int:
        return len(self._tokens)

    def tokens(self, split: str, start: int, stop: int) -> np.ndarray:
        return self._tokens[start:stop].astype(np.int64)


@dataclass(frozen=True)
class Text:
    """What is measured on; `baselines` are bits per byte of general compressors on all of it."""

    name: str
    stream: Dataset | TokenizedText
    baselines: dict[str, float]


@dataclass(frozen=True)
class Score:
    """`loss` in nats a token; `tokens` and `n_bytes` say on how much text."""

    loss: float
    bits_per_byte: float
    tokens: int
    n_bytes: int


def held_out_text(run: TrainedRun, report: Callable[[str], None], corpus: str | None = None) -> Text:
    """The text that the run held out, prepared again where the cache has lost it; of several, that of `corpus`.

    `report` gets lines for a person. Raises DataError when the source is gone, or is not the text it was, and
    ConfigError unless `corpus` is None or one of several.
    """
    data = run.cfg.data
    if (corpus is None) == bool(data.corpora) or (corpus and corpus not in data.corpora):
        choices = (
            " or ".join(f"corpus={name}" for name in data.corpora)
            or "no corpus=NAME, as the run has one text"
        )
        raise ConfigError(
            f"corpus={corpus or ''}: the run's held-out texts are chosen by name: give {choices}."
        )
    source = data.corpora[corpus] if corpus else data.source
    dataset = open_dataset(prepare(replace(data, source=source), run.cfg.model.vocab_size, report))
    if dataset.tokenizer.hash != run.tokenizer.hash:
        raise DataError(
            f"data.source={source} no longer is the text that the run was trained on (its tokenizer differs): restore "
            "it, or give another text with data=FILE_OR_FOLDER."
        )
    return Text(f"{dataset.manifest['source']}, held-out part", dataset, dataset.baselines())


def read_text(source: str, tokenizer: Tokenizer, max_tokens: int | None) -> Text:
    """The text in the file or folder `source`, read until there are `max_tokens` tokens (then without baselines).

    Raises DataError when there is none, or none that can be read.
    """
    found, compressors = find_source(source), Baselines()
    parts, count = [], 0
    for document, _ in found.documents():
        parts.append(np.array([*tokenizer.encode(document.text), tokenizer.eos_id], dtype=np.int32))
        count += len(parts[-1])
        if max_tokens is not None and count >= max_tokens:
            break
        compressors.add(document.data)
    if not parts:
        raise DataError(f"data={source} holds only empty documents: give a file or folder with text.")
    baselines = compressors.finish() if max_tokens is None else {}
    baselines.pop("bytes", None)
    return Text(found.name, TokenizedText(np.concatenate(parts), tokenizer), baselines)


@torch.no_grad()
def score(
    model: HybridModel,
    cfg: Config,
    stream: Dataset | TokenizedText,
    max_tokens: float | None = None,
    progress: Callable[[float], None] = lambda share: None,
    processes: Processes = ALONE,
) -> Score:
    """Measure every held-out token of `stream` once (the first `max_tokens`), in micro-batches of the run's size, so
    that tensor scales span as much as in training. `progress` gets the share done after each. The ranks take turns at
    the micro-batches and get the same score."""
    device = model.lm_head.weight.device
    batches = iterate_valid(
        stream,
        cfg.training.seq_len,
        cfg.training.micro_batch_size,
        max_tokens,
        cfg.data.reset_state_at_documents,
    )
    total = min(stream.n_tokens("valid"), max_tokens or math.inf)
    nll = torch.zeros((), dtype=torch.float64, device=device)
    count = torch.zeros((), dtype=torch.int64, device=device)
    n_bytes = 0
    for i, (batch, batch_bytes) in enumerate(_turns(batches, processes), start=1):
        batch = batch.to(device)
        batch_nll, batch_count = model.loss(batch.tokens, batch.targets, batch.seq_idx, batch.mask)
        nll += batch_nll
        count += batch_count
        n_bytes += batch_bytes
        progress(min(1.0, i * batch.tokens.numel() * processes.size / total))
    tokens, nats = int(processes.sum(count)), float(processes.sum(nll))
    return Score(nats / tokens, nats / math.log(2) / n_bytes if n_bytes else math.nan, tokens, n_bytes)


def _turns(batches: Iterator[tuple[Batch, int]], processes: Processes) -> Iterator[tuple[Batch, int]]:
    """This rank's batches, as many as every rank has (a sharded model computes on all ranks at once): at the end some
    repeat one without counting it. The bytes are those of all ranks' batches."""
    while turn := list(itertools.islice(batches, processes.size)):
        n_bytes = sum(n for _, n in turn)
        if processes.rank < len(turn):
            yield turn[processes.rank][0], n_bytes
        else:
            batch = turn[0][0]
            yield replace(batch, mask=torch.zeros_like(batch.tokens, dtype=torch.bool)), n_bytes
