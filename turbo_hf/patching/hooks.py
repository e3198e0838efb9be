"""Hooks of a patched model: each attention module gets its layer of the compressed cache, and each pass is announced.

A call that needs a cache gets a compressed one, and keeps it. A pass that has stored NaN or Inf, or replaced the
compressed cache by another one, is reported at its end.
"""

import functools
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel

from turbo_hf.attention.indexed import indexer_mask
from turbo_hf.attention.masks import forget_windows, require_window
from turbo_hf.attention.turbo_attention import NAME, TurboCall, claimed, left_alone
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.pass_mark import STEP, untraced
from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.errors import Strict, Unsupported, complain, warn
from turbo_hf.models.model_layers import CACHE_KEYWORDS, INDEXED, layer_windows
from turbo_hf.models.versions import CACHE
from turbo_hf.patches.generic import chooses_attention
from turbo_hf.patching.handle import CacheMaker, LayerReport
from turbo_hf.ranks import Ranks

OTHER_MODEL = "It was made for another model: use handle.new_cache()."


class _Spec(NamedTuple):
    """What the hook of one attention module needs to know.

    Args:
        layer: the layer's number.
        layers: number of the model's layers.
        window: tokens that a query sees; None: all.
        compress: whether the layer is compressed.
        strict: as in `patch`.
        indexed: whether an indexer names the tokens that it reads.
    """

    layer: int
    layers: int
    window: int | None
    compress: bool
    strict: Strict
    indexed: bool


def add_hooks(
    model: PreTrainedModel,
    modules: Mapping[int, torch.nn.Module],
    layers: Sequence[LayerReport],
    maker: CacheMaker,
    strict: Strict,
) -> list[RemovableHandle]:
    """Give the model and its attention modules their hooks; the handles to remove them by.

    A pass needs `_bring_layer` alone, which gives attention its layer. `_begin_pass`, `_finish_pass` and `_drop_pass`
    set and clear the mark of its cache, so that none goes on after a pass that broke off. The other hooks guard calls
    that come by other ways: those without a cache (`_bring_cache`), passes that no module announces
    (`_report_nonfinite`), and attention modules that store to no cache (`left_alone`).

    modules: attention modules by layer, at least one. layers: what is done with each layer of the model.
    """
    around = _around(model, modules.values())
    hooks = [
        model.register_forward_pre_hook(functools.partial(_bring_cache, maker), with_kwargs=True),
        model.register_forward_hook(functools.partial(_watch_cache, maker, strict), with_kwargs=True),
    ]
    for depth, module in enumerate(around, start=STEP + 1):
        # a model inside the model (model.model) can be called directly, too
        if isinstance(module, PreTrainedModel):
            tell = functools.partial(_tell_uncompressed, maker)
            hooks.append(module.register_forward_pre_hook(tell, with_kwargs=True))
        # behind the hook that may bring the cache
        begin = functools.partial(_begin_pass, depth, maker.ranks)
        hooks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
        # also after an error: one that came before anything was stored leaves no mark
        dropped = functools.partial(_drop_pass, depth)
        hooks.append(module.register_forward_hook(dropped, with_kwargs=True, always_call=True))
        # runs last and only on success, so it marks the pass as complete
        hooks.append(module.register_forward_hook(functools.partial(_finish_pass, depth), with_kwargs=True))
    kinds = [kind for kind, _ in layer_windows(model.config.get_text_config(decoder=True))]
    for index, module in modules.items():
        at = layers[index]
        spec = _Spec(index, len(layers), at.window, bool(at.groups), strict, kinds[index] == INDEXED)
        hook = functools.partial(_bring_layer, spec)
        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    hooks.append(modules[max(modules)].register_forward_hook(_report_nonfinite, with_kwargs=True))
    hooked = set(modules.values())
    for other in model.modules():
        named = getattr(getattr(other, "config", None), "_attn_implementation", None) == NAME
        if named and other not in hooked and chooses_attention(type(other)):
            hooks.append(other.register_forward_pre_hook(left_alone))
    return hooks


