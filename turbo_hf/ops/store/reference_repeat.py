"""`append_tokens` of a step in plain torch, repeated over the same store: the same bits in fewer operations."""

from typing import Any

import torch

from turbo_hf.layout import CODE_MAX, KVStore
from turbo_hf.ops.maths import balanced_queries, counted
from turbo_hf.ops.store.reference_quantize import rounded_up


class RepeatedAppend:
    """Balances the new keys and queries of a step, quantizes keys and values together, and appends them.

    Args:
        k: keys of a step, float [B, Hkv, M, D], in 32 bit at most.
        store: one layer's cache with open tokens in INT8, none of them in a given scale.
        balance: float32 [Hkv, D], or None.
    """

    def __init__(self, k: torch.Tensor, store: KVStore, balance: torch.Tensor | None):
        batch, heads, tokens, dim = k.shape
        self._store, self._balance = store, balance
        how: Any = {"dtype": torch.float32, "device": k.device}
        self._new = torch.empty(2, batch, heads, tokens, dim, **how)
        self._top = torch.full((2, batch, heads, tokens), CODE_MAX, **how)
        # torch makes a tensor of a number in each operation that takes one
        self._zero, self._one = (torch.tensor(x, **how) for x in (0.0, 1.0))

    def __call__(self, k: torch.Tensor, v: torch.Tensor, queries: torch.Tensor | None) -> torch.Tensor | None:
        """As `Repeat.append`: finite tokens, of which the store has room for all."""
        store, balance = self._store, self._balance
        if balance is None:
            self._new[0].copy_(k)
        else:
            torch.div(k, balance[:, None], out=self._new[0])
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
        return None if queries is None else balanced_queries(queries, balance)


def repeated_append(
    k: torch.Tensor, store: KVStore, given_scale: torch.Tensor | None, balance: torch.Tensor | None
) -> RepeatedAppend | None:
    """What repeats a step over this store; None where the tokens of this one are stored in another way."""
    plain = store.k_open.dtype == torch.int8 and store.k_open.shape[3] == store.v_open.shape[2] and given_scale is None
    return RepeatedAppend(k, store, balance) if plain and k.dtype != torch.float64 else None
