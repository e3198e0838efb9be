"""Queries, keys and values of a running model, also as they were before rotary embedding, and what a run keeps of them.

Everything uses Transformers' AttentionInterface and hooks on modules of the given instance, and is undone afterwards.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from turbo_hf.attention.masks import turbo_mask
from turbo_hf.attention.registration import switch_attention
from turbo_hf.attention.turbo_attention import NAME as PATCHED
from turbo_hf.attention.turbo_attention import TurboCall, turbo_attention
from turbo_hf.calibration.settings import Settings
from turbo_hf.layout import Rotary
from turbo_hf.models.model_layers import kv_heads
from turbo_hf.ops.host_device import input_device
from turbo_hf.patches.layers import AttentionLayer, attention_layers
from turbo_hf.ranks import Ranks, ranks_of, split_layers
from turbo_hf.sparse.undo_rotary import undo_rotary

NAME = "turbo_hf_capture"
PROBE_TOKENS, PROBE_SHIFT = 24, 777
PROBE_ERROR = 0.2
"""Relative error at which keys of two passes differ: rounding stays far below it, a wrong inverse far above."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one call of attention saw. query [1, Hq, L, D]; key, value [1, Hkv, L, D], after rotary embedding."""

    source: AttentionLayer
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rotary: Rotary | None
    scaling: float
    softcap: float | None


