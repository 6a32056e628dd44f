import pytest
import torch
from blake3 import blake3

from grpo_lib.training import digest
from grpo_lib.training.digest import HEAD, weights_digest

STATE = {"b": torch.tensor([[1.0, 2.0]]), "a": torch.tensor([3.0])}


def test_it_is_of_names_precisions_shapes_and_bytes_in_the_order_of_names() -> None:
    content = b"a torch.float32 (1,)\n" + STATE["a"].numpy().tobytes()
    content += b"b torch.float32 (1, 2)\n" + STATE["b"].numpy().tobytes()
    assert weights_digest(STATE) == blake3(content).hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.tensor([[1.0, 2.0]])},
        {"b": torch.tensor([[1.0], [2.0]]), "a": torch.tensor([3.0])},
        {"b": torch.tensor([[1.0, 2.0]]), "c": torch.tensor([3.0])},
        {"b": torch.tensor([[1.0, 2.0]]), "a": torch.tensor([3.0000002])},
        {"b": torch.tensor([[1.0, 2.0]]), "a": torch.tensor([3.0]).double()},
    ],
)
def test_other_weights_have_another(other: dict[str, torch.Tensor]) -> None:
    assert weights_digest(other) != weights_digest(STATE)


def test_it_can_be_that_of_another_precision() -> None:
    half = {name: value.bfloat16() for name, value in STATE.items()}
    assert weights_digest(STATE, torch.bfloat16) == weights_digest(half) != weights_digest(STATE)


def test_a_tied_head_makes_no_difference() -> None:
    assert weights_digest(STATE | {HEAD: STATE["b"]}) == weights_digest(STATE)
    assert weights_digest(STATE | {HEAD: STATE["b"].clone()}) != weights_digest(STATE)


def test_the_number_of_threads_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.arange(500_000), "b": torch.arange(7)}
    alone = weights_digest(state)
    monkeypatch.setattr(digest, "LARGE", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert weights_digest(state) == alone
