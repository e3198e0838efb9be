"""The one attention function that a patched model calls, and the view of the cache that each call gets."""

import functools
import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from turbo_hf.attention.full_precision import decompressed, full_precision_attention, hf_attention
from turbo_hf.attention.indexed import Named, attend_named, named_by
from turbo_hf.attention.latent import absorbed_attention, require_plain, up_projections
from turbo_hf.attention.prompt import attend_prompt
from turbo_hf.attention.sparse_step import Source, attend_sparse, new_buckets_and_logits
from turbo_hf.cache.index_keys import store_index_keys
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.pass_mark import untraced
from turbo_hf.cache.rows import NewColumns, NewQKV
from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.errors import Strict, Unsupported, complain, warn
from turbo_hf.layout import Rotary, Scoring, power_of_two, rotary_part
from turbo_hf.patches.latent import expanded, keeps_latent

NAME = "turbo_hf"
"""The value of `config._attn_implementation` on a patched model."""

HANDED_ON = frozenset({"tokenizer", "assistant_tokenizer"})
"""Keywords of `generate` that Transformers passes on to each forward pass, where nothing reads them."""

HARMLESS = HANDED_ON | frozenset(
    {
        "position_ids",
        "cache_position",
        "token_type_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
        "labels",
        "num_items_in_batch",
    }
)
"""Keywords that pass through a model to its attention and change nothing there."""

PACKED_KEYWORDS = frozenset(
    {
        "cache",
        "block_table",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "logits_indices",
        "logits_processor_args",
        "max_length_k",
        "max_length_q",
        "read_index",
        "write_index",
    }
)
"""Keywords that Transformers' continuous batching passes to attention; the cache knows all of it from the host."""

NO_WEIGHTS = (
    "turbo_hf: output_attentions=True: attention over a compressed cache gives no weights, so that `attentions` stays "
    'empty. For weights remove the patch and load the model with attn_implementation="eager".'
)


