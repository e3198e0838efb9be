"""The open part of one layer's cache: the newest tokens of each row, in INT8 with one scale per token and head.

In a layer that has 16-bit heads: unquantized, with scale 1.
"""

import functools
from collections.abc import Callable
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch

from turbo_hf.cache.integrity import Integrity
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.ops.host_device import require_finite, send, shared
from turbo_hf.ops.store.quantize import head_scores, quantize_tokens
from turbo_hf.ops.store.rotate import unrotate_keys

P = ParamSpec("P")
R = TypeVar("R")


class Marked(Protocol):
    """What a cache consists of. name: in errors."""

    integrity: Integrity
    name: str


S = TypeVar("S", bound=Marked)


def ordinary(method: Callable[P, R]) -> Callable[P, R]:
    """No gradients, and ordinary tensors also under `torch.inference_mode`: a cache may be written again outside it."""
    guarded = torch.inference_mode(False)(torch.no_grad()(method))

    @functools.wraps(method)
    def stores(*args: P.args, **kwargs: P.kwargs) -> R:
        # `generate` has already disabled gradients, and this is called several times per pass and layer
        plain = not (torch.is_grad_enabled() or torch.is_inference_mode_enabled())
        return method(*args, **kwargs) if plain else guarded(*args, **kwargs)

    return stores


