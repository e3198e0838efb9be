"""One context in one process, or over several: which of them holds which blocks, and that all run the same passes.

A cache and its layers call their `ContextRanks`, given to them when the cache is made: `WHOLE`, or those of a group,
each of which runs the whole model over the same tokens. Block i of a row belongs to rank i modulo their number, which
alone keeps it. Open tokens are on all ranks, and count on the first. `RowState` counts the blocks of all ranks, so that
its numbers are the same on each; `RowState.pages` are the rank's own.

Each rank attends to its own blocks, one of them to the open tokens and to a chunk's own too. With all parts' outputs o
and log-sum-exps l, the whole is sum(softmax(l) o), what ring attention computes part by part.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar
from zlib import crc32

import torch
import torch.distributed as dist

from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.errors import Unsupported
from turbo_hf.layout import AttentionOutput, KVStore, Scoring, power_of_two
from turbo_hf.ops.decode.contract import DecodeOps
from turbo_hf.ops.decode.stream_k import SteadyPlans
from turbo_hf.ops.host_device import shared
from turbo_hf.ops.maths import checksum
from turbo_hf.ranks import ALONE, Ranks, ranks_of

COMPARED = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
"""Arguments of a pass that must be the same on all ranks."""

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 over the golden ratio, as an int64, which mixes bits when multiplied (Fibonacci hashing)."""

OTHER_CACHE = (
    "this TurboCache is not spread over the ranks of the context group that the model was patched with (or the other "
    "way round). Take handle.new_cache(), of this patch."
)


