"""The data sets of a run: one, or several by name, and which of them its steps are drawn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nvfp4_train.config.schema import HELD_OUT, Config
from nvfp4_train.data.build import prepare
from nvfp4_train.data.dataset import Dataset, open_dataset
from nvfp4_train.data.mixture import Segment, before, from_json, planned, resumed, to_json
from nvfp4_train.data.progress import Report
from nvfp4_train.errors import CheckpointError, DataError


class Corpora:
    """Data sets by name, all of one tokenizer; `segments` say how training mixes them, `packing` how it cuts them.

    Each one's held-out part is validated, also of those that no segment trains on.
    """

    def __init__(
        self,
        datasets: Mapping[str, Dataset],
        segments: Sequence[Segment] = (),
        packing: str = "stream",
        known: Mapping[str, str] | None = None,
    ) -> None:
        """Without `segments` there must be one data set, which is trained on. `known`: the hashes of those that earlier
        launches had, by name. Raises DataError for several tokenizers."""
        self.datasets, self.packing = dict(datasets), packing
        self._known = dict(known or {})
        self.segments = list(segments) or [Segment(0, dict.fromkeys(datasets, 1.0))]
        first, *others = self.datasets.values()
        for other in others:
            if other.tokenizer.hash != first.tokenizer.hash:
                raise DataError(
                    f"{other.path} was prepared with another tokenizer than {first.path}: prepare all data.corpora with "
                    "one, by data.tokenizer=FILE."
                )
        self.tokenizer = first.tokenizer

    @property
    def only(self) -> Dataset | None:
        """The data set, where there is one."""
        return next(iter(self.datasets.values())) if len(self.datasets) == 1 else None

    @property
    def hash(self) -> str:
        """Of what stays the same as long as a run lasts: the data set, of several the tokenizer (and each by `record`)."""
        return self.only.hash if HELD_OUT in self.datasets else self.tokenizer.hash

    def record(self, batch: int) -> dict[str, Any]:
        """What the batches before `batch` were drawn from, for a checkpoint; a corpus that was once there keeps its name."""
        here = {name: dataset.hash for name, dataset in self.datasets.items()}
        return {"corpora": self._known | here, "mixture": to_json(before(self.segments, batch))}

    def epochs(self, name: str, steps: int, step_tokens: int) -> float:
        """How often the first `steps` steps read the corpus `name`."""
        ends = [*(segment.start for segment in self.segments[1:]), steps]
        drawn = sum(
            segment.shares.get(name, 0.0) * max(0, min(end, steps) - segment.start)
            for segment, end in zip(self.segments, ends, strict=True)
        )
        return drawn * step_tokens / max(1, self.datasets[name].n_tokens("train"))

    def baselines(self) -> dict[str, float]:
        """The compressors' bits a byte of the held-out text; of several data sets none."""
        return self.only.baselines() if self.only else {}


def prepare_corpora(cfg: Config, report: Report) -> dict[str, Path]:
    """The folders of the prepared data sets that `cfg.data` names, built where they are missing.

    Raises DataError or ConfigError with one sentence.
    """
    sources = cfg.data.corpora or {HELD_OUT: cfg.data.source}
    return {
        name: prepare(replace(cfg.data, source=source), cfg.model.vocab_size, report)
        for name, source in sources.items()
    }


def open_corpora(
    cfg: Config, folders: Mapping[str, Path], past: Mapping[str, Any] | None = None, batch: int = 0
) -> Corpora:
    """The data sets in `folders`, checked as `open_dataset` does, mixed as `cfg.data` says.

    On resume `past` is the record of the checkpoint and `batch` the number of its next batch: those before it keep what
    they were drawn from, the mixture that `cfg` gives holds from `batch` on. Raises DataError for damaged or differing
    data, CheckpointError when a data set isn't the one that this name had.
    """
    datasets = {name: open_dataset(folder) for name, folder in folders.items()}
    training = cfg.training
    segments = planned(
        cfg.data.mixture, training.max_tokens, training.global_batch_size * training.seq_len
    ) or [Segment(0, {HELD_OUT: 1.0})]
    _check_names(datasets, past["corpora"] if past else {})
    if past is not None:
        segments = resumed(from_json(past["mixture"]), segments, batch)
    return Corpora(datasets, segments, cfg.data.packing, past and past["corpora"])


def _check_names(datasets: Mapping[str, Dataset], past: Mapping[str, str]) -> None:
    """A name must mean what it meant, and a data set has one name for ever: its sequences are counted by it."""
    names = {hash: name for name, hash in past.items()}
    now: dict[str, str] = {}
    for name, dataset in datasets.items():
        if past.get(name, dataset.hash) != dataset.hash:
            raise CheckpointError(
                f"data.corpora.{name}={dataset.path} is not the data set that this run was trained on as {name}: give that "
                "one back, or call the new one something else."
            )
        if names.get(dataset.hash, name) != name:
            raise CheckpointError(
                f"data.corpora.{name}={dataset.path} is what this run was trained on as {names[dataset.hash]}: give it that "
                "name, so that no text of it comes twice."
            )
        if (other := now.setdefault(dataset.hash, name)) != name:
            raise DataError(
                f"data.corpora.{name}={dataset.path} is the same data set as data.corpora.{other}: name it once."
            )
