"""The method names that `turbo-hf eval` and the harness adapter know; the bytes of a cache, the end of a reply."""

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import QuantizedCache

from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.calibration.artifacts import Calibration
from turbo_hf.calibration.choice import uses_calibration
from turbo_hf.config.options import names_a_file
from turbo_hf.config.turbo_config import (
    ADVISED,
    ATTENTION_MODES,
    BY_CALIBRATION,
    NAMED,
    PRESETS,
    Expert,
    SparseConfig,
    TurboConfig,
    resolve_config,
    with_options,
)
from turbo_hf.eval.published import Kivi, SimulatedCache, simulated_cache
from turbo_hf.patching.handle import Handle
from turbo_hf.patching.patch_model import patch

BASELINE = "fp16"
"""The unpatched model, in the precision and with the attention that it was loaded with."""

AGAIN = f"{BASELINE} again"
"""The second run of the baseline: what differs between the two is noise."""

MakeCache = Callable[[Any, torch.Tensor], Any]
"""(model, attention mask [B, columns] of the first pass) -> an empty cache for it."""

BASE = re.compile(r".*?\.(?:json|yaml|yml)(?=$|[/+@])|[^/+@]*", re.IGNORECASE)
"""What a method's choices are added to: the path of a config file, or a preset's name."""

BACKENDS = {"quanto": ("optimum.quanto", (4, 2), {}), "hqq": ("hqq", (8, 4, 2), {"axis_key": 1, "axis_value": 1})}
"""Backends of Transformers' QuantizedCache: the package that each needs, its widths, and its options."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to run a model.

    config: what the model is patched with; None: it is not patched.
    make: makes the cache of an unpatched model; None: Transformers' own.
    """

    name: str
    config: TurboConfig | None = None
    make: MakeCache | None = None


SIMULATED: dict[str, Kivi] = {
    **{f"kivi{bits}": Kivi(bits, bits) for bits in (4, 3, 2)},
    # 104 bytes per token and head at d = 128, as turbo-k4v2, and 72, as turbo2
    **{f"kivi-k{bits}v2-g128": Kivi(bits, 2, group=128) for bits in (4, 2)},
}
"""Published caches, simulated in plain torch: full-precision attention over what they would return."""


def method_names() -> str:
    """The names that methods begin with."""
    return ", ".join((BASELINE, *ADVISED, *SIMULATED, *_quantized()))


EXPLAINED = (
    (BASELINE, "the unpatched model; always runs, twice: what differs between the two runs is noise"),
    (", ".join(PRESETS), "the patched model with a preset; a JSON or YAML file of options may stand in its place"),
    (BY_CALIBRATION, "the patched model with the widths of a calibration (turbo-hf calibrate --budget)"),
    ("PRESET/MODE", f"a preset with another attention: {', '.join(ATTENTION_MODES)}"),
    ("PRESET+FIELD=VALUE", "a preset with other fields of TurboConfig or Expert: turbo4+block_size=32+sas=True"),
    (
        "PRESET@SELECTOR:FIELD=VALUE",
        "a preset with sparse decode steps, fields of SparseConfig: turbo4@window:window_tokens=511",
    ),
    ("quanto4, quanto2, hqq8, hqq4, hqq2", "Transformers' QuantizedCache, if optimum-quanto or hqq is installed"),
    ("kivi4, kivi3, kivi2", "KIVI, groups of 64, the 64 newest tokens in full precision. Simulated"),
    ("kivi-k4v2-g128 (also k2v2)", "KIVI of 4-bit keys and 2-bit values, groups of 128. Simulated"),
)
"""What `turbo-hf eval --list` says of the methods. Simulated: accuracy only, in plain torch."""


def known_methods() -> str:
    """The available methods, in one sentence."""
    return (
        f"methods are {method_names()}, and a JSON or YAML file in a preset's place; turbo-hf eval --list explains "
        "them, and what may follow a preset"
    )


def _quantized() -> dict[str, MakeCache]:
    def maker(backend: str, bits: int) -> MakeCache:
        axes = cast(dict[str, Any], BACKENDS[backend][2])
        return lambda model, mask: QuantizedCache(backend=backend, config=model.config, nbits=bits, **axes)

    return {f"{name}{bits}": maker(name, bits) for name, (_, widths, _) in BACKENDS.items() for bits in widths}


def folder_of(label: str) -> str:
    """The name of the folder under which a method's results are kept."""
    return re.sub(r"[ /]", "-", label)


def method_named(name: str) -> Method:
    """What a name means.

    Raises:
        ValueError: an unknown name (the message lists the known ones), a choice that `TurboConfig` refuses, a config
            file that is broken, or a package that is not installed.
        OSError: a config file that is not there.
    """
    if name == BASELINE:
        return Method(name)
    if name in SIMULATED:
        return Method(name, make=lambda model, mask: simulated_cache(model, SIMULATED[name], mask))
    if name in _quantized():
        _need(name)
        return Method(name, make=_quantized()[name])
    return Method(name, config=_patched(name))


