"""`patch()`: put a model on a compressed KV cache, with a handle that undoes it."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from turbo_hf.attention import NAME, TurboCall
from turbo_hf.cache import TurboCache
from turbo_hf.calibration.artifacts import Calibration
from turbo_hf.calibration.choice import choose_heads, choose_selectors
from turbo_hf.config import DEFAULT_PRESET, TurboConfig, resolve_config
from turbo_hf.errors import Notices, Strict, Unsupported
from turbo_hf.graphs import Door, StepRunner, cuda_device, describe, model_obstacle
from turbo_hf.handle import CacheMaker, Handle, LayerReport, Report, register, switch_attention, text_key
from turbo_hf.layer import TurboLayer
from turbo_hf.model_layers import kv_heads, require_model
from turbo_hf.ops.forecast import forecast
from turbo_hf.ops.tuning import describe_prefill
from turbo_hf.patches import AttentionLayer, attention_layers, family_of, lost_to_bias
from turbo_hf.selfcheck import probe, require_agreement
from turbo_hf.versions import version_problem

PREPARE = "_prepare_cache_for_generation"
MAY_COMPILE, COMPILED = "_valid_auto_compile_criteria", "get_compiled_call"
OTHER_MODEL = "It was made for another model: use handle.new_cache()."

BIAS_STEP = 0.5
"""Key bias at which a layer is kept at 8 bit: its INT8 step exceeds half a standard deviation of a typical channel."""


class _Spec(NamedTuple):
    """What the hook of one attention module needs to know."""

    layer: int
    layers: int
    window: int | None
    compress: bool
    strict: Strict


def patch(
    model: PreTrainedModel,
    config: str | TurboConfig = DEFAULT_PRESET,
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
        config: a preset ("int8", "turbo4", "turbo-mixed", "turbo2", "saap") or a `TurboConfig`.
        calibration: decides which heads get the low bits, if the config has heads of two widths, and provides what
            sparse decoding selects keys by. A `Calibration`, a folder or Hub id that holds one, None for no calibration
            (heads are then ranked by each row's first block), or "auto": the one stored with the checkpoint (in its
            folder or the Hub cache), if any.
        revision: the Hub revision that the model was loaded from, if not main: Transformers 5.23 keeps no record of it.
        strict: what happens with a layer, version or call that compressed attention cannot serve, and with a
            calibration found by "auto" that is damaged or belongs to another model: "raise" an error, "warn" and leave
            that part to Hugging Face, or "fallback" to Hugging Face with only a log message.
        check: compare the logits of a short random text before and after patching; an error removes the patch.

    Returns:
        Handle: has `remove()`, `report()`, `memory()` and `new_cache()`, and is a context manager.

    Raises:
        Unsupported (a ValueError): the model, or with strict "raise" a part of it, cannot be compressed, or the check
            failed. Later calls that ask for what a compressed cache cannot do raise it too.
        ValueError: unknown preset or strict; the model is already patched; the calibration is damaged or belongs to
            another model; the revision is not the model's.
        OSError: there is no calibration in the named place.
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
    dims = {int(getattr(module, "head_dim", 0)) for n, module in modules.items() if layers[n].groups} - {0}
    _judge(layers, f"{type(model).__name__} ({_text_type(model)})", chosen, notices)
    forecast(chosen, {x.device for x in model.parameters()}, model.dtype, dims, notices)
    heads = choose_heads(model, chosen, calibration, notices, revision)
    split = [at.groups for at in layers if at.groups and not at.kept_int8]
    if chosen.low_heads and split and not any(bits == chosen.low_bits for groups in split for bits, _ in groups):
        notices.note(
            f"low_heads={chosen.low_heads:g} is less than one KV head of each layer: all keep {chosen.bits} bit."
        )
        heads = heads._replace(words="")
    windowed = {at.index: "it has a sliding window" if at.window else "" for at in layers if at.groups}
    selectors, sparse = choose_selectors(chosen, windowed, heads, len(layers))
    reference = probe(model) if check else None
    family = family_of(_text_type(model))
    dense = tuple(at.index for at in layers if not at.groups)
    steps, no_graphs = describe(chosen, dense, family is not None, model.device)
    # the last possible refusal before anything is changed
    if chosen.cuda_graphs is True and no_graphs is not None:
        notices.refuse(f"cuda_graphs=True: {no_graphs}.")
    report = Report(
        model=type(model).__name__,
        family=family.name if family else f"{_text_type(model)}: generic path, no test of its own",
        notes=family.notes if family else "",
        config=chosen,
        layers=tuple(layers),
        prompts=describe_prefill(chosen.prompt_attention, model.device, dims),
        steps=steps,
        warnings=tuple(notices.said),
        heads=heads.words,
        sparse=sparse,
    )
    int8 = tuple(at.index for at in layers if at.kept_int8)
    maker = CacheMaker(len(layers), chosen, int8, dense, heads.orders, selectors)
    door = Door(chosen.cuda_graphs is True) if chosen.cuda_graphs is not False and no_graphs is None else None
    handle = _apply(model, report, modules, maker, door, strict)
    if reference is not None:
        try:
            require_agreement(probe(model, handle.new_cache()), reference)
        except BaseException:
            handle.remove()
            raise
    return handle


def _check_model(model: PreTrainedModel, notices: Notices) -> None:
    """Refuse models, and versions of Transformers, that cannot be patched at all."""
    kind, text = type(model).__name__, model.config.get_text_config(decoder=True)
    if text._attn_implementation == NAME:
        raise ValueError(
            "This model, or another that shares its config object, is patched already. Call remove() on the first "
            "handle, then patch again. A copy of a patched model has no handle: copy it before it is patched."
        )
    outdated = version_problem()
    if outdated is not None:
        notices.refuse(outdated)
    if model.config.is_encoder_decoder:
        raise Unsupported(f"{kind} is an encoder-decoder; only decoder-only models are supported.")
    if text is not model.config and text_key(model.config) is None:
        raise Unsupported(
            f"the language model of {kind} lies inside another of its parts. Patch that part "
            "(for Qwen2.5-Omni: model.thinker)."
        )
    if not hasattr(type(model), PREPARE):
        notices.note(f"{kind} has no generate: pass handle.new_cache() to it, or patch the whole model.")


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


def _judge(layers: list[LayerReport], model: str, config: TurboConfig, notices: Notices) -> None:
    """Refuse what cannot be done with these layers, and note what the user should know about them."""
    named = (*config.dense_layers, *(config.int8_layers if config.int8_layers != "auto" else ()))
    outside = [index for index in named if index >= len(layers)]
    if outside:
        raise ValueError(f"TurboConfig names layer {outside[0]}; the model has layers 0 to {len(layers) - 1}.")
    refused = tuple(at.index for at in layers if at.refused)
    if not any(at.groups for at in layers):
        why = layers[refused[0] if refused else 0].reason if layers else "it has no attention layer"
        raise Unsupported(f"no layer of {model} can be compressed: {why}.")
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
    maker: CacheMaker,
    door: Door | None,
    strict: Strict,
) -> Handle:
    """Change the model. door: passes CUDA graph runners to `generate`, if they are wanted."""
    register()
    previous = switch_attention(model, NAME)
    hooks = _add_hooks(modules, report.layers, strict)
    replaced = _replace_methods(model, maker, door)
    return Handle(model, report, maker, hooks, replaced, previous)


def _add_hooks(
    modules: Mapping[int, torch.nn.Module], layers: Sequence[LayerReport], strict: Strict
) -> list[RemovableHandle]:
    hooks = []
    for index, module in modules.items():
        at = layers[index]
        hook = functools.partial(_bring_layer, _Spec(index, len(layers), at.window, bool(at.groups), strict))
        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        hooks.append(module.register_forward_hook(_release_layer, with_kwargs=True, always_call=True))
    # the last attention of a pass: what earlier layers have noted is read here all at once, before any token is chosen
    hooks.append(modules[max(modules)].register_forward_hook(_end_pass, with_kwargs=True))
    return hooks


def _replace_methods(
    model: PreTrainedModel, maker: CacheMaker, door: Door | None
) -> list[tuple[torch.nn.Module, str, Any]]:
    """Put the patch's methods on the instances; returns (module, name, previous attribute) for each."""
    methods: list[tuple[torch.nn.Module, str, Callable[..., Any]]] = [
        (model, PREPARE, functools.partial(_prepare_cache, maker, model.__dict__.get(PREPARE))),
        (model, "init_continuous_batching", _refuse_continuous_batching),
    ]
    if door is not None:
        methods += [
            (model, name, functools.partial(replacement, door, model.__dict__.get(name)))
            for name, replacement in ((MAY_COMPILE, _may_replay), (COMPILED, _compiled_call))
        ]
    family = family_of(_text_type(model))
    if family is not None:
        methods += [(module, name, method) for module in model.modules() for name, method in family.methods.items()]
    # a model without a head generates nothing, and has no method to replace
    methods = [(module, name, method) for module, name, method in methods if hasattr(type(module), name)]
    replaced = [(module, name, module.__dict__.get(name)) for module, name, _ in methods]
    for module, name, method in methods:
        # not a bound method: a deep copy of the model copies a partial along with its cache maker
        module.__dict__[name] = functools.partial(method, module)
    return replaced


