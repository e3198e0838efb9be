"""Which heads a patch gives the low bits: by a calibration, or by each row's first block."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from turbo_hf.attention import Strict, complain
from turbo_hf.calibration.artifacts import Calibration, find
from turbo_hf.config import TurboConfig


class HeadChoice(NamedTuple):
    """orders: KV heads by need of bits, for each layer that a calibration covers. words: what decided, for the report;
    "" where all heads have one width. notes: warnings for the report."""

    orders: Mapping[int, tuple[int, ...]]
    words: str
    notes: tuple[str, ...]


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
    if calibration is None or (calibration == "auto" and not low):
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
            return HeadChoice({}, f"{by_prompt} (no calibration beside the checkpoint)", ())
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
        return HeadChoice({}, "calibration: not used, for all heads of this config have the same bits", notes)
    orders = found.head_orders(config.head_metric)
    missing = [layer.index for layer in found.layers if layer.index not in orders]
    rest = f"; layers {', '.join(map(str, missing))} by each row's first block" if missing else ""
    where = found.source or "this process"
    return HeadChoice(orders, f"{low}: by calibration over {found.tokens:,} tokens ({where}){rest}", notes)


def _refusal(calibration: Calibration, model: PreTrainedModel) -> str | None:
    wrong = calibration.mismatch(model)
    if wrong is None:
        return None
    return f"the calibration of {calibration.source or 'this process'!r} does not fit this model: {wrong}."
