"""`warm_start`, `pretrained` or `inherited`: the policy that the run starts from."""

import tempfile
from pathlib import Path

import torch
from pydantic import JsonValue

from grpo_lib.config import MAX_POSITIONS
from grpo_lib.models import load_model, load_tokenizer, make_small_model, run_tokenizer
from grpo_lib.problems import get_problem
from grpo_lib.problems.demonstrations import demonstrations
from grpo_lib.start import whole_model
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.stages import ArtifactRef
from grpo_lib.training.checkpoints import STATE
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.warm_start import warm_start as fine_tune
from tasks.base import Stage, stage_task
from tasks.dataset import split

WARM_START = StageSpec(name="warm_start", version=2, reads=("data", "model.small", "warm_start", "seed"))
PRETRAINED = StageSpec(name="pretrained", version=2, reads=("model.path",))
INHERITED = StageSpec(name="inherited", version=2, reads=("model.start",))


@stage_task(WARM_START, role="train")
def warm_start(stage: Stage, dataset: ArtifactRef) -> ArtifactRef:
    """Makes a small model and its tokenizer from nothing and fine-tunes it on demonstrations."""
    config = stage.config
    problem = get_problem(config.data.problem)
    tokenizer = run_tokenizer(None, problem)
    model = make_small_model(
        config.model.small,
        vocab_size=len(tokenizer),
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        max_positions=MAX_POSITIONS,
        seed=config.seed,
    )
    train = split(stage.run.stages, dataset, "train").slice(0, config.warm_start.demonstrations)
    responses = demonstrations(problem, config.data, train, config.seed)
    result = fine_tune(
        model,
        tokenizer,
        train.column("prompt").to_pylist(),
        responses,
        config.warm_start,
        config.seed,
        lambda step, steps, loss: stage.advanced(step, steps),
        observed=problem.observed,
    )
    with tempfile.TemporaryDirectory(prefix="grpo-warm-start-") as name:
        folder = Path(name)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for path in sorted(folder.iterdir()):
            stage.write_file(path.name, path)
    summary = {
        "policy_digest": weights_digest(model.state_dict()),
        "policy_version": 0,
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_loss": float(result.losses[0]),
        "last_loss": float(result.losses[-1]),
        "left_out": result.left_out,
    }
    return stage.commit(rows=len(responses) - result.left_out, tokens=result.tokens, summary=summary)


@stage_task(PRETRAINED, role="train")
def pretrained(stage: Stage) -> ArtifactRef:
    """Records a pretrained model by the digest of its weights; they stay where they are."""
    path = stage.config.model.path
    model = load_model(path, torch.float32, "cpu")
    load_tokenizer(path)
    summary = {
        "policy_digest": weights_digest(model.state_dict()),
        "policy_version": 0,
        "parameters": sum(p.numel() for p in model.parameters()),
        "path": str(Path(path).resolve()) if Path(path).is_dir() else path,
    }
    return stage.commit(rows=0, summary=summary)


@stage_task(INHERITED, role="train")
def inherited(stage: Stage, checkpoint: ArtifactRef) -> ArtifactRef:
    """Copies another run's policy: the run then needs nothing of that one."""
    saved = stage.run.stages.manifest(checkpoint)
    with tempfile.TemporaryDirectory(prefix="grpo-inherited-") as name:
        folder = Path(name)
        digest = whole_model(stage.run.config, saved, folder)
        for file, content in stage.run.stages.files(checkpoint).items():
            of_training = file.endswith(".safetensors") or file in (STATE, "adapter_config.json")
            if not of_training and not (folder / file).exists():  # the tokenizer
                (folder / file).write_bytes(content)
        for path in sorted(folder.iterdir()):
            stage.write_file(path.name, path)
    summary: dict[str, JsonValue] = {
        "policy_digest": digest,
        "policy_version": 0,
        "run": saved.run,
        "version_there": saved.summary["policy_version"],
    }
    return stage.commit(rows=0, summary=summary)
