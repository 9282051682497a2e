"""Random permutations that are computed, not stored: any element in constant time and memory."""

from __future__ import annotations

import numpy as np

_ROUNDS = 6


def permute(index: np.ndarray, n: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Where a permutation of [0, n) sends `index` (uint64); each pair of `seed` and `epoch` has its own.

    A balanced Feistel network is a permutation of [0, 4^b), whatever its round function; with 4^b >= n > 4^(b-1),
    walking on until the value lies below n makes it one of [0, n) (Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", 2002). Takes fewer than 4 rounds of walking on average.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    keys = _mix(_mix(np.uint64(seed % (1 << 64)) + np.zeros_like(index)) ^ epoch.astype(np.uint64))
    value = _feistel(index.astype(np.uint64), half, keys)
    while (outside := value >= n).any():
        value[outside] = _feistel(value[outside], half, keys[outside])
    return value


def _feistel(value: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for r in range(_ROUNDS):
        left, right = right, left ^ (_mix(keys + np.uint64(r << 32) + right) & mask)
    return (left << half) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function: every bit of x decides every bit of the result."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
