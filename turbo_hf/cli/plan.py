"""Memory before and after, from the config alone: bytes per token, the longest context, the largest batch. Bytes of
weights are from the config, too, or from a checkpoint's files if these hold them quantized.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from turbo_hf.cache.memory import LayerCost, cache_bytes, turbo_cost
from turbo_hf.calibration.checkpoint import WEIGHTS, hub_file
from turbo_hf.config.turbo_config import DEFAULT_PRESET, PRESETS, SparseConfig, at_8_bit, of_layer
from turbo_hf.config.whole_files import read_object
from turbo_hf.eval.bench.shapes import largest
from turbo_hf.patches.layers import attention_layers
from turbo_hf.patching.handle import Report
from turbo_hf.patching.meta_model import ADAPTER, UncompressedLayer, key_bias_note, patch_report, uncompressed_layers
from turbo_hf.ranks import Ranks, split_layers, splits_weight

KEPT_FREE = 0.1
"""Share of the GPU left for activations and the allocator."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One method of a memory plan.

    bytes_per_token: cache bytes per token, all layers.
    compression: times as small as the unpatched cache.
    cache_bytes: of the whole requested cache.
    fits: whether it fits beside the weights.
    longest_context: tokens per row that fit, at the requested batch; negative: no limit.
    largest_batch: rows that fit, at the requested context.
    """

    method: str
    bytes_per_token: float
    compression: float
    cache_bytes: float
    fits: bool
    longest_context: int
    largest_batch: int


def plan(
    model: PreTrainedModel, *, context: int, batch: int, gpu_bytes: float, weights: int, ranks: int = 1
) -> tuple[list[PlanRow], list[str]]:
    """Rows for the unpatched model ("fp16", or "fp32" if that is its dtype) and for each preset; and notes: what is
    left in full precision, and what a config cannot tell.

    Args:
        model: from `meta_model`.
        context, batch: planned tokens per row, and number of rows.
        gpu_bytes: the GPU's memory; a tenth of it is left for activations.
        weights: bytes that the weights take, of all ranks together.
        ranks: GPUs that share the model by tensor parallel; the rows are of one of them.

    Raises:
        Unsupported: `patch` refuses this model, or its heads do not divide among the ranks.
        ValueError: a model that cannot run without weights.
    """
    # selectors need a calibration, and change only the index of a layer
    presets = PRESETS
    if any(at.latent for at in patch_report(model, PRESETS[DEFAULT_PRESET]).layers):
        # latent attention is not sparse, and has no values of their own
        presets = {
            name: each
            for name, each in PRESETS.items()
            if each.sparse is None and (each.value_bits, each.layer_bits) == (None, None)
        }
    reports = {
        name: patch_report(model, replace(preset, sparse=None, recent_tokens=0 if preset.sparse else None))
        for name, preset in presets.items()
    }
    room = gpu_bytes * (1 - KEPT_FREE) - weights * share_of_weights(model, ranks)
    layers, whole = _of_rank(model, uncompressed_layers(model), ranks)
    unpatched = [layer.cost for layer in layers]
    if not cache_bytes(unpatched, context):
        raise ValueError(
            "Transformers' own cache of this model holds no token (sliding_window=1), so there is nothing to compress."
        )
    methods = {f"fp{8 * model.dtype.itemsize}": unpatched}
    methods |= {name: layer_costs(layers, report, PRESETS[name].sparse) for name, report in reports.items()}
    rows = []
    for name, costs in methods.items():
        needed = batch * cache_bytes(costs, context)
        rows.append(
            PlanRow(
                method=name,
                bytes_per_token=sum(cost.per_token for cost in costs),
                compression=cache_bytes(unpatched, context) / cache_bytes(costs, context),
                cache_bytes=needed,
                fits=needed <= room,
                longest_context=longest_context(costs, room / batch),
                largest_batch=max(0, int(room // cache_bytes(costs, context))),
            )
        )
    notes = _notes(model, reports[DEFAULT_PRESET], context)
    if whole:
        notes.append(f"{whole} of {len(layers)} layers keep all of their KV heads on each rank (Transformers' plan).")
    return rows, notes


def share_of_weights(model: PreTrainedModel, ranks: int) -> float:
    """Which part of all weights one of `ranks` ranks holds, by Transformers' tensor parallel plan of the model."""
    bytes_of = {name: x.nbytes for name, x in model.named_parameters()}
    own = sum(n / (ranks if splits_weight(model, name) else 1) for name, n in bytes_of.items())
    return own / max(1, sum(bytes_of.values()))