_told: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""Configs, by id, of unpatched models for which the warning was issued."""


SHORT = 1024
"""Tokens up to which the default threshold of SAS is the same."""


class PackedCache:
    """A cache that attends for all requests of a pass."""

    @abstractmethod
    def attend(self, module: Any, qkv: NewQKV, scoring: Scoring, window: int | None) -> torch.Tensor:
        """Store the new tokens of the pass and attend. qkv: [1, Hq, T, D] and [1, Hkv, T, D], all requests of the pass
        one after the other; of latent attention [1, H, T, nope + R], latents [1, 1, T, rank] and rotary parts
        [1, 1, T, R]. Returns [1, Hq, T, D], or [1, H, T, Dv]. module: the attention module, of the layer
        `layer_idx`."""


class ClaimedCache(TurboCache):
    """A TurboCache as one call of a patched model's attention module sees it: `update` of the claimed layer passes the
    new tokens on to the attention function, which stores them.

    All else is the cache's own: both have one `__dict__`. The claim is not part of it, so that it ends with the call,
    wherever that breaks off: no later `update` of the cache finds it. `claimed` makes one.

    Attributes:
        claims: the index of the claimed layer, until its `update`.
        given: the keys and values that this `update` has returned.
    """

    __slots__ = ("claims", "given")
    claims: int | None
    given: tuple[torch.Tensor, torch.Tensor] | None

    @untraced
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new keys and values themselves, once; for other layers, and from then on, as in `TurboCache`."""
        # a copy of a view claims nothing
        if layer_idx == getattr(self, "claims", None):
            self.claims, self.given = None, (key_states, rotary_part(value_states))
            return self.given
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @untraced
    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Store the index keys [B, M, D] of the new tokens of a claimed layer, which attention stores later; returns
        those that the indexer reads (`store_index_keys`)."""
        layer = self.all_layers[layer_idx]
        if getattr(self, "given", None) is None or not isinstance(layer, TurboLayer):
            return super().update_indexer(indexer_key_states, layer_idx)
        return store_index_keys(layer, indexer_key_states, layer.seen)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # a view is pickled as what it shows
        cache: Any = object.__new__(type(self).__bases__[0])
        cache.__dict__ = self.__dict__
        return _itself, (cache,)


def _itself(cache: TurboCache) -> TurboCache:
    return cache


@functools.cache
def _claimed_class(of: type[TurboCache]) -> type[ClaimedCache]:
    """A ClaimedCache that keeps what a subclass of TurboCache overrides."""
    if issubclass(of, ClaimedCache):
        return of
    try:
        return (
            ClaimedCache if of is TurboCache else type(f"Claimed{of.__name__}", (of, ClaimedCache), {"__slots__": ()})
        )
    except TypeError as error:
        raise Unsupported(
            f"{of.__name__} cannot be used here ({error}): derive it from TurboCache without __slots__."
        ) from error


def claimed(cache: TurboCache, layer: int) -> ClaimedCache:
    """The cache as one call of the attention module of a layer sees it."""
    view: ClaimedCache = object.__new__(_claimed_class(type(cache)))  # type: ignore[arg-type]  # a class has a hash
    view.__dict__ = cache.__dict__
    view.claims, view.given = layer, None
    return view


class TurboCall(NamedTuple):
    """What the hook adds to one call of an attention module, as the keyword `turbo`.

    Args:
        cache, layer: where the call stores its tokens, the cache claimed for it; None if the layer is not compressed.
        window: tokens that a query sees; None: all.
        strict: as in `patch`.
        rotary: this call's (cos, sin), for sparse layers.
        mask: of a layer with an indexer, the attention mask in whose place the module was given one for the indexer.
    """

    cache: ClaimedCache | None
    layer: TurboLayer | None
    window: int | None
    strict: Strict
    rotary: Rotary | None = None
    mask: torch.Tensor | None = None


@untraced
def turbo_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    turbo: TurboCall | None = None,
    indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the compressed cache; over full-precision keys and values if there is none.

    query: [B, Hq, M, D]; key, value: [B, Hkv, M, D] with a TurboCache, the new tokens; otherwise all tokens. Returns
    [B, M, Hq, D] and None. Signature: Transformers' AttentionInterface.

    Raises:
        Unsupported: under any `strict`, the model passes a keyword that no attention function here reads; under
            "raise", a call that the compressed cache cannot serve.
    """
    named = None
    if indices is not None:
        named, attention_mask = named_by(indices, attention_mask), None if turbo is None else turbo.mask
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if turbo is None:
        _say_unpatched(module)
    call = TurboCall(None, None, sliding_window, "raise") if turbo is None else turbo
    unknown = [name for name in kwargs.keys() - HARMLESS if kwargs[name] is not None]
    packed = kwargs.get("cache")
    if isinstance(packed, PackedCache):
        # Transformers says is_causal=True here to attention without a mask
        layer: Any = module.layer_idx
        reason = _refusal(None, causal, {*unknown} - PACKED_KEYWORDS)
        if reason is not None:
            raise Unsupported(f"layer {layer}: {reason}")
        qkv, scoring = _of_one_type(NewQKV(query, key, value)), Scoring(scale, softcap, s_aux)
        out = _without_autocast(query.device, packed.attend, module, qkv, scoring, call.window)
        return out.transpose(1, 2).contiguous(), None
    options = {"dropout": dropout, "softcap": softcap, "s_aux": s_aux, "scaling": scale}
    if call.cache is not None and call.layer is not None:
        if kwargs.get("output_attentions"):
            warn(NO_WEIGHTS)
        reason = _refusal(attention_mask, causal, unknown)
        if reason is not None:
            complain(call.strict, f"layer {call.layer.index}: {reason}")
            # before anything is stored
            hf_attention(module, options, unknown)
        _require_unchanged(call.cache, call.layer, key, value)
        if reason is None:
            qkv, scoring = _of_one_type(NewQKV(query, key, value)), Scoring(scale, softcap, s_aux)
            to = (call.cache, call.layer, Source(module, call.rotary))
            done = _without_autocast(query.device, compressed, *to, qkv, attention_mask, scoring, named)
            return done.transpose(1, 2).contiguous(), None
        key, value = decompressed(call.cache, call.layer, query, key, value, attention_mask)
    if keeps_latent(module):
        key, value = expanded(module, key, value)
    function = hf_attention(module, options, unknown)
    attention_mask = attention_mask if named is None else named.mask()
    given = (query, key, value, attention_mask, call.window, causal)
    return full_precision_attention(function, module, *given, options, kwargs), None


def left_alone(module: Any, args: Any) -> None:
    """Forward pre-hook of a patched model's attention modules that store to no cache."""


def _say_unpatched(module: Any) -> None:
    """Warn, once per config, if this attention runs in a model without a patch."""
    config = getattr(module, "config", None)
    if config is None or left_alone in module._forward_pre_hooks.values() or id(config) in _told:
        return
    _told[id(config)] = config
    warn(
        f'turbo_hf: attn_implementation="{NAME}" has been set on a model without a patch: nothing is compressed, and '
        "its attention is Hugging Face's. Call turbo_hf.patch(model), or model.set_attn_implementation with another."
    )


def _refusal(mask: torch.Tensor | None, causal: bool, unknown: Collection[str]) -> str | None:
    """Why this call cannot run on the compressed cache; None if it can."""
    if unknown:
        return (
            f"the model passes {', '.join(sorted(unknown))} to its attention, which the compressed cache does not "
            "know. Generate without it, or without the patch."
        )
    if not causal:
        return "attention is not causal here. Run this model without the patch."
    if mask is not None and mask.dim() != 2:
        return (
            "the attention mask is no causal or sliding-window mask (packed sequences, prefix or image blocks, chunks, "
            'or a 4D mask). Pass a 2D mask [batch, tokens], or patch with strict="warn", which computes such calls in '
            "full precision."
        )
    return None


def _require_unchanged(cache: ClaimedCache, layer: TurboLayer, key: torch.Tensor, value: torch.Tensor) -> None:
    """Unsupported unless the new keys and values are the very tensors that the cache was given."""
    given, cache.given = cache.given, None
    if given is None or given[0] is not key or given[1] is not value:
        raise Unsupported(
            f"layer {layer.index}: this attention class changes keys or values after the cache has seen them, so its "
            "cache cannot be compressed. Run this model without the patch."
        )


