"""Hooks around a whole call of a patched model: one that needs a cache gets a compressed one, and keeps it.

A call that has replaced the compressed cache by another one is reported at its end.
"""

import functools
import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel

from turbo_hf.attention.turbo_attention import NAME
from turbo_hf.cache.guards import untraced
from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.errors import Strict, complain, warn
from turbo_hf.models.versions import CACHE
from turbo_hf.patching.handle import CacheMaker


def add_cache_hooks(
    model: PreTrainedModel, around: Collection[torch.nn.Module], maker: CacheMaker, strict: Strict
) -> list[RemovableHandle]:
    """Give the model and the models inside it these hooks; the handles to remove them by.

    around: the modules whose forward pass calls all attention modules.
    """
    hooks = [
        model.register_forward_pre_hook(functools.partial(_bring_cache, maker), with_kwargs=True),
        model.register_forward_hook(functools.partial(_watch_cache, maker, strict), with_kwargs=True),
    ]
    for module in around:
        # a model inside the model (model.model) can be called directly, too
        if isinstance(module, PreTrainedModel):
            tell = functools.partial(_tell_uncompressed, maker)
            hooks.append(module.register_forward_pre_hook(tell, with_kwargs=True))
    return hooks


def uses_turbo(model: PreTrainedModel) -> bool:
    """Whether the attention of this model is still the one that the patch has chosen."""
    return bool(model.config.get_text_config(decoder=True)._attn_implementation == NAME)


@functools.cache
def _names(method: Any) -> tuple[str, ...]:
    """The parameters of a method, but for `self`."""
    return tuple(inspect.signature(method).parameters)[1:]


def by_name(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a method's call, all as keywords, the cache under its present name."""
    named = {**dict(zip(_names(method), args, strict=False)), **kwargs}
    if CACHE not in named and "past_key_values" in named:
        named[CACHE] = named.pop("past_key_values")
    return named


def say_replaced(model: PreTrainedModel, cache: TurboCache, other: Any, maker: CacheMaker, strict: Strict) -> None:
    """Report, as `strict` says, that the model continues with another cache than the one it was given."""
    maker.forget(cache, other)
    complain(
        strict,
        f"{type(model).__name__} has put a {type(other).__name__} in the place of its TurboCache: from here on nothing "
        'is compressed. Run it without the patch, or patch with strict="warn".',
    )


@untraced
def _bring_cache(
    maker: CacheMaker, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of the model: a call with use_cache=True that passes no cache gets a compressed one."""
    given = by_name(type(model).forward, args, kwargs)
    if given.get(CACHE) is not None or not given.get("use_cache") or model.training:
        return None
    if CACHE not in _names(type(model).forward) or not uses_turbo(model):
        return None
    return (), {**given, CACHE: maker.make(model.config)}


@untraced
def _tell_uncompressed(maker: CacheMaker, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the model and of models in it: warn, once per cache, where one is not compressed."""
    cache = by_name(type(model).forward, args, kwargs).get(CACHE)
    if not isinstance(cache, Cache) or isinstance(cache, TurboCache):
        return
    if cache not in maker.told and uses_turbo(model):
        maker.told.add(cache)
        warn(
            f"turbo_hf: a {type(cache).__name__} was passed as {CACHE}, so this call is not compressed. To compress "
            f"it, leave out {CACHE} (a loop begins with use_cache=True), or pass {CACHE}=handle.new_cache()."
        )


@untraced
def _watch_cache(
    maker: CacheMaker, strict: Strict, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Forward hook of the model: it must return the compressed cache that it was given."""
    values = output if isinstance(output, tuple) else (getattr(output, CACHE, None),)
    other = next((value for value in values if isinstance(value, Cache)), None)
    if other is None or isinstance(other, TurboCache) or not uses_turbo(model):
        return
    cache = by_name(type(model).forward, args, kwargs).get(CACHE)
    if isinstance(cache, TurboCache):
        say_replaced(model, cache, other, maker, strict)


CACHE_HOOKS = (_bring_cache, _watch_cache, _tell_uncompressed)
