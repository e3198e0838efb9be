"""Bytes of weights: as they are, at the width that a quantization config names, or as a checkpoint stores them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from all_pairs import in_one_test
from families_support import EXPERTS as FEW
from models import lab_model, tiny_llama
from plan_support import SMALL
from transformers import AutoConfig, PreTrainedModel

from turbo_hf.cli.weights import Weights, file_bytes, has_weights, weigh, width
from turbo_hf.patching.meta_model import meta_model

LAB = Path(__file__).resolve().parents[1] / "examples" / "lab-llama-4m"
EXPERTS: dict[str, Any] = {**FEW}
GPT_OSS_120B: dict[str, Any] = {
    "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "num_local_experts": 128,
}  # fmt: skip
LINEAR = 2 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96)
"""Weights of the linear layers of SMALL, without the output embedding."""


def of_type(model_type: str, quantized: dict[str, Any] | None = None, **options: Any) -> PreTrainedModel:
    """A small meta model in bfloat16, with a quantization config."""
    config = AutoConfig.for_model(model_type, **{**SMALL, **options})
    if quantized is not None:
        config.quantization_config = quantized
    return meta_model(config)


def test_weights_of_a_model() -> None:
    model, _ = lab_model()
    assert weigh(meta_model(model.config)) == Weights(sum(p.nbytes for p in model.parameters()))


def test_gpt_oss_120b() -> None:
    nbytes, note = weigh(of_type("gpt_oss", {"quant_method": "mxfp4"}, **GPT_OSS_120B))
    # what the files of openai/gpt-oss-120b hold
    assert nbytes == pytest.approx(65.25e9, rel=1e-3)
    assert "counted at 4.25 bit with their scales" in note
    assert "expands them where it has no kernels for them, to 3.6 times as much" in note


CASES: dict[str, tuple[dict[str, Any], float]] = {
    "bnb-4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
    "bnb-4-double": ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 4 + 0.125 + 32 / 16384),
    "bnb-8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
    "gptq-channel": ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + 20 / 64),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
    "fp8-tensor": ({"quant_method": "fp8", "weight_block_size": None}, 8),
    "mxfp8": ({"quant_method": "mxfp8"}, 8.25),
    "hqq": (
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 3, "group_size": 64}}},
        3 + 32 / 64,
    ),
    "quanto-4": ({"quant_method": "quanto", "weights": "int4"}, 4.25),
    "quanto-8": ({"quant_method": "quanto", "weights": "float8"}, 8),
    "torchao-4": (
        {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 32}}},
        },
        5,
    ),
    "torchao-8": (
        {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Float8DynamicActivationFloat8WeightConfig", "_data": {}}},
        },
        8,
    ),
    "w4a16": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128, "symmetric": False}}},
        },
        4 + 20 / 128,
    ),
    "nvfp4": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16, "type": "float"}}},
        },
        4.5,
    ),
    "kv-only": ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": None}}}, 16),
}


@in_one_test("name", CASES)
def test_widths(name: str) -> None:
    fields, bits = CASES[name]
    assert width(fields.get("quant_method", "bitsandbytes"), fields) == pytest.approx(bits)
    plain, (nbytes, note) = weigh(of_type("llama")), weigh(of_type("llama", fields))
    assert nbytes == round(plain.nbytes - LINEAR * (2 - bits / 8))
    assert f"counted at {bits:.4g} bit" in note


@in_one_test(
    "fields",
    [
        {"quant_method": "vptq"},
        {"quant_method": "gptq"},
        {"quant_method": "torchao", "quant_type": "int4_weight_only"},
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "IntxWeightOnlyConfig", "_data": {}}}},
        {"quant_method": "bitsandbytes"},
        {"quant_method": "fp8", "expert_dtype": "fp4"},
        {"quant_method": "fp8", "weight_block_size": [0, 0]},
        {"quant_method": "quanto", "weights": "int3"},
        {"quant_method": "compressed-tensors", "config_groups": None},
    ],
)
def test_an_unknown_width_is_told(fields: dict[str, Any]) -> None:
    nbytes, note = weigh(of_type("llama", fields))
    assert nbytes == weigh(of_type("llama")).nbytes
    assert f"The width of quant_method '{fields['quant_method']}' with these options is not known here" in note
    assert "counted at 16 bit, which is too much" in note


def test_what_is_not_quantized_is_counted_whole() -> None:
    plain = weigh(of_type("llama")).nbytes
    for key, names in {
        "modules_to_not_convert": ["model.layers.0", "lm_head"],
        "ignore": ["re:model.layers.0.*", "lm_head"],
    }.items():
        nbytes, _ = weigh(of_type("llama", {"quant_method": "fp8", "weight_block_size": None, key: names}))
        assert nbytes == plain - LINEAR // 2
    assert weigh(of_type("llama", {"quant_method": "mxfp4", "dequantize": True})) == Weights(plain)


def test_experts_are_quantized_by_methods_that_reach_them() -> None:
    plain = weigh(of_type("qwen3_moe", **EXPERTS)).nbytes
    experts = 2 * 2 * 3 * 64 * 48
    attention = 2 * (64 * (64 + 32 + 32) + 64 * 64)
    # mxfp4 quantizes experts alone, fp8 both, bitsandbytes linear layers alone
    for method, saved in {
        "mxfp4": experts * (2 - 4.25 / 8),
        "fp8": experts + attention,
        "bitsandbytes": attention,
    }.items():
        options = {"load_in_8bit": method == "bitsandbytes", "weight_block_size": None}
        small = of_type("qwen3_moe", {"quant_method": method, **options}, **EXPERTS)
        assert weigh(small).nbytes == round(plain - saved), method


def test_files_are_preferred(tmp_path: Path) -> None:
    model = tiny_llama().to(torch.bfloat16)
    held = sum(p.nbytes for p in model.parameters())
    fields = {"quant_method": "vptq"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    model.save_pretrained(whole)
    model.save_pretrained(parts, max_shard_size="40KB")
    for folder in (whole, parts):
        assert file_bytes(str(folder)) == held
        nbytes, note = weigh(of_type("llama", fields), str(folder / "config.json"))
        assert (nbytes, note) == (held, "Weights (vptq) are counted as the checkpoint's files store them.")
        # of weights that are not quantized, the config's dtype counts
        assert weigh(of_type("llama"), str(folder)).nbytes == weigh(of_type("llama")).nbytes
    shards = list(parts.glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        shard.unlink()
    assert file_bytes(str(parts)) == held, "the index says it"
    assert not has_weights(str(parts))
    assert has_weights(str(whole))
    assert has_weights(str(LAB))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    index, single = tmp_path / "model.safetensors.index.json", tmp_path / "model.safetensors"
    assert file_bytes(str(tmp_path)) is None
    single.write_bytes((1000).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match=r"model\.safetensors' is cut off, or no safetensors file"):
        file_bytes(str(tmp_path))
    for text in ("{", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": []}'):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"index\.json' is no index of weights; download it again"):
            file_bytes(str(tmp_path))
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert file_bytes(str(tmp_path)) is None
