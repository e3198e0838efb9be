"""`turbo-hf plan`: figures from a config alone are those of a real cache, and only of models that `patch` takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from all_pairs import in_one_test
from choices import EVERY_PRESET
from families_support import CHUNKED, EXPERTS, FAMILY_CASES, FULL, GENERIC_CASES, LINEAR, Case, build
from models import prompts
from plan_support import SMALL, costs, sealed_bytes
from test_families_refused import LATENT
from transformers import AutoConfig, DynamicCache, PreTrainedConfig
from typer.testing import CliRunner

import turbo_hf
from turbo_hf import TurboConfig, Unsupported
from turbo_hf.cache.memory import LayerCost, cache_bytes
from turbo_hf.cli.main import app
from turbo_hf.cli.plan import MemoryPlan, layer_costs, longest_context, parse_bytes, plan
from turbo_hf.layout import open_token_bytes
from turbo_hf.models.versions import CACHE
from turbo_hf.patching.meta_model import meta_model, uncompressed_layers

TOKENS = 128
"""Two blocks: everything is sealed."""


def plan_of(model_type: str, context: int = 1000, **options: Any) -> MemoryPlan:
    """A plan of a small model on a GPU of 1 GB."""
    config = AutoConfig.for_model(model_type, **{**SMALL, **options})
    return plan(meta_model(config), context=context, batch=1, gpu_bytes=10**9, weights=0)


def folder_of(tmp_path: Path, **fields: Any) -> str:
    """A folder with nothing but a config.json."""
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return str(tmp_path)


def run(*words: str, code: int = 0) -> Any:
    """A command; stdout and stderr with single spaces."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return " ".join(result.output.split())


# --- figures -------------------------------------------------------------------------------------------------------

MEASURED = [
    case for case in FAMILY_CASES + GENERIC_CASES
    if case.model_type in ("llama", "mistral", "qwen2", "phi3", "gemma3_text", "gemma4_text", "gpt_oss", "gpt2")
    or case.model_type in ("qwen3_next", "bamba", "llama4_text", "gemma3n_text")
]  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(case, id=case.model_type + case.variant) for case in MEASURED])
def test_figures_are_those_of_a_real_cache(case: Case) -> None:
    model: Any = build(case.model_type, **case.options)
    own, ids = DynamicCache(config=model.config), prompts(2, TOKENS)
    with torch.no_grad():
        model(ids, **{CACHE: own})
    assert measured(own) == planned(costs(model.config, None, torch.float32))
    # what a preset costs does not hang on the family: all of them once
    presets = ("int8", "turbo4", "turbo-mixed", "turbo-k4v3", "turbo-k4v2") if case is MEASURED[0] else ("turbo-mixed",)
    for preset in presets:
        with turbo_hf.patch(model, preset) as handle, torch.no_grad():
            cache = handle.new_cache()
            model(ids, **{CACHE: cache})
        assert measured(cache) == planned(costs(model.config, EVERY_PRESET[preset], torch.float32)), preset


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(TurboConfig(bits=2, int8_layers=(0,), dense_layers=(2,)), id="layers"),
        pytest.param(TurboConfig(layer_bits=(2, (8, 4), 3)), id="layers-by-hand"),
        pytest.param(TurboConfig(bits=16, low_bits=4, low_heads=0.5, block_size=32), id="full"),
    ],
)
def test_figures_of_other_configs(config: TurboConfig) -> None:
    model: Any = build("llama").bfloat16()
    with turbo_hf.patch(model, config) as handle, torch.no_grad():
        cache = handle.new_cache()
        model(prompts(2, TOKENS), **{CACHE: cache})
    assert measured(cache) == planned(costs(model.config, config))


@pytest.mark.parametrize("window", [None, 32])
def test_recent_tokens_are_counted_as_open(window: int | None) -> None:
    config = TurboConfig(block_size=32, recent_tokens=64)
    model: Any = build("mistral", sliding_window=window).bfloat16()
    with turbo_hf.patch(model, config) as handle, torch.no_grad():
        cache = handle.new_cache()
        model(prompts(2, TOKENS), **{CACHE: cache})
    # the room of an open block is not planned
    opened = [2 * 64 * layer.heads * open_token_bytes(layer.dim) for layer in cache.turbo_layers()]
    assert [sum(x) for x in zip(measured(cache), opened, strict=True)] == planned(costs(model.config, config))


def measured(cache: Any) -> list[int]:
    return [sealed_bytes(layer) for layer in cache.layers]


def planned(each: list[LayerCost]) -> list[float]:
    return [2 * cache_bytes([cost], TOKENS) for cost in each]


