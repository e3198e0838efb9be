"""A prompt's cache on disk: what identifies the model it is of, its layers, its tokens. A cache is a `TurboCache`."""

import hashlib
import json
import reprlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
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
from turbo_hf.ops.maths import checksum

MAKER = "turbo_cache_maker"
"""Attribute of a patched model: what makes its caches."""

HOW_IT_RUNS = ("backend", "cuda_graphs", "compile")
"""Options that change nothing of what is stored."""

SAMPLE = 1024
"""Elements of a weight that identify it, evenly spaced, the first and the last among them."""

NOT_OF_MODELS = ("transformers_version", "use_cache", "return_dict", "output_attentions", "output_hidden_states")
"""Entries of a model's config that change nothing of what it computes, as do those that begin with "_"."""


def save(cache: Any, folder: str | Path, input_ids: torch.Tensor | None) -> None:
    """`TurboCache.save_pretrained`, of a cache that is whole."""
    if cache.mark.ranks:
        raise Unsupported("a cache that ranks share is not saved: each holds only its own heads.")
    columns = cache.get_seq_length()
    if not columns:
        raise ValueError("this TurboCache holds no tokens: there is nothing to save. Run the prompt first.")
    if any(getattr(layer, "record_past", False) for layer in cache.layers):
        raise ValueError(
            "this TurboCache waits for a crop (assisted decoding): call stop_recording() before you save it."
        )
    model = cache.model and cache.model()
    if model is None:
        raise ValueError("no patched model has run over this TurboCache: patch the model, and run the prompt again.")
    ids = cache.known_ids() if input_ids is None else input_ids
    if ids is None:
        raise ValueError(
            f"this TurboCache does not know all of its {columns} tokens: pass them, save_pretrained(folder, "
            "input_ids=ids), padding included."
        )
    rows = cache.rows()
    require(ids, Stored((rows, columns), torch.int64), "input_ids, the tokens that the cache holds, padding included,")
    tensors: saved_files.Tensors = {}
    saved_files.flatten(ids, "tokens", tensors)
    held = [saved_files.flatten(held_by(layer), f"layers.{n}", tensors) for n, layer in enumerate(cache.layers)]
    each = saved_files.unflatten(held, tensors.__getitem__)
    try:
        for n, make in cache.others.items():
            require_layer(make(), each[n], rows, columns)
        require_alike(each)
    except ValueError as error:
        raise Unsupported(f"a layer of this cache is of a kind that is not saved: {error}.") from error
    facts = {"identity": _identity(cache, model), "decompressed": cache.decompressed, "held": held}
    saved_files.write(Path(folder), saved_files.CACHE, facts, tensors)


def load(folder: str | Path, model: Any) -> Any:
    """`TurboCache.from_pretrained`."""
    require_model(model)
    maker = vars(model).get(MAKER)
    if maker is None:
        raise ValueError(
            f"this {type(model).__name__} is not patched: call turbo_hf.patch(model), with the config of the saved "
            "cache, before from_pretrained."
        )
    cache = maker.make(model.config)
    if cache.mark.ranks:
        raise Unsupported("a saved cache is not loaded for ranks that share it: each holds only its own heads.")
    facts, tensors = saved_files.read(Path(folder), saved_files.CACHE, str(folder))
    try:
        require(facts.get("identity"), _identity(cache, model), "")
    except ValueError as error:
        raise ValueError(
            f"the cache saved in {str(folder)!r} does not fit: its {error}; the answers would differ. Load it where "
            "all is as it was, or compute the prompt again."
        ) from error
    # where modules know their layer
    weights = ((getattr(module, "layer_idx", None), next(module.parameters(), None)) for module in model.modules())
    by_layer = {index: weight.device for index, weight in weights if isinstance(index, int) and weight is not None}
    devices = [by_layer.get(n, model.device) for n in range(len(cache.layers))]
    if any(device.type == "meta" for device in devices):
        raise Unsupported("weights of this model are offloaded (device_map): a saved cache is not loaded for it.")
    try:
        _fill(cache, facts, tensors, devices)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"the cache saved in {str(folder)!r} is damaged: {error}.{saved_files.CACHE.remedy}"
        ) from error
    cache.model = weakref.ref(model)
    return cache


