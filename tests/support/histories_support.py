"""What random histories of a cache are run on, and judged by: tiny models, configs, and a plain oracle.

Models are in float64, and every key and value is rounded to float16 before a cache or attention sees it. A cache of 16
bits then stores them exactly, and what the patched model answers is what the unpatched one answers to the same tokens,
to the last digits.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from choices import flat_config
from families_support import DELTA_NET, EXPERTS, FULL, LINEAR, SLIDING, build
from torch import Tensor
from transformers import DynamicCache

import turbo_hf
from turbo_hf import TurboCache, TurboConfig
from turbo_hf.models.versions import CACHE

Row = list[int | None]
"""The columns of one row that a cache has seen: a token, or None for padding."""

TOKENS = 64
WINDOW = 24
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "vocab_size": TOKENS}
MIXED = {"layer_types": [SLIDING, FULL], "sliding_window": WINDOW}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 16},
    "gpt_oss": {**MIXED, **EXPERTS},
    # layers of a short convolution, whose state can be cropped, and of a recurrent state, which cannot
    "lfm2": {"layer_types": ["conv", FULL]},
    "qwen3_next": {"layer_types": [LINEAR, FULL], **DELTA_NET, **EXPERTS},
}
LINEAR_FAMILIES = ("lfm2", "qwen3_next")
WINDOWED = ("gemma3_text", "gpt_oss")
CONFIGS = {
    "exact": flat_config(bits=16, attention="native", block_size=32),
    "int8": flat_config(bits=8, attention="native", block_size=32),
    "turbo4": flat_config(bits=4, attention="native", block_size=32),
    "turbo4-rounded-prompts": flat_config(bits=4, block_size=32),
    "turbo-mixed": flat_config(bits=4, low_bits=2, low_heads=0.5, attention="native", block_size=32),
    "turbo-k4v2": flat_config(bits=4, value_bits=2, attention="native", block_size=32, recent_tokens=32),
    "turbo4-beside-dense": flat_config(bits=4, attention="native", block_size=32, dense_layers=(0,)),
}
MARGIN = 8
"""How many times the float32 model's own largest error, seen on a few prompts, a float64 answer may be off."""


class Compressed(TurboCache):
    """The cache that is tried, of keys and values that are float16 numbers."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """As a TurboCache."""
        return super().update(*_rounded(*args), **kwargs)


class Plain(DynamicCache):
    """The oracle's cache, used for one pass alone, of the same keys and values."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """As a DynamicCache."""
        return super().update(*_rounded(*args), **kwargs)


def _rounded(k: Tensor, v: Tensor, *others: Any) -> tuple[Any, ...]:
    return k.half().to(k.dtype), v.half().to(v.dtype), *others


class Subject(NamedTuple):
    """One family under one config. plain, patched: the same weights. bound: largest error of one clean history."""

    family: str
    config: TurboConfig
    plain: Any
    patched: Any
    tolerance: float
    bound: float

    @property
    def exact(self) -> bool:
        """Whether the cache loses nothing."""
        return self.config.bits == 16

    def new_cache(self, mask: Tensor | None = None) -> Compressed:
        """An empty cache."""
        return Compressed(self.patched.config, self.config, attention_mask=mask)


@functools.cache
def _plain(family: str) -> Any:
    options = {**SMALL, **FAMILIES[family]}
    # the mean over dimensions of a longer history is not what is tested
    single = build(family, **options, attn_implementation="eager" if family == "gpt_oss" else "sdpa")
    return single.requires_grad_(False)


