"""What a patch cannot do, and why: models that it refuses, layers in full precision, and parts without a kernel."""

import functools
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from turbo_hf.attention.registration import text_key
from turbo_hf.attention.turbo_attention import NAME
from turbo_hf.config.turbo_config import TurboConfig, of_layer
from turbo_hf.errors import Notices, Unsupported
from turbo_hf.layout import HEAD_DIM_MULTIPLE, UNQUANTIZED, type_16bit
from turbo_hf.models.model_layers import kv_heads, stray_window
from turbo_hf.models.quantized_weights import refuse_fused_attention
from turbo_hf.models.sources import generates_by
from turbo_hf.models.versions import version_problem
from turbo_hf.ops import gpu
from turbo_hf.ops.backend import Choice
from turbo_hf.patches.balance import UNEVEN, KeyBias, key_bias, parents
from turbo_hf.patches.families import Family
from turbo_hf.patches.generic import is_latent
from turbo_hf.patches.latent import is_fp8, score_error
from turbo_hf.patches.layers import AttentionLayer
from turbo_hf.patches.misfits import misfit
from turbo_hf.patching.handle import LayerReport
from turbo_hf.patching.hooks import is_own
from turbo_hf.ranks import Ranks

BIAS_STEP = 0.35
"""Key bias at which a layer that cannot be balanced is kept at 8 bit: its INT8 step in standard deviations of a typical
channel."""

SCORE_ERROR = 0.2
"""`score_error` from which on a layer may be kept at 8 bit: `eval/results/README.md`."""

SHARE_INT8 = 20
"""One layer of latents in so many is kept at 8 bit, or one: of 20 or more, a cache then holds 3.3 x as many tokens as
in BF16."""


FORECAST = "turbo_hf_forecast"
"""Attribute of a model without weights that is patched to report what `patch` would do."""


def check_model(model: PreTrainedModel, notices: Notices) -> PreTrainedModel:
    """Refuse models, and versions of Transformers, that cannot be patched at all.

    Returns the model to patch: the part of `model` whose `generate` that of its class calls, or `model` itself.
    """
    kind, text = type(model).__name__, model.config.get_text_config(decoder=True)
    if any(is_own(hook) for module in model.modules() for hook in module._forward_pre_hooks.values()):
        raise ValueError(
            "This model is patched already. Call remove() on the first handle, then patch again. A copy of a patched "
            "model has no handle: copy it before it is patched."
        )
    if text._attn_implementation == NAME:
        raise ValueError(
            "This model shares its config object with one that is patched already, or was loaded with the config of "
            f'one. Remove that patch first; if the config still says "{NAME}", call '
            'model.set_attn_implementation("sdpa").'
        )
    # accelerate brings weights that are offloaded when they are needed
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    if FORECAST not in vars(model) and not offloaded and any(x.is_meta for x in model.parameters()):
        raise Unsupported(
            f"{kind} has no weights (device meta), so that nothing can be computed. Load them with from_pretrained; "
            "what patch would do with its config, `turbo-hf doctor` and `turbo-hf plan` say."
        )
    refuse_fused_attention(model)
    outdated = version_problem()
    if outdated is not None:
        notices.refuse(outdated, 'Or pass strict="warn" to go on.')
    if model.config.is_encoder_decoder:
        raise Unsupported(f"{kind} is an encoder-decoder; only decoder-only models are supported.")
    if not hasattr(text, "num_hidden_layers"):
        raise Unsupported(f"the config of {kind} has no num_hidden_layers: its parts have layers of their own.")
    if text is not model.config and text_key(model.config) is None:
        raise Unsupported(
            f"the language model of {kind} lies inside another of its parts. Patch that part "
            "(for Qwen2.5-Omni: model.thinker)."
        )
    part = generates_by(type(model))
    if part is not None:
        notices.note(
            f"{kind}.generate calls generate of model.{part}, which makes the cache: the patch is on that part alone, "
            f"as turbo_hf.patch(model.{part}) would be."
        )
        return check_model(getattr(model, part), notices)
    stray = stray_window(text)
    if stray is not None:
        notices.note(
            f"the config has a sliding window of {stray}, by which no layer of {kind} masks: they read all tokens. "
            "Transformers' own cache drops older ones after the prompt: for the same answers without the patch, set "
            "sliding_window=None in the config."
        )
    return model


def text_type(model: PreTrainedModel) -> str:
    """`config.model_type` of a model's language model."""
    return str(model.config.get_text_config(decoder=True).model_type)


def key_biases(
    model: PreTrainedModel, layers: Iterable[AttentionLayer], config: TurboConfig, ranks: Ranks
) -> dict[int, KeyBias]:
    """`key_bias` of each layer that rounds keys with a bias; what is decided by it is decided over the heads of all
    ranks: whether there is a balance, and `step`."""
    if config.bits == UNQUANTIZED:
        return {}
    above = parents(model)
    rounded = [at for at in layers if not at.reason and at.index not in config.dense_layers]
    each = {at.index: key_bias(at.module, above) for at in rounded}
    found = {index: bias for index, bias in each.items() if bias is not None}
    own = torch.tensor([[bias.uneven, bias.step] for bias in found.values()], dtype=torch.float64, device="cpu")
    for (index, bias), (uneven, step) in zip(list(found.items()), ranks.most(own).tolist(), strict=True):
        found[index] = bias._replace(balance=bias.balance if uneven >= UNEVEN else None, uneven=uneven, step=step)
    return found


