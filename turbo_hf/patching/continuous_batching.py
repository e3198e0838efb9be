"""Whether continuous batching can serve a patched model, and the method that begins it."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.errors import Unsupported
from turbo_hf.graphs.why_not import why_no_replay_of
from turbo_hf.layout import UNQUANTIZED, type_16bit
from turbo_hf.models.model_layers import INDEXED, layer_windows
from turbo_hf.patching.handle import CacheMaker, HeadSizes, LayerReport

SINCE = Version("5.19")
"""The first version of Transformers whose continuous batching leaves the layout of its pool to others."""

CHANNELS = 2048
"""Channels of keys and values of a token, in all heads; `Shape.together` tokens of a past are unpacked."""


def latent_sizes(module: Any) -> HeadSizes:
    """The head sizes of a module of latent attention (MLA)."""
    nope, rotary, value = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
    heads = module.kv_b_proj.out_features // (nope + value)
    return HeadSizes(module.kv_lora_rank, rotary, heads * (nope + rotary + value))


def why_not_served(
    model: PreTrainedModel, layers: Sequence[LayerReport], config: TurboConfig, sizes: Collection[HeadSizes]
) -> str | None:
    """Why continuous batching cannot run on compressed pages of this model; None: it can. sizes: those that occur."""
    here = Version(transformers.__version__)
    if Version(f"{here.major}.{here.minor}") < SINCE:
        return f"it needs transformers {SINCE} or newer, and {here} is installed. Upgrade transformers, use generate"
    other = next((at for at in layers if not at.groups), None)
    if other is not None:
        return f"layer {other.index} is not compressed, and all layers share one pool. Use generate"
    widths = {at.groups for at in layers}
    heads, latent = {sum(count for _, count in groups) for groups in widths}, layers[0].latent
    wide = [groups for groups in widths if UNQUANTIZED in dict(groups)]
    if len(sizes) > 1 or len(heads) > 1 or (wide and len(widths) > 1):
        odd = next((at for at in layers if at.groups != layers[0].groups), layers[0])
        return (
            "its layers have heads of several sizes or numbers, or 16-bit pages beside others, and the pool's are "
            f"alike (layer {odd.index}: {odd.storage}). Use generate"
        )
    if any(kind == INDEXED for kind, _ in layer_windows(model.config.get_text_config(decoder=True))):
        return "its layers read the tokens that an indexer names (DSA), which the pool does not keep. Use generate"
    if len({x.device for x in model.parameters()}) > 1:
        return "the model is spread over several devices. Use generate"
    for reason, found in (
        ("sparse steps", config.sparse is not None),
        ("16-bit pages", bool(wide) and not latent),
        ("SAS without a given sas_threshold", config.expert.sas and config.expert.sas_threshold is None),
    ):
        if found:
            return f"{reason} cannot be served to requests that come and go. Choose another config, use generate"
    return None


def words(why_not: str | None) -> str:
    """For the report. why_not: as of `why_not_served`, whose last sentence says what to do when it is called."""
    return "continuous batching: yes" if why_not is None else f"continuous batching: no ({why_not.rpartition('. ')[0]})"


def begin(maker: CacheMaker, model: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of `init_continuous_batching`: a manager whose cache is compressed."""
    reason = maker.why_not_served
    if reason is not None or not maker.active:
        reason = reason or "this model is a copy of a patched one, or its patch was removed. Use generate"
        raise Unsupported(f"continuous batching (generate_batch) on compressed pages: {reason}, or remove the patch.")
    # Transformers before 5.19 lacks what it needs
    from turbo_hf.serving.manager import init_continuous_batching  # noqa: PLC0415

    if maker.serving is None:
        maker.serving = serving_of(maker, model)
    launched = maker.why_not_captured or why_no_replay_of(model)
    if launched is not None and maker.config.cuda_graphs is True:
        raise Unsupported(f'cuda_graphs=True: {launched}. Choose TurboConfig(cuda_graphs="auto") or False.')
    with torch.no_grad():
        return init_continuous_batching(maker.serving, launched, model, *args, **kwargs)


def serving_of(maker: CacheMaker, model: Any) -> Any:
    """What the managers of this patch have in common."""
    from turbo_hf.serving.paged_cache import Serving  # noqa: PLC0415 - as above
    from turbo_hf.serving.rows import TOGETHER, Shape  # noqa: PLC0415 - as above

    config, (sizes,) = maker.config, maker.sizes
    slides = any(window for _, window in layer_windows(model.config.get_text_config(decoder=True)))
    wide = any(UNQUANTIZED in dict(groups) for groups in maker.groups)
    shape = Shape(
        maker.groups,
        sizes.dim,
        config.expert.block_size,
        sizes.rotary_dim,
        sizes.expanded,
        type_16bit(model.dtype) if wide else torch.int8,
        TOGETHER // max(1, sizes.expanded // CHANNELS),
        # all layers count alike
        0 if slides or sizes.rotary_dim is not None else config.first_tokens,
        0 if sizes.rotary_dim is not None else config.recent,
    )
    every = range(maker.layers)
    return Serving(shape, config, [maker.head_orders.get(n) for n in every], [maker.balances.get(n) for n in every])


def require_no_manager(model: PreTrainedModel) -> None:
    """ValueError if continuous batching runs on a model that is to be patched, or a manager of it is kept."""
    if Version(transformers.__version__) < SINCE:
        return
    from turbo_hf.serving.manager import KEPT, running_managers  # noqa: PLC0415 - as above

    if running_managers(model) or getattr(model, KEPT, None) is not None:
        raise ValueError(
            "a manager of continuous batching runs on this model, or is kept on it, with pages that are not "
            "compressed. Stop it, or call model.destroy_cached_continuous_batching_manager(), then patch."
        )
