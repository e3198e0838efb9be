"""What is measured: head shapes of real models, batch and length, and the amount of work in their attention."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


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
    """One prompt pass: `batch` rows of `tokens` tokens that attend to each other."""

    shape: str
    heads: Heads
    batch: int
    tokens: int
    causal: bool

    def __str__(self) -> str:
        return f"{self.batch}x{tokens_label(self.tokens)} {'causal' if self.causal else 'full'}"

    @property
    def flops(self) -> float:
        """Floating-point operations of Q K^T and P V; half of the square if causal."""
        square = 4.0 * self.batch * self.heads.query * self.tokens**2 * self.heads.dim
        return square / 2 if self.causal else square

    def bytes_moved(self, itemsize: int) -> float:
        """The fewest bytes: Q, K and V read once, the output written once, `itemsize` bytes each."""
        return 2.0 * self.batch * (self.heads.query + self.heads.kv) * self.tokens * self.heads.dim * itemsize


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


def largest(holds: Callable[[int], bool], most: float, least: int = 0, fineness: float = math.inf) -> int:
    """The largest number up to `most` that holds, else `least`: by doubling, then bisection to 1 / fineness of it."""
    low, high = least, max(1, 2 * least)
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = int(min(high, most + 1))
    while high - low > max(1, low // fineness):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def tokens_label(tokens: int) -> str:
    """The shortest text that `parse_tokens` reads as `tokens`."""
    texts = (f"{tokens >> 20}M", f"{tokens // 1000}k", f"{tokens // 1024}k")
    return next((text for text in texts if text[:-1] != "0" and parse_tokens(text) == tokens), str(tokens))
