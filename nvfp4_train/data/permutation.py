"""Random permutations that are computed, not stored: any element in constant time and memory."""

from __future__ import annotations

import numpy as np

_ROUNDS = 6


def permute(index: np.ndarray, n: int | np.ndarray, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Where a permutation of [0, n) sends `index` (uint64); each pair of `seed` and `epoch` has its own.

    `n` is one size below 2^53 for all, or one for each index. A balanced Feistel network is a permutation of [0, 4^b),
    whatever its round function; with 4^b >= n > 4^(b-1), walking on until the value lies below n makes it one of
    [0, n) (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Takes fewer than 4 rounds of walking on
    average.
    """
    sizes = np.broadcast_to(np.asarray(n, dtype=np.uint64), index.shape)
    bits = np.frexp((sizes - np.uint64(1)).astype(np.float64))[1]  # of n - 1, exactly
    half = np.maximum(1, (bits + 1) // 2).astype(np.uint64)
    keys = mix(mix(np.uint64(seed % (1 << 64)) + np.zeros_like(index)) ^ epoch.astype(np.uint64))
    value = _feistel(index.astype(np.uint64), half, keys)
    while len(outside := np.flatnonzero(value >= sizes)):
        value[outside] = _feistel(value[outside], half[outside], keys[outside])
    return value


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function: every bit of x (uint64) decides every bit of the result."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _feistel(value: np.ndarray, half: np.ndarray, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for r in range(_ROUNDS):
        left, right = right, left ^ (mix(keys + np.uint64(r << 32) + right) & mask)
    return (left << half) | right
