"""Models whose `generate` calls that of their language model, and what `report` says of the last `generate`."""

import warnings
from typing import Any

import pytest
import torch
import transformers
from models import prompts, tiny_llama
from torch import Tensor
from transformers import DynamicCache

import turbo_hf
from turbo_hf import TurboCache, TurboConfig
from turbo_hf.errors import Unsupported
from turbo_hf.models.sources import generates_by
from turbo_hf.models.versions import CACHE

EXACT = TurboConfig(bits=16, attention="fp16", block_size=32)
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION = {**TOWER, "image_size": 32, "patch_size": 16, "initializer_range": 0.2}
TOKENS = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
OPT = {
    **TOKENS, "model_type": "opt", "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "init_std": 0.2,
}  # fmt: skip
BERT = {
    **TOKENS, "hidden_size": 64, "encoder_hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "is_decoder": True,
}  # fmt: skip
QFORMER = {**TOWER, "vocab_size": 99, "encoder_hidden_size": 32}
PARTS = {
    "Blip2ForConditionalGeneration": "language_model",
    "BlipForConditionalGeneration": "text_decoder",
    "BlipForQuestionAnswering": "text_decoder",
    "InstructBlipForConditionalGeneration": "language_model",
    "InstructBlipVideoForConditionalGeneration": "language_model",
    "Kosmos2ForConditionalGeneration": "text_model",
}
IMAGE = 98


def blip(name: str) -> Any:
    """A tiny one with an OPT."""
    torch.manual_seed(0)
    kind: Any = getattr(transformers, name)
    parts = {"text_config": OPT, "vision_config": VISION, "qformer_config": QFORMER}
    config = kind.config_class(**parts, num_query_tokens=4)
    setattr(config, "video_token_index" if "Video" in name else "image_token_index", IMAGE)
    return kind(config).eval()


def inputs(name: str) -> dict[str, Tensor]:
    """Four places of an image, and a text."""
    text = torch.randint(3, IMAGE, (1, 60), generator=torch.Generator().manual_seed(0))
    ids = torch.cat((torch.full((1, 4), IMAGE), text), 1)
    image = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    given = {"pixel_values": image[:, None] if "Video" in name else image}
    if "Instruct" in name:
        given |= {"qformer_input_ids": text, "qformer_attention_mask": torch.ones_like(text)}
    return {**given, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("name", [name for name in PARTS if PARTS[name] == "language_model"])
def test_the_part_that_generates_is_patched(name: str) -> None:
    model, given = blip(name), inputs(name)
    how: Any = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "eos_token_id": None}
    stock = model.generate(**given, **how)
    with pytest.warns(UserWarning, match=rf"{name}\.generate calls generate of model\.language_model"):
        handle = turbo_hf.patch(model, EXACT)
    with handle:
        ours = model.generate(**given, **how)
        assert handle.report().model == "OPTForCausalLM"
        assert "71 tokens in a TurboCache, 2 of 2 layers compressed" in str(handle.report())
        with pytest.raises(ValueError, match="patched already"):
            turbo_hf.patch(model, EXACT)
    assert isinstance(getattr(ours, CACHE), TurboCache)
    assert torch.equal(ours.sequences, stock.sequences)
    assert not isinstance(getattr(model.generate(**given, **how), CACHE), TurboCache)


def test_a_part_that_cannot_be_compressed_is_refused() -> None:
    kind: Any = transformers.BlipForConditionalGeneration
    config = kind.config_class(text_config=BERT, vision_config=VISION, image_text_hidden_size=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Unsupported, match="no layer of BlipTextLMHeadModel"):
            turbo_hf.patch(kind(config).eval())


def test_what_a_generate_calls_is_read_from_its_source() -> None:
    class Calls:
        inner: Any

        @torch.no_grad()
        def generate(self) -> Any:
            return self.inner.generate()

    class Both(Calls):
        def generate(self) -> Any:
            self.inner.generate()
            return super().generate()

    assert {name: generates_by(getattr(transformers, name)) for name in PARTS} == PARTS
    assert generates_by(Calls) == "inner"
    assert all(generates_by(kind) is None for kind in (Both, transformers.LlamaForCausalLM, transformers.LlamaModel))


def test_the_report_says_what_the_last_generate_stored_its_tokens_in() -> None:
    model: Any = tiny_llama()
    ids = prompts(2, 40)
    how: Any = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    layers = len(model.model.layers)
    compressed = f"last generate: 88 tokens in a TurboCache, {layers} of {layers} layers compressed"
    with turbo_hf.patch(model, EXACT) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert handle.report().generated == "last generate: none since the patch"
        model.generate(ids, **how)
        assert handle.report().generated == compressed
        assert compressed in str(handle.report())
        for given, why in (
            ({CACHE: DynamicCache(config=model.config)}, "a DynamicCache was passed"),
            ({"cache_implementation": "static"}, "cache_implementation='static'"),
            ({"use_cache": False}, "use_cache=False"),
        ):
            model.generate(ids, **how, **given)
            assert handle.report().generated == f"last generate: not compressed ({why})"
        cache = handle.new_cache()
        model.generate(ids, **how, **{CACHE: cache})
        assert handle.report().generated == compressed
        handle.new_cache()
        del cache
        assert handle.report().generated == "last generate: in a TurboCache, which is gone"
        model.set_attn_implementation("sdpa")
        model.generate(ids, **how)
        assert handle.report().generated == "last generate: not compressed (set_attn_implementation has chosen 'sdpa')"
    with turbo_hf.patch(model) as handle:
        cache = TurboCache(model.config, uncompressed_layers=(0,))
        model.generate(ids, **how, **{CACHE: cache})
        assert f"{layers - 1} of {layers} layers compressed" in handle.report().generated
