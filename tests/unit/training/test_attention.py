from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.training import attention
from grpo_lib.training.attention import check_packing, use_packed_attention
from grpo_lib.training.microbatches import Sequences, micro_batch
from grpo_lib.training.rectangles import PackedRows, rectangle_attention

SHAPE = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
MODELS = ["qwen3", "llama", "gpt2", "gemma", "gemma2", "mistral"]
LENGTHS = torch.tensor([20, 3, 33, 34, 19, 1 + 1, 12, 7])
Make = Callable[[str], Any]


@pytest.fixture
def make(make_model: Make) -> Make:
    """Adds to the models of `make_model` those with soft-capping, and with a window in every layer."""

    def build(name: str) -> Any:
        torch.manual_seed(3)
        if name == "gemma2":
            caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": None, "query_pre_attn_scalar": 8}
            return Gemma2ForCausalLM(Gemma2Config(**SHAPE, **caps, sliding_window=5)).eval()
        if name == "mistral":
            return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=6)).eval()
        return make_model(name)

    return build


def rows_of(lengths: Tensor, seed: int = 0) -> Sequences:
    """Random tokens: prompts of one, the rest is response."""
    generator = torch.Generator().manual_seed(seed)
    first, rest = torch.ones_like(lengths), lengths - 1

    def tokens(counts: Tensor) -> Ragged:
        values = torch.randint(0, 23, (int(counts.sum()),), generator=generator)
        return Ragged(values=values, offsets=lengths_to_offsets(counts))

    return Sequences(prompts=tokens(first), responses=tokens(rest))


def logprobs(model: Any, rows: Sequences, indices: Tensor, layout: Any) -> tuple[Tensor, Tensor]:
    """Hidden states ``[n, hidden]`` and log-probs ``[n]`` of the responses."""
    batch = micro_batch(rows, indices, layout)
    hidden = batch.predicting(model.base_model(**batch.model_inputs()).last_hidden_state.flatten(0, 1))
    return hidden, model.lm_head(hidden).log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_score_and_learn_as_one_row_at_a_time(make: Make, name: str) -> None:
    model, rows = make(name), rows_of(LENGTHS)
    weights = torch.linspace(-1, 1, int(rows.responses.offsets[-1]))
    model.set_attn_implementation("eager")  # SDPA leaves out Gemma 2's soft-capping
    alone = [logprobs(model, rows, torch.tensor([i]), "padded") for i in range(len(LENGTHS))]
    expected_hidden, expected = (torch.cat(parts) for parts in zip(*alone, strict=True))
    expected_gradients = gradients(model, (weights * expected).sum() / 10)
    use_packed_attention(model)
    hidden, scored = logprobs(model, rows, torch.arange(len(LENGTHS)), "packed")
    torch.testing.assert_close(hidden, expected_hidden, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scored, expected, atol=1e-5, rtol=1e-5)
    packed_gradients = gradients(model, (weights * scored).sum() / 10)
    assert packed_gradients.keys() == expected_gradients.keys()
    for parameter, gradient in packed_gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[parameter], atol=1e-5, rtol=1e-4, msg=parameter)


def shared(rows: Sequences) -> Sequences:
    """Rows of three prompts, which they share, in no order; the first prompt is nobody's."""
    generator, lengths = torch.Generator().manual_seed(4), torch.tensor([2, 6, 1, 9])
    values = torch.randint(0, 23, (int(lengths.sum()),), generator=generator)
    return Sequences(
        prompts=Ragged(values=values, offsets=lengths_to_offsets(lengths)),
        responses=rows.responses,
        prompt_of=torch.tensor([3, 1, 3, 2, 1, 2, 3, 3]),
    )


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_share_their_prompts_score_and_learn_as_one_row_at_a_time(make: Make, name: str) -> None:
    model, rows = make(name), shared(rows_of(LENGTHS))
    generator = torch.Generator().manual_seed(6)
    weights = torch.rand(int(rows.responses.offsets[-1]), generator=generator) - 0.5
    model.set_attn_implementation("eager")
    alone = [logprobs(model, rows, torch.tensor([i]), "padded") for i in range(len(LENGTHS))]
    expected_hidden, expected = (torch.cat(parts) for parts in zip(*alone, strict=True))
    expected_gradients = gradients(model, (weights * expected).sum() / 10)
    use_packed_attention(model)
    batch = micro_batch(rows, torch.arange(len(LENGTHS)), "packed")
    assert batch.tokens == 6 + 1 + 9 + int(rows.responses.offsets[-1])
    hidden, scored = logprobs(model, rows, torch.arange(len(LENGTHS)), "packed")
    spread = rows.responses.with_values(weights).gather(batch.rows).values
    parts = rows.responses.with_values(torch.arange(len(weights))).gather(batch.rows).values
    torch.testing.assert_close(hidden, expected_hidden[parts], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scored, expected[parts], atol=1e-5, rtol=1e-5)
    packed_gradients = gradients(model, (spread * scored).sum() / 10)
    assert packed_gradients.keys() == expected_gradients.keys()
    for parameter, gradient in packed_gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[parameter], atol=1e-5, rtol=1e-4, msg=parameter)


