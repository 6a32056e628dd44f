from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from grpo_lib.errors import ModelError
from grpo_lib.training import logprobs
from grpo_lib.training.heads import check_head, head_of
from grpo_lib.training.logprobs import (
    Head,
    TokenScores,
    token_scores,
)
from grpo_lib.training.microbatches import MicroBatch, Sequences, micro_batch

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


def states(model: Any, batch: MicroBatch) -> Tensor:
    hidden: Tensor = model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1)[batch.predicts]


def scores_of(
    model: Any, sequences: Sequences, temperature: float, reference: Any = None, **options: bool
) -> TokenScores:
    """Of all response tokens, in one micro-batch."""
    batch, other = micro_batch(sequences, torch.arange(sequences.responses.rows)), None
    if reference is not None:
        with torch.no_grad():
            other = states(reference, batch), head_of(reference)
    return token_scores(states(model, batch), head_of(model), batch.targets, temperature, reference=other, **options)


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_batched_log_probs_and_entropies_equal_those_of_one_row_at_a_time(
    make_model: MakeModel, make_sequences: MakeSequences, architecture: str, temperature: float
) -> None:
    model, sequences = make_model(architecture), make_sequences(3, 9)
    expected, entropy = one_row_at_a_time(model, sequences, temperature)
    with torch.no_grad():
        got = scores_of(model, sequences, temperature)
    torch.testing.assert_close(got.logprobs.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.entropy.double(), entropy, rtol=0, atol=1e-5)
    assert (got.logprobs.dtype, got.entropy.dtype) == (torch.float32, torch.float32)


def test_the_temperature_changes_log_probs(make_model: MakeModel, make_sequences: MakeSequences) -> None:
    model, sequences = make_model(), make_sequences(3, 4)
    cold, warm = (scores_of(model, sequences, temperature).entropy for temperature in (0.5, 2.0))
    assert bool((cold < warm).all())  # a higher temperature has more entropy at every token


@torch.no_grad()
def test_broken_weights_give_nan_and_not_a_score(make_model: MakeModel, make_sequences: MakeSequences) -> None:
    model = make_model()
    model.model.norm.weight[3] = float("nan")
    scores = scores_of(model, make_sequences(1, 3), 1.0)
    assert bool(scores.logprobs.isnan().all()) and bool(scores.entropy.isnan().all())