def _of_one_type(qkv: NewQKV) -> NewQKV:
    """Q, K and V in one dtype. Under autocast, rotary embedding leaves float32: all take autocast's dtype."""
    if qkv.query.dtype == qkv.key.dtype == qkv.value.dtype:
        return qkv
    device = qkv.query.device.type
    if not torch.is_autocast_enabled(device):
        return qkv
    narrow = torch.get_autocast_dtype(device)
    return NewQKV(*(x.to(narrow) for x in qkv))


def _without_autocast(device: torch.device, attend: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
    """`attend(*given)`: products of codes, sums of whole numbers up to a million, are neither exact nor finite in
    autocast's types."""
    if not torch.is_autocast_enabled(device.type):
        return attend(*given)
    with torch.autocast(device.type, enabled=False):
        return attend(*given)


def compressed(
    cache: TurboCache,
    layer: TurboLayer,
    source: Source,
    qkv: NewQKV,
    mask: torch.Tensor | None,
    scoring: Scoring,
    named: Named | None = None,
) -> torch.Tensor:
    """Attention over the compressed cache, which the new tokens join. named: the columns that they read; None: all."""
    rows, _, tokens, _ = qkv.query.shape
    if layer.mark.now is None or not layer.mark.now.stored:
        # the first layer of a pass: before its mask is read
        layer.prepare_for(qkv.key, qkv.value)
    if mask is not None and len(mask) != rows:
        raise ValueError(f"attention_mask has {len(mask)} rows, this pass {rows}. Pass one row for each.")
    new = cache.new_columns(mask, layer, tokens)
    if layer.config.expert.sas:
        scoring = scoring._replace(sas_threshold=sas_threshold(layer.config, layer.seen + tokens))
    if not torch.is_grad_enabled():
        return _attend(cache, layer, source, qkv, new, scoring, named)
    with torch.no_grad():
        out = _attend(cache, layer, source, qkv, new, scoring, named)
    return _NoGradient.apply(qkv.query, out) if qkv.query.requires_grad else out


def _attend(
    cache: TurboCache,
    layer: TurboLayer,
    source: Source,
    qkv: NewQKV,
    new: NewColumns,
    scoring: Scoring,
    named: Named | None,
) -> torch.Tensor:
    """A step or a prompt, over keys and values or over latents."""
    layer.prepare_for(qkv.key, qkv.value)
    layer.seal_leftovers(new.tokens, check_later=True)
    if layer.latent:
        require_plain(layer.index, scoring if named is None else scoring._replace(sinks=None))
    if named is not None:
        return attend_named(cache, layer, source.module, qkv, new, scoring, named)
    if layer.is_decoding(new.tokens):
        out = _step(layer, source, qkv, new, scoring)
    else:
        out = attend_prompt(cache, layer, source, qkv, new, scoring)
    return new.restore(out)


def _step(layer: TurboLayer, source: Source, qkv: NewQKV, new: NewColumns, scoring: Scoring) -> torch.Tensor:
    """The new tokens join the cache, then attention reads it."""
    q, k, v = qkv if new.gather is None else (new.align(x) for x in qkv)
    starts = new.starts_on(q.device)
    if layer.latent:
        up = up_projections(source.module, q.dtype)
        layer.append(k, v, new, check_later=True)
        out = absorbed_attention(layer.ops, up, q, layer.kv_store(), starts, scoring)
    elif layer.selector is not None:
        buckets, logits = new_buckets_and_logits(layer, source, qkv.query, qkv.key, new)
        layer.append(k, v, new, buckets, check_later=True)
        out = attend_sparse(layer, logits, qkv.query, new, starts, scoring).out
    else:
        queries = layer.append(k, v, new, check_later=True, queries=q)
        assert queries is not None
        out = layer.ops.decode(queries, layer.kv_store(), scoring, starts=starts, window=layer.window).out
    layer.commit(check_later=True)
    return out


def sas_threshold(config: TurboConfig, tokens: int) -> float | None:
    """SAS threshold for a context of `tokens`; None without SAS.

    The default falls with the length, so that the total dropped stays below its bound at 1,024 tokens: 1024 e^-6 of the
    largest weight. It is that of the next power of two, so that captured steps seldom change.
    """
    if not config.expert.sas or config.expert.sas_threshold is not None:
        return config.expert.sas_threshold
    return _threshold_up_to(power_of_two(max(tokens, SHORT)))


@functools.cache
def _threshold_up_to(tokens: int) -> float:
    """The same object for the same length, by which captured steps know it."""
    return -(6 + math.log(tokens / SHORT))


class _NoGradient(torch.autograd.Function):
    """Quantized attention has no gradient: say so in backward, rather than return a wrong one."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError(
            "turbo_hf: attention over a compressed cache has no gradient. For gradients, call the model without a "
            "TurboCache (use_cache=False) or remove the patch."
        )