@dataclass(frozen=True, eq=False)
class ContextRanks(Ranks):
    """The ranks over which the blocks of one context are spread; one alone holds all of them, and exchanges nothing.

    sharing: of a tensor parallel model, the ranks that share its heads with this one. Each of them is in a context
        group of its own, and what one group decides, all do.
    """

    sharing: Ranks = ALONE
    shared_by: ClassVar[str] = "this context group"

    @property
    def speaks(self) -> bool:
        """As in `Ranks`."""
        return self.rank == 0 and self.sharing.speaks

    @property
    def processes(self) -> int:
        """As in `Ranks`."""
        return self.count * self.sharing.count

    def most(self, numbers: torch.Tensor) -> torch.Tensor:
        """As in `Ranks`, also of those that share the model."""
        return self.sharing.most(super().most(numbers))

    def texts(self, text: str) -> list[str]:
        """As in `Ranks`, also of those that share the model."""
        own = super().texts(text)
        return [text for each in self.sharing.texts(json.dumps(own)) for text in json.loads(each)]

    def meet(self, note: str = "") -> None:
        """As in `Ranks`, also with those that share the model."""
        self.sharing.meet(", with a context_group")
        super().meet(note)

    def require_same_parts(self, weights: str) -> None:
        """ValueError unless the ranks of the group hold the same weights, and those that share the model the same
        blocks. weights: identifies this rank's."""
        together = dist.get_process_group_ranks(self.group)
        shared = dist.get_process_group_ranks(self.sharing.group) if self.sharing else []
        if len({*together} & {*shared}) > 1:
            raise ValueError(
                f"context_group: its ranks {together} share the heads of this model ({shared}). Pass a group of the "
                "ranks that hold the same heads."
            )
        self.sharing.require_same({"place in context_group": f"{self.rank} of {self.count}"})
        replace(self, sharing=ALONE).require_same({"weights": weights})

    def __reduce__(self) -> Any:
        if not self:
            return "WHOLE"
        raise Unsupported(
            "a model or cache of a context group is not pickled: each rank holds only its own blocks. Pickle a model "
            "before it is patched."
        )

    @property
    def counts_open(self) -> bool:
        """Whether attention to the open tokens, and to a chunk's own, is this rank's part."""
        return self.rank == 0

    def own(self, blocks: int) -> int:
        """How many of the first `blocks` blocks of a row are this rank's."""
        return (blocks + self.count - 1 - self.rank) // self.count

    def holds(self, block: int) -> bool:
        """Whether a block of a row is this rank's."""
        return block % self.count == self.rank

    def pages(self, sealed: list[int]) -> list[int]:
        """`own` of each row."""
        return [self.own(blocks) for blocks in sealed]

    def pages_of_all(self, pages: int, sealed: Sequence[int]) -> int:
        """A number of pages that is the same on all ranks: `pages`, those of this one's pool, or all `sealed` ones."""
        return sum(sealed) if self else pages

    def new_plans(self) -> dict[Any, Any]:
        """Where captured steps keep their plans. Plans that move would move on one rank and not on another."""
        return SteadyPlans() if self else {}

    def own_blocks(self, store: KVStore, before: Sequence[int], whole: Sequence[int]) -> tuple[KVStore, int]:
        """The store with the open tokens of this rank's blocks alone, as `seal_open` takes it; and the most of a row.

        before: blocks of each row before these. whole: whole blocks of open tokens of each row.
        """
        first = [(self.rank - held) % self.count for held in before]
        counts = [len(range(skip, blocks, self.count)) for skip, blocks in zip(first, whole, strict=True)]
        most, device, block, begin = max(counts), store.k_open.device, store.block, store.first
        if not most:
            return store, 0
        if max(whole) == 1:
            # as in steps: what is sealed lies in front
            opened = [begin + store.recent + count * block for count in counts]
            return store._replace(open_len=shared(opened, device)), most
        place = begin + torch.arange(most * block, device=device)
        place = place + (place - begin) // block * ((self.count - 1) * block)
        if len(set(first)) == 1:
            # clamped: rows may have fewer blocks than the longest one, and their places are not read
            place = (place + first[0] * block).clamp(max=store.k_open.shape[2] - 1)
            parts = [x.index_select(dim, place) for x, dim in _open_parts(store)]
        else:
            each = (place + block * shared(first, device)[:, None]).clamp(max=store.k_open.shape[2] - 1)
            shapes = (each[:, None, :, None], each[:, None, None], each[:, None], each[:, None])
            parts = [torch.take_along_dim(x, at, dim) for (x, dim), at in zip(_open_parts(store), shapes, strict=True)]
        k, v, k_scale, v_scale = parts
        length = shared([count * block for count in counts], device)
        parted = store._replace(k_open=k, v_open=v, k_scale=k_scale, v_scale=v_scale, open_len=length)
        return parted._replace(first=0, recent=0), most

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """[ranks, ...]: x of each rank, in their order; the same bits on all of them."""
        # one dimension, as backends differ in what they make of more
        each = x.new_empty(self.count * x.numel())
        # its former name warns from torch 2.13 on
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(each, x.reshape(-1), group=self.group)
        return each.view(self.count, *x.shape)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' x, in place; at any place at most one of them is not 0."""
        if self and x.numel():
            # as bytes, which every backend adds
            dist.all_reduce(x.view(torch.uint8), group=self.group)
        return x

    def own_part(self, store: Any, scoring: Scoring) -> tuple[Any, Scoring]:
        """What this rank attends to, and how: open tokens and sinks count once. store: a `KVStore`, or None."""
        if self.counts_open:
            return store, scoring
        return store._replace(open_len=torch.zeros_like(store.open_len)), scoring._replace(sinks=None)

    def decode(
        self,
        ops: DecodeOps,
        q: torch.Tensor,
        store: KVStore,
        scoring: Scoring,
        starts: torch.Tensor | None,
        window: int | None,
    ) -> torch.Tensor:
        """`DecodeOps.decode` over the blocks of all ranks: out [B, Hq, M, D], the same bits on each."""
        store, scoring = self.own_part(store, scoring)
        if self.counts_open:
            return self.merged(ops.decode(q, store, scoring, starts=starts, window=window), starts)
        # All new tokens are open, so that each query sees every sealed token: queries become heads, which have no
        # order. Rounded up, as a kernel is compiled for each number of them.
        tokens = q.shape[2]
        wide = q if tokens == 1 else torch.nn.functional.pad(q, (0, 0, 0, power_of_two(tokens) - tokens))
        out, lse = ops.decode(wide.reshape(q.shape[0], -1, 1, q.shape[3]), store, scoring, window=window)
        out, lse = out.reshape(wide.shape), lse.reshape(wide.shape[:3])
        return self.merged(AttentionOutput(out[:, :, :tokens], lse[:, :, :tokens]), starts)

    def merged(self, part: AttentionOutput, starts: torch.Tensor | None) -> torch.Tensor:
        """The outputs of all ranks' parts as one, [B, Hq, M, D]; 0 before `starts`. One exchange."""
        if not self:
            return part.out
        # in the wider type of both
        each = self.gathered(torch.cat((part.out, part.lse[..., None]), -1))
        out, lse = each[..., :-1], each[..., -1:]
        whole = out.mul_(lse.softmax(0)).sum(0).to(part.out.dtype)
        if starts is None:
            return whole
        padding = torch.arange(whole.shape[2], device=whole.device) < starts[:, None]
        # no rank has seen a key there
        return whole.masked_fill(padding[:, None, :, None], 0.0)

    def begin(self, cache: Any, begin: Callable[[], bool | None], given: Mapping[str, Any]) -> None:
        """Begin a pass by calling `begin`, if the ranks begin the same.

        begin: returns False within a pass that was compared as a whole. given: the arguments of the pass, by name.

        Raises:
            ValueError: another pass on some rank, or one that cannot begin; the same error on all of them.
        """
        if not self and cache.context is not self:
            raise ValueError(OTHER_CACHE)
        if not self or cache.turbo_layers()[0].replay is not None:
            # a step is compared before (`StepRunner`)
            begin()
            return
        error: Exception | None = None
        try:
            if begin() is False:
                return
        except ValueError as raised:
            error = raised
        if error is None and cache.context is not self:
            error = ValueError(OTHER_CACHE)
        self._require_same("a pass", cache, given, error)

    def require_same_call(self, call: str, cache: Any) -> None:
        """ValueError, the same on all ranks, unless all of them make this call over the same tokens."""
        if self:
            self._require_same(call, cache, {})

    def require_all(self, index: int) -> None:
        """`Unsupported` unless this process holds all blocks of layer `index`."""
        if self:
            raise Unsupported(
                f"layer {index}: keys and values of a cache that is spread over a context group are not dequantized, "
                "as each rank holds only its own blocks: use it with the patched model, and no 4D mask."
            )

    def _require_same(self, call: str, cache: Any, given: Mapping[str, Any], error: Exception | None = None) -> None:
        """One exchange, equally large for all calls; one read from the device."""
        tensors = {name: x for name in COMPARED if isinstance(x := given.get(name), torch.Tensor)}
        facts = {"the call": crc32(call.encode()), "what the caches hold": 0 if error is not None else _held(cache)}
        for name in COMPARED:
            facts[f"the shape of {name}"] = hash(tuple(tensors[name].shape)) if name in tensors else 0
        nothing = torch.zeros((), dtype=torch.int64, device=self.device)
        sums = [_checksum(tensors[name]).to(self.device) if name in tensors else nothing for name in COMPARED]
        known = torch.tensor([int(error is not None), *facts.values()], device=self.device)
        own = torch.cat((known, torch.stack(sums)))
        # ~x falls as x rises: the largest of both tell whether all are equal
        least, most = self.most(torch.stack((~own, own))).tolist()
        if most[0]:
            failure = self.failure(error)
            assert failure is not None
            raise failure from (None if failure is error else error)
        names = [*facts, *COMPARED]
        for name, low, high in zip(names, least[1:], most[1:], strict=True):
            if ~low != high:
                raise ValueError(
                    f"the ranks of a context group must make the same calls over the same tokens, and {name} is not "
                    "the same on all of them. Pass the same on every rank; if they sample, seed all ranks alike "
                    "(torch.manual_seed); then reset() the caches, or take new ones."
                )


