import pytest
import torch

from grpo_lib.config import SmallModelConfig, WarmStartConfig
from grpo_lib.errors import DataError, NonFiniteError
from grpo_lib.models import make_small_model, make_tokenizer
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.muon import Muon, orthogonalized
from grpo_lib.training.warm_start import warm_start

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENIZER = make_tokenizer(("<a>",), "0123456789")
TINY = SmallModelConfig(hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_size=16)
CONFIG = WarmStartConfig(steps=12, batch_size=8, warmup_steps=3, max_tokens=16)
PROMPTS = [str(number) for number in range(50)]
RESPONSES = [f"<a>{number + 1}" for number in range(50)]


def make_model():
    return make_small_model(
        TINY, len(TOKENIZER), TOKENIZER.eos_token_id, TOKENIZER.pad_token_id, max_positions=32, seed=0
    )


def train(prompts=PROMPTS, responses=RESPONSES, config=CONFIG, seed=0, on_progress=None):
    model = make_model()
    return model, warm_start(model, TOKENIZER, prompts, responses, config, seed, on_progress)


def test_the_loss_goes_down():
    model, result = train(config=CONFIG.model_copy(update={"steps": 60}))
    assert len(result.losses) == 60
    assert sum(result.losses[-5:]) < 0.7 * sum(result.losses[:5])
    assert result.left_out == 0
    assert not model.training


def test_equal_arguments_give_equal_weights_and_another_seed_others():
    digests = [weights_digest(train(seed=seed)[0].state_dict()) for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


def test_the_first_loss_is_the_mean_over_response_and_eos_tokens():
    prompts, responses = ["12", "7"], ["<a>3", "<a>456"]
    _, result = train(prompts, responses, WarmStartConfig(steps=1, batch_size=2, warmup_steps=0))
    model, total = make_model(), 0.0
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.tensor([*TOKENIZER(prompt + response)["input_ids"], TOKENIZER.eos_token_id])
        with torch.no_grad():
            logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        total -= sum(float(logprobs[place - 1, ids[place]]) for place in range(len(prompt), len(ids)))
    assert result.losses[0] == pytest.approx(total / (3 + 5), rel=1e-5)
    assert result.tokens == 8


def test_what_stands_between_the_tags_of_observations_is_read_and_not_learned():
    tokenizer = make_tokenizer(("<r>", "</r>"), "0123456789")
    prompts, responses = ["12", "7"], ["3<r>45</r>6<r></r>", "1"]
    model = make_small_model(TINY, len(tokenizer), eos_id=1, pad_id=0, max_positions=32, seed=0)
    config = WarmStartConfig(steps=1, batch_size=2, warmup_steps=0)
    result = warm_start(model, tokenizer, prompts, responses, config, 0, observed=("<r>", "</r>"))
    model, total = make_small_model(TINY, len(tokenizer), eos_id=1, pad_id=0, max_positions=32, seed=0), 0.0
    for prompt, response, learned in (("12", responses[0], [2, 7, 10]), ("7", "1", [1, 2])):
        ids = torch.tensor([*tokenizer(prompt + response)["input_ids"], 1])
        with torch.no_grad():
            logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        total -= sum(float(logprobs[place - 1, ids[place]]) for place in learned)
    assert result.losses[0] == pytest.approx(total / 5, rel=1e-5)
    assert result.tokens == 5


def test_a_batch_is_divided_by_the_mean_of_the_pool():
    """Batches of one: a demonstration of 3 answer tokens and one of 5, both divided by 4."""
    prompts, responses = ["12", "7"], ["<a>3", "<a>456"]
    config = WarmStartConfig(steps=2, batch_size=1, warmup_steps=0, muon_lr=1e-12, adamw_lr=1e-12)
    _, each = train(prompts, responses, config)
    _, both = train(prompts, responses, WarmStartConfig(steps=1, batch_size=2, warmup_steps=0))
    assert sum(each.losses) / 2 == pytest.approx(both.losses[0], rel=1e-5)


def test_long_demonstrations_are_left_out_and_counted():
    _, result = train(responses=[*RESPONSES[:-2], "1" * 20, "2" * 20])
    assert result.left_out == 2


def test_no_demonstration_that_fits_is_an_error_with_the_remedy():
    with pytest.raises(DataError, match=r"none of 1 .*max_tokens=16 .*shortest has 23"):
        train(["1"], ["1" * 21])
    with pytest.raises(DataError, match="none of 0 demonstrations"):
        train([], [])


def test_a_character_outside_the_alphabet_is_an_error():
    with pytest.raises(DataError, match="alphabet"):
        train(["1"], ["?"])


def test_fewer_demonstrations_than_a_batch_are_enough():
    _, result = train(PROMPTS[:3], RESPONSES[:3])
    assert len(result.losses) == 12


def test_every_step_is_reported():
    calls = []
    _, result = train(on_progress=lambda *call: calls.append(call))
    assert calls == [(step + 1, 12, loss) for step, loss in enumerate(result.losses)]


def test_a_loss_that_is_not_finite_stops_the_warm_start():
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="step 1 is nan"):
        warm_start(model, TOKENIZER, PROMPTS, RESPONSES, CONFIG, 0)


def test_muon_moves_as_torch_does():
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 4), (4, 8), (6, 6))]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    optimizers = Muon(ours, lr=0.1), torch.optim.Muon(theirs, lr=0.1, weight_decay=0.01)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=0.02, rtol=0)  # torch computes in bfloat16


def test_orthogonalized_matrices_have_singular_values_near_one():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalized(torch.randn(3, 5, 9)))
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
