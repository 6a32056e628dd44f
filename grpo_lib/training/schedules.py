"""Learning-rate schedules as pure functions of the optimizer step: nothing to save, nothing to restore."""

import math


def lr_factor(step: int, *, schedule: str, warmup_steps: int, decay_steps: int | None, final_fraction: float) -> float:
    """What the learning rate of step ``step`` (from 0) is multiplied by. The first step is never 0.

    ``decay_steps`` is the step of the schedule's end; a constant one has none.

    >>> [round(lr_factor(s, schedule="linear", warmup_steps=2, decay_steps=4, final_fraction=0.0), 2) for s in range(5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    assert decay_steps is not None, f"the {schedule} schedule has an end"
    progress = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    remaining = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return final_fraction + (1 - final_fraction) * remaining
