from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    Qwen2Config,
    Qwen3Config,
)

from grpo_lib.data.ragged import Ragged
from grpo_lib.errors import ModelError
from grpo_lib.generation.base import STOP, Request, Sampling
from grpo_lib.generation.local import LocalEngine
from grpo_lib.generation.sampling import choose
from grpo_lib.seeds import uniforms
from grpo_lib.training.digest import weights_digest

pytestmark = pytest.mark.usefixtures("one_thread")
VOCABULARY = 19
EOS = 1
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "intermediate_size": 32,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SMALL, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2 with biases": Qwen2Config(**SMALL, num_key_value_heads=2),
    "llama": LlamaConfig(**SMALL, num_key_value_heads=4),
    "llama with a stretched rotation and biases": LlamaConfig(
        **SMALL,
        num_key_value_heads=2,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    ),
    "gemma": GemmaConfig(**SMALL, num_key_value_heads=1),
    "gemma3 with a window of 4": Gemma3TextConfig(
        **SMALL, num_key_value_heads=1, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    ),
}
PROMPTS = [[5, 6, 7, 8, 9], [3], [4, 4], [10, 11, 12, 13, 14, 15, 16]]
SAMPLING = Sampling(temperature=0.7, max_new_tokens=12)
SAMPLING_AT_1 = Sampling(temperature=1.0, max_new_tokens=12)


def make_model(name="qwen3", seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="sdpa").eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias") or "norm" in parameter_name:  # they start as zeros and ones
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.2)
    return model


FAST = [name for name in CONFIGS if name.startswith(("qwen", "llama"))]


def make_engine(name="qwen3", seed=0, **options):
    return LocalEngine(make_model(name, seed), eos_token_ids=[EOS], **options)


def ragged(prompts):
    offsets = torch.tensor([0, *np.cumsum([len(prompt) for prompt in prompts])])
    ids = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32)
    return Ragged(values=ids, offsets=offsets)


def generate(engine, prompts=PROMPTS, n=3, sampling=SAMPLING, seeds=None, on_progress=None):
    seeds = torch.arange(len(prompts) * n) if seeds is None else seeds
    return engine.generate(Request(prompts=ragged(prompts), seeds=seeds, n=n, sampling=sampling), on_progress)


def rows_of(made):
    responses = made.responses
    return [responses.values[start:end].tolist() for start, end in pairwise(responses.offsets.tolist())]