@contextmanager
def capturing(model: PreTrainedModel, receive: Callable[[Seen], None]) -> Iterator[None]:
    """While active, `receive` gets what each attention layer sees, in layer order: on each rank the heads of all.

    Raises:
        ValueError: the model is patched, or does not let its attention implementation be set.
    """
    if model.config.get_text_config(decoder=True)._attn_implementation == PATCHED:
        raise ValueError("This model is patched. Call remove() on its handle, calibrate, and patch it again.")
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, turbo_mask)
    sources, ranks = attention_layers(model), ranks_of(model)
    heads = {at.index: (at.module, kv_heads(at.module.config, at.index)) for at in sources if not at.reason}
    receive = functools.partial(_join, ranks, split_layers(model, ranks, heads), receive)
    previous, hooks = switch_attention(model, NAME), []
    try:
        for source in sources:
            if not source.reason:
                hook = functools.partial(_bring, source, receive)
                hooks.append(source.module.register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for held in hooks:
            held.remove()
        model.set_attn_implementation(previous)


def _join(ranks: Ranks, split: frozenset[int], receive: Callable[[Seen], None], seen: Seen) -> None:
    if seen.source.index in split:
        q, k, v = (ranks.joined(x) for x in (seen.query, seen.key, seen.value))
        seen = replace(seen, query=q, key=k, value=v)
    receive(seen)


def _bring(source: AttentionLayer, receive: Any, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {**kwargs, "turbo_capture": (source, receive, kwargs.get("position_embeddings"))}


def _attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, turbo_capture: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Transformers' own attention, which also reports its inputs."""
    window = kwargs.get("sliding_window")
    if turbo_capture is not None:
        source, receive, rotary = turbo_capture
        window = source.window
        scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        receive(Seen(source, query, key, value, rotary, scaling, kwargs.get("softcap")))
    kwargs["turbo"] = TurboCall(None, None, window, "raise")
    return turbo_attention(module, query, key, value, mask, **kwargs)


@torch.no_grad()
def run_window(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor | None = None) -> None:
    """One pass over tokens [1, L] without a cache and, if it is a separate module, without the language head."""
    body: Any = model.base_model
    device = input_device(model)
    given = {} if positions is None else {"position_ids": positions.to(device)}
    body(input_ids=ids.to(device), use_cache=False, **given)


def probe(model: PreTrainedModel) -> dict[int, tuple[tuple[int, int, int], str | None]]:
    """(KV heads, query heads per KV head, head dim) of each layer that can be captured, and why its keys before rotary
    embedding are unavailable; None: they are available.

    Rotary embedding is relative: a text gives the same activations wherever it begins. Therefore the same tokens are
    run at two starting positions; the keys must differ as they are, and agree after the inverse rotation.
    """
    config = model.config.get_text_config(decoder=True)
    seeded = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, PROBE_TOKENS), generator=seeded)
    passes: list[dict[int, Seen]] = [{}, {}]
    limit = getattr(config, "max_position_embeddings", None) or 2048
    shift = min(PROBE_SHIFT, max(1, limit - PROBE_TOKENS - 1))
    for begin, seen in zip((0, shift), passes, strict=True):
        with capturing(model, functools.partial(_keep, seen)):
            run_window(model, ids, torch.arange(begin, begin + PROBE_TOKENS)[None])
    found = {}
    for index, first in passes[0].items():
        check_finite(first)
        heads, dim = first.key.shape[1], first.key.shape[3]
        found[index] = (heads, first.query.shape[1] // heads, dim), _compare(first, passes[1][index])
    return found


def check_finite(seen: Seen) -> None:
    """ValueError: queries, keys or values of a layer hold NaN or Inf."""
    for name, x in (("queries", seen.query), ("keys", seen.key), ("values", seen.value)):
        if not bool(torch.isfinite(x).all()):
            raise ValueError(
                f"layer {seen.source.index}: {name} hold NaN or Inf, from which no calibration can be made. Look for "
                "the cause in the model (overflow in float16 is the usual one: load it in bfloat16)."
            )


def _keep(seen: dict[int, Seen], call: Seen) -> None:
    seen[call.source.index] = call


def _compare(first: Seen, second: Seen) -> str | None:
    if first.rotary is None or second.rotary is None or not isinstance(first.rotary, tuple):
        return "it has no rotary embedding"
    try:
        keys = [undo_rotary(call.source.module, call.key, call.rotary) for call in (first, second) if call.rotary]
    except (AttributeError, TypeError, RuntimeError, IndexError) as error:
        return f"its rotary embedding cannot be undone ({type(error).__name__})"
    missed = _differ(*keys)
    if missed < PROBE_ERROR:
        return None
    if _differ(first.key.float(), second.key.float()) < PROBE_ERROR:
        return "it has no rotary embedding"
    return f"the inverse of its rotary embedding fails the probe (relative error {missed:.2f})"


def _differ(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / a.norm().clamp(min=torch.finfo(torch.float32).tiny))


@dataclass(slots=True)
class Samples:
    """Keys and sampled queries of one layer, a list item per window, on the CPU in the model's dtype.

    Of a model on a GPU they are in pinned memory, from which training reads without waiting.

    scaling, softcap: of the scores.
    device: where the layer computes, and its index is made.
    pre_rotary_keys, keys: [Hkv, L, D] before and after rotary embedding.
    pre_rotary_queries, queries: [Hkv, G, n, D], grouped by the KV head that they read.
    positions: int64 [n].
    far: bool [Hkv, G, n], true where the best key is long ago.
    """

    scaling: float
    softcap: float | None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pre_rotary_keys: list[torch.Tensor] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)
    pre_rotary_queries: list[torch.Tensor] = field(default_factory=list)
    queries: list[torch.Tensor] = field(default_factory=list)
    positions: list[torch.Tensor] = field(default_factory=list)
    far: list[torch.Tensor] = field(default_factory=list)

    def add(self, seen: Seen, settings: Settings, window: int) -> None:
        """Keep what one call saw of window number `window`. Positions depend only on the seed and the window."""
        assert seen.rotary is not None
        length, heads = seen.key.shape[2], seen.key.shape[1]
        seeded = torch.Generator().manual_seed(settings.seed * 1_000_003 + window)
        first = settings.first_query
        chosen = torch.randperm(length - first, generator=seeded)[: settings.queries].sort().values + first
        shape, dtype = (heads, seen.query.shape[1] // heads), seen.key.dtype
        query = seen.query[:, :, chosen.to(seen.query.device)]
        rotary = tuple(part[:, chosen.to(part.device)] for part in seen.rotary)
        pre_rotary_query = undo_rotary(seen.source.module, query, (rotary[0], rotary[1]))[0].unflatten(0, shape)
        pre_rotary_key = undo_rotary(seen.source.module, seen.key, seen.rotary)[0]
        query = query[0].unflatten(0, shape)
        far = self._is_far(query, seen.key[0], chosen.to(seen.key.device), settings.far)
        self.positions.append(chosen)
        self.pre_rotary_keys.append(_kept(pre_rotary_key.to(dtype)))
        self.keys.append(_kept(seen.key[0]))
        self.pre_rotary_queries.append(_kept(pre_rotary_query.to(dtype)))
        self.queries.append(_kept(query))
        self.far.append(_kept(far))
        if seen.key.is_cuda:
            torch.cuda.current_stream(seen.key.device).synchronize()

    def _is_far(self, query: torch.Tensor, key: torch.Tensor, at: torch.Tensor, far: int) -> torch.Tensor:
        """SAAP sec. 5: whether a query's best key, the sink aside, is more than `far` tokens away. bool [Hkv, G, n]."""
        token, wide = torch.arange(key.shape[1], device=key.device), key.float().mT
        best = []
        for q, position in zip(query.float().split(64, 2), at.split(64), strict=True):
            score = torch.bmm(q.flatten(1, 2), wide).unflatten(1, q.shape[1:3])
            visible = (token <= position[:, None]) & (token > 0)
            best.append(position - score.masked_fill_(~visible, -torch.inf).argmax(-1))
        return torch.cat(best, -1) > far


def _kept(x: torch.Tensor) -> torch.Tensor:
    """x on the CPU; from a GPU on its way to pinned memory."""
    return x.to("cpu", non_blocking=x.is_cuda)


def long_range(
    query: torch.Tensor,
    position: torch.Tensor,
    key: torch.Tensor,
    local: int,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of long-range pairs alone (SAAP eq. 1, A); `bucket_sums` makes the mass by bucket of it, A H_k.

    Args:
        query: [N, R, D] after rotary embedding, of N KV heads; position: int64 [N, R].
        key: [N, L, D] after rotary embedding.
        local: only keys further back than this many tokens count, and not the first token (the sink).
        scaling, softcap: of the scores.

    Returns:
        float32 [N, R, L], rows that sum to 1, and which keys count, bool [N, R, L].
    """
    score = torch.bmm(query.float(), key.float().mT).mul_(scaling)
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    token = torch.arange(key.shape[1], device=key.device)
    counts = (token > 0) & (position[..., None] - token > local)
    return score.masked_fill_(~counts, -torch.inf).softmax(-1), counts


LARGEST = 2.0**10
"""What halves are multiplied with where they hold shares of 1: those below 6e-5 keep their digits."""


def bucket_sums(shares: Iterable[torch.Tensor], buckets: torch.Tensor, clusters: int) -> list[torch.Tensor]:
    """Each of `shares` [N, R, L], numbers from 0 to 1, summed over the tokens of each bucket: float32 [N, R, C].

    The same bits each time on one device. On a GPU shares are rounded to 11 bits.
    """
    if not buckets.is_cuda:
        return [
            x.new_zeros(*x.shape[:2], clusters, dtype=torch.float32).scatter_add_(
                2, buckets[:, None].expand_as(x), x.float()
            )
            for x in shares
        ]
    # scatter_add on CUDA adds in any order, and products in float32 take most of the time of training
    member = (buckets[..., None] == torch.arange(clusters, device=buckets.device)).half()
    return [torch.bmm((x * LARGEST).half(), member, out_dtype=torch.float32) / LARGEST for x in shares]
