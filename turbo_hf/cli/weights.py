"""Bytes of a model's weights: from its config, and from a checkpoint's files if these hold them quantized."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from turbo_hf.calibration.checkpoint import WEIGHTS, hub_file
from turbo_hf.config.whole_files import read_object
from turbo_hf.patching.meta_model import ADAPTER

INDEX, SINGLE, PICKLED = "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"


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
    bits = _bits(fields)
    if bits is None:
        return Weights(
            full, f"{method} at {8 * model.dtype.itemsize} bit, which is too much: their files are not here."
        )
    saved = sum(p.numel() * (p.element_size() - bits / 8) for p in _quantized(model, fields))
    return Weights(round(full - saved), f"{method} at {bits:g} bit: their files are not here.")


def _bits(fields: dict[str, Any]) -> float | None:
    """Bits of a quantized weight with its share of scales, from a config alone; None: not known."""
    if fields.get("load_in_4bit"):
        return 4.5
    known = {"mxfp4": 4.25, "mxfp8": 8.25, "fp8": 8.0}.get(str(fields.get("quant_method")))
    if known is None and type(fields.get("bits")) is int:
        # GPTQ and AWQ: a scale and a zero point for each group
        group = fields.get("group_size")
        known = fields["bits"] + ((16 + fields["bits"]) / group if type(group) is int and group > 0 else 0)
    return known or (8.0 if fields.get("load_in_8bit") else None)


def _quantized(model: PreTrainedModel, fields: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The weights that are quantized: of mxfp4 those of experts, one tensor of three dimensions; else all matrices but
    embeddings."""
    ends = {id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None}
    least = 3 if fields.get("quant_method") == "mxfp4" else 2
    return (p for p in model.parameters() if p.dim() >= least and id(p) not in ends)


def file_bytes(name: str) -> int | None:
    """Bytes of a checkpoint's weights: what their index says, or else of the one file; None: neither is there.

    Raises:
        ValueError: the index cannot be read.
    """
    index = _file(name, INDEX, fetch=True)
    if index is not None:
        about = _listed(index).get("metadata")
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
    # an index may be here without its files
    names = [SINGLE, PICKLED] if index is None else [next(iter(_listed(index)["weight_map"].values()))]
    return any(_file(name, file, fetch=True) for file in names)


def _listed(index: Path) -> dict[str, Any]:
    """What an index of weights says; ValueError if it is none."""
    listed = read_object(index, "It is no index of weights; download it again.")
    shards = listed.get("weight_map")
    if not (isinstance(shards, dict) and shards and all(isinstance(file, str) for file in shards.values())):
        raise ValueError(f"{str(index)!r} is no index of weights; download it again.")
    return listed


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
