"""What a reward function's digest covers, and what is found out about this machine before anything runs."""

import ast
import importlib.metadata
import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_lib.config_files import make_config
from grpo_lib.config_reward import RewardConfig, RewardFunctionConfig
from grpo_lib.errors import ConfigError, MissingPackageError
from grpo_lib.preflight import check_reward
from grpo_lib.problems import get_problem
from grpo_lib.rewards import judges
from grpo_lib.rewards.judges import Reward, check_machine, make_judges, reward_digests, run_reward
from grpo_lib.rewards.registry import REWARDS

OPTIONS: dict[str, dict[str, Any]] = {
    "code": {},
    "judge": {"url": "http://host/v1", "model": "m", "prompt": "{response}", "pattern": "(1)"},
    "model": {"path": "nobody/nothing"},
}
SOURCES = {
    "code": ["code", "code_harness", "sandbox", "sandbox_levels", "sandbox_process"],
    "judge": ["endpoint", "chat"],
    "model": ["model", "classifier"],
}
"""Files of `grpo_lib.rewards` that say what they compute."""
RUNNER = {"registry", "pace"}
"""Those that belong to no function."""


def digest(name: str, **options: Any) -> str:
    (judge,) = make_judges([RewardFunctionConfig(name=name, kwargs=OPTIONS[name] | options)], [])
    return judge.digest


def imported(module: str) -> set[str]:
    """Modules of `grpo_lib.rewards` that one of them imports, wherever in its text, and those that these import."""
    spec = importlib.util.find_spec(f"grpo_lib.rewards.{module}")
    assert spec is not None and spec.origin is not None
    found = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "grpo_lib.rewards":
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("grpo_lib.rewards."):
            found.add(str(node.module).rpartition(".")[2])
    found -= RUNNER
    return found.union(*(imported(each) for each in found))


@pytest.mark.parametrize("name", SOURCES)
def test_all_files_that_a_function_is_made_of_are_named(name: str) -> None:
    own, *others = SOURCES[name]
    assert imported(own) == set(others)
    make_judges([], [])
    assert sorted(REWARDS[name].traits["modules"]) == sorted(f"grpo_lib.rewards.{each}" for each in others)  # type: ignore[call-overload]
    assert REWARDS[name].function.__module__ == f"grpo_lib.rewards.{own}"


