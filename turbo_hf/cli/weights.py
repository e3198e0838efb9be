"""Bytes of a model's weights, which a checkpoint may store quantized: from its files, or from its config alone."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizers_utils import should_convert_module

from turbo_hf.calibration.checkpoint import WEIGHTS, hub_file
from turbo_hf.patching.meta_model import ADAPTER

INDEX, SINGLE, PICKLED = "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"

EXPANDED = {
    "mxfp4": "where it has no kernels for them",
    "fp8": "where it has no kernels for them",
    "mxfp8": "where it has no kernels for them",
    "compressed-tensors": "in the first pass",
}
"""Methods whose weights Transformers does not always leave quantized, and when it expands them."""

SKIPPED = ("modules_to_not_convert", "llm_int8_skip_modules", "skip_modules", "ignored_layers", "ignore")
"""Where quantization methods list the modules that they leave alone."""

LINEAR_ONLY = ("bitsandbytes", "hqq", "quanto", "torchao")
"""Methods that leave experts alone, whose weights Transformers holds in one tensor."""

SCALE = 16
"""Bits of a block's scale, and of its zero point, where a method's config does not say."""


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
    fields = quantization(model)
    if fields is None:
        return Weights(full)
    method = str(fields.get("quant_method", "bitsandbytes"))
    stored = file_bytes(name)
    bits = width(method, fields)
    if stored is not None:
        how = "as the checkpoint's files store them"
    elif bits is not None:
        saved = sum(p.numel() * (p.element_size() - bits / 8) for p in quantized(model, method, fields))
        stored, how = round(full - saved), f"at {bits:.4g} bit with their scales"
    else:
        counted = f"its weights are counted at {8 * model.dtype.itemsize} bit, which is too much"
        return Weights(full, f"The width of quant_method {method!r} with these options is not known here: {counted}.")
    note = f"Weights ({method}) are counted {how}."
    if method in EXPANDED:
        note += f" Transformers expands them {EXPANDED[method]}, to {full / stored:.1f} times as much."
    return Weights(stored, note)


def quantization(model: PreTrainedModel) -> dict[str, Any] | None:
    """The `quantization_config` of a model's config; None: there is none, or weights do not stay quantized."""
    text = model.config.get_text_config(decoder=True)
    found = getattr(model.config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if not found:
        return None
    fields: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    return None if fields.get("dequantize") else fields


def quantized(model: PreTrainedModel, method: str, fields: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The weights that a method quantizes: of linear layers but the output embedding, and of experts."""
    listed = (name for key in SKIPPED for name in fields.get(key) or ())
    patterns = [str(name).removeprefix("re:") for name in listed]
    output = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is output or not should_convert_module(name, patterns):
            continue
        if isinstance(module, torch.nn.Linear | Conv1D):
            if method != "mxfp4":
                yield module.weight
        elif method not in LINEAR_ONLY:
            # one tensor [experts, rows, columns]
            yield from (p for p in module.parameters(recurse=False) if p.dim() == 3)


def width(method: str, fields: Mapping[str, Any]) -> float | None:
    """Bits of one quantized weight, including its share of scales and zero points; None: not known."""
    try:
        return _width(method, fields)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        # options of a form that this table does not know
        return None


def _width(method: str, fields: Mapping[str, Any]) -> float | None:
    match method:
        case "mxfp4" | "mxfp8":
            return int(method[-1]) + 8 / 32
        case "bitsandbytes" if fields.get("load_in_4bit"):
            return 4 + (8 / 64 + 32 / (64 * 256) if fields.get("bnb_4bit_use_double_quant") else 32 / 64)
        case "bitsandbytes" if fields.get("load_in_8bit"):
            return 8
        case "gptq" | "awq":
            return _grouped(fields["bits"], fields["group_size"], SCALE + fields["bits"])
        case "fp8" if fields.get("expert_dtype", "fp8") == "fp8":
            block = fields.get("weight_block_size", (128, 128))
            return 8 + (32 / math.prod(block) if block else 0)
        case "hqq":
            options = fields["quant_config"]["weight_quant_params"]
            return _grouped(options["nbits"], options["group_size"], 2 * SCALE)
        case "quanto":
            return {"float8": 8, "int8": 8, "int4": 4 + 2 * SCALE / 128, "int2": 2 + 2 * SCALE / 128}[fields["weights"]]
        case "torchao":
            return _torchao(fields["quant_type"]["default"])
        case "compressed-tensors":
            # of groups of several widths, the widest
            return max(_compressed(group["weights"]) for group in fields["config_groups"].values())
    return None


def _grouped(bits: int, group: int | None, extra: float) -> float:
    """extra: bits of the scale and zero point of a group; None or -1: one for a whole channel, too few to count."""
    return bits + (extra / group if group is not None and group > 0 else 0)


def _torchao(options: Mapping[str, Any]) -> float | None:
    name = str(options["_type"])
    if "Int4Weight" in name:
        return _grouped(4, options["_data"]["group_size"], 2 * SCALE)
    return 8 if any(word in name for word in ("Int8Weight", "Float8Weight")) else None


def _compressed(weights: Mapping[str, Any] | None) -> float:
    if weights is None:
        return SCALE
    bits = weights["num_bits"]
    # NVFP4 and MXFP4 have scales of 8 bit
    scale = 8 if (bits, weights.get("type")) == (4, "float") else SCALE
    return _grouped(bits, weights.get("group_size"), scale + (0 if weights.get("symmetric", True) else bits))


def file_bytes(name: str) -> int | None:
    """Bytes of the tensors in a checkpoint's safetensors files; without the files, what their index says; None: it says
    nothing.

    Raises:
        ValueError: the index, or a file, cannot be read.
    """
    index = _file(name, INDEX, fetch=True)
    single = _file(name, SINGLE, fetch=False) if index is None else None
    if index is None:
        return None if single is None else _tensor_bytes(single)
    listed = _listed(index)
    shards = {index.parent / file for file in listed["weight_map"].values()}
    total = (listed.get("metadata") or {}).get("total_size")
    if all(shard.is_file() for shard in shards):
        return sum(map(_tensor_bytes, shards))
    return None if total is None else int(total)


def _tensor_bytes(path: Path) -> int:
    """Bytes of a safetensors file behind its header, whose length is in the first 8 bytes."""
    with path.open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    held = path.stat().st_size - header
    if held < 0:
        raise ValueError(f"{str(path)!r} is cut off, or no safetensors file; download it again.")
    return held


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
    try:
        listed: dict[str, Any] = json.loads(index.read_text())
        if not all(isinstance(file, str) for file in listed["weight_map"].values()):
            raise TypeError("files have names")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(index)!r} is no index of weights; download it again.") from error
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
