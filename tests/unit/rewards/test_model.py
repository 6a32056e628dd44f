import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from grpo_lib.config_reward import RewardConfig, RewardFunctionConfig
from grpo_lib.errors import ConfigError, ModelError
from grpo_lib.models import make_tokenizer
from grpo_lib.rewards.classifier import Classifier, load_classifier, micro_batches
from grpo_lib.rewards.judges import Reward, make_judges
from grpo_lib.rewards.model import model, step_spans
from grpo_lib.rewards.runner import score
from grpo_lib.rewards.scoring import step_tokens
from grpo_lib.types import RewardResult, Sample

SEPARATORS = ["<user>", "<assistant>", "<system>", "<extra_0>"]
TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% if turn.role == 'assistant' %}!{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 96,
    "initializer_range": 0.5,
}
LONG = ["a", "one two three", "", "b\n\nc", "what is this? " * 4, "xyz" * 7]


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    made = make_tokenizer(SEPARATORS, None)
    made.chat_template = template
    return made


def _shape(architecture: str, vocabulary: int, labels: int, pad: int | None) -> Any:
    common = {"vocab_size": vocabulary, "num_labels": labels, "pad_token_id": pad}
    if architecture == "gpt2":
        return GPT2Config(n_positions=96, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5, **common)
    if architecture == "bert":  # its tokens see those to their right: padding too, if nobody masked it
        sizes = {name: size for name, size in SHAPE.items() if name != "num_key_value_heads"}
        return BertConfig(**sizes, **common)
    if architecture == "llama":
        return LlamaConfig(**SHAPE, **common)
    return Qwen3Config(**SHAPE, head_dim=8, **common)


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a reward model with random weights into a folder of its own and says where."""

    def write(
        architecture: str = "qwen3",
        *,
        tokens: bool = False,
        labels: int = 1,
        pad: int | None = 0,
        template: str | None = TEMPLATE,
    ) -> str:
        theirs = tokenizer(template)
        kind = AutoModelForTokenClassification if tokens else AutoModelForSequenceClassification
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            made = kind.from_config(_shape(architecture, len(theirs), labels, pad)).float()
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        made.save_pretrained(folder)
        theirs.save_pretrained(folder)
        return str(folder)

    return write


def sample(response: str, prompt: str = "Q?") -> Sample:
    return Sample(
        prompt=prompt, response=response, reference="", data_source="d", response_tokens=1, finish_reason="stop"
    )


def values(results: list[RewardResult | Exception]) -> list[float]:
    assert all(isinstance(each, RewardResult) for each in results), results
    return [each.value for each in results if isinstance(each, RewardResult)]


def plain(path: str, text: str, *, tokens: bool = False) -> torch.Tensor:
    """The logits of Transformers itself for one text, without padding."""
    kind = AutoModelForTokenClassification if tokens else AutoModelForSequenceClassification
    theirs = kind.from_pretrained(path).eval()
    ids = tokenizer()(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits: torch.Tensor = theirs(input_ids=ids).logits[0]
    return logits


# --- outcome ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2", "bert"])
@pytest.mark.parametrize("pad", [0, None])
def test_scores_are_those_of_the_model_on_each_conversation_alone(
    write: Callable[..., str], architecture: str, pad: int | None
) -> None:
    path = write(architecture, pad=pad)
    results = model([sample(each) for each in LONG], path=path, micro_batch_tokens=200)
    expected = [plain(path, f"<user>Q?<assistant>{each}!")[0].item() for each in LONG]
    assert values(results) == pytest.approx(expected, abs=1e-4)
    assert len({round(each, 3) for each in expected}) == len(LONG)  # a test of equal scores would say nothing


def test_padding_of_a_model_that_has_no_padding_token_is_never_a_token_of_the_rows(write: Callable[..., str]) -> None:
    path = write(pad=None, template=None)
    texts = ["zz!", "zzzz!!", "y!"]  # of their tokens ! has the lowest id, and the score is read at the last
    results = model([sample(each, prompt="") for each in texts], path=path)
    assert values(results) == pytest.approx([plain(path, each)[0].item() for each in texts], abs=1e-4)


def test_without_a_chat_template_prompt_and_response_are_one_text(write: Callable[..., str]) -> None:
    path = write(template=None)
    results = model([sample("4", prompt="2 + 2 = ")], path=path)
    assert values(results) == pytest.approx([plain(path, "2 + 2 = 4")[0].item()], abs=1e-4)


def test_a_system_prompt_stands_first(write: Callable[..., str]) -> None:
    path = write()
    results = model([sample("4")], path=path, system="Be fair.")
    assert values(results) == pytest.approx([plain(path, "<system>Be fair.<user>Q?<assistant>4!")[0].item()], abs=1e-4)


@pytest.mark.parametrize("budget", [1, 64, 100, 10_000])
def test_neither_the_micro_batch_nor_the_order_changes_a_score(write: Callable[..., str], budget: int) -> None:
    path = write()
    samples = [sample(each) for each in LONG]
    expected = values(model(samples, path=path, micro_batch_tokens=1))
    turned = values(model(samples[::-1], path=path, micro_batch_tokens=budget))
    assert turned[::-1] == pytest.approx(expected, abs=1e-4)


def test_micro_batches_hold_rows_of_like_length_within_the_budget() -> None:
    assert micro_batches([5, 9, 4, 1, 5, 20], tokens=10) == [[5], [1], [0, 4], [2, 3]]
    assert micro_batches([], tokens=10) == []


def test_a_label_is_chosen_by_number_or_name_and_its_score_may_be_a_probability(write: Callable[..., str]) -> None:
    path = write(labels=3)
    logits = plain(path, "<user>Q?<assistant>4!")
    given = [sample("4")]
    assert values(model(given, path=path, label=2)) == pytest.approx([logits[2].item()], abs=1e-4)
    assert values(model(given, path=path, label="LABEL_1")) == pytest.approx([logits[1].item()], abs=1e-4)
    likely = values(model(given, path=path, label=0, activation="softmax"))
    assert likely == pytest.approx([logits.softmax(-1)[0].item()], abs=1e-4)
    likely = values(model(given, path=path, label=0, activation="sigmoid"))
    assert likely == pytest.approx([logits[0].sigmoid().item()], abs=1e-4)
    with pytest.raises(ConfigError, match=r"label=None.*LABEL_0.*choose one"):
        model(given, path=path)
    with pytest.raises(ConfigError, match="label='good'"):
        model(given, path=path, label="good")


def test_a_longer_row_has_a_reason_and_the_others_a_score(write: Callable[..., str]) -> None:
    path = write()
    short, long = model([sample("4"), sample("x" * 100)], path=path)
    assert isinstance(short, RewardResult)
    assert isinstance(long, ValueError)
    assert "105 tokens, the reward model takes max_length=96" in str(long)  # <user> Q ? <assistant> and !
    assert isinstance(model([sample("12345")], path=path, max_length=9)[0], ValueError)
    assert isinstance(model([sample("1234")], path=path, max_length=9)[0], RewardResult)
    with pytest.raises(ConfigError, match="max_length=97 is above the 96 positions"):
        model([sample("4")], path=path, max_length=97)


def test_a_longer_row_can_lose_its_beginning(write: Callable[..., str]) -> None:
    path = write()
    results = model([sample("1234567890")], path=path, max_length=6, truncate=True)
    assert values(results) == pytest.approx([plain(path, "67890!")[0].item()], abs=1e-4)


def test_a_response_can_not_end_its_own_turn(write: Callable[..., str]) -> None:
    path = write()
    theirs = tokenizer()
    theirs.split_special_tokens = False  # as pretrained ones are
    theirs.save_pretrained(path)
    spelt = plain(path, "<user>Q?<assistant>4<eos>!")[0].item()  # `tokenizer` reads <eos> as five characters
    assert values(model([sample("4<eos>")], path=path)) == pytest.approx([spelt], abs=1e-4)


# --- steps ------------------------------------------------------------------------------------------------------------


def test_steps_end_before_their_separator_and_blank_ones_are_none() -> None:
    assert step_spans("a b\n\ncd\n\n\n\n e", "\n\n") == [(0, 3), (5, 7), (11, 13)]
    assert step_spans("\n\n", "\n\n") == []
    assert step_spans("one", "\n\n") == [(0, 3)]


STEPS = "2+2=4\n\nso 5\n\n"
ENDS = [5, 11]  # "2+2=4", "2+2=4\n\nso 5"


def test_a_sequence_classifier_scores_every_prefix_that_ends_with_a_step(write: Callable[..., str]) -> None:
    path = write()
    (result,) = model([sample(STEPS)], path=path, kind="steps")
    assert isinstance(result, RewardResult)
    assert result.value == 0.0
    assert result.step_scores is not None
    assert [end for end, _ in result.step_scores] == ENDS
    expected = [plain(path, f"<user>Q?<assistant>{STEPS[:end]}!")[0].item() for end in ENDS]
    assert [each for _, each in result.step_scores] == pytest.approx(expected, abs=1e-4)


def test_a_token_classifier_scores_the_token_after_each_step(write: Callable[..., str]) -> None:
    path = write(tokens=True, labels=2)
    given = [sample("longer than the other\n\none"), sample(STEPS)]
    _, result = model(given, path=path, kind="steps", step_token="<extra_0>", label=1, activation="softmax")
    assert isinstance(result, RewardResult)
    assert result.step_scores is not None
    assert [end for end, _ in result.step_scores] == ENDS
    # 0 <user>, 1-2 Q?, 3 <assistant>, 4-8 2+2=4, 9 <extra_0>, 10-13 so 5, 14 <extra_0>
    logits = plain(path, "<user>Q?<assistant>2+2=4<extra_0>so 5<extra_0>", tokens=True)
    expected = logits.softmax(-1)[[9, 14], 1].tolist()
    assert [each for _, each in result.step_scores] == pytest.approx(expected, abs=1e-4)


def test_without_a_token_of_its_own_the_separator_is_what_a_token_classifier_scores(write: Callable[..., str]) -> None:
    path = write(tokens=True, template=None)
    (result,) = model([sample(STEPS)], path=path, kind="steps")
    assert isinstance(result, RewardResult)
    assert result.step_scores is not None
    # 0-1 Q?, 2-6 2+2=4, 7-8 the separator, 9-12 so 5, 13-14 the separator
    logits = plain(path, "Q?2+2=4\n\nso 5\n\n", tokens=True)
    assert [each for _, each in result.step_scores] == pytest.approx(logits[[8, 14], 0].tolist(), abs=1e-4)


def test_the_scores_of_steps_come_to_the_tokens_that_hold_their_last_characters() -> None:
    words = ["2+2", "=4\n\n", "so", " 5", "\n\n"]  # of the policy: a token may hold the end of a step and more
    places = step_tokens(range(5), STEPS, ENDS, lambda ids: "".join(words[each] for each in ids))
    assert places == [1, 3]


@pytest.mark.parametrize(
    ("aggregate", "value"),
    [
        ("none", lambda a, b: 0.0),
        ("last", lambda a, b: b),
        ("min", min),
        ("mean", lambda a, b: (a + b) / 2),
        ("product", lambda a, b: a * b),
    ],
)
def test_the_value_of_steps_is_their_aggregate(
    write: Callable[..., str], aggregate: Any, value: Callable[[float, float], float]
) -> None:
    (result,) = model([sample(STEPS)], path=write(), kind="steps", activation="sigmoid", aggregate=aggregate)
    assert isinstance(result, RewardResult)
    assert result.step_scores is not None
    (_, first), (_, second) = result.step_scores
    assert result.value == pytest.approx(value(first, second))


def test_a_response_without_steps_has_no_reward(write: Callable[..., str]) -> None:
    blank, good = model([sample("\n\n  "), sample("a")], path=write(), kind="steps")
    assert isinstance(blank, ValueError)
    assert "has no step" in str(blank)
    assert isinstance(good, RewardResult)


def test_a_cut_row_keeps_its_steps_or_has_no_reward(write: Callable[..., str]) -> None:
    path = write(tokens=True)
    options: dict[str, Any] = {"path": path, "kind": "steps", "step_token": "<extra_0>", "truncate": True}
    (result,) = model([sample(STEPS)], max_length=8, **options)
    assert isinstance(result, RewardResult)
    assert result.step_scores is not None
    logits = plain(path, "=4<extra_0>so 5<extra_0>", tokens=True)
    assert [each for _, each in result.step_scores] == pytest.approx(logits[[2, 7], 0].tolist(), abs=1e-4)
    (lost,) = model([sample(STEPS)], max_length=5, **options)
    assert "15 tokens, and within the last max_length=5 is not every step" in str(lost)


# --- what is no reward model ------------------------------------------------------------------------------------------


def test_a_folder_with_a_pickle_alone_is_refused(write: Callable[..., str]) -> None:
    folder = Path(write())
    weights = AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        model([sample("4")], path=str(folder))


def test_a_path_without_a_model_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, reason in (("nothing", "there is no folder"), ("file", "is a file"), ("", "has no config.json")):
        path = str(tmp_path / name) if name else str(tmp_path)
        with pytest.raises(ModelError, match=reason) as raised:
            model([sample("4")], path=path)
        assert repr(path) in str(raised.value)
        assert "save_pretrained" in str(raised.value)
        assert "model.path" not in str(raised.value)


def test_a_causal_model_is_refused(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(vocab_size=23, **SHAPE)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is no reward model: its config.json names \['LlamaForCausalLM'\]"):
        model([sample("4")], path=str(tmp_path))


def test_a_model_without_a_trained_head_is_refused(write: Callable[..., str]) -> None:
    from safetensors.torch import load_file, save_file

    file = Path(write()) / "model.safetensors"
    weights = load_file(file)
    save_file({name: value for name, value in weights.items() if name != "score.weight"}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"has no weights for score.weight: with random ones"):
        model([sample("4")], path=str(file.parent))


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (True, {}, "scores tokens: set kind=steps"),
        (True, {"kind": "steps", "step_token": "<extra_9>"}, "'<extra_9>' is no token of the reward model"),
        (False, {"activation": "softmax"}, "has one label, its share is always 1"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(
    write: Callable[..., str], tokens: bool, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        model([sample("4")], path=write(tokens=tokens), **options)


# --- in a run ---------------------------------------------------------------------------------------------------------


def test_a_model_is_loaded_once(write: Callable[..., str]) -> None:
    path = write()
    first: Classifier = load_classifier(path, "auto", "cpu")
    assert load_classifier(path, "float32", "cpu") is first
    assert load_classifier(path, "bfloat16", "cpu").model.dtype == torch.bfloat16


def test_the_runner_scores_in_this_process(write: Callable[..., str]) -> None:
    path = write()
    judges = make_judges(
        [RewardFunctionConfig(name="model", kwargs={"path": path})], plugins=["grpo_lib.rewards.model"]
    )
    samples = [sample("4"), sample("x" * 100), sample("5")]
    scores = score(samples, Reward(judges=judges, settings=RewardConfig(max_failed=1.0)))
    alone = values(model([samples[0], samples[2]], path=path))
    assert [scores.values[0], scores.values[2]] == pytest.approx(alone, abs=1e-4)
    assert scores.values[1] is None


def test_looking_for_the_function_by_name_does_not_import_torch() -> None:
    code = "import sys, grpo_lib.rewards.model, grpo_lib.rewards.endpoint; print({'torch', 'httpx'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
