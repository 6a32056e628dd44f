"""Wrong settings and inputs, through the real command: exit code 2, one clear message, and nothing was trained.

A case is a name, what follows `grpo` on the command line, and fragments of the message: the value, the bound or the
remedy. `$name` stands for a file, folder or address of the fixture `places`, `$store` for a store of the case's own;
`tiny(...)` is `grpo run` with a small configuration that is right but for the given overrides.
"""

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from grpo_lib.config_files import make_config
from grpo_lib.data.schemas import PROMPTS, ROLLOUTS
from grpo_lib.run import open_run
from grpo_lib.storage.stages import StageSpec
from tests.warm_grpo import warm_grpo

PASSWORD = "open-sesame"

TINY: dict[str, Any] = {
    "name": "tiny",
    "iterations": 2,
    "data": {"problem": "countdown", "train_prompts": 100, "heldout_prompts": 8},
    "model": {"small": {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "mlp_size": 32}},
    "warm_start": {"steps": 2, "batch_size": 4, "demonstrations": 16},
    "rollout": {"prompts": 4, "samples": 2, "max_prompt_tokens": 24, "max_new_tokens": 12},
    "evaluation": {"every": 2, "prompts": 4, "samples": 2},
}


@dataclass(frozen=True)
class Case:
    name: str
    arguments: tuple[str, ...]
    says: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    in_flow: bool = False
    """Whether it takes a flow to find out, and so a Prefect server."""


def case(name: str, arguments: tuple[str, ...], *says: str, in_flow: bool = False, **environment: str) -> Case:
    return Case(name, arguments, says, environment, in_flow)


def tiny(*overrides: str) -> tuple[str, ...]:
    return ("run", "$tiny", "store.uri=$store", *overrides)


def file(name: str) -> tuple[str, ...]:
    return ("run", f"$configs/{name}", "store.uri=$store")


def gsm8k(data: str, *overrides: str) -> tuple[str, ...]:
    return (
        "run", "$gsm8k", "store.uri=$store", f"data.path=$data/{data}", "data.heldout_prompts=1",
        "evaluation.prompts=1", "rollout.prompts=1", *overrides,
    )  # fmt: skip


def reward(name: str, function: str, more: str = "weight: 1") -> tuple[str, ...]:
    return tiny(f"reward.functions=[{{path: $data/{name}, name: {function}, {more}}}]")


def model(folder: str, *overrides: str) -> tuple[str, ...]:
    return tiny("warm_start=null", f"model.path=$models/{folder}", *overrides)


COMMAND_LINE = [
    case("no arguments", ("run",), "config", "--help"),
    case("unknown command", ("trian",), "No such command", "trian"),
    case("unknown option", (*tiny(), "--jsn"), "--jsn"),
    case("option of the wrong type", ("rollouts", "tiny", "-k", "first"), "--iteration", "integer"),
    case("negative iteration", ("rollouts", "tiny", "-k", "-1"), "--iteration", "greater than or equal to 0"),
    case("limit of 0", ("rollouts", "tiny", "--limit", "0"), "--limit", "greater than or equal to 1"),
]

FILES = [
    case("no such file", file("nowhere.yaml"), "nowhere.yaml", "No such file", "name a YAML file"),
    case("a folder as configuration", ("run", "$configs"), "Is a directory"),
    case("not YAML", file("broken.yaml"), "broken.yaml is not valid YAML", "line 2"),
    case("not text", file("binary.yaml"), "binary.yaml is not UTF-8 text"),
    case("an empty file", file("empty.yaml"), "must hold a mapping", "found nothing"),
    case("a list", file("list.yaml"), "must hold a mapping", "found list"),
    case("a section given twice", file("twice.yaml"), "'rollout' is given twice", "join the two"),
    case("a section that holds itself", file("circular.yaml"), "circular.yaml", "not a tree of plain values"),
    case("no data section", file("no_data.yaml"), "data: must be given"),
    case(
        "no problem",
        file("no_problem.yaml"),
        "data.problem: must be given",
        "countdown, countdown_calculator, expressions, gsm8k, files",
    ),
    case("gsm8k without a path", file("no_path.yaml"), "data.path: must be given"),
]

