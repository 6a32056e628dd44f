"""Every random number comes from (run seed, purpose, iteration, row): nothing depends on what ran before."""

import hashlib

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def derive_seed(run_seed: int, purpose: str, *parts: int) -> int:
    """A 63-bit seed for one purpose, e.g. ``derive_seed(seed, "rollout", iteration)``."""
    text = ":".join([str(run_seed), purpose, *map(str, parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def row_seeds(base: int, first: int, count: int) -> NDArray[np.int64]:
    """Seeds of rows ``first .. first+count-1``, ``int64[count]``, well mixed."""
    with np.errstate(over="ignore"):
        x = np.uint64(base) + np.arange(first, first + count, dtype=np.uint64) * _GOLDEN
        return (_mix(x) >> np.uint64(1)).astype(np.int64)


def uniforms(seeds: NDArray[np.int64], step: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each seed at a step (or at its own step): multiples of 2^-48.

    >>> u = uniforms(np.array([1, 2, 1]), 0); bool(u[0] == u[2] != u[1])
    True
    """
    with np.errstate(over="ignore"):
        offset = (np.asarray(step).astype(np.uint64) + np.uint64(1)) * _GOLDEN
        mixed = _mix(_mix(seeds.astype(np.int64).view(np.uint64)) + offset)
    return (mixed >> np.uint64(16)).astype(np.float64) * 2.0**-48


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
