"""`append_tokens` of a step in plain torch, repeated over the same store: the same bits in fewer operations."""

from typing import Any

import torch

from turbo_hf.layout import CODE_MAX, KVStore
from turbo_hf.ops.maths import counted, key_shift, query_shift
from turbo_hf.ops.store.reference_quantize import rounded_up


class RepeatedAppend:
    """Rotates the new keys and queries of a step together, quantizes keys and values together, and appends them.

    Args:
        k: keys of a step, float [B, Hkv, M, D], in 32 bit at most.
        store: one layer's cache with open tokens in INT8, none of them in a given scale.
    """

    def __init__(self, k: torch.Tensor, store: KVStore):
        batch, heads, tokens, dim = k.shape
        self._store, self._heads = store, heads
        how: Any = {"dtype": torch.float32, "device": k.device}
        self._new = torch.empty(2, batch, heads, tokens, dim, **how)
        self._top = torch.full((2, batch, heads, tokens), CODE_MAX, **how)
        self._signs = torch.tensor([[1.0], [-1.0]], **how)
        # torch makes a tensor of a number in each operation that takes one
        numbers = 0.0, 1.0, 2.0 ** -key_shift(dim), 2.0 ** -query_shift(dim)
        self._zero, self._one, self._of_keys, self._of_queries = (torch.tensor(x, **how) for x in numbers)
        # by query heads: buffers for sums and differences, and the views of each level: two halves, and both results
        self._levels: dict[int, tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, ...]]]] = {}

    def __call__(self, k: torch.Tensor, v: torch.Tensor, queries: torch.Tensor | None) -> torch.Tensor | None:
        """As `Repeat.append`: finite tokens, of which the store has room for all; no rotation without queries."""
        store, turned = self._store, None
        if queries is None:
            self._new[0].copy_(k)
        else:
            both = self._rotated(k, queries)
            torch.mul(both[:, : self._heads], self._of_keys, out=self._new[0])
            turned = (both[:, self._heads :] * self._of_queries).to(queries.dtype)
        self._new[1].copy_(v)
        scale = rounded_up(counted(self._new.abs().amax(-1)) / self._top)
        codes = self._new / torch.where(scale > self._zero, scale, self._one)[..., None]
        k_codes, v_codes = codes.round_().clamp_(-CODE_MAX, CODE_MAX).unbind()
        k_scale, v_scale = scale.unbind()
        tokens, held = k.shape[2], store.open_len.tolist()
        alike = held.count(held[0]) == len(held)
        for row, at in [(slice(None), held[0])] if alike else [(slice(n, n + 1), at) for n, at in enumerate(held)]:
            place = slice(at, at + tokens)
            store.k_open[row, :, place] = k_codes[row]
            store.v_open[row, :, :, place] = v_codes[row].mT
            store.k_scale[row, :, place] = k_scale[row]
            store.v_scale[row, :, place] = v_scale[row]
        store.open_len.add_(tokens)
        return turned

    def _rotated(self, k: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Keys and queries [B, Hkv + Hq, M, D] times a matrix of +-1, as `reference_rotate` sums."""
        known = self._levels.get(queries.shape[1])
        if known is None:
            # they are written again, perhaps outside of `torch.inference_mode`
            with torch.inference_mode(False):
                known = self._levels[queries.shape[1]] = _levels(k, self._heads + queries.shape[1])
        first, last, levels = known
        first[:, : self._heads].copy_(k)
        first[:, self._heads :].copy_(queries)
        for a, b, both in levels:
            # a + b and a - b
            torch.addcmul(a, b, self._signs, out=both)
        return last


def _levels(k: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, ...]]]:
    batch, _, tokens, dim = k.shape
    source, target = (torch.empty(batch, heads, tokens, dim, dtype=torch.float32, device=k.device) for _ in range(2))
    first, half = source, (dim & -dim) // 2
    levels: list[tuple[torch.Tensor, ...]] = []
    while half:
        pair, both = (x.unflatten(-1, (-1, 2, half)) for x in (source, target))
        levels.append((pair[..., :1, :], pair[..., 1:, :], both))
        source, target, half = target, source, half // 2
    return first, source, levels


def repeated_append(k: torch.Tensor, store: KVStore, given_scale: torch.Tensor | None) -> RepeatedAppend | None:
    """What repeats a step over this store; None where the tokens of this one are stored in another way."""
    plain = store.k_open.dtype == torch.int8 and store.k_open.shape[3] == store.v_open.shape[2] and given_scale is None
    return RepeatedAppend(k, store) if plain and k.dtype != torch.float64 else None
