"""What is imported when: `grpo --help` answers at once, and imports go one way."""

import importlib.util
import resource
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from grpo_lib.lean_imports import hidden

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sysconfig.get_path("scripts"))
HELP = "import sys; sys.argv = ['grpo', '--help']; import flows.cli.main as cli; cli.app(standalone_mode=False)"


def loaded_by(code: str, packages: set[str]) -> set[str]:
    """Which of the packages are imported after ``code``."""
    code += f"\nprint('loaded:', *sorted({packages!r} & sys.modules.keys()), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stderr.rpartition("loaded:")[2].split())


def test_help_loads_no_heavy_package() -> None:
    heavy = {"torch", "transformers", "prefect", "mlflow", "vllm", "ray", "pyarrow", "duckdb", "boto3", "pydantic"}
    assert loaded_by(HELP, heavy) == set()


@pytest.mark.parametrize(
    "command",
    [
        "run", "resume", "show", "rollouts", "compare", "evaluate", "warm-start", "export", "doctor", "rerun",
        "rescore", "debug", "up", "down", "worker", "status",
    ],
)  # fmt: skip
def test_the_help_of_a_command_loads_no_heavy_package(command: str) -> None:
    code = HELP.replace("'--help'", f"{command!r}, '--help'")
    assert loaded_by(code, {"torch", "transformers", "prefect", "mlflow", "vllm", "ray", "pyarrow"}) == set()


def test_the_configuration_loads_no_heavy_package() -> None:
    heavy = {"torch", "transformers", "prefect", "mlflow", "vllm", "ray", "pyarrow", "numpy", "boto3"}
    assert loaded_by("import sys, grpo_lib.config", heavy) == set()


def test_a_run_imports_less_of_what_is_installed_and_leaves_the_rest_to_others() -> None:
    """The trainer and the local engine, their packages imported first by `import_lean`; on a GPU Triton is needed."""
    for package in ("polars", "sklearn", "triton", "deepspeed"):
        pytest.importorskip(package)
    code = """
from grpo_lib.lean_imports import import_lean
import_lean()
import grpo_lib.placement.local, grpo_lib.tracking.mlflow, mlflow, torch, sys
weight = torch.nn.Parameter(torch.ones(3))
weight.sum().backward()
torch.optim.AdamW([weight], fused=True).step()
found = sorted({"polars", "sklearn", "triton"} & sys.modules.keys())
import deepspeed, polars, sklearn.metrics, triton
from transformers import Trainer
print("found:", found, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    needed = ["triton"] if torch.cuda.is_available() else []
    assert f"found: {needed}" in done.stderr


def test_what_is_hidden_can_be_imported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with hidden("colorsys", "json"):
        assert importlib.util.find_spec("colorsys") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("colorsys")
        assert importlib.import_module("json").loads("1") == 1  # it was there before
    assert importlib.import_module("colorsys").hsv_to_rgb(0, 0, 1) == (1, 1, 1)


def test_the_trainer_runs_with_nothing_but_torch_transformers_and_pyarrow_installed() -> None:
    """As on a machine that has those and no more: a model is trained, and scored."""
    missing = "annotated_types blake3 boto3 deepspeed duckdb fastapi matplotlib mlflow peft prefect pydantic rich typer"
    code = f"""
import sys
sys.modules.update(dict.fromkeys({missing.split()!r}))
from functools import partial
from types import SimpleNamespace
import torch
from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.algorithms.losses import ppo_clip
from grpo_lib.data.ragged import Ragged
from grpo_lib.models import make_small_model
from grpo_lib.training.backends import make_trainer
from grpo_lib.training.base import Batching, Objective, UpdateBatch
from grpo_lib.training.microbatches import Sequences
from grpo_lib.training.world import World
shape = dict(hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_size=32)
small = SimpleNamespace(**shape, rope_theta=1e4, initializer_range=0.1)
optimizer = dict(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, schedule="constant", warmup_steps=0)
settings = SimpleNamespace(
    backend="torch", layout="auto", gradient_checkpointing=False, lora=None, max_tokens=64,
    optimizer=SimpleNamespace(**optimizer, final_lr_fraction=1.0, max_grad_norm=1.0),
)
trainer = make_trainer(
    lambda: make_small_model(small, 11, eos_id=1, pad_id=0, max_positions=32, seed=0), settings,
    decay_steps=None, dtype=torch.float32, world=World.alone(torch.device("cpu")),
)
ids = Ragged(values=torch.arange(2, 8), offsets=torch.tensor([0, 4, 6]))
rows = Sequences(prompts=ids, responses=ids)
before, _ = trainer.logprobs(rows, 1.0)
batch = UpdateBatch(
    sequences=rows, mask=ids.with_values(torch.ones(6, dtype=torch.uint8)), old_logprobs=before,
    advantages=ids.with_values(torch.ones(6)), ref_logprobs=None,
    group_ids=torch.tensor([0, 0]), row_seeds=torch.tensor([1, 2]),
)
objective = Objective(
    policy_loss=partial(ppo_clip, clip_low=0.2, clip_high=0.2, dual_clip=None),
    aggregation=lambda mask, offsets: AGGREGATIONS["token-mean"].function(mask, offsets, 4), temperature=1.0,
)
trainer.update(batch, objective, Batching(epochs=1, mini_batch_groups=None, max_tokens=64, seed=0, max_skipped=0))
after, _ = trainer.logprobs(rows, 1.0)
assert float((after.values - before.values).mean()) > 0, "rewarded tokens became no likelier"
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_what_checks_a_run_before_it_starts_loads_no_heavy_package() -> None:
    assert loaded_by("import sys, grpo_lib.preflight", {"torch", "transformers", "prefect", "mlflow", "vllm"}) == set()


def test_help_takes_at_most_a_second_of_cpu_time() -> None:
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([SCRIPTS / "grpo", "--help"], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) <= 1.0, f"took {seconds}"


def test_the_import_rules_are_kept() -> None:
    done = subprocess.run(
        [SCRIPTS / "lint-imports", "--no-cache"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:]
