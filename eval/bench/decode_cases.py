"""The cases of `bench decode`: caches of real models' heads, from one short row to a batch of long ones."""

from dataclasses import dataclass

import torch

from turbo_hf.config.turbo_config import preset_named
from turbo_hf.eval.bench.shapes import SHAPES, Heads, find_shape, parse_size, tokens_label
from turbo_hf.layout import UNQUANTIZED, HeadGroups, open_token_bytes, page_bytes

BLOCK = 64
"""Tokens per sealed block, as in the presets."""

LATENT_SHAPES = {"deepseek-v2-lite": Heads(16, 1, 512), "deepseek-v3-tp8": Heads(16, 1, 512)}
"""Latent attention (MLA): query heads of one GPU, and channels of the latent. The two cost the same."""

DECODE_SHAPES = SHAPES | {"lean-16": Heads(16, 16, 64), "lean-24": Heads(24, 24, 64)} | LATENT_SHAPES
"""The models of the prompts, the heads for which LeanAttention sec. V gives its largest and smallest gain, and MLA."""

WIDTHS = ("16", "8", "4", "3", "2", "mixed", "k4v3", "k4v2")
"""Bits of keys and values; half of the heads at 4 bit and half at 2; bits of keys and bits of values."""

# 16x8k to 20x8k are 128, 136 and 160 outputs: just below and above the 132 SMs of an H100 or H200
SIZES = {
    "llama3-8b": "1x1k 1x4k 1x8k 1x32k 1x131k 1x524k 1x1M 4x4k 4x32k 16x1k 16x4k 16x32k 64x1k 64x4k 64x16k"
    " 16x8k 17x8k 20x8k",
    "phi3-medium": "1x4k 1x32k 1x131k 16x4k 16x16k 64x1k",
    "qwen2.5-0.5b": "1x4k 1x32k 1x131k 16x4k 16x32k 64x2k",
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
        return f"{len(self.lengths)}x{tokens_label(max(self.lengths))}{' ragged' if self.ragged else ''}"

    @property
    def outputs(self) -> int:
        """Rows times KV heads: what a kernel without splits can distribute over the SMs."""
        return len(self.lengths) * self.heads.kv

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
        even = "" if ragged else SIZES[shape]
        found += [make_case(shape, size, False, seed) for size in even.split()]
        found += [make_case(shape, size, True, seed) for size in RAGGED_SIZES.get(shape, "").split()]
    return found


def groups_of(width: str, kv_heads: int) -> HeadGroups:
    """(width, heads) of each group of `kv_heads` heads under one of WIDTHS; words: as in the preset turbo-WORD."""
    preset = preset_named(f"turbo-{width}")
    return ((int(width), kv_heads),) if preset is None else preset.head_groups(kv_heads)