def _fill(cache: Any, facts: Any, tensors: saved_files.Tensors, devices: Sequence[torch.device]) -> None:
    """Give the layers of an empty cache what was saved, and the cache its tokens. ValueError: that is no such cache."""
    saved: Any = {name: facts.get(name) for name in ("decompressed", "held", "sums")}
    require(saved, {"decompressed": bool, "held": [dict] * len(devices), "sums": dict.fromkeys(tensors, int)}, "")
    # once without memory, so that nothing is allocated by numbers that contradict each other
    _read(cache, saved, tensors, [torch.device("meta")] * (len(devices) + 1))
    ids, layers = _read(cache, saved, tensors, [torch.device("cpu"), *devices])
    for layer, held, device in zip(cache.layers, layers, devices, strict=True):
        hold(layer, held, device)
    cache.decompressed = saved["decompressed"]
    cache.know(ids)


def _read(
    cache: Any, saved: Any, tensors: saved_files.Tensors, devices: Sequence[torch.device]
) -> tuple[torch.Tensor, list[Any]]:
    """The tokens and what each layer holds, each on its device, compared with what it must be; else a ValueError."""
    left = dict(tensors)

    def take(name: str, device: torch.device) -> torch.Tensor:
        if name not in left:
            raise ValueError(f"the tensor {reprlib.repr(name)} is named twice, or is not there")
        # a copy: others may write the file
        x = left.pop(name).to(device, copy=True)
        if not x.is_meta and int(checksum(x)) != saved["sums"][name]:
            raise ValueError(f"the tensor {name!r} is not as it was written")
        return x

    held = [{"tensor": "tokens"}, *saved["held"]]
    ids, *layers = (saved_files.unflatten(x, partial(take, device=at)) for x, at in zip(held, devices, strict=True))
    if left:
        raise ValueError(f"its layers do not name the tensor {reprlib.repr(min(left))}")
    require(ids, Stored((None, None), torch.int64), "tokens")
    for n, (layer, own) in enumerate(zip(cache.layers, layers, strict=True)):
        try:
            require_layer(layer, own, len(ids), ids.shape[1])
        except ValueError as error:
            raise ValueError(f"layer {n}: {error}") from error
    require_alike(layers)
    return ids, layers


def _identity(cache: Any, model: Any) -> dict[str, Any]:
    """All that must be the same where a saved cache is used, as JSON would return it."""
    found = {
        # a build for another device computes with the same rules
        "versions": {
            "turbo_hf": __version__,
            **{name: (version_of(name) or "none").partition("+")[0] for name in ("torch", "transformers", "triton")},
        },
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
    """Identifies the weights of a model by a sample of each."""
    return _digest(dict(_tensors(model.state_dict())))


def _stored(config: TurboConfig) -> dict[str, Any]:
    options = config.to_dict()
    options |= options.pop("expert")
    stored = {name: value for name, value in options.items() if name not in HOW_IT_RUNS}
    # the same, whether named or left out
    return stored | {"value_bits": config.value_bits or config.bits, "recent_tokens": config.recent}


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
        found["balance"] = None if layer.balance is None else _digest({"": layer.balance})
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
    """Identifies tensors by type, shape and `SAMPLE` elements of each; those that are offloaded by type and shape."""
    found = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        found.update(f"{name} {x.dtype} {list(x.shape)}\n".encode())
        if x.device.type != "meta" and x.numel():
            flat = x.detach().as_subclass(torch.Tensor).reshape(-1)
            count = min(SAMPLE, len(flat))
            at = torch.arange(count, device=x.device) * (len(flat) - 1) // max(1, count - 1)
            found.update(flat.view(torch.uint8).view(len(flat), -1)[at].cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def _adapters(model: Any) -> list[str]:
    """Which adapters (PEFT) take part: those that do not are among the weights, too."""
    names = ("active_adapter", "disable_adapters", "merged_adapters")
    each = [module for module in model.modules() if hasattr(module, "merged_adapters")]
    return sorted({", ".join(f"{name} {getattr(module, name, None)}" for name in names) for module in each})