OVERRIDES = [
    case("no equals sign", tiny("rollout.samples"), "'rollout.samples' is not of the form key=value"),
    case("no key", tiny("=3"), "'=3' is not of the form key=value"),
    case("a key with a hole", tiny("rollout..samples=3"), "rollout..samples", "not of the form key=value"),
    case("not YAML after the equals sign", tiny("rollout=[1,2"), "'rollout=[1,2'", "not valid YAML"),
    case("through a scalar", tiny("iterations.x=1"), "'iterations.x=1'", "'iterations' is a value, not"),
    case("a scalar for a section", tiny("rollout=4"), "rollout is a section", "found 4"),
    case("a list for a scalar", tiny("rollout.samples=[2,4]"), "rollout.samples=[2, 4]", "valid integer"),
    case("a typo at the top", tiny("rolout.samples=4"), "rolout: no such setting", "did you mean rollout?"),
    case("a typo in a section", tiny("rollout.sample=4"), "rollout.sample:", "did you mean rollout.samples"),
    case("a typo two levels down", tiny("trainer.optimizer.lrr=1"), "did you mean trainer.optimizer.lr"),
    case("a typo three levels down", tiny("algorithm.kl.coeff=1"), "did you mean algorithm.kl.coef?"),
    case("a typo in the data", tiny("data.numbres=3"), "data.numbres", "did you mean data.numbers"),
    case("the wrong section", tiny("rollout.lr=1"), "rollout.lr: no such", "did you mean trainer.optimizer.lr"),
    case("another problem's setting", tiny("data.operands=4"), "data.operands: no such setting"),
]

NUMBERS = [
    case("one sample", tiny("rollout.samples=1"), "rollout.samples=1", "needs at least 2"),
    case("no prompts", tiny("rollout.prompts=0"), "rollout.prompts=0", "greater than or equal to 1"),
    case("negative iterations", tiny("iterations=-1"), "iterations=-1", "greater than or equal to 1"),
    case("too many iterations", tiny("iterations=1000000"), "iterations=1000000", "999999"),
    case("more than 32 bits", tiny("rollout.max_new_tokens=3000000000"), "3000000000 is too large", "2147483648"),
    case("half a sample", tiny("rollout.samples=2.5"), "rollout.samples=2.5", "integer"),
    case("a word for a number", tiny("rollout.samples=many"), "rollout.samples='many'", "integer"),
    case("negative seed", tiny("seed=-1"), "seed=-1", "greater than or equal to 0"),
    case("seed too large", tiny("seed=2147483648"), "seed=2147483648", "2147483648"),
    case("temperature 0", tiny("rollout.temperature=0"), "rollout.temperature=0", "greater than 0"),
    case("temperature too high", tiny("rollout.temperature=11"), "rollout.temperature=11", "less than or equal to 10"),
    case("temperature NaN", tiny("rollout.temperature=.nan"), "rollout.temperature=nan", "finite"),
    case("learning rate 0", tiny("trainer.optimizer.lr=0"), "trainer.optimizer.lr=0", "greater than 0"),
    case("learning rate NaN", tiny("trainer.optimizer.lr=nan"), "trainer.optimizer.lr='nan'", "finite"),
    case("learning rate too large", tiny("trainer.optimizer.lr=1.5"), "trainer.optimizer.lr=1.5", "or equal to 1"),
    case("infinite norm", tiny("trainer.optimizer.max_grad_norm=.inf"), "max_grad_norm=inf", "finite"),
    case("beta of 1", tiny("trainer.optimizer.beta2=1"), "trainer.optimizer.beta2=1", "less than 1"),
    case("negative decay", tiny("trainer.optimizer.weight_decay=-0.1"), "weight_decay=-0.1", "or equal to 0"),
    case("infinite reward", tiny("reward.correct=.inf"), "reward.correct=inf", "finite"),
    case("negative KL", tiny("algorithm.kl.coef=-0.1"), "algorithm.kl.coef=-0.1", "greater than or equal to 0"),
    case("failures above 1", tiny("reward.max_failed=1.5"), "reward.max_failed=1.5", "less than or equal to 1"),
    case("no threads", tiny("placement.threads=0"), "placement.threads=0", "greater than or equal to 1"),
    case("odd head size", tiny("model.small.head_dim=33"), "model.small.head_dim=33", "multiple of 2"),
    case("null for a number", tiny("evaluation.every=null"), "evaluation.every=None", "integer"),
]

