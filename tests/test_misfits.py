"""Models that expect of attention what a patch does not do: keywords, names, masks, kinds of layers, and the self-check
that finds what none of these rules has foreseen."""

from typing import Any

import pytest
import torch
from families_support import FULL, SLIDING, build, exact, generate, padded
from models import prompts, tiny_llama, tiny_mistral
from patching_support import EXACT, WrittenOut, changes, logits, snapshot
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import turbo_hf
from turbo_hf.attention import turbo_attention as attention
from turbo_hf.attention.masks import mask_4d
from turbo_hf.errors import Unsupported
from turbo_hf.models.sources import hands_on_mask, question
from turbo_hf.models.versions import CACHE
from turbo_hf.ops.decode.contract import DecodeOps
from turbo_hf.patches import layers
from turbo_hf.patches.families import family_of
from turbo_hf.patches.misfits import misfit
from turbo_hf.patching import refusals

SPARSE = {
    "layer_types": [FULL, "minimax_m3_sparse", FULL], "mlp_layer_types": ["dense", "sparse", "dense"],
    "dense_intermediate_size": 64, "shared_intermediate_size": 64, "rotary_dim": 8, "num_local_experts": 2,
    "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 16,
    "index_topk_blocks": 2, "index_local_blocks": 1,
}  # fmt: skip
stricts = pytest.mark.parametrize("strict", ["raise", "warn", "fallback"])


def minimax() -> PreTrainedModel:
    """MiniMax-M3: sparse layers choose blocks of keys, by a mask for eager attention and SDPA, else by a keyword."""
    return build("minimax_m3_vl_text", **SPARSE)


class Named(WrittenOut):
    """Attention that sees its last keys only where it is called by one of the usual names, as MiniMax-M3's does."""

    def blocks(self, keys: int) -> dict[str, Any]:
        """What only a kernel reads."""
        return {"block_indices": keys} if asks(self.config) else {}


def asks(config: Any) -> bool:
    """A function of the class's own module."""
    return config._attn_implementation not in ("eager", "sdpa")


