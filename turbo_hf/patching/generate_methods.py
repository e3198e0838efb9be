"""Methods that the patch replaces on the instance: they decide which cache and which forward pass `generate` uses."""

import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import utils as generation_utils
from transformers.generation.candidate_generator import AssistedCandidateGenerator, EarlyExitCandidateGenerator
from transformers.utils.generic import ModelOutput

from turbo_hf.attention.turbo_attention import NAME
from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.errors import Strict, Unsupported, warn
from turbo_hf.graphs.devices import CudaDevice, cuda_device
from turbo_hf.graphs.step_runner import HandOff, StepRunner
from turbo_hf.graphs.why_not import is_compiled, is_dispatched, why_no_replay_of
from turbo_hf.models.versions import CACHE
from turbo_hf.patches.families import Family
from turbo_hf.patching import continuous_batching
from turbo_hf.patching.handle import CacheMaker
from turbo_hf.patching.hooks import by_name, say_replaced, uses_turbo

PREPARE, INPUTS, PREFILL = "_prepare_cache_for_generation", "prepare_inputs_for_generation", "_prefill"
CANDIDATES = "_get_candidate_generator"
FORGETS = (
    "turbo_hf: {model} drops its cache of {tokens} tokens here, as its rotary frequencies change with the length, and "
    "this version of Transformers then computes the newest token alone: what it generates from here on lacks the "
    "prompt, with or without the patch. Of Phi-3 and PhiMoE, Transformers 5.23 computes all tokens again: upgrade it."
)
MASK, NEW = "attention_mask", "next_sequence_length"
RUNNER = "turbo_runner"
"""Keyword that takes a runner from `generate` to `forward`, in searches that call the model itself."""


@dataclass(slots=True)
class _Drafts:
    """What the drafts of one assisted `generate` share. Each draft is a `generate` of the drafter.

    runner: of the drafter's steps; None before its first draft, or if they are not captured.
    config: the config that early-exit drafting edits; None: another model drafts.
    """

    runner: StepRunner | None = None
    config: Any = None


_of_thread = threading.local()

MAY_COMPILE, COMPILED, UPDATE = (
    "_valid_auto_compile_criteria",
    "get_compiled_call",
    "_update_model_kwargs_for_generation",
)


def replace_methods(
    model: PreTrainedModel, family: Family | None, maker: CacheMaker, hand_off: HandOff | None, strict: Strict
) -> list[tuple[torch.nn.Module, str, Any]]:
    """Put the patch's methods on the instances; returns (module, name, previous attribute) for each.

    family: its methods are replaced too. hand_off: passes runners of steps to `generate`; None: no runners.
    """
    bring = None
    if hand_off is not None:
        bring = functools.partial(_new_runner, hand_off, model.__dict__.get("forward"))
    methods: list[tuple[torch.nn.Module, str, Callable[..., Any]]] = [
        (model, PREPARE, functools.partial(_prepare_cache, maker, bring, model.__dict__.get(PREPARE))),
        (model, INPUTS, functools.partial(_prepare_inputs, maker, strict, model.__dict__.get(INPUTS))),
        (model, PREFILL, functools.partial(_prefill, model.__dict__.get(PREFILL))),
        (model, CANDIDATES, functools.partial(_candidates, bring, model.__dict__.get(CANDIDATES))),
        (model, "init_continuous_batching", functools.partial(continuous_batching.begin, maker)),
    ]
    if hand_off is not None:
        methods += [
            (model, name, functools.partial(replacement, hand_off, model.__dict__.get(name)))
            for name, replacement in ((MAY_COMPILE, _may_replay), (COMPILED, _compiled_call), (UPDATE, _update))
        ]
        methods.append((model, "forward", functools.partial(_forward, model.__dict__.get("forward"))))
    if family is not None:
        methods += [(module, name, method) for module in model.modules() for name, method in family.methods.items()]
    # a model without a head generates nothing, and has no method to replace
    methods = [(module, name, method) for module, name, method in methods if hasattr(type(module), name)]
    replaced = [(module, name, module.__dict__.get(name)) for module, name, _ in methods]
    for module, name, method in methods:
        # not a bound method: a deep copy of the model copies a partial along with its cache maker
        replacement: Any = functools.partial(method, module)
        # `generate` reads from the signature which keywords a model knows
        replacement.__wrapped__ = module.__dict__.get(name) or getattr(type(module), name)
        module.__dict__[name] = replacement
    return replaced