CHOICES = [
    case("place of the KL", tiny("algorithm.kl.place=nowhere"), "algorithm.kl.place='nowhere'", "'reward'"),
    case("preset", tiny("algorithm.rollout_correction.preset=seq_is"), "preset='seq_is'", "'decoupled_seq_is'"),
    case(
        "kind of rejection",
        tiny("algorithm.rollout_correction.rejection=[{kind: row, upper: 2}]"),
        "kind='row'",
        "'token'",
    ),
    case("old log-probs", tiny("algorithm.old_logprobs=skip"), "algorithm.old_logprobs='skip'", "'bypass'"),
    case("schedule", tiny("trainer.optimizer.schedule=step"), "schedule='step'", "'cosine'"),
    case("engine", tiny("rollout.engine=magic"), "rollout.engine='magic'", "'local'"),
    case("backend", tiny("trainer.backend=jax"), "trainer.backend='jax'", "'torch'"),
    case(
        "problem",
        tiny("data.problem=sudoku"),
        "data.problem='sudoku'",
        "countdown, countdown_calculator, expressions, gsm8k, files",
    ),
    case("dtype", tiny("model.dtype=float16"), "model.dtype='float16'", "'bfloat16'"),
    case("prompt format", tiny("model.prompt_format=markdown"), "prompt_format='markdown'", "'chat'"),
    case("placement", tiny("placement.kind=moon"), "placement.kind='moon'", "'local'"),
    case("kind of device", tiny("placement.device=tpu"), "placement.device='tpu'", "cpu|cuda"),
    case("missing device", tiny("placement.device=cuda:7"), "placement.device='cuda:7'", "use auto or cpu"),
    case("operators", tiny("data.operators=+^"), "operators='+^'", "each at most once"),
    case("name with a slash", tiny("name=a/b"), "name='a/b'", "must match"),
    case("name above the store", tiny("name=.."), "name='..'", "must match"),
    case("name too long", tiny("name=" + "a" * 101), "name='aaa", "must match"),
    case("name as a number", tiny("name=42"), "name=42", "put it into quotes"),
]

ALGORITHM = [
    case("advantage", tiny("algorithm.advantage=rlo"), "advantage estimator 'rlo'", "did you mean rloo"),
    case("loss", tiny("algorithm.loss=ppo"), "policy loss 'ppo'", "did you mean", "ppo_clip"),
    case("aggregation", tiny("algorithm.aggregation=token-men"), "aggregation 'token-men'", "did you mean token-mean"),
    case("KL estimator", tiny("algorithm.kl.estimator=k4"), "KL estimator 'k4'", "k1, k2, k3"),
    case("filter", tiny("algorithm.filters=[dynamic]"), "filter 'dynamic'", "dynamic_sampling"),
    case("option of another loss", tiny("algorithm.loss_options.tau_pos=1"), "loss_options.tau_pos", "no such option"),
    case("clip of 0", tiny("algorithm.loss_options.clip_low=0"), "loss_options.clip_low=0", "greater than 0"),
    case("dual clip of 1", tiny("algorithm.loss_options.dual_clip=1"), "dual_clip", "greater than 1"),
    case("GAE without a critic", tiny("algorithm.advantage=gae"), "needs a critic's values", "`critic: {}`"),
    case("a critic for nothing", tiny("critic={}"), "uses no values", "remove the section critic"),
    case("plugin that is not there", tiny("algorithm.plugins=[my_losses]"), "my_losses", "no such module"),
]

