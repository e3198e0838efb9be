"""Fields of a config that its model never reads: what the module does decides, not what the config says."""

import warnings
from typing import Any

import pytest
import torch
from models import tiny_llama
from tiny_families import FULL, SLIDING, build, kinds
from torch import Tensor
from transformers import LlamaConfig, MistralConfig

import turbo_hf
from turbo_hf import TurboCache, TurboConfig
from turbo_hf.errors import Unsupported
from turbo_hf.models.model_layers import layer_windows

CONFIG = TurboConfig(bits=16, attention="fp16", block_size=32)
WINDOW = 24
MIXED: dict[str, Any] = {"layer_types": [SLIDING, FULL] * 2, "sliding_window": WINDOW}
FIELDS: list[dict[str, Any]] = [
    {"sliding_window": WINDOW},
    MIXED,
    {"attn_logit_softcapping": 2.0},
    {"softcap": 2.0},
    {"attention_sinks": True},
    {"attention_multiplier": 9.0},
    {"query_pre_attn_scalar": 1.0},
    {"attention_chunk_size": WINDOW},
    {"local_attention": WINDOW},
    {"num_key_value_heads": 1},
    {"head_dim": 8},
    {"is_causal": False},
    {"use_bidirectional_attention": True},
    {"num_kv_shared_layers": 2},
    {"kv_lora_rank": 16},
    {"partial_rotary_factor": 0.25},
    {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}},
    {"no_rope_layers": [0] * 4},
]


@torch.no_grad()
def last(model: Any, ids: Tensor, use_cache: bool = False) -> Tensor:
    """Logits of the last token."""
    return torch.as_tensor(model(ids, use_cache=use_cache).logits[:, -1])


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2"])
def test_a_field_that_the_modules_do_not_read_changes_nothing(family: str) -> None:
    ids, served = torch.randint(3, 99, (2, 60), generator=torch.Generator().manual_seed(0)), []
    for fields in FIELDS:
        model: Any = build(family)
        for name, value in fields.items():
            if name not in ("query_pre_attn_scalar", "layer_types") or family != "gemma2":
                setattr(model.config, name, value)
        stock = last(model, ids)
        try:
            last(model, ids, use_cache=True)
        except IndexError:
            # transformers 5.17 makes too short a cache for shared keys that are none
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with turbo_hf.patch(model, CONFIG):
                    ours = [last(model, ids), last(model, ids, use_cache=True)]
        except Unsupported:
            continue
        served.append(next(iter(fields)))
        assert all(float((each - stock).abs().max()) < 0.01 * float(stock.std()) for each in ours), fields
    assert "sliding_window" in served
    assert len(served) >= len(FIELDS) - 3


def test_a_window_that_no_layer_masks_by_is_named() -> None:
    model = tiny_llama(sliding_window=WINDOW)
    with pytest.warns(UserWarning, match=f"sliding window of {WINDOW}, by which no layer of LlamaForCausalLM masks"):
        handle = turbo_hf.patch(model, CONFIG)
    with handle:
        assert all(at.window is None for at in handle.report().layers)
    assert all(window is None for _, window in layer_windows(LlamaConfig(**MIXED, num_hidden_layers=4)))
    # with no model at hand, too
    assert not any(TurboCache(model.config).is_sliding)
    assert all(window == WINDOW for _, window in layer_windows(MistralConfig(sliding_window=WINDOW)))


@pytest.mark.parametrize("types", [[FULL] * 4, [SLIDING, FULL] * 2], ids=["full", "mixed"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_a_model_that_masks_otherwise_than_its_config_says_is_refused(types: list[str], use_cache: bool) -> None:
    model: Any = build("mistral")
    assert kinds(model.config) is None
    ids = torch.randint(3, 99, (1, 60), generator=torch.Generator().manual_seed(0))
    # every layer of a Mistral has the window
    model.config.layer_types = types
    with turbo_hf.patch(model, CONFIG, strict="warn") as handle:
        with pytest.raises(Unsupported, match=r"has the window None by the config, .* masks otherwise \(window 24\)"):
            last(model, ids, use_cache)
        del model.config.layer_types
        handle.remove()
    # masks of an earlier model, or pass, are not those of this one
    with turbo_hf.patch(model, CONFIG):
        last(model, ids, use_cache)
        model.config.sliding_window = None
        with pytest.raises(Unsupported, match=r"has the window 24 by the config, .*\(without a window\)"):
            last(model, ids, use_cache)
