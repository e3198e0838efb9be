"""The method names that `turbo-hf eval` and the harness adapter know."""

import hashlib
import importlib.util
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from transformers import QuantizedCache

from turbo_hf.calibration.artifacts import Calibration
from turbo_hf.calibration.choice import uses_calibration
from turbo_hf.config.file import names_a_file
from turbo_hf.config.turbo_config import (
    ATTENTION_MODES,
    BY_CALIBRATION,
    NATIVE,
    PRESETS,
    SparseConfig,
    TurboConfig,
    preset_named,
    resolve_config,
)
from turbo_hf.eval.published.simulate import Scheme, gear_l, kivi, kvarn
from turbo_hf.eval.published.simulated_cache import compressed_cache, window_cache
from turbo_hf.layout import widths_of
from turbo_hf.patching.handle import Handle
from turbo_hf.patching.patch_model import patch

BASELINE = "fp16"
"""The unpatched model, in the precision and with the attention that it was loaded with."""

AGAIN = f"{BASELINE} again"
"""The second run of the baseline: what differs between the two is noise."""

EAGER = "fp16-eager"
"""The unpatched model with Transformers' eager attention."""

MakeCache = Callable[[Any, torch.Tensor], Any]
"""(model, attention mask [B, columns] of the first pass) -> an empty cache for it."""

WINDOW = re.compile(r"streaming-(\d+)")

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


SIMULATED: dict[str, Scheme] = {
    **{f"kivi{bits}": kivi(bits) for bits in (4, 3, 2)},
    **{f"gear-l-{base}{bits}": gear_l(bits, base) for base in ("kcvt", "kivi") for bits in (4, 3, 2)},
    # 104 bytes per token and head at d = 128, as turbo-k4v2, and 72, as turbo2; GEAR's own rank of 4 takes 8 more
    **{f"kivi-k{bits}v2-g128": kivi(bits, 2, group=128) for bits in (4, 2)},
    **{f"gear-l-kcvt-k{bits}v2-r{rank}": gear_l(bits, "kcvt", 2, rank) for bits in (4, 2) for rank in (4, 2)},
    **{f"kvarn-k{bits}v2-g{block}": kvarn(bits, block) for bits in (4, 2) for block in (128, 64)},
}
"""Published caches, simulated in plain torch: full-precision attention over what they would return."""

ABLATIONS: dict[str, tuple[str, ...]] = {
    "ablation-heads": tuple(
        f"turbo4+low_heads={share}+head_metric={metric}"
        for share in (0.25, 0.5, 0.75)
        for metric in ("priority", "entropy", "min_max", "variation")
    ),
    "ablation-blocks": tuple(f"{preset}+block_size={b}" for preset in ("turbo4", "turbo2") for b in (32, 64, 128)),
    # FlashQ alone, SAS alone (16-bit storage and attention), both
    "ablation-parts": ("turbo4", "turbo4/fp16+bits=16+sas=True", "turbo4+sas=True"),
    # SAAP: the window alone, then more and more buckets; other numbers of clusters by --calibration
    "ablation-probes": (
        "turbo4@window",
        *(f"turbo4@{chosen}:probes={n}" for chosen in ("kmeans-rotated", "kmeans", "saap") for n in (8, 16, 32, 64)),
    ),
    # SAAP sec. 5: what else could choose keys, 32 buckets of as many as there are
    "ablation-selectors": tuple(
        f"turbo4@{chosen}" for chosen in ("full", "window", "saap", "kmeans", "kmeans-rotated")
    ),
    # the always-read tokens, alone and together with buckets
    "ablation-window": tuple(
        f"turbo4@{chosen}:window_tokens={n}" for chosen in ("window", "kmeans-rotated") for n in (255, 511, 1023, 2047)
    ),
    "ablation-sas": ("turbo4", *(f"turbo4+sas=True+sas_threshold={t}" for t in (-4, -6, -8, -10)), "turbo4+sas=True"),
}
"""Sets of methods that one name stands for: the ablations of TurboAttention (sec. 5.6) and of SAAP (sec. 6.5)."""


def method_names() -> str:
    """The names that methods begin with."""
    return ", ".join((BASELINE, EAGER, *PRESETS, *SIMULATED, *_quantized(), "streaming-N", *ABLATIONS))