CONTRADICTIONS = [
    case(
        "preset and mode", tiny("algorithm.rollout_correction.preset=pg_is", "algorithm.old_logprobs=decoupled"),
        "pg_is", "old_logprobs=bypass",
    ),
    case(
        "preset and rule", tiny("algorithm.rollout_correction={preset: decoupled_token_is, rollout_is: sequence}"),
        "contradicts preset decoupled_token_is",
    ),
    case(
        "weights in bypass mode",
        tiny("algorithm.old_logprobs=bypass", "algorithm.rollout_correction.rollout_is=token"),
        "count the difference twice",
    ),
    case("exact KL in the reward", tiny("algorithm.kl={estimator: full, coef: 1, place: reward}"), "needs the logits"),
    case("adaptive KL in the loss", tiny("algorithm.kl={coef: 1, controller: adaptive}"), "set place=reward"),
    case("buffer", tiny("algorithm.overlong.buffer_tokens=13"), "buffer_tokens=13", "max_new_tokens=12"),
    case(
        "warm-up as long as the schedule",
        tiny("trainer.optimizer.schedule=linear", "trainer.optimizer.warmup_steps=2"),
        "warmup_steps=2", "2 steps of the linear schedule",
    ),
    case("shards", tiny("rollout.shards=5"), "shards=5", "prompts=4"),
    case("mini batch", tiny("trainer.mini_batch_prompts=5"), "trainer.mini_batch_prompts=5", "rollout.prompts=4"),
    case("micro batch", tiny("trainer.max_tokens=35"), "trainer.max_tokens=35", "= 36"),
    case("held-out prompts", tiny("evaluation.prompts=9"), "evaluation.prompts=9", "data.heldout_prompts=8"),
    case("training prompts", tiny("rollout.prompts=101"), "rollout.prompts=101", "data.train_prompts=100"),
    case("pass@k", tiny("evaluation.pass_k=[1,4]"), "pass_k=[4]", "samples=2"),
    case("pass@0", tiny("evaluation.pass_k=[0]"), "pass_k=[0]", "between 1"),
    case("no evaluation", tiny("evaluation.samples=0", "evaluation.greedy=false"), "evaluate nothing"),
    case("being right is worth nothing", tiny("reward.correct=0.1"), "correct=0.1", "format_only=0.1"),
    case("attention heads", tiny("model.small.kv_heads=3"), "heads=2", "kv_heads=3"),
    case("no model", tiny("warm_start=null"), "model.path is null", "warm_start: {}"),
    case("two models", tiny("model.path=some/model"), "model.path='some/model'", "exclude each other"),
    case("system prompt", tiny("model.system_prompt=Hello"), "system_prompt", "prompt_format=chat"),
    case("small model and chat", tiny("model.prompt_format=chat"), "prompt_format=chat", "use plain"),
    case("warm start of a given model", ("warm-start", *model("sound")[1:]), "no warm_start section"),
    case("too few puzzles", tiny("data.max_number=2", "data.max_target=4"), "unique puzzles", "data.train_prompts"),
    case(
        "too few expressions",
        tiny("data={problem: expressions, operands: 3, max_operand: 2, heldout_prompts: 4}"),
        "unique puzzles", "raise data.max_operand",
    ),
    case("a puzzle too long", tiny("rollout.max_prompt_tokens=9"), "max_prompt_tokens=9", "12 tokens", "raise that"),
]  # fmt: skip

MODELS = [
    case("no such folder", model("nowhere"), "nowhere", "no such folder"),
    case("no config.json", model("empty"), "no config.json"),
    case("a broken config.json", model("broken"), "config.json", "save_pretrained"),
    case("no weights", model("weightless"), "no *.safetensors weights"),
    case("only a pickle", model("pickle"), "no *.safetensors weights", "convert them with save_pretrained"),
    case("no tokenizer", model("mute"), "no tokenizer", "tokenizer.save_pretrained"),
    case("no chat template", model("sound", "model.prompt_format=chat"), "no chat template", "plain"),
    case("too few positions", model("sound", "rollout.max_new_tokens=100"), "= 124", "64 positions"),
    case("weights that are none", model("sound"), "model can't be loaded", "sound", in_flow=True),
]

