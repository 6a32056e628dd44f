"""What the ``rollout`` section refuses, and what engines are made of it."""

from pathlib import Path

import pytest
import torch

from grpo_lib.config_files import make_config
from grpo_lib.errors import ConfigError, MissingPackageError, ModelError
from grpo_lib.generation.base import Sampling
from grpo_lib.placement.engines import engine_gpus, sampling_of, shares_gpu
from grpo_lib.preflight import check_engine, check_packages
from tests.flows.tiny import TINY

TOKEN_IS = "algorithm.rollout_correction.preset=decoupled_token_is"
SERVER = ("rollout.engine=server", "rollout.server.urls=[http://a:1]", "rollout.server.weights_folder=w")
REFUSED = {
    "truncation without weights": (("rollout.top_p=0.9",), r"top_p=0.9.*preset=decoupled_token_is"),
    "a penalty without weights": (("rollout.repetition_penalty=1.1",), r"repetition_penalty=1.1.*another distribution"),
    "partial without a budget": (("rollout.partial={}", TOKEN_IS), "set seconds or tokens"),
    "partial without weights": (("rollout.partial.tokens=9",), r"rollout.partial lets several policies draw"),
    "partial with filters": (
        ("rollout.partial.tokens=9", TOKEN_IS, "algorithm.filters=[zero_variance]"),
        "partial and algorithm.filters exclude each other",
    ),
    "partial with an agent": (("rollout.partial.tokens=9", "rollout.agent={}", TOKEN_IS), "agent and partial exclude"),
    "a server without its section": (("rollout.engine=server",), "engine=server, but server is not set"),
    "a server's section without it": (SERVER[1:], "engine=local, but server is set"),
    "sglang and truncation": (
        (*SERVER, "rollout.server.kind=sglang", "rollout.top_k=5", TOKEN_IS),
        "SGLang reports log-probs of the distribution before",
    ),
    "more stop strings than servers take": ((*SERVER, "rollout.stop=[a,b,c,d,e]"), "stop names 5 texts; servers take"),
    "a temperature above vLLM's": (("rollout.engine=vllm", "rollout.temperature=3"), "temperature=3: vLLM and SGLang"),
    "a temperature below vLLM's": (("rollout.engine=vllm", "rollout.temperature=0.001"), "vLLM samples at 0.01"),
    "partial with stop strings": (
        ("rollout.partial.tokens=9", "rollout.stop=[a]", TOKEN_IS),
        "partial and stop exclude",
    ),
    "tensor parallel in the trainer's process": (
        ("rollout.engine=vllm", "rollout.vllm.tensor_parallel=2", "rollout.vllm.own_process=false"),
        "tensor_parallel=2 takes GPUs of its own",
    ),
    "the trainer's process on another GPU": (
        ("rollout.engine=vllm", "rollout.vllm.own_process=false", "placement.device=cuda:1"),
        "vLLM takes the first GPU",
    ),
    "adapters of too high a rank": (
        ("rollout.engine=vllm", "rollout.vllm.adapters=true", "trainer.lora.rank=600"),
        "rank=600 is more than vLLM takes",
    ),
    "more tokens than the small model has positions": (
        ("rollout.max_new_tokens=5000", "trainer.max_tokens=9000"),
        "the small model has 4096 positions",
    ),
    "adapters without LoRA": (("rollout.engine=vllm", "rollout.vllm.adapters=true"), "needs.*trainer.lora"),
    "engines in one process": (
        ("rollout.engine=vllm", "rollout.vllm.data_parallel=2", "rollout.vllm.own_process=false"),
        "data_parallel=2 needs a process for each",
    ),
    "an empty stop string": (("rollout.stop=['']",), "rollout.stop"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_fit_are_refused_with_the_remedy(name: str) -> None:
    overrides, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        make_config(TINY, overrides)


def test_truncation_is_taken_with_weights_or_ratios_to_what_was_drawn_from() -> None:
    for correction in (TOKEN_IS, "algorithm.old_logprobs=bypass"):
        config = make_config(
            TINY, ["rollout.top_p=0.9", "rollout.stop=[a, b]", "rollout.stop_token_ids=[4]", correction]
        )
        drawn = Sampling(temperature=1.0, max_new_tokens=12, top_p=0.9, stop=("a", "b"), stop_token_ids=(4,))
        assert sampling_of(config) == drawn and drawn.shaped
        greedy = sampling_of(config, greedy=True)
        assert greedy == Sampling(temperature=0.0, max_new_tokens=12, stop=("a", "b"), stop_token_ids=(4,))
        assert not greedy.shaped


@pytest.mark.parametrize("more", [("rollout.top_p=0.9",), ("rollout.partial.tokens=9",)])
def test_bypass_without_a_ratio_is_refused_where_another_distribution_was_drawn_from(more: tuple[str, ...]) -> None:
    from grpo_lib.recipe import check_algorithm

    bypass = (*more, "algorithm.old_logprobs=bypass")
    check_algorithm(make_config(TINY, bypass))
    with pytest.raises(ConfigError, match=r"loss=reinforce takes no ratio.*rollout_is=token"):
        check_algorithm(make_config(TINY, [*bypass, "algorithm.loss=reinforce"]))
    check_algorithm(
        make_config(TINY, [*bypass, "algorithm.loss=reinforce", "algorithm.rollout_correction.rollout_is=token"])
    )


def test_stop_tokens_and_a_servers_folder_are_checked_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stop_token_ids names 1000, the tokenizer has \d+ tokens"):
        check_engine(make_config(TINY, ["rollout.stop_token_ids=[1000]"]))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"weights_folder=.*can't be written"):
        check_engine(make_config(TINY, [*SERVER[:2], f"rollout.server.weights_folder={tmp_path / 'file'}"]))
    with pytest.raises(ConfigError, match="environment variable GRPO_NO_KEY"):
        check_engine(
            make_config(TINY, [*SERVER[:2], f"rollout.server.weights_folder={tmp_path}",
                               "rollout.server.api_key_variable=GRPO_NO_KEY"])
        )  # fmt: skip


def test_how_engines_are_run_may_change_between_a_run_and_its_continuation() -> None:
    from grpo_lib.run import differences

    before, after = (make_config(TINY, ["rollout.engine=vllm", f"rollout.vllm.start_seconds={s}"]) for s in (1, 2))
    assert differences(before, after) == []
    assert before.model_copy(update={"name": None}).run_name == after.model_copy(update={"name": None}).run_name


def test_an_engine_that_is_not_installed_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    with pytest.raises(MissingPackageError, match=r"rollout.engine=vllm.*pip install 'grpo-pipeline\[vllm\]' for CUDA"):
        check_packages(make_config(TINY, ["rollout.engine=vllm"]))


def test_a_head_size_without_a_kernel_is_refused_before_anything_is_made() -> None:
    check_engine(make_config(TINY, ["rollout.engine=vllm"]))
    with pytest.raises(ModelError, match=r"have size 16; vLLM on a CPU takes 32.*set model.small.head_dim"):
        check_engine(make_config(TINY, ["rollout.engine=vllm", "model.small.head_dim=16"]))


def test_engines_take_the_last_gpus_and_sleep_where_the_trainer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    vllm = "rollout.engine=vllm"
    one, two = make_config(TINY, [vllm]), make_config(TINY, [vllm, "rollout.vllm.data_parallel=2"])
    assert [list(each) for each in engine_gpus(two, 4)] == [[2], [3]]
    cuda = torch.device("cuda")
    assert not shares_gpu(one, cuda) and shares_gpu(one, torch.device("cuda", 3))
    assert not shares_gpu(one, torch.device("cpu")) and not shares_gpu(make_config(TINY, []), torch.device("cuda", 3))
    assert shares_gpu(make_config(TINY, [vllm, "rollout.vllm.tensor_parallel=4"]), cuda)
    assert not shares_gpu(make_config(TINY, [vllm, "rollout.vllm.tensor_parallel=4", "rollout.vllm.sleep=false"]), cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert shares_gpu(one, cuda)