EXPLAINED = (
    (BASELINE, "the unpatched model; always runs, twice: what differs between the two runs is noise"),
    (EAGER, "the unpatched model with Transformers' eager attention"),
    (", ".join(PRESETS), "the patched model with a preset; a JSON or YAML file of options may stand in its place"),
    (BY_CALIBRATION, "the patched model with the widths of a calibration (turbo-hf calibrate --budget)"),
    ("PRESET/MODE", f"a preset with another attention: {', '.join(ATTENTION_MODES)}"),
    ("PRESET+FIELD=VALUE", "a preset with other fields of TurboConfig: turbo4+block_size=32+sas=True"),
    (
        "PRESET@SELECTOR:FIELD=VALUE",
        "a preset with sparse decode steps, fields of SparseConfig: turbo4@window:window_tokens=511",
    ),
    ("quanto4, quanto2, hqq8, hqq4, hqq2", "Transformers' QuantizedCache, if optimum-quanto or hqq is installed"),
    ("kivi4, kivi3, kivi2", "KIVI, groups of 64, the 64 newest tokens in full precision. Simulated"),
    ("kivi-k4v2-g128 (also k2v2)", "KIVI of 4-bit keys and 2-bit values, groups of 128. Simulated"),
    ("gear-l-kcvt4, gear-l-kivi4 (also 3, 2)", "GEAR-L over either base, rank 4 and 2. Simulated"),
    ("gear-l-kcvt-k4v2-r4 (also k2v2, r2)", "GEAR-L of 4-bit keys, 2-bit values, rank 4 and 2, or 2 and 1. Simulated"),
    ("kvarn-k4v2-g128 (also k2v2, g64)", "KVarN: 4-bit keys, 2-bit values, tiles of 128 tokens. Simulated"),
    ("streaming-N", "StreamingLLM: a window of N tokens, including the first 4. Simulated"),
    ("ablation-heads", "set: head metric x share of heads with 2 bits"),
    ("ablation-blocks", "set: blocks of 32, 64 and 128 tokens"),
    ("ablation-parts", "set: FlashQ alone, SAS alone, both"),
    ("ablation-sas", "set: thresholds of SAS"),
    ("ablation-probes", "set: selector x buckets that are visited, of 64 or more"),
    ("ablation-selectors", "set: what chooses keys"),
    ("ablation-window", "set: tokens that are always read"),
)
"""What `turbo-hf eval --list` says of the methods. Simulated: accuracy only, in plain torch."""


def known_methods() -> str:
    """The available methods, in one sentence."""
    return (
        f"methods are {method_names()} (a window of N tokens), a JSON or YAML file in a preset's place, "
        f"a preset followed by /{', /'.join(ATTENTION_MODES)}, and either followed by +FIELD=VALUE of TurboConfig, "
        "such as turbo4/fp16+block_size=32, and all of these by @SELECTOR:FIELD=VALUE of SparseConfig, such as "
        "turbo4@window:window_tokens=511"
    )


def _quantized() -> dict[str, MakeCache]:
    def maker(backend: str, bits: int) -> MakeCache:
        axes = cast(dict[str, Any], BACKENDS[backend][2])
        return lambda model, mask: QuantizedCache(backend=backend, config=model.config, nbits=bits, **axes)

    return {f"{name}{bits}": maker(name, bits) for name, (_, widths, _) in BACKENDS.items() for bits in widths}


