"""Why passes are not captured: what configs, caches and models say. A step that is replayed does not come here."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers import cache_utils
from transformers.cache_utils import LinearAttentionLayer

from turbo_hf.attention.turbo_attention import NAME
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.config.turbo_config import CALIBRATED, TurboConfig
from turbo_hf.graphs.devices import only_moves
from turbo_hf.layout import UNQUANTIZED
from turbo_hf.models.quantized_weights import why_not_captured
from turbo_hf.ops.gpu import why_no_kernels_on
from turbo_hf.ranks import ranks_of

STEADY = (LinearAttentionLayer, getattr(cache_utils, "DummyLayer", LinearAttentionLayer))
"""Transformers' own layers that replays can change: exactly these. Their states are written in place, or they have none
(transformers 5.17 does not know those)."""

BLOCKS = 2
"""Blocks of open tokens for which there is room while they wait for a `crop`; a longer draft makes more."""


def why_no_replay_under(config: TurboConfig, latent: bool = False) -> str | None:
    """Why no step under a config can ever be replayed, whatever its selectors; None if one may be.

    latent: of layers of latent attention.
    """
    if config.expert.backend == "reference":
        return 'backend "reference" has no kernels'
    if config.bits == UNQUANTIZED and config.sparse is not None and not latent:
        return "16-bit pages of sparse layers"
    return None


def why_never_replayed(cache: TurboCache) -> str | None:
    """Why no step of a cache can ever be replayed; None if one may be. Not all is known of an empty layer."""
    if cache.decompressed:
        return "a pass over this cache was computed in full precision, and its steps may be, too"
    for index, layer in enumerate(cache.layers):
        if type(layer) in STEADY:
            continue
        if not isinstance(layer, TurboLayer):
            return f"layer {index} is not compressed"
        reason = why_no_replay_under(layer.config, layer.latent)
        if reason is None and layer.is_initialized and layer.seen:
            # of latents, `in_place` tells of all kernels
            known = None if layer.latent else layer.ops.why_no_step_kernel(layer.selector is not None)
            reason = known if layer.in_place else f"layer {index} runs without kernels"
        if reason is not None:
            return reason
    return None


def linear_layers(cache: TurboCache) -> list[Any]:
    """The layers of a cache whose steps are replayed that keep a state in place of keys and values."""
    return [layer for layer in cache.layers if type(layer) is LinearAttentionLayer]


def why_no_replay(cache: TurboCache) -> str | None:
    """Why the next step of a cache cannot be replayed as it is now; None if it can."""
    lasting = why_never_replayed(cache)
    if lasting is not None:
        return lasting
    if any(layer.record_past or not all(layer.has_previous_state.values()) for layer in linear_layers(cache)):
        return "a layer of linear attention has no state yet, or waits for a crop"
    for index, layer in enumerate(cache.turbo_layers()):
        if not (layer.is_initialized and layer.seen):
            return f"layer {index} holds no tokens"
        if layer.seen != cache.get_seq_length():
            return f"layer {index} holds {layer.seen} columns, and the first layer {cache.get_seq_length()}"
        room = BLOCKS * layer.state.block + layer.state.recent
        if layer.state.recording and not layer.state.waits() and max(layer.state.open) >= room:
            return "blocks of a prompt wait for a crop"
        if layer.state.recording and layer.selector is not None:
            return f"layer {index} is sparse, and its blocks wait for a crop"
    return None


def describe(
    config: TurboConfig,
    dense: Sequence[int],
    known_family: bool,
    device: torch.device,
    *,
    latent: bool = False,
    apart: str | None = None,
    weights: str | None = None,
) -> tuple[str, str | None]:
    """One line on how decode steps run, for reports; and why they cannot be CUDA graphs, None if they can.

    latent: whether layers keep latents. apart: as of `why_no_replay_over`. weights: why the kernels of its quantized
    weights cannot be captured.
    """
    reason = why_no_replay_under(config, latent) or why_no_kernels_on(device) or apart or weights
    if reason is None and dense:
        reason = f"layer {dense[0]} is dense"
    why = reason
    if config.cuda_graphs is False:
        why = "cuda_graphs=False"
    elif reason is None and config.cuda_graphs == "auto" and not known_family:
        why, reason = "family without a test; cuda_graphs=True tries them", "untested family"
    if why is not None:
        return f"decode steps: no CUDA graphs ({why})", reason
    sparse = config.sparse
    but = (
        "" if sparse is None else ", but for beams and drafts" if sparse.selector in CALIBRATED else ", but for drafts"
    )
    return f"decode steps: CUDA graphs{but}{'' if device.type == 'cuda' else ', once the model is on a GPU'}", None


def is_dispatched(model: Any) -> bool:
    """Whether accelerate has put the model's layers on several devices (`device_map`)."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


def why_no_replay_over(places: Collection[torch.device], dispatched: bool) -> str | None:
    """Why no step of a model is replayed whose weights lie on these devices. dispatched: as of `is_dispatched`."""
    if len(places) < 2 or (dispatched and all(place.type == "cuda" for place in places)):
        return None
    return f"its weights lie on {len(places)} devices"


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether the user has compiled this module itself."""
    forward = module.__dict__.get("forward")
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


def _has_hook(module: torch.nn.Module) -> bool:
    """Whether a module has a hook of the user's, or one of accelerate's that does more than move tensors."""
    moves = module.__dict__.get("_hf_hook")
    # Transformers' own record outputs, which a keyword asks for; those of this package run around a step, or in it
    return (moves is not None and not only_moves(moves)) or any(
        not (getattr(getattr(hook, "func", hook), "__module__", None) or "").startswith(("transformers.", "turbo_hf."))
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    )


def hooked_module(model: torch.nn.Module, modules: Iterable[torch.nn.Module] | None = None) -> str | None:
    """The name of a module of this model that has a hook of the user's; None: none has. modules: all of its modules."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "every module"
    found = next(filter(_has_hook, modules or model.modules()), None)
    names = (name or "the model" for name, held in model.named_modules() if held is found)
    return None if found is None else next(names)


def why_hooked(model: torch.nn.Module, modules: Iterable[torch.nn.Module] | None = None) -> str | None:
    """Why no pass of this model may be replayed, as to hooks. modules: all of its modules."""
    hooked = hooked_module(model, modules)
    return None if hooked is None else f"{hooked} has hooks, which a replay would not call"


def why_no_replay_of(model: Any, walk: bool = True) -> str | None:
    """Why no pass of this model may be replayed; None if it may.

    walk: if False, only what is known without a walk over all modules.
    """
    reason = _why_no_replay_there(model)
    if reason is not None or not walk:
        return reason
    modules = list(model.modules())
    places = {held.device for module in modules for held in module._parameters.values() if held is not None}
    if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
        reason = "another attention has been chosen"
    elif any(map(is_compiled, modules)):
        reason = "torch.compile has compiled it"
    return (
        why_no_replay_over(places, is_dispatched(model))
        or reason
        or next(filter(None, (why_not_captured(model, module) for module in modules)), None)
        or why_hooked(model, modules)
    )


def _why_no_replay_there(model: Any) -> str | None:
    """Why steps cannot be captured because of where and how this model's weights are stored."""
    if model.device.type != "cuda":
        return f"the model is on {model.device}"
    mesh = getattr(model, "_device_mesh", None)
    if mesh is not None and mesh.size() != ranks_of(model).count:
        return "its weights are shared among processes (FSDP)"
    return why_not_captured(model)
