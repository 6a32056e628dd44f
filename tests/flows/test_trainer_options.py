"""What the trainer offers beyond one set of weights, through the real flow: references, adapters, a critic, export."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_lib.config import RunConfig
from grpo_lib.data.columns import ragged_column
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
