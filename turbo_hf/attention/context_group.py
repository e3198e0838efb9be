"""Attention where the blocks of one context are spread over the ranks of a group.

Each rank attends to its own blocks, one of them to the open tokens and to a chunk's own too. Outputs over parts of the
keys are merged by their log-sum-exp: with all parts' outputs o and log-sum-exps l, the whole is sum(softmax(l) o), what
ring attention computes part by part.
"""

import torch

from turbo_hf.cache.context_group import ContextRanks
from turbo_hf.layout import AttentionOutput, KVStore, Scoring, power_of_two
from turbo_hf.ops.decode.contract import decode


def own_part(context: ContextRanks, store: KVStore, scoring: Scoring) -> tuple[KVStore, Scoring]:
    """What this rank attends to, and how: open tokens and sinks count once."""
    if context.counts_open:
        return store, scoring
    return store._replace(open_len=torch.zeros_like(store.open_len)), scoring._replace(sinks=None)


def decode_parts(
    context: ContextRanks,
    q: torch.Tensor,
    store: KVStore,
    scoring: Scoring,
    *,
    starts: torch.Tensor | None,
    mode: str,
    backend: str,
) -> torch.Tensor:
    """`ops.decode.contract.decode` over the blocks of all ranks: out [B, Hq, M, D], the same bits on each."""
    store, scoring = own_part(context, store, scoring)
    if context.counts_open:
        return merged(context, decode(q, store, scoring, starts=starts, mode=mode, backend=backend), starts)
    # All new tokens are open, so that each query sees every sealed token: queries become heads, which have no order.
    # Rounded up, as a kernel is compiled for each number of them.
    tokens = q.shape[2]
    wide = q if tokens == 1 else torch.nn.functional.pad(q, (0, 0, 0, power_of_two(tokens) - tokens))
    out, lse = decode(wide.reshape(q.shape[0], -1, 1, q.shape[3]), store, scoring, mode=mode, backend=backend)
    out, lse = out.reshape(wide.shape), lse.reshape(wide.shape[:3])
    return merged(context, AttentionOutput(out[:, :, :tokens], lse[:, :, :tokens]), starts)


def merged(context: ContextRanks, part: AttentionOutput, starts: torch.Tensor | None) -> torch.Tensor:
    """The outputs of all ranks' parts as one, [B, Hq, M, D]; 0 before `starts`. One exchange."""
    # in the wider type of both
    each = context.gathered(torch.cat((part.out, part.lse[..., None]), -1))
    out, lse = each[..., :-1], each[..., -1:]
    whole = out.mul_(lse.softmax(0)).sum(0).to(part.out.dtype)
    if starts is None:
        return whole
    padding = torch.arange(whole.shape[2], device=whole.device) < starts[:, None]
    # no rank has seen a key there
    return whole.masked_fill(padding[:, None, :, None], 0.0)