def _of_rank(
    model: PreTrainedModel, layers: list[UncompressedLayer], ranks: int
) -> tuple[list[UncompressedLayer], int]:
    """What one rank holds of each layer, and how many layers with keys it holds as a whole."""
    if ranks == 1:
        return layers, 0
    heads = {at.index: (at.module, layers[at.index].heads) for at in attention_layers(model) if at.module is not None}
    split = split_layers(model, Ranks(0, ranks), {index: of for index, of in heads.items() if of[1]})
    own = [
        layer._replace(heads=layer.heads // ranks, cost=replace(layer.cost, per_token=layer.cost.per_token / ranks))
        if index in split
        else layer
        for index, layer in enumerate(layers)
    ]
    return own, sum(bool(layer.heads) and index not in split for index, layer in enumerate(layers))


def layer_costs(
    unpatched: list[UncompressedLayer], report: Report, sparse: SparseConfig | None = None
) -> list[LayerCost]:
    """Cost of each layer under a patch, as in `turbo_cost`. unpatched: what the layers take without it. sparse:
    the choice of keys, whose index is counted.

    Raises:
        ValueError: a layer that the patch compresses stores no keys.
    """
    costs, count = [], len(report.layers)
    for at, layer in zip(report.layers, unpatched, strict=True):
        if not at.groups:
            costs.append(layer.cost)
            continue
        if not layer.head_dim:
            raise ValueError(f"layer {at.index} of {report.model} keeps no keys in its cache; nothing can be planned.")
        indexed = sparse is not None and at.window is None and at.index not in sparse.read_all_layers
        index_bytes = sparse.index_bytes if sparse is not None and indexed else 0
        # the cache splits the heads that it gets, whatever the config says
        own = of_layer(report.config, at.index, count)
        own = at_8_bit(own) if at.kept_int8 else own
        groups = own.head_groups(layer.heads)
        rotary_dim = layer.value_dim if at.latent else None
        cost = turbo_cost(own, groups, layer.head_dim, at.window, index_bytes, rotary_dim)
        costs.append(replace(cost, constant=cost.constant + layer.cost.constant))
    return costs


def _notes(model: PreTrainedModel, report: Report, context: int) -> list[str]:
    """What the user should know about the rows."""
    count = len(report.layers)
    notes = [
        f"{n} of {count} layers are not compressed, each because {reason}."
        for reason, n in Counter(at.reason for at in report.layers if not at.groups).items()
    ]
    bias = key_bias_note(model, report)
    if bias is not None:
        notes.append(bias)
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None and context > positions:
        notes.append(f"The model was made for {positions:,} positions; {context:,} tokens are more.")
    return notes


def longest_context(costs: list[LayerCost], room: float) -> int:
    """Maximum tokens of one row that fit in `room` bytes; -1: no limit (every layer has a window)."""
    if room < 0:
        return 0
    if all(cost.window is not None or not cost.per_token for cost in costs):
        widest = max((cost.window or 0) for cost in costs)
        if cache_bytes(costs, widest) <= room:
            return -1
    return largest(lambda tokens: cache_bytes(costs, tokens) <= room, math.inf)


UNITS = {"GB": 10**9, "GIB": 2**30, "MB": 10**6, "MIB": 2**20, "TB": 10**12}


def parse_bytes(text: str) -> float:
    """ "80GB", "24 GiB", "512MB" -> bytes. ValueError says what is expected."""
    cleaned = text.replace(" ", "").upper()
    unit = next((u for u in UNITS if cleaned.endswith(u)), None)
    number: Any = cleaned[: -len(unit)] if unit else ""
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if unit is None or not 0 < value < float("inf"):
        raise ValueError(f"expected an amount of memory like 80GB, 24GiB or 512MB; got {text!r}.")
    return value * UNITS[unit]


INDEX, SINGLE, PICKLED = "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"
NO_INDEX = "It is no index of weights; download it again."


class Weights(NamedTuple):
    """nbytes: of all weights. note: how quantized weights are counted; "" for others."""

    nbytes: int
    note: str = ""


def weigh(model: PreTrainedModel, name: str = "") -> Weights:
    """Bytes of a meta model's weights.

    name: where its config is from: a folder, a config.json or a Hub id. Files there tell what quantized weights take.

    Raises:
        ValueError: the index of those files cannot be read.
    """
    # parameters() shows a tied weight once
    full = sum(p.numel() * p.element_size() for p in model.parameters())
    text = model.config.get_text_config(decoder=True)
    found = getattr(model.config, "quantization_config", None) or getattr(text, "quantization_config", None)
    fields: dict[str, Any] = found if isinstance(found, dict) else found.to_dict() if found else {}
    if not fields or fields.get("dequantize"):
        return Weights(full)
    stored, method = file_bytes(name), f"Weights ({fields.get('quant_method', 'bitsandbytes')}) are counted"
    if stored is not None:
        return Weights(stored, f"{method} as the checkpoint's files store them.")
    if fields.get("quant_method") == "mxfp4":
        # experts alone, each part of a layer's in one tensor of three dimensions; 4.25 bit with their scales
        saved = sum(p.numel() * (p.element_size() - 4.25 / 8) for p in model.parameters() if p.dim() == 3)
        return Weights(round(full - saved), f"{method} at 4.25 bit: their files are not here.")
    return Weights(full, f"{method} at {8 * model.dtype.itemsize} bit, which is too much: their files are not here.")


def file_bytes(name: str) -> int | None:
    """Bytes of a checkpoint's weights: what their index says, or else of the one file; None: neither is there.

    Raises:
        ValueError: the index cannot be read.
    """
    index = _file(name, INDEX, fetch=True)
    if index is not None:
        about = read_object(index, NO_INDEX).get("metadata")
        total: Any = about.get("total_size") if isinstance(about, dict) else None
        return int(total) if type(total) in (int, float) and 0 < total < 1 << 60 else None
    single = _file(name, SINGLE, fetch=False)
    return None if single is None else single.stat().st_size


def has_weights(name: str) -> bool:
    """Whether `from_pretrained` finds weights: in a folder, in the Hub's cache or, where it is reached, on the Hub."""
    place = Path(name)
    if place.exists():
        return any(any(place.glob(pattern)) for pattern in (*WEIGHTS, ADAPTER))
    index = _file(name, INDEX, fetch=True) or _file(name, f"{PICKLED}.index.json", fetch=True)
    shards = None if index is None else read_object(index, NO_INDEX).get("weight_map")
    # an index may be here without its files
    names = [str(next(iter(shards.values())))] if isinstance(shards, dict) and shards else [SINGLE, PICKLED]
    return any(_file(name, file, fetch=True) for file in names)


def _file(name: str, file: str, *, fetch: bool) -> Path | None:
    """A file beside a config; None: there is none. fetch: it may be downloaded from the Hub."""
    if not name:
        return None
    place = Path(name)
    if place.exists():
        beside = (place.parent if place.is_file() else place) / file
        return beside if beside.is_file() else None
    found = hub_file(name, file, fetch=fetch)
    return None if found is None else Path(found)
