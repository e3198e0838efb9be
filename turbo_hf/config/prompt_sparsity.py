"""`PromptSparsity`: which keys the queries of a long prompt read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turbo_hf.config.options import Options, at_least, one_of
from turbo_hf.layout import TileRule

CALIBRATED_DROP = 0.05
"""The most of its softmax that a query may drop under a calibrated head's rule; 95 % of a calibration's queries do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSparsity(Options):
    """Which keys the queries of a long prompt read, by tiles of 128 queries and 128 keys.

    Each tile of queries of each query head reads its own keys, the first and the newest ones before it, the fewest
    key tiles that cover `mass`, and each key tile that one of its queries wants by itself (`peak`). Both are judged by
    the mean key of a tile, so that what is dropped is an estimate; `audit` measures it. Where these are nearly all key
    tiles, all are read (`most_density`).

    Args:
        mass: share of the estimated softmax, averaged over the queries of a tile, that is read; above 0, at most 1.
        peak: a key tile to which one query alone gives this share is read; above 0, at most 1, which turns it off.
        from_tokens: prompts that are shorter, with what the cache holds before them, attend to everything. At least
            `sink_tokens` + `window_tokens` + `tail_tokens`.
        sink_tokens, window_tokens: how many of the first tokens, and of the newest before a tile of queries, are always
            read, in whole tiles.
        tail_tokens: how many of a prompt's last queries read every key. The tokens that are generated first look back
            from there.
        audit: measure the share of the softmax that was dropped, on 128 random queries per head against all keys, and
            compute a head whose mean is above 2 (1 - mass) densely (under a calibrated rule: above 0.1). False: the
            estimate is trusted.
        most_density: a tile of queries that would read more than this share of the key tiles before it reads them all:
            mean keys tell them apart too little there; above 0, at most 1, which turns it off.
    """

    mass: float = 0.98
    peak: float = 0.02
    from_tokens: int = 16384
    sink_tokens: int = 128
    window_tokens: int = 512
    tail_tokens: int = 256
    audit: bool = True
    most_density: float = 0.8

    def __post_init__(self) -> None:
        for field in ("mass", "peak", "most_density"):
            share = getattr(self, field)
            number = isinstance(share, int | float) and not isinstance(share, bool)
            if not number or not 0 < share <= 1:
                raise ValueError(f"PromptSparsity.{field} must be above 0 and at most 1; got {share!r}.")
        for field in ("from_tokens", "sink_tokens", "window_tokens", "tail_tokens"):
            at_least(field, getattr(self, field), 0, "PromptSparsity")
        always = self.sink_tokens + self.window_tokens + self.tail_tokens
        if self.from_tokens < always:
            raise ValueError(
                f"PromptSparsity.from_tokens must be at least sink_tokens + window_tokens + tail_tokens = {always}, "
                f"up to which every key is read; got {self.from_tokens}."
            )
        one_of("audit", self.audit, (True, False), "PromptSparsity")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> "PromptSparsity":
        """These options, the others at their defaults. ValueError: an unknown name, or a wrong value."""
        return cls(**cls._known(options))

    @property
    def rule(self) -> TileRule:
        """What chooses tiles."""
        # a whole number would compile kernels of its own
        mass, peak, most = float(self.mass), float(self.peak), float(self.most_density)
        return TileRule(mass, peak, self.sink_tokens, self.window_tokens, self.tail_tokens, most)

    @property
    def bound(self) -> float:
        """The mean dropped share above which a head is computed densely."""
        return 2 * (1 - self.mass)
