"""Queries, keys and values as passed to a model's attention layers, with rotary embedding applied."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from turbo_hf.calibration.capture import Seen, capturing, run_window


@dataclass(frozen=True, slots=True)
class Captured:
    """One layer's inputs.

    index: the layer's number.
    q: [1, Hq, N, D]. k, v: [1, Hkv, N, D].
    about: the keywords of its attention, scaling at least.
    """

    index: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    about: dict[str, Any]


def token_ids(tokenizer: Any, path: Path | None, tokens: int) -> torch.Tensor:
    """int64 [1, tokens]: the text file, or the included prose; a text that is too short is repeated from its start.

    Raises:
        ValueError: the text is empty.
    """
    text = (resources.files("turbo_hf.eval").joinpath("haystack.txt") if path is None else path).read_text("utf-8")
    ids = tokenizer(text).input_ids
    if not ids:
        raise ValueError(f"{path} has no text.")
    return torch.tensor([(ids * (tokens // len(ids) + 1))[:tokens]])


@torch.no_grad()
def capture(model: Any, ids: torch.Tensor) -> list[Captured]:
    """What each attention layer of `model` was given for ids [1, N], in the model's precision and without a cache.

    Raises:
        ValueError: a model that is patched, one without a layer that can be compressed, or a prompt longer than its
            positions.
    """
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None and ids.shape[1] > positions:
        raise ValueError(f"the model was made for {positions} positions; got {ids.shape[1]} tokens.")
    held: list[Captured] = []

    def record(seen: Seen) -> None:
        about = {
            "scaling": seen.scaling,
            "window": seen.source.window,
            "softcap": seen.softcap,
            "sinks": seen.sinks,
        }
        held.append(Captured(seen.source.index, seen.query, seen.key, seen.value, about))

    with capturing(model, record):
        run_window(model, ids)
    if not held:
        raise ValueError(f"no layer of {type(model).__name__} can be compressed.")
    return held