def storing(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """As `ordinary`; and if it breaks off, what it was writing stays marked as torn."""
    stores = ordinary(method)

    @functools.wraps(method)
    def marked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        integrity = self.integrity
        # one call may be within another
        integrity.writing, before = self.name, integrity.writing
        result = stores(self, *args, **kwargs)
        integrity.writing = before
        return result

    return marked


class Tokens(NamedTuple):
    """Tokens with one scale each. k, v: int8 or 16-bit [..., H, N, D]; k_scale, v_scale: float32 [..., H, N]."""

    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor
    v_scale: torch.Tensor


class Quantized(NamedTuple):
    """New tokens [B, H, M, D] as they are, and on scales of their own."""

    k: torch.Tensor
    v: torch.Tensor
    own: Tokens


def to_open(k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, backend: str) -> Tokens:
    """New tokens [B, H, M, D] as open ones of type `dtype`; a token with NaN or Inf has such a scale."""
    if dtype == torch.int8:
        return Tokens(*quantize_tokens(k, backend=backend), *quantize_tokens(v, backend=backend))
    k, v = k.to(dtype), v.to(dtype)
    return Tokens(k, 1 + (k.float() * 0).sum(-1), v, 1 + (v.float() * 0).sum(-1))


def on_scale(k: torch.Tensor, v: torch.Tensor, own: Tokens, given_scale: torch.Tensor, backend: str) -> Tokens:
    """New tokens k, v [B, Hkv, M, D] on `given_scale` [B, Hkv, 2], that of a row's prompt; `own`: on their own."""
    # a row that had no prompt has no range yet: its tokens keep their own scale
    k_scale, v_scale = (
        torch.where(given[..., None] > 0, given[..., None], scale)
        for given, scale in zip(given_scale.unbind(-1), (own.k_scale, own.v_scale), strict=True)
    )
    return Tokens(*quantize_tokens(k, k_scale, backend), *quantize_tokens(v, v_scale, backend))


GRAIN = 16
"""Tokens by which the buffer grows. It has room for at least one grain, so no op sees a cache without slots."""


def _rounded(tokens: int) -> int:
    return max(GRAIN, -(-tokens // GRAIN) * GRAIN)


class OpenBuffer:
    """Open tokens of all rows, each row from slot 0 (shapes: `turbo_hf.layout`). room: tokens expected at first."""

    def __init__(
        self, rows: int, heads: int, dim: int, device: torch.device, dtype: torch.dtype = torch.int8, room: int = 0
    ):
        self.length, cap = [0] * rows, _rounded(room)
        self._device_length: torch.Tensor | None = None
        self.k = torch.empty(rows, heads, cap, dim, dtype=dtype, device=device)
        self.v = torch.empty(rows, heads, dim, cap, dtype=dtype, device=device)
        self.k_scale = torch.empty(rows, heads, cap, dtype=torch.float32, device=device)
        self.v_scale = torch.empty(rows, heads, cap, dtype=torch.float32, device=device)

    @property
    def capacity(self) -> int:
        """Tokens that a row has room for."""
        return self.k.shape[2]

    def device_length(self) -> torch.Tensor:
        """int64 [B]: `length` on the device, as it is there without being sent again in steady decoding."""
        if self._device_length is None:
            self._device_length = send(self.length, self.k.device)
        return self._device_length

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """k, v, k_scale, v_scale and the length, as a `KVStore` holds them."""
        return self.k, self.v, self.k_scale, self.v_scale, self.device_length()

    def reserve(self, tokens: int, starts: list[int] | None) -> None:
        """Make room for `tokens` more per row, row r's from column `starts[r]` on."""
        needed = max(self._after(tokens, starts))
        if needed > self.capacity:
            self._resize(needed, [0] * len(self.length))

    def _after(self, tokens: int, starts: list[int] | None) -> list[int]:
        new = [tokens] * len(self.length) if starts is None else [tokens - start for start in starts]
        return [held + count for held, count in zip(self.length, new, strict=True)]

    def hold(self, tokens: int) -> None:
        """Room for `tokens` tokens a row in all, and what they are on the device from now on in one place."""
        if tokens > self.capacity:
            self._resize(tokens, [0] * len(self.length))
        self.device_length()

    def count(self, tokens: int, starts: list[int] | None) -> None:
        """Note on the host that `ops.append` has stored `tokens` tokens, row r's from column `starts[r]` on."""
        self.length = self._after(tokens, starts)

    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.k.nbytes + self.v.nbytes + self.k_scale.nbytes + self.v_scale.nbytes

    def append(self, new: Tokens, starts: list[int] | None) -> None:
        """Add tokens [B, H, M, ...]; row r from column `starts[r]` on."""
        k, k_scale, v, v_scale = new
        tokens, after = k.shape[2], self._after(k.shape[2], starts)
        self.reserve(tokens, starts)
        if starts is None and len(set(self.length)) == 1:
            to = slice(self.length[0], after[0])
            self.k[:, :, to], self.k_scale[:, :, to] = k, k_scale
            self.v[:, :, :, to], self.v_scale[:, :, to] = v.mT, v_scale
        else:
            begin, held = shared(starts or [0] * len(k), k.device), self.device_length()
            row, source = (torch.arange(tokens, device=k.device) >= begin[:, None]).nonzero().unbind(-1)
            target = held[row] + source - begin[row]
            self.k[row, :, target] = k[row, :, source]
            self.v[row, :, :, target] = v[row, :, source]
            self.k_scale[row, :, target] = k_scale[row, :, source]
            self.v_scale[row, :, target] = v_scale[row, :, source]
        self.length, self._device_length = after, None

    def quantized(self, k: torch.Tensor, v: torch.Tensor, layer: int, backend: str) -> Quantized:
        """New tokens [B, H, M, D] for `take`; ValueError if they hold NaN or Inf. layer: its number, for the error."""
        own = to_open(k, v, self.k.dtype, backend)
        require_finite({layer: ~(torch.isfinite(own.k_scale).all() & torch.isfinite(own.v_scale).all())})
        return Quantized(k, v, own)

    def take(
        self,
        new: Quantized,
        starts: list[int] | None,
        given_scale: torch.Tensor | None,
        max_scale: torch.Tensor | None,
        backend: str,
    ) -> None:
        """In plain torch what `ops.append.append_tokens` does in a kernel."""
        tokens = new.own
        if max_scale is not None:
            largest = torch.stack((tokens.k_scale.amax(-1), tokens.v_scale.amax(-1)), -1)
            torch.maximum(max_scale, largest, out=max_scale)
        if given_scale is not None:
            tokens = on_scale(new.k, new.v, tokens, given_scale, backend)
        self.append(tokens, starts)

    def first_block(self, rows: torch.Tensor | slice, block: int) -> Tokens:
        """The oldest `block` tokens of `rows`."""
        k, v = self.k[rows, :, :block], self.v[rows, :, :, :block].mT
        return Tokens(k, self.k_scale[rows, :, :block], v, self.v_scale[rows, :, :block])

    def ranked_heads(self, rows: torch.Tensor | slice, config: TurboConfig) -> torch.Tensor:
        """Heads of `rows`, ranked by their first block, the one that needs its bits most first, int64 [rows, H]."""
        k, k_scale, v, v_scale = self.first_block(rows, config.block_size)
        keys = k * k_scale[..., None]
        # the metrics look at channels
        keys = unrotate_keys(keys, config.backend) if config.rotates else keys
        score = head_scores(keys, v * v_scale[..., None], config.head_metric)
        return score.argsort(dim=-1, descending=True, stable=True)

    def reorder(self, row: int, first: int, order: torch.Tensor) -> None:
        """Tokens of a row from slot `first` on: to each place the token `order` says, int64 [H, n], from `first` on."""
        own = slice(first, first + order.shape[1])
        # a head at a time, as a prompt may be long
        for head, at in enumerate(order):
            self.k[row, head, own] = self.k[row, head, own][at]
            self.v[row, head, :, own] = self.v[row, head, :, own][:, at]
            self.k_scale[row, head, own] = self.k_scale[row, head, own][at]
            self.v_scale[row, head, own] = self.v_scale[row, head, own][at]

    def drop_front(self, counts: list[int]) -> None:
        """Drop the oldest `counts[row]` tokens of each row, and release the memory."""
        self.length = [held - count for held, count in zip(self.length, counts, strict=True)]
        self._device_length = None
        self._resize(max(self.length), counts)

    def drop_back(self, counts: list[int]) -> None:
        """Drop the newest `counts[row]` tokens of each row."""
        self.length = [held - count for held, count in zip(self.length, counts, strict=True)]
        self._device_length = None

    def select_rows(self, rows: torch.Tensor) -> None:
        """Row i becomes what row `rows[i]` was."""
        self.length = [self.length[row] for row in rows.tolist()]
        self._device_length = None
        index = rows.to(self.k.device)
        self.k, self.v = self.k[index], self.v[index]
        self.k_scale, self.v_scale = self.k_scale[index], self.v_scale[index]

    def _resize(self, tokens: int, skip: list[int]) -> None:
        """Room for `tokens` a row, rounded up to the grain; row r begins at its old slot `skip[r]`."""
        capacity, even = _rounded(tokens), len(set(skip)) == 1
        kept = min(capacity, self.capacity - skip[0] * even) if max(self.length) else 0
        slot = None
        if not even:
            slot = shared(skip, self.k.device)[:, None] + torch.arange(kept, device=self.k.device)
            slot = slot.clamp(max=self.capacity - 1)[:, None]
        grown = []
        for x, dim in ((self.k, 2), (self.v, 3), (self.k_scale, 2), (self.v_scale, 2)):
            shape = list(x.shape)
            shape[dim] = capacity
            if not kept:
                grown.append(x.new_empty(shape))
                continue
            if slot is None:
                old = x.narrow(dim, skip[0], kept)
            else:
                pick = {(2, 4): slot[..., None], (3, 4): slot[:, :, None], (2, 3): slot}[dim, x.dim()]
                old = torch.take_along_dim(x, pick, dim)
            if kept < capacity:
                grown.append(x.new_empty(shape))
                grown[-1].narrow(dim, 0, kept).copy_(old)
            else:
                grown.append(old.clone(memory_format=torch.contiguous_format))
        self.k, self.v, self.k_scale, self.v_scale = grown
