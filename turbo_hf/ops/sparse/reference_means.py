"""Which sealed blocks a sparse step reads by the mean keys of their pages, in plain torch."""

import math

import torch

from turbo_hf.layout import NOTED_UNIT, AlwaysRead, ByMeans, KVStore, Scoring

DEEPEST = 24.0
"""Blocks of less than 2^-24 of the largest block's mass count as nothing."""

HALVINGS = 12
"""Steps by which the cut is found: to 0.006 in log2. What is that little below the exact cut is read, too."""


def reference_read_blocks(
    q: torch.Tensor, store: KVStore, scoring: Scoring, rule: ByMeans, always: AlwaysRead, place: torch.Tensor
) -> torch.Tensor:
    """bool [B, Hkv, M, blocks]: the sealed blocks that the queries of each KV head read.

    q: [B, Hq, M, D]. place: int64 [B, M], of each query in its row; -1: padding. The rest as in
    `ops.sparse.decode.sparse_decode`. Past a row's end nothing is read.

    A query's score of a block estimates the logarithm of the mean of the exponentials of its keys' scores: as if these
    were normally distributed around that of the mean key, with the spread of the page in every direction. The softmax
    runs over the sealed blocks that the query sees whole.
    """
    assert store.means is not None
    block, blocks = store.block, store.table.shape[1]
    if rule.noted is not None:
        rule.noted[1] += (place >= 0).sum() * q.shape[1]
    if not blocks:
        return torch.zeros(*store.order.shape, q.shape[2], 0, dtype=torch.bool, device=q.device)
    seen = place[:, None, :, None] + 1
    closed = (store.sealed * block)[:, None, None, None].expand_as(seen)
    sealed = torch.minimum(closed, seen)
    recent = torch.minimum(seen - always.window_tokens, sealed).clamp(min=0)
    begin = -(-recent.clamp(max=always.sink_tokens) // block)
    n = torch.arange(blocks, device=q.device)
    forced = (n < begin) | (n >= torch.maximum(recent // block, begin))
    there, whole = n * block < sealed, n < sealed // block
    x = _scores(q, store, scoring).masked_fill(~whole[:, :, None], -torch.inf)
    # [B, Hkv, G, M, blocks], in log2
    x = x - x.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    p = torch.where(x > -DEEPEST, torch.exp2(x), 0.0)
    total = p.sum(-1, keepdim=True)
    left = rule.left if rule.left_by_head is None else rule.left_by_head[:, :, None, None, None]
    low, high = torch.full_like(total, -DEEPEST), torch.ones_like(total)
    for _ in range(HALVINGS):
        middle = (low + high) * 0.5
        covered = torch.where(forced[:, :, None] | (p >= torch.exp2(middle)), p, 0.0).sum(-1, keepdim=True)
        enough = covered >= total * (1 - left)
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    # what is not a number is read
    wanted = ((x.isnan() | ~(p < torch.exp2(low))) & whole[:, :, None]).any(2)
    if rule.left_by_head is not None:
        wanted = wanted | (rule.left_by_head[:, :, None, None] <= 0)
    read = (forced | wanted) & there
    if rule.noted is not None:
        share = 1 - torch.where(read[:, :, None], p, 0.0).sum(-1) / total[..., 0].clamp(min=1e-30)
        share = share.nan_to_num(0.0).clamp(min=0).masked_fill((total[..., 0] == 0) | (seen[:, :, None, :, 0] == 0), 0)
        rule.noted[0] += (share * NOTED_UNIT + 0.5).long().sum()
    return read


def _scores(q: torch.Tensor, store: KVStore, scoring: Scoring) -> torch.Tensor:
    """[B, Hkv, G, M, blocks], in log2: of each entry of the table."""
    assert store.means is not None
    wide = torch.promote_types(q.dtype, torch.float32)
    page, heads = store.table.flatten(), store.order.shape[1]
    mean, scale = (x.index_select(0, page).unflatten(0, store.table.shape).transpose(1, 2) for x in store.means)
    slot = store.order.argsort(-1)
    mean = torch.take_along_dim(mean, slot[..., None, None], 1).to(wide)
    unit, spread = torch.take_along_dim(scale, slot[..., None, None], 1)[:, :, None, None].to(wide).unbind(-1)
    grouped = q.to(wide).unflatten(1, (heads, -1))
    x = grouped @ mean[:, :, None].mT * (unit * scoring.scaling)
    # the mean of exponentials of b normal scores: beyond the root of 2 ln b, by the largest of them alone
    deviation, most = grouped.norm(dim=-1, keepdim=True) * (spread * scoring.scaling), math.log(store.block)
    x = x + torch.where(
        deviation < (2 * most) ** 0.5, deviation * deviation * 0.5, deviation * (2 * most) ** 0.5 - most
    )
    if scoring.softcap is not None:
        x = scoring.softcap * torch.tanh(x / scoring.softcap)
    scores: torch.Tensor = x * math.log2(math.e)
    return scores
