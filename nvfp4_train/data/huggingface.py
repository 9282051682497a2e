"""Text from Hugging Face `datasets`: "hf:NAME" on the hub, or "hf:FOLDER" on disk (saved by `save_to_disk`, or data files).

Streaming, a unit is one of the data set's own shards; otherwise it is a range of rows. The rows and their order are
the same. What is on the hub is pinned by the commit that data.hf_revision stands for, which is part of the
prepared data's key, so that all machines that share the work read the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4_train.config.schema import DataConfig
from nvfp4_train.data.readers import BLOCK_BYTES, ROW_BYTES, Block, encode_text, first_line
from nvfp4_train.errors import DataError

UNIT_ROWS = 1 << 16  # of a data set that isn't streamed
_BATCH_ROWS = 64


@dataclass(frozen=True)
class RowsUnit:
    """Shard `index` of a streamed data set, or one range of rows."""

    name: str
    rows: Any  # datasets.Dataset or IterableDataset
    first: int  # number of the first row (streaming: within the shard)
    size: int  # bytes of Arrow data, 0 where unknown
    key: list[Any]
    text_key: str

    def fingerprint(self) -> list[Any]:
        return self.key

    def blocks(self) -> Iterator[tuple[Block, int]]:
        row, n_bytes, done = self.first, 0, 0
        block: list[bytes] = []
        try:
            for batch in self.rows.iter(batch_size=_BATCH_ROWS):
                for text in batch[self.text_key]:
                    where = f"{self.name} row {row + len(block)}"
                    if not isinstance(text, str):
                        raise DataError(
                            f'{where} has {"null" if text is None else "no text"} in the column "{self.text_key}": filter '
                            "such rows out, or name another column with data.text_key."
                        )
                    block.append(encode_text(text, where))
                    n_bytes += len(block[-1]) + ROW_BYTES
                if n_bytes >= BLOCK_BYTES:
                    done += n_bytes
                    yield self._block(block, row), min(done, self.size)
                    row, n_bytes, block = row + len(block), 0, []
        except DataError:
            raise
        except Exception as error:  # network, cache and parsing errors of many libraries
            raise DataError(
                f"{self.name} can't be read on from row {row} ({first_line(error)}): check it and start again."
            ) from error
        if block:
            yield self._block(block, row), self.size

    def _block(self, rows: list[bytes], first: int) -> Block:
        return Block("rows", self.name, self.name, first, 0, self.text_key, rows)


def hugging_face(name: str, options: DataConfig) -> tuple[RowsUnit, ...]:
    """The units of a data set. Raises DataError where `datasets` isn't installed, or can't give the split or column."""
    source = f"data.source=hf:{name}"
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{source} needs the package datasets: install it with pip install 'nvfp4-train[hf]'."
        ) from error
    try:
        rows, key = _load(datasets, name, options)
    except Exception as error:  # of many libraries: unknown names, missing access, no network
        raise DataError(
            f"{source} can't be opened ({first_line(error)}): check the name, data.hf_config, data.hf_split="
            f"{options.hf_split} and your access to it."
        ) from error
    columns = rows.column_names or [
        options.text_key
    ]  # of some streams they are only known once they are read
    if options.text_key not in columns:
        raise DataError(
            f'{source} has no column "{options.text_key}" (columns: {", ".join(columns[:8])}): name the text\'s column '
            "with data.text_key."
        )
    units = _units(datasets, rows, source.removeprefix("data.source="), key, options.text_key)
    if not units:
        raise DataError(f"{source} has no rows in data.hf_split={options.hf_split}: choose another split.")
    return units


def _load(datasets: Any, name: str, options: DataConfig) -> tuple[Any, list[Any]]:
    """The rows, and what names them."""
    folder = Path(name).expanduser()
    key: list[Any] = [name, options.hf_config, options.hf_split]
    if not folder.is_dir():
        revision = options.hf_revision
        if revision is None:
            from huggingface_hub import HfApi

            revision = HfApi().dataset_info(name).sha
        load = {"revision": revision, "streaming": options.hf_streaming, "split": options.hf_split}
        return datasets.load_dataset(name, options.hf_config, **load), [*key, revision]
    key += sorted([str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in folder.rglob("*") if p.is_file())
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        saved = datasets.load_from_disk(str(folder))
        return (saved[options.hf_split] if isinstance(saved, dict) else saved), key
    load = {"streaming": options.hf_streaming, "split": options.hf_split}
    return datasets.load_dataset(str(folder), options.hf_config, **load), key


def _units(datasets: Any, rows: Any, label: str, key: list[Any], text_key: str) -> tuple[RowsUnit, ...]:
    split = (rows.info.splits or {}).get(str(rows.split))
    size = split.num_bytes or 0 if split else 0
    if rows.column_names is not None:
        rows = rows.select_columns([text_key])
    if isinstance(rows, datasets.IterableDataset):
        n = rows.num_shards
        parts = [(f"{label} shard {i}", rows.shard(num_shards=n, index=i), 0) for i in range(n)]
    else:
        starts = range(0, len(rows), UNIT_ROWS)
        parts = [(label, rows.select(range(a, min(a + UNIT_ROWS, len(rows)))), a) for a in starts]
    return tuple(
        RowsUnit(name, part, first, size // len(parts), [*key, text_key, type(rows).__name__, i], text_key)
        for i, (name, part, first) in enumerate(parts)
    )
