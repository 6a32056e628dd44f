"""Runs that start from another run's policy."""

from pathlib import Path

import pytest
import torch

from grpo_lib.config import RunConfig
from grpo_lib.errors import ConfigError, CorruptError, NotFoundError
from grpo_lib.models import load_model
from grpo_lib.run import Run
from grpo_lib.storage.manifests import Manifest
from tests.flows.runs import Tiny, of, train

pytestmark = pytest.mark.usefixtures("prefect_here")
SECOND = ("name=second", "warm_start=null", "iterations=1")


def weights(config: RunConfig, manifest: Manifest, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    Run(config).stages.download(manifest.to_ref(reused=True), folder)
    return dict(load_model(str(folder), torch.float32, "cpu").state_dict())


def test_a_small_model_goes_on_with_its_weights_and_a_new_optimizer(tiny: Tiny, tmp_path: Path) -> None:
    (saved,) = of(train(tiny()), "checkpoint")
    config = tiny(*SECOND, "model.start={run: tiny, version: 2}")
    manifests = train(config)
    (first,) = of(manifests, "inherited")
    assert first.summary["policy_digest"] == saved.summary["policy_digest"]
    assert (first.summary["policy_version"], first.summary["run"], first.summary["version_there"]) == (0, "tiny", 2)
    assert not of(manifests, "warm_start")
    (update,) = of(manifests, "update")
    assert (update.summary["policy_version"], update.summary["optimizer_step"]) == (1, 1)
    names = {part.name for part in first.parts}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                     "tokenizer_config.json"}, "nothing of the old optimizer"  # fmt: skip
    assert [each.manifest for each in first.inputs] == [saved.path]

    with pytest.raises(NotFoundError, match=r"run 'tiny' in .* has no checkpoint of policy 1; it has those of 2"):
        train(tiny(*SECOND, "model.start={run: tiny, version: 1}", "name=third"))
    with pytest.raises(NotFoundError, match="no run 'tyni' in the store"):
        train(tiny(*SECOND, "model.start={run: tyni, version: 2}", "name=third"))
    expressions = "data={problem: expressions, train_prompts: 200, heldout_prompts: 8}"
    with pytest.raises(ConfigError, match="the tokenizer of the problem's small model is not the one that policy 2"):
        train(tiny(*SECOND, expressions, "model.start={run: tiny, version: 2}", "name=third"))


def test_adapters_are_merged_into_what_the_next_run_starts_from(tiny: Tiny, tmp_path: Path) -> None:
    lora = ("trainer.lora.rank=2", "trainer.optimizer.lr=1e-2")
    first = train(tiny(*lora))
    config = tiny(*SECOND, *lora, "model.start={run: tiny, version: 2}")
    manifests = train(config)
    (begun,), (warm,) = of(manifests, "inherited"), of(first, "warm_start")
    made, base = weights(config, begun, tmp_path / "made"), weights(config, warm, tmp_path / "base")
    moved = [name for name in made if not torch.equal(made[name], base[name])]
    assert moved and all("_proj" in name for name in moved), "the adapted layers, and nothing else"
    from flows.export import export

    export(Run(tiny(*lora)), 2, tmp_path / "exported")
    exported = load_model(str(tmp_path / "exported"), torch.float32, "cpu").state_dict()
    for name, value in exported.items():
        torch.testing.assert_close(made[name], value, rtol=0, atol=1e-7)


def test_adapters_are_not_merged_into_another_model_than_they_were_trained_on(tiny: Tiny, tmp_path: Path) -> None:
    from flows.export import export
    from grpo_lib.start import checkpoint_of, whole_model

    train(tiny("iterations=1"))
    export(Run(tiny()), 0, tmp_path / "base")
    second = tiny(*SECOND, "trainer.lora.rank=2", f"model.path={tmp_path / 'base'}", "checkpoint.every=1")
    train(second)
    saved = checkpoint_of(second.store, "second", 1)
    whole_model(second, saved, tmp_path / "whole")
    model = load_model(str(tmp_path / "base"), torch.float32, "cpu")
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(
        CorruptError, match=r"base holds weights with digest .* adapters of run 'second' were trained on"
    ):
        whole_model(second, saved, tmp_path / "again")
