"""Bytes of a model's weights: from its config, or from a checkpoint's files if these hold them quantized."""

from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from turbo_hf.calibration.checkpoint import WEIGHTS, hub_file
from turbo_hf.config.whole_files import read_object
from turbo_hf.patching.meta_model import ADAPTER

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
