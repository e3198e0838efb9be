"""What a patch takes from a calibration: the bits of each layer, which heads get the low ones, and what sparse decoding
selects keys by."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from turbo_hf.calibration.artifacts import NO_INDEX, Calibration, find
from turbo_hf.calibration.checkpoint import checkpoint_of
from turbo_hf.config.turbo_config import (
    BY_CALIBRATION,
    CALIBRATED,
    DEFAULT_PRESET,
    NAMED,
    ConfigLike,
    TurboConfig,
    not_recommended,
    resolve_config,
    with_options,
)
from turbo_hf.errors import Notices
from turbo_hf.sparse.selectors import Centroids, Selector

LARGE = 0.01
"""Mean KL in nats, predicted or on texts held out, above which `patch` warns, as its `check` does."""


class HeadChoice(NamedTuple):
    """What `patch` takes from a calibration.

    config: that of the patch, with the calibration's widths if it asks for them.
    orders: KV heads ordered by their need of bits, for each layer that a calibration covers.
    words: what decided, for the report; "" if all heads have the same width.
    found: the calibration, if one was wanted.
    missing: why there is none, in words.
    """

    config: TurboConfig
    orders: Mapping[int, tuple[int, ...]]
    words: str
    found: Calibration | None = None
    missing: str = ""

    def of_heads(self, heads: Mapping[int, range], metric: str) -> "HeadChoice":
        """The same for a rank that holds these KV heads of the layers named here. metric: as in `head_orders`."""
        if self.found is None or not heads:
            return self
        layers = (x.of_heads(heads[x.index]) if x.index in heads else x for x in self.found.layers)
        found = replace(self.found, layers=tuple(layers))
        return self._replace(found=found, orders=found.head_orders(metric) if self.orders else {})

    def note_unranked(self, mixed: Sequence[int], notices: Notices) -> None:
        """Note which of these layers, whose heads have two widths, no calibration ranks."""
        unranked = [str(index) for index in mixed if index not in self.orders]
        if unranked:
            notices.note(
                f"layers {', '.join(unranked)}: no calibration ranks the heads, so that the last ones get few bits "
                f"({self.config.expert.low_bits}), however much they need theirs. Make one with turbo-hf calibrate "
                "--heads-only."
            )


def uses_calibration(config: TurboConfig) -> bool:
    """Whether a calibration decides anything under this config."""
    sparse = config.sparse
    by_heads = bool(config.expert.low_heads) or config.layer_bits == BY_CALIBRATION
    return by_heads or (sparse is not None and sparse.selector in CALIBRATED)


def load_calibration(
    model: PreTrainedModel, config: ConfigLike | None, calibration: Calibration | str | Path | None, notices: Notices
) -> HeadChoice:
    """What `patch(config, calibration=...)` refers to, looked up and checked against the model.

    config: None: the widths of the calibration that is named, if it has any, else the default preset.

    Raises:
        ValueError: a config that `resolve_config` refuses; a calibration that is damaged or belongs to another model
            (one that "auto" found: only under strict "raise"), or has no widths, or ranks no heads, where that is asked
            for, or only widths where the config has others.
        OSError: there is no calibration in the named place.
        TypeError: something else.
    """
    made = None
    if isinstance(calibration, str | Path) and calibration != "auto":
        made = Calibration.from_pretrained(calibration)
    elif isinstance(calibration, Calibration):
        made = calibration
    elif calibration not in (None, "auto"):
        raise TypeError(
            f'calibration must be a Calibration, a folder or Hub id, None or "auto"; got {type(calibration).__name__}.'
        )
    if config is None:
        config = DEFAULT_PRESET if made is None or made.widths is None else BY_CALIBRATION
    chosen = resolve_config(config)
    notices.note(not_recommended(chosen))
    heads = _looked_up(model, chosen, calibration if made is None else made, notices)
    if chosen.layer_bits == BY_CALIBRATION:
        return _with_widths(heads, notices)
    return _with_orders(heads, made is not None) if chosen.expert.low_heads else heads


def _looked_up(
    model: PreTrainedModel, config: TurboConfig, calibration: Calibration | str | Path | None, notices: Notices
) -> HeadChoice:
    """`load_calibration`, without widths and orders."""
    wanted = uses_calibration(config)
    if calibration is None or (calibration == "auto" and not wanted):
        return HeadChoice(config, {}, "", missing="calibration=None was passed")
    try:
        found = calibration if isinstance(calibration, Calibration) else find(checkpoint_of(model))
        if found is None:
            return HeadChoice(config, {}, "", missing="there is none beside the checkpoint")
        wrong = found.mismatch(model)
        if wrong is not None:
            message = f"the calibration of {found.source or 'this process'!r} does not fit this model: {wrong}."
            raise ValueError(f"{message} Make one of this model with turbo-hf calibrate.")
    except (ValueError, OSError) as error:
        if calibration != "auto":
            raise
        notices.refuse(str(error), "To go without it, pass calibration=None.")
        return HeadChoice(config, {}, "", missing=f"the one beside the checkpoint is refused: {str(error).rstrip('.')}")
    notices.note(_nearer(config, found))
    if not wanted and found.widths is not None:
        raise ValueError(
            f"the calibration of {found.source or 'this process'!r} has widths of its own, and this config has others. "
            f'Leave out the config, or pass "{BY_CALIBRATION}" (layer_bits="{BY_CALIBRATION}"), or leave out the '
            "calibration."
        )
    apart = found.widths is not None and config.layer_bits != BY_CALIBRATION
    others = "its widths are not used, for this config has others" if apart else ""
    unused = others if wanted else "not used, for all heads of this config have the same bits"
    return HeadChoice(config, {}, unused and f"calibration: {unused}", found)


def _with_orders(heads: HeadChoice, named: bool) -> HeadChoice:
    """The choice with the calibration's ranking of heads. ValueError: one that was named ranks none."""
    config, found = heads.config, heads.found
    low = f"{config.expert.low_bits}-bit heads"
    orders = {} if found is None else found.head_orders(config.expert.head_metric)
    if found is None or not orders:
        why = heads.missing if found is None else f"that of {found.source or 'this process'!r} ranks no heads"
        if named:
            how = "Make one with turbo-hf calibrate --heads-only, or pass calibration=None."
            raise ValueError(f"low_heads needs a calibration that ranks heads; {why}. {how}")
        return heads._replace(words=f"{low}: the last of each layer, for want of a calibration ({why})")
    words = f"{low}: by calibration over {found.tokens:,} tokens ({found.source or 'this process'})"
    return heads._replace(orders=orders, words="; ".join(filter(None, (words, heads.words))))


