"""Tiny random multimodal models of Transformers, and a prompt with an image or a sound, from one rule and a dict of
exceptions."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from tiny_families import LAYER_COUNTS, SPREAD, tiny_config
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

MODELS = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
TEXT = 60
SIDE, PATCH, WIDTH = 32, 8, 64
FIRST_SPECIAL = 80
"""Tokens from here on stand for images and the like."""

WIDE = (
    *("hidden_size", "embed_dim", "d_model", "dim", "width", "output_dim", "out_hidden_size", "projection_dim"),
    *("text_hidden_size", "encoder_hidden_size", "embedding_dim", "projector_hidden_size"),
)
TOWER: dict[str, Any] = {
    **dict.fromkeys(WIDE, 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "mlp_dim"), 64),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "attention_heads", "num_heads"), 4),
    **dict.fromkeys(("depth", "layers", "encoder_layers", *LAYER_COUNTS), 1), "num_key_value_heads": 4,
    "head_dim": 16, "image_size": SIDE, "patch_size": PATCH, "temporal_patch_size": 1, "spatial_merge_size": 2,
    "initializer_range": SPREAD, "init_std": SPREAD, "vision_use_head": False, "num_mel_bins": 16,
    "max_source_positions": 32, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0],
}  # fmt: skip
"""Sizes of what sees and hears."""

MROPE = {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}}
GRID = {"image_grid_pinpoints": [[SIDE, SIDE]]}
STRAY = {"text_config": {"sliding_window": None}}
"""A window that these never mask by, while Transformers' own cache drops what lies before it."""
BEGINNINGS = {"vision_start_token_id": 94, "audio_start_token_id": 95}
LLAMA4 = ("projector_input_dim", "projector_output_dim", "vision_output_dim")
MEDIA = {"video_token_index": 98, "image_token_index": 98, "audio_token_id": 98}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip": {"text_config": {"bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "pad_token_id": 0}},
    "blip-2": {**MEDIA, "num_query_tokens": 4},
    "instructblipvideo": {**MEDIA, "num_query_tokens": 4},
    "instructblip": {**MEDIA, "num_query_tokens": 4},
    "gemma3": {"mm_tokens_per_image": 4},
    # as trained ones have it: blocks of images see all of themselves
    "gemma4": {
        "text_config": {"pad_token_id": 0, "use_bidirectional_attention": "vision"},
        "vision_config": {"pooling_kernel_size": 2},
    },
    "gemma4_unified": {"text_config": {"pad_token_id": 0}, "vision_config": {"pooling_kernel_size": 1}},
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0}},
    "granite_speech": {"encoder_config": {"input_dim": 16}},
    "granite_speech_plus": {"encoder_config": {"input_dim": 16}},
    "llama4": {"vision_config": {"intermediate_size": 256, **dict.fromkeys(LLAMA4, 64)}},
    "llava_next": GRID,
    "llava_next_video": GRID,
    "llava_onevision": GRID,
    "mllama": {"text_config": {"bos_token_id": 1, "pad_token_id": 0}},
    "paligemma": {"projection_dim": 64},
    "qwen2_5_omni_thinker": {**MROPE, **BEGINNINGS},
    "qwen3_omni_moe_thinker": {**BEGINNINGS, **STRAY},
    "qwen3_vl_moe": STRAY,
    "vipllava": {"vision_feature_layers": [-1]},
    "voxtral": MEDIA,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "glm4v", "glm4v_moe", "glm46v", "glm_ocr", "paddleocr_vl"), MROPE),
    "hunyuan_vl": MROPE,
    "hy_v4_vl": MROPE,
    "cosmos3_edge": MROPE,
}
"""By family: what its config needs on top."""


def tiny(kind: type[PreTrainedConfig], own: dict[str, Any], tower: bool = False) -> Any:
    """A tiny config of this kind, with the parts that it has. own: by field, or by part and field."""
    parts = {name: part for name, part in getattr(kind, "sub_configs", {}).items() if isinstance(part, type)}
    try:
        default = kind()
    except Exception:  # some have no valid default
        default = kind(**own)
    given: dict[str, Any] = {}
    for name, part in parts.items():
        here = getattr(default, name, None)
        # one that a config does not have by default is asked for
        if isinstance(here, PreTrainedConfig) or name in own:
            seen = tower or not re.search(r"text|llm|language|thinker|decoder", name)
            given[name] = tiny(part if here is None else type(here), own.get(name, {}), seen)
    fields = default.to_dict()
    if tower:
        given |= {name: size for name, size in TOWER.items() if name in fields}
    special = [name for name in fields if re.search(r"_token_(id|index)$", name) and not re.match("bos|eos|pad", name)]
    named = [name for name in special if isinstance(fields[name], int)]
    given |= {name: FIRST_SPECIAL + at for at, name in enumerate(sorted(named))}
    rest = {name: value for name, value in own.items() if name not in parts}
    if tower or not fields.get("vocab_size"):
        return kind(**{**given, **rest})
    return tiny_config(kind, {**given, **rest})


