"""A prompt's cache on disk: what identifies the model it is of, its layers, its tokens. A cache is a `TurboCache`."""

import hashlib
import json
import reprlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from turbo_hf._version import __version__
from turbo_hf.cache import saved_files
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.saved_layers import held_by, hold, require_alike, require_layer
from turbo_hf.config.expected import Stored, require
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.errors import Unsupported
from turbo_hf.models.model_layers import require_model
from turbo_hf.models.versions import version_of

MAKER = "turbo_cache_maker"
"""Attribute of a patched model: what makes its caches."""

HOW_IT_RUNS = ("backend", "cuda_graphs", "compile")
"""Options of `TurboConfig` that change nothing of what is stored."""

BY_LAYER = ("bits", "value_bits", "layer_bits")
"""Options of `TurboConfig` that are compared layer by layer: however they were given, a layer has its own bits."""

NOT_OF_MODELS = ("transformers_version", "use_cache", "return_dict", "output_attentions", "output_hidden_states")
"""Entries of a model's config that change nothing of what it computes, as do those that begin with "_"."""


def save(cache: Any, folder: str | Path, model: Any, input_ids: torch.Tensor | None) -> None:
    """`TurboCache.save_pretrained`, of a cache that is whole."""
    if cache.mark.ranks:
        raise Unsupported("a cache that ranks share is not saved: each holds only its own heads, or blocks.")
    columns = cache.get_seq_length()
    if not columns:
        raise ValueError("this TurboCache holds no tokens: there is nothing to save. Run the prompt first.")
    known = cache.model and cache.model()
    if None not in (model, known) and model is not known:
        raise ValueError(
            "another model than this one has run over this TurboCache: leave out model=, or pass the one that has."
        )
    model = known if model is None else model
    if model is None:
        raise ValueError("this TurboCache does not know its model: pass it, save_pretrained(folder, model=model).")
    require_model(model)
    ids = cache.known_ids() if input_ids is None else input_ids
    if ids is None:
        raise ValueError(
            f"this TurboCache does not know all of its {columns} tokens: pass them, save_pretrained(folder, "
            "input_ids=ids), padding included."
        )
    rows = cache.rows()
    if not isinstance(ids, torch.Tensor):
        raise ValueError(f"input_ids must be a tensor, int64 [{rows}, {columns}]; got a {type(ids).__name__}.")
    if ids.shape != (rows, columns) or ids.dtype != torch.int64:
        raise ValueError(
            f"input_ids must be what the cache holds, int64 [{rows}, {columns}], padding included; got {ids.dtype} "
            f"{list(ids.shape)}."
        )
    tensors: saved_files.Tensors = {"tokens": ids}
    each = [held_by(layer) for layer in cache.layers]
    try:
        for n, make in cache.others.items():
            require_layer(make(), each[n], rows, columns)
        require_alike(cache.layers, each)
    except ValueError as error:
        raise Unsupported(f"a layer of this cache is of a kind that is not saved: {error}.") from error
    held = [saved_files.flatten(own, f"layers.{n}", tensors) for n, own in enumerate(each)]
    facts = {**_identity(cache, model), "decompressed": cache.decompressed, "held": held}
    saved_files.write(Path(folder), facts, tensors)


def load(folder: str | Path, model: Any) -> Any:
    """`TurboCache.from_pretrained`."""
    require_model(model)
    maker = vars(model).get(MAKER)
    if maker is None:
        raise ValueError(
            f"this {type(model).__name__} is not patched: call turbo_hf.patch(model), with the config of the saved "
            "cache, before from_pretrained."
        )
    found = saved_files.read(Path(folder))
    with found.file:
        return _loaded(found, folder, model, maker.make(model.config))


def _loaded(found: saved_files.Read, folder: str | Path, model: Any, cache: Any) -> Any:
    """`load`; cache: an empty one, which is filled."""
    if cache.mark.ranks:
        raise Unsupported("a saved cache is not loaded for ranks that share it: each holds only its heads, or blocks.")
    for name, own in _identity(cache, model).items():
        other = _difference(found.facts.get(name), own, name)
        if other is not None:
            raise ValueError(
                f"the cache saved in {str(folder)!r} does not fit: its {other}; the answers would differ. Load it "
                "where all is as it was, or compute the prompt again."
            )
    by_layer = dict(_devices(model))
    devices = [by_layer.get(n, model.device) for n in range(len(cache.layers))]
    if any(device.type == "meta" for device in devices):
        raise Unsupported("weights of this model are offloaded (device_map): a saved cache is not loaded for it.")
    try:
        _fill(cache, found, devices)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{found.damaged}{error}.{saved_files.AGAIN}") from error
    cache.model = weakref.ref(model)
    return cache


