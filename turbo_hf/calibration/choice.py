"""What a patch takes from a calibration: which heads get the low bits, and what sparse decoding selects keys by."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from turbo_hf.attention import Strict, complain
from turbo_hf.calibration.artifacts import Calibration, find, own_tokenizer
from turbo_hf.config import CALIBRATED, TurboConfig
from turbo_hf.selectors import UNTRAINED, Centroids, Classifier, Selector


class HeadChoice(NamedTuple):
    """orders: KV heads by need of bits, for each layer that a calibration covers. words: what decided, for the report;
    "" where all heads have one width. notes: warnings for the report. found: the calibration, if one was wanted."""

    orders: Mapping[int, tuple[int, ...]]
    words: str
    notes: tuple[str, ...]
    found: Calibration | None = None


def uses_calibration(config: TurboConfig) -> bool:
    """Whether a calibration decides anything under this config."""
    return bool(config.low_heads) or (config.sparse is not None and config.sparse.selector in CALIBRATED)


def choose_heads(
    model: PreTrainedModel, config: TurboConfig, calibration: Calibration | str | Path | None, strict: Strict
) -> HeadChoice:
    """What `patch(calibration=...)` says, looked up and held against the model.

    Raises:
        ValueError: a calibration that is damaged or of another model (one that "auto" found: under strict "raise").
        OSError: no calibration where one was named.
        TypeError: something else.
    """
    low = f"{config.low_bits}-bit heads" if config.low_heads else ""
    by_prompt = f"{low}: chosen by each row's first {config.block_size} tokens" if low else ""
    wanted = uses_calibration(config)
    if calibration is None or (calibration == "auto" and not wanted):
        return HeadChoice({}, by_prompt, ())
    if calibration == "auto":
        try:
            found = find(model)
            wrong = None if found is None else _refusal(found, model)
        except (ValueError, OSError) as error:
            found, wrong = None, str(error)
        if wrong is not None:
            message = f"{wrong} To go without it, pass calibration=None."
            complain(strict, message)
            return HeadChoice({}, by_prompt, (message,))
        if found is None:
            return HeadChoice({}, f"{by_prompt} (no calibration beside the checkpoint)" if low else "", ())
    elif isinstance(calibration, str | Path):
        found = Calibration.from_pretrained(calibration)
    elif isinstance(calibration, Calibration):
        found = calibration
    else:
        raise TypeError(
            f'calibration must be a Calibration, a folder or Hub id, None or "auto"; got {type(calibration).__name__}.'
        )
    reason = _refusal(found, model)
    if reason is not None:
        raise ValueError(reason)
    other = found.other_revision(model)
    notes = () if other is None else (other,)
    if not low:
        unused = "" if wanted else "calibration: not used, for all heads of this config have the same bits"
        return HeadChoice({}, unused, notes, found)
    orders = found.head_orders(config.head_metric)
    missing = [layer.index for layer in found.layers if layer.index not in orders]
    rest = f"; layers {', '.join(map(str, missing))} by each row's first block" if missing else ""
    where = found.source or "this process"
    return HeadChoice(orders, f"{low}: by calibration over {found.tokens:,} tokens ({where}){rest}", notes, found)


def choose_selectors(
    config: TurboConfig, layers: Mapping[int, str], found: Calibration | None
) -> tuple[dict[int, Selector], dict[int, str]]:
    """What chooses the keys of each sparse layer, and words about every layer for the report; two {} without `sparse`.

    layers: the compressed layers, each with why it cannot be sparse ("": it can).

    Raises:
        ValueError: a selector that needs a calibration without one, one that has no layer with what it needs, or more
            probes than buckets.
    """
    sparse = config.sparse
    if sparse is None:
        return {}, {}
    outside = [index for index in sparse.dense_layers if index > max(layers, default=0)]
    if outside:
        raise ValueError(f"SparseConfig.dense_layers names layer {outside[0]}; the last is {max(layers, default=0)}.")
    if sparse.selector in CALIBRATED and found is None:
        raise ValueError(
            f'selector "{sparse.selector}" needs a calibration of this model, and there is none. Make one with '
            "turbo-hf calibrate, and pass it as patch(calibration=...) or save it beside the checkpoint."
        )
    selectors: dict[int, Selector] = {}
    words = {}
    for index, obstacle in layers.items():
        made: Selector | str = obstacle or ("by dense_layers" if index in sparse.dense_layers else "")
        if not made:
            made = _selector(config, index, found)
        if isinstance(made, Selector):
            selectors[index], words[index] = made, str(made)
        else:
            words[index] = f"reads every key: {made}"
    if not selectors:
        raise ValueError(f"no layer of this model can be sparse. Layer {max(words)} {words[max(words)]}.")
    return selectors, words


def _selector(config: TurboConfig, index: int, found: Calibration | None) -> Selector | str:
    """One layer's selector, or why there is none."""
    sparse = config.sparse
    assert sparse is not None
    if sparse.selector in UNTRAINED:
        made: Selector = UNTRAINED[sparse.selector](sparse, index, config.backend)
        return made
    assert found is not None
    layer = found.layers[index]
    rotated = sparse.selector == "kmeans-rotated"
    centroids = layer.rotated_centroids if rotated else layer.centroids
    if centroids is None:
        return layer.note or f"the calibration has no {'rotated ' if rotated else ''}centroids of it"
    if sparse.selector == "saap":
        return Classifier(sparse, index, centroids, layer.classifier, config.backend)
    return Centroids(sparse, index, centroids, not rotated, config.backend)


def _refusal(calibration: Calibration, model: PreTrainedModel) -> str | None:
    # made with the tokenizer beside the checkpoint, or with one of which nothing can be said here
    wrong = calibration.mismatch(model, own_tokenizer(model) if calibration.fingerprint.get("tokenizer") else None)
    if wrong is None:
        return None
    return f"the calibration of {calibration.source or 'this process'!r} does not fit this model: {wrong}."
