"""Which corpus each sequence of training comes from: shares by phase, exact counts, nothing stored.

Places number the run's sequences: place p is sequence p % G of step p // G, G the global batch size. Within a segment
(a stretch of steps with the same shares) place p is the point x(p) = (a p + b) mod 2^64 on a circle, a = 2^64 / golden
ratio, and each corpus owns an arc as long as its share. Such points fill every arc evenly (the count in n places
differs from share x n by a few, whatever n), so every batch is mixed alike; and how many of the places before p fell
into an arc has a closed form, so the how-manieth sequence of its corpus stands at p is known without looking at any
other place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np

from nvfp4_train.config.schema import MixturePhaseConfig
from nvfp4_train.data.permutation import mix

_CIRCLE = 1 << 64
_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd


@dataclass(frozen=True)
class Segment:
    """From step `start` until the next segment starts: {corpus: share of the sequences}, none 0, sorted by name."""

    start: int
    shares: dict[str, float]


def shares_of(weights: Mapping[str, float]) -> dict[str, float]:
    """`weights` as shares of 1, rounded to 12 decimals: 70/30 and 0.7/0.3 are the same mixture."""
    total = math.fsum(weights.values())
    shares = {name: round(weight / total, 12) for name, weight in sorted(weights.items())}
    return {name: share for name, share in shares.items() if share}


def describe(shares: Mapping[str, float]) -> str:
    """20 % code, 80 % web."""
    return ", ".join(f"{100 * share:.4g} % {name}" for name, share in shares.items())


def planned(phases: Sequence[MixturePhaseConfig], max_tokens: float, step_tokens: int) -> list[Segment]:
    """The segments of `phases` (checked, in order). A phase takes effect at the first step that begins at or after its
    share of `max_tokens`; a later one replaces an earlier one that starts at the same step."""
    by_step = {_first_step(p.start, max_tokens, step_tokens): shares_of(p.weights) for p in phases}
    return _merged(Segment(step, shares) for step, shares in by_step.items())


def _first_step(start: float, max_tokens: float, step_tokens: int) -> int:
    """The first step at which step x step_tokens / max_tokens, as precision.phases computes it, is at least `start`."""
    step = max(0, math.ceil(start * max_tokens / step_tokens) - 1)
    while step * step_tokens / max_tokens < start:
        step += 1
    return step


def resumed(past: Sequence[Segment], plan: Sequence[Segment], step: int) -> list[Segment]:
    """What was done before `step` as it was done, and `plan` from `step` on."""
    now = [segment for segment in plan if segment.start <= step][-1]
    later = [segment for segment in plan if segment.start > step]
    return _merged([*before(past, step), Segment(step, now.shares), *later])


def before(segments: Sequence[Segment], step: int) -> list[Segment]:
    """The segments that steps before `step` were drawn from."""
    return [segment for segment in segments if segment.start < step]


def to_json(segments: Sequence[Segment]) -> list[Any]:
    return [[segment.start, segment.shares] for segment in segments]


def from_json(value: Sequence[Any]) -> list[Segment]:
    return [Segment(start, dict(sorted(shares.items()))) for start, shares in value]


def _merged(segments: Iterable[Segment]) -> list[Segment]:
    """Without segments that go on as the one before: a new one would start the circle anew."""
    out: list[Segment] = []
    for segment in segments:
        if not out or segment.shares != out[-1].shares:
            out.append(segment)
    return out


class Draw:
    """The corpus of every place, and how many sequences of that corpus come before it."""

    def __init__(self, segments: Sequence[Segment], global_batch_size: int, seed: int) -> None:
        """`segments` start at step 0, in order; a corpus that is in several goes on counting."""
        self.names = sorted({name for segment in segments for name in segment.shares})
        self._offset = int(mix(np.array([seed % _CIRCLE], dtype=np.uint64))[0])
        self._starts = [segment.start * global_batch_size for segment in segments]
        self._corpora = [np.array([self.names.index(name) for name in s.shares]) for s in segments]
        self._arcs = [_inner_ends(list(segment.shares.values())) for segment in segments]
        self._counts = [np.zeros(len(self.names), dtype=np.uint64)]  # of each corpus, before each segment
        for i in range(len(segments) - 1):
            self._counts.append(self._before(i, self._starts[i + 1] - self._starts[i]))

    def places(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the places [start, start + count): numbers of their corpora in `names` (int64), and how many sequences
        of the same corpus come before each (uint64)."""
        parts = []
        ends = [*self._starts[1:], start + count]
        for i, (first, end) in enumerate(zip(self._starts, ends, strict=True)):
            here, stop = max(start, first), min(start + count, end)
            if here < stop:
                parts.append(self._within(i, here - first, stop - here))
        corpora, indices = zip(*parts, strict=True)
        return np.concatenate(corpora), np.concatenate(indices)

    def _within(self, segment: int, offset: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        points = np.arange(offset, offset + count, dtype=np.uint64) * np.uint64(_STEP)
        points += np.uint64(self._offset)
        inner = np.array(self._arcs[segment], dtype=np.uint64)
        corpora = self._corpora[segment][np.searchsorted(inner, points, side="right")]
        indices = self._before(segment, offset)[corpora]
        for corpus in self._corpora[segment]:
            mine = np.flatnonzero(corpora == corpus)
            indices[mine] += np.arange(len(mine), dtype=np.uint64)
        return corpora, indices

    def _before(self, segment: int, offset: int) -> np.ndarray:
        """Sequences of each corpus before the place `offset` of a segment."""
        below = [0, *(self._points_below(end, offset) for end in self._arcs[segment]), offset]
        counts = self._counts[segment].copy()
        counts[self._corpora[segment]] += np.diff(np.array(below, dtype=np.uint64))
        return counts

    def _points_below(self, end: int, n: int) -> int:
        """How many of the first n points lie below `end`: [x < A] is floor(x / 2^64) - floor((x - A) / 2^64)."""
        total = _floor_sum(n, _CIRCLE, _STEP, self._offset)
        return total - _floor_sum(n, _CIRCLE, _STEP, self._offset - end + _CIRCLE) + n


def _inner_ends(shares: Sequence[float]) -> list[int]:
    """Where each arc but the last ends, in 2^-64 of the circle."""
    exact = [Fraction(share) for share in shares]
    return [round(end / sum(exact) * _CIRCLE) for end in accumulate(exact[:-1])]


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """The sum of floor((a i + b) / m) over i in [0, n), by Euclid's steps (Graham, Knuth and Patashnik, "Concrete
    Mathematics", section 3.5)."""
    total = 0
    while True:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        if top < m:
            return total
        n, b = divmod(top, m)
        m, a = a, m