def _with_widths(heads: HeadChoice, notices: Notices) -> HeadChoice:
    """The choice with the calibration's widths in its config. ValueError: there are none."""
    found = heads.found
    if found is None or found.widths is None:
        why = heads.missing if found is None else f"that of {found.source or 'this process'!r} has none"
        raise ValueError(
            f'layer_bits="{BY_CALIBRATION}" needs a calibration of this model with widths, and {why}. '
            "Make one with turbo-hf calibrate --budget, and pass it as patch(calibration=...) or save it beside the "
            "checkpoint."
        )
    widths = found.widths
    if max(widths.kl, widths.held_out or 0) > LARGE:
        notices.note(f"the calibration's widths are not like 16 bit: {widths}. Evaluate on your tasks.")
    alike = _storing(heads.config) == _storing(NAMED[BY_CALIBRATION])
    said = str(widths) if alike else "widths of a calibration, with other options than were measured"
    words = f"widths: by calibration over {widths.tokens:,} tokens ({found.source or 'this process'}): {said}"
    return heads._replace(config=replace(heads.config, layer_bits=widths.layers), words=words)


def _storing(config: TurboConfig) -> TurboConfig:
    """Without the options that only say how it is computed."""
    return with_options(config, backend="auto", cuda_graphs="auto", compile=False)


def _nearer(config: TurboConfig, found: Calibration) -> str | None:
    """A sentence about keys that buckets are asked for here, and that the query classifier has not been trained on."""
    local, sparse = found.settings.get("local"), config.sparse
    if sparse is None or sparse.selector != "saap" or local is None or sparse.window_tokens >= local:
        return None
    return (
        f"window_tokens={sparse.window_tokens} is below the calibration's local={local}: its query classifier was not "
        f"trained on keys {sparse.window_tokens} to {local} tokens back. Calibrate with "
        f"local={sparse.window_tokens}, or take a larger window."
    )


def choose_selectors(
    config: TurboConfig, layers: Mapping[int, str], heads: HeadChoice, count: int, notices: Notices
) -> tuple[dict[int, Selector], dict[int, str]]:
    """What chooses the keys of each sparse layer, and words about every layer for the report; two {} without `sparse`.

    layers: the compressed layers, each with the reason why it cannot be sparse ("": it can). heads: from
    `load_calibration`. count: number of the model's layers.

    Raises:
        ValueError: a selector that needs a calibration but has none, one that finds no layer with what it needs, or
            more probes than buckets.
    """
    sparse = config.sparse
    if sparse is None:
        return {}, {}
    outside = [index for index in sparse.read_all_layers if index >= count]
    if outside:
        raise ValueError(f"SparseConfig.read_all_layers names layer {outside[0]}; the last is {count - 1}.")
    if sparse.selector in CALIBRATED and heads.found is None:
        raise ValueError(
            f'selector "{sparse.selector}" needs a calibration of this model, and {heads.missing}. Make one with '
            "turbo-hf calibrate, and pass it as patch(calibration=...) or save it beside the checkpoint."
        )
    selectors: dict[int, Selector] = {}
    words = {}
    for index, reason in layers.items():
        made: Selector | str = reason or ("by read_all_layers" if index in sparse.read_all_layers else "")
        if not made:
            made = _selector(config, index, heads.found)
        if isinstance(made, Selector):
            selectors[index], words[index] = made, str(made)
        else:
            words[index] = f"reads every key: {made}"
    if not selectors:
        raise ValueError(f"no layer of this model can be sparse. Layer {max(words)} {words[max(words)]}.")
    counts = {selector.choices for selector in selectors.values() if isinstance(selector, Centroids)}
    for buckets in sorted(counts):
        notices.note(sparse.many_probes(buckets))
    return selectors, words


def _selector(config: TurboConfig, index: int, found: Calibration | None) -> Selector | str:
    """One layer's selector, or why there is none."""
    sparse = config.sparse
    assert sparse is not None
    if sparse.selector not in CALIBRATED:
        return Selector(sparse, index)
    assert found is not None
    layer = found.layers[index]
    rotated = sparse.selector == "kmeans-rotated"
    centroids = layer.rotated_centroids if rotated else layer.centroids
    if centroids is None:
        return layer.note.removeprefix(NO_INDEX) or "the calibration has no index of it"
    return Centroids(sparse, index, centroids, not rotated, layer.classifier if sparse.selector == "saap" else {})
