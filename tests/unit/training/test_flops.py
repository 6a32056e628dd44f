import pytest

from grpo_lib.config import SmallModelConfig
from grpo_lib.models import make_small_model
from grpo_lib.training.flops import FlopCounter, peak_tflops
from tests.tiny_models import tiny_model
from tests.unit.training.trainers import LORA, make_trainer

TOKENS, SQUARES, PREDICTED = 3 + 5, 3**2 + 5**2, 6
LAYER = 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16  # q, k, v, o; gate, up, down; two norms
BODY = 2 * LAYER + 16  # and a last norm
HEAD = 23 * 16
ATTENTION = 2 * 6 * 16 * SQUARES  # 2 layers; 2 s^2 width forward, twice that backward


def test_a_whole_model_takes_6_operations_a_parameter_and_token_the_head_only_for_what_is_predicted() -> None:
    counter = FlopCounter(tiny_model("llama"))
    assert counter.count(TOKENS, SQUARES, PREDICTED) == 6 * BODY * 8 + 6 * HEAD * PREDICTED + ATTENTION
    assert counter.count(TOKENS, SQUARES, 0) == 6 * BODY * 8 + ATTENTION
    assert counter.count(0, 0, 0) == 0


def test_attention_grows_with_the_square_of_a_row_s_length() -> None:
    counter = FlopCounter(tiny_model("llama"))
    one, two = counter.count(20, 20**2, 0), counter.count(20, 2 * 10**2, 0)
    assert one - two == 2 * 6 * 16 * (400 - 200)


def test_a_frozen_weight_takes_4_operations_and_an_adapter_6() -> None:
    trainer = make_trainer("llama", settings=LORA)
    adapters = 2 * 4 * (4 * (16 + 16) + 3 * (16 + 32))  # of rank 4, in and out
    assert sum(p.numel() for p in trainer.model.parameters() if p.requires_grad) == adapters
    found = FlopCounter(trainer.model).count(TOKENS, SQUARES, PREDICTED)
    assert found == (4 * BODY + 6 * adapters) * 8 + 4 * HEAD * PREDICTED + ATTENTION


def test_a_head_tied_to_the_embedding_counts_once_and_attention_by_the_width_of_its_heads() -> None:
    shape = SmallModelConfig(hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=32, mlp_size=32)
    model = make_small_model(shape, 23, eos_id=1, pad_id=0, max_positions=64, seed=5)
    body = 16 * (64 + 32 + 32) + 64 * 16 + 2 * 32 + 3 * 16 * 32 + 2 * 16 + 16  # q, k, v; o; q and k norms; as above
    assert sum(p.numel() for p in model.parameters()) == body + HEAD
    assert FlopCounter(model).count(4, 4**2, 3) == 6 * body * 4 + 6 * HEAD * 3 + 6 * 64 * 4**2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.0),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A10G", None),
        ("Radeon", None),
    ],
)
def test_the_peak_is_known_by_the_whole_name_of_a_device(name: str, expected: float | None) -> None:
    assert peak_tflops(name) == expected
