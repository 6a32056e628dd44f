"""Configuration files that extend others."""

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_lib.config_files import load_config
from grpo_lib.errors import ConfigError

Write = Callable[[str, str], Path]
BASE = """
iterations: 7
data: {problem: countdown, numbers: 4}
warm_start: {}
rollout:
  prompts: 4
  samples: 2
critic: {lr: 0.5}
algorithm:
  advantage: gae
  metrics: [group_std, best_of_group]
  kl: {coef: 0.25, estimator: k2}
trainer:
  optimizer: {lr: 0.125, beta1: 0.5}
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return to_file


def test_settings_go_over_those_of_the_extended_file_section_by_section(write: Write) -> None:
    write("base.yaml", BASE)
    config = load_config(
        write(
            "own.yaml",
            """
            extends: base.yaml
            seed: 3
            rollout: {samples: 8}
            algorithm:
              metrics: [group_std]
              kl: {estimator: k3}
            trainer: {optimizer: {beta1: 0.75}, epochs: 2}
            """,
        )
    )
    assert (config.iterations, config.seed) == (7, 3)
    assert (config.rollout.prompts, config.rollout.samples) == (4, 8)
    assert config.algorithm.advantage == "gae"
    assert config.algorithm.metrics == ["group_std"]  # a list is a value
    assert (config.algorithm.kl.coef, config.algorithm.kl.estimator) == (0.25, "k3")
    assert (config.trainer.optimizer.lr, config.trainer.optimizer.beta1, config.trainer.epochs) == (0.125, 0.75, 2)
    assert config.critic is not None and config.critic.lr == 0.5


def test_a_section_is_taken_out_with_null_and_put_in_over_null(write: Write) -> None:
    write("base.yaml", BASE)
    without = write("without.yaml", "extends: base.yaml\ncritic: null\nalgorithm: {advantage: grpo}")
    assert load_config(without).critic is None
    again = load_config(write("again.yaml", "extends: without.yaml\ncritic: {value_clip: 0.5}"))
    assert again.critic is not None and (again.critic.lr, again.critic.value_clip) == (1e-5, 0.5)


def test_an_empty_file_that_extends_is_the_extended_one(write: Write) -> None:
    base = write("base.yaml", BASE)
    assert load_config(write("own.yaml", "extends: base.yaml")) == load_config(base)


def test_overrides_go_over_both_files(write: Write) -> None:
    write("base.yaml", BASE)
    own = write("own.yaml", "extends: base.yaml\nrollout: {samples: 8}")
    config = load_config(own, ["rollout.samples=3", "rollout.prompts=5"])
    assert (config.rollout.samples, config.rollout.prompts) == (3, 5)


def test_the_path_is_taken_from_the_folder_of_the_file(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write("shared/base.yaml", BASE)
    own = write("mine/deep/own.yaml", "extends: ../../shared/base.yaml\nseed: 3")
    write("base.yaml", "not: this one")
    monkeypatch.chdir(tmp_path)
    for path in (own, own.relative_to(tmp_path)):
        assert load_config(path).iterations == 7
    absolute = write("elsewhere/own.yaml", f"extends: {base}")
    assert load_config(absolute).iterations == 7


def test_files_extend_in_chains(write: Write) -> None:
    write("base.yaml", BASE)
    write("shared/middle.yaml", "extends: ../base.yaml\niterations: 8\nrollout: {samples: 4}")
    config = load_config(write("own.yaml", "extends: shared/middle.yaml\nrollout: {prompts: 6}"))
    assert (config.iterations, config.rollout.samples, config.rollout.prompts) == (8, 4, 6)


@pytest.mark.parametrize("back", ["a.yaml", "./a.yaml", "../{folder}/a.yaml", "b.yaml", "link.yaml"])
def test_a_circle_is_refused(write: Write, tmp_path: Path, back: str) -> None:
    first = write("a.yaml", "extends: b.yaml")
    (tmp_path / "link.yaml").symlink_to("a.yaml")
    back = back.format(folder=tmp_path.name)
    second = write("b.yaml", f"extends: {back}")
    with pytest.raises(ConfigError) as caught:
        load_config(first)
    assert str(caught.value) == f"{second}: extends={back} leads back to where it came from; break the circle"


def test_a_file_that_extends_itself_is_refused(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"own\.yaml: extends=own\.yaml leads back"):
        load_config(write("own.yaml", "extends: own.yaml"))


def test_a_file_that_is_not_there_is_named(write: Write, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write("own.yaml", "extends: bsae.yaml"))
    assert str(tmp_path / "bsae.yaml") in str(caught.value) and "No such file" in str(caught.value)


@pytest.mark.parametrize("value", ["[base.yaml]", "{file: base.yaml}", "null", "3"])
def test_what_is_extended_must_be_a_path(write: Write, value: str) -> None:
    write("base.yaml", BASE)
    with pytest.raises(ConfigError, match=r"own\.yaml: extends=.* must be the path of a YAML file, from the folder of"):
        load_config(write("own.yaml", f"extends: {value}"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "must hold a mapping of settings at its top, found list"),
        ("", "must hold a mapping of settings at its top, found nothing"),
        ("a: [", "is not valid YAML"),
        ("seed: 1\nseed: 2", "'seed' is given twice"),
    ],
)
def test_what_is_wrong_in_the_extended_file_is_told_with_its_name(write: Write, text: str, message: str) -> None:
    base = write("base.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_config(write("own.yaml", "extends: base.yaml"))
    assert str(caught.value).startswith(str(base)) and message in str(caught.value)


def test_a_wrong_value_is_told_with_the_file_that_was_asked_for(write: Write) -> None:
    write("base.yaml", BASE)
    with pytest.raises(ConfigError, match=r"own\.yaml: rollout\.samples=0: Input should be greater than or equal to 1"):
        load_config(write("own.yaml", "extends: base.yaml\nrollout: {samples: 0}"))


def test_there_is_no_such_setting_elsewhere(write: Write) -> None:
    base = write("base.yaml", BASE)
    with pytest.raises(ConfigError, match="extends: no such setting"):
        load_config(base, ["extends=other.yaml"])
    with pytest.raises(ConfigError, match=r"rollout\.extends: no such setting"):
        load_config(write("own.yaml", f"{BASE}\nevaluation: {{}}".replace("samples: 2", "extends: base.yaml")))


PLAIN = "data: {problem: countdown}\nwarm_start: {}"
WITH_OPTIONS = "algorithm: {loss: ppo_clip, loss_options: {clip_low: 0.1}, advantage: grpo}"


def test_another_function_comes_without_the_options_of_the_one_it_replaces(write: Write) -> None:
    base = write("base.yaml", f"{PLAIN}\n{WITH_OPTIONS}")
    assert load_config(base).algorithm.loss_options == {"clip_low": 0.1}
    assert load_config(base, ["algorithm.loss=gspo"]).algorithm.loss_options == {}
    own = load_config(base, ["algorithm.loss_options.tau_pos=2", "algorithm.loss=sapo"]).algorithm
    assert own.loss_options == {"tau_pos": 2}
    extending = write("own.yaml", "extends: base.yaml\nalgorithm: {loss: cispo, loss_options: {clip_high: 0.3}}")
    assert load_config(extending).algorithm.loss_options == {"clip_high": 0.3}


def test_naming_the_same_function_again_keeps_its_options(write: Write) -> None:
    base = write("base.yaml", f"{PLAIN}\n{WITH_OPTIONS}")
    assert load_config(base, ["algorithm.loss=ppo_clip"]).algorithm.loss_options == {"clip_low": 0.1}
    silent = write("silent.yaml", f"{PLAIN}\nalgorithm: {{loss_options: {{clip_low: 0.1}}}}")
    assert load_config(silent, ["algorithm.loss=ppo_clip"]).algorithm.loss_options == {"clip_low": 0.1}
    assert load_config(silent, ["algorithm.loss=gspo"]).algorithm.loss_options == {}
