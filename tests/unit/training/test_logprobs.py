from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lib.errors import NonFiniteError
from grpo_lib.training import logprobs
from grpo_lib.training.logprobs import token_logprobs, token_logprobs_and_kl, token_sum_squared_probs
from grpo_lib.training.microbatches import Sequences, micro_batch
from grpo_lib.training.scoring import score

MakeModel = Callable[..., Any]
MakeSequences = Callable[[int, int], Sequences]
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])


def logits_one_row_at_a_time(model: Any, sequences: Sequences, temperature: float) -> Tensor:
    """``float64[N, V]``: the model's own logits, no padding, no chunks."""
    rows = []
    for row in range(sequences.responses.rows):
        alone = sequences.gather(torch.tensor([row]))
        prompt, response = alone.prompts.values.long(), alone.responses.values.long()
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0].double() / temperature
        rows.append(logits[len(prompt) - 1 : -1])
    return torch.cat(rows)


@torch.no_grad()
def one_row_at_a_time(model: Any, sequences: Sequences, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies."""
    scores, entropies = [], []
    logits = logits_one_row_at_a_time(model, sequences, temperature)
    for z, token in zip(logits, sequences.responses.values.tolist(), strict=True):
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
    logits = logprobs._logits

    def seen(hidden: Tensor, *arguments: Any) -> Tensor:
        sizes.append(len(hidden))
        return logits(hidden, *arguments)

    monkeypatch.setattr(logprobs, "_logits", seen)

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


# --- whole distributions ----------------------------------------------------------------------------------------------


def perturbed(model: Any) -> Any:
    """The model with other weights."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("tokens_a_chunk", [1, 5, 10_000])
def test_the_exact_kl_and_its_gradient_are_those_of_the_full_logits_of_both_models(
    make_model: MakeModel,
    make_sequences: MakeSequences,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    tokens_a_chunk: int,
) -> None:
    sequences = make_sequences(8, 5)
    reference = perturbed(make_model(architecture))
    model = make_model(architecture)
    monkeypatch.setattr(logprobs, "CHUNK_VALUES", 2 * tokens_a_chunk * len(model.get_output_embeddings().weight))
    scored, exact = token_logprobs_and_kl(model, reference, micro_batch(sequences, torch.arange(5)), 0.7)
    weights = torch.linspace(-1, 1, len(scored.logprobs))
    (weights * (exact.full + scored.logprobs)).sum().backward()

    plain = make_model(architecture)
    log_p = logits_one_row_at_a_time(plain, sequences, 0.7).log_softmax(-1)
    with torch.no_grad():
        log_q = logits_one_row_at_a_time(reference, sequences, 0.7).log_softmax(-1)
    tokens = sequences.responses.values.long()[:, None]
    kl, lp = (log_p.exp() * (log_p - log_q)).sum(-1), log_p.gather(1, tokens).squeeze(1)
    (weights * (kl + lp)).sum().backward()

    assert float(kl.detach().min()) > 1e-3
    torch.testing.assert_close(exact.full.double(), kl, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scored.logprobs.double(), lp, rtol=0, atol=1e-5)
    torch.testing.assert_close(exact.ref_logprobs.double(), log_q.gather(1, tokens).squeeze(1), rtol=0, atol=1e-5)
    alone = token_logprobs(make_model(architecture), micro_batch(sequences, torch.arange(5)), 0.7)
    torch.testing.assert_close(scored.entropy, alone.entropy, rtol=0, atol=1e-6)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=5e-5)
    assert all(parameter.grad is None for parameter in reference.parameters())


def test_the_exact_kl_to_itself_is_0(make_model: MakeModel, make_sequences: MakeSequences) -> None:
    batch = micro_batch(make_sequences(2, 3), torch.arange(3))
    _, exact = token_logprobs_and_kl(make_model(), make_model(), batch, 1.0)
    assert float(exact.full.detach().abs().max()) < 1e-6


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("tokens_a_chunk", [1, 10_000])
def test_sums_of_squared_probabilities_are_those_of_the_full_logits(
    make_model: MakeModel,
    make_sequences: MakeSequences,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    tokens_a_chunk: int,
) -> None:
    model, sequences = make_model(architecture), make_sequences(8, 5)
    monkeypatch.setattr(logprobs, "CHUNK_VALUES", tokens_a_chunk * len(model.get_output_embeddings().weight))
    with torch.no_grad():
        found = token_sum_squared_probs(model, micro_batch(sequences, torch.arange(5)), 0.7)
        expected = logits_one_row_at_a_time(model, sequences, 0.7).softmax(-1).square().sum(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
