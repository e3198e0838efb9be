"""What is measured: head shapes of real models, prompts and decode steps, and the amount of work in them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from turbo_hf.config.turbo_config import NAMED
from turbo_hf.layout import UNQUANTIZED, HeadGroups, open_token_bytes, page_bytes


class Heads(NamedTuple):
    """One model's attention: query heads, KV heads, channels of a head."""

    query: int
    kv: int
    dim: int


SHAPES = {
    "llama3-8b": Heads(32, 8, 128),
    "phi3-medium": Heads(40, 10, 128),
    "qwen2.5-0.5b": Heads(14, 2, 64),
}
SIZES = ("16x1k", "4x4k", "4x16k", "1x32k", "1x131k")


@dataclass(frozen=True, slots=True)
class PromptCase:
    """One prompt pass: `batch` rows of `tokens` tokens, each of which attends to those up to itself."""

    shape: str
    heads: Heads
    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.batch}x{tokens_label(self.tokens)} causal"

    @property
    def flops(self) -> float:
        """Floating-point operations of Q K^T and P V, half of the square."""
        return 2.0 * self.batch * self.heads.query * self.tokens**2 * self.heads.dim


def find_shape(name: str, shapes: dict[str, Heads] = SHAPES) -> Heads:
    """The heads of a model by name. ValueError names the models."""
    if name not in shapes:
        raise ValueError(f"unknown shape {name}; shapes are {', '.join(shapes)}.")
    return shapes[name]


def parse_size(text: str) -> tuple[int, int]:
    """Batch and tokens of "16x1k". ValueError shows the form."""
    batch, by, tokens = text.partition("x")
    if not (by and batch.isdecimal() and int(batch)):
        raise ValueError(f"expected a size like 16x1k (rows x tokens); got {text!r}.")
    return int(batch), parse_tokens(tokens)


def parse_tokens(text: str) -> int:
    """Tokens of "1024", "1k", "131k" or "1M".

    "k" is 1024; it also names the power of two of so many thousands, as 131k does 131,072. "M" is 1024 k.

    Raises:
        ValueError: anything else, or no token.
    """
    found = re.fullmatch(r"(\d+)([kM]?)", text)
    if found is None or not int(found[1]):
        raise ValueError(f"expected a number of tokens like 4096 or 4k; got {text!r}.")
    number = int(found[1])
    if found[2] != "k":
        return number << 20 if found[2] else number
    power = 1 << (number * 1000).bit_length()
    return power if power // 1000 == number else number * 1024


