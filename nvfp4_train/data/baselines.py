"""What general compressors need for the held-out text: the marks a language model is measured against."""

from __future__ import annotations

import gzip
import lzma

MAX_BYTES = 64 << 20  # of held-out text; xz takes a second for about 2 MB


class Baselines:
    """Fed the held-out documents in order; once 64 MiB are reached the rest is left out, as the manifest's bytes show."""

    def __init__(self) -> None:
        self._xz = lzma.LZMACompressor(preset=9)
        self._bytes = self._gzip_bytes = self._xz_bytes = 0

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return self._bytes >= MAX_BYTES

    def add(self, data: bytes) -> None:
        if not self.full:
            self._bytes += len(data)
            self._gzip_bytes += len(gzip.compress(data, 9))
            self._xz_bytes += len(self._xz.compress(data))

    def finish(self) -> dict[str, float | int]:
        """Bits a byte of `gzip -9` on each document alone and of `xz -9` on all together, and the bytes measured."""
        xz_bytes = self._xz_bytes + len(self._xz.flush())
        return {
            "gzip": 8 * self._gzip_bytes / self._bytes,
            "xz": 8 * xz_bytes / self._bytes,
            "bytes": self._bytes,
        }