WHOLE = ContextRanks()
"""Of a cache that one process holds whole."""


def _checksum(x: torch.Tensor) -> torch.Tensor:
    """int64 [] on x's device, which tells tensors of one shape apart."""
    if x.is_floating_point():
        return checksum(x)
    # a step is short: no more launches than need be
    return (x.reshape(-1) * _weights(power_of_two(max(1, x.numel())), x.device)[: x.numel()]).sum()


@lru_cache(maxsize=4)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """int64 [count], odd, and without a pattern by which differences would cancel each other."""
    with torch.inference_mode(False):
        mixed = torch.arange(1, count + 1, device=device) * GOLDEN
        return (mixed ^ (mixed >> 31)) * GOLDEN | 1


def _open_parts(store: KVStore) -> tuple[tuple[torch.Tensor, int], ...]:
    """The open tokens, each part with its dimension of tokens."""
    return (store.k_open, 2), (store.v_open, 3), (store.k_scale, 2), (store.v_scale, 2)


def _held(cache: Any) -> int:
    """A number for the tokens that a cache holds: hashes of numbers are the same in every process."""
    layers = cache.turbo_layers()
    # what rows hold follows from the same passes, in all layers alike
    first = layers[0].state
    each = (*first.sealed, -1, *first.open, *(at.seen for at in layers))
    return hash((cache.selections, cache.mark.now is None, first.recording, *each))