REWARDS = [
    case("no such reward file", reward("nowhere.py", "good"), "there is no file", "nowhere.py"),
    case("misspelt function", reward("rewards.py", "goood"), "there is no 'goood' in it", "did you mean good"),
    case("wrong parameter", reward("rewards.py", "wrong"), "must take `sample` first"),
    case("option of a reward", reward("rewards.py", "good", "kwargs: {bonus: 1}"), "can't be called with", "bonus"),
    case("always fails", reward("rewards.py", "broken"), "scored none", "ZeroDivisionError", "rewards.py:broken"),
    case("unknown built-in", tiny("reward.functions=[{name: mth}]"), "unknown reward function 'mth'"),
    case(
        "no such data", reward("rewards.py", "good", "data_sources: [maths]"), "no prompt has the data_source 'maths'"
    ),
    case(
        "prompts without a reward",
        tiny("data={problem: files, train: [x.jsonl]}"),
        "name functions in reward.functions",
    ),
    case("unknown sampler", tiny("rollout.sampler={name: pas}"), "unknown sampler 'pas'", "pass_rate"),
    case("option of a sampler", tiny("rollout.sampler={kwargs: {memory: 2}}"), "kwargs.memory=2", "less than 1"),
]

DATA = [
    case("missing file", gsm8k("nowhere.jsonl"), "nowhere.jsonl does not exist", "set data.path"),
    case("missing held-out file", gsm8k("good.jsonl", "data.heldout_path=$data/nowhere.jsonl"), "does not exist"),
    case("empty file", gsm8k("empty.jsonl"), "empty.jsonl is empty"),
    case("broken line", gsm8k("broken.jsonl"), "broken.jsonl, line 2", "not valid JSON"),
    case("line that is no object", gsm8k("number.jsonl"), "number.jsonl, line 2", "JSON object"),
    case("no answer", gsm8k("no_answer.jsonl"), "no_answer.jsonl, line 2", "'answer' is missing"),
    case("answer without ####", gsm8k("no_marker.jsonl"), "no_marker.jsonl, line 2", "no ####"),
    case("answer without a number", gsm8k("no_number.jsonl"), "no_number.jsonl, line 2", "no number follows ####"),
    case("empty question", gsm8k("no_question.jsonl"), "no_question.jsonl, line 2", "'question'", "not empty"),
    case("one row", gsm8k("one.jsonl"), "one.jsonl has 1 rows", "data.heldout_prompts=1"),
    case("all held out", gsm8k("good.jsonl", "data.heldout_path=$data/good.jsonl"), "every question is also held out"),
    case("few training rows", gsm8k("good.jsonl", "rollout.prompts=3"), "rollout.prompts=3", "the 2 prompts", "train"),
    case(
        "few held-out rows",
        gsm8k("good.jsonl", "data.heldout_path=$data/one.jsonl", "data.heldout_prompts=9", "evaluation.prompts=2"),
        "evaluation.prompts=2", "1 prompts of the heldout split",
    ),
    case("long prompt", gsm8k("good.jsonl", "rollout.max_prompt_tokens=5"), "max_prompt_tokens=5", "6 tokens"),
    case(
        "long prompt of a given model",
        gsm8k("good.jsonl", "warm_start=null", "model.path=$models/sound", "rollout.max_prompt_tokens=1"),
        "rollout.max_prompt_tokens=1", "raise the limit", in_flow=True,
    ),
]  # fmt: skip