def _fill(cache: Any, found: saved_files.Read, devices: Sequence[torch.device]) -> None:
    """Give the layers of an empty cache what was saved, and the cache its tokens. ValueError: that is no such cache."""
    held: Any = {name: found.facts.get(name) for name in ("decompressed", "held")}
    require(held, {"decompressed": bool, "held": [dict] * len(devices)}, "")
    meta, host = torch.device("meta"), torch.device("cpu")
    # once without memory, so that nothing is allocated by numbers that contradict each other
    for without, places in ((True, [meta] * len(devices)), (False, devices)):
        trees = [({"tensor": "tokens"}, meta if without else host), *zip(held["held"], places, strict=True)]
        (ids, *layers), tensors = found.take(trees)
        require(ids, Stored((None, None), torch.int64), "tokens")
        if not without:
            found.fill(tensors)
        for n, (layer, own) in enumerate(zip(cache.layers, layers, strict=True)):
            try:
                require_layer(layer, own, len(ids), ids.shape[1])
            except ValueError as error:
                raise ValueError(f"layer {n}: {error}") from error
        require_alike(cache.layers, layers)
    for layer, own, device in zip(cache.layers, layers, devices, strict=True):
        hold(layer, own, device)
    cache.decompressed = held["decompressed"]
    cache.know(ids, saved=True)


def _devices(model: Any) -> Iterator[tuple[int, torch.device]]:
    """(layer, device) where modules know their layer."""
    for module in model.modules():
        index, weight = getattr(module, "layer_idx", None), next(module.parameters(), None)
        if isinstance(index, int) and weight is not None:
            yield index, weight.device


def _identity(cache: Any, model: Any) -> dict[str, Any]:
    """All that must be the same where a saved cache is used, as JSON would return it."""
    found = {
        # a build for another device computes with the same rules
        "versions": {
            "turbo_hf": __version__,
            **{name: (version_of(name) or "none").partition("+")[0] for name in ("torch", "transformers", "triton")},
        },
        "config": {name: value for name, value in _stored(cache.turbo_config).items() if name not in BY_LAYER},
        "model": {
            "class": type(model).__name__,
            "config": _of_model(json.loads(model.config.to_json_string(use_diff=False))),
            "dtype": str(model.dtype),
            "weights": weights_digest(model),
            "adapters": _adapters(model),
        },
        "layers": [_kind(layer) for layer in cache.layers],
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def weights_digest(model: Any) -> str:
    """Identifies the weights of a model by each byte of them, in one read from each device."""
    return _digest(dict(_tensors(model.state_dict())))


def _stored(config: TurboConfig) -> dict[str, Any]:
    stored = {name: value for name, value in config.to_dict().items() if name not in HOW_IT_RUNS}
    # the same pages, whether named or left out
    return stored | {"value_bits": config.value_bits or config.bits}


def _of_model(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    kept = {name: value for name, value in config.items() if not name.startswith("_") and name not in NOT_OF_MODELS}
    return {name: _of_model(value) for name, value in kept.items()}


def _kind(layer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"class": type(layer).__name__}
    if isinstance(layer, TurboLayer):
        order, by = layer.head_order, layer.selector
        found |= {"config": _stored(layer.config), "window": layer.window, "latent": layer.latent}
        found["head_order"] = None if order is None else list(order)
        found["selector"] = None if by is None else f"{by}, {_digest(by.weights())}"
    return found


def _tensors(held: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by name; of a quantized one, those that it consists of."""
    for name, x in held.items():
        if hasattr(x, "__tensor_flatten__"):
            yield from _tensors({f"{name}.{part}": getattr(x, part) for part in x.__tensor_flatten__()[0]})
        elif isinstance(x, torch.Tensor):
            yield name, x


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Identifies tensors by each byte of them; those whose memory is elsewhere (offloaded) by their shape alone."""
    here = {name: x.detach().as_subclass(torch.Tensor) for name, x in tensors.items() if x.device.type != "meta"}
    sums = dict(zip(here, saved_files.checksums(here.values()), strict=True))
    parts = [f"{name} {x.dtype} {list(x.shape)} {sums.get(name)}" for name, x in sorted(tensors.items())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _adapters(model: Any) -> list[str]:
    """Which adapters (PEFT) take part: those that do not are among the weights, too."""
    names = ("active_adapter", "disable_adapters", "merged_adapters")
    each = [module for module in model.modules() if hasattr(module, "merged_adapters")]
    return sorted({", ".join(f"{name} {getattr(module, name, None)}" for name in names) for module in each})


def _difference(saved: Any, own: Any, name: str) -> str | None:
    """Where two trees differ first, in words; None: nowhere."""
    if isinstance(saved, dict) and isinstance(own, dict):
        parts: Any = [(f"{name}.{key}", saved.get(key), own.get(key)) for key in sorted({*saved, *own})]
    elif isinstance(saved, list) and isinstance(own, list) and len(saved) == len(own):
        parts = [(f"{name}.{n}", *pair) for n, pair in enumerate(zip(saved, own, strict=True))]
    else:
        return None if saved == own else f"{name} is {reprlib.repr(saved)}, and here it is {reprlib.repr(own)}"
    return next((words for part, x, y in parts if (words := _difference(x, y, part)) is not None), None)
