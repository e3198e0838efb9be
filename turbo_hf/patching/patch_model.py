"""`patch()`: put a model on a compressed KV cache, with a handle that undoes it."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from transformers import PreTrainedModel

from turbo_hf.attention.registration import register, switch_attention
from turbo_hf.attention.turbo_attention import NAME
from turbo_hf.cache.saved_cache import MAKER
from turbo_hf.calibration.artifacts import Calibration
from turbo_hf.calibration.checkpoint import checkpoint_of, own_tokenizer
from turbo_hf.calibration.choice import HeadChoice, choose_selectors, load_calibration
from turbo_hf.config.turbo_config import ConfigLike
from turbo_hf.errors import Notices, Strict
from turbo_hf.graphs.compiled_layers import CompiledLayers
from turbo_hf.graphs.step_runner import HandOff
from turbo_hf.graphs.why_not import describe, is_dispatched, why_no_replay_over
from turbo_hf.layout import widths_of
from turbo_hf.models.model_layers import kv_heads, module_head_dim, require_model
from turbo_hf.models.quantized_weights import why_not_captured
from turbo_hf.ops import gpu
from turbo_hf.ops.tuning import describe_prefill, describe_tiles
from turbo_hf.patches.balance import KeyBias
from turbo_hf.patches.families import Family, family_of
from turbo_hf.patches.layers import WITHOUT_KEYS, AttentionLayer, attention_layers
from turbo_hf.patching import continuous_batching
from turbo_hf.patching.continuous_batching import latent_sizes
from turbo_hf.patching.generate_methods import PREPARE, replace_methods
from turbo_hf.patching.handle import CacheMaker, Handle, HeadSizes, Report
from turbo_hf.patching.hooks import add_hooks
from turbo_hf.patching.norms import fused_norms
from turbo_hf.patching.other_threads import alone
from turbo_hf.patching.refusals import (
    check_model,
    choose_layers,
    forecast,
    key_biases,
    refuse_latent_options,
    refuse_layers,
    require_layers,
    text_type,
)
from turbo_hf.patching.selfcheck import check_text, judged, require_agreement, unpatched_logits
from turbo_hf.ranks import Ranks, ranks_of, split_layers

LATENT_PROMPTS = "prompts: expanded to keys and values, in the model's dtype, by torch's SDPA (latent attention)"


def patch(
    model: PreTrainedModel,
    config: ConfigLike | None = None,
    *,
    calibration: Calibration | str | Path | None = "auto",
    strict: Strict = "raise",
    check: bool = False,
    tokenizer: Any = None,
) -> Handle:
    """Put `model.generate` on a compressed KV cache. Besides, RMSNorm modules compute in one launch on a GPU. Nothing
    else in the model changes, and `remove()` undoes the patch. Every rank of a tensor parallel model must call it with
    the same arguments: all patch it alike, or all raise the same error.

    Args:
        model: a loaded decoder-only Transformers model.
        config: a preset (one of `turbo_hf.PRESETS`, such as "turbo4"), a `TurboConfig`, a dict of its options, or
            the path of a JSON or YAML file of them; dict and file are read as by `TurboConfig.from_dict`. None: the
            widths of the calibration that is passed, if it has any, else "turbo4".
        calibration: has the widths of each layer, if the config is "calibrated"; decides which heads get the low bits,
            if the config has heads of two widths; and provides what sparse decoding selects keys by. A `Calibration`, a
            folder or Hub id that holds one, None for no calibration, or "auto": the one stored with the checkpoint (in
            its folder or the Hub cache), if any.
        strict: what happens with a layer, version or call that compressed attention cannot serve, and with a
            calibration found by "auto" that is damaged or belongs to another model: "raise" an error, "warn" and leave
            that part to Hugging Face, or "fallback" to Hugging Face with only a log message. Training mode, NaN, Inf
            and continuous batching that cannot run on compressed pages are errors under each.
        check: compare the model with itself before and after patching: logits, which must be the same over a cache that
            rounds nothing, and the distributions of a text that is read through the preset's own cache. `report()`
            shows their mean KL. Up to 0.01 nats nothing is said; from there on there is a warning; from 0.1 on the
            patch is refused, as `strict` says. An error removes the patch.
        tokenizer: for the text of `check`, which the package carries, or a processor that has one; None: the one beside
            the checkpoint, or without one a text that the model samples itself. Only with `check`.

    Returns:
        Handle: has `remove()`, `report()`, `memory()` and `new_cache()`, and is a context manager.

    Raises:
        Unsupported (a ValueError): the model, or with strict "raise" a part of it, cannot be compressed, or the check
            failed. Later calls that ask for what a compressed cache cannot do raise it too.
        ValueError: unknown preset, option or strict; a config file that is broken; the model is already patched; the
            calibration is damaged, belongs to another model, or has other widths than the config; another thread runs
            the model.
        OSError: there is no config file, or no calibration, in the named place.
        TypeError: not a Transformers model.
    """
    ranks = ranks_of(model)
    with ranks.together():
        if strict not in get_args(Strict):
            raise ValueError(f"strict must be one of {', '.join(get_args(Strict))}; got {strict!r}.")
        if not isinstance(check, bool):
            raise ValueError(f"check must be True or False; got {check!r}.")
        if tokenizer is not None and not (check and callable(tokenizer)):
            raise ValueError(
                f"tokenizer is a tokenizer that check=True reads a text with; got a {type(tokenizer).__name__} and "
                f"check={check!r}. Pass both, or leave it out."
            )
        require_model(model)
        notices = Notices(strict, speaks=ranks.speaks)
        model = check_model(model, notices)
        loaded = load_calibration(model, config, calibration, notices)
        chosen = loaded.config
        continuous_batching.require_no_manager(model)
        all_layers = attention_layers(model)
    ranks.require_same({"config": str(chosen), "strict": strict, "check": str(check)})
    biases = key_biases(model, all_layers, chosen, ranks)
    with ranks.together():
        planned = _plan(model, loaded, notices, all_layers, biases, ranks)
    ranks.require_same(planned.decisions())
    unpatched = text = None
    with ExitStack() as stack:
        with ranks.together():
            if check:
                unpatched = unpatched_logits(model, planned.modules.values())
                own = tokenizer if tokenizer is not None else own_tokenizer(checkpoint_of(model), notices.note)
                text = check_text(model, chosen, own)
            stack.enter_context(alone(model, "patch()"))
        handle = _apply(model, planned, strict)
    if unpatched is not None:
        try:
            with ranks.together():
                require_agreement(model, unpatched, chosen, planned.maker.uncompressed_layers)
                words = judged(text, model, handle, notices)
        except BaseException:
            handle.remove()
            raise
        handle._report = replace(planned.report, check=words, warnings=tuple(notices.messages))
    return handle


class _Planned(NamedTuple):
    """What a patch will do. hand_off: passes runners of steps to `generate`, if they are wanted. norms: with the class
    that each gets. calibration: identifies the one that is used; "none" without one, or on one process."""

    report: Report
    modules: Mapping[int, torch.nn.Module]
    family: Family | None
    maker: CacheMaker
    hand_off: HandOff | None
    norms: list[tuple[torch.nn.Module, type]]
    calibration: str

    def decisions(self) -> dict[str, str]:
        """What must be the same on all ranks, in words."""
        report = self.report
        return {
            "calibration": self.calibration,
            "layers": "; ".join(f"{at.index}: {at.storage} {at.reason}" for at in report.layers),
            "prompts": report.prompts,
            "steps": report.steps,
        }


def _plan(
    model: PreTrainedModel,
    loaded: HeadChoice,
    notices: Notices,
    all_layers: list[AttentionLayer],
    biases: Mapping[int, KeyBias],
    ranks: Ranks,
) -> _Planned:
    """Decide what to do with each part of the model; nothing is changed yet. Errors as in `patch`."""
    config = loaded.config
    heads = {at.index: (at.module, kv_heads(at.module.config, at.index)) for at in all_layers if not at.reason}
    split = split_layers(model, ranks, heads)
    layers = choose_layers(all_layers, config, biases, split, ranks.count)
    modules = {at.index: at.module for at in all_layers if at.module is not None}
    of_heads = [module for n, module in modules.items() if layers[n].groups and not layers[n].latent]
    dims = {module_head_dim(module) or 0 for module in of_heads} - {0}
    family = family_of(text_type(model))
    require_layers(model, all_layers, layers, config, family)
    refuse_latent_options(layers, config, bool(ranks))
    refuse_layers(layers, biases, notices)
    devices = {x.device for x in model.parameters()}
    latents = [module for n, module in modules.items() if layers[n].groups and layers[n].latent]
    forecast(config, devices, model.dtype, dims, latents, notices)
    if not hasattr(type(model), PREPARE):
        notices.note(f"{type(model).__name__} has no generate: pass handle.new_cache() when you call it.")
    words = loaded.words
    widths = [at.groups for at in layers if at.groups and not at.kept_int8 and at.index not in config.dense_layers]
    found = {widths_of(width)[0] for groups in widths for width, _ in groups}
    if config.expert.low_heads and widths and config.expert.low_bits not in found:
        each = " on each rank" if split else ""
        notices.note(
            f"low_heads={config.expert.low_heads:g} is less than one KV head of each layer{each}: "
            f"all keep {config.bits} bit."
        )
        words = ""
    loaded.note_unranked([at.index for at in layers if len(at.groups) > 1], notices)
    whole = sorted({at.index for at in layers if at.groups} - split) if ranks else []
    if whole:
        notices.note(
            f"the tensor parallel plan gives each of the {ranks.count} ranks all KV heads of layer"
            f"{'s' * (len(whole) > 1)} {', '.join(map(str, whole))}: their cache takes as much on each rank as on one "
            "GPU."
        )
    digest = loaded.found.digest() if ranks and loaded.found is not None else "none"
    loaded = loaded.of_heads({index: ranks.heads(heads[index][1]) for index in split}, config.expert.head_metric)
    unread = {at.index: "it has a sliding window" if at.window else "" for at in layers if at.groups}
    unread |= {index: "by TurboConfig.dense_layers" for index in unread if index in config.dense_layers}
    selectors, sparse = choose_selectors(config, unread, loaded, len(layers), notices)
    uncompressed = tuple(at.index for at in layers if not at.groups)
    steps, no_graphs = describe(
        config,
        [at.index for at in layers if not at.groups and at.reason not in WITHOUT_KEYS],
        family is not None,
        model.device,
        latent=bool(latents),
        apart=why_no_replay_over(devices, is_dispatched(model)),
        weights=next((why for at in model.modules() if (why := why_not_captured(model, at)) is not None), None),
    )
    # the last possible refusal before anything is changed
    if config.cuda_graphs is True and no_graphs is not None:
        notices.refuse(f"cuda_graphs=True: {no_graphs}.")
    graphs = config.cuda_graphs is not False and no_graphs is None
    if config.compile and not graphs:
        notices.note(f"compile={config.compile!r}: {no_graphs}, so that layers are not compiled.")
    norms = [] if config.expert.backend == "reference" else fused_norms(model.modules())
    kernels = model.device.type == "cuda" and gpu.why_no_kernels_on(model.device) is None
    fused = f"{len(norms)} RMSNorm modules in one launch each" if norms and kernels else ""
    sizes = {HeadSizes(dim) for dim in dims} | {latent_sizes(module) for module in latents}
    no_serving = continuous_batching.why_not_served(model, layers, config, sizes)
    report = Report(
        model=type(model).__name__,
        family=family.name if family else f"{text_type(model)}: generic path, no test of its own",
        notes=family.notes if family else "",
        config=config,
        layers=tuple(layers),
        prompts=LATENT_PROMPTS if latents else describe_prefill(config.prompt_attention, model.device, dims),
        steps="; ".join(filter(None, (steps, describe_tiles(model.device), fused))),
        warnings=tuple(notices.messages),
        heads=words,
        sparse=sparse,
        serving=continuous_batching.words(no_serving),
        ranks=f"tensor parallel over {ranks.count} ranks; KV heads of one of them:" if ranks else "",
    )
    maker = CacheMaker(
        len(layers),
        config,
        tuple(at.index for at in layers if at.kept_int8),
        uncompressed,
        loaded.orders,
        selectors,
        {index: bias.balance for index, bias in biases.items() if bias.balance is not None},
        ranks=ranks,
        groups=tuple(at.groups for at in layers),
        sizes=frozenset(sizes),
        why_not_served=no_serving,
        why_not_captured=no_graphs or ("cuda_graphs=False" if config.cuda_graphs is False else None),
    )
    compiled = CompiledLayers(config.compile) if config.compile and graphs else None
    hand_off = HandOff(config.cuda_graphs is True, compiled, ranks) if graphs else None
    return _Planned(report, modules, family, maker, hand_off, norms, digest)


def _apply(model: PreTrainedModel, planned: _Planned, strict: Strict) -> Handle:
    """Change the model."""
    report, modules, family, maker, hand_off, norms, _ = planned
    register()
    previous = switch_attention(model, NAME)
    hooks = add_hooks(model, modules, report.layers, maker, strict)
    replaced = [*replace_methods(model, family, maker, hand_off, strict), (model, MAKER, None)]
    model.__dict__[MAKER] = maker
    for norm, kind in norms:
        norm.__class__ = kind
    compiled = None if hand_off is None else hand_off.compiled
    return Handle(model, report, maker, hooks, replaced, previous, norms, compiled)