PLACES = [
    case("a file as store", tiny("store.uri=$tiny"), "tiny.yaml", "store.uri"),
    case("a store below a file", tiny("store.uri=$tiny/store"), "tiny.yaml/store", "empty or new folder"),
    case("unknown scheme", tiny("store.uri=gs://bucket"), "store.uri='gs://bucket'", "s3://bucket/prefix"),
    case("no bucket", tiny("store.uri=s3://"), "names no bucket"),
    case("endpoint that is no URL", tiny("store.uri=s3://b", "store.endpoint_url=minio"), "endpoint_url='minio'"),
    case(
        "dead endpoint", tiny("store.uri=s3://b", "store.endpoint_url=$dead"), "s3://b", "check that the service runs"
    ),
    case("no such bucket", tiny("store.uri=s3://b", "store.endpoint_url=$refusing"), "s3://b", "NoSuchBucket"),
    case("tracking of an unknown kind", tiny("tracking.uri=mflow://host"), "tracking.uri='mflow://host'", "sqlite:///"),
    case("tracking server is dead", tiny("tracking.uri=$dead"), "no MLflow server answers", "mlflow server"),
    case("tracking server is silent", tiny("tracking.uri=$silent"), "no MLflow server answers", "timed out"),
    case("tracking server refuses", tiny("tracking.uri=$refusing"), "answers 503", "check tracking.uri"),
    case("tracking below a file", tiny("tracking.uri=sqlite:///$tiny/x.db"), "MLflow database", "tiny.yaml"),
    case("Prefect's server is dead", tiny(), "PREFECT_API_URL", "prefect server start", PREFECT_API_URL="$dead/api"),
    case("password of tracking", tiny(f"tracking.uri=http://me:{PASSWORD}@host"), "host", "holds a password"),
    case("password in a query", tiny(f"tracking.uri=mysql://host/db?password={PASSWORD}"), "holds a password"),
    case("password of the endpoint", tiny(f"store.endpoint_url=http://me:{PASSWORD}@host"), "holds a password"),
    case("password of the store", tiny(f"store.uri=s3://me:{PASSWORD}@bucket"), "holds a password"),
    case("password in the wrong place", tiny(f"tracking=http://me:{PASSWORD}@host"), "tracking is a section"),
    case("password in a bad override", tiny(f"name.uri=http://me:{PASSWORD}@host"), "'name' is a value"),
    case("password on the command line", ("show", "--endpoint-url", f"http://me:{PASSWORD}@host"), "holds a password"),
]

RUNS = [
    case("name is taken", ("run", "$tiny", "store.uri=$made", "seed=1"), "'tiny' exists", "seed: 0 -> 1", "tiny-2"),
    case("resume of an unknown run", ("resume", "tyni", "--store", "$made"), "no run 'tyni'", "it holds: tiny"),
    case("resume with other settings", ("resume", "tiny", "seed=1", "--store", "$made"), "seed: 0 -> 1"),
    case("resume with a typo", ("resume", "tiny", "sed=1", "--store", "$made"), "sed: no such", "did you mean seed?"),
    case("show of an unknown run", ("show", "tyni", "--store", "$made"), "no run 'tyni'", "it holds: tiny"),
    case("show of a missing iteration", ("show", "tiny", "-k", "7", "--store", "$made"), "no iteration 7", "grpo show"),
    case("an empty store", ("show", "tiny", "--store", "$store"), "no run 'tiny'", "holds no run yet", "grpo run"),
    case("a run with a bad name", ("show", "../x", "--store", "$made"), "'../x'", "no name of a run"),
    case("evaluate an unknown run", ("evaluate", "tyni", "--store", "$made"), "no run 'tyni'", "it holds: tiny"),
    case("evaluate a missing version", ("evaluate", "tiny", "-k", "9", "--store", "$made"), "there is no version 9"),
    case(
        "evaluate with too few samples",
        ("evaluate", "tiny", "evaluation.pass_k=[8]", "--store", "$made"),
        "pass_k=[8]", "samples=2",
    ),
    case("rollouts of an unknown run", ("rollouts", "tyni", "--store", "$made"), "no run 'tyni'", "it holds: tiny"),
    case("a missing iteration", ("rollouts", "tiny", "-k", "7", "--store", "$made"), "no rollouts of iteration 7"),
    case("unknown column", ("rollouts", "tiny", "--where", "size > 1", "--store", "$made"), "size > 1", "columns"),
    case("no SQL", ("rollouts", "tiny", "--where", "value <", "--store", "$made"), "value <", "--help"),
    case("a second statement", ("rollouts", "tiny", "--where", "1=1; drop table x", "--store", "$made"), "--where"),
]  # fmt: skip

