from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, GptOssConfig, GptOssForCausalLM, MambaConfig, MambaForCausalLM

from grpo_lib.errors import ModelError
from grpo_lib.training import attention
from grpo_lib.training.attention import check_packing, packed_attention, use_packed_attention
from grpo_lib.training.rectangles import PackedRows, rectangle_attention


def test_rows_that_mix_fail_the_check(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3")
    use_packed_attention(model)

    def mixing(*parts: Any) -> Tensor:
        return rectangle_attention(*parts[:3], PackedRows(torch.tensor([0, 15], dtype=torch.int32)), *parts[4:])

    monkeypatch.setattr(attention, "rectangle_attention", mixing)
    with pytest.raises(ModelError, match=r"Qwen3ForCausalLM gives packed rows other hidden states .*layout=padded"):
        check_packing(model)


def test_layers_without_attention_are_refused_by_name() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=23, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ModelError, match=r"MambaForCausalLM has layers of type linear_attention.*layout=padded"):
        use_packed_attention(model)


def test_a_model_that_computes_its_attention_itself_is_refused() -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=23, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(ModelError, match=r"BloomForCausalLM computes its attention itself.*layout=padded"):
        use_packed_attention(model)


def test_a_backbone_without_positions_is_refused(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    monkeypatch.setattr(model.base_model, "forward", lambda input_ids, use_cache: None)
    with pytest.raises(ModelError, match="LlamaForCausalLM takes no positions"):
        use_packed_attention(model)


def test_attention_sinks_are_refused_by_the_check() -> None:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 23,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 32,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["full_attention"],
    }
    model = GptOssForCausalLM(GptOssConfig(**shape)).eval()
    use_packed_attention(model)
    with pytest.raises(ModelError, match="GptOssAttention asks attention for s_aux, which packed rows can't have"):
        check_packing(model)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "asks attention for position_bias"),
        ({"dropout": 0.1}, "asks attention for dropout"),
        ({"is_causal": False}, "asks attention for attention in both directions"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "asks attention for an attention mask"),
        ({"cu_seq_lens_q": None}, "does not hand the offsets of packed rows on"),
    ],
)
def test_what_packed_attention_does_not_do_is_refused(asked: dict[str, Any], message: str) -> None:
    states = torch.zeros(1, 2, 4, 8)
    usual = {"attention_mask": None, "cu_seq_lens_q": torch.tensor([0, 4], dtype=torch.int32), "max_length_q": 4}
    output, _ = packed_attention(nn.Identity(), states, states, states, **usual, dropout=0.0, position_bias=None)
    assert output.shape == (1, 4, 2, 8)
    with pytest.raises(ModelError, match=message):
        packed_attention(nn.Identity(), states, states, states, **{**usual, **asked})