def _bring_layer(
    spec: _Spec, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of an attention module: claim the cache layer and pass it to the attention function."""
    if module.config._attn_implementation != NAME:
        return None
    cache = kwargs.get("past_key_values")
    count = len(cache.layers) if isinstance(cache, TurboCache) else spec.layers
    # a draft by the first layers alone (assistant_early_exit) changes the config accordingly in the meantime
    if count != spec.layers and count != module.config.num_hidden_layers:  # noqa: PLR1714  the config is slow to ask
        raise Unsupported(f"this TurboCache has {count} layers, the model {spec.layers}. {OTHER_MODEL}")
    held = cache.layers[spec.layer] if spec.compress and isinstance(cache, TurboCache) else None
    layer = held if isinstance(held, TurboLayer) else None
    if layer is not None:
        if layer.window != spec.window:
            raise Unsupported(
                f"layer {spec.layer} of this TurboCache has the window {layer.window}, the model's {spec.window}. "
                f"{OTHER_MODEL}"
            )
        if module.training:
            raise Unsupported(
                "the model is in training mode, and a compressed cache has no gradients. Call model.eval() to "
                "generate, or train without a TurboCache (use_cache=False)."
            )
        layer.claimed = True
    rotary = kwargs.get("position_embeddings") if layer is not None and layer.selector is not None else None
    call = TurboCall(cache if layer is not None else None, layer, spec.window, spec.strict, rotary)
    return args, {**kwargs, "turbo": call}


def _release_layer(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook, also run after an error: a claim that this call did not use must not carry over to a later one."""
    call = kwargs.get("turbo")
    if call is not None and call.layer is not None:
        call.layer.claimed, call.layer.pending = False, None


def _end_pass(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of the last attention module: raise an error if the pass has stored NaN or Inf."""
    cache = kwargs.get("past_key_values")
    if isinstance(cache, TurboCache):
        cache.require_finite()


def _prepare_cache(
    maker: CacheMaker,
    before: Any,
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """In place of `_prepare_cache_for_generation`: `generate` gets a TurboCache unless the caller chose a cache."""
    given = model_kwargs.get("past_key_values")
    named = generation_config.cache_implementation
    original: Callable[..., Any] = before or functools.partial(type(model)._prepare_cache_for_generation, model)
    if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
        # a shallow copy of the model that outlived the patch, or another implementation has been chosen since
        return original(generation_config, model_kwargs, *args, **kwargs)
    if given is None and generation_config.use_cache is not False and named is None:
        _check_rows(model_kwargs.get("attention_mask"))
        cache = maker.make(model.config)
        model_kwargs["past_key_values"] = cache
        if generation_config.is_assistant:
            cache.activate_past_recording()
        return None
    if isinstance(given, TurboCache) and not generation_config.is_assistant:
        given.stop_recording()
    if given is not None and not isinstance(given, TurboCache):
        warnings.warn(f"turbo_hf: a {type(given).__name__} was passed, so this call is not compressed.", stacklevel=4)
    elif given is None and named is not None:
        warnings.warn(
            f"turbo_hf: cache_implementation={named!r} asks for Hugging Face's own cache, so this call is not "
            "compressed. Set model.generation_config.cache_implementation = None to compress it.",
            stacklevel=4,
        )
    return original(generation_config, model_kwargs, *args, **kwargs)


def _may_replay(door: Door, before: Any, model: Any, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
    """In place of `_valid_auto_compile_criteria`: whether `generate` shall call a runner as its forward pass."""
    door.offer(None)
    wanted = not (
        generation_config.disable_compile or generation_config.compile_config or generation_config.is_assistant
    )
    if wanted and isinstance(model_kwargs.get("past_key_values"), TurboCache):
        reason = model_obstacle(model, _is_own)
        if reason is None:
            limit = generation_config.max_length
            door.offer(StepRunner(model, limit, cuda_device(model.device), door.demanded))
            return True
        if door.demanded:
            raise Unsupported(f'cuda_graphs=True: {reason}. Choose TurboConfig(cuda_graphs="auto") or False.')
    original: Callable[..., bool] = before or functools.partial(type(model)._valid_auto_compile_criteria, model)
    return original(model_kwargs, generation_config)


def _compiled_call(door: Door, before: Any, model: Any, compile_config: Any) -> Callable[..., Any]:
    """In place of `get_compiled_call`: the runner, where `_may_replay` has just said so."""
    original: Callable[..., Any] = before or functools.partial(type(model).get_compiled_call, model)
    return door.take() or original(compile_config)


def _is_own(hook: Any) -> bool:
    return hook is _release_layer or hook is _end_pass or getattr(hook, "func", None) is _bring_layer


def _check_rows(mask: Any) -> None:
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1]:
        empty = [row for row, holds in enumerate(mask.any(-1).tolist()) if not holds]
        if empty:
            raise ValueError(
                f"rows {empty} of attention_mask are all padding: there is no prompt to continue. Remove these rows."
            )


def _refuse_continuous_batching(model: Any, *args: Any, **kwargs: Any) -> Any:
    raise Unsupported(
        "generate_batch (continuous batching) keeps keys and values in a paged cache of its own, which cannot be "
        "compressed. Use generate, or remove the patch."
    )