@pytest.mark.parametrize(("name", "module"), [(name, each) for name, others in SOURCES.items() for each in others[1:]])
def test_a_change_in_any_of_its_files_makes_it_another_function(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, find = digest(name), importlib.util.find_spec
    spec = find(f"grpo_lib.rewards.{module}")
    assert spec is not None and spec.origin is not None
    copy = tmp_path / "copy.py"
    copy.write_text(Path(spec.origin).read_text())

    def elsewhere(name: str) -> Any:
        return SimpleNamespace(origin=str(copy)) if name == spec.name else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", elsewhere)
    assert digest(name) == before
    copy.write_text(copy.read_text() + "\nLATER = 1\n")
    assert digest(name) != before


def test_a_file_that_an_option_names_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "question.txt"
    digests = []
    for text in ("Right? {response}", "Wrong? {response}", "Right? {response}", "Really right? {response}"):
        file.write_text(text)
        digests.append(digest("judge", prompt=None, prompt_file=str(file)))
    assert digests[0] == digests[2]
    assert len(set(digests)) == 3


def test_a_large_file_is_not_read_again_in_each_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = digest("model", path=str(tmp_path))

    def fail(*_: object) -> None:
        raise AssertionError("was read again")

    monkeypatch.setattr(judges.hashlib, "file_digest", fail)
    assert digest("model", path=str(tmp_path)) == first
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(AssertionError, match="was read again"):
        digest("model", path=str(tmp_path))


def test_both_files_of_a_decorated_function_make_it_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    own, other = tmp_path / "decorated_reward.py", tmp_path / "their_decorators.py"
    other.write_text("def plain(function):\n    def call(sample):\n        return function(sample)\n    return call\n")
    text = "from their_decorators import plain\n\n@plain\ndef reward(sample):\n    return {}\n"
    functions, found = [RewardFunctionConfig(name="reward", path=str(own))], []
    for value, more in (("1.0", ""), ("2.0", ""), ("2.0", "# later\n")):
        own.write_text(text.format(value))
        other.write_text(other.read_text() + more)
        (judge,) = make_judges(functions, [])
        assert set(judge.files) == {str(own), str(other)}
        found.append(judge.digest)
    assert len(set(found)) == 3


def test_a_function_in_a_file_of_its_own_is_known_by_that_alone(tmp_path: Path) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text("def reward(sample):\n    return 1.0\n")
    (judge,) = make_judges([RewardFunctionConfig(name="reward", path=str(file))], [])
    assert judge.files == {str(file): "45b9c4a810780a1b73921a2001b4bdc2c62d7d63013a4fe4f2ff66cc14e6a535"}


@pytest.mark.parametrize(("module", "name"), [("math_verify", "math-verify"), ("yaml", "PyYAML")])
def test_the_version_of_a_package_belongs_to_the_function(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judges._version(module) == importlib.metadata.version(name) != ""
    found = []
    for version in ("0.9.0", "0.9.1"):
        monkeypatch.setattr(judges, "_version", {"math_verify": version}.__getitem__)
        (judge,) = make_judges([RewardFunctionConfig(name="math")], [])
        found.append(judge.digest)
    assert found[0] != found[1]


# --- the sandbox of `code` --------------------------------------------------------------------------------------------


@pytest.fixture
def no_bwrap(monkeypatch: pytest.MonkeyPatch) -> None:
    find = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **more: None if name == "bwrap" else find(name, **more))


def functions(*given: dict[str, Any]) -> Reward:
    config = RewardConfig.model_validate({"functions": list(given)})
    return Reward(judges=make_judges(config.functions, []), settings=config)


@pytest.mark.usefixtures("no_bwrap")
def test_a_sandbox_that_is_not_installed_is_found_out_before_any_sample() -> None:
    reward = functions({"name": "gsm8k"}, {"name": "code"})
    with pytest.raises(MissingPackageError) as raised:
        check_machine(reward)
    message = str(raised.value)
    assert message.startswith("reward.functions[1] (code): sandbox level 'bubblewrap' needs bwrap")
    for word in ("apt-get install bubblewrap", "namespaces", "limits", "remote"):
        assert word in message


def test_a_sandbox_that_does_not_work_is_found_out_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="sandbox level 'remote' needs the endpoint's address"):
        check_machine(functions({"name": "code", "kwargs": {"level": "remote"}}))
    options = {"level": "remote", "endpoint": "http://127.0.0.1:1/"}
    with pytest.raises(ConfigError, match=r"reward\.functions\[0\] \(code\): the sandbox at http://127") as raised:
        check_machine(functions({"name": "code", "kwargs": options}))
    assert "levels: bubblewrap (apt-get install bubblewrap), namespaces" in str(raised.value)


def test_only_functions_that_run_programs_are_tried_and_only_with_their_own_level() -> None:
    reward = functions({"name": "code", "kwargs": {"level": "limits"}}, {"name": "gsm8k"})
    sandboxed, plain = reward.judges
    assert plain.check is None
    assert sandboxed.check is not None
    assert sandboxed.check.keywords["level"] == "limits"  # type: ignore[attr-defined]
    check_machine(reward)


@pytest.mark.usefixtures("no_bwrap")
def test_the_check_before_a_run_looks_at_the_sandbox_before_any_function_loads_a_model() -> None:
    given = [{"name": "model", "kwargs": {"path": "/no/such/folder"}}, {"name": "code"}]
    config = make_config({"data": {"problem": "countdown"}, "warm_start": {}, "reward": {"functions": given}})
    with pytest.raises(MissingPackageError, match=r"reward\.functions\[1\] \(code\).*apt-get install bubblewrap"):
        check_reward(config)


def test_a_machine_whose_file_is_another_judges_nothing(tmp_path: Path) -> None:
    file = tmp_path / "elsewhere_reward.py"
    file.write_text("def reward(sample):\n    return 1.0\n")
    function = f"reward.functions=[{{path: {file}, name: reward}}]"
    config = make_config({"name": "x", "data": {"problem": "countdown"}, "warm_start": {}}, [function])
    problem, of_the_flow = get_problem("countdown"), reward_digests(config)
    assert len(run_reward(problem, config, of_the_flow).judges) == 1
    file.write_text("def reward(sample):\n    return 2.0\n")
    with pytest.raises(ConfigError, match=r"reward/0/reward on .* is not what the flow has.*copy the file there"):
        run_reward(problem, config, of_the_flow)
