"""Runs with vLLM, with truncated sampling, and with rollouts that go on in the next iteration."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from grpo_lib.config import RunConfig
from grpo_lib.data.columns import flat_column, ragged_column
from grpo_lib.errors import AlgorithmError, ConfigError, ParityError
from grpo_lib.run import Run
from tests.flows.runs import Tiny, fresh_process, of, train

pytestmark = [pytest.mark.usefixtures("prefect_here"), pytest.mark.slow]
TOKEN_IS = "algorithm.rollout_correction.preset=decoupled_token_is"


def test_with_vllm_stale_weights_close_the_gate_and_the_run_goes_on_from_there(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_lib.placement.engine_process import EngineProcess
    from grpo_lib.training.digest import HEAD, weights_digest

    config = tiny("rollout.engine=vllm", "trainer.optimizer.lr=0.05", "evaluation.every=1")
    load, seen, digests = EngineProcess.load, [], []

    def stale(self: EngineProcess, state: Mapping[str, torch.Tensor]) -> None:
        """Claims to hold what it was given, and from the second policy on holds the one before."""
        seen.append({name: value.clone() for name, value in state.items() if name != HEAD})
        digests.append(weights_digest(state))
        load(self, seen[max(0, len(seen) - 2)])

    with monkeypatch.context() as patch:
        patch.setattr(EngineProcess, "load", stale)
        patch.setattr(EngineProcess, "digest", lambda self: digests[-1])
        with pytest.raises(ParityError, match=r"engine 'vllm' \(vllm 0\..*differ by .* on average and .* at most"):
            train(config)
    kept = Run(config).stages.manifests()
    assert len(of(kept, "rollout", 0)) == 2 and not of(kept, "rollout", 1)
    made = train(config)
    assert [each.manifest_sha256 for each in of(made, "rollout", 0)] == [
        each.manifest_sha256 for each in of(kept, "rollout", 0)
    ]
    run = Run(config)
    for each in of(made, "rollout"):
        assert 0 < each.summary["parity_max"] < 1e-4
        rows = run.stages.table(each.to_ref(reused=True))
        policy = of(made, "warm_start") if each.iteration == 0 else of(made, "update", 0)
        assert set(rows.column("weights_digest").to_pylist()) == {policy[0].summary["policy_digest"]}


def test_what_is_drawn_from_a_truncated_distribution_passes_the_gate_and_is_weighted(tiny: Tiny) -> None:
    shaped = ("rollout.top_p=0.9", "rollout.top_k=12", "rollout.min_p=0.01", "rollout.repetition_penalty=1.2")
    made = train(tiny(*shaped, TOKEN_IS, "iterations=1"))
    for each in of(made, "rollout"):
        assert 0 < each.summary["parity_max"] < 1e-4
    (old,) = of(made, "old_logprobs")
    assert old.summary["rollout_kl"] > 0.01, "the truncated distribution is another than the policy"


def test_truncation_without_weights_is_refused() -> None:
    from grpo_lib.config_files import make_config
    from tests.flows.tiny import TINY

    with pytest.raises(ConfigError, match=r"top_p=0.9.*another distribution.*preset=decoupled_token_is"):
        make_config(TINY, ["rollout.top_p=0.9"])


def partial(tiny: Tiny, *more: str) -> RunConfig:
    settings = (
        "rollout.prompts=8",
        "rollout.partial.tokens=100",
        "rollout.max_batch_rows=8",
        "rollout.shards=1",
        "iterations=4",
    )
    return tiny(*settings, TOKEN_IS, *more)


def tables(config: RunConfig, manifests: list[Any], stage: str) -> list[Any]:
    stages = Run(config).stages
    return [stages.table(each.to_ref(reused=True)) for each in of(manifests, stage)]


def test_unfinished_rollouts_go_on_with_the_next_policy_and_nothing_of_them_is_lost(tiny: Tiny) -> None:
    config = partial(tiny)
    made = train(config)
    rollouts, prompts, selections = (tables(config, made, stage) for stage in ("rollout", "prompts", "filter"))
    waited = 0
    for k in range(1, 4):
        before, now = rollouts[k - 1], rollouts[k]
        going = {
            row
            for row, reason in zip(
                before.column("prompt_row").to_pylist(), before.column("finish_reason").to_pylist(), strict=True
            )
            if reason == "unfinished"
        }
        carried = prompts[k].column("carried_from").to_pylist()
        assert [row for row in carried if row is not None] == sorted(going)
        waited += len(going)
        names = ("response_ids", "rollout_logprobs", "token_versions")
        old, new = ({name: ragged_column(table, name) for name in names} for table in (before, now))
        place = flat_column(now, "prompt_row").numpy()
        for at, source in enumerate(carried):
            if source is None:
                continue
            mine = np.flatnonzero(place == at)
            theirs = np.flatnonzero(flat_column(before, "prompt_row").numpy() == source)
            for row, earlier in zip(mine, theirs, strict=True):
                for name in names:
                    begun = old[name].gather(torch.tensor([earlier])).values
                    assert torch.equal(new[name].gather(torch.tensor([row])).values[: len(begun)], begun), name
        versions = new["token_versions"]
        assert int(versions.values.max()) == k
        used = np.array(selections[k].column("used").to_pylist())
        reasons = np.array(now.column("finish_reason").to_pylist())
        assert not (used & (reasons == "unfinished")).any()
    assert waited > 0, "the budget was too large to see anything"
    ids = [name for each in prompts for name, fresh in zip(
        each.column("prompt_id").to_pylist(),
        each.column("carried_from").to_pylist() if "carried_from" in each.column_names else [None] * each.num_rows,
        strict=True,
    ) if fresh is None]  # fmt: skip
    assert len(ids) == len(set(ids)), "no prompt is drawn twice"


def test_a_run_of_partial_rollouts_can_be_resumed(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    config = partial(tiny, "name=resumed")
    import tasks.update

    real, calls = tasks.update.update_table, []

    def dies(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(tasks.update, "update_table", dies)
        with pytest.raises(BaseException):  # noqa: B017
            train(config)
    kept = Run(config).stages.manifests()
    fresh_process()
    made = train(config)
    assert {each.manifest_sha256 for each in of(kept, "rollout")} <= {
        each.manifest_sha256 for each in of(made, "rollout")
    }
    whole = train(partial(tiny, "name=whole"))
    assert [each.summary["policy_digest"] for each in of(made, "update")] == [
        each.summary["policy_digest"] for each in of(whole, "update")
    ]


def test_a_budget_in_which_no_prompt_is_finished_stops_with_the_remedy(tiny: Tiny) -> None:
    with pytest.raises(AlgorithmError, match=r"no prompt has all its responses finished.*raise rollout.partial"):
        train(partial(tiny, "rollout.partial.tokens=1"))
