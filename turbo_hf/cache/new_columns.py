"""Which columns of a forward pass hold tokens, and how rows of different lengths are aligned."""

from typing import NamedTuple

import torch

from turbo_hf.ops.host_device import shared

DIFFERS = (
    "attention_mask (none means all ones) differs from the one under which the cached tokens were stored. "
    "Padding is not cached, so it cannot change later: keep the mask of earlier columns, or start a new cache."
)


class NewQKV(NamedTuple):
    """The new tokens of one call: query [B, Hq, M, D]; key, value [B, Hkv, M, D]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class NewColumns(NamedTuple):
    """The new columns of one forward pass, [B, M].

    valid: bool [B, M] on the device, or None when every column of every row is a token.
    starts: for each row, the column at which its tokens begin once they stand at the end; None with `valid`.
    gather: int64 [B, M], the column that each aligned place takes; None when rows are aligned already (left padding).
    """

    tokens: int
    valid: torch.Tensor | None = None
    starts: list[int] | None = None
    gather: torch.Tensor | None = None

    def on(self, device: torch.device) -> "NewColumns":
        """The same columns for layers on `device`."""
        if self.valid is None or self.valid.device == device:
            return self
        gather = None if self.gather is None else self.gather.to(device)
        return self._replace(valid=self.valid.to(device), gather=gather)

    def starts_on(self, device: torch.device) -> torch.Tensor | None:
        """`starts` as int64 [B] on `device`, read-only."""
        return None if self.starts is None else shared(self.starts, device)

    def blank(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, H, M, D], aligned, with 0 before each row's tokens."""
        first = self.starts_on(x.device)
        if first is None:
            return x
        hidden = torch.arange(self.tokens, device=x.device) < first[:, None]
        return x.masked_fill(hidden[:, None, :, None], 0.0)

    def align(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, H, M, D] with each row's tokens at its end."""
        return x if self.gather is None else torch.take_along_dim(x, self.gather[:, None, :, None], 2)

    def restore(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `align`."""
        if self.gather is None:
            return x
        return torch.take_along_dim(x, self.gather.argsort(-1)[:, None, :, None], 2)


def columns_of(valid: torch.Tensor, same: torch.Tensor | None = None) -> NewColumns:
    """The columns of a mask bool [B, M]; one read from the device. same: bool [], whether the past is unchanged."""
    tokens = valid.shape[1]
    counts = valid.sum(-1)
    aligned = torch.arange(tokens, device=valid.device) >= (tokens - counts)[:, None]
    moved = (aligned != valid).any()
    stats = torch.cat((counts, torch.stack((moved, torch.ones_like(moved) if same is None else same)))).tolist()
    if not stats.pop():
        raise ValueError(DIFFERS)
    starts = [tokens - count for count in stats[:-1]]
    if not any(starts):
        return NewColumns(tokens)
    # a stable sort moves the padding before the tokens and keeps the order of both
    gather = valid.to(torch.uint8).argsort(dim=-1, stable=True) if stats[-1] else None
    return NewColumns(tokens, valid, starts, gather)


def columns_from_mask(mask: torch.Tensor | None, seen: int, tokens: int, valid: torch.Tensor | None) -> NewColumns:
    """The columns that a model's 2D attention mask describes.

    Args:
        mask: [B, seen + tokens], nonzero at real tokens; None: at all of them.
        seen: columns of earlier passes. tokens: columns of this one.
        valid: bool [B, seen], which of the earlier columns the cache stored; None: all.

    Raises:
        ValueError: another width, or a mask that hides or shows a token of an earlier pass which it did not before.
    """
    if mask is None:
        if valid is not None and not bool(valid.all()):
            raise ValueError(DIFFERS)
        return NewColumns(tokens)
    if mask.shape[1] != seen + tokens:
        raise ValueError(
            f"attention_mask has {mask.shape[1]} columns; the cache holds {seen} and this pass brings {tokens}. "
            "Pass a mask over all of them, [batch, cached + new], or none."
        )
    if seen and valid is None and bool(mask.all()):
        # nearly every step: two operations in place of a dozen. A padded prompt would read twice
        return NewColumns(tokens)
    past = mask[:, :seen].bool()
    same = past.all() if valid is None else (past == valid.to(mask.device)).all()
    return columns_of(mask[:, seen:].bool(), same)


class Planned(NamedTuple):
    """How the `tokens` columns after `seen` earlier ones are aligned under a mask."""

    mask: torch.Tensor | None
    seen: int
    tokens: int
    new: NewColumns

    def under(self, mask: torch.Tensor | None) -> bool:
        """Whether a layer was given the same mask; over several GPUs, each layer gets a copy."""
        if self.mask is None or mask is None or self.mask.device == mask.device:
            return self.mask is mask
        return self.mask.shape == mask.shape
