"""What may be on around a patched model: autocast, another default device; and options that are for the ops."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibration_support import SMALL, TEXTS
from graphs_support import an_index
from models import lab_model, prompts, tiny_llama
from patching_support import tiny
from transformers import DynamicCache

import turbo_hf
from turbo_hf import SparseConfig, TurboConfig
from turbo_hf.attention import prompt
from turbo_hf.cache import passes
from turbo_hf.cache.new_columns import columns_from_mask
from turbo_hf.cache.storage import DECODE_TOKENS
from turbo_hf.calibration.run import calibrate
from turbo_hf.config.turbo_config import PRESETS
from turbo_hf.layout import Rounding, Scoring
from turbo_hf.models.versions import CACHE
from turbo_hf.parallel import context
from turbo_hf.patching.doctor import diagnose
from turbo_hf.sparse.selectors import Centroids

PLAIN = TurboConfig(bits=16, block_size=32, attention="fp16")


@pytest.fixture
def meta_by_default() -> Iterator[None]:
    """Tensors that name no device have no data, so that one of them anywhere shows."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def logits(model: Any, ids: torch.Tensor, held: Any) -> torch.Tensor:
    """Of a prompt and of eight tokens after it."""
    with torch.no_grad():
        parts = [ids[:, :-8], *ids[:, -8:].split(1, 1)]
        return torch.cat([model(part, **{CACHE: held}).logits for part in parts], 1).float()


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_autocast(narrow: torch.dtype) -> None:
    model, ids = tiny_llama(attn_implementation="sdpa"), prompts(2, 80)
    exact = logits(model, ids, DynamicCache())
    with torch.autocast("cpu", dtype=narrow):
        plain = logits(model, ids, DynamicCache())
        with turbo_hf.patch(model, PLAIN) as handle:
            held = handle.new_cache()
            ours = logits(model, ids, held)
            model.generate(ids, max_new_tokens=4, do_sample=False)
    assert all(layer.dtype == narrow for layer in held.turbo_layers())
    # both round to the narrow type, at other places
    assert float((ours - plain).norm()) < 2 * float((plain - exact).norm())


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_products_of_codes(narrow: torch.dtype) -> None:
    """Queries like the keys: their codes' products are far above the largest float16."""
    model = tiny_llama(num_hidden_layers=1, hidden_size=256, head_dim=64)
    layer = model.model.layers[0].self_attn
    times = len(layer.q_proj.weight) // len(layer.k_proj.weight)
    layer.q_proj.weight.data.copy_(layer.k_proj.weight.repeat(times, 1))
    ids = torch.tensor([[7, 7, 9] * 20])
    with turbo_hf.patch(model, TurboConfig(bits=8, block_size=32, backend="reference")) as handle:
        exact = logits(model, ids, handle.new_cache())
        with torch.autocast("cpu", dtype=narrow):
            ours = logits(model, ids, handle.new_cache())
    assert float((ours - exact).norm()) < 0.02 * float(exact.norm())


def test_patching_with_another_default_device(meta_by_default: None) -> None:
    # what is looked at in a model with a bias on its keys, and what is probed of its rotary embedding
    sparse = SparseConfig(selector="kmeans", probes=2)
    with torch.device("cpu"):
        model = tiny("qwen2")
        index = an_index(model)
    with turbo_hf.patch(model, TurboConfig(sparse=sparse), calibration=index) as handle:
        assert handle.report().layers[0].storage == "2 x 4 bit"


def test_calibrating_with_another_default_device(request: pytest.FixtureRequest) -> None:

    model, tokenizer = lab_model()
    want = calibrate(model, tokenizer, TEXTS, settings=SMALL)
    request.getfixturevalue("meta_by_default")
    got = calibrate(model, tokenizer, TEXTS, settings=SMALL)
    assert got.digest() == want.digest()


def test_a_pass_plans_once_for_each_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    model: Any = tiny("gemma2", num_hidden_layers=6, layer_types=kinds, sliding_window=24)
    made: list[int] = []
    real = columns_from_mask

    def counted(mask: Any, seen: int, *rest: Any) -> Any:
        made.append(seen)
        return real(mask, seen, *rest)

    monkeypatch.setattr(passes, "columns_from_mask", counted)
    ids = prompts(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    with turbo_hf.patch(model, "int8"):
        model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert {seen: made.count(seen) for seen in made} == {40 + n: 2 for n in (-40, 0, 1, 2)}


def test_attentions_that_are_not_there_are_told() -> None:
    model = tiny_llama()
    with (
        turbo_hf.patch(model, PLAIN) as handle,
        pytest.warns(UserWarning, match="output_attentions=True: attention over"),
    ):
        model(prompts(1, 20), **{CACHE: handle.new_cache()}, output_attentions=True)


def test_the_doctors_report_is_of_the_default() -> None:
    found = diagnose(tiny_llama())
    assert found.report is not None
    assert found.report.config == PRESETS["turbo4"]


def test_low_heads_of_less_than_one_head_are_told() -> None:
    config = TurboConfig(bits=4, low_bits=2, low_heads=0.25)
    with pytest.warns(UserWarning, match=r"low_heads=0.25 is less than one KV head of each layer: all keep 4 bit"):
        handle = turbo_hf.patch(tiny_llama(), config)
    assert "2-bit heads" not in str(handle.report())
    handle.remove()
    # layers that are kept at 8 bit need none
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*less than one KV head")
        turbo_hf.patch(tiny_llama(), replace(config, int8_layers=(0, 1))).remove()


def test_weights_of_a_selector_keep_their_precision() -> None:
    config = SparseConfig(selector="kmeans", probes=2)
    selector = Centroids(config, 1, torch.randn(2, 8, 16).half(), True)
    assert selector._on("centroids", torch.device("cpu")).dtype == torch.float32
    assert selector._on("centroids", torch.device("meta")).dtype == torch.float16


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

    def spied(module: Any, name: str) -> Any:
        real = getattr(module, name)

        def spy(*args: Any, **options: Any) -> Any:
            tuples = [x._asdict() for x in (*args, *options.values()) if isinstance(x, (Scoring, Rounding))]
            asked.append((name, {**options, **dict(item for each in tuples for item in each.items())}))
            return real(*args, **options)

        return spy

    for module, name in ((prompt, "prefill"), (context, "decode")):
        monkeypatch.setattr(module, name, spied(module, name))
    model = tiny_llama(num_hidden_layers=1)
    with turbo_hf.patch(model, TurboConfig(attention=mode, block_size=32, **CHOSEN)) as handle:
        cache = handle.new_cache()
        for count in tokens:
            asked.clear()
            model(prompts(1, count), **{CACHE: cache})
    assert [name for name, _ in asked] == [op]
    assert {name: asked[0][1][name] for name in said} == said