def largest(holds: Callable[[int], bool], most: float) -> int:
    """The largest number up to `most` that holds, else 0: by doubling, then bisection."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = int(min(high, most + 1))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def tokens_label(tokens: int) -> str:
    """The shortest text that `parse_tokens` reads as `tokens`."""
    texts = (f"{tokens >> 20}M", f"{tokens // 1000}k", f"{tokens // 1024}k")
    return next((text for text in texts if text[:-1] != "0" and parse_tokens(text) == tokens), str(tokens))


BLOCK = 64
"""Tokens per sealed block, as in the presets."""

LATENT_SHAPES = {"deepseek-v2-lite": Heads(16, 1, 512), "deepseek-v3-tp8": Heads(16, 1, 512)}
"""Latent attention (MLA): query heads of one GPU, and channels of the latent. The two cost the same."""

NEWER = {
    "qwen2.5-1.5b": Heads(12, 2, 128),
    "qwen3.5-24": Heads(24, 4, 256),
    "qwen3.5-16": Heads(16, 2, 256),
    "gemma3-4b": Heads(8, 4, 256),
    "gemma3-8-1": Heads(8, 1, 256),
    "gemma4-global": Heads(8, 1, 512),
    "gpt-oss": Heads(64, 8, 64),
}
"""Heads of models that people run. Heads that several sizes of a model have are named by their number: "qwen3.5-24",
24 query heads; "gemma3-8-1", 8 query heads and 1 KV head. Heads of 512 channels have no kernel."""

LEAN = {"lean-16": Heads(16, 16, 64), "lean-24": Heads(24, 24, 64)}
"""The heads for which LeanAttention sec. V gives its largest and smallest gain."""

DECODE_SHAPES = SHAPES | NEWER | LEAN | LATENT_SHAPES

WIDTHS = ("16", "8", "4", "3", "2", "mixed", "k4v3", "k4v2")
"""Bits of keys and values; half of the heads at 4 bit and half at 2; bits of keys and bits of values."""

# 16x8k to 20x8k are 128, 136 and 160 outputs: just below and above the 132 SMs of an H100 or H200
STEP_SIZES = {
    "llama3-8b": "1x1k 1x4k 1x8k 1x32k 1x131k 1x524k 1x1M 4x4k 4x32k 16x1k 16x4k 16x32k 64x1k 64x4k 64x16k"
    " 16x8k 17x8k 20x8k",
    "phi3-medium": "1x4k 1x32k 1x131k 16x4k 16x16k 64x1k",
    "qwen2.5-0.5b": "1x4k 1x32k 1x131k 16x4k 16x32k 64x2k",
    **dict.fromkeys(NEWER, "1x2k 1x32k 64x4k"),
    "lean-16": "1x32k 1x524k",
    "lean-24": "1x1k 1x32k 1x524k",
    "deepseek-v2-lite": "1x32k 1x131k 16x8k",
    "deepseek-v3-tp8": "1x131k",
}
RAGGED_SIZES = {"llama3-8b": "8x32k 32x16k 64x4k", "phi3-medium": "32x8k", "qwen2.5-0.5b": "32x8k"}


@dataclass(frozen=True, slots=True)
class Case:
    """One decode step: a query token in each row over `lengths` tokens of compressed cache."""

    shape: str
    heads: Heads
    lengths: tuple[int, ...]
    ragged: bool

    def __str__(self) -> str:
        return f"{self.batch}x{tokens_label(self.tokens)}{' ragged' if self.ragged else ''}"

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Of the longest row."""
        return max(self.lengths)

    @property
    def outputs(self) -> int:
        """Rows times KV heads: what a kernel without splits can distribute over the SMs."""
        return self.batch * self.heads.kv

    def packed_bytes(self, groups: HeadGroups) -> int:
        """Bytes of the cache, all of which a step reads. groups: (width, heads) of each width."""
        page = sum(slots * page_bytes(self.heads.dim, width, BLOCK) for width, slots in groups)
        loose = self.heads.kv * open_token_bytes(self.heads.dim, unquantized=UNQUANTIZED in dict(groups))
        return sum(n // BLOCK * page + n % BLOCK * loose for n in self.lengths)

    def dense_bytes(self, itemsize: int) -> int:
        """Bytes of keys and values with `itemsize` bytes per number, every row as long as the longest."""
        return 2 * len(self.lengths) * max(self.lengths) * self.heads.kv * self.heads.dim * itemsize


def make_case(shape: str, size: str, ragged: bool, seed: int) -> Case:
    """One case. ragged: lengths drawn from 1/8 of the size to all of it; the last row has all.

    Raises:
        ValueError: an unknown shape, or a size that is not like 16x1k.
    """
    heads = find_shape(shape, DECODE_SHAPES)
    rows, tokens = parse_size(size)
    lengths = [tokens] * rows
    if ragged:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(-(-tokens // 8), tokens + 1, (rows - 1,), generator=generator)
        lengths = [*drawn.tolist(), tokens]
    return Case(shape, heads, tuple(lengths), ragged)


def choose_cases(shapes: list[str], sizes: list[str], ragged: bool, seed: int) -> list[Case]:
    """`sizes` for every one of `shapes`; without sizes the default cases, of `shapes` if there are any.

    ragged: only ragged batches.

    Raises:
        ValueError: as `make_case`.
    """
    for shape in shapes:
        find_shape(shape, DECODE_SHAPES)
        if ragged and shape in LATENT_SHAPES:
            raise ValueError(f"rows of {shape} have one length here; leave out --ragged.")
    wanted = shapes or [shape for shape in DECODE_SHAPES if not (ragged and shape in LATENT_SHAPES)]
    if sizes:
        return [make_case(shape, size, ragged, seed) for shape in wanted for size in sizes]
    found = []
    for shape in wanted:
        even = "" if ragged else STEP_SIZES[shape]
        found += [make_case(shape, size, False, seed) for size in even.split()]
        found += [make_case(shape, size, True, seed) for size in RAGGED_SIZES.get(shape, "").split()]
    return found


def groups_of(width: str, kv_heads: int) -> HeadGroups:
    """(width, heads) of each group of `kv_heads` heads under one of WIDTHS; words: as in the preset turbo-WORD."""
    preset = NAMED.get(f"turbo-{width}")
    return ((int(width), kv_heads),) if preset is None else preset.head_groups(kv_heads)
