"""`turbo-hf plan` and `doctor`: what a config tells without weights, which figures are those of a real cache; and bytes
of weights, as they are or as a checkpoint stores them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from choices import EVERY_PRESET, flat_config
from cli_support import last_json, output_of, run
from families_support import CHUNKED, EXPERTS, FAMILY_CASES, FULL, GENERIC_CASES, LATENT, LINEAR, Case, build
from models import LAB_MODEL, prompts, tiny_llama
from plan_support import SMALL, costs, sealed_bytes
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache, PreTrainedConfig, PreTrainedModel

import turbo_hf
from turbo_hf import TurboConfig
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.memory import LayerCost, cache_bytes
from turbo_hf.cli.plan import PlanRow, file_bytes, has_weights, layer_costs, longest_context, parse_bytes, plan, weigh
from turbo_hf.console import load_model
from turbo_hf.layout import FIRST, open_token_bytes
from turbo_hf.models.versions import CACHE
from turbo_hf.patching.meta_model import meta_model, uncompressed_layers

TOKENS = 128
"""Two blocks: everything is sealed."""


def plan_of(model_type: str, context: int = 1000, **options: Any) -> tuple[list[PlanRow], list[str]]:
    """A plan of a small model on a GPU of 1 GB."""
    config = AutoConfig.for_model(model_type, **{**SMALL, **options})
    return plan(meta_model(config), context=context, batch=1, gpu_bytes=10**9, weights=0)


def folder_of(tmp_path: Path, fields: Any) -> str:
    """A folder with nothing but a config.json."""
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return str(tmp_path)


# --- figures -------------------------------------------------------------------------------------------------------

MEASURED = [
    case for case in FAMILY_CASES + GENERIC_CASES
    if case.model_type in ("llama", "mistral", "qwen2", "phi3", "gemma3_text", "gemma4_text", "gpt_oss", "gpt2")
    or case.model_type in ("qwen3_next", "bamba", "llama4_text", "gemma3n_text", "deepseek_v32")
]  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(case, id=case.model_type + case.variant) for case in MEASURED])
def test_figures_are_those_of_a_real_cache(case: Case) -> None:
    model: Any = build(case.model_type, **case.options)
    own, ids = DynamicCache(config=model.config), prompts(2, FIRST + TOKENS)
    with torch.no_grad():
        model(ids, **{CACHE: own})
    assert measured(own) == planned(costs(model.config, None, torch.float32), own)
    # what a preset costs does not hang on the family: all of them once
    presets = ("int8", "turbo4", "turbo-mixed", "turbo-k4v3", "turbo-k4v2") if case is MEASURED[0] else ("turbo-mixed",)
    for preset in presets:
        with turbo_hf.patch(model, preset) as handle, torch.no_grad():
            cache = handle.new_cache()
            model(ids, **{CACHE: cache})
        assert measured(cache) == planned(costs(model.config, EVERY_PRESET[preset], torch.float32), cache), preset


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(TurboConfig(bits=2, int8_layers=(0,), dense_layers=(2,)), id="layers"),
        pytest.param(TurboConfig(layer_bits=(2, (8, 4), 3)), id="layers-by-hand"),
        pytest.param(flat_config(bits=16, block_size=32), id="full"),
        pytest.param(flat_config(block_size=32, recent_tokens=64), id="recent"),
    ],
)
def test_figures_of_other_configs(config: TurboConfig) -> None:
    for window in (None, 32) if config.recent_tokens else (None,):
        model: Any = build("mistral", sliding_window=window).bfloat16()
        with turbo_hf.patch(model, config) as handle, torch.no_grad():
            cache = handle.new_cache()
            model(prompts(2, FIRST + TOKENS), **{CACHE: cache})
        assert measured(cache) == planned(costs(model.config, config), cache)


def measured(cache: Any) -> list[int]:
    """Bytes of each layer, open tokens that join no block included: the room of an open block is not planned."""
    return [
        sealed_bytes(layer)
        + (2 * layer.state.staying * layer.heads * open_token_bytes(layer.dim) if isinstance(layer, TurboLayer) else 0)
        for layer in cache.layers
    ]


def planned(each: list[LayerCost], cache: Any) -> list[float]:
    """Bytes of each layer at as many tokens as it holds in whole blocks, or beside them."""
    blocks = [isinstance(layer, TurboLayer) and not layer.state.first for layer in cache.layers]
    return [2 * cache_bytes([cost], TOKENS + FIRST * (not own)) for cost, own in zip(each, blocks, strict=True)]


def test_the_dtype_of_the_config_counts() -> None:
    narrow, wide = (plan_of("llama", dtype=dtype)[0][0] for dtype in ("float16", "float32"))
    assert (narrow.method, wide.method) == ("fp16", "fp32")
    assert (narrow.bytes_per_token, wide.bytes_per_token) == (256.0, 512.0)
    # that of quantized weights is none for a cache
    assert plan_of("llama", dtype="float8_e4m3fn")[0][0] == narrow


def test_a_window_limits_what_a_context_takes() -> None:
    for row in plan_of("mistral", context=10**6, sliding_window=128)[0]:
        assert (row.longest_context, row.fits) == (-1, True)
    # 128 tokens of two layers: 127 unpatched, two whole blocks patched
    rows = {row.method: row for row in plan_of("mistral", context=10**6, sliding_window=128)[0]}
    assert rows["fp16"].cache_bytes == 127 * 256
    assert rows["int8"].cache_bytes == pytest.approx(128 * rows["int8"].bytes_per_token)


def test_chunked_layers_stay_dense_and_states_are_constant() -> None:
    rows, notes = plan_of(
        "llama4_text", context=10**6, num_hidden_layers=2, layer_types=[CHUNKED, FULL], attention_chunk_size=100,
        intermediate_size_mlp=96, **EXPERTS,
    )  # fmt: skip
    assert rows[0].cache_bytes == (99 + 10**6) * 128
    assert "1 of 2 layers are not compressed, each because chunked_attention" in notes[0]
    linear, _ = plan_of("qwen3_next", context=1000, layer_types=[LINEAR, FULL], **EXPERTS)
    assert linear[0].bytes_per_token == 128
    states = linear[0].cache_bytes - 1000 * 128
    assert states > 0
    # as are first tokens, where steps read all
    for row in linear:
        constant = row.cache_bytes - 1000 * row.bytes_per_token
        assert constant == pytest.approx(states) if row.method in ("fp16", "saap") else constant > states + 1


def test_a_model_larger_than_the_gpu_fits_no_context() -> None:
    model = meta_model(AutoConfig.for_model("llama", **SMALL))
    for row in plan(model, context=1000, batch=1, gpu_bytes=10**9, weights=10**9)[0]:
        assert (row.fits, row.longest_context, row.largest_batch) == (False, 0, 0)


def test_longest_context_is_the_last_that_fits() -> None:
    each = [LayerCost(136.125, None), LayerCost(10.0, 64), LayerCost(0.0, None, 5000.0)]
    longest = longest_context(each, 1e6)
    assert cache_bytes(each, longest) <= 1e6 < cache_bytes(each, longest + 1)
    assert longest_context(each[1:], 1e6) == -1
    assert longest_context(each[1:], 5e3) == 0


@pytest.mark.parametrize(
    ("text", "expected"), [("80GB", 80e9), ("24 GiB", 24 * 2**30), ("512mb", 512e6), ("1.5TB", 1.5e12)]
)
def test_amounts_of_memory(text: str, expected: float) -> None:
    assert parse_bytes(text) == expected
    for other in (f"-{text}", text[:-2], text[-2:], "nanGB"):
        with pytest.raises(ValueError, match="expected an amount of memory"):
            parse_bytes(other)


# --- what a config does not tell -----------------------------------------------------------------------------------


def test_more_tokens_than_positions_are_told(tmp_path: Path) -> None:
    assert plan_of("llama")[1] == []
    (many,) = plan_of("llama", context=5000, max_position_embeddings=4096)[1]
    assert many == "The model was made for 4,096 positions; 5,000 tokens are more."
    folder = folder_of(tmp_path, {"model_type": "qwen2", **SMALL, "max_position_embeddings": 4096})
    result = run("plan", folder, "--context", "8k", "--json")
    found = last_json(result)
    (note,) = found["notes"]
    assert note in " ".join(result.output.split())
    # a file is a config, too
    assert "turbo4" in output_of("plan", f"{folder}/config.json")


def test_multimodal_models_are_weighed_with_all_parts() -> None:
    text = {**SMALL, "model_type": "gemma3_text", "layer_types": [FULL] * 2}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = meta_model(AutoConfig.for_model("gemma3", text_config=text, vision_config=vision))
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    assert sum(layer.cost.per_token for layer in uncompressed_layers(model)) == 256


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "doctor"])
@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model_type": "t5"}, "t5 is an encoder-decoder; only decoder-only models"),
        ({"model_type": "clip"}, "clip is no language model: Transformers has no class"),
        ({"model_type": "llama", **SMALL, "num_hidden_layers": -1}, "must be a number of layers; the config has -1"),
        ({"model_type": "mamba", "num_hidden_layers": 2}, "no layer of MambaForCausalLM"),
        (
            {**SMALL, "model_type": "gemma4_text", "layer_types": ["sliding_attention", FULL], "global_head_dim": 24},
            "layers 1 cannot be compressed",
        ),
        ({"model_type": "blt"}, "the config of BltForCausalLM has no num_hidden_layers"),
        ({"model_type": "nothing"}, "cannot read a config .* `nothing`"),
        ({"hidden_size": 64}, "cannot read a config .* `model_type`"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "config.C"}}, "code beside it is never run"),
        ({"model_type": "llama", "hidden_size": "big"}, "cannot read a config .* 'hidden_size'"),
        ({"model_type": "llama", **SMALL, "hidden_act": "none such"}, "cannot build a llama of this config"),
        ([1], "cannot read a config"),
        ({"model_type": "mistral", **SMALL, "sliding_window": 0}, "has a sliding window of 0 tokens"),
        (
            {"model_type": "qwen2", **SMALL, "layer_types": ["sliding_attention"] * SMALL["num_hidden_layers"]},
            "has a sliding window of None tokens",
        ),
    ],
)
def test_refused_with_one_sentence(tmp_path: Path, command: str, fields: Any, sentence: str) -> None:
    told = output_of(command, folder_of(tmp_path, fields), code=1)
    assert "fp16" not in told
    assert len(told.partition("error: ")[2]) < 1500
    assert re.search(f"(error|problem): .*{sentence}", told)


def test_a_window_of_one_token_leaves_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match=r"holds no token \(sliding_window=1\), so there is nothing to compress"):
        plan_of("mistral", sliding_window=1)


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
    rows = {row.method: row for row in plan_of("deepseek_v3", **{**EXPERTS, **LATENT})[0]}
    assert {"int8", "turbo4"} <= rows.keys()
    assert not {"turbo-k4v3", "turbo-k4v2"} & rows.keys()
    assert rows["turbo4"].compression > rows["int8"].compression > 1


# --- doctor --------------------------------------------------------------------------------------------------------

NOT_COMPARED = "Logits were not compared: there are no weights here."


def doctor(name: str, code: int = 0) -> tuple[str, Any]:
    """What it prints, with single spaces, and its JSON (None: an error ended it)."""
    result = run("doctor", name, "--device", "cpu", "--json", code=code)
    return " ".join(result.output.split()), last_json(result) if "{" in result.stdout else None


def test_a_config_without_weights(tmp_path: Path) -> None:
    folder_of(tmp_path, {"model_type": "llama", **SMALL})
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        said, found = doctor(name)
        assert "LlamaForCausalLM (Llama)" in said
        assert "layers 0, 1: 2 x 4 bit" in said
        assert NOT_COMPARED in said
        assert "self-check" not in said
        assert "without a GPU" not in said
        assert found["model"] == {"refusal": None, "checks": {}, "unknown": [NOT_COMPARED]}


def test_key_biases_are_unknown_where_the_rotary_embedding_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path, {"model_type": "qwen2", **SMALL})
    said, found = doctor(str(tmp_path))
    assert "Keys have a bias" not in said
    monkeypatch.setattr("turbo_hf.patches.balance.rotate", None)
    said, found = doctor(str(tmp_path))
    assert "Keys have a bias, which only the weights tell" in said
    assert len(found["model"]["unknown"]) == 2


def test_a_refusal_needs_no_weights(tmp_path: Path) -> None:
    folder_of(tmp_path, {"model_type": "t5"})
    # would not load
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    said, found = doctor(str(tmp_path), code=1)
    assert "problem: t5 is an encoder-decoder; only decoder-only models are supported." in said
    assert found["model"]["checks"] == {}


def test_damaged_weights_are_an_error(tmp_path: Path) -> None:
    folder_of(tmp_path, {"model_type": "llama", **SMALL})
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    said, found = doctor(str(tmp_path), code=1)
    assert "error: cannot load" in said
    assert len(said.split("error: ")[1]) < 700
    assert found is None


def test_a_checkpoint_of_the_hub_whose_weights_are_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repo, commit = tmp_path / "models--me--one", "1" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    shutil.copytree(LAB_MODEL, repo / "snapshots" / commit, ignore=shutil.ignore_patterns("*.safetensors"))
    said, found = doctor("me/one")
    assert NOT_COMPARED in said, "the index is here, the file that it names is not"
    assert found["model"]["refusal"] is None
    (repo / "snapshots" / commit / "model.safetensors.index.json").unlink()
    assert NOT_COMPARED in doctor("me/one")[0]
    (repo / "snapshots" / commit / "model.safetensors.index.json").write_text("{")
    assert "is no index of weights; download it again" in doctor("me/one", code=1)[0]


def test_models_are_loaded_by_the_class_of_their_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = {**SMALL, "model_type": "mistral"}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("mistral3", text_config=text, vision_config={**vision, "model_type": "pixtral"})
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "multimodal")
    assert type(load_model(str(tmp_path / "multimodal"), "cpu")).__name__ == "Mistral3ForConditionalGeneration"
    folder_of(tmp_path, {"model_type": "t5"})
    with pytest.raises(typer.Exit):
        load_model(str(tmp_path), "cpu")
    (said,) = (line for line in capsys.readouterr().err.splitlines() if "error" in line)
    assert said == "error: t5 is an encoder-decoder; only decoder-only models are supported."


def test_an_adapter_is_of_the_model_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(LAB_MODEL)}))
    assert '"method": "fp16", "bytes_per_token": 3072' in output_of("plan", str(tmp_path), "--json")


# --- weights -------------------------------------------------------------------------------------------------------


def of_type(model_type: str, quantized: dict[str, Any] | None = None, **options: Any) -> PreTrainedModel:
    """A small meta model in bfloat16, with a quantization config."""
    config = AutoConfig.for_model(model_type, **{**SMALL, **options})
    if quantized is not None:
        config.quantization_config = quantized
    return meta_model(config)


def test_quantized_weights_count_as_their_files_do(tmp_path: Path) -> None:
    model = tiny_llama().to(torch.bfloat16)
    held = sum(p.nbytes for p in model.parameters())
    fields = {"quant_method": "vptq"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    model.save_pretrained(whole)
    model.save_pretrained(parts, max_shard_size="40KB")
    # one file has a header, too
    for folder, more in ((whole, 1.05), (parts, 1)):
        assert held <= (stored := file_bytes(str(folder)) or 0) <= held * more
        found = weigh(of_type("llama", fields), str(folder / "config.json"))
        assert found == (stored, "Weights (vptq) are counted as the checkpoint's files store them.")
        # of weights that are not quantized, or no longer, the config's dtype counts
        for other in (None, {**fields, "dequantize": True}):
            assert weigh(of_type("llama", other), str(folder)) == weigh(of_type("llama"))
    shards = list(parts.glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        shard.unlink()
    assert file_bytes(str(parts)) == held, "the index says it"
    assert not has_weights(str(parts))
    assert has_weights(str(whole))
    assert has_weights(str(LAB_MODEL))


def test_weights_of_the_hub_in_several_pickles_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, shard = "pytorch_model.bin.index.json", "pytorch_model-1-of-2.bin"
    (tmp_path / index).write_text(json.dumps({"weight_map": {"a": shard}}))

    def there(name: str, file: str, fetch: bool = False) -> str | None:
        return str(tmp_path / file) if name == "me/old" and (tmp_path / file).exists() else None

    monkeypatch.setattr("turbo_hf.cli.plan.hub_file", there)
    assert not has_weights("me/old"), "an index alone"
    (tmp_path / shard).touch()
    assert has_weights("me/old")


def test_quantized_weights_without_files_are_told() -> None:
    full = weigh(of_type("llama")).nbytes
    nbytes, note = weigh(of_type("llama", {"quant_method": "quanto", "weights": "int4"}))
    assert nbytes == full
    assert note == "Weights (quanto) are counted at 16 bit, which is too much: their files are not here."
    assert weigh(of_type("llama", {"quant_method": "mxfp4"})).nbytes == full, "it has no experts"
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1}
    whole, less = (weigh(of_type("gpt_oss", each, **experts)) for each in (None, {"quant_method": "mxfp4"}))
    assert less.note == "Weights (mxfp4) are counted at 4.25 bit: their files are not here."
    assert less.nbytes < whole.nbytes / 2


def test_an_index_that_is_none_is_named(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    assert file_bytes(str(tmp_path)) is None
    for text in ("{", "[]"):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"index\.json' .*is no index of weights; download it again"):
            file_bytes(str(tmp_path))
    strange: list[Any] = [{}, [], *({"total_size": x} for x in (-1, "x", float("nan"), True, 1 << 80))]
    for about in strange:
        index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}, "metadata": about}))
        assert file_bytes(str(tmp_path)) is None