def test_the_dtype_of_the_config_counts() -> None:
    narrow, wide = (plan_of("llama", dtype=dtype).rows[0] for dtype in ("float16", "float32"))
    assert (narrow.method, wide.method) == ("fp16", "fp32")
    assert (narrow.bytes_per_token, wide.bytes_per_token) == (256.0, 512.0)
    # that of quantized weights is none for a cache
    assert plan_of("llama", dtype="float8_e4m3fn").rows[0] == narrow


def test_a_window_limits_what_a_context_takes() -> None:
    for row in plan_of("mistral", context=10**6, sliding_window=128).rows:
        assert (row.longest_context, row.fits) == (-1, True)
    # 128 tokens of two layers: 127 unpatched, two whole blocks patched
    rows = {row.method: row for row in plan_of("mistral", context=10**6, sliding_window=128).rows}
    assert rows["fp16"].cache_bytes == 127 * 256
    assert rows["int8"].cache_bytes == pytest.approx(128 * rows["int8"].bytes_per_token)


def test_chunked_layers_stay_dense_and_states_are_constant() -> None:
    chunked = plan_of(
        "llama4_text", context=10**6, num_hidden_layers=2, layer_types=[CHUNKED, FULL], attention_chunk_size=100,
        intermediate_size_mlp=96, **EXPERTS,
    )  # fmt: skip
    assert chunked.rows[0].cache_bytes == (99 + 10**6) * 128
    assert "1 of 2 layers are not compressed, each because chunked_attention" in chunked.notes[0]
    linear = plan_of("qwen3_next", context=1000, layer_types=[LINEAR, FULL], **EXPERTS)
    assert linear.rows[0].bytes_per_token == 128
    assert linear.rows[0].cache_bytes == 1000 * 128 + linear.rows[0].constant_bytes
    # recent tokens are constant too
    assert {row.constant_bytes for row in linear.rows if "-depth" not in row.method} == {linear.rows[0].constant_bytes}
    assert linear.rows[0].constant_bytes > 0


def test_a_model_larger_than_the_gpu_fits_no_context() -> None:
    model = meta_model(AutoConfig.for_model("llama", **SMALL))
    for row in plan(model, context=1000, batch=1, gpu_bytes=10**9, weights=10**9).rows:
        assert (row.fits, row.longest_context, row.largest_batch) == (False, 0, 0)
    with pytest.raises(ValueError, match="context and batch must be at least 1; got 0 and 1"):
        plan(model, context=0, batch=1, gpu_bytes=1, weights=0)


def test_longest_context_is_the_last_that_fits() -> None:
    each = [LayerCost(136.125, None), LayerCost(10.0, 64), LayerCost(0.0, None, 5000.0)]
    longest = longest_context(each, 1e6)
    assert cache_bytes(each, longest) <= 1e6 < cache_bytes(each, longest + 1)
    assert longest_context(each[1:], 1e6) == -1
    assert longest_context(each[1:], 5e3) == 0


@in_one_test(("text", "expected"), [("80GB", 80e9), ("24 GiB", 24 * 2**30), ("512mb", 512e6), ("1.5TB", 1.5e12)])
def test_amounts_of_memory(text: str, expected: float) -> None:
    assert parse_bytes(text) == expected


@in_one_test("text", ["", "GB", "-1GB", "80", "infGB", "nanGB"])
def test_other_amounts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected an amount of memory"):
        parse_bytes(text)


# --- what a config does not tell -----------------------------------------------------------------------------------


def test_notes() -> None:
    assert plan_of("llama").notes == plan_of("qwen2").notes == ()
    (many,) = plan_of("llama", context=5000, max_position_embeddings=4096).notes
    assert many == "The model was made for 4,096 positions; 5,000 tokens are more."


def test_the_command_says_the_same(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, model_type="qwen2", **SMALL, max_position_embeddings=4096)
    said = run("plan", folder, "--context", "8k", "--json")
    found = json.loads(said[said.index('{"rows"') :])
    assert found["positions"] == 4096
    (note,) = found["notes"]
    assert note in said
    # a file is a config, too
    assert "turbo4" in run("plan", f"{folder}/config.json")


