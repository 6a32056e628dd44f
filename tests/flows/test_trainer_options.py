"""What the trainer offers beyond one set of weights, through the real flow: references, adapters, a critic, export."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_lib.config import RunConfig
from grpo_lib.data.columns import ragged_column
from grpo_lib.errors import ConfigError, ReplayError
from grpo_lib.models import load_model
from grpo_lib.run import Run
from grpo_lib.storage.stages import Manifest
from grpo_lib.training.digest import weights_digest
from tests.flows.runs import Tiny, fresh_process, of, train

pytestmark = pytest.mark.usefixtures("prefect_here")
LORA = ("trainer.lora.rank=4", "trainer.lora.alpha=8", "trainer.optimizer.lr=1e-2")


def column(config: RunConfig, manifest: Manifest, name: str) -> torch.Tensor:
    return ragged_column(Run(config).stages.table(manifest.to_ref(reused=True)), name).values


def weights(config: RunConfig, manifest: Manifest, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    Run(config).stages.download(manifest.to_ref(reused=True), folder)
    return dict(load_model(str(folder), torch.float32, "cpu").state_dict())


def last_digest(manifests: list[Manifest]) -> object:
    return of(manifests, "update")[-1].summary["policy_digest"]


# --- the reference policy ---------------------------------------------------------------------------------------------


def test_a_reference_that_is_replaced_every_iteration_is_the_policy_before_the_update(tiny: Tiny) -> None:
    config = tiny("reference.every=1")
    manifests = train(config)
    for k in (0, 1):
        (old,), (ref,) = of(manifests, "old_logprobs", k), of(manifests, "ref_logprobs", k)
        difference = column(config, old, "old_logprobs") - column(config, ref, "ref_logprobs")
        assert float(difference.abs().max()) < 1e-6
    assert [each.summary["policy_version"] for each in of(manifests, "reference")] == [1, 2]


def test_a_frozen_reference_stays_behind_the_policy(tiny: Tiny) -> None:
    config = tiny()
    manifests = train(config)
    (old,), (ref,) = of(manifests, "old_logprobs", 1), of(manifests, "ref_logprobs", 1)
    difference = column(config, old, "old_logprobs") - column(config, ref, "ref_logprobs")
    assert float(difference.abs().max()) > 1e-4 and not of(manifests, "reference")


def test_a_moving_average_is_made_of_reference_and_policy(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("reference.every=1", "reference.decay=0.75", "checkpoint.every=1")
    manifests = train(config)
    initial = weights(config, of(manifests, "warm_start")[0], tmp_path / "initial")
    before = initial
    for k in (0, 1):
        policy = weights(config, of(manifests, "checkpoint", k)[0], tmp_path / f"policy{k}")
        found = weights(config, of(manifests, "reference", k)[0], tmp_path / f"reference{k}")
        for name, value in found.items():
            torch.testing.assert_close(value, 0.75 * before[name] + 0.25 * policy[name], rtol=0, atol=1e-6)
        assert any(not torch.equal(found[name], policy[name]) for name in found)
        before = found


def test_a_run_that_is_resumed_goes_on_with_the_reference_that_was_committed(tiny: Tiny) -> None:
    settings = ("reference.every=1", "reference.decay=0.5")
    whole = train(tiny("name=whole", "iterations=3", *settings))
    fresh_process()
    train(tiny("name=parts", "iterations=2", *settings))
    fresh_process()
    parts = train(tiny("name=parts", "iterations=3", *settings))
    digests = [[each.digest for each in of(found, "reference")] for found in (whole, parts)]
    assert digests[0] == digests[1] and len(set(digests[0])) == 3
    assert last_digest(whole) == last_digest(parts)


def test_another_model_can_be_the_reference_and_the_exact_kl_uses_it_too(tiny: Tiny, tmp_path: Path) -> None:
    first = tiny("name=first")
    weights(first, of(train(first), "checkpoint")[-1], tmp_path / "other")
    fresh_process()
    path = f"reference.path={tmp_path / 'other'}"
    config = tiny("name=second", path)
    manifests = train(config)
    (old,), (ref,) = of(manifests, "old_logprobs", 0), of(manifests, "ref_logprobs", 0)
    difference = column(config, old, "old_logprobs") - column(config, ref, "ref_logprobs")
    assert float(difference.abs().max()) > 1e-4  # not the policy that the run starts from
    assert of(manifests, "reference_model")[0].summary["path"] == str(tmp_path / "other")
    fresh_process()
    exact = train(tiny("name=third", path, "algorithm.kl.estimator=full"))
    assert of(exact, "update", 0)[0].summary["kl"] > 0 and not of(exact, "ref_logprobs")


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_a_run_with_adapters_saves_them_and_resumes_to_the_bit(tiny: Tiny, tmp_path: Path) -> None:
    whole = train(tiny("name=whole", "iterations=3", "checkpoint.every=1", *LORA))
    fresh_process()
    train(tiny("name=parts", "iterations=2", "checkpoint.every=2", *LORA))
    fresh_process()
    parts = train(tiny("name=parts", "iterations=3", "checkpoint.every=2", *LORA))
    assert last_digest(whole) == last_digest(parts)
    assert len({str(each.summary["policy_digest"]) for each in of(whole, "update")}) == 3
    names = {part.name for part in of(whole, "checkpoint")[-1].parts}
    assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"} <= names
    assert "model.safetensors" not in names


def test_the_reference_of_adapters_is_the_model_without_them(tiny: Tiny) -> None:
    config, plain = tiny("name=adapters", *LORA), tiny("name=plain")
    manifests = train(config)
    fresh_process()
    expected = train(plain)
    (ours,), (theirs,) = of(manifests, "ref_logprobs", 0), of(expected, "ref_logprobs", 0)
    torch.testing.assert_close(
        column(config, ours, "ref_logprobs"), column(plain, theirs, "ref_logprobs"), rtol=0, atol=1e-6
    )
    (old,), (ref,) = of(manifests, "old_logprobs", 1), of(manifests, "ref_logprobs", 1)
    assert float((column(config, old, "old_logprobs") - column(config, ref, "ref_logprobs")).abs().max()) > 1e-5


def test_an_exported_policy_is_a_plain_model_with_the_adapters_in_it(tiny: Tiny, tmp_path: Path) -> None:
    from flows.export import export

    config = tiny("checkpoint.every=9", *LORA)  # nothing saved between: version 1 is replayed
    manifests = train(config)
    fresh_process()
    done = export(Run(config), 1, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert weights_digest(model.state_dict()) == of(manifests, "update", 0)[0].summary["policy_digest"]
    assert (done["policy_version"], done["digest"]) == (1, of(manifests, "update", 0)[0].summary["policy_digest"])
    assert (tmp_path / "model" / "tokenizer.json").exists()
    with pytest.raises(ValueError, match="is not empty"):
        export(Run(config), 1, tmp_path / "model")


# --- steps ------------------------------------------------------------------------------------------------------------


def test_in_the_critic_s_first_iterations_the_policy_stays_as_it_is(tiny: Tiny) -> None:
    settings = ("algorithm.advantage=gae", "critic.lr=1e-3", "critic.warmup_iterations=1", "algorithm.kl.coef=0")
    updates = of(train(tiny(*settings)), "update")
    assert updates[0].summary["policy_digest"] != updates[1].summary["policy_digest"]
    assert updates[0].summary["critic_digest"] != updates[1].summary["critic_digest"]
    assert (updates[0].summary["optimizer_step"], updates[1].summary["optimizer_step"]) == (0, 1)
    assert "loss" not in updates[0].summary and updates[0].summary["value_loss"] > 0


def test_an_iteration_that_goes_too_far_ends_early_and_says_so(tiny: Tiny) -> None:
    far = ("trainer.optimizer.lr=0.05", "trainer.epochs=4")
    (free, *_), (stopped, *_) = (
        of(train(tiny(f"name={name}", *far, *extra)), "update")
        for name, extra in (("free", ()), ("stopped", ("trainer.max_kl=0.001",)))
    )
    assert free.summary["optimizer_step"] == 4 and "stopped_early" not in free.summary
    assert stopped.summary["optimizer_step"] < 4 and stopped.summary["stopped_early"] == 1


# --- what is not what was recorded ------------------------------------------------------------------------------------


def test_a_trainer_that_is_not_what_was_recorded_is_given_to_nobody(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_lib.placement.local import workers
    from grpo_lib.placement.train import TrainWorker

    config = tiny("iterations=1")
    initial = of(train(config), "warm_start")[0].to_ref(reused=True)
    fresh_process()
    monkeypatch.setattr(TrainWorker, "digests", lambda self: ("0" * 64, None))
    for _ in range(2):  # not the second time either
        with pytest.raises(ReplayError, match="restored it has 0000"), workers(Run(config), initial).trainer():
            pass


def test_a_reference_model_that_has_changed_since_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    first = tiny("name=first", "iterations=1")
    saved = of(train(first), "checkpoint")[-1]
    weights(first, saved, tmp_path / "other")
    fresh_process()
    config = tiny("name=second", "iterations=1", f"reference.path={tmp_path / 'other'}")
    before = of(train(config), "reference_model")[0].to_ref(reused=True)
    fresh_process()
    model = load_model(str(tmp_path / "other"), torch.float32, "cpu")
    model.get_input_embeddings().weight.data[0] += 1
    model.save_pretrained(tmp_path / "other")
    from grpo_lib.placement.local import workers
    from grpo_lib.placement.train import Rows

    run = Run(config)
    manifests = run.stages.manifests()
    prompts, rollouts = (
        [each.to_ref(reused=True) for each in of(manifests, name, 0)] for name in ("prompts", "rollout")
    )
    initial = of(manifests, "warm_start")[0].to_ref(reused=True)
    with workers(run, initial).trainer() as trainer, pytest.raises(ReplayError, match="put the model back"):
        trainer.score(["ref_logprobs"], Rows(prompts=prompts, rollouts=rollouts), before)


def test_a_reference_of_other_shapes_can_t_follow_the_policy(tiny: Tiny, tmp_path: Path) -> None:
    first = tiny("name=first", "iterations=1", "model.small.mlp_size=64")
    weights(first, of(train(first), "checkpoint")[-1], tmp_path / "other")
    fresh_process()
    with pytest.raises(ConfigError, match="has weights of other names or shapes than the policy"):
        train(tiny("name=second", f"reference.path={tmp_path / 'other'}", "reference.every=1"))


def test_the_schedule_counts_only_iterations_in_which_the_policy_learns(tiny: Tiny) -> None:
    config = tiny(
        "iterations=5",
        "algorithm.advantage=gae",
        "critic.warmup_iterations=2",
        "trainer.optimizer.schedule=linear",
        "algorithm.kl.coef=0",
    )
    assert config.decay_steps == 3