class Cutting(WrittenOut):
    """Attention that changes its mask."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Tensor | None = None,
        past_key_values: Any = None, cache: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, modeling_llama.eager_attention_forward
        )
        if attention_mask is not None:
            attention_mask = attention_mask[..., -8:]
        return attend(self, hidden_states, hidden_states, hidden_states, attention_mask, **kwargs)


class Older(nn.Module):
    """Attention as it was written before `get_interface`: it asks for a name to look up what is registered under it."""

    config: Any

    def forward(
        self, query: Tensor, attention_mask: Tensor | None, past_key_values: Any = None, cache: Any = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        attend: Any = modeling_llama.eager_attention_forward
        if self.config._attn_implementation != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return attend(self, query, query, query, attention_mask, **kwargs)

    def blocks(self, keys: int) -> dict[str, Any]:
        """Other names are no concern: the answer is right."""
        return {"flash": self.config._attn_implementation == "flash_attention_2"}


def of_class(kind: type[nn.Module]) -> Any:
    """A Llama whose last layer has attention of another class."""
    model = tiny_llama()
    model.model.layers[1].self_attn.__class__ = kind
    return model


# --- keywords ------------------------------------------------------------------------------------------------------


@stricts
@pytest.mark.filterwarnings("ignore:layer")
@pytest.mark.parametrize("route", ["compressed", "dense", "no cache", "other cache"])
def test_a_keyword_that_nobody_reads_is_refused_on_every_route(strict: Any, route: str) -> None:
    model, ids = tiny_llama(), prompts(2, 40)
    with turbo_hf.patch(model, EXACT, strict=strict) as handle:
        cache = handle.new_cache()
        if route == "dense":
            cache = turbo_hf.TurboCache(model.config, EXACT, uncompressed_layers=(0,))
        options = {CACHE: cache} if route in ("compressed", "dense") else {"use_cache": route != "no cache"}
        with pytest.raises(Unsupported, match=r"passe?s? block_indices to its attention"):
            logits(model, ids, block_indices=torch.ones(1), **options)
        if route == "compressed":
            same = handle.new_cache()
            assert torch.equal(logits(model, ids, **{CACHE: cache}), logits(model, ids, **{CACHE: same}))
        if route == "dense":
            # the model has stored it before attention could tell
            with pytest.raises(ValueError, match=r"an earlier pass .* reset\(\) it, or take a new one"):
                logits(model, ids, **{CACHE: cache})


def test_a_keyword_of_hugging_faces_function_is_passed_on() -> None:
    model, ids = tiny_llama(attn_implementation="sdpa"), prompts(2, 40)
    bias = torch.randn(1, 4, 40, 40)
    stock = logits(model, ids, position_bias=bias, use_cache=False)
    assert not torch.allclose(stock, logits(model, ids, use_cache=False))
    with turbo_hf.patch(model, EXACT) as handle:
        torch.testing.assert_close(logits(model, ids, position_bias=bias, use_cache=False), stock)
        with pytest.raises(Unsupported, match="passes position_bias to its attention, which the compressed cache"):
            logits(model, ids, position_bias=bias, **{CACHE: handle.new_cache()})


def test_an_eager_function_gets_no_keyword_it_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build("gemma2", query_pre_attn_scalar=16), prompts(1, 40)
    with turbo_hf.patch(model, exact(8)):
        logits(model, ids, use_cache=False)
        monkeypatch.setattr(
            "transformers.models.gemma2.modeling_gemma2.eager_attention_forward", modeling_llama.eager_attention_forward
        )
        with pytest.raises(Unsupported, match="Gemma2Attention passes softcap to its attention"):
            logits(model, ids, use_cache=False)


# --- names, masks and kinds of layers --------------------------------------------------------------------------------


@stricts
@pytest.mark.parametrize("dense", [(), (1,)])
def test_a_model_with_layers_of_an_unknown_kind_is_refused(strict: Any, dense: tuple[int, ...]) -> None:
    model = minimax()
    before = snapshot(model)
    config = turbo_hf.TurboConfig(dense_layers=dense)
    with pytest.raises(Unsupported, match=r"layers 1 of MiniMaxM3VL.* compressed or not: minimax_m3_sparse is neither"):
        turbo_hf.patch(model, config, strict=strict)
    assert not changes(before, snapshot(model))


@stricts
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        pytest.param(Named, r'Named asks whether its attention is called "eager" or "sdpa" \(`return', id="name"),
        pytest.param(Cutting, "Cutting does not hand on its attention mask as it is", id="mask"),
    ],
)
def test_a_class_that_expects_something_else_is_refused(strict: Any, kind: Any, reason: str) -> None:
    for config in (EXACT, turbo_hf.TurboConfig(dense_layers=(1,))):
        with pytest.raises(Unsupported, match=f"would be wrong on a patched model: {reason}"):
            turbo_hf.patch(of_class(kind), config, strict=strict)


def test_a_lookup_is_no_question_of_the_implementation() -> None:
    assert question(Older.forward) is None
    assert question(Older.blocks) is None
    assert hands_on_mask(Older.forward)
    assert question(modeling_llama.LlamaAttention.forward) is None
    assert hands_on_mask(modeling_llama.LlamaAttention.forward)
    namespace: dict[str, Any] = {}
    exec("def forward(self, attention_mask): pass", namespace)
    assert not hands_on_mask(namespace["forward"])


@pytest.mark.parametrize("model_type", ["gpt2", "gemma4_text"])
def test_questions_that_are_answered_here(model_type: str) -> None:
    options = {"gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4}, "gemma4_text": {"hidden_size_per_layer_input": 16}}
    own = options[model_type] | ({"vocab_size_per_layer_input": 100} if model_type == "gemma4_text" else {})
    family = family_of(model_type)
    model = build(model_type, **own)
    assert misfit(model, family.methods if family is not None else ()) is None


# --- the self-check --------------------------------------------------------------------------------------------------


def without_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no rule knew of MiniMax-M3."""
    monkeypatch.setattr(refusals, "misfit", lambda *_: None)
    monkeypatch.setitem(layers.LEFT_ALONE, "minimax_m3_sparse", "as it was")
    monkeypatch.setattr(attention, "HARMLESS", attention.HARMLESS | {"block_indices"})


def test_the_self_check_finds_a_mask_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    without_rules(monkeypatch)
    model = minimax()
    batch, stock = padded(), generate(model, padded()).sequences
    with turbo_hf.patch(model, exact(16)):
        assert not torch.equal(generate(model, batch).sequences, stock)
    for preset in ("int8", "turbo4"):
        with pytest.raises(Unsupported, match=r"self-check failed: without a cache, the logits differ by .* a keyword"):
            turbo_hf.patch(model, preset, check=True)
    assert misfit(model) is not None


@pytest.mark.parametrize("window", [191, None])
def test_the_self_check_looks_beyond_windows(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_mistral(190)
    turbo_hf.patch(model, "int8", check=True).remove()
    monkeypatch.setattr(
        "turbo_hf.attention.full_precision.mask_4d",
        lambda *args, **options: mask_4d(*args, **{**options, "window": window}),
    )
    with pytest.raises(Unsupported, match="self-check failed: without a cache"):
        turbo_hf.patch(model, "int8", check=True)


def test_the_self_check_finds_a_window_wrong_in_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of one token too many, in decode steps alone."""
    model = build("gemma3_text", layer_types=[SLIDING, FULL, SLIDING], sliding_window=40)
    right = DecodeOps.decode

    def wrong(*args: Any, window: int | None, **options: Any) -> Any:
        return right(*args, window=window and 41, **options)

    monkeypatch.setattr(DecodeOps, "decode", wrong)
    with pytest.raises(Unsupported, match="over a cache that quantizes nothing, the logits differ by"):
        turbo_hf.patch(model, "int8", check=True)