@torch.no_grad()
def test_log_probs_stay_float32_under_autocast(make_model: MakeModel, make_sequences: MakeSequences) -> None:
    model, sequences = make_model(), make_sequences(2, 3)
    exact = scores_of(model, sequences, 1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reduced = scores_of(model, sequences, 1.0)
    assert (reduced.logprobs.dtype, reduced.entropy.dtype) == (torch.float32, torch.float32)
    difference = (reduced.logprobs - exact.logprobs).abs().max()
    assert 0 < difference < 0.1


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_states_and_weights_are_raised_to_float32_first(autocast: bool) -> None:
    hidden, head = drawn(0, 20, 8).bfloat16().requires_grad_(), drawn_head(31, 8)
    head = Head(weight=head.weight.detach().bfloat16().requires_grad_())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        scores = token_scores(hidden, head, torch.arange(20), 0.8)
        results, gradients = with_gradients(scores, [hidden, head.weight])
    expected, full = with_gradients(of_full_logits(hidden, head, torch.arange(20), 0.8), [hidden, head.weight])
    assert_equal(results, expected[:2])
    assert [each.dtype for each in gradients] == [torch.bfloat16] * 2
    assert_equal(gradients, full, tolerance=4e-3)  # they are rounded at the end


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("tile_values", [1, 7, 60])
def test_tiles_change_neither_values_nor_gradients(
    make_model: MakeModel,
    make_sequences: MakeSequences,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    tile_values: int,
) -> None:
    sequences = make_sequences(8, 5)
    tokens = len(sequences.responses.values)
    tiles: list[torch.Size] = []
    make_tile = logprobs.tile_logits

    def seen(*arguments: Any) -> Tensor:
        tile = make_tile(*arguments)
        tiles.append(tile.shape)
        return tile

    monkeypatch.setattr(logprobs, "tile_logits", seen)

    def run(model: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        scored = scores_of(model, sequences, 0.7)
        weights = torch.linspace(-1, 1, tokens)
        (weights @ scored.logprobs + (weights * scored.entropy).sum()).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return scored.logprobs.detach(), scored.entropy.detach(), gradients

    whole = run(make_model(architecture))
    assert tiles == [(tokens, 23)] * 2  # forward and backward
    tiles.clear()
    monkeypatch.setattr(logprobs, "TILE_VALUES", tile_values)
    tiled = run(make_model(architecture))
    assert max(shape.numel() for shape in tiles) <= tile_values
    assert sum(shape.numel() for shape in tiles) == 2 * tokens * 23
    assert tiled[2].keys() == whole[2].keys() and len(whole[2]) > 10
    torch.testing.assert_close(tiled, whole, rtol=1e-4, atol=5e-5)


# --- whole distributions ----------------------------------------------------------------------------------------------


def perturbed(model: Any) -> Any:
    """The model with other weights."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("tokens_a_tile", [1, 5, 10_000])
def test_the_exact_kl_and_its_gradient_are_those_of_the_full_logits_of_both_models(
    make_model: MakeModel,
    make_sequences: MakeSequences,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    tokens_a_tile: int,
) -> None:
    sequences = make_sequences(8, 5)
    reference = perturbed(make_model(architecture))
    model = make_model(architecture)
    monkeypatch.setattr(logprobs, "TILE_VALUES", 2 * tokens_a_tile * len(model.get_output_embeddings().weight))
    scored = scores_of(model, sequences, 0.7, reference)
    assert scored.kl is not None and scored.ref_logprobs is not None
    weights = torch.linspace(-1, 1, len(scored.logprobs))
    (weights * (scored.kl + scored.logprobs)).sum().backward()

    plain = make_model(architecture)
    log_p = logits_one_row_at_a_time(plain, sequences, 0.7).log_softmax(-1)
    with torch.no_grad():
        log_q = logits_one_row_at_a_time(reference, sequences, 0.7).log_softmax(-1)
    tokens = sequences.responses.values.long()[:, None]
    kl, lp = (log_p.exp() * (log_p - log_q)).sum(-1), log_p.gather(1, tokens).squeeze(1)
    (weights * (kl + lp)).sum().backward()

    assert float(kl.detach().min()) > 1e-3
    torch.testing.assert_close(scored.kl.double(), kl, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scored.logprobs.double(), lp, rtol=0, atol=1e-5)
    torch.testing.assert_close(scored.ref_logprobs.double(), log_q.gather(1, tokens).squeeze(1), rtol=0, atol=1e-5)
    alone = scores_of(make_model(architecture), sequences, 0.7)
    torch.testing.assert_close(scored.entropy, alone.entropy, rtol=0, atol=1e-6)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=5e-5)
    assert all(parameter.grad is None for parameter in reference.parameters())


def test_the_exact_kl_to_itself_is_0(make_model: MakeModel, make_sequences: MakeSequences) -> None:
    kl = scores_of(make_model(), make_sequences(2, 3), 1.0, make_model()).kl
    assert kl is not None and float(kl.detach().abs().max()) < 1e-6


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("tokens_a_tile", [1, 10_000])
def test_sums_of_squared_probabilities_are_those_of_the_full_logits(
    make_model: MakeModel,
    make_sequences: MakeSequences,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    tokens_a_tile: int,
) -> None:
    model, sequences = make_model(architecture), make_sequences(8, 5)
    monkeypatch.setattr(logprobs, "TILE_VALUES", tokens_a_tile * len(model.get_output_embeddings().weight))
    with torch.no_grad():
        found = scores_of(model, sequences, 0.7, squares=True).sum_squared_probs
        expected = logits_one_row_at_a_time(model, sequences, 0.7).softmax(-1).square().sum(-1)
    assert found is not None
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


# --- token_scores against full logits ---------------------------------------------------------------------------------


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def drawn_head(vocabulary: int, width: int, *, bias: bool = False, seed: int = 1, **settings: Any) -> Head:
    return Head(
        weight=drawn(seed, vocabulary, width).requires_grad_(),
        bias=drawn(seed + 1, vocabulary).requires_grad_() if bias else None,
        **settings,
    )


def of_full_logits(
    hidden: Tensor, head: Head, targets: Tensor, temperature: float, reference: tuple[Tensor, Head] | None = None
) -> TokenScores:
    """The definition, in float64."""

    def log_softmax(states: Tensor, head: Head) -> Tensor:
        z = states.double() @ head.weight.double().T
        z = (z if head.bias is None else z + head.bias.double()) * head.multiplier
        z = z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)
        return torch.log_softmax(z / temperature, -1)

    log_p = log_softmax(hidden, head)
    p, at_target = log_p.exp(), targets[:, None]
    log_q = None if reference is None else log_softmax(*reference).detach()
    return TokenScores(
        logprobs=log_p.gather(1, at_target).squeeze(1),
        entropy=-(p * log_p).sum(-1),
        kl=None if log_q is None else (p * (log_p - log_q)).sum(-1),
        ref_logprobs=None if log_q is None else log_q.gather(1, at_target).squeeze(1),
        sum_squared_probs=p.square().sum(-1).detach(),
    )


def with_gradients(scores: TokenScores, leaves: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and gradients of a loss in which each token of each result weighs differently."""
    results = [scores.logprobs, scores.entropy] + ([] if scores.kl is None else [scores.kl])
    loss = sum((drawn(50 + i, len(each)).to(each) * each).sum() for i, each in enumerate(results))
    constants = [each for each in (scores.ref_logprobs, scores.sum_squared_probs) if each is not None]
    assert not any(each.requires_grad for each in constants)
    return [each.detach() for each in results + constants], list(torch.autograd.grad(loss, leaves))


def assert_equal(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-6) -> None:
    """Relative to the largest value of each tensor (or to 1 where that is less)."""
    for got, expected in zip(ours, theirs, strict=True):
        assert got.shape == expected.shape
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("tile_values", [64, 1000, 2**20])  # tiles of 8 x 8 and 31 x 32 divide neither 37 nor 101
@pytest.mark.parametrize("with_reference", [False, True])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    "settings",
    [{}, {"bias": True}, {"multiplier": 0.3}, {"softcap": 5.0}, {"bias": True, "multiplier": 1.7, "softcap": 3.0}],
    ids=["plain", "bias", "multiplier", "softcap", "all"],
)
def test_token_scores_and_their_gradients_are_those_of_full_logits(
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    temperature: float,
    with_reference: bool,
    tile_values: int,
) -> None:
    monkeypatch.setattr(logprobs, "TILE_VALUES", tile_values)
    hidden, head, targets = drawn(0, 37, 16).requires_grad_(), drawn_head(101, 16, **settings), torch.arange(37) * 2
    reference = (drawn(5, 37, 12), drawn_head(101, 12, seed=6, softcap=7.0)) if with_reference else None
    leaves = [each for each in (hidden, head.weight, head.bias) if each is not None]
    ours = token_scores(hidden, head, targets, temperature, reference=reference, squares=True)
    assert {each.dtype for each in vars(ours).values() if each is not None} == {torch.float32}
    expected = with_gradients(of_full_logits(hidden, head, targets, temperature, reference), leaves)
    results, gradients = with_gradients(ours, leaves)
    assert_equal(results, expected[0])
    # Logits of 50, which are rounded by 2e-6, are in the KL's gradient: the float32 of full logits is no nearer.
    assert_equal(gradients, expected[1], tolerance=4e-6 if with_reference else 1e-6)
    with torch.no_grad():
        again = token_scores(hidden, head, targets, temperature, reference=reference, squares=True)
    assert not again.logprobs.requires_grad
    assert torch.equal(again.logprobs, ours.logprobs) and torch.equal(again.entropy, ours.entropy)


@pytest.mark.parametrize("name", ["logprobs", "entropy", "kl"])
def test_one_result_alone_has_the_gradient_of_full_logits(name: str) -> None:
    hidden, head, targets = drawn(0, 9, 8).requires_grad_(), drawn_head(31, 8), torch.arange(9)
    reference = drawn(5, 9, 8), drawn_head(31, 8, seed=6)
    scores = (each(hidden, head, targets, 0.8, reference=reference) for each in (token_scores, of_full_logits))
    got, expected = (list(torch.autograd.grad(getattr(each, name).sum(), [hidden, head.weight])) for each in scores)
    assert_equal(got, expected)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    leaves = {"hidden": drawn(0, 5, 8), "weight": drawn(1, 31, 8), "bias": drawn(2, 31)}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != frozen)
    head = Head(weight=leaves["weight"], bias=leaves["bias"])
    token_scores(leaves["hidden"], head, torch.arange(5), 1.0).logprobs.sum().backward()
    assert {name for name, leaf in leaves.items() if leaf.grad is None} == {frozen}


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_pass_gradcheck_in_float64(monkeypatch: pytest.MonkeyPatch, softcap: float | None) -> None:
    monkeypatch.setattr(logprobs, "TILE_VALUES", 9)
    inputs = [
        drawn(i, *shape, dtype=torch.float64).requires_grad_() for i, shape in enumerate([(4, 3), (11, 3), (11,)])
    ]
    reference = drawn(7, 4, 3, dtype=torch.float64), Head(weight=drawn(8, 11, 3, dtype=torch.float64))

    def scores(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        head = Head(weight=weight, bias=bias, multiplier=0.7, softcap=softcap)
        result = token_scores(hidden, head, torch.tensor([0, 10, 5, 5]), 0.6, reference=reference)
        assert result.kl is not None
        assert result.logprobs.dtype == torch.float64
        return result.logprobs, result.entropy, result.kl

    assert torch.autograd.gradcheck(scores, inputs)


def test_a_head_tied_to_the_embedding_gets_both_gradients() -> None:
    embedding, ids = drawn(0, 31, 8).requires_grad_(), torch.arange(6)
    ours, full = (
        torch.autograd.grad(each(embedding[ids], Head(weight=embedding), ids + 1, 1.0).logprobs.sum(), embedding)
        for each in (token_scores, of_full_logits)
    )
    assert_equal(list(ours), list(full))


@pytest.mark.parametrize("with_reference", [False, True])
def test_no_tokens_give_empty_results_that_are_part_of_the_graph(with_reference: bool) -> None:
    hidden, head = drawn(0, 0, 8).requires_grad_(), drawn_head(31, 8, bias=True)
    reference = (drawn(5, 0, 8), drawn_head(31, 8)) if with_reference else None
    scores = token_scores(hidden, head, torch.zeros(0, dtype=torch.int64), 1.0, reference=reference, squares=True)
    assert all(len(each) == 0 for each in vars(scores).values() if each is not None)
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, 8)
    for leaf in (head.weight, head.bias):
        assert leaf is not None and leaf.grad is not None and not leaf.grad.any()


