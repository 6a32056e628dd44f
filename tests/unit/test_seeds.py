import hashlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib.seeds import derive_seed, row_seeds, uniforms

FEW = settings(deadline=None, max_examples=50)


def test_a_seed_is_the_first_63_bits_of_a_hash_of_its_purpose() -> None:
    digest = hashlib.sha256(b"7:rollout:3").digest()
    assert derive_seed(7, "rollout", 3) == int.from_bytes(digest[:8], "little") // 2


def test_purpose_run_and_iteration_each_change_the_seed() -> None:
    seeds = [
        derive_seed(0, "rollout"),
        derive_seed(0, "rollout", 0),
        derive_seed(0, "rollout", 1),
        derive_seed(0, "rollout", 1, 1),
        derive_seed(0, "rollout", 11),
        derive_seed(0, "update", 1),
        derive_seed(1, "rollout", 1),
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_row_seeds_are_those_of_splitmix64() -> None:
    # The published first outputs of splitmix64 with seed 0, without their last bit.
    expected = [0xE220A8397B1DCDAF >> 1, 0x6E789E6AA1B965F4 >> 1, 0x06C45D188009454F >> 1]
    assert row_seeds(0, 0, 3).tolist() == expected
    assert row_seeds(0, 0, 3).dtype == np.int64


@FEW
@given(base=st.integers(0, 2**63 - 1), first=st.integers(0, 10_000), count=st.integers(0, 40))
def test_the_seed_of_a_row_does_not_depend_on_the_shard_it_is_made_in(base: int, first: int, count: int) -> None:
    seeds = row_seeds(base, first, count)
    assert seeds.tolist() == row_seeds(base, 0, first + count)[first:].tolist()
    assert (seeds >= 0).all()
    assert len(set(seeds.tolist())) == count


def test_neighbouring_rows_get_unlike_seeds() -> None:
    bits = np.unpackbits(row_seeds(12, 0, 2000).view(np.uint8)).reshape(2000, 64)
    changed = (bits[1:] != bits[:-1]).mean()
    assert 0.48 < changed * 64 / 63 < 0.52


def test_numbers_at_steps_of_their_own_are_those_of_each_step_alone() -> None:
    seeds, steps = row_seeds(5, 0, 4), np.array([3, 0, 7, 3])
    together = uniforms(seeds, steps)
    assert together.tolist() == [uniforms(seeds[i : i + 1], int(step))[0] for i, step in enumerate(steps)]
    assert len(set(together.tolist())) == 4 and ((together >= 0) & (together < 1)).all()
