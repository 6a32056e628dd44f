"""What every engine must do. A test file of an engine subclasses `EngineContract` and says how the engine is made.

Only the methods of `Engine` are used, so that the engine may live in another process. The model has a shape that vLLM
has kernels for on the CPU. References are computed here in float64, from the definitions in `Sampling`.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_lib.config import SmallModelConfig
from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.errors import ModelError
from grpo_lib.generation.base import LENGTH, STOP, UNFINISHED, Budget, Engine, Generated, Request, Sampling
from grpo_lib.models import make_small_model, make_tokenizer
from grpo_lib.training.digest import HEAD, weights_digest

EOS = 1
CONTEXT = 128
TOKENIZER = make_tokenizer(["<a>"], "0123456789+-= bcd")
SHAPE = SmallModelConfig(hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=32, mlp_size=64, initializer_range=0.2)
LONG = [3 + 7 * place % 17 for place in range(60)]
PROMPTS = [[5, 6, 7, 8, 9], [3], [4, 4], [10, 11, 12, 13, 14, 15, 16], LONG]
"""Also one token, and many."""
AT_1 = Sampling(temperature=1.0, max_new_tokens=24)
SETTINGS = {
    "plain": AT_1,
    "temperature": Sampling(temperature=0.7, max_new_tokens=24),
    "top_p": Sampling(temperature=1.0, top_p=0.8, max_new_tokens=24),
    "top_k": Sampling(temperature=1.0, top_k=5, max_new_tokens=24),
    "min_p": Sampling(temperature=1.0, min_p=0.1, max_new_tokens=24),
    "repetition_penalty": Sampling(temperature=1.0, repetition_penalty=1.3, max_new_tokens=24),
    "all": Sampling(temperature=0.7, top_p=0.8, top_k=5, min_p=0.1, repetition_penalty=1.3, max_new_tokens=24),
    "top_k of a flat distribution": Sampling(temperature=2.0, top_k=7, top_p=0.9, max_new_tokens=24),
    "greedy": Sampling(temperature=0, max_new_tokens=24),
    "greedy with a penalty": Sampling(temperature=0, repetition_penalty=1.3, top_p=0.5, top_k=3, max_new_tokens=24),
}


@cache
def make_model(seed: int) -> Any:
    return make_small_model(SHAPE, len(TOKENIZER), eos_id=EOS, pad_id=0, max_positions=CONTEXT, seed=seed)


def save_model(folder: Path, seed: int = 0) -> Path:
    """Writes model and tokenizer as an engine that starts from a folder takes them."""
    make_model(seed).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def request(
    prompts: Sequence[Sequence[int]] = PROMPTS,
    n: int = 3,
    sampling: Sampling = AT_1,
    seeds: Tensor | None = None,
    **options: Any,
) -> Request:
    ids = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32)
    offsets = lengths_to_offsets(torch.tensor([len(prompt) for prompt in prompts]))
    seeds = torch.arange(len(prompts) * n) if seeds is None else seeds
    return Request(prompts=Ragged(values=ids, offsets=offsets), seeds=seeds, n=n, sampling=sampling, **options)


def rows_of(made: Generated) -> list[list[int]]:
    return [made.responses.values[start:end].tolist() for start, end in pairwise(made.responses.offsets.tolist())]


@torch.no_grad()
def next_logits(prompt: Sequence[int], response: Sequence[int], seed: int = 0) -> Tensor:
    """``float64[tokens, vocabulary]``: of each token of the response, by one pass over one row without padding."""
    logits = make_model(seed)(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].double()


def distribution(logits: Tensor, sampling: Sampling, seen: set[int]) -> Tensor:
    """Log-probs ``float64[vocabulary]`` that a token is drawn from; -inf: never."""
    logits = logits.clone()
    for token in seen:
        logits[token] *= 1 / sampling.repetition_penalty if logits[token] > 0 else sampling.repetition_penalty
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    logits /= sampling.temperature
    if sampling.min_p > 0:
        likely = logits.softmax(-1)
        logits[likely < sampling.min_p * likely.max()] = -torch.inf
    if sampling.top_k > 0:
        logits[logits.argsort(descending=True)[sampling.top_k :]] = -torch.inf
    if sampling.top_p < 1:
        probabilities, before = logits.softmax(-1), 0.0
        for token in logits.argsort(descending=True).tolist():
            if before >= sampling.top_p:
                logits[token] = -torch.inf
            before += float(probabilities[token])
    return logits.log_softmax(-1)


def distributions(prompt: Sequence[int], response: Sequence[int], sampling: Sampling, seed: int = 0) -> Tensor:
    """`distribution` of each token of a response, ``[tokens, vocabulary]``."""
    logits = next_logits(prompt, response, seed)
    return torch.stack(
        [distribution(each, sampling, {*prompt, *response[:place]}) for place, each in enumerate(logits)]
    )


def assert_drawn_from(counts: Tensor, probabilities: Tensor) -> None:
    """A chi-square test at 99.95 %; tokens that are expected fewer than five times count as one."""
    expected = counts.sum() * probabilities
    assert int(counts[probabilities == 0].sum()) == 0
    rare = expected < 5
    observed = torch.cat([counts[~rare].double(), counts[rare].sum().double()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, expected = observed[expected > 1], expected[expected > 1]
    freedom = len(expected) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.29 * (2 / (9 * freedom)) ** 0.5) ** 3  # Wilson and Hilferty
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert freedom > 0 and chi_square < bound, f"chi-square {chi_square:.1f}, {freedom} degrees of freedom"


class EngineContract:
    """Subclasses give ``started``, and ``check_close`` if they can."""

    tolerance = 1e-4
    """Of log-probs, in float32."""
    repeat_tolerance = 0.0
    """Of log-probs of the same request again; a prefix cache changes the order of sums."""
    no_bound: Budget | None = None
    """A budget that bounds nothing: for engines that make other rows of the same seeds where there is one."""
    draws = 2048
    """Rows of which frequencies are counted."""

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Model of seed 0 and tokenizer."""
        return save_model(tmp_path_factory.mktemp("contract"))

    @pytest.fixture(scope="class")
    def started(self, folder: Path) -> Iterator[Engine]:
        """The engine on the folder's model, in float32, with ``EOS`` the one token that ends responses."""
        raise NotImplementedError

    def check_close(self, folder: Path) -> None:
        """Starts an engine, closes it and asserts that its memory is free."""
        pytest.skip("this engine has no check that its memory is free")

    @pytest.fixture
    def engine(self, started: Engine) -> Engine:
        """With the weights of seed 0, whatever a test before has done."""
        started.load(make_model(0).state_dict())
        return started

    def test_types_and_shapes(self, engine: Engine) -> None:
        made = engine.generate(request())
        assert made.responses.values.dtype == torch.int32
        assert made.responses.offsets.dtype == torch.int64 and made.responses.offsets.shape == (16,)
        assert int(made.responses.offsets[-1]) == len(made.responses.values)
        assert made.logprobs.dtype == torch.float32 and made.logprobs.shape == made.responses.values.shape
        assert made.finish.dtype == torch.uint8 and made.finish.shape == (15,)
        assert bool(made.logprobs.isfinite().all()) and float(made.logprobs.max()) <= 0
        assert set(made.responses.lengths.tolist()) <= set(range(1, 25))
        assert made.mask is None or bool(made.mask.all())
        assert engine.name and engine.version

    def test_rows_end_with_the_end_of_sequence_token_or_at_the_limit(self, engine: Engine) -> None:
        made = engine.generate(request(n=8))
        assert set(made.finish.tolist()) == {STOP, LENGTH}
        for ids, finish in zip(rows_of(made), made.finish.tolist(), strict=True):
            assert EOS not in ids[:-1]
            assert (ids[-1] == EOS) == (finish == STOP)
            assert finish == STOP or len(ids) == 24

    def test_rows_end_with_any_of_the_stop_tokens(self, engine: Engine) -> None:
        stops = (8, 9)
        free = rows_of(engine.generate(request(n=8)))
        made = engine.generate(
            request(n=8, sampling=Sampling(temperature=1.0, max_new_tokens=24, stop_token_ids=stops))
        )
        ends = [next((at + 1 for at, token in enumerate(ids) if token in stops), len(ids)) for ids in free]
        assert rows_of(made) == [ids[:end] for ids, end in zip(free, ends, strict=True)]
        assert {ids[-1] for ids, finish in zip(rows_of(made), made.finish, strict=True) if finish == STOP} == {
            EOS,
            8,
            9,
        }

    @pytest.mark.parametrize("length", [1, 2, 3])
    def test_a_stop_string_ends_a_row_with_the_token_that_completes_it(self, engine: Engine, length: int) -> None:
        """The strings are of one, two, three tokens: what some rows, free to go on, have in their middle."""
        free = rows_of(engine.generate(request(n=8)))
        stops = tuple(TOKENIZER.decode(ids[8 : 8 + length]) for ids in free[::7] if len(ids) > 12)[:4]
        made = engine.generate(request(n=8, sampling=Sampling(temperature=1.0, max_new_tokens=24, stop=stops)))
        self.check_stopped(made, free, stops)

    @pytest.mark.parametrize("pattern", ["[^<>]<", "[^<>]<a", ">[^<>]", ">.*<a>."])
    def test_a_stop_string_may_begin_and_end_inside_of_tokens(self, engine: Engine, pattern: str) -> None:
        """Inside of ``<a>``, which is one token."""
        free = rows_of(engine.generate(request(n=16)))
        found = [match.group() for ids in free if (match := re.search(pattern, TOKENIZER.decode(ids)))]
        stops = tuple(sorted(set(found))[:3])
        made = engine.generate(request(n=16, sampling=Sampling(temperature=1.0, max_new_tokens=24, stop=stops)))
        self.check_stopped(made, free, stops)

    @staticmethod
    def check_stopped(made: Generated, free: list[list[int]], stops: Sequence[str]) -> None:
        """Each row is the free one up to the first token that completes a stop string."""
        expected, reasons = [], []
        for ids in free:
            texts = (TOKENIZER.decode(ids[: at + 1]) for at in range(len(ids)))
            end = next((at + 1 for at, text in enumerate(texts) if any(stop in text for stop in stops)), None)
            expected.append(ids[:end])
            reasons.append(STOP if end or ids[-1] == EOS else LENGTH)
        assert expected != free, "no row had one of the texts, so nothing was tested"
        assert rows_of(made) == expected
        assert made.finish.tolist() == reasons

    def test_what_the_prompt_has_of_a_stop_string_does_not_count(self, engine: Engine) -> None:
        prompt = [5, 6, 7, 8, 9]
        free = rows_of(engine.generate(request([prompt], n=16)))
        inside = TOKENIZER.decode(prompt[1:4])
        across = [TOKENIZER.decode([prompt[-1], ids[0]]) for ids in free]
        stops = tuple({text for text in [inside, *across] if not any(text in TOKENIZER.decode(ids) for ids in free)})
        assert len(stops) > 1
        sampling = Sampling(temperature=1.0, max_new_tokens=24, stop=stops)
        assert rows_of(engine.generate(request([prompt], n=16, sampling=sampling))) == free

    def test_equal_seeds_give_equal_rows_and_others_give_others(self, engine: Engine) -> None:
        first = engine.generate(request())
        again, other = engine.generate(request()), engine.generate(request(seeds=torch.arange(15) + 977))
        assert rows_of(again) == rows_of(first)
        self.check_repeated(again, first)
        assert all(a != b for a, b in zip(rows_of(first), rows_of(other), strict=True) if len(a) > 6)

    def test_rows_of_one_prompt_and_rows_with_adjacent_seeds_differ(self, engine: Engine) -> None:
        rows = rows_of(engine.generate(request([[5, 6, 7]] * 4, n=4)))
        long = [tuple(ids[:6]) for ids in rows if len(ids) >= 6]
        assert len(long) > 4 and len(set(long)) == len(long)

    def test_one_seed_makes_one_row_of_a_prompt_wherever_it_is(self, engine: Engine) -> None:
        free = rows_of(engine.generate(request()))
        assert rows_of(engine.generate(request([PROMPTS[4]], n=3, seeds=torch.tensor([14, 12, 12])))) == [
            free[14],
            free[12],
            free[12],
        ]

    def test_the_order_of_prompts_changes_no_row(self, engine: Engine) -> None:
        free = rows_of(engine.generate(request()))
        flipped = rows_of(engine.generate(request(PROMPTS[::-1], seeds=torch.arange(15).view(5, 3).flip(0).flatten())))
        assert [flipped[row : row + 3] for row in range(12, -1, -3)] == [free[row : row + 3] for row in range(0, 15, 3)]

    def test_the_largest_seed_is_taken(self, engine: Engine) -> None:
        seeds = torch.tensor([2**63 - 1, 2**63 - 2, 2**62, 0, 1])
        first = rows_of(engine.generate(request(n=1, seeds=seeds)))
        assert rows_of(engine.generate(request(n=1, seeds=seeds))) == first

    def test_each_row_has_its_own_limit(self, engine: Engine) -> None:
        free = rows_of(engine.generate(request()))
        limits = torch.tensor([1, 24, 5] * 5)
        made = engine.generate(request(limits=limits))
        assert rows_of(made) == [ids[:limit] for ids, limit in zip(free, limits.tolist(), strict=True)]
        assert made.finish.tolist() == [STOP if ids[-1] == EOS else LENGTH for ids in rows_of(made)]

    def test_a_row_that_ends_by_itself_at_its_limit_ended_by_itself(self, engine: Engine) -> None:
        free = engine.generate(request(n=8))
        made = engine.generate(request(n=8, limits=free.responses.lengths))
        assert torch.equal(made.responses.values, free.responses.values) and torch.equal(made.finish, free.finish)

    @pytest.mark.parametrize("share", [0.2, 0.6])
    def test_a_budget_of_tokens_gives_rows_back_as_they_are(self, engine: Engine, share: float) -> None:
        """Engines look at it every few tokens of a row: at most 16."""
        sampling = Sampling(temperature=1.0, max_new_tokens=64)
        free = engine.generate(request(n=4, sampling=sampling, budget=self.no_bound))
        budget = Budget(tokens=int(share * len(free.responses.values)))
        made = engine.generate(request(n=4, sampling=sampling, budget=budget))
        self.check_unfinished(made, free)
        assert budget.tokens is not None
        assert budget.tokens <= len(made.responses.values) < budget.tokens + 16 * 20

    def test_a_budget_of_seconds_gives_rows_back_as_they_are(self, engine: Engine) -> None:
        sampling = Sampling(temperature=1.0, max_new_tokens=64)
        free = engine.generate(request(n=4, sampling=sampling, budget=self.no_bound))
        self.check_unfinished(engine.generate(request(n=4, sampling=sampling, budget=Budget(seconds=1e-6))), free)

    def test_a_budget_that_is_not_used_up_changes_nothing(self, engine: Engine) -> None:
        free = engine.generate(request(budget=self.no_bound))
        made = engine.generate(request(budget=Budget(seconds=1000.0, tokens=10**6)))
        assert rows_of(made) == rows_of(free) and torch.equal(made.finish, free.finish)

    def check_repeated(self, again: Generated, first: Generated) -> None:
        torch.testing.assert_close(again.logprobs, first.logprobs, atol=self.repeat_tolerance, rtol=0)

    @staticmethod
    def check_unfinished(made: Generated, free: Generated) -> None:
        """Some rows are; they are beginnings of what they would be, with the same log-probs."""
        unfinished = made.finish == UNFINISHED
        assert bool(unfinished.any())
        for row, (ids, whole) in enumerate(zip(rows_of(made), rows_of(free), strict=True)):
            start, other = int(made.responses.offsets[row]), int(free.responses.offsets[row])
            assert ids == whole[: len(ids)]
            assert len(ids) < len(whole) if unfinished[row] else made.finish[row] == free.finish[row]
            torch.testing.assert_close(
                made.logprobs[start : start + len(ids)], free.logprobs[other : other + len(ids)], atol=1e-4, rtol=0
            )

    @pytest.mark.parametrize("name", SETTINGS)
    def test_logprobs_are_of_the_distribution_that_tokens_are_drawn_from(self, engine: Engine, name: str) -> None:
        """And so no token is outside of it."""
        sampling, n = SETTINGS[name], 4
        made = engine.generate(request(n=n, sampling=sampling))
        expected = []
        for row, ids in enumerate(rows_of(made)):
            logprobs = distributions(PROMPTS[row // n], ids, sampling)
            expected.append(logprobs.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1))
        torch.testing.assert_close(made.logprobs, torch.cat(expected).float(), atol=self.tolerance, rtol=0)

    @pytest.mark.parametrize("name", ["greedy", "greedy with a penalty"])
    def test_greedy_rows_are_the_most_likely_tokens_whatever_the_seeds(self, engine: Engine, name: str) -> None:
        made = engine.generate(request(n=2, sampling=SETTINGS[name]))
        for row, ids in enumerate(rows_of(made)):
            assert ids == distributions(PROMPTS[row // 2], ids, SETTINGS[name]).argmax(-1).tolist()
        other = engine.generate(request(n=2, sampling=SETTINGS[name], seeds=torch.arange(10) + 99))
        assert rows_of(other) == rows_of(made)

    @pytest.mark.parametrize("name", ["plain", "top_p", "all"])
    def test_tokens_are_drawn_as_often_as_they_are_likely(self, engine: Engine, name: str) -> None:
        rows, sampling = self.draws, SETTINGS[name]
        short = Sampling(**{**vars(sampling), "max_new_tokens": 2})
        prompt = [5, 6]
        made = rows_of(engine.generate(request([prompt], n=rows, sampling=short)))
        first = torch.tensor([ids[0] for ids in made])
        probabilities = distributions(prompt, [0], short)[0].exp()
        assert_drawn_from(first.bincount(minlength=len(TOKENIZER)), probabilities)
        # The second token, among the rows with the most frequent first: it must not depend on how that was drawn.
        common = int(first[first != EOS].mode().values)
        second = torch.tensor([ids[1] for ids in made if ids[0] == common])
        assert_drawn_from(second.bincount(minlength=len(TOKENIZER)), distributions(prompt, [common, 0], short)[1].exp())

    def test_loaded_weights_change_rows_and_digest_and_can_be_changed_back(self, engine: Engine) -> None:
        rows, digest = rows_of(engine.generate(request())), engine.digest()
        engine.load(make_model(1).state_dict())
        made = engine.generate(request())
        assert rows_of(made) != rows
        assert digest == weights_digest(make_model(0).state_dict()) != engine.digest()
        assert engine.digest() == weights_digest(make_model(1).state_dict())
        expected = [
            distributions(PROMPTS[row // 3], ids, AT_1, seed=1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
            for row, ids in enumerate(rows_of(made))
        ]
        torch.testing.assert_close(made.logprobs, torch.cat(expected).float(), atol=self.tolerance, rtol=0)
        engine.load(make_model(0).state_dict())
        assert rows_of(engine.generate(request())) == rows and engine.digest() == digest

    def test_weights_are_copied(self, engine: Engine) -> None:
        state = {name: tensor.clone() for name, tensor in make_model(1).state_dict().items()}
        engine.load(state)
        rows = rows_of(engine.generate(request()))
        for tensor in state.values():
            tensor.zero_()
        assert rows_of(engine.generate(request())) == rows

    def test_a_tied_head_may_be_listed_or_not(self, engine: Engine) -> None:
        state = dict(make_model(1).state_dict())
        engine.load(state)
        rows, digest = rows_of(engine.generate(request())), engine.digest()
        engine.load(make_model(0).state_dict())
        engine.load({name: tensor for name, tensor in state.items() if name != HEAD})
        assert rows_of(engine.generate(request())) == rows and engine.digest() == digest

    @pytest.mark.parametrize("fault", ["missing", "unknown", "of another shape"])
    def test_weights_of_another_model_are_refused_and_change_nothing(self, engine: Engine, fault: str) -> None:
        rows, digest = rows_of(engine.generate(request())), engine.digest()
        state, name = dict(make_model(1).state_dict()), "model.layers.1.mlp.up_proj.weight"
        if fault == "missing":
            del state[name]
        elif fault == "unknown":
            state["model.layers.2.mlp.up_proj.weight"] = state[name]
        else:
            state[name] = state[name][:-1]
        with pytest.raises(ModelError, match=fault):
            engine.load(state)
        assert engine.digest() == digest
        assert rows_of(engine.generate(request())) == rows

    def test_sleeping_and_waking_change_nothing(self, engine: Engine) -> None:
        made = engine.generate(request())
        engine.wake()  # without sleep before: nothing
        engine.sleep()
        engine.wake()
        again = engine.generate(request())
        assert rows_of(again) == rows_of(made)
        self.check_repeated(again, made)
        engine.load(make_model(1).state_dict())
        assert rows_of(engine.generate(request())) != rows_of(made)

    def test_progress_grows_up_to_all_rows_and_tokens(self, engine: Engine) -> None:
        calls: list[tuple[int, int, int]] = []
        made = engine.generate(request(n=8), on_progress=lambda *call: calls.append(call))
        assert calls[-1] == (40, 40, len(made.responses.values))
        assert all(total == 40 for _, total, _ in calls)
        assert np.all(np.diff([[finished, tokens] for finished, _, tokens in calls], axis=0) >= 0)

    def test_an_exception_in_progress_reaches_the_caller_and_the_engine_goes_on(self, engine: Engine) -> None:
        rows = rows_of(engine.generate(request()))

        def fail(*call: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.generate(request(), on_progress=fail)
        assert rows_of(engine.generate(request())) == rows

    def test_closing_frees_memory(self, folder: Path) -> None:
        self.check_close(folder)