def installed(package: str) -> bool:
    """Whether a package can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _need(name: str) -> None:
    package = next(package for backend, (package, _, _) in BACKENDS.items() if name.startswith(backend))
    if not installed(package):
        raise ValueError(f"{name} needs {package}, which is not installed: pip install {package.replace('.', '-')}.")


def _patched(name: str) -> TurboConfig:
    found = BASE.match(name)
    base = found[0] if found else ""
    stored, at, sparse = name[len(base) :].partition("@")
    head, *changes = stored.split("+")
    _, slash, attention = head.partition("/")
    known = base in NAMED or names_a_file(base)
    if not known or (slash and attention not in ("auto", *ATTENTION_MODES)):
        # a list of methods is split at its commas, and so is "...@saap:read_all_layers=0,1"
        hint = " Several layers behind @ are written read_all_layers=0+1." if name.isdigit() else ""
        raise ValueError(f"unknown method {name}; {known_methods()}.{hint}")
    config = resolve_config(base)
    chosen: dict[str, Any] = {"attention": attention} if slash else {}
    allowed = [*TurboConfig.names(), *Expert.names()]
    for change in changes:
        field, equals, value = change.partition("=")
        if not equals or field not in allowed:
            raise ValueError(f"unknown choice {change!r} in method {name}; write FIELD=VALUE of {', '.join(allowed)}.")
        chosen[field] = _value(value)
    if at:
        chosen["sparse"] = sparse_choice(sparse)
    return with_options(config, **chosen)


def _value(text: str) -> Any:
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def sparse_choice(text: str) -> SparseConfig:
    """ "saap:probes=16:window_tokens=511" -> `SparseConfig`; layers: read_all_layers=0+1. ValueError: anything else."""
    selector, *words = text.split(":")
    given: dict[str, Any] = {}
    for word in words:
        field, _, value = word.partition("=")
        if field == "selector" or field not in SparseConfig.names():
            raise ValueError(
                f"expected choices like probes=16, of {', '.join(SparseConfig.names()[1:])}; got {word!r}."
            )
        several = field == "read_all_layers"
        given[field] = tuple(_value(part) for part in value.split("+") if part) if several else _value(value)
    return SparseConfig(selector=cast(Any, selector), **given)


@contextmanager
def applied(model: Any, method: Method, calibration: Calibration | str | None = "auto") -> Iterator[Handle | None]:
    """The model under that method inside the `with`, and unchanged after it; yields the patch's handle, if any.

    calibration: for methods that need one: itself, a folder or a Hub id; "auto": beside the checkpoint.
    """
    if method.config is not None:
        # what a config does not use may be refused beside it
        used = calibration if uses_calibration(method.config) else None
        with patch(model, method.config, calibration=used) as handle:
            yield handle
    else:
        yield None


NO_PLANS = "SDPA ran without cuDNN, which would make a plan for each new length of each step."


@contextmanager
def without_plans() -> Iterator[None]:
    """Inside, SDPA runs without cuDNN, and uses FlashAttention or torch's own kernels.

    cuDNN makes a plan for each shape that it has not seen, and every decode step has one. Seen on an H200, 64 steps
    of a 0.5B-shaped model after 1k tokens: 55 ms per step at first, 17.4 over the same lengths again, 19.2 without.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def until(tokens: list[int], ends: set[int]) -> list[int]:
    """A reply without its end: the part before the first of `ends`."""
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]


def cache_size(cache: Any, rows: int) -> tuple[int, int]:
    """(bytes, tokens): as a `TurboCache` itself says, computed for a simulated cache, else allocated.

    A dense cache stores padding; its token count includes the padding, so that it is not charged for it in bytes per
    token.
    """
    if isinstance(cache, TurboCache):
        memory = cache.memory()
        return memory.total, memory.tokens
    if isinstance(cache, SimulatedCache):
        return round(cache.computed_bytes()), cache.tokens()
    return sum(_allocated(vars(layer)) for layer in cache.layers), rows * cache.get_seq_length()


def _allocated(held: Any) -> int:
    """Bytes of the tensors in there; packed ones of quantization libraries hold theirs as attributes or in pairs."""
    if isinstance(held, torch.Tensor):
        inner = [x for x in vars(held).values() if isinstance(x, torch.Tensor)]
        return sum(map(_allocated, inner)) if inner else held.nbytes
    if isinstance(held, dict):
        return sum(map(_allocated, held.values()))
    return sum(map(_allocated, held)) if isinstance(held, list | tuple) else 0
