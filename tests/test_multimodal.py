"""Multimodal models: their text model alone is patched, and image blocks are refused or left to dense attention."""

import copy
from typing import Any

import pytest
import torch
from families_support import MIXED, NEW, exact, generate, settle
from models import SHAPE, prompts
from torch import Tensor
from transformers import AutoConfig, Gemma3ForConditionalGeneration, PreTrainedModel
from transformers.masking_utils import sdpa_mask

import turbo_hf
from turbo_hf.attention import masks
from turbo_hf.attention.turbo_attention import NAME
from turbo_hf.errors import Unsupported
from turbo_hf.models.versions import CACHE

IMAGE = 90
"""The token that stands for a part of an image."""


@pytest.fixture
def gemma3() -> PreTrainedModel:
    """A tiny Gemma 3 with its vision tower."""
    text = {**SHAPE, **MIXED, "num_hidden_layers": 3, "initializer_range": 0.15, "query_pre_attn_scalar": 16}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    }
    torch.manual_seed(0)
    config: Any = AutoConfig.for_model(
        "gemma3",
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    config.vision_config._attn_implementation = "sdpa"
    model = Gemma3ForConditionalGeneration(config)
    model.eval()
    return model


def test_only_the_text_model_of_a_multimodal_one_is_patched(gemma3: PreTrainedModel) -> None:
    config: Any = gemma3.config
    parts = (config, config.text_config, config.vision_config)
    before = [part._attn_implementation for part in parts]
    batch, oracle = settle(gemma3, exact(4), [])
    with turbo_hf.patch(gemma3, exact(4)) as handle:
        assert [part._attn_implementation for part in parts] == [before[0], NAME, "sdpa"]
        assert handle.report().family == "Gemma 3"
        hooked = [name for name, module in gemma3.named_modules() if module._forward_pre_hooks]
        # what calls all layers is told of each pass
        assert hooked[:3] == ["", "model", "model.language_model"]
        assert hooked[3:] == [f"model.language_model.layers.{layer}.self_attn" for layer in range(3)]
        ours = generate(gemma3, batch)
    assert torch.equal(ours.sequences, oracle)
    assert all(part._attn_implementation is was for part, was in zip(parts, before, strict=True))


@pytest.mark.parametrize("part", [1 << 26, 999], ids=["whole", "parts"])
def test_a_text_whose_processor_says_that_it_has_no_image_is_compressed(
    gemma3: PreTrainedModel, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "PART", part)
    made: list[Tensor] = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        mask: Any = sdpa_mask(*args, **kwargs)
        made.append(mask)
        return mask

    monkeypatch.setattr(masks, "sdpa_mask", spy)
    batch, oracle = settle(gemma3, exact(4), [])
    without = {**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])}
    with turbo_hf.patch(gemma3, exact(4)) as handle:
        assert torch.equal(generate(gemma3, without).sequences, oracle)
        assert handle.memory().tokens == int(batch["attention_mask"].sum()) + 3 * (NEW - 1)
    assert made
    # all rows of the batch, and a single query at least
    assert all(mask.numel() <= max(part, mask.shape[0] * mask.shape[-1]) for mask in made)


def with_image(gemma3: PreTrainedModel) -> tuple[dict[str, Tensor], Tensor]:
    """A prompt with an image and a shorter one without, padded at the left; and the mask."""
    ids = prompts(2, 50)
    ids[ids == IMAGE] = 1
    ids[0, 10:14] = IMAGE
    mask = torch.ones_like(ids)
    mask[1, :15] = 0
    image = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16), "token_type_ids": (ids == IMAGE).long()}
    return image, mask


def test_image_blocks_are_refused(gemma3: PreTrainedModel) -> None:
    image, mask = with_image(gemma3)
    call: Any = gemma3
    with turbo_hf.patch(gemma3, exact(8)) as handle, pytest.raises(Unsupported, match="prefix or image blocks"):
        call(**image, attention_mask=mask, **{CACHE: handle.new_cache()})


def test_image_blocks_fall_back_to_dense_attention(gemma3: PreTrainedModel) -> None:
    image, mask = with_image(gemma3)
    call: Any = gemma3
    real = mask.bool()
    stock = call(**image, attention_mask=mask).logits
    token, longer = prompts(2, 1, seed=1), torch.nn.functional.pad(mask, (0, 1), value=1)
    with turbo_hf.patch(gemma3, exact(8), strict="fallback") as handle:
        cache = handle.new_cache()
        without = call(**image, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(without[real], stock[real])
        torch.testing.assert_close(call(**image, attention_mask=mask, **{CACHE: cache}).logits[real], stock[real])
        # the padding is known from the dense mask, so that decoding goes on compressed
        assert handle.memory().tokens == int(mask.sum())
        same = copy.deepcopy(cache)
        ours = call(token, attention_mask=longer, **{CACHE: cache}).logits
    torch.testing.assert_close(ours, call(token, attention_mask=longer, **{CACHE: same}).logits)