def _around(model: torch.nn.Module, modules: Collection[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules whose forward pass calls all of `modules`, the outermost first."""
    around = [model]
    while True:
        inside = (x for x in around[-1].children() if {*modules} <= {*x.modules()})
        # a ModuleList is not called itself, and each module in it is only one of the layers
        called = next((x for x in inside if type(x).forward is not torch.nn.Module.forward), None)
        if called is None or called in modules:
            return around
        around.append(called)


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


def _given_cache(kwargs: Mapping[str, Any]) -> Any:
    """The cache that a call of an attention module brings; None without one."""
    for name in CACHE_KEYWORDS:
        cache = kwargs.get(name)
        # an empty cache is false
        if cache is not None:
            return cache
    return None


def _cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> TurboCache | None:
    return next((x for x in (_given_cache(kwargs), *args) if isinstance(x, TurboCache)), None)


@untraced
def _begin_pass(depth: int, ranks: Ranks, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a module that calls all layers: refuse a cache in which an earlier pass broke off."""
    cache = _cache_of(args, kwargs)
    if depth == STEP + 1:
        forget_windows()
    if cache is not None:
        # of a cache that the patch has not made, too
        cache.mark.ranks = ranks
        model = module if depth == STEP + 1 else None
        cache.begin_pass(depth, model, kwargs.get("input_ids", args[0] if args else None))


@untraced
def _finish_pass(depth: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of a module that calls all layers: the pass of the outermost one has ended.

    It raises an error if the pass has stored NaN or Inf, before any token is chosen.
    """
    cache = _cache_of(args, kwargs)
    if cache is not None and cache.mark.ends(depth):
        # one read for all layers, which waits for the device: here the host has launched all of the pass
        cache.require_finite()
        cache.mark.end()


@untraced
def _drop_pass(depth: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of a module that calls all layers, before `_finish_pass`: forget a pass that has stored nothing."""
    cache = _cache_of(args, kwargs)
    if cache is not None:
        cache.mark.drop(depth)


@untraced
def _bring_layer(
    spec: _Spec, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of an attention module: claim the cache layer and pass it to the attention function."""
    cache = _given_cache(kwargs)
    now = cache.mark.now if isinstance(cache, TurboCache) else None
    if now is None or now.config is not module.config:
        if module.config._attn_implementation != NAME:
            return None
        if now is not None:
            now.config = module.config
    count = len(cache.all_layers) if isinstance(cache, TurboCache) else spec.layers
    # a draft by the first layers alone (assistant_early_exit) changes the config accordingly in the meantime
    if count != spec.layers and count != module.config.num_hidden_layers:  # noqa: PLR1714  the config is slow to ask
        raise Unsupported(f"this TurboCache has {count} layers, the model {spec.layers}. {OTHER_MODEL}")
    if spec.layer >= count:
        raise Unsupported(
            f"this pass goes over layer {spec.layer}, and its TurboCache is for the first {count}: this model's class "
            "has no early exit. Generate without assistant_early_exit."
        )
    require_window(spec.layer, spec.window, module.config)
    of_cache = cache.all_layers[spec.layer] if spec.compress and isinstance(cache, TurboCache) else None
    layer = of_cache if isinstance(of_cache, TurboLayer) else None
    view = None
    # `kwargs` is of this call alone
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
        view = claimed(cache, spec.layer)
        for name in CACHE_KEYWORDS:
            if kwargs.get(name) is cache:
                kwargs[name] = view
    rotary = kwargs.get("position_embeddings") if layer is not None and layer.selector is not None else None
    mask = kwargs.get("attention_mask")
    if spec.indexed:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        kwargs["attention_mask"] = indexer_mask(cache, layer, spec.layer, mask, x)
    kwargs["turbo"] = TurboCall(view, layer, spec.window, spec.strict, rotary, mask)
    return args, kwargs


@untraced
def _report_nonfinite(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of the last attention module: as `_finish_pass`, where no module has announced the pass."""
    cache = _given_cache(kwargs)
    if isinstance(cache, TurboCache) and (cache.mark.now is None or cache.mark.now.depth is None):
        cache.require_finite()


def is_own(hook: Any) -> bool:
    """Whether a hook is one that `add_hooks` has added."""
    function = getattr(hook, "func", hook)
    return function is left_alone or getattr(function, "__module__", None) == __name__
