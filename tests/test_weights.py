"""Bytes of weights: as they are, or as a checkpoint stores them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import lab_model, tiny_llama
from plan_support import SMALL
from transformers import AutoConfig, PreTrainedModel

from turbo_hf.cli.weights import Weights, file_bytes, has_weights, weigh
from turbo_hf.patching.meta_model import meta_model

LAB = Path(__file__).resolve().parents[1] / "examples" / "lab-llama-4m"


def of_type(model_type: str, quantized: dict[str, Any] | None = None, **options: Any) -> PreTrainedModel:
    """A small meta model in bfloat16, with a quantization config."""
    config = AutoConfig.for_model(model_type, **{**SMALL, **options})
    if quantized is not None:
        config.quantization_config = quantized
    return meta_model(config)


def test_weights_of_a_model() -> None:
    model, _ = lab_model()
    assert weigh(meta_model(model.config)) == Weights(sum(p.nbytes for p in model.parameters()))


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
    assert has_weights(str(LAB))


def test_quantized_weights_without_files_are_told() -> None:
    full = weigh(of_type("llama")).nbytes
    nbytes, note = weigh(of_type("llama", {"quant_method": "gptq", "bits": 4, "group_size": 128}))
    assert note == "Weights (gptq) are counted at 4.15625 bit: their files are not here."
    assert full / 4 < nbytes < full / 2, "embeddings stay as they are"
    nbytes, note = weigh(of_type("llama", {"quant_method": "quanto", "weights": "int4"}))
    assert nbytes == full
    assert note == "Weights (quanto) are counted at 16 bit, which is too much: their files are not here."
    assert weigh(of_type("llama", {"quant_method": "mxfp4"})).nbytes == full, "it has no experts"


def test_an_index_that_is_none_is_named(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    assert file_bytes(str(tmp_path)) is None
    for text in ("{", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": []}', '{"weight_map": {}}'):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"index\.json' .*is no index of weights; download it again"):
            file_bytes(str(tmp_path))
    strange: list[Any] = [{}, [], *({"total_size": x} for x in (-1, "x", float("nan"), True, 1 << 80))]
    for about in strange:
        index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}, "metadata": about}))
        assert file_bytes(str(tmp_path)) is None