def disturbed_layers(layers: Iterable[AttentionLayer], config: TurboConfig) -> set[int]:
    """Layers of latent attention whose scores 4 bits or less disturb the most, by their weights."""
    if config.int8_layers != "auto" or config.bits >= 8:
        return set()
    latents = [at for at in layers if not at.reason and at.index not in config.dense_layers and is_latent(at.module)]
    errors = {at.index: score_error(at.module) for at in latents}
    most = sorted((at for at in errors if errors[at] > SCORE_ERROR), key=lambda at: -errors[at])
    return set(most[: max(1, len(latents) // SHARE_INT8)])


def choose_layers(
    layers: Iterable[AttentionLayer],
    config: TurboConfig,
    biases: Mapping[int, KeyBias],
    split: Container[int] = (),
    ranks: int = 1,
) -> list[LayerReport]:
    """What will be done with each layer.

    biases: `key_biases`. split: layers whose KV heads are split among so many ranks.
    """
    every = list(layers)
    disturbed = disturbed_layers(every, config)
    return [
        _choose(
            at,
            of_layer(config, at.index, len(every)),
            biases.get(at.index),
            ranks if at.index in split else 1,
            at.index in disturbed,
            at.index in config.dense_layers,
        )
        for at in every
    ]


def _choose(
    at: AttentionLayer, config: TurboConfig, bias: KeyBias | None, ranks: int, disturbed: bool, dense: bool
) -> LayerReport:
    uncompressed = functools.partial(LayerReport, at.index, (), at.window)
    if at.reason:
        return uncompressed(at.reason, refused=not at.by_design)
    latent = is_latent(at.module)
    if latent and at.window is not None:
        return uncompressed("latents of a sliding window stay in full precision")
    # one latent for all heads
    heads = 1 if latent else kv_heads(at.module.config, at.index) // ranks
    balanced = bias is not None and bias.balance is not None
    int8 = functools.partial(
        LayerReport, at.index, ((8, heads),), at.window, kept_int8=True, balanced=balanced, latent=latent
    )
    if dense:
        return LayerReport(at.index, config.head_groups(heads), at.window, "asked for by dense_layers", latent=latent)
    if config.int8_layers != "auto" and at.index in config.int8_layers:
        return int8("asked for by int8_layers")
    if bias is not None and bias.step > BIAS_STEP and config.int8_layers == "auto" and config.bits < 8:
        return int8("key bias", bias_step=bias.step)
    if disturbed:
        return int8("its weights make large scores")
    return LayerReport(at.index, config.head_groups(heads), at.window, "", balanced=balanced, latent=latent)


def require_layers(
    model: PreTrainedModel,
    all_layers: list[AttentionLayer],
    layers: list[LayerReport],
    config: TurboConfig,
    family: Family | None,
) -> None:
    """Refuse, under any `strict`, what leaves nothing to compress, or would be wrong on a patched model in any case.

    Raises:
        ValueError: the config names a layer that the model does not have.
        Unsupported: no layer can be compressed, or the model expects of attention what a patch does not do.
    """
    name = f"{type(model).__name__} ({text_type(model)})"
    named = (*config.dense_layers, *(config.int8_layers if config.int8_layers != "auto" else ()))
    outside = [index for index in named if index >= len(layers)]
    if outside:
        raise ValueError(f"TurboConfig names layer {outside[0]}; the model has layers 0 to {len(layers) - 1}.")
    if not any(at.groups for at in layers):
        refused = [at.reason for at in layers if at.refused]
        why = refused[0] if refused else ", ".join(dict.fromkeys(at.reason for at in layers))
        raise Unsupported(f"no layer of {name} can be compressed: {why or 'it has no attention layer'}.")
    unknown = [at for at in all_layers if at.unknown]
    if unknown:
        numbers = ", ".join(str(at.index) for at in unknown)
        raise Unsupported(
            f"layers {numbers} of {name} might be wrong on a patched model, compressed or not: {unknown[0].reason}. "
            "Run it without the patch."
        )
    reason = misfit(model, family.methods if family is not None else ())
    if reason is not None:
        raise Unsupported(f"{name} would be wrong on a patched model: {reason}. Run it without the patch.")


def refuse_latent_options(layers: list[LayerReport], config: TurboConfig, shared: bool) -> None:
    """Refuse, under any `strict`, what layers of latent attention would not follow. shared: among several ranks.

    Raises:
        Unsupported: tensor parallel, or an option that rounds, selects or computes what only keys and values of single
            heads have.
    """
    if not any(at.latent for at in layers):
        return
    if shared:
        raise Unsupported(
            "tensor parallel is not for latent attention (MLA), whose latent each rank would hold as a whole. Load the "
            "model on one GPU, or run it without the patch."
        )
    if config.value_bits is not None or config.layer_bits is not None:
        name = "layer_bits" if config.value_bits is None else "value_bits"
        raise Unsupported(
            f"TurboConfig.{name} is not for latent attention (MLA), which stores one latent for keys and values. "
            "Leave it out: the latent has `bits`."
        )
    wrong = {
        "sparse": config.sparse is not None,
        "sas": config.expert.sas,
        f"attention={config.attention!r}": config.attention not in ("auto", "native"),
        "recent_tokens": bool(config.recent_tokens),
        "compile": bool(config.compile),
    }
    named = [name for name, given in wrong.items() if given]
    if named:
        raise Unsupported(
            f"option {named[0]} is not for latent attention (MLA), whose prompts run in the model's own dtype "
            "and whose steps read all latents. Leave it out."
        )


def refuse_layers(layers: list[LayerReport], biases: Mapping[int, KeyBias], notices: Notices) -> None:
    """Refuse layers that cannot be compressed, and note what the user should know about the others."""
    refused = tuple(at.index for at in layers if at.refused)
    if refused:
        notices.refuse(
            f"layers {', '.join(map(str, refused))} cannot be compressed: {layers[refused[0]].reason}.",
            'Pass strict="warn" to leave them in Transformers\' own cache.',
        )
    unknown = [index for index, bias in biases.items() if bias.unknown]
    if unknown:
        notices.note(
            f"layers {', '.join(map(str, unknown))}: keys have a bias, and how large they are is not known, since "
            f"{biases[unknown[0]].unknown}. They are rounded as they come, which may lose accuracy. Evaluate, or leave "
            "them unrounded (TurboConfig.dense_layers)."
        )
    for at in layers:
        if at.bias_step:
            notices.note(
                f"layer {at.index}: its key bias alone makes an INT8 step of {at.bias_step:.1f} standard deviations of "
                "a key channel; it is kept at 8 bit, and may still lose accuracy. Evaluate, or leave it "
                "unrounded (TurboConfig.dense_layers)."
            )


def forecast(
    config: TurboConfig,
    devices: Iterable[torch.device],
    dtype: torch.dtype,
    dims: set[int],
    latents: Collection[Any],
    notices: Notices,
) -> None:
    """Note each part of a model's attention that no kernel serves, and what is rounded otherwise than one would think.

    Args:
        devices: of the weights. dtype: of keys. dims: head dims. latents: attention modules of latent attention.

    Raises:
        Unsupported: backend "triton", which plain torch may not replace.
    """
    if config.dense_layers and type_16bit(dtype) != dtype:
        notices.note(f"dense_layers are kept in float16, which rounds the {str(dtype)[6:]} of this model to 11 bits.")
    fp8 = [module.kv_b_proj.weight.numel() for module in latents if is_fp8(module.kv_b_proj)]
    if fp8:
        notices.note(
            f"the up-projections of {len(fp8)} layers are FP8: steps use them dequantized, which takes "
            f"{dtype.itemsize * sum(fp8) / 1e6:.0f} MB more, and do not round what they are multiplied by."
        )
    if config.expert.backend == "reference":
        return
    cuda = [device for device in devices if device.type == "cuda"]
    for line in dict.fromkeys(line for device in cuda for line in _lines(config, device, dtype, dims, latents)):
        if config.expert.backend == "triton":
            raise Unsupported(f'backend "triton": {line} Choose backend "auto" or "reference", or another attention.')
        notices.note(line)


def _lines(
    config: TurboConfig, device: torch.device, dtype: torch.dtype, dims: set[int], latents: Collection[Any]
) -> Iterable[str]:
    why_not = gpu.why_no_kernels_on(device)
    if why_not is not None:
        yield f"attention runs in plain torch, which is slow: {why_not}."
        return
    mode = "native" if config.bits == UNQUANTIZED or config.dense_layers else config.decode_attention
    for dim in sorted(dims):
        ops = Choice(config.expert.backend, device, dtype, dim, block=config.expert.block_size, mode=mode)
        auto = config.prompt_attention == "auto"
        prompts = ops.why_no_kernel("native" if auto else config.prompt_attention)
        steps = ops.why_no_step_kernel(config.sparse is not None)
        of_prompts = "prompts that are padded, windowed or over a past" if auto else "prompts"
        for part, why in ((of_prompts, prompts), ("decode steps", steps)):
            if why is not None:
                yield f"{part} run in plain torch, which is slow: {why}."
    for sizes in sorted({(at.kv_lora_rank, at.qk_rope_head_dim or HEAD_DIM_MULTIPLE) for at in latents}):
        shape = (device, dtype, *sizes, config.expert.block_size, config.bits)
        why = Choice(config.expert.backend, *shape).why_no_latent_kernel()
        if why is not None:
            yield f"decode steps over latents run in plain torch, which is slow: {why}."
