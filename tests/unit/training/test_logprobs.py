from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lib.errors import NonFiniteError
from grpo_lib.training import logprobs
from grpo_lib.training.logprobs import token_logprobs
from grpo_lib.training.microbatches import Sequences, micro_batch
from grpo_lib.training.scoring import score

MakeModel = Callable[..., Any]
MakeSequences = Callable[[int, int], Sequences]
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])


@torch.no_grad()
def one_row_at_a_time(model: Any, sequences: Sequences, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies from the model's own logits, no padding, no chunks."""
    scores, entropies = [], []
    for row in range(sequences.responses.rows):
        alone = sequences.gather(torch.tensor([row]))
        prompt, response = alone.prompts.values.long(), alone.responses.values.long()
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0].double() / temperature
        for place, token in enumerate(response.tolist()):
            z = logits[len(prompt) - 1 + place]
            scores.append(z[token] - z.logsumexp(0))
            entropies.append(z.logsumexp(0) - (z.softmax(0) * z).sum())
    return torch.stack(scores), torch.stack(entropies)


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_batched_log_probs_and_entropies_equal_those_of_one_row_at_a_time(
    make_model: MakeModel, make_sequences: MakeSequences, architecture: str, temperature: float
) -> None:
    model, sequences = make_model(architecture), make_sequences(3, 9)
    expected, entropy = one_row_at_a_time(model, sequences, temperature)
    for max_tokens in (18, 60, 10_000):
        got, got_entropy = score(model, sequences, temperature=temperature, max_tokens=max_tokens, autocast=None)
        torch.testing.assert_close(got.values.double(), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(got_entropy.values.double(), entropy, rtol=0, atol=1e-5)
        assert torch.equal(got.offsets, sequences.responses.offsets)
        assert (got.values.dtype, got_entropy.values.dtype) == (torch.float32, torch.float32)


def test_the_temperature_changes_log_probs(make_model: MakeModel, make_sequences: MakeSequences) -> None:
    model, sequences = make_model(), make_sequences(3, 4)
    cold, warm = (
        score(model, sequences, temperature=temperature, max_tokens=999, autocast=None)[1].values
        for temperature in (0.5, 2.0)
    )
    assert bool((cold < warm).all())  # a higher temperature has more entropy at every token


def test_scoring_keeps_no_graph_and_leaves_the_weights_alone(
    make_model: MakeModel, make_sequences: MakeSequences
) -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scored, _ = score(model, make_sequences(1, 3), temperature=1.0, max_tokens=999, autocast=None)
    assert not scored.values.requires_grad
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_broken_weights_are_an_error_and_not_a_score(make_model: MakeModel, make_sequences: MakeSequences) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(NonFiniteError, match="NaN or infinite; its weights are broken"):
        score(model, make_sequences(1, 3), temperature=1.0, max_tokens=999, autocast=None)


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("tokens_a_chunk", [1, 5])
def test_chunks_change_neither_values_nor_gradients(
    make_model: MakeModel,
    make_sequences: MakeSequences,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    tokens_a_chunk: int,
) -> None:
    sequences = make_sequences(8, 5)
    tokens = len(sequences.responses.values)
    batch = micro_batch(sequences, torch.arange(5))
    sizes: list[int] = []
    head = logprobs._head

    def seen(hidden: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        sizes.append(len(hidden))
        return head(hidden, *arguments)

    monkeypatch.setattr(logprobs, "_head", seen)

    def run(model: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        scored = token_logprobs(model, batch, 0.7)
        weights = torch.linspace(-1, 1, tokens)
        (weights @ scored.logprobs + (weights * scored.entropy).sum()).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return scored.logprobs.detach(), scored.entropy.detach(), gradients

    whole = run(make_model(architecture))
    assert sizes == [tokens]
    sizes.clear()
    model = make_model(architecture)
    monkeypatch.setattr(logprobs, "CHUNK_VALUES", tokens_a_chunk * len(model.get_output_embeddings().weight))
    chunked = run(model)
    assert set(sizes) <= {tokens_a_chunk, tokens % tokens_a_chunk} and len(sizes) >= tokens // tokens_a_chunk
    assert chunked[2].keys() == whole[2].keys() and len(whole[2]) > 10
    torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=5e-5)


def test_a_vocabulary_larger_than_a_chunk_is_done_a_token_at_a_time(
    make_model: MakeModel, make_sequences: MakeSequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sequences = make_model(), make_sequences(2, 3)
    whole, _ = score(model, sequences, temperature=1.0, max_tokens=999, autocast=None)
    monkeypatch.setattr(logprobs, "CHUNK_VALUES", 1)
    chunked, _ = score(model, sequences, temperature=1.0, max_tokens=999, autocast=None)
    torch.testing.assert_close(chunked.values, whole.values, rtol=0, atol=1e-6)


def test_log_probs_stay_float32_under_autocast(make_model: MakeModel, make_sequences: MakeSequences) -> None:
    model, sequences = make_model(), make_sequences(2, 3)
    exact, _ = score(model, sequences, temperature=1.0, max_tokens=999, autocast=None)
    reduced, entropy = score(model, sequences, temperature=1.0, max_tokens=999, autocast=torch.bfloat16)
    assert (reduced.values.dtype, entropy.values.dtype) == (torch.float32, torch.float32)
    difference = (reduced.values - exact.values).abs().max()
    assert 0 < difference < 0.1