@torch.no_grad()
def plain_logprobs(model, prompt, response, temperature):
    """One forward pass over one unpadded row."""
    logits = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0]
    logprobs = (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("max_batch_rows", [64, 5])
def test_logprobs_equal_a_plain_forward_pass_for_prompts_of_different_lengths(name, max_batch_rows):
    made = generate(make_engine(name, max_batch_rows=max_batch_rows))
    model = make_model(name)
    expected = [plain_logprobs(model, PROMPTS[row // 3], ids, 0.7) for row, ids in enumerate(rows_of(made))]
    torch.testing.assert_close(made.logprobs, torch.cat(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_gives_the_tokens_of_transformers_generate(name):
    made = generate(make_engine(name), n=1, sampling=Sampling(temperature=0, max_new_tokens=12))
    model = make_model(name)
    for prompt, ids in zip(PROMPTS, rows_of(made), strict=True):
        output = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=12
        )
        assert ids == output[0, len(prompt) :].tolist()


def test_greedy_logprobs_are_of_the_undivided_logits():
    made = generate(make_engine(), PROMPTS[:1], n=1, sampling=Sampling(temperature=0, max_new_tokens=6))
    expected = plain_logprobs(make_model(), PROMPTS[0], rows_of(made)[0], 1.0)
    torch.testing.assert_close(made.logprobs, expected, atol=1e-5, rtol=0)


def test_a_cache_that_has_to_grow_changes_nothing(monkeypatch):
    expected = rows_of(generate(make_engine()))
    monkeypatch.setattr("grpo_lib.generation.local.SPARE_TOKENS", 1)
    assert rows_of(generate(make_engine())) == expected


def test_equal_seeds_give_equal_rows_whatever_the_batches():
    expected = rows_of(generate(make_engine()))
    assert any(len(set(map(tuple, expected[row : row + 3]))) > 1 for row in range(0, 12, 3))
    for max_batch_rows in (1, 4, 7):
        assert rows_of(generate(make_engine(max_batch_rows=max_batch_rows))) == expected


def test_equal_seeds_give_equal_rows_whatever_the_order_of_prompts():
    expected = rows_of(generate(make_engine()))
    seeds = torch.arange(12).reshape(4, 3).flip(0).flatten()
    flipped = rows_of(generate(make_engine(), PROMPTS[::-1], seeds=seeds))
    assert [flipped[row : row + 3] for row in range(9, -1, -3)] == [expected[row : row + 3] for row in range(0, 12, 3)]


def test_other_seeds_give_other_rows():
    engine = make_engine()
    first, second = generate(engine), generate(engine, seeds=torch.arange(12) + 2**40)
    assert rows_of(first) != rows_of(second)


def test_finished_rows_end_with_eos_and_others_are_cut_at_the_limit():
    made = generate(make_engine(), n=16, sampling=Sampling(temperature=1.0, max_new_tokens=8))
    assert 0 < int((made.finish == STOP).sum()) < 64
    for ids, finished in zip(rows_of(made), (made.finish == STOP).tolist(), strict=True):
        assert EOS not in ids[:-1]
        assert (ids[-1] == EOS) == finished
        assert finished or len(ids) == 8


def test_any_of_several_eos_tokens_ends_a_row():
    engine = LocalEngine(make_model(), eos_token_ids=[EOS, 7])
    made = generate(engine, n=16)
    endings = {ids[-1] for ids, finished in zip(rows_of(made), (made.finish == STOP).tolist(), strict=True) if finished}
    assert endings == {EOS, 7}


def test_types_and_shapes_are_those_of_the_contract():
    made = generate(make_engine())
    assert made.responses.values.dtype == torch.int32
    assert made.responses.offsets.dtype == torch.int64 and made.responses.offsets.shape == (13,)
    assert made.logprobs.dtype == torch.float32 and made.logprobs.shape == made.responses.values.shape
    assert made.finish.dtype == torch.uint8 and made.finish.shape == (12,)
    assert int(made.responses.offsets[-1]) == len(made.responses.values)


def test_progress_counts_up_to_all_rows_and_tokens():
    calls = []
    made = generate(make_engine(max_batch_rows=5), on_progress=lambda *call: calls.append(call))
    assert calls == sorted(calls)
    assert calls[-1] == (12, 12, len(made.responses.values))


def test_loaded_weights_change_the_rows_and_the_digest_and_can_be_changed_back():
    engine = make_engine(seed=0)
    rows, digest = rows_of(generate(engine)), engine.digest()
    engine.load(make_model(seed=1).state_dict())
    assert rows_of(generate(engine)) == rows_of(generate(make_engine(seed=1))) != rows
    assert engine.digest() == weights_digest(make_model(seed=1).state_dict()) != digest
    engine.load(make_model(seed=0).state_dict())
    assert rows_of(generate(engine)) == rows and engine.digest() == digest


def test_loading_copies_and_does_not_share_weights():
    engine, other = make_engine(seed=0), make_model(seed=1)
    engine.load(other.state_dict())
    rows = rows_of(generate(engine))
    with torch.no_grad():
        other.model.embed_tokens.weight.zero_()
    assert rows_of(generate(engine)) == rows


def test_a_tied_head_may_be_listed_or_not():
    state = make_model(seed=1).state_dict()
    bare = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    assert weights_digest(state) == weights_digest(bare)
    engine = make_engine(seed=0)
    engine.load(bare)
    assert rows_of(generate(engine)) == rows_of(generate(make_engine(seed=1)))


def test_an_untied_head_is_part_of_the_digest():
    model = make_model("llama")
    before = weights_digest(model.state_dict())
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert weights_digest(model.state_dict()) != before


def test_weights_of_another_model_are_refused_and_leave_the_engine_as_it_was():
    engine = make_engine()
    digest = engine.digest()
    with pytest.raises(ModelError, match="unknown: transformer"):
        engine.load(make_model("gpt2").state_dict())
    assert engine.digest() == digest == weights_digest(engine._model.state_dict())


def test_weights_without_the_head_are_refused_where_it_is_not_tied():
    state = {name: tensor for name, tensor in make_model("llama").state_dict().items() if name != "lm_head.weight"}
    with pytest.raises(ModelError, match=r"missing: lm_head\.weight"):
        make_engine("llama").load(state)


@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_the_llama_family_are_decoded_directly(name):
    assert (make_engine(name)._fast is not None) == (name in FAST)


@pytest.mark.parametrize("name", FAST)
def test_the_fast_decoder_follows_weights_that_are_loaded(name):
    engine, other = make_engine(name), make_model(name, seed=1)
    engine.load(other.state_dict())
    made = generate(engine)
    expected = [plain_logprobs(other, PROMPTS[row // 3], ids, 0.7) for row, ids in enumerate(rows_of(made))]
    torch.testing.assert_close(made.logprobs, torch.cat(expected), atol=1e-5, rtol=0)


def test_reduced_precision_is_decoded_directly_too():
    model = make_model().to(torch.bfloat16)
    made = generate(LocalEngine(model, eos_token_ids=[EOS]))
    expected = [plain_logprobs(model, PROMPTS[row // 3], ids, 0.7) for row, ids in enumerate(rows_of(made))]
    assert float((made.logprobs - torch.cat(expected).float()).abs().mean()) < 0.03


def test_a_model_that_the_fast_decoder_does_not_compute_is_left_to_transformers_and_said(caplog):
    model = make_model("llama")
    norm = model.model.layers[1].input_layernorm
    norm.register_forward_hook(lambda module, inputs, output: 1.1 * output)
    made = generate(LocalEngine(model, eos_token_ids=[EOS]))
    assert "LlamaForCausalLM is decoded by Transformers" in caplog.text
    expected = [plain_logprobs(model, PROMPTS[row // 3], ids, 0.7) for row, ids in enumerate(rows_of(made))]
    torch.testing.assert_close(made.logprobs, torch.cat(expected), atol=1e-5, rtol=0)


def test_a_stop_string_that_ends_with_a_space_is_found_where_a_text_may_not_begin_with_one():
    """As in tokenizers of SentencePiece: the first token of a text loses its leading space."""

    class Stripping:
        def __len__(self):
            return VOCABULARY

        def decode(self, ids, **options):
            return "".join(" " if token % 2 else "x" for token in ids).removeprefix(" ")

        def batch_decode(self, rows):
            return [self.decode(row) for row in rows]

    sampling = Sampling(temperature=1.0, max_new_tokens=12, stop=("x ",))
    free = rows_of(generate(make_engine(), sampling=SAMPLING_AT_1))
    engine = LocalEngine(make_model(), eos_token_ids=[EOS], tokenizer=Stripping())
    ends = [next((at + 2 for at in range(len(ids) - 1) if ids[at] % 2 < ids[at + 1] % 2), None) for ids in free]
    assert rows_of(generate(engine, sampling=sampling)) == [ids[:end] for ids, end in zip(free, ends, strict=True)]


def test_a_recurrent_model_is_refused():
    model = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=19, hidden_size=8, num_hidden_layers=1))
    with pytest.raises(ModelError, match="full or sliding-window attention"):
        LocalEngine(model, eos_token_ids=[EOS])


def test_sampled_tokens_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0])
    draws = 20_000
    uniform = torch.from_numpy(uniforms(np.arange(draws), 3))
    tokens, logprobs = choose(probabilities.log().expand(draws, -1), SAMPLING_AT_1, uniform, None)
    counts = tokens.bincount(minlength=5).double()
    assert counts[4] == 0
    expected = draws * probabilities[:4].double()
    chi_square = float(((counts[:4] - expected) ** 2 / expected).sum())
    assert chi_square < 16.27  # 99.9 % of samples with 3 degrees of freedom
    torch.testing.assert_close(logprobs, probabilities.log()[tokens])


def test_uniforms_of_steps_and_of_neighbouring_seeds_are_independent():
    numbers = np.stack([uniforms(np.arange(5000), step) for step in range(4)])
    assert numbers.min() >= 0 and numbers.max() < 1
    assert np.abs(numbers.mean(1) - 0.5).max() < 0.02
    correlations = np.corrcoef(np.concatenate([numbers, numbers[:, ::-1], np.roll(numbers, 1, axis=1)]))
    assert np.abs(correlations - np.eye(12)).max() < 0.06


def test_broken_logits_show_in_the_logprobs():
    tokens, logprobs = choose(
        torch.full((1, 3), float("nan")), SAMPLING_AT_1, torch.tensor([0.5], dtype=torch.float64), None
    )
    assert tokens.tolist() == [2] and bool(logprobs.isnan().all())


def test_the_distribution_of_a_whole_model_is_sampled():
    model = make_model()
    made = generate(make_engine(), [[5, 6]], n=4096, sampling=Sampling(temperature=1.0, max_new_tokens=1))
    with torch.no_grad():
        probabilities = model(input_ids=torch.tensor([[5, 6]])).logits[0, -1].softmax(-1).double()
    counts = made.responses.values.bincount(minlength=VOCABULARY).double()
    chi_square = float(((counts - 4096 * probabilities) ** 2 / (4096 * probabilities)).sum())
    assert chi_square < 42.31  # 99.9 % of samples with 18 degrees of freedom


def test_sleeping_and_waking_change_nothing():
    engine = make_engine()
    rows = rows_of(generate(engine))
    engine.sleep()
    engine.wake()
    assert rows_of(generate(engine)) == rows
    engine.close()
