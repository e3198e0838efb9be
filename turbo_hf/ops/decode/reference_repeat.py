"""`reference_decode` of one token per row, repeated over the same store: the same bits in fewer operations."""

import torch

from turbo_hf.layout import QUERY_MAX, UNQUANTIZED, KVStore, Scoring
from turbo_hf.ops.decode.reference_products import StoredProducts
from turbo_hf.ops.maths import counted
from turbo_hf.ops.reference_flash import rounded, sas_exp


class RepeatedDecode:
    """What `reference_flash` computes, where no new token is padding and every key is a code.

    Args:
        store: one layer's cache, its open tokens in INT8.
        scoring: of every step, but for the SAS threshold.
        window: tokens that a query sees; None: all.
    """

    def __init__(self, store: KVStore, scoring: Scoring, window: int | None):
        self._store, self._scoring, self._window = store, scoring, window
        self._products = StoredProducts(store, torch.float32)
        batch, heads, _, _ = store.k_open.shape
        self._shape = batch, heads, -1, 1
        self._place = torch.arange(self._products.opened, device=store.k_open.device)
        sealed = store.sealed.tolist()
        # then only places in the open buffer may hold no token that is seen
        self._open_alone = window is None and sealed.count(sealed[0]) == batch
        # then each tile holds a token that is seen
        self._seen = self._open_alone and self._products.opened == store.block
        self._top: torch.Tensor | None = None
        # torch makes a tensor of a number in each operation that takes one
        self._zero, self._one, self._scaling = (
            torch.tensor(number, dtype=torch.float32, device=store.k_open.device)
            for number in (0.0, 1.0, scoring.scaling)
        )

    def __call__(self, q: torch.Tensor, threshold: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Repeat.decode`. q: float [B, Hq, 1, D], in 32 bit at most."""
        scoring, store, products = self._scoring, self._store, self._products
        x = q.float()
        largest = counted(x.abs().amax(-1))
        if self._top is None or self._top.shape != largest.shape:
            self._top = torch.full_like(largest, QUERY_MAX)
        inverse = self._top / torch.where(largest > self._zero, largest, self._one)
        codes = x.double().mul_(inverse[..., None]).round_().float().view(*self._shape[:3], q.shape[-1])
        q_scale = (largest / self._top * self._scaling).view(self._shape)
        scales = products.scales()
        if self._open_alone:
            hidden = (self._place >= store.open_len[:, None])[:, None]
            scales[..., -self._place.shape[0] :].masked_fill_(hidden, 0.0)
        else:
            place = products.place()
            hidden = (place < 0)[:, None]
            scales.masked_fill_(hidden, 0.0)
            if self._window is not None:
                newest = (store.sealed * store.block + store.open_len)[:, None] - 1
                hidden = hidden | (place <= newest - self._window)[:, None]
        k_scale, v_scale = scales.unbind()
        score = products.scores(codes).mul_(q_scale * k_scale[:, :, None])
        if scoring.softcap is not None:
            score = scoring.softcap * torch.tanh(score / scoring.softcap)
        score[..., -hidden.shape[-1] :].masked_fill_(hidden[:, :, None], -torch.inf)
        score = score.view(*score.shape[:3], -1, store.block)
        own = score.amax(-1)
        # finite also where a query sees no key of a tile: its P is 0 whatever is subtracted
        finite = own if self._seen else own.clamp(min=torch.finfo(own.dtype).min)
        shifted = score.sub_(finite[..., None])
        p = shifted.exp_() if threshold is None else sas_exp(shifted, threshold)
        top = own.amax(-1)
        moves = torch.exp(own - top[..., None])
        total = (p.sum(-1) * moves).sum(-1)
        weight, unit = rounded(p.mul_(v_scale.view(*v_scale.shape[:2], 1, -1, store.block)), torch.int8)
        acc = products.weighted(weight, unit[..., 0] * moves)
        if scoring.sinks is not None:
            sink = scoring.sinks.to(top.dtype).view(1, *self._shape[1:3])
            above = torch.maximum(top, sink)
            kept = torch.exp(top - above)
            total, acc, top = total * kept + torch.exp(sink - above), acc * kept[..., None], above
        out = (acc / total[..., None]).view(q.shape)
        return out.to(q.dtype), (top + torch.log(total)).view(q.shape[:3])


def repeated_decode(
    q: torch.Tensor, store: KVStore, scoring: Scoring, window: int | None, mode: str
) -> RepeatedDecode | None:
    """What repeats a step over this store; None where this one is computed in another way."""
    codes_alone = store.k_open.dtype == torch.int8 and all(pages.bits != UNQUANTIZED for pages in store.paged)
    plain = q.shape[2] == 1 and q.dtype != torch.float64 and mode == "turbo"
    # it is written again, perhaps outside of `torch.inference_mode`
    with torch.inference_mode(False), torch.no_grad():
        return RepeatedDecode(store, scoring, window) if plain and codes_alone else None
