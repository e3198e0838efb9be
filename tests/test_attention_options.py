"""Options of a `TurboConfig` that are for the ops: what the attention function hands on to them."""

from typing import Any

import pytest
import torch
from models import prompts, tiny_llama

import turbo_hf
from turbo_hf import TurboConfig
from turbo_hf.cache.storage import DECODE_TOKENS
from turbo_hf.layout import Rounding, Scoring
from turbo_hf.models.versions import CACHE
from turbo_hf.ops.layer_ops import LayerOps

CHOSEN: dict[str, Any] = {"sas": True, "sas_threshold": -5.0, "v_scale": "channel", "smooth_k": True}
THRESHOLD: dict[str, Any] = {"sas_threshold": -5.0}
ROUNDING: dict[str, Any] = {**THRESHOLD, "v_scale": "channel", "smooth_k": True}
PROMPT, CHUNK = 40, DECODE_TOKENS + 1


@pytest.mark.parametrize(
    ("mode", "tokens", "op", "said"),
    [
        pytest.param("int8", [PROMPT], "prefill", {**ROUNDING, "mode": "int8"}, id="prompt"),
        pytest.param("int8", [PROMPT, CHUNK], "prefill", {**ROUNDING, "mode": "int8"}, id="chunk"),
        pytest.param("int8", [PROMPT, 1], "decode", {**THRESHOLD, "mode": "turbo"}, id="step"),
        # short prompts are not rounded
        pytest.param("auto", [PROMPT], "prefill", {**ROUNDING, "mode": "fp16", "smooth_k": False}, id="exact"),
    ],
)
@torch.no_grad()
def test_options_reach_the_ops(
    mode: Any, tokens: list[int], op: str, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def spied(name: str) -> Any:
        real = getattr(LayerOps, name)

        def spy(ops: LayerOps, *args: Any, **options: Any) -> Any:
            tuples = [x._asdict() for x in (*args, *options.values()) if isinstance(x, (Scoring, Rounding))]
            asked.append(
                (name, {"mode": ops.mode, **options, **dict(item for each in tuples for item in each.items())})
            )
            return real(ops, *args, **options)

        return spy

    for name in ("prefill", "decode"):
        monkeypatch.setattr(LayerOps, name, spied(name))
    model = tiny_llama(num_hidden_layers=1)
    with turbo_hf.patch(model, TurboConfig(attention=mode, block_size=32, **CHOSEN)) as handle:
        cache = handle.new_cache()
        for count in tokens:
            asked.clear()
            model(prompts(1, count), **{CACHE: cache})
    assert [name for name, _ in asked] == [op]
    assert {name: asked[0][1][name] for name in said} == said


@torch.no_grad()
def test_by_default_a_plain_prompt_is_not_rounded() -> None:
    model, ids = tiny_llama(num_hidden_layers=2), prompts(2, PROMPT)
    plain = model(ids).logits
    with turbo_hf.patch(model) as handle:
        torch.testing.assert_close(model(ids, **{CACHE: handle.new_cache()}).logits, plain)
