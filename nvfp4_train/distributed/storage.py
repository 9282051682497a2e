"""Where checkpoints lie: a folder of a local (or shared) disk, or one of an object store through fsspec.

On a disk a checkpoint is written under a hidden name, which is changed once all of it is there. An object store can't rename
a folder, but puts single objects whole or not at all: there the description, put last, makes the folder a checkpoint, and
is deleted first.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import fsspec
from torch.distributed.checkpoint.filesystem import FileSystemBase

from nvfp4_train.atomic import fsync_dir, write_text

_BLOCK = 1 << 20


class Storage:
    """The folder `url`: a path, or a URL such as s3://bucket/run, whose fsspec driver is installed.

    Names are relative to it, "step_00000001/checkpoint.json". Every method raises OSError when the storage fails.
    """

    def __init__(self, url: str | Path) -> None:
        self.url = str(url).rstrip("/")
        if "://" in self.url and not self.url.startswith("file://"):
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        else:
            self._fs, self._root = None, os.path.abspath(self.url.removeprefix("file://"))

    @property
    def local(self) -> bool:
        return self._fs is None

    def path(self, name: str) -> str:
        """The full name that `open` and the tensors' files use."""
        return f"{self._root}/{name}"

    def names(self) -> list[str]:
        """What lies directly in the folder (nothing where it doesn't exist)."""
        try:
            if self.local:
                return os.listdir(self._root)
            self._fs.invalidate_cache()
            return [
                str(path).rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False)
            ]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def open(self, path: str, mode: str) -> IO[bytes]:
        return open(path, mode) if self.local else self._fs.open(path, mode)

    def exists(self, name: str) -> bool:
        return os.path.exists(self.path(name)) if self.local else self._fs.exists(self.path(name))

    def size(self, name: str) -> int:
        return os.path.getsize(self.path(name)) if self.local else self._fs.size(self.path(name))

    def describe(self, name: str) -> dict[str, Any]:
        """Size and SHA-256 of what can be read now."""
        digest, size = hashlib.sha256(), 0
        with self.open(self.path(name), "rb") as f:
            while block := f.read(_BLOCK):
                digest.update(block)
                size += len(block)
        return {"size": size, "sha256": digest.hexdigest()}

    def read_text(self, name: str) -> str:
        with self.open(self.path(name), "rb") as f:
            return f.read().decode()

    def begin(self, name: str) -> str:
        """Make room for the checkpoint `name`; returns the name to write its files under."""
        if not self.local:
            self.remove(name)
            return name
        hidden = f".{name}.tmp"
        shutil.rmtree(self.path(hidden), ignore_errors=True)
        os.makedirs(self.path(hidden))
        return hidden

    def publish(self, written: str, name: str, description_name: str, description: str) -> None:
        """Add the description to what was written, and make it the checkpoint `name`."""
        if not self.local:
            self._fs.pipe_file(self.path(f"{written}/{description_name}"), description.encode())
            return
        write_text(self.path(f"{written}/{description_name}"), description)
        self.remove(name)  # a damaged one that a resumed run has now reached again
        os.rename(self.path(written), self.path(name))
        fsync_dir(Path(self._root))

    def discard(self, written: str) -> None:
        """Remove what `begin` and an unfinished save left."""
        if self.local:
            shutil.rmtree(self.path(written), ignore_errors=True)
        elif self.exists(written):
            self._fs.rm(self.path(written), recursive=True)

    def remove(self, name: str) -> None:
        """Delete a checkpoint, if it is there; a kill in between leaves nothing that passes for a damaged one."""
        if not self.exists(name):
            return
        if self.local:
            hidden = f".{name}.deleted"
            shutil.rmtree(self.path(hidden), ignore_errors=True)
            os.rename(self.path(name), self.path(hidden))
            shutil.rmtree(self.path(hidden), ignore_errors=True)
            return
        for description in self._fs.glob(f"{self.path(name)}/*.json"):
            self._fs.rm_file(description)
        self._fs.rm(self.path(name), recursive=True)


class TensorFiles(FileSystemBase):
    """The file operations of PyTorch's reader and writer on a Storage; hashes what is written on its way.

    `written` is {file name: {"size", "sha256"}}.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.written: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[IO[bytes]]:
        with self._storage.open(str(path), mode) as raw:
            if mode == "rb":
                yield raw
                return
            stream = HashingStream(raw)
            yield stream
        self.written[os.path.basename(path)] = {"size": stream.size, "sha256": stream.digest.hexdigest()}

    def concat_path(self, path: str | os.PathLike, suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: str | os.PathLike) -> str:
        return str(path)

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        if self._storage.local:
            os.rename(path, new_path)
        else:
            self._storage._fs.mv(str(path), str(new_path))
        self.written[os.path.basename(new_path)] = self.written.pop(os.path.basename(path))

    def mkdir(self, path: str | os.PathLike) -> None:
        if self._storage.local:
            os.makedirs(path, exist_ok=True)
        else:
            self._storage._fs.makedirs(str(path), exist_ok=True)

    def exists(self, path: str | os.PathLike) -> bool:
        return os.path.exists(path) if self._storage.local else self._storage._fs.exists(str(path))

    def rm_file(self, path: str | os.PathLike) -> None:
        os.unlink(path) if self._storage.local else self._storage._fs.rm_file(str(path))

    def ls(self, path: str | os.PathLike) -> list[str]:
        return self._storage._fs.ls(str(path), detail=False) if self._storage._fs else os.listdir(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


class HashingStream(io.RawIOBase):
    """Passes bytes on to `raw` and hashes them, so that nothing has to be read again for its checksum."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self.digest, self.size = raw, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self._raw.write(data)
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        return memoryview(data).nbytes

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._raw.flush()

    def fileno(self) -> int:
        self._raw.flush()  # PyTorch's writer syncs the file as it is, without what Python still holds
        return self._raw.fileno()

    def close(self) -> None:
        self._raw.close()