def _prepare_cache(
    maker: CacheMaker,
    bring: Callable[..., StepRunner | None] | None,
    before: Any,
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """In place of `_prepare_cache_for_generation`: `generate` gets a TurboCache unless the caller chose a cache."""
    given = model_kwargs.get(CACHE)
    named = generation_config.cache_implementation
    original: Callable[..., Any] = before or functools.partial(type(model)._prepare_cache_for_generation, model)
    if not uses_turbo(model):
        if maker.active:
            chosen = model.config.get_text_config(decoder=True)._attn_implementation
            maker.generated = f"not compressed (set_attn_implementation has chosen {chosen!r})"
            warn(
                f"turbo_hf: set_attn_implementation has chosen {chosen!r} since the patch, so this call is not "
                f'compressed. Call remove() on the handle, or model.set_attn_implementation("{NAME}").'
            )
        # otherwise a shallow copy of the model that outlived the patch
        return original(generation_config, model_kwargs, *args, **kwargs)
    if given is None and generation_config.use_cache is not False and named is None:
        _check_rows(model_kwargs.get("attention_mask"))
        cache = maker.make(model.config)
        cache.deferred.wanted = _may_defer(model)
        model_kwargs[CACHE] = cache
        if generation_config.is_assistant:
            cache.activate_past_recording()
        else:
            maker.generated = weakref.ref(cache)
        _bring_runner(bring, model, model_kwargs, generation_config)
        return None
    if isinstance(given, TurboCache):
        if generation_config.use_cache is False:
            raise ValueError(
                "use_cache=False with a TurboCache: generate would pass every token anew at each step, and each time "
                f"the cache would store them all again. Leave out {CACHE}, or set use_cache=True."
            )
        if not generation_config.is_assistant:
            given.stop_recording()
            mask = model_kwargs.get(MASK)
            # Transformers 5.24 drops a mask of ones alone, and keeps its length
            given.require_more(getattr(generation_config, "_mask_length", 0) if mask is None else mask.shape[-1])
            maker.generated = weakref.ref(given)
        _bring_runner(bring, model, model_kwargs, generation_config)
        return original(generation_config, model_kwargs, *args, **kwargs)
    chosen = "use_cache=False" if generation_config.use_cache is False else f"cache_implementation={named!r}"
    maker.generated = f"not compressed ({chosen if given is None else f'a {type(given).__name__} was passed'})"
    made = original(generation_config, model_kwargs, *args, **kwargs)
    own = model_kwargs.get(CACHE)
    if given is None and own is not None:
        # not told once more in the pass
        maker.told.add(own)
        warn(
            f"turbo_hf: {chosen} asks for Transformers' own cache, so this call is not compressed. To compress it, "
            "leave out that argument, or set it to None in the generation_config."
        )
    return made


def _may_defer(model: Any) -> bool:
    """Whether a prompt is stored after its pass. On a CPU nothing is gained; compiled code may reuse its tensors."""
    return model.device.type == "cuda" and not any(is_compiled(x) for x in (model, *model.children()))


def _prepare_inputs(
    maker: CacheMaker, strict: Strict, before: Any, model: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """In place of `prepare_inputs_for_generation`: where the model drops its cache, the pass fills the cache again.

    Phi-3 and similar models have other rotary frequencies beyond `original_max_position_embeddings`, and compute all
    keys again: Transformers then passes no cache, and the model would make one of Transformers' own.
    """
    method = type(model).prepare_inputs_for_generation
    original: Callable[..., dict[str, Any]] = before or functools.partial(method, model)
    named = by_name(method, args, kwargs)
    new = _compare_tokens(named)
    inputs = original(*args, **kwargs)
    given, kept = named.get(CACHE), inputs.get(CACHE)
    if new is not None and named.get(NEW) is None and kept is given:
        # the first pass of assisted decoding: Transformers would pass what the cache holds once more
        return original(*args, **{**kwargs, NEW: new})
    if not isinstance(given, TurboCache) or kept is given or not uses_turbo(model):
        return inputs
    if kept is not None:
        say_replaced(model, given, kept, maker, strict)
        return inputs
    tokens = given.get_seq_length()
    if tokens:
        if _columns(inputs) < named["input_ids"].shape[1]:
            said, mask = FORGETS.format(model=type(model).__name__, tokens=tokens), inputs.get("attention_mask")
            if mask is not None and not bool(mask.all()):
                # the model would read the padding of the oldest columns as that of the newest token
                raise Unsupported(f"{said} Until then, do not pad.")
            # such a pass leaves one token behind; then the warning was issued already
            if tokens > 1:
                warn(said)
            inputs["attention_mask"] = None
        else:
            _require_all_tokens(model, inputs)
        _empty(given)
    return {**inputs, CACHE: given}


def _compare_tokens(named: dict[str, Any]) -> int | None:
    """Compare the tokens of the caller's cache with those of this call, where the call shows them. Returns how many
    columns are new, as `TurboCache.compare`."""
    cache, ids, embeds = (named.get(name) for name in (CACHE, "input_ids", "inputs_embeds"))
    # embeddings may stand for other tokens
    given = ids if embeds is None else embeds
    if not isinstance(cache, TurboCache) or not isinstance(given, torch.Tensor):
        return None
    return cache.compare(given.shape[1], ids if embeds is None else None)


def _prefill(
    before: Any, model: Any, input_ids: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any
) -> Any:
    """In place of `_prefill`: of an input in chunks, `prepare_inputs_for_generation` sees what is not cached alone."""
    original: Callable[..., Any] = before or functools.partial(type(model)._prefill, model)
    cache = model_kwargs.get(CACHE)
    chunked = getattr(generation_config, "prefill_chunk_size", None) is not None
    if chunked and isinstance(cache, TurboCache) and model_kwargs.get("inputs_embeds") is None:
        cache.compare(input_ids.shape[1], input_ids)
    return original(input_ids, generation_config, model_kwargs, *args, **kwargs)


def _columns(inputs: dict[str, Any]) -> int:
    """Tokens, padding included, that the inputs of a pass hold."""
    ids = inputs.get("input_ids")
    return int((inputs["inputs_embeds"] if ids is None else ids).shape[1])


def _require_all_tokens(model: Any, inputs: dict[str, Any]) -> None:
    """Raise `Unsupported` unless the inputs of a pass without a past hold all tokens of their mask or positions."""
    columns, mask, places = _columns(inputs), inputs.get("attention_mask"), inputs.get("position_ids")
    whole = mask.shape[-1] if mask is not None else columns if places is None else int(places.max()) + 1
    if columns < whole:
        raise Unsupported(
            f"{type(model).__name__} drops what its cache holds, as its rotary frequencies change with the length, and "
            f"this call passes only the newest {columns} of {whole} tokens: the answer would lack the others. Pass all "
            "of them as input_ids."
        )


def _empty(cache: TurboCache) -> None:
    """Forget every token; a cache that records the past goes on recording."""
    recording = any(layer.record_past for layer in cache.turbo_layers())
    cache.reset()
    if recording:
        cache.activate_past_recording()


def _candidates(
    bring: Callable[..., StepRunner | None] | None, before: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """In place of `_get_candidate_generator`: assisted decoding gets a runner, and so do its drafts.

    A draft that breaks off leaves the model all of its layers.
    """
    method = type(model)._get_candidate_generator
    generator = (before or functools.partial(method, model))(*args, **kwargs)
    if isinstance(generator, AssistedCandidateGenerator):
        drafts = _Drafts()
        if isinstance(generator, EarlyExitCandidateGenerator):
            # it lowers the number of layers in the config for each draft, and after an error Transformers leaves it so
            drafts.config = getattr(model, model.base_model_prefix).config
        # not a bound method: the generator, and the drafter's cache with it, would outlive `generate`
        generator.__dict__["get_candidates"] = functools.partial(_draft, weakref.ref(generator), drafts)
    named = by_name(method, args, kwargs)
    passed = named["model_kwargs"]
    cache, embeds = passed.get(CACHE), passed.get("inputs_embeds")
    if isinstance(cache, TurboCache):
        cache.drafts_follow((named["input_ids"] if embeds is None else embeds).shape[1])
    # what needs more outputs than logits is not replayed. A drafter has taken a copy of these keywords
    if bring is not None and isinstance(cache, TurboCache):
        needs = generator.requires_model_outputs
        runner = None if needs else bring(model, named["generation_config"])
        if runner is not None:
            passed[RUNNER] = runner
    return generator


def _draft(generator: "weakref.ref[Any]", drafts: _Drafts, *args: Any, **kwargs: Any) -> Any:
    """In place of `get_candidates`."""
    drafting: Any = generator()
    layers = None if drafts.config is None else drafts.config.num_hidden_layers
    before, _of_thread.drafts = getattr(_of_thread, "drafts", None), drafts
    try:
        return type(drafting).get_candidates(drafting, *args, **kwargs)
    finally:
        _of_thread.drafts = before
        if layers is not None:
            drafts.config.num_hidden_layers = layers


def _check_rows(mask: Any) -> None:
    if not (isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1]):
        return
    # one read of the device
    holds, ends = torch.stack((mask.any(-1), mask[:, -1].bool())).tolist()
    empty = [row for row, token in enumerate(holds) if not token]
    if empty:
        raise ValueError(
            f"rows {empty} of attention_mask are all padding: there is no prompt to continue. Remove these rows."
        )
    padded = [row for row, token in enumerate(ends) if not token]
    if padded:
        warn(
            f"turbo_hf: rows {padded} of attention_mask end in padding, and generate would continue from there. Pad on "
            'the left (tokenizer.padding_side = "left").'
        )


def _may_replay(
    hand_off: HandOff, before: Any, model: Any, model_kwargs: dict[str, Any], generation_config: Any
) -> bool:
    """In place of `_valid_auto_compile_criteria`: whether `generate` calls a runner as its forward pass."""
    hand_off.give(None)
    # drafts, and the passes over them, have theirs among their keywords
    may_run = not generation_config.is_assistant and RUNNER not in model_kwargs
    if may_run and isinstance(model_kwargs.get(CACHE), TurboCache):
        runner = _new_runner(hand_off, None, model, generation_config, inside=False)
        if runner is not None:
            hand_off.give(runner)
            return True
    original: Callable[..., bool] = before or functools.partial(type(model)._valid_auto_compile_criteria, model)
    return original(model_kwargs, generation_config)


def _why_not_compiled(model: Any) -> str | None:
    """Why steps that are captured are not compiled; None if they may be."""
    if getattr(model, "_device_mesh", None) is not None:
        return "its weights are shared among processes, whose sums are not compiled"
    return "its layers lie on several devices" if is_dispatched(model) else None


def _place(model: Any) -> CudaDevice:
    """What captures steps of this model; each begins where the model takes its tokens."""
    devices = {model.device: None}
    if is_dispatched(model):
        devices |= dict.fromkeys(x.device for x in model.parameters() if x.is_cuda)
    return cuda_device(*devices)


def _bring_runner(
    bring: Callable[..., StepRunner | None] | None, model: Any, model_kwargs: dict[str, Any], generation_config: Any
) -> None:
    """Give a beam search, or a draft, which call the model itself, a runner among their keywords.

    That of a beam search lives as long as its call, that of drafts as long as the call that they assist.
    """
    if bring is None:
        return
    drafts: _Drafts | None = getattr(_of_thread, "drafts", None) if generation_config.is_assistant else None
    runner = None if drafts is None else drafts.runner
    # of latents, captured steps between reordered rows have met NaN on a GPU, for a reason that is not known
    beams = (generation_config.num_beams or 1) > 1 and not any(at.latent for at in model_kwargs[CACHE].turbo_layers())
    if runner is None and (drafts is not None or beams):
        fused = drafts is None or drafts.config is None
        runner = bring(model, generation_config, fused=fused)
    if drafts is not None:
        drafts.runner = runner
    if runner is not None:
        model_kwargs[RUNNER] = runner


def _new_runner(
    hand_off: HandOff, before: Any, model: Any, generation_config: Any, fused: bool = True, inside: bool = True
) -> StepRunner | None:
    """A runner whose steps are captured, if they may be.

    before: `forward` before the patch, as in `_forward`. fused: whether steps may be compiled. inside: as `forward` in
    `StepRunner`.
    """
    if generation_config.disable_compile or generation_config.compile_config:
        return None
    # another wrapper around `forward` may not take the keyword
    wrapped = inside and getattr(model.__dict__.get("forward"), "func", None) is not _forward
    if bool(hand_off.ranks.most(torch.tensor(wrapped, device="cpu"))):
        return None
    # what the walk over all modules says is not needed before the first step, unless it is an error, or ranks agree
    reason = why_no_replay_of(model, walk=bool(hand_off.demanded or hand_off.ranks))
    # ranks that share the model get one answer: captured steps wait for each other's sums
    reason = next(filter(None, hand_off.ranks.texts(reason or "")), None)
    if hand_off.demanded and reason is not None:
        raise Unsupported(f'cuda_graphs=True: {reason}. Choose TurboConfig(cuda_graphs="auto") or False.')
    compiled, uncompiled = hand_off.compiled if fused else None, reason or _why_not_compiled(model)
    if compiled is not None and uncompiled is not None:
        compiled.refuse(uncompiled, lasting=False)
        compiled = None
    if reason is not None:
        return None
    forward = (before or functools.partial(type(model).forward, model)) if inside else None
    place = _place(model)
    if not inside and hand_off.idle:
        idle = hand_off.idle.pop()
        if idle.device is place and idle.compiled is compiled:
            return idle
    why_not = functools.partial(why_no_replay_of, model)
    return StepRunner(model, place, hand_off.demanded, compiled, forward, why_not)


def _forward(before: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of `forward`: the runner of a beam search or of assisted decoding, if there is one."""
    runner = kwargs.pop(RUNNER, None)
    forward: Callable[..., Any] = before or functools.partial(type(model).forward, model)
    return forward(*args, **kwargs) if runner is None or args else runner(**kwargs)


def _compiled_call(hand_off: HandOff, before: Any, model: Any, compile_config: Any) -> Callable[..., Any]:
    """In place of `get_compiled_call`: the runner, if `_may_replay` has just returned True."""
    original: Callable[..., Any] = before or functools.partial(type(model).get_compiled_call, model)
    return hand_off.take() or original(compile_config)


def _update(
    hand_off: HandOff, before: Any, model: Any, outputs: Any, model_kwargs: Any, *args: Any, **kwargs: Any
) -> Any:
    """In place of `_update_model_kwargs_for_generation`: a runner learns what became of the mask that it knows."""
    method, mask = type(model)._update_model_kwargs_for_generation, model_kwargs.get(MASK)
    original: Callable[..., Any] = before or functools.partial(method, model)
    updated = original(outputs, model_kwargs, *args, **kwargs)
    runner = hand_off.taken()
    if runner is not None and mask is not None and before is None and _appends_ones(method):
        runner.grown(mask, updated[MASK])
    return updated


@functools.lru_cache(maxsize=8)
def _appends_ones(method: Callable[..., Any]) -> bool:
    """Whether this `_update_model_kwargs_for_generation` is known to append a column of ones to the mask: if it is
    Transformers' own for all models, which is tried out."""
    own = GenerationMixin._update_model_kwargs_for_generation
    # not one that somebody has put in its place
    if method is not own or getattr(own, "__globals__", None) is not vars(generation_utils):
        return False
    mask = torch.tensor([[0, 1]], device="cpu")
    after: Any = method(None, ModelOutput(), {MASK: mask})[MASK]
    return bool(mask.tolist() == [[0, 1]] and after.tolist() == [[0, 1, 1]])
