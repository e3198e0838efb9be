"""Models with quantized weights: what a report says of them, their key biases, captures, and tokens."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patching_support import SMALL, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import turbo_hf
from turbo_hf import TurboConfig, Unsupported
from turbo_hf.models.quantized_weights import describe_weights, why_not_captured

PROMPT = torch.arange(2, 92)[None] % 60


def as_if_from(library: str, name: str, base: type, **members: Any) -> type:
    """A class that looks like one of a library that is not installed."""
    return type(name, (base,), {"__module__": library, **members})


def refuse_rows(self: Any, x: Tensor) -> Tensor:
    raise RuntimeError("this kernel wants a multiple of 128 rows")


def test_a_key_projection_that_does_not_run_by_itself() -> None:
    model: Any = tiny("qwen2")
    attention = model.model.layers[1].self_attn
    kind = as_if_from("gptqmodel.nn_modules", "MarlinLinear", torch.nn.Linear, forward=refuse_rows)
    attention.k_proj.__class__ = kind
    with pytest.warns(
        UserWarning, match=r"layers 1: keys have a bias.* a MarlinLinear .*multiple of 128 rows.*Evaluate"
    ):
        handle = turbo_hf.patch(model)
    with handle:
        assert not any(at.balanced or at.kept_int8 for at in handle.report().layers)
        assert handle.report().weights == "quantized weights: 1 x MarlinLinear (gptqmodel)"
        assert "quantized weights: 1 x" in str(handle.report())
    # without a bias there is nothing to measure
    attention.k_proj.bias = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        turbo_hf.patch(model).remove()


def test_fused_attention_of_a_library_is_refused() -> None:
    model: Any = tiny("llama")
    model.model.layers[0].self_attn = as_if_from("awq.modules.fused.attn", "QuantAttentionFused", torch.nn.Identity)()
    with pytest.raises(Unsupported, match=r"awq has replaced this model's attention by QuantAttentionFused"):
        turbo_hf.patch(model)


def test_captures_follow_transformers_quantizer_or_the_library() -> None:
    model: Any = tiny("llama")
    assert describe_weights(model) == ""
    assert why_not_captured(model) is None
    plain = model.lm_head
    model.lm_head = as_if_from("hqq.core.quantize", "HQQLinear", torch.nn.Identity)()
    assert why_not_captured(model, model.lm_head) == (
        "the kernels of its quantized weights (hqq) have not been tried in a capture"
    )
    with turbo_hf.patch(model) as handle:
        assert "decode steps: no CUDA graphs (the kernels of its quantized weights (hqq)" in handle.report().steps
    model.lm_head = as_if_from("torchao.nn", "Linear", torch.nn.Identity)()
    assert why_not_captured(model, model.lm_head) is None
    model.lm_head = plain
    for compileable, words in ((True, None), (False, "the kernels of its quantized weights cannot be captured")):
        model.hf_quantizer = SimpleNamespace(is_compileable=compileable)
        assert why_not_captured(model) == why_not_captured(model, plain) == words
    model.hf_quantizer.quantization_config = SimpleNamespace(quant_method="compressed-tensors")
    assert describe_weights(model) == "quantized weights: compressed-tensors"


def quantized_by(library: str, model: Any, folder: Path) -> Any:
    """The model with its weights quantized on the CPU."""
    if library == "torchao":
        torchao = pytest.importorskip("torchao.quantization")
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    elif library == "optimum.quanto":
        quanto = pytest.importorskip(library)
        quanto.quantize(model, weights=quanto.qint8)
        quanto.freeze(model)
    elif library == "hqq":
        hqq = pytest.importorskip("hqq.core.quantize")
        options = hqq.BaseQuantizeConfig(nbits=4, group_size=32)
        for layer in model.model.layers:
            for name, part in [*layer.self_attn.named_children()]:
                packed = hqq.HQQLinear(part, options, compute_dtype=torch.float32, device="cpu")
                setattr(layer.self_attn, name, packed)
    else:
        pytest.importorskip(library)
        model.save_pretrained(folder)
        four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=four, device_map="cpu")
    return model


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes", "hqq", "optimum.quanto"])
def test_quantized_weights_choose_their_own_tokens(library: str, tmp_path: Path) -> None:
    model: Any = tiny("qwen2", hidden_size=128, intermediate_size=128)
    model.model.layers[1].self_attn.k_proj.bias.data[3] = -1000.0
    model = quantized_by(library, model, tmp_path)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(PROMPT)}
    alone = model.generate(PROMPT, **options)
    with turbo_hf.patch(model, TurboConfig(bits=16, attention="fp16"), check=True):
        assert torch.equal(model.generate(PROMPT, **options), alone)
    handle = turbo_hf.patch(model, SMALL, check=True)
    assert library.split(".", maxsplit=1)[0] in handle.report().weights
    assert handle.report().layers[1].balanced
    handle.remove()
