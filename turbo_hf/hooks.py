"""Hooks of the attention modules: each call gets its layer of the cache; a pass that has stored NaN or Inf raises."""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from turbo_hf.attention import NAME, TurboCall
from turbo_hf.cache import TurboCache
from turbo_hf.errors import Strict, Unsupported
from turbo_hf.handle import LayerReport
from turbo_hf.integrity import STEP
from turbo_hf.layer import TurboLayer

OTHER_MODEL = "It was made for another model: use handle.new_cache()."


class _Spec(NamedTuple):
    """What the hook of one attention module needs to know."""

    layer: int
    layers: int
    window: int | None
    compress: bool
    strict: Strict


def add_hooks(
    model: torch.nn.Module, modules: Mapping[int, torch.nn.Module], layers: Sequence[LayerReport], strict: Strict
) -> list[RemovableHandle]:
    """Give each attention module its hooks, and those around them; the handles to remove them by.

    modules: attention modules by layer, at least one. layers: what is done with each layer of the model.
    """
    hooks = []
    for depth, module in enumerate(_around(model, modules.values()), start=STEP + 1):
        hooks.append(module.register_forward_pre_hook(functools.partial(_begin_pass, depth), with_kwargs=True))
        # not called after an exception
        hooks.append(module.register_forward_hook(functools.partial(_finish_pass, depth), with_kwargs=True))
        failed = functools.partial(_abandon_pass, depth)
        hooks.append(module.register_forward_hook(failed, with_kwargs=True, always_call=True))
    for index, module in modules.items():
        at = layers[index]
        hook = functools.partial(_bring_layer, _Spec(index, len(layers), at.window, bool(at.groups), strict))
        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        hooks.append(module.register_forward_hook(_release_layer, with_kwargs=True, always_call=True))
    # the last attention of a pass: what earlier layers have noted is read here all at once, before any token is chosen
    hooks.append(modules[max(modules)].register_forward_hook(_end_pass, with_kwargs=True))
    return hooks


def _around(model: torch.nn.Module, modules: Collection[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules whose forward pass calls all of `modules`, the outermost first."""
    found = [model]
    while True:
        inside = (x for x in found[-1].children() if {*modules} <= {*x.modules()})
        # a list of layers is not called itself, and what stands in it is one layer of several
        called = next((x for x in inside if type(x).forward is not torch.nn.Module.forward), None)
        if called is None or called in modules:
            return found
        found.append(called)


def _cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> TurboCache | None:
    return next((x for x in (kwargs.get("past_key_values"), *args) if isinstance(x, TurboCache)), None)


def _begin_pass(depth: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of what calls all layers: refuse a cache of which an earlier pass has broken off."""
    cache = _cache_of(args, kwargs)
    if cache is not None:
        cache.begin_pass(depth)


def _finish_pass(depth: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of what calls all layers: the pass has not broken off."""
    cache = _cache_of(args, kwargs)
    if cache is not None:
        cache.integrity.leave(depth)


def _abandon_pass(depth: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of what calls all layers, also run after an error: one before anything is stored changes nothing."""
    cache = _cache_of(args, kwargs)
    if cache is not None:
        cache.integrity.abandon(depth)


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
        layer.integrity.claim(spec.layer)
        layer.claimed = True
    rotary = kwargs.get("position_embeddings") if layer is not None and layer.selector is not None else None
    call = TurboCall(cache if layer is not None else None, layer, spec.window, spec.strict, rotary)
    return args, {**kwargs, "turbo": call}


def _release_layer(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook, also run after an error: a claim that this call did not use must not carry over to a later one."""
    call = kwargs.get("turbo")
    if call is not None and call.layer is not None:
        call.layer.claimed, call.layer.pending = False, None
        call.layer.integrity.unclaim(call.layer.index)


def _end_pass(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of the last attention module: raise an error if the pass has stored NaN or Inf."""
    cache = kwargs.get("past_key_values")
    if isinstance(cache, TurboCache):
        cache.require_finite()


def is_own(hook: Any) -> bool:
    """Whether a hook is one that `add_hooks` has added."""
    own = (_release_layer, _end_pass, _bring_layer, _begin_pass, _finish_pass, _abandon_pass)
    return getattr(hook, "func", hook) in own
