import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib.training.schedules import lr_factor


@pytest.mark.parametrize(
    ("schedule", "warmup", "decay", "final", "expected"),
    [
        ("constant", 0, 4, 0.1, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("constant", 4, 4, 0.1, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        ("linear", 0, 4, 0.0, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("linear", 2, 6, 0.2, [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", 0, 4, 0.0, [1.0, 0.8535533905932737, 0.5, 0.14644660940672624, 0.0, 0.0]),
        ("cosine", 1, 5, 0.5, [1.0, 1.0, 0.9267766952966369, 0.75, 0.5732233047033631, 0.5, 0.5]),
    ],
)
def test_factors_by_hand(schedule: str, warmup: int, decay: int, final: float, expected: list[float]) -> None:
    factors = [
        lr_factor(step, schedule=schedule, warmup_steps=warmup, decay_steps=decay, final_fraction=final)
        for step in range(len(expected))
    ]
    assert factors == pytest.approx(expected, abs=1e-15)


@settings(deadline=None, max_examples=50)
@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    decay=st.integers(1, 60),
    final=st.floats(0, 1),
)
def test_the_first_step_learns_and_no_step_leaves_the_range(
    schedule: str, warmup: int, decay: int, final: float
) -> None:
    factors = [
        lr_factor(step, schedule=schedule, warmup_steps=warmup, decay_steps=decay, final_fraction=final)
        for step in range(80)
    ]
    assert factors[0] > 0
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert factors[-1] == (1.0 if schedule == "constant" else pytest.approx(final))