CASES = [
    *COMMAND_LINE, *FILES, *OVERRIDES, *NUMBERS, *CHOICES, *ALGORITHM, *CONTRADICTIONS, *MODELS, *REWARDS, *DATA,
    *PLACES, *RUNS,
]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str
    trained: list[str]
    """Manifests of what a run must not have come to."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_it_is_refused_with_one_clear_message(case: Case, outcomes: "Outcomes") -> None:
    outcome = outcomes.of(case)
    shown = f"{outcome.stdout}\n{outcome.stderr}"
    assert outcome.code == 2, shown
    assert "Traceback" not in shown
    lines = outcome.stderr.strip().splitlines()
    assert lines[-1].startswith("error: ") and (case.in_flow or len(lines) == 1), shown
    assert [each for each in case.says if each not in lines[-1]] == [], lines[-1]
    assert PASSWORD not in shown
    assert outcome.trained == []


def test_cases_have_different_names() -> None:
    assert len({each.name for each in CASES}) == len(CASES)


class Outcomes:
    """What the command did in each case; several run at a time."""

    def __init__(
        self, places: dict[str, str], flow_environment: dict[str, str], pool: ThreadPoolExecutor, warm: str
    ) -> None:
        self._places, self._flow_environment, self._pool, self._warm = places, flow_environment, pool, warm
        self._started: dict[str, Future[Outcome]] = {}

    def start(self, case: Case) -> "Future[Outcome]":
        if case.name not in self._started:
            self._started[case.name] = self._pool.submit(self._drive, case)
        return self._started[case.name]

    def of(self, case: Case) -> Outcome:
        return self.start(case).result()

    def _drive(self, case: Case) -> Outcome:
        store = Path(self._places["stores"], case.name.replace(" ", "-"))
        places = self._places | {"store": str(store)}
        filled = [Template(each).substitute(places) for each in case.arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "AWS_"))}
        environment |= {
            "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_DEFAULT_REGION": "us-east-1", "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1",
        }  # fmt: skip
        environment |= self._flow_environment if case.in_flow else {"PREFECT_HOME": f"{store}-prefect"}
        environment |= {name: Template(value).substitute(places) for name, value in case.environment.items()}
        command = [sys.executable, "-m", "flows.cli.main"] if case.in_flow else [f"{self._warm}/grpo"]
        done = subprocess.run(
            [*command, *filled],
            capture_output=True, text=True, check=False, cwd=self._places["stores"], env=environment, timeout=300,
        )  # fmt: skip
        manifests = [path for place in (store, Path(places["made"])) for path in place.rglob("manifest.json")]
        trained = [str(path) for path in manifests if {"warm_start", "update"} & set(path.parts)]
        return Outcome(done.returncode, done.stdout, done.stderr, trained)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, places: dict[str, str]) -> Iterator[Outcomes]:
    wanted = [each.callspec.params["case"] for each in request.session.items if _is_case(each)]  # type: ignore[attr-defined]
    in_flow = any(each.in_flow for each in wanted)
    server = request.getfixturevalue("prefect_server") if in_flow else {}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "AWS_", "MLFLOW_"))}
    with warm_grpo(clean) as warm, ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 2)) as pool:
        made = Outcomes(places, server, pool, warm)
        if "PYTEST_XDIST_WORKER" not in os.environ:  # its workers see all cases and run some
            for each in sorted(wanted, key=lambda case: not case.in_flow):  # the slow ones first
                made.start(each)
        yield made


def _is_case(item: pytest.Item) -> bool:
    return item.path == Path(__file__) and "case" in getattr(getattr(item, "callspec", None), "params", {})


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Files, folders and addresses to name in a case."""
    root = tmp_path_factory.mktemp("refusals")
    made = root / "made"
    for name in ("stores", "configs", "data", "models"):
        (root / name).mkdir()
    (root / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    data = {"problem": "gsm8k", "path": "train.jsonl"}
    (root / "gsm8k.yaml").write_text(yaml.safe_dump(TINY | {"data": data}))
    write_configs(root / "configs")
    write_data(root / "data")
    write_models(root / "models")
    write_run(made)
    names = {name: str(root / name) for name in ("stores", "configs", "data", "models", "made")}
    names |= {"tiny": str(root / "tiny.yaml"), "gsm8k": str(root / "gsm8k.yaml")}
    with socket.socket() as dead, socket.socket() as silent:
        dead.bind(("127.0.0.1", 0))  # never listens: connections are refused
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # never answers
        refusing = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
        threading.Thread(target=refusing.serve_forever, daemon=True).start()
        ports = {"dead": dead.getsockname()[1], "silent": silent.getsockname()[1], "refusing": refusing.server_port}
        yield names | {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        refusing.shutdown()
        refusing.server_close()


class Refusing(http.server.BaseHTTPRequestHandler):
    """An S3 service without buckets, and an MLflow server out of order."""

    def do_PUT(self) -> None:
        self._answer(404, b"<Error><Code>NoSuchBucket</Code><Message>There is none</Message></Error>")

    def do_GET(self) -> None:
        if "list-type" in self.path:
            self.do_PUT()
        else:
            self._answer(503, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def write_configs(folder: Path) -> None:
    texts = {
        "broken": "data:\n  problem: [countdown\n",
        "empty": "",
        "list": "- data\n- rollout\n",
        "twice": "data: {problem: countdown}\nwarm_start: {}\nrollout: {prompts: 4}\nrollout: {samples: 4}\n",
        "circular": "data: &data\n  problem: countdown\n  again: *data\n",
        "no_data": "warm_start: {}\n",
        "no_problem": "data: {numbers: 3}\nwarm_start: {}\n",
        "no_path": "data: {problem: gsm8k}\nwarm_start: {}\n",
    }
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")


def write_data(folder: Path) -> None:
    def row(**changes: str) -> str:
        return json.dumps({"question": "2 + 3?", "answer": "#### 5"} | changes)

    second = {
        "broken": '{"question": "2 + ',
        "number": "5",
        "no_answer": json.dumps({"question": "2 + 4?"}),
        "no_marker": row(question="2 + 4?", answer="6"),
        "no_number": row(question="2 + 4?", answer="#### six"),
        "no_question": row(question=" "),
    }
    for name, line in second.items():
        (folder / f"{name}.jsonl").write_text(f"{row()}\n{line}\n")
    (folder / "empty.jsonl").write_text("\n")
    (folder / "one.jsonl").write_text(row(question="1 + 1?") + "\n")
    (folder / "rewards.py").write_text(
        "def good(sample): return 1.0\ndef wrong(response): return 1.0\ndef broken(sample): return 1 / 0\n"
    )
    (folder / "good.jsonl").write_text("".join(row(question=f"2 + {each}?") + "\n" for each in (3, 4, 10)))


def write_models(folder: Path) -> None:
    """Folders that look ever more like a model; `sound` lacks nothing but weights that can be read."""
    for name in ("empty", "broken", "weightless", "pickle", "mute", "sound"):
        (folder / name).mkdir()
    settings = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 64}
    for name in ("weightless", "pickle", "mute", "sound"):
        (folder / name / "config.json").write_text(json.dumps(settings))
    for name in ("broken", "mute", "sound"):
        (folder / name / "model.safetensors").write_bytes(b"no weights")
    (folder / "broken" / "config.json").write_text("{")
    (folder / "pickle" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    tokenizer = Tokenizer(WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    for name in ("broken", "sound"):
        tokenizer.save(str(folder / name / "tokenizer.json"))
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "unk_token": "<unk>"}
        (folder / name / "tokenizer_config.json").write_text(json.dumps(kind))


def write_run(folder: Path) -> None:
    """A store with the run `tiny`, which has the prompts and rollouts of iteration 0, without rows."""
    run = open_run(make_config(TINY | {"store": {"uri": str(folder)}}))
    for name, schema in (("prompts", PROMPTS), ("rollout", ROLLOUTS)):
        spec = StageSpec(name=name, version=1, reads=("seed",))
        with run.stages.attempt(spec, run.config, "0" * 64, (), 0) as attempt:
            attempt.write_table(schema.empty_table())
            attempt.commit()
