"""`patch()`: put a model on a compressed KV cache, with a handle that undoes it."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import torch
from transformers import PreTrainedModel

from turbo_hf.attention.registration import register, switch_attention, text_key
from turbo_hf.attention.turbo_attention import NAME
from turbo_hf.calibration.artifacts import Calibration
from turbo_hf.calibration.choice import choose_heads, choose_selectors
from turbo_hf.config.turbo_config import DEFAULT_PRESET, ConfigLike, TurboConfig, resolve_config
from turbo_hf.errors import Notices, Strict, Unsupported
from turbo_hf.graphs.compiled_step import CompiledStep
from turbo_hf.graphs.step_runner import Door, describe
from turbo_hf.models.model_layers import kv_heads, module_head_dim, require_model
from turbo_hf.models.versions import version_problem
from turbo_hf.ops.tuning import describe_prefill
from turbo_hf.patches import (
    AttentionLayer,
    Family,
    attention_layers,
    family_of,
    lost_to_bias,
    misfit,
)
from turbo_hf.patching.forecast import forecast
from turbo_hf.patching.generate_methods import PREPARE, replace_methods
from turbo_hf.patching.handle import CacheMaker, Handle, LayerReport, Report
from turbo_hf.patching.hooks import add_hooks, is_own
from turbo_hf.patching.selfcheck import own_logits, require_agreement

BIAS_STEP = 0.5
"""Key bias at which a layer is kept at 8 bit: its INT8 step exceeds half a standard deviation of a typical channel."""


def patch(
    model: PreTrainedModel,
    config: ConfigLike = DEFAULT_PRESET,
    *,
    calibration: Calibration | str | Path | None = "auto",
    revision: str | None = None,
    strict: Strict = "raise",
    check: bool = False,
) -> Handle:
    """Put `model.generate` on a compressed KV cache. Nothing else in the model changes, and `remove()` undoes the
    patch.

    Args:
        model: a loaded decoder-only Transformers model.
        config: a preset ("int8", "turbo4", "turbo-mixed", "turbo2", "saap"), a `TurboConfig`, a dict of its options, or
            the path of a JSON or YAML file of them; dict and file are read as by `TurboConfig.from_dict`.
        calibration: decides which heads get the low bits, if the config has heads of two widths, and provides what
            sparse decoding selects keys by. A `Calibration`, a folder or Hub id that holds one, None for no calibration
            (heads are then ranked by each row's first block), or "auto": the one stored with the checkpoint (in its
            folder or the Hub cache), if any.
        revision: the Hub revision that the model was loaded from, if not main: Transformers 5.23 keeps no record of it.
        strict: what happens with a layer, version or call that compressed attention cannot serve, and with a
            calibration found by "auto" that is damaged or belongs to another model: "raise" an error, "warn" and leave
            that part to Hugging Face, or "fallback" to Hugging Face with only a log message. Training mode, NaN, Inf
            and `generate_batch` are errors under each.
        check: compare the logits of a short random text before and after patching; an error removes the patch.

    Returns:
        Handle: has `remove()`, `report()`, `memory()` and `new_cache()`, and is a context manager.

    Raises:
        Unsupported (a ValueError): the model, or with strict "raise" a part of it, cannot be compressed, or the check
            failed. Later calls that ask for what a compressed cache cannot do raise it too.
        ValueError: unknown preset, option or strict; a config file that is broken; the model is already patched; the
            calibration is damaged or belongs to another model; the revision is not the model's.
        OSError: there is no config file, or no calibration, in the named place.
        TypeError: not a Transformers model.
    """
    if strict not in get_args(Strict):
        raise ValueError(f"strict must be one of {', '.join(get_args(Strict))}; got {strict!r}.")
    chosen = resolve_config(config)
    require_model(model)
    notices = Notices(strict)
    _check_model(model, notices)
    found = attention_layers(model)
    layers = [_choose(at, chosen) for at in found]
    modules = {at.index: at.module for at in found if at.module is not None}
    dims = {module_head_dim(module) or 0 for n, module in modules.items() if layers[n].groups} - {0}
    family = family_of(_text_type(model))
    _require_layers(model, found, layers, chosen, family)
    _judge(layers, notices)
    forecast(chosen, {x.device for x in model.parameters()}, model.dtype, dims, notices)
    if not hasattr(type(model), PREPARE):
        notices.note(f"{type(model).__name__} has no generate: pass handle.new_cache() when you call it.")
    heads = choose_heads(model, chosen, calibration, notices, revision)
    split = [at.groups for at in layers if at.groups and not at.kept_int8]
    if chosen.low_heads and split and not any(bits == chosen.low_bits for groups in split for bits, _ in groups):
        notices.note(
            f"low_heads={chosen.low_heads:g} is less than one KV head of each layer: all keep {chosen.bits} bit."
        )
        heads = heads._replace(words="")
    windowed = {at.index: "it has a sliding window" if at.window else "" for at in layers if at.groups}
    selectors, sparse = choose_selectors(chosen, windowed, heads, len(layers), notices)
    dense = tuple(at.index for at in layers if not at.groups)
    own = own_logits(model, modules.values()) if check else None
    steps, no_graphs = describe(chosen, dense, family is not None, model.device)
    # the last possible refusal before anything is changed
    if chosen.cuda_graphs is True and no_graphs is not None:
        notices.refuse(f"cuda_graphs=True: {no_graphs}.")
    compiled = _compiled_step(chosen, dense, notices)
    report = Report(
        model=type(model).__name__,
        family=family.name if family else f"{_text_type(model)}: generic path, no test of its own",
        notes=family.notes if family else "",
        config=chosen,
        layers=tuple(layers),
        prompts=describe_prefill(chosen.prompt_attention, model.device, dims),
        steps=steps,
        warnings=tuple(notices.messages),
        heads=heads.words,
        sparse=sparse,
    )
    int8 = tuple(at.index for at in layers if at.kept_int8)
    maker = CacheMaker(len(layers), chosen, int8, dense, heads.orders, selectors)
    graphs = chosen.cuda_graphs is not False and no_graphs is None
    door = Door(chosen.cuda_graphs is True, graphs, compiled) if graphs or compiled is not None else None
    handle = _apply(model, report, modules, family, maker, door, strict)
    if own is not None:
        try:
            require_agreement(model, own, chosen, dense, handle.new_cache())
        except BaseException:
            handle.remove()
            raise
    return handle


def _compiled_step(config: TurboConfig, dense: Sequence[int], notices: Notices) -> CompiledStep | None:
    """What compiles decode steps; None if that is not asked for, or they cannot be compiled."""
    if config.compile and dense:
        notices.note(f"compile=True: layer {dense[0]} is dense, so that decode steps are not compiled.")
    return CompiledStep() if config.compile and not dense else None


def _check_model(model: PreTrainedModel, notices: Notices) -> None:
    """Refuse models, and versions of Transformers, that cannot be patched at all."""
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


def _text_type(model: PreTrainedModel) -> str:
    return str(model.config.get_text_config(decoder=True).model_type)


def _choose(at: AttentionLayer, config: TurboConfig) -> LayerReport:
    """What will be done with one layer."""
    dense = functools.partial(LayerReport, at.index, (), at.window)
    if at.index in config.dense_layers:
        return dense("asked for by dense_layers")
    if at.obstacle:
        return dense(at.obstacle, refused=not at.by_design)
    heads = kv_heads(at.module.config, at.index)
    int8 = functools.partial(LayerReport, at.index, ((8, heads),), at.window, kept_int8=True)
    if config.int8_layers != "auto" and at.index in config.int8_layers:
        return int8("asked for by int8_layers")
    guarded = config.int8_layers == "auto" and config.bits < 8
    step = lost_to_bias(at.module, config.rotates) if guarded else 0.0
    if step > BIAS_STEP:
        return int8("key bias", bias_step=step)
    return LayerReport(at.index, config.head_groups(heads), at.window, "")


def _require_layers(
    model: PreTrainedModel,
    found: list[AttentionLayer],
    layers: list[LayerReport],
    config: TurboConfig,
    family: Family | None,
) -> None:
    """Refuse, under any `strict`, what leaves nothing to compress, or would be wrong on a patched model in any case.

    Raises:
        ValueError: the config names a layer that the model does not have.
        Unsupported: no layer can be compressed, or the model expects of attention what a patch does not do.
    """
    name = f"{type(model).__name__} ({_text_type(model)})"
    named = (*config.dense_layers, *(config.int8_layers if config.int8_layers != "auto" else ()))
    outside = [index for index in named if index >= len(layers)]
    if outside:
        raise ValueError(f"TurboConfig names layer {outside[0]}; the model has layers 0 to {len(layers) - 1}.")
    if not any(at.groups for at in layers):
        refused = [at.reason for at in layers if at.refused]
        why = refused[0] if refused else ", ".join(dict.fromkeys(at.reason for at in layers))
        raise Unsupported(f"no layer of {name} can be compressed: {why or 'it has no attention layer'}.")
    unknown = [at for at in found if at.unknown]
    if unknown:
        numbers = ", ".join(str(at.index) for at in unknown)
        raise Unsupported(
            f"layers {numbers} of {name} might be wrong on a patched model, compressed or not: {unknown[0].obstacle}. "
            "Run it without the patch."
        )
    reason = misfit(model, family.methods if family is not None else ())
    if reason is not None:
        raise Unsupported(f"{name} would be wrong on a patched model: {reason}. Run it without the patch.")


def _judge(layers: list[LayerReport], notices: Notices) -> None:
    """Refuse layers that cannot be compressed, and note what the user should know about the others."""
    refused = tuple(at.index for at in layers if at.refused)
    if refused:
        notices.refuse(
            f"layers {', '.join(map(str, refused))} cannot be compressed: {layers[refused[0]].reason}.",
            f'Pass strict="warn" or TurboConfig(dense_layers={refused}) to leave them dense.',
        )
    for at in layers:
        if at.bias_step:
            notices.note(
                f"layer {at.index}: its key bias alone makes an INT8 step of {at.bias_step:.1f} standard deviations of "
                "a key channel; it is kept at 8 bit, and may still lose accuracy. Evaluate, or leave it dense "
                "(TurboConfig.dense_layers)."
            )


def _apply(
    model: PreTrainedModel,
    report: Report,
    modules: Mapping[int, torch.nn.Module],
    family: Family | None,
    maker: CacheMaker,
    door: Door | None,
    strict: Strict,
) -> Handle:
    """Change the model. door: passes runners of steps to `generate`, if they are wanted."""
    register()
    previous = switch_attention(model, NAME)
    hooks = add_hooks(model, modules, report.layers, maker, strict)
    replaced = replace_methods(model, family, maker, door, strict)
    return Handle(model, report, maker, hooks, replaced, previous, door.compiled if door is not None else None)
