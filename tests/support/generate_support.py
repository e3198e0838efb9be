"""Prompts and answers for the tests of `generate`."""

from typing import Any

import pytest
from choices import flat_config
from models import lab_model, left_padded, prompts, tiny_mistral
from torch import Tensor

import turbo_hf
from turbo_hf import TurboCache, TurboConfig
from turbo_hf.layout import FIRST
from turbo_hf.models.versions import CACHE

EXACT = [
    pytest.param(TurboConfig(attention="native", bits=8), id="8bit"),
    pytest.param(TurboConfig(attention="native", bits=4), id="4bit"),
    pytest.param(flat_config(attention="native", bits=4, low_bits=2, low_heads=0.5), id="mixed"),
    pytest.param(flat_config(attention="native", bits=3, block_size=32), id="3bit-block32"),
    pytest.param(TurboConfig(attention="native", bits=4, value_bits=2), id="k4v2"),
    pytest.param(TurboConfig(attention="native", layer_bits=(2, (8, 4)), recent_tokens=64), id="depths"),
    pytest.param(flat_config(attention="native", bits=2), id="2bit"),
]
EXACT4 = TurboConfig(attention="native", bits=4)
MODES = ["turbo", "native"]
RAGGED = [60, 125, 1, FIRST + 128]
"""Lengths of a batch: open tokens only, a seal while decoding, a single token, exactly one block and recent tokens."""


def mistral(window: int | None) -> Any:
    """A tiny Mistral in float64."""
    return tiny_mistral(window, attn_implementation="sdpa").double()


def ragged(lengths: list[int] | None = None) -> dict[str, Any]:
    """A left-padded batch of random prompts."""
    lengths = RAGGED if lengths is None else lengths
    return left_padded([prompts(1, length, seed=row)[0] for row, length in enumerate(lengths)])


def answer(model: Any, tokens: int = 24, **options: Any) -> Tensor:
    """The new tokens of a `generate` call."""
    result = model.generate(max_new_tokens=tokens, **options)
    ids = result if isinstance(result, Tensor) else result.sequences
    return ids[:, options["input_ids"].shape[1] :]


def oracle(model: Any, config: TurboConfig, tokens: int = 24, expand: int = 1, **options: Any) -> Tensor:
    """The same call without the patch: stock attention on the dequantised cache."""
    assert model.config._attn_implementation != "turbo_hf"
    mask = options.get("attention_mask")
    cache = TurboCache(model.config, config, attention_mask=None if mask is None else mask.repeat_interleave(expand, 0))
    return answer(model, tokens, **{CACHE: cache}, **options)


def patched(model: Any, config: str | TurboConfig, tokens: int = 24, **options: Any) -> Tensor:
    """The same call with the patch on."""
    with turbo_hf.patch(model, config):
        return answer(model, tokens, **options)


def story() -> dict[str, Any]:
    """A prompt for the trained model whose answer repeats parts of it."""
    text = "Q: I have a cat, a dog, and a snake. How many animals do I have?\nA: Let's think step by step.\n"
    return dict(lab_model()[1](text, return_tensors="pt"))