def build_multimodal(family: str) -> Any:
    """A tiny random model: float32, eager attention, eval, without an end token."""
    kind: Any = getattr(transformers, str(MODELS[family]))
    torch.manual_seed(0)
    config = tiny(kind.config_class, EXCEPTIONS.get(family, {}))
    model = kind._from_config(config, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    for weight in model.parameters():
        # some projections begin as zeros, which would hide the image
        if weight.dim() > 1 and not weight.any():
            torch.nn.init.normal_(weight, std=SPREAD)
    return model


def prompt(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A row of text, and in it an image or a sound: the first that the model takes without an error and that changes
    its logits, of what is known here; else text alone, and {}."""
    takes = set(inspect.signature(type(model).forward).parameters)
    for media in _media(model, takes):
        count = 1
        for _ in range(4):
            text = _text(model, media, count, takes)
            other = {name: -x if x.is_floating_point() else x for name, x in media.items()}
            try:
                with torch.no_grad():
                    seen, told = (model(**text, **given).logits[:, -1] for given in (media, other))
            except Exception as failed:
                wanted = re.search(r"features:? (?:torch.Size\(\[)?(\d+)", str(failed))
                if wanted is None or (int(wanted[1]) == count and count % WIDTH):
                    break
                # some count numbers, others tokens
                count = int(wanted[1]) if int(wanted[1]) != count else count // WIDTH
            else:
                if not torch.equal(seen, told):
                    return text, media
                break
    return _text(model, {}, 0, takes), {}


def _media(model: Any, takes: set[str]) -> Iterator[dict[str, Tensor]]:
    """What may stand for an image or a sound, of what forward takes."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    vision = getattr(model.config, "vision_config", None)
    patch = getattr(vision, "patch_size", None)
    merged = {"image_merge_sizes": torch.tensor([2])} if "image_merge_sizes" in takes else {}
    sizes: dict[str, Tensor] = {
        name: torch.tensor([[SIDE, SIDE]]) for name in ("image_sizes", "image_sizes_videos") if name in takes
    }
    if "image_grid_thw" in takes and isinstance(patch, int):
        channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None) or 3
        pixels = random(16, channels * (getattr(vision, "temporal_patch_size", None) or 1) * patch**2)
        yield {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]]), **merged}
        yield {
            "pixel_values": pixels.view(16, channels, patch, patch),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            **merged,
        }
    if "image_position_ids" in takes:
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(-1)
        yield {"pixel_values": random(1, 16, 3 * PATCH**2).sigmoid(), "image_position_ids": places[None]}
    if "pixel_values" in takes:
        side = getattr(vision, "image_size", None)
        side = side if isinstance(side, int) else SIDE
        for size in ((1, 3, side, side), (1, 1, 3, side, side), (1, 2, 3, side, side)):
            yield {"pixel_values": random(*size)}
            if sizes:
                yield {"pixel_values": random(*size), **sizes}
    for name in ("input_features", "input_values", "audio_values", "input_audio_embeds"):
        if name in takes:
            bins = getattr(getattr(model.config, "audio_config", None), "num_mel_bins", 16)
            masks = [name for name in ("feature_attention_mask", "input_features_mask") if name in takes]
            for shape in ((1, bins, 64), (1, 64, bins), (1, 1, 640)):
                yield {name: random(*shape), **{mask: torch.ones(1, 64, dtype=torch.long) for mask in masks}}


def medium(media: dict[str, Tensor]) -> str:
    """What it is."""
    return ("image" if "pixel_values" in media else "audio") if media else "text alone"


def _text(model: Any, media: dict[str, Tensor], count: int, takes: set[str]) -> dict[str, Tensor]:
    """A row of text, with so many tokens in it that stand for the image or sound."""
    kind = medium(media)
    names = (f"{kind}_token_id", f"{kind}_token_index", "video_token_index")
    token = next((n for at in names if isinstance(n := getattr(model.config, at, None), int)), None)
    ids = torch.randint(3, FIRST_SPECIAL, (1, TEXT), generator=torch.Generator().manual_seed(0))
    if token is not None:
        ids = torch.cat((ids[:, :5], torch.full((1, count), token), ids[:, 5:]), 1)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in takes:
            given[name] = (ids == token).long() if token is not None else torch.zeros_like(ids)
    if "qformer_input_ids" in takes:
        given |= {"qformer_input_ids": ids[:, :5], "qformer_attention_mask": torch.ones_like(ids[:, :5])}
    return given