def random_rows(rows: int, tokens: int, seed: int) -> list[tuple[int, ...]]:
    """Rows of random tokens."""
    drawn = torch.randint(1, TOKENS, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return [tuple(row) for row in drawn.tolist()]


@functools.cache
def _double(family: str) -> Any:
    return copy.deepcopy(_plain(family)).double()


@functools.cache
def _tolerance(family: str) -> float:
    """By how much a right answer may be off: rounding, in float32 and of the model's own cache."""
    single, double = _plain(family), _double(family)
    worst = 0.0
    for seed in range(3):
        ids = torch.tensor(random_rows(4, 96, seed))
        with torch.no_grad():
            want = double(ids, use_cache=False).logits
            worst = max(worst, largest(single(ids, use_cache=False).logits - want))
            cache = DynamicCache(config=double.config)
            parts = [double(part, **{CACHE: cache}).logits for part in ids.split(17, 1)]
            worst = max(worst, largest(torch.cat(parts, 1) - want))
    return MARGIN * worst


@functools.cache
def subject(family: str, config: str) -> Subject:
    """The models of a family, patched for a config."""
    plain, chosen = _double(family), CONFIGS[config]
    patched = copy.deepcopy(plain)
    turbo_hf.patch(patched, chosen)
    found = Subject(family, chosen, plain, patched, _tolerance(family), 0.0)
    return found if found.exact else found._replace(bound=_clean_error(found))


def _clean_error(made: Subject) -> float:
    """The largest error of logits in histories of nothing but a prompt and passes over it."""
    worst = 0.0
    for seed, lengths in enumerate(((40, 1, 1, 20, 1, 30), (70, 5, 1, 20), (20, 17, 17, 3, 1, 20))):
        worst = max(worst, _error(made, random_rows(4, sum(lengths), seed), lengths))
    return worst


def error_of(made: Subject, row: tuple[int, ...]) -> float:
    """The same of these tokens, fed one by one, by eights, and by twenties."""
    return max(_error(made, [row], [width] * (len(row) // width) + [len(row) % width]) for width in (1, 8, 20))


def error_of_padding(made: Subject, row: tuple[int, ...]) -> float:
    """By how much the unpatched model, with its own cache, errs when padding stands before these tokens.

    Transformers' linear layers take padding for tokens that are nearly zero.
    """
    want, worst = oracle(made, [row])[row], 0.0
    for columns in (1, 8, 36):
        with torch.no_grad():
            got = forward(made.plain, [[*[None] * columns, *row]], [[]], Plain(config=made.plain.config))
        worst = max(worst, largest(got[0, columns:] - want))
    return worst


def _error(made: Subject, rows: list[tuple[int, ...]], lengths: Sequence[int]) -> float:
    ids, cache = torch.tensor(rows), made.new_cache()
    with torch.no_grad():
        passes = [made.patched(part, **{CACHE: cache}).logits for part in ids.split(lengths, 1) if part.numel()]
    return largest(torch.cat(passes, 1) - torch.stack(list(oracle(made, rows).values())))


def largest(x: Tensor) -> float:
    """The largest magnitude; infinity if there is a NaN."""
    return float(x.abs().nan_to_num(torch.inf).max()) if x.numel() else 0.0


def oracle(made: Subject, rows: list[tuple[int, ...]]) -> dict[tuple[int, ...], Tensor]:
    """Logits [tokens, vocabulary] of each row, in one pass of the unpatched model from nothing."""
    # attention is causal, so that what stands behind a row does not matter
    width = max(len(row) for row in rows)
    ids = torch.tensor([(*row, *[0] * (width - len(row))) for row in rows])
    with torch.no_grad():
        logits = made.plain(ids, **{CACHE: Plain(config=made.plain.config)}).logits
    return {row: logits[n, : len(row)] for n, row in enumerate(rows)}


def forward(model: Any, new: list[Row], past: list[Row], cache: Any, dense_mask: bool = True) -> Tensor:
    """Logits [B, columns, vocabulary] of a pass over new columns; a mask is left out where nothing is padding."""
    rows = [[*old, *own] for old, own in zip(past, new, strict=True)]
    mask = torch.tensor([[column is not None for column in row] for row in rows])
    ids = torch.tensor([[column or 0 for column in row] for row in new])
    place = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    shown = None if bool(mask.all()) and not dense_mask else mask.long()
    logits: Tensor = model(ids, attention_mask=shown, position_ids=place, **{CACHE: cache}).logits
    return logits


MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}