def context_of(ranks: Ranks) -> ContextRanks:
    """The context of the caches of these ranks."""
    return ranks if isinstance(ranks, ContextRanks) else WHOLE


def spread(cache: Any, ranks: Ranks) -> None:
    """Give an empty TurboCache its `ContextRanks`; layers with a sliding window stay whole on each rank."""
    cache.context = context_of(ranks)
    for layer in cache.turbo_layers():
        if layer.window is None:
            layer.state = layer.state._replace(context=cache.context)


def context_ranks(group: Any, model: Any) -> ContextRanks | None:
    """The ranks of `patch(context_group=group)`; None without a group, or where it has one rank.

    Raises:
        TypeError: it is no process group.
        ValueError: this process is not in it.
    """
    if group is None:
        return None
    outside = dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER
    if not outside and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            "context_group must be a process group of torch.distributed (dist.group.WORLD, or one of dist.new_group); "
            f"got {type(group).__name__}."
        )
    if outside or dist.get_rank(group) < 0:
        raise ValueError(
            "context_group: this process is not in the group that it passes. Patch only on the ranks of the group, "
            "each with the group that it is in."
        )
    count = dist.get_world_size(group)
    if count == 1:
        return None
    on_gpus = "nccl" in dist.get_backend_config(group) and (
        model.device.type == "cuda" or "gloo" not in dist.get_backend_config(group)
    )
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")
    return ContextRanks(dist.get_rank(group), count, group, device, ranks_of(model))


def require_spreadable(model: Any, config: TurboConfig, context: ContextRanks) -> None:
    """Refuse, under any `strict`, what a spread context is not combined with.

    Raises:
        Unsupported: the first such option or model.
    """
    devices = {x.device for x in model.parameters()}
    reasons = {
        "a model on several devices (device_map)": len(devices) > 1,
        f"a model on {model.device}, which the group's backend does not serve (nccl is for GPUs, gloo for CPUs)": (
            model.device.type != context.device.type
        ),
        "sparse steps (TurboConfig.sparse)": config.sparse is not None,
        "compile=True": config.must_compile,
    }
    for reason, found in reasons.items():
        if found:
            raise Unsupported(f"context_group is not combined with {reason}. Change that, or leave out context_group.")


def require_spread_layers(layers: Iterable[Any]) -> None:
    """Refuse a model of latent attention, and one none of whose layers (`LayerReport`) would be spread.

    Raises:
        Unsupported: either.
    """
    compressed = [at for at in layers if at.groups]
    if any(at.latent for at in compressed):
        raise Unsupported("context_group is not combined with latent attention (MLA). Leave it out.")
    if all(at.window is not None for at in compressed):
        raise Unsupported(
            "context_group: every compressed layer has a sliding window, which each rank keeps whole, so that nothing "
            "is spread. Leave it out."
        )
