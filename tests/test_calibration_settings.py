"""Calibration: settings, models and texts that are refused before anything is read."""

from dataclasses import replace
from typing import Any

import pytest
from all_pairs import in_one_test
from calibration_support import HEADS, SMALL, TEXTS, lab
from families_support import build
from models import lab_model, tiny_llama
from transformers import BloomConfig, BloomForCausalLM, T5Config, T5Model

from turbo_hf.calibration.run import calibrate, make_plan
from turbo_hf.calibration.settings import resolve_settings


@in_one_test(
    ("settings", "message"),
    [
        ({"window": 100, "local": 90}, "too short for the long-range filter: with local=90 and far=16 they need 184"),
        ({"window": 63}, "Settings.window must be a whole number of at least 64; got 63"),
        ({"windows": 1}, "Settings.windows must be a whole number of at least 2; got 1"),
        ({"clusters": 32769}, "Settings.clusters must be at most 32768; got 32769"),
        ({"seed": 1 << 32}, "Settings.seed must be at most 4294967295; got 4294967296"),
        ({"clusters": 1}, "Settings.clusters must be a whole number of at least 2; got 1"),
        ({"seed": -1}, "Settings.seed must be a whole number of at least 0; got -1"),
        ({"learning_rate": 2.0}, "Settings.learning_rate must be a number between 0 and 1; got 2.0"),
        ({"index": 1}, "Settings.index must be True or False; got 1"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **settings)


def test_bad_input() -> None:
    model, tokenizer = lab_model()
    with pytest.raises(ValueError, match="one of the presets fast, full; got 'slow'"):
        resolve_settings("slow")
    assert resolve_settings("fast", 6000).window == 6000
    with pytest.raises(ValueError, match="longer than the 100 positions"):
        resolve_settings(SMALL, 100)
    with pytest.raises(TypeError, match=r"must be a transformers.PreTrainedModel; got str"):
        calibrate("model", tokenizer, TEXTS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="too few for two windows of 256"):
        calibrate(model, tokenizer, ["A short text."], settings=HEADS)
    with pytest.raises(ValueError, match="no file or folder 'nowhere'"):
        calibrate(model, tokenizer, "nowhere", settings=HEADS)
    begun: list[float] = []
    with pytest.raises(ValueError, match="too few for 4000 clusters"):
        lab(settings=replace(SMALL, clusters=4000), progress=lambda _, share: begun.append(share))
    assert not begun, "told before the first pass"
    with pytest.raises(ValueError, match="it belongs to another model"):
        calibrate(tiny_llama(), tokenizer, TEXTS, settings=HEADS)
    with pytest.raises(ValueError, match=r"no layer of LlamaForCausalLM can be calibrated: .*24"):
        make_plan(build("llama", head_dim=24), SMALL)
    with pytest.raises(
        ValueError, match=r"in training mode, in which dropout changes what it sees. Call model.eval\(\)"
    ):
        make_plan(tiny_llama().train(), SMALL)
    small: dict[str, Any] = {"vocab_size": 100, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ValueError, match="T5Model is an encoder-decoder; only decoder-only models can be calibrated"):
        make_plan(T5Model(T5Config(**small)).eval(), SMALL)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=100, hidden_size=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(ValueError, match="no layer of BloomForCausalLM can be calibrated: it has no attention module"):
        make_plan(bloom, SMALL)
