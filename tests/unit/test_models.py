import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from grpo_lib.config import SmallModelConfig
from grpo_lib.errors import ModelError
from grpo_lib.models import load_model, load_tokenizer, make_small_model, make_tokenizer

TAGS = ("<nums>", "<think>")
ALPHABET = "0123456789+-=,;xv "
TINY = SmallModelConfig(hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_size=16)


def make(seed=0):
    return make_small_model(TINY, vocab_size=20, eos_id=1, pad_id=0, max_positions=64, seed=seed)


def test_a_small_model_has_the_configured_shape_and_tied_float32_weights():
    model = make()
    assert model.config.max_position_embeddings == 64
    assert model.config.rope_parameters["rope_theta"] == 10_000
    assert (model.config.eos_token_id, model.config.pad_token_id) == (1, 0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert float(model.model.layers[0].mlp.up_proj.weight.detach().std()) == pytest.approx(0.08, rel=0.15)


def test_a_small_model_depends_on_its_seed_alone_and_leaves_the_random_state():
    torch.manual_seed(5)
    first = make(seed=3).state_dict()
    following = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(following, torch.rand(1))
    assert all(torch.equal(tensor, first[name]) for name, tensor in make(seed=3).state_dict().items())
    assert not torch.equal(make(seed=4).lm_head.weight, first["lm_head.weight"])


def test_tags_and_characters_are_one_token_each():
    tokenizer = make_tokenizer(TAGS, ALPHABET)
    ids = tokenizer("<nums>30,12<think>30+12=42 x")["input_ids"]
    assert len(ids) == 1 + 5 + 1 + 10
    assert tokenizer.convert_ids_to_tokens(ids)[:4] == ["<nums>", "3", "0", ","]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert len(tokenizer) == 2 + 2 + len(ALPHABET)


@pytest.mark.parametrize("alphabet", [ALPHABET, None])
def test_decoding_keeps_tags_and_leaves_out_pad_and_eos(alphabet):
    tokenizer = make_tokenizer(TAGS, alphabet)
    text = "<nums>3 , 1<think>  x"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode([0, 0, *ids, 1], skip_special_tokens=True) == text
    assert tokenizer.decode([*ids, 1]) == text + "<eos>"


def test_a_character_outside_the_alphabet_is_not_dropped_silently():
    with pytest.raises(Exception, match="UNK"):
        make_tokenizer(TAGS, ALPHABET)("12?3")


BYTES = make_tokenizer(TAGS, None)


@settings(deadline=None, max_examples=200)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_byte_tokenizer(text):
    assert BYTES.decode(BYTES(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize("text", ["<eos>", "a<pad>b <think>", "n't , . 's", "\x00\r\n\t\u200b", "日本語 🎲"])
def test_awkward_text_survives_the_byte_tokenizer(text):
    ids = BYTES(text)["input_ids"]
    assert BYTES.decode(ids, skip_special_tokens=True) == text
    assert not {0, 1} & set(ids)


@pytest.mark.parametrize("alphabet", [ALPHABET, None])
def test_a_saved_tokenizer_comes_back_the_same(tmp_path, alphabet):
    tokenizer = make_tokenizer(TAGS, alphabet)
    make().save_pretrained(tmp_path)  # beside a model, whose type must not change the tokenizer's
    tokenizer.save_pretrained(tmp_path)
    text = "<nums>3 , 1<think>  x"
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        ids = loaded(text)["input_ids"]
        assert ids == tokenizer(text)["input_ids"]
        assert loaded.decode([*ids, 1, 0], skip_special_tokens=True) == text
        assert len(loaded) == len(tokenizer) and loaded.eos_token_id == 1 and loaded.pad_token_id == 0


def test_a_saved_model_comes_back_the_same(tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), torch.float32, "cpu")
    assert not loaded.training
    assert loaded.config._attn_implementation == "sdpa"
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert load_model(str(tmp_path), torch.bfloat16, "cpu").dtype == torch.bfloat16


def test_a_missing_folder_is_named(tmp_path):
    for load in (lambda path: load_model(path, torch.float32, "cpu"), load_tokenizer):
        with pytest.raises(ModelError, match=r"there is no folder .*missing"):
            load(str(tmp_path / "missing"))


def test_an_empty_folder_names_what_it_lacks(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(str(tmp_path), torch.float32, "cpu")
    with pytest.raises(ModelError, match=r"no tokenizer_config\.json or tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_a_file_is_not_a_folder(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelError, match="is a file"):
        load_model(str(path), torch.float32, "cpu")


@pytest.mark.parametrize("break_it", ["config", "weights", "pickle"])
def test_a_broken_model_says_so_without_a_traceback(tmp_path, break_it):
    make().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    if break_it == "config":
        (tmp_path / "config.json").write_text("{")
    elif break_it == "weights":
        weights.write_bytes(weights.read_bytes()[:100])
    else:
        weights.unlink()
        torch.save(make().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="the model can't be loaded from folder"):
        load_model(str(tmp_path), torch.float32, "cpu")


def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    make().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit('run')")
    with pytest.raises(ModelError, match="code of its own"):
        load_model(str(tmp_path), torch.float32, "cpu")


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    tokenizer = make_tokenizer(TAGS, ALPHABET)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        load_tokenizer(str(tmp_path))
