"""Layers whose KV heads and head dim are not those of the others: what a config says, and what is made of it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calibration_support import PROSE, SMALL, same
from models import lab_model
from plan_support import costs
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

import turbo_hf
from turbo_hf import Calibration, TurboConfig
from turbo_hf.models.model_layers import head_dim, kv_heads, layer_windows, shape_field


def config() -> PreTrainedConfig:
    """Gemma 4: the full-attention layer has one KV head of 32 channels, those with a window two of 16."""
    made: PreTrainedConfig = AutoConfig.for_model(
        "gemma4_text", vocab_size=3072, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], sliding_window=40,
        global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
    )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A random one."""
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config())
    made.eval()
    return made


def test_windows_heads_and_dims_are_read_from_the_config() -> None:
    made = config()
    assert [window for _, window in layer_windows(made)] == [40, 40, None]
    assert [kv_heads(made, layer) for layer in range(3)] == [2, 2, 1]
    assert [head_dim(made, layer) for layer in range(3)] == [16, 16, 32]
    assert shape_field(made, "head_dim") == [16, 16, 32]
    assert shape_field(made, "hidden_size") == 64
    assert shape_field(LlamaConfig(), "head_dim") == 128
    assert shape_field(LlamaConfig(), "no_such_field") is None
    # keys and values of two heads of 16 channels, of one of 32: as many numbers
    assert [cost.per_token for cost in costs(made)] == [128.0] * 3


def test_each_layer_is_stored_as_it_is(model: PreTrainedModel) -> None:
    with turbo_hf.patch(model, TurboConfig(bits=4, low_bits=2, low_heads=0.5)) as handle:
        assert [layer.groups for layer in handle.report().layers] == [((4, 1), (2, 1))] * 2 + [((4, 1),)]


def test_a_calibration_fits_and_is_read_back(model: PreTrainedModel, tmp_path: Path) -> None:
    _, tokenizer = lab_model()
    made = turbo_hf.calibrate(model, tokenizer, [PROSE], settings=replace(SMALL, windows=2, steps=2))
    assert made.fingerprint["num_key_value_heads"] == [2, 2, 1]
    assert {len(layer.scores["priority"]) for layer in made.layers[:2]} == {2}
    made.save_pretrained(tmp_path)
    back = Calibration.from_pretrained(tmp_path)
    assert same(back, made)
    turbo_hf.patch(model, TurboConfig(low_bits=2, low_heads=0.5), calibration=back).remove()
    other = replace(made, fingerprint={**made.fingerprint, "num_key_value_heads": [2, 2, 2]})
    with pytest.raises(ValueError, match=r"num_key_value_heads"):
        turbo_hf.patch(model, TurboConfig(low_bits=2, low_heads=0.5), calibration=other)