@pytest.mark.parametrize("name", MODELS)
def test_a_row_does_not_see_the_others(make: Make, name: str) -> None:
    model, rows, other = make(name), rows_of(LENGTHS), rows_of(LENGTHS, seed=1)
    use_packed_attention(model)
    changed = Sequences(
        prompts=rows.prompts,
        responses=rows.responses.with_values(
            torch.where(rows.responses.row_ids() == 2, other.responses.values, rows.responses.values)
        ),
    )
    before, after = (logprobs(model, each, torch.arange(len(LENGTHS)), "packed")[0] for each in (rows, changed))
    of_changed = rows.responses.row_ids() == 2
    assert torch.equal(before[~of_changed], after[~of_changed])
    assert not torch.equal(before[of_changed], after[of_changed])


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_batch_without_rows_runs_and_its_gradient_is_0(make: Make, layout: str) -> None:
    model = make("qwen3")
    if layout == "packed":
        use_packed_attention(model)
    _, nothing = logprobs(model, rows_of(LENGTHS), torch.tensor([], dtype=torch.int64), layout)
    found = gradients(model, nothing.sum())
    assert len(found) == len(list(model.parameters()))
    assert all(not bool(each.any()) for each in found.values())


def test_gradient_checkpointing_gives_the_same_gradient(make: Make) -> None:
    model, rows = make("gemma"), rows_of(LENGTHS)
    use_packed_attention(model)
    plain = gradients(model, logprobs(model, rows, torch.arange(len(LENGTHS)), "packed")[1].sum())
    model.gradient_checkpointing_enable()
    again = gradients(model.train(), logprobs(model, rows, torch.arange(len(LENGTHS)), "packed")[1].sum())
    assert all(torch.equal(again[name], each) for name, each in plain.items())


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stands in for the GPU's kernel and keeps what it was called with."""
    calls: list[dict[str, Any]] = []

    def varlen(
        q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, _: Tensor, longest: int, __: int, **options: Any
    ) -> Any:
        calls.append({"dtype": q.dtype, "offsets": offsets.tolist(), "longest": longest, **options})
        left = options["window_size"][0]
        window = None if left == -1 else left + 1
        return rectangle_attention(q, k, v, PackedRows(offsets), options["scale"], window, None)

    monkeypatch.setattr(attention, "varlen_attn", varlen)
    monkeypatch.setattr(attention, "_has_kernel", lambda query, value: query.dtype == torch.bfloat16)
    return calls


def test_the_kernel_gets_offsets_windows_and_the_precision_of_autocast(
    make: Make, kernel: list[dict[str, Any]]
) -> None:
    model = make("gemma")
    use_packed_attention(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs(model, rows_of(torch.tensor([3, 8])), torch.arange(2), "packed")
    assert [call["window_size"] for call in kernel] == [(3, 0), (-1, 0)]  # Gemma's window of 4: itself and 3 before
    assert all(call["dtype"] == torch.bfloat16 and call["enable_gqa"] for call in kernel)
    assert all((call["offsets"], call["longest"]) == ([0, 3, 11], 8) for call in kernel)
    check_packing(model, autocast=torch.bfloat16)  # with a shared prompt
    assert kernel[-1]["offsets"] == [0, 5, 14, 17]


@pytest.mark.parametrize("name", MODELS)
def test_models_that_pack_pass_the_check(make: Make, name: str) -> None:
    model = make(name)
    use_packed_attention(model)
    check_packing(model)
    assert model.config._attn_implementation == "packed"
