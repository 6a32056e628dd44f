"""Every random number comes from (run seed, purpose, iteration, row): nothing depends on what ran before."""

import hashlib

import numpy as np
from numpy.typing import NDArray


def derive_seed(run_seed: int, purpose: str, *parts: int) -> int:
    """A 63-bit seed for one purpose, e.g. ``derive_seed(seed, "rollout", iteration)``."""
    text = ":".join([str(run_seed), purpose, *map(str, parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def row_seeds(base: int, first: int, count: int) -> NDArray[np.int64]:
    """Seeds of rows ``first .. first+count-1``, ``int64[count]``, well mixed (the splitmix64 finaliser)."""
    with np.errstate(over="ignore"):
        x = np.uint64(base) + np.arange(first + 1, first + 1 + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(1)).astype(np.int64)
