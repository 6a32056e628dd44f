"""A curriculum through the flow: what it learned is in the store, and a resumed run draws as an undisturbed one."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from grpo_lib.run import Run
from tests.flows.runs import Tiny, fresh_process, of, train

pytestmark = pytest.mark.usefixtures("prefect_here")

OWN = """
import numpy as np
import pyarrow as pa


class Unseen:
    \"\"\"Only prompts that were not asked before; row 0 first of all.\"\"\"

    def weights(self, state, prompts):
        weights = np.ones(prompts.num_rows)
        weights[0] = 1e12
        if state is not None:
            weights[state["dataset_row"].to_numpy()] = 0
        return weights

    def learn(self, state, outcomes):
        seen = outcomes["dataset_row"].unique()
        if state is not None:
            seen = pa.concat_arrays([seen, state["dataset_row"].combine_chunks()])
        return pa.table({"dataset_row": seen})
"""


def rows_of(run: Run, k: int) -> list[int]:
    prompts = [each for each in run.stages.manifests(k) if each.stage == "prompts"]
    return run.stages.table([each.to_ref(reused=True) for each in prompts]).column("dataset_row").to_pylist()


def test_a_resumed_run_draws_as_an_undisturbed_one(tiny: Tiny, tmp_path: Path) -> None:
    settings = ["rollout.sampler={name: pass_rate, kwargs: {floor: 0.01}}", "iterations=4"]
    straight = train(tiny(*settings, f"store.uri={tmp_path / 'straight'}"))
    train(tiny(*settings, "iterations=2"))
    fresh_process()
    resumed = train(tiny(*settings))
    for stage in ("sampler", "prompts", "update"):
        assert [each.digest for each in of(resumed, stage)] == [each.digest for each in of(straight, stage)], stage
    assert [each.iteration for each in of(resumed, "sampler")] == [1, 2, 3], "there is nothing to learn from before"
    assert of(resumed, "prompts", 0)[0].summary["effective_fraction"] == 1
    assert float(str(of(resumed, "prompts", 3)[0].summary["effective_fraction"])) < 1


def test_a_sampler_of_one_s_own_decides_and_its_state_is_data(tiny: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "unseen_sampler.py"
    file.write_text(OWN)
    config = tiny(f"rollout.sampler={{path: {file}, name: Unseen}}", "iterations=3")
    manifests = train(config)
    run = Run(config)
    drawn = [rows_of(run, k) for k in range(3)]
    assert drawn[0][0] == 0, "the heaviest comes first"
    assert len({row for each in drawn for row in each}) == 12, "none is drawn twice"
    (last,) = of(manifests, "sampler", 2)
    state: pa.Table = run.stages.table(last.to_ref(reused=True))
    assert set(state.column("dataset_row").to_pylist()) == {*drawn[0], *drawn[1]}

    fresh_process()
    file.write_text(OWN.replace("1e12", "1e-12"))
    train(tiny(f"rollout.sampler={{path: {file}, name: Unseen}}", "iterations=3", "name=other"))
    assert rows_of(Run(tiny("name=other")), 0)[0] != 0, "a changed file draws anew"


def test_batches_that_filters_ask_for_repeat_no_prompt(tiny: Tiny) -> None:
    config = tiny(
        "rollout.sampler={name: pass_rate}", "algorithm.filters=[dynamic_sampling]", "rollout.samples=2",
        "rollout.max_gen_batches=20", "iterations=2",
    )  # fmt: skip
    train(config)
    run = Run(config)
    for k in range(2):
        rows = rows_of(run, k)
        assert len(np.unique(rows)) == len(rows)


def test_with_overlap_the_curriculum_follows_the_batch_before(tiny: Tiny) -> None:
    config = tiny(
        "rollout.sampler={name: pass_rate}",
        "pipeline.max_staleness=1",
        "iterations=3",
        "algorithm.rollout_correction.preset=decoupled_token_is",
    )
    manifests = train(config)
    assert [each.iteration for each in of(manifests, "sampler")] == [1, 2]