def options_of_files(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """For each method that is read from a config file, every option of it as it is now; other names stand for
    themselves."""
    configs = {name: method_named(name).config for name in names if names_a_file(_base(name))}
    return {name: config.to_dict() for name, config in configs.items() if config is not None}


def folder_of(label: str) -> str:
    """The name under which a method's results are kept: of no two methods the same."""
    name = label.replace(" ", "-").replace("/", "-")
    if not names_a_file(_base(label)):
        return name
    # a/b.json is not a-b.json
    return f"{name}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"


def require_options(name: str, before: Mapping[str, Mapping[str, Any]]) -> None:
    """ValueError if a method's config file has changed since `options_of_files` read it."""
    now = options_of_files([name])
    if now.get(name) != before.get(name):
        raise ValueError(f"the config file of {name} has changed since this run began. Begin anew, with another --out.")


def _base(name: str) -> str:
    found = BASE.match(name)
    return found[0] if found else ""


def is_simulated(name: str) -> bool:
    """Whether a method is for accuracy only, with computed bytes."""
    return name in SIMULATED or WINDOW.fullmatch(name) is not None


def expanded(names: list[str]) -> list[str]:
    """The names with each set of methods in its place, none twice, and the baseline left out."""
    found = [one for name in names for one in ABLATIONS.get(name, (name,))]
    return list(dict.fromkeys(name for name in found if name != BASELINE))


def same_settings(names: list[str], kv_heads: Collection[int]) -> list[list[str]]:
    """Methods that differ in a share or choice of heads, but not in layers of these numbers of KV heads."""
    alike: dict[tuple[TurboConfig, ...], list[str]] = {}
    for name in names:
        config = method_named(name).config
        if config is not None:
            alike.setdefault(tuple(_in_effect(config, heads) for heads in kv_heads), []).append(name)
    return [same for same in alike.values() if len(same) > 1]


def _in_effect(config: TurboConfig, kv_heads: int) -> TurboConfig:
    """The config, with the defaults for what changes nothing in a layer of so many KV heads."""
    default = TurboConfig()
    groups = config.head_groups(kv_heads) if config.low_heads else ()
    low = sum(heads for width, heads in groups if widths_of(width)[0] == config.low_bits)
    return replace(
        config,
        low_heads=low / kv_heads,
        low_bits=config.low_bits if low else default.low_bits,
        # where no head is low, or every one, nothing is chosen
        head_metric=config.head_metric if 0 < low < kv_heads else default.head_metric,
    )


def method_named(name: str) -> Method:
    """What a name means.

    Raises:
        ValueError: an unknown name (the message lists the known ones), a choice that `TurboConfig` refuses, a config
            file that is broken, or a package that is not installed.
        OSError: a config file that is not there.
    """
    if name in (BASELINE, EAGER):
        return Method(name)
    if name in SIMULATED:
        return Method(name, make=lambda model, mask: compressed_cache(model, SIMULATED[name], mask))
    if name in _quantized():
        _need(name)
        return Method(name, make=_quantized()[name])
    window = WINDOW.fullmatch(name)
    if window and int(window[1]) > 4:
        size = int(window[1])
        return Method(name, make=lambda model, mask: window_cache(model, size, mask))
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
    base = _base(name)
    stored, at, sparse = name[len(base) :].partition("@")
    head, *changes = stored.split("+")
    _, slash, attention = head.partition("/")
    known = preset_named(base) is not None or names_a_file(base)
    if not known or (slash and attention not in ("auto", *ATTENTION_MODES, NATIVE)):
        # a list of methods is split at its commas, and so is "...@saap:read_all_layers=0,1"
        hint = " Several layers behind @ are written read_all_layers=0+1." if name.isdigit() else ""
        raise ValueError(f"unknown method {name}; {known_methods()}.{hint}")
    config = resolve_config(base)
    chosen: dict[str, Any] = {"attention": attention} if slash else {}
    allowed = [field.name for field in fields(TurboConfig)]
    for change in changes:
        field, equals, value = change.partition("=")
        if not equals or field not in allowed:
            raise ValueError(f"unknown choice {change!r} in method {name}; write FIELD=VALUE of {', '.join(allowed)}.")
        chosen[field] = _value(value)
    if at:
        chosen["sparse"] = sparse_choice(sparse)
    return replace(config, **chosen)


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
    known = {"read_all_layers", *(each.name for each in fields(SparseConfig))} - {"selector"}
    given: dict[str, Any] = {}
    for word in words:
        field, _, value = word.partition("=")
        if field not in known:
            raise ValueError(f"expected choices like probes=16, of {', '.join(sorted(known))}; got {word!r}.")
        try:
            given[field] = _sparse_value(field, value)
        except ValueError as error:
            raise ValueError(f"expected a number for {field}; got {value!r}.") from error
    return SparseConfig(selector=cast(Any, selector), **given)


def _sparse_value(field: str, text: str) -> object:
    if field == "read_all_layers":
        return tuple(int(part) for part in text.split("+") if part)
    return int(text)


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
        return
    before = model.config.get_text_config(decoder=True)._attn_implementation
    if method.name == EAGER:
        model.set_attn_implementation("eager")
    try:
        yield None
    finally:
        if method.name == EAGER:
            model.set_attn_implementation(before)