def test_multimodal_models_are_weighed_with_all_parts() -> None:
    text = {**SMALL, "model_type": "gemma3_text", "layer_types": [FULL] * 2}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = meta_model(AutoConfig.for_model("gemma3", text_config=text, vision_config=vision))
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    assert sum(layer.cost.per_token for layer in uncompressed_layers(model)) == 256


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "doctor"])
@in_one_test(
    ("fields", "sentence"),
    [
        pytest.param({"model_type": "t5"}, "t5 is an encoder-decoder; only decoder-only models", id="t5"),
        pytest.param({"model_type": "whisper"}, "whisper is an encoder-decoder; only decoder-only", id="whisper"),
        pytest.param({"model_type": "clip"}, "clip is no language model: Transformers has no class", id="clip"),
        pytest.param({"model_type": "vit"}, "vit is no language model: Transformers has no class", id="vit"),
        pytest.param(
            {"model_type": "llama", **SMALL, "num_hidden_layers": -1},
            "num_hidden_layers must be a number of layers; the config has -1",
            id="negative-layers",
        ),
        pytest.param({"model_type": "bert", "num_hidden_layers": 2}, "no layer of BertLMHeadModel", id="bert"),
        pytest.param({"model_type": "mamba", "num_hidden_layers": 2}, "no layer of MambaForCausalLM", id="mamba"),
        pytest.param(
            {"model_type": "deepseek_v3", **SMALL, **EXPERTS, **LATENT, "num_key_value_heads": 4, "kv_lora_rank": 24},
            "no layer of DeepseekV3ForCausalLM",
            id="deepseek",
        ),
        pytest.param({"model_type": "llama", **SMALL, "head_dim": 24}, "head dim 24 is no multiple of 16", id="dims"),
        pytest.param({"model_type": "blt"}, "the config of BltForCausalLM has no num_hidden_layers", id="parts"),
        pytest.param({"model_type": "nothing"}, "no model of model_type 'nothing'. A newer version", id="unknown"),
        pytest.param({"hidden_size": 64}, "names no model_type", id="no-type"),
        pytest.param(
            {"model_type": "own", "auto_map": {"AutoConfig": "config.C"}},
            "own code, which turbo-hf does not run, and Transformers .* has no model of model_type 'own'",
            id="remote-code",
        ),
        pytest.param(
            {"model_type": "llama", "hidden_size": "big"}, "cannot read a config .* 'hidden_size'", id="field"
        ),
        pytest.param(
            {"model_type": "llama", **SMALL, "hidden_act": "none such"},
            "cannot build a llama of this config",
            id="build",
        ),
        pytest.param({"model_type": ["llama"]}, "names no model_type", id="type-list"),
        pytest.param(
            {"model_type": "mistral", **SMALL, "sliding_window": 0}, "has a sliding window of 0 tokens", id="window-0"
        ),
        pytest.param(
            {"model_type": "qwen2", **SMALL, "layer_types": ["sliding_attention"] * SMALL["num_hidden_layers"]},
            "has a sliding window of None tokens",
            id="no-window",
        ),
    ],
)
def test_refused_with_one_sentence(tmp_path: Path, command: str, fields: dict[str, Any], sentence: str) -> None:
    result = CliRunner().invoke(app, [command, folder_of(tmp_path, **fields)])
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    assert "fp16" not in result.output
    (said,) = (line for line in (" ".join(result.output.split()),) if "error: " in line or "problem: " in line)
    assert len(said.split("error: " if command == "plan" else "none")[-1]) < 1500
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(said)


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_a_config_that_is_a_list(tmp_path: Path, command: str) -> None:
    (tmp_path / "config.json").write_text("[1]")
    assert "names no model_type" in run(command, str(tmp_path), code=1)


def test_a_window_of_one_token_leaves_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match=r"holds no token \(sliding_window=1\), so there is nothing to compress"):
        plan_of("mistral", sliding_window=1)


def test_a_model_that_is_refused_in_part_is_refused() -> None:
    with pytest.raises(Unsupported, match="layers 1 cannot be compressed"):
        plan_of("gemma4_text", layer_types=["sliding_attention", FULL], global_head_dim=24)


def test_a_model_that_cannot_run_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = meta_model(AutoConfig.for_model("llama", **SMALL))
    monkeypatch.setattr(model.model.norm, "forward", lambda x: x * float(x.sum()))
    with pytest.raises(ValueError, match="what the cache of a llama takes cannot be told without its weights"):
        uncompressed_layers(model)


def test_a_layer_that_keeps_nothing_is_not_planned() -> None:
    model = meta_model(AutoConfig.for_model("llama", **SMALL))
    with turbo_hf.patch(model) as handle:
        report = handle.report()
    nothing = [layer._replace(head_dim=0) for layer in uncompressed_layers(model)]
    with pytest.raises(ValueError, match="layer 0 of LlamaForCausalLM keeps no keys in its cache"):
        layer_costs(nothing, report)


def test_a_config_is_left_as_it_was() -> None:
    config: PreTrainedConfig = AutoConfig.for_model("llama", **SMALL)
    before = config.to_dict()
    model = meta_model(config)
    plan(model, context=10, batch=1, gpu_bytes=10**9, weights=0)
    assert config.to_dict() == before
    assert model.config._attn_implementation == "sdpa"


def test_latent_attention_has_the_presets_that_serve_it() -> None:
    rows = {row.method: row for row in plan_of("deepseek_v3", **{**EXPERTS, **LATENT}).rows}
    assert {"int8", "turbo4"} <= rows.keys()
    assert not {"turbo-k4v3", "turbo-k4v2"} & rows.keys()
    assert rows["turbo4"].compression > rows["int8"].compression > 1