def test_a_large_vocabulary_and_one_token_agree_with_full_logits() -> None:
    hidden, head, targets = drawn(0, 3, 8).requires_grad_(), drawn_head(151_936, 8), torch.tensor([0, 77_777, 151_935])
    for part in (slice(0, 1), slice(0, 3)):
        scores = (each(hidden[part], head, targets[part], 1.0) for each in (token_scores, of_full_logits))
        ours, full = (with_gradients(each, [hidden, head.weight]) for each in scores)
        assert_equal(ours[0], full[0][:2])
        assert_equal(ours[1], full[1], tolerance=6e-6)  # full logits in float32: 3e-5


@pytest.mark.parametrize("tile_values", [9, 2**20])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_huge_logits_and_ties_are_finite_and_exact(
    monkeypatch: pytest.MonkeyPatch, temperature: float, tile_values: int
) -> None:
    """Whole numbers, so that the logits themselves are exact in float32; the largest is 10,000."""
    monkeypatch.setattr(logprobs, "TILE_VALUES", tile_values)
    logits = torch.tensor([[10_000, 0, -10_000, 9_999, 7, 10_000], [3, 3, 3, 3, 3, 3], [0, -9_000, 1, 2, -9_000, 2.0]])
    hidden, weight = torch.eye(3).requires_grad_(), logits.T.clone().requires_grad_()
    ref = torch.eye(3), Head(weight=logits.T.flip(0).clone())
    for targets in ([0, 0, 1], [2, 5, 3]):
        arguments = hidden, Head(weight=weight), torch.tensor(targets), temperature
        for reference, tolerance in ((None, 1e-6), (ref, 1e-4)):  # a KL of 10,000 is rounded by 1e-3 in its gradient
            scores = (each(*arguments, reference=reference) for each in (token_scores, of_full_logits))
            ours, full = (with_gradients(each, [hidden, weight]) for each in scores)
            assert all(bool(torch.isfinite(each).all()) for part in ours for each in part)
            assert_equal(ours[0], full[0][: len(ours[0])])
            assert_equal(ours[1], full[1], tolerance)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns, those in ``but`` aside."""

    def __init__(self, but: set[torch.Size]) -> None:
        super().__init__()
        self.but, self.elements = but, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and each.shape not in self.but:
                self.elements = max(self.elements, each.numel())
        return result


@pytest.mark.parametrize("with_reference", [False, True])
def test_no_tensor_is_larger_than_a_tile_but_those_like_the_weight(
    monkeypatch: pytest.MonkeyPatch, with_reference: bool
) -> None:
    monkeypatch.setattr(logprobs, "TILE_VALUES", 4096)
    for tokens in (100, 1000):
        hidden, head = drawn(0, tokens, 4).requires_grad_(), drawn_head(5000, 4)
        reference = (drawn(1, tokens, 4), drawn_head(5000, 4)) if with_reference else None
        with Largest(but={head.weight.shape, head.weight.T.shape, hidden.shape, torch.Size([5, tokens])}) as largest:
            scores = token_scores(hidden, head, torch.arange(tokens), 1.0, reference=reference, squares=True)
            (scores.logprobs.sum() + scores.entropy.sum()).backward()
        assert 2000 <= largest.elements <= 4096


# --- heads of Transformers models -------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SCALED = {
    "gemma2": (lambda: Gemma2ForCausalLM(Gemma2Config(**TINY, final_logit_softcapping=9.0)), 1.0, 9.0),
    "gemma3": (lambda: Gemma3ForCausalLM(Gemma3TextConfig(**TINY, final_logit_softcapping=11.0)), 1.0, 11.0),
    "cohere": (lambda: CohereForCausalLM(CohereConfig(**TINY, logit_scale=0.25)), 0.25, None),
    "granite": (lambda: GraniteForCausalLM(GraniteConfig(**TINY, logits_scaling=8.0)), 1 / 8, None),
}


@EVERY_ARCHITECTURE
def test_the_head_of_a_plain_model_is_its_output_embedding(make_model: MakeModel, architecture: str) -> None:
    model = make_model(architecture)
    head = head_of(model)
    assert head.weight is model.get_output_embeddings().weight
    assert (head.bias, head.multiplier, head.softcap) == (None, 1.0, None)
    check_head(model)


@pytest.mark.parametrize("name", SCALED)
def test_models_that_scale_or_cap_their_logits_are_read_right(make_sequences: MakeSequences, name: str) -> None:
    make, multiplier, softcap = SCALED[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().float().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(generator=torch.Generator().manual_seed(0))
    assert (head_of(model).multiplier, head_of(model).softcap) == (multiplier, softcap)
    check_head(model)
    sequences = make_sequences(8, 3)
    ours = scores_of(model, sequences, 0.7)
    expected, entropy = one_row_at_a_time(model, sequences, 0.7)
    assert_equal([ours.logprobs.detach(), ours.entropy.detach()], [expected, entropy], 2e-6)
    check_head(model.bfloat16())


def test_a_bias_of_the_head_is_read(make_model: MakeModel) -> None:
    model = make_model("llama")
    model.lm_head = torch.nn.Linear(16, 23)
    assert head_of(model).bias is model.lm_head.bias
    check_head(model)


@pytest.mark.parametrize("change", [lambda z: z * 1.01, lambda z: 30 * torch.tanh(z / 30), lambda z: z[..., :-1]])
def test_a_model_that_makes_its_logits_in_another_way_is_refused(
    make_model: MakeModel, change: Callable[[Tensor], Tensor]
) -> None:
    model = make_model("llama")
    model.lm_head.register_forward_hook(lambda module, given, logits: change(logits))
    with pytest.raises(ModelError, match="LlamaForCausalLM makes its logits"):
        check_head(model)
    model.lm_head._forward_hooks.clear()
    check_head(model)  # and what it looked at, it left as it was


def test_a_model_that_calls_its_inner_decoder_is_checked_too() -> None:
    shape = OPTConfig(
        vocab_size=23, hidden_size=16, word_embed_proj_dim=16, num_hidden_layers=1, num_attention_heads=2,
        ffn_dim=32, max_position_embeddings=32,
    )  # fmt: skip
    check_head(OPTForCausalLM(shape).eval())
