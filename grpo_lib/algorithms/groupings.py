"""Which responses are compared with each other: from columns of the prompts to group ids."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from grpo_lib.algorithms.registry import Registry

Grouping = Callable[..., NDArray[np.int64]]
GROUPINGS: Registry[Grouping] = Registry(
    "grouping",
    {
        "prompt_id": "`str[P]`: one entry a prompt of the iteration, as all columns here",
        "prompt": "`str[P]`: as the problem wrote it",
        "reference": "`str[P]`",
        "data_source": "`str[P]`",
        "dataset_row": "`int64[P]`",
        "epoch": "`int32[P]`",
    },
)


@GROUPINGS.register(
    "prompt",
    formula="one group a prompt",
    paper="Shao et al. 2024, DeepSeekMath",
    use="the default: responses to the same prompt",
)
def by_prompt(dataset_row: NDArray[np.int64]) -> NDArray[np.int64]:
    """A prompt that an iteration holds twice makes two groups."""
    return np.arange(len(dataset_row))


@GROUPINGS.register(
    "data_source",
    formula="one group a data source",
    paper="-",
    use="one response a prompt; sources of different difficulty",
)
def by_data_source(data_source: NDArray[np.str_]) -> NDArray[np.int64]:
    """The baseline is the mean over everything of the same source in the iteration."""
    return np.unique(data_source, return_inverse=True)[1].astype(np.int64)
