"""What a config says of layers, and what their modules do: heads and dims of each layer, fields that no module reads,
and quantized weights."""

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from calibration_support import PROSE, same
from calibration_support import SMALL as SETTINGS
from choices import flat_config
from models import lab_model, tiny_llama
from patching_support import tiny
from plan_support import costs
from tiny_families import FULL, SLIDING, build, kinds
from torch import Tensor

import turbo_hf
from turbo_hf import Calibration, TurboCache, TurboConfig
from turbo_hf.errors import Unsupported
from turbo_hf.models.model_layers import head_dim, kv_heads, layer_windows, shape_field
from turbo_hf.models.quantized_weights import why_not_captured


def config() -> transformers.PreTrainedConfig:
    """Gemma 4: the full-attention layer has one KV head of 32 channels, those with a window two of 16."""
    made: transformers.PreTrainedConfig = transformers.AutoConfig.for_model(
        "gemma4_text", vocab_size=3072, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], sliding_window=40,
        global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
    )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    """A random one."""
    torch.manual_seed(0)
    made: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config())
    made.eval()
    return made


def test_windows_heads_and_dims_are_read_from_the_config() -> None:
    made = config()
    assert [window for _, window in layer_windows(made)] == [40, 40, None]
    assert [kv_heads(made, layer) for layer in range(3)] == [2, 2, 1]
    assert [head_dim(made, layer) for layer in range(3)] == [16, 16, 32]
    assert shape_field(made, "head_dim") == [16, 16, 32]
    assert shape_field(made, "hidden_size") == 64
    assert shape_field(transformers.LlamaConfig(), "head_dim") == 128
    assert shape_field(transformers.LlamaConfig(), "no_such_field") is None
    # keys and values of two heads of 16 channels, of one of 32: as many numbers
    assert [cost.per_token for cost in costs(made)] == [128.0] * 3


def test_each_layer_is_stored_as_it_is(model: transformers.PreTrainedModel) -> None:
    with turbo_hf.patch(model, flat_config(bits=4, low_bits=2, low_heads=0.5)) as handle:
        assert [layer.groups for layer in handle.report().layers] == [((4, 1), (2, 1))] * 2 + [((4, 1),)]


def test_a_calibration_fits_and_is_read_back(model: transformers.PreTrainedModel, tmp_path: Path) -> None:
    _, tokenizer = lab_model()
    made = turbo_hf.calibrate(model, tokenizer, [PROSE], settings=replace(SETTINGS, windows=2, steps=2))
    assert made.fingerprint["num_key_value_heads"] == [2, 2, 1]
    assert {len(layer.scores["priority"]) for layer in made.layers[:2]} == {2}
    made.save_pretrained(tmp_path)
    back = Calibration.from_pretrained(tmp_path)
    assert same(back, made)
    turbo_hf.patch(model, flat_config(low_bits=2, low_heads=0.5), calibration=back).remove()
    other = replace(made, fingerprint={**made.fingerprint, "num_key_value_heads": [2, 2, 2]})
    with pytest.raises(ValueError, match=r"num_key_value_heads"):
        turbo_hf.patch(model, flat_config(low_bits=2, low_heads=0.5), calibration=other)


CONFIG = flat_config(bits=16, attention="native", block_size=32)
WINDOW = 24
MIXED: dict[str, Any] = {"layer_types": [SLIDING, FULL] * 2, "sliding_window": WINDOW}
FIELDS: list[dict[str, Any]] = [
    {"sliding_window": WINDOW}, MIXED, {"attn_logit_softcapping": 2.0}, {"softcap": 2.0}, {"attention_sinks": True},
    {"attention_multiplier": 9.0}, {"query_pre_attn_scalar": 1.0}, {"attention_chunk_size": WINDOW},
    {"local_attention": WINDOW}, {"num_key_value_heads": 1}, {"head_dim": 8}, {"is_causal": False},
    {"use_bidirectional_attention": True}, {"num_kv_shared_layers": 2}, {"kv_lora_rank": 16},
    {"partial_rotary_factor": 0.25}, {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}},
    {"no_rope_layers": [0] * 4},
]  # fmt: skip


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
    assert all(window is None for _, window in layer_windows(transformers.LlamaConfig(**MIXED, num_hidden_layers=4)))
    # with no model at hand, too
    assert not any(TurboCache(model.config).is_sliding)
    assert all(window == WINDOW for _, window in layer_windows(transformers.MistralConfig(sliding_window=WINDOW)))


@pytest.mark.parametrize("types", [[FULL] * 4, [SLIDING, FULL] * 2], ids=["full", "mixed"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_a_model_that_masks_unlike_its_config_is_refused(types: list[str], use_cache: bool) -> None:
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


PROMPT = torch.arange(2, 92)[None] % 60


def as_if_from(library: str, name: str, base: type, **members: Any) -> type:
    """A class that looks like one of a library that is not installed."""
    return type(name, (base,), {"__module__": library, **members})


def refuse_rows(self: Any, x: Tensor) -> Tensor:
    raise RuntimeError("this kernel wants a multiple of 128 rows")


def test_a_key_projection_that_does_not_run_alone_is_told() -> None:
    model: Any = tiny("qwen2")
    attention = model.model.layers[1].self_attn
    kind = as_if_from("gptqmodel.nn_modules", "MarlinLinear", torch.nn.Linear, forward=refuse_rows)
    attention.k_proj.__class__ = kind
    with pytest.warns(UserWarning, match=r"layers 1: keys have a bias.* a MarlinLinear .*multiple of 128 rows"):
        handle = turbo_hf.patch(model)
    with handle:
        assert not any(at.balanced or at.kept_int8 for at in handle.report().layers)
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
        four = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=four, device_map="cpu")
    return model


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes", "hqq", "optimum.quanto"])
def test_a_model_with_quantized_weights_keeps_its_tokens(library: str, tmp_path: Path) -> None:
    model: Any = tiny("qwen2", hidden_size=128, intermediate_size=128)
    model.model.layers[1].self_attn.k_proj.bias.data[3] = -1000.0
    model = quantized_by(library, model, tmp_path)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(PROMPT)}
    alone = model.generate(PROMPT, **options)
    with turbo_hf.patch(model, TurboConfig(bits=16, attention="native"), check=True):
        assert torch.equal(model.generate(PROMPT, **options), alone)
    # this model of random weights is refused at 4 bit, with plain weights too
    with turbo_hf.patch(model, TurboConfig(bits=8), check=True) as handle:
        assert handle.report().layers[1].balanced
