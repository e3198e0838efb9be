"""Selectors: assign keys to buckets and choose the buckets that a query visits. SAAP, and the baselines of its
paper."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from turbo_hf.config.turbo_config import USED_BY, SparseConfig
from turbo_hf.layout import NOTED_UNIT, Rotary
from turbo_hf.ops.sparse.select import assign, assign_and_score, visit


@dataclass(frozen=True, slots=True)
class Selectivity:
    """What the decode steps of one layer have read since the patch: keys, over rows, KV heads and query tokens.

    layer: the layer's number.
    there: keys that the cache held, which full attention would read.
    dense: those of them that are always read (the first and the newest ones).
    read: all keys that were read; a key that several query heads of a KV head read counts once.
    left: of selector "means", the share of the softmax that fell on unread blocks, as estimated: the mean over query
        heads and steps. None: not estimated.
    heads, dense_heads: of selector "means", KV heads times rows that prompts have audited, and those that read every
        key since, because a query would have lost more than `most_dropped`.
    """

    layer: int
    there: int
    dense: int
    read: int
    left: float | None = None
    heads: int = 0
    dense_heads: int = 0

    @property
    def share(self) -> float:
        """Keys read over all keys; 0 before the first step."""
        return self.read / max(1, self.there)

    @property
    def share_beyond(self) -> float:
        """The same without the always-read tokens."""
        return (self.read - self.dense) / max(1, self.there - self.dense)

    def __str__(self) -> str:
        if self.there == self.dense:
            return "every key read: all are always read"
        left = "" if self.left is None else f"; {self.left:.2%} of the attention left out, by estimate"
        dense = f"; {self.dense_heads} of {self.heads} audited heads dense" if self.heads else ""
        return f"{self.share:.2%} of the keys read, {self.share_beyond:.2%} of those not always read{left}{dense}"


@dataclass(slots=True)
class Tally:
    """Keys counted by the steps of one layer: device-side counts stay on the device, and nothing waits for them."""

    there: int = 0
    dense: int = 0
    # int64 [5] of each device: keys read, what `ByMeans.noted` sums up, heads that were audited and became dense
    counts: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    def __reduce__(self) -> Any:
        # a cache that was unpickled belongs to no patch, so nothing is counted
        return Tally, ()

    def counters(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [1] for `ops.sparse.decode.sparse_decode(read=...)`, and int64 [2] for `ByMeans.noted`."""
        counts = self._on(device)
        return counts[:1], counts[1:3]

    def audited(self, dense: torch.Tensor) -> None:
        """Note which heads an audit has found to need every key: bool [B, Hkv]."""
        counts = self._on(dense.device)
        counts[3] += dense.numel()
        counts[4] += dense.sum()

    def _on(self, device: torch.device) -> torch.Tensor:
        if device not in self.counts:
            # a cache may be used in inference mode first, and outside it later
            with torch.inference_mode(False):
                self.counts[device] = torch.zeros(5, dtype=torch.int64, device=device)
        return self.counts[device]

    def add(self, lengths: list[int], tokens: list[int], heads: int, always: int) -> None:
        """Note a step: row r holds `lengths[r]` tokens, the newest `tokens[r]` of which ask."""
        seen = [n for length, new in zip(lengths, tokens, strict=True) for n in range(length - new + 1, length + 1)]
        self.there += heads * sum(seen)
        short = [n for n in seen if n < always]
        self.dense += heads * (sum(short) + always * (len(seen) - len(short)))

    def selectivity(self, layer: int) -> Selectivity:
        """Read from the device."""
        counts = [x.tolist() for x in self.counts.values()]
        read, left, times, heads, dense = (sum(each[i] for each in counts) for i in range(5))
        share = left / times / NOTED_UNIT if times else None
        return Selectivity(layer, self.there, self.dense, read, share, heads, dense)


class Selector:
    """The selector "window", and what all selectors share. One per layer, for every cache of a patched model.

    pre_rotary: whether it needs queries and keys before rotary embedding.
    tables: buckets per key.
    min_collisions: how many of a key's buckets a query must visit for the key to be read.
    window: how many of the newest tokens are always read.
    weighs: number of buckets of which it needs the number of keys; 0: it needs none.
    choices: buckets per head among which it chooses `probes`; 0: it does not choose by number.
    by_means: whether it chooses blocks by the mean keys of their pages, which the cache then keeps.
    """

    pre_rotary = False
    tables = weighs = 0
    min_collisions = 1
    by_means = False

    def __init__(self, config: SparseConfig, layer: int, backend: str = "auto"):
        self.config, self.layer, self.backend = config, layer, backend
        self.window = config.window_tokens
        self.choices = config.buckets if config.selector in USED_BY["probes"] else 0
        self.tally = Tally()
        self._drawn: dict[Any, torch.Tensor] = {}

    def __deepcopy__(self, memo: Any) -> "Selector":
        # a copied cache belongs to the same patch
        return self

    def buckets(self, keys: torch.Tensor, rotary: Rotary | None = None) -> torch.Tensor | None:
        """int16 [B, Hkv, tables, M] of keys [B, Hkv, M, D]; None: keys have no buckets.

        rotary: what is to be undone first, as in `ops.sparse.select`; only for selectors that are `pre_rotary`.
        """
        return None

    def _buckets_and_query_info(
        self, keys: torch.Tensor, queries: torch.Tensor, rotary: Rotary | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Buckets of new keys, as `buckets` gives them, and what `_visited` needs: logits, or the queries themselves.

        queries: [B, Hkv, M, G, D], grouped by KV head. rotary: of both, as in `buckets`.
        """
        return self.buckets(keys, rotary), queries

    def _visited(self, query_info: torch.Tensor, sizes: torch.Tensor | None = None) -> torch.Tensor | None:
        """bool [B, Hkv, M, tables, C] from what `_buckets_and_query_info` gives of queries; None: none is visited.

        sizes: float [B, Hkv, C], keys in each bucket without the always-read ones, where the selector `weighs` them.
        """
        return None

    def buckets_and_query_info(
        self, keys: torch.Tensor, queries: torch.Tensor, rotary: Rotary | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """`_buckets_and_query_info`, of query heads together or each by itself; for `visited`. Arguments as there."""
        if not self.config.independent:
            return self._buckets_and_query_info(keys, queries, rotary)
        group = queries.shape[3]
        if rotary is not None:
            cos, sin = (part.repeat_interleave(group, 1) for part in rotary)
            rotary = cos, sin
        # each head is treated as a token of its own, alone in its group
        alone = queries.flatten(2, 3)[:, :, :, None]
        found, query_info = self._buckets_and_query_info(keys.repeat_interleave(group, 2), alone, rotary)
        return None if found is None else found[..., ::group], query_info

    def visited(self, query_info: torch.Tensor, group: int, sizes: torch.Tensor | None = None) -> torch.Tensor | None:
        """`_visited`, or what each of `group` query heads visits by itself: bool [B, Hq, M, tables, C]."""
        found = self._visited(query_info, sizes)
        if found is None or not self.config.independent:
            return found
        return torch.as_tensor(found.unflatten(2, (-1, group)).movedim(3, 2).flatten(1, 2))

    def left_by_head(self, rows: int, heads: int, device: torch.device) -> torch.Tensor | None:
        """float32 [B, Hkv] for `ByMeans.left_by_head`, before an audit; None: it does not choose by means."""
        return None

    def weights(self) -> Mapping[str, torch.Tensor]:
        """What a calibration has trained of it."""
        return {}

    def tensors(self) -> list[torch.Tensor]:
        """Tensors that its launches use in every step."""
        return list(self._drawn.values())

    def _random(
        self, draw: Callable[[Any, int, torch.device], torch.Tensor], shape: Any, x: torch.Tensor
    ) -> torch.Tensor:
        """What `draw` gives for this shape, the layer's seed and the device of x; drawn once."""
        key = (draw, shape, x.device)
        if key not in self._drawn:
            with torch.inference_mode(False):
                self._drawn[key] = draw(shape, self.config.seed + self.layer, x.device)
        return self._drawn[key]

    def count(self, lengths: list[int], tokens: list[int], heads: int) -> None:
        """Note in `tally` what the host knows of a step; arguments as there."""
        self.tally.add(lengths, tokens, heads, self.config.sink_tokens + self.window)

    def _visit(self, logits: torch.Tensor, sizes: torch.Tensor | None = None) -> torch.Tensor:
        how = self.config
        found = visit(logits, probes=how.count, mass=how.mass, most=how.most_probes, sizes=sizes, backend=self.backend)
        return found[:, :, :, None]

    def __str__(self) -> str:
        return self.config.selector + (", each query head by itself" if self.config.independent else "")


class Full(Selector):
    """Reads every key: the baseline for the others, on the same code path."""

    def __init__(self, config: SparseConfig, layer: int, backend: str = "auto"):
        super().__init__(config, layer, backend)
        self.window = 1 << 30


class Means(Selector):
    """Reads the blocks that hold the mass of the attention, as estimated by the mean key of each ("means")."""

    by_means = True

    def __init__(self, config: SparseConfig, layer: int, backend: str = "auto", calibrated: torch.Tensor | None = None):
        super().__init__(config, layer, backend)
        self._calibrated = calibrated

    def left_by_head(self, rows: int, heads: int, device: torch.device) -> torch.Tensor:
        if self._calibrated is not None:
            # a copy for each cache, whose audits write to it
            return self._calibrated.to(device, torch.float32).repeat(rows, 1)
        return torch.full((rows, heads), self.config.left, dtype=torch.float32, device=device)

    def __str__(self) -> str:
        audited = "audited" if self.config.bound < 1 else "not audited"
        share = f"{self.config.left:g}" if self._calibrated is None else "a calibrated share"
        return f"{super().__str__()}, blocks of all but {share} of the mass, {audited}"


class Centroids(Selector):
    """Buckets by the nearest centroid [Hkv, C, D]; visits by inner product with it ("kmeans")."""

    tables = 1

    def __init__(
        self, config: SparseConfig, layer: int, centroids: torch.Tensor, pre_rotary: bool, backend: str = "auto"
    ):
        super().__init__(config, layer, backend)
        self.choices = centroids.shape[1]
        config.check_buckets(self.choices)
        self.pre_rotary = pre_rotary
        self._weights = {"centroids": centroids}
        self._moved: dict[str, torch.Tensor] = {}

    def _on(self, name: str, device: torch.device) -> torch.Tensor:
        """A weight on the device of use: in its own precision on a GPU, in float32 on a CPU; moved once."""
        held = self._moved.get(name)
        if held is None or held.device != device:
            own = self._weights[name]
            with torch.inference_mode(False):
                held = own.to(device, torch.float32 if device.type == "cpu" else own.dtype).contiguous()
            self._moved[name] = held
        return held

    def buckets(self, keys: torch.Tensor, rotary: Rotary | None = None) -> torch.Tensor | None:
        return assign(keys, self._on("centroids", keys.device), rotary=rotary, backend=self.backend)[:, :, None]

    def _buckets_and_query_info(
        self, keys: torch.Tensor, queries: torch.Tensor, rotary: Rotary | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Buckets, and logits [B, Hkv, M, 1, C]."""
        weights = {name: self._on(name, keys.device) for name in self._weights}
        centroids = weights.pop("centroids")
        found, logits = assign_and_score(keys, queries, centroids, weights or None, rotary=rotary, backend=self.backend)
        return found[:, :, None], logits

    def _visited(self, query_info: torch.Tensor, sizes: torch.Tensor | None = None) -> torch.Tensor | None:
        return self._visit(query_info, sizes)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self._weights

    def tensors(self) -> list[torch.Tensor]:
        return list(self._moved.values())

    def __str__(self) -> str:
        rule = f"{self.config.count}" if self.config.mass is None else f"all but {self.config.mass:g} of the mass"
        return f"{super().__str__()}, {rule} of {self.choices} buckets"


class Classifier(Centroids):
    """Buckets by the nearest centroid; visits by the query classifier of a calibration ("saap").

    classifier: weight_1 [Hkv, D, hidden], bias_1 [Hkv, hidden], weight_2 [Hkv, hidden, C], bias_2 [Hkv, C].
    """

    def __init__(
        self,
        config: SparseConfig,
        layer: int,
        centroids: torch.Tensor,
        classifier: Mapping[str, torch.Tensor],
        backend: str = "auto",
    ):
        super().__init__(config, layer, centroids, True, backend)
        self._weights |= classifier
        self.weighs = centroids.shape[1] if config.mass is not None else 0

    def _buckets_and_query_info(
        self, keys: torch.Tensor, queries: torch.Tensor, rotary: Rotary | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        found, total = super()._buckets_and_query_info(keys, queries, rotary)
        # shares of mass are those of the heads' mean
        return found, total if self.config.mass is None else total / queries.shape[3]


class Hash(Selector):
    """Buckets by signs of random projections: one table in Gray order ("lsh-gray", KDEformer), or several
    ("lsh-tables", MagicPig: a key is read where it meets the query in two of them). SAAP appendix B, eq. 2."""

    def __init__(self, config: SparseConfig, layer: int, backend: str = "auto"):
        super().__init__(config, layer, backend)
        self.gray = config.selector == "lsh-gray"
        self.tables, self.min_collisions = (1, 1) if self.gray else (config.tables, 2)
        self.bits = int(math.log2(config.buckets))

    def _codes(self, x: torch.Tensor) -> torch.Tensor:
        """int64 [..., tables] of vectors [..., D]."""
        shape = (x.shape[-1], self.tables * self.bits)
        signs = (x.float() @ self._random(_directions, shape, x)) > 0
        power = 2 ** torch.arange(self.bits, device=x.device)
        code = (signs.unflatten(-1, (self.tables, self.bits)) * power).sum(-1)
        if self.gray:
            # the place of a code in Gray order: codes side by side differ in one sign
            shift = 1
            while shift < self.bits:
                code, shift = code ^ (code >> shift), shift * 2
        return torch.as_tensor(code)

    def buckets(self, keys: torch.Tensor, rotary: Rotary | None = None) -> torch.Tensor | None:
        return self._codes(keys).to(torch.int16).movedim(-1, 2)

    def _visited(self, query_info: torch.Tensor, sizes: torch.Tensor | None = None) -> torch.Tensor | None:
        code = self._codes(query_info)
        bucket = torch.arange(2**self.bits, device=code.device)
        if self.gray:
            # the bins around that of the nearest query head; each bin is an equal part of the codes
            return self._visit(-(code - bucket).abs().amin(3, keepdim=True).float())
        return torch.eq(code[..., None], bucket).any(3)


class Reformer(Selector):
    """Buckets by the largest inner product with random directions ("lsh-reformer"; SAAP appendix B, eq. 3)."""

    tables = 1

    def _to_buckets(self, x: torch.Tensor) -> torch.Tensor:
        return self._random(_directions, (x.shape[-1], self.config.buckets), x)

    def buckets(self, keys: torch.Tensor, rotary: Rotary | None = None) -> torch.Tensor | None:
        shared = self._to_buckets(keys).mT.expand(keys.shape[1], -1, -1).contiguous()
        return assign(keys, shared, backend=self.backend)[:, :, None]

    def _visited(self, query_info: torch.Tensor, sizes: torch.Tensor | None = None) -> torch.Tensor | None:
        return self._visit(query_info.float() @ self._to_buckets(query_info))


class Chance(Selector):
    """Buckets and visits by chance ("random"): hashes of the numbers of a key, or of a query and the bucket. The same
    numbers get the same again; those of another batch, which may differ in the last bit, need not."""

    tables = 1

    def _hashed(self, x: torch.Tensor) -> torch.Tensor:
        """int64 [...] of vectors [..., D]."""
        factors = self._random(_odd, x.shape[-1], x)
        return _mixed((x.float().view(torch.int32).long() * factors).sum(-1))

    def buckets(self, keys: torch.Tensor, rotary: Rotary | None = None) -> torch.Tensor | None:
        return (self._hashed(keys) % self.config.buckets).to(torch.int16)[:, :, None]

    def _visited(self, query_info: torch.Tensor, sizes: torch.Tensor | None = None) -> torch.Tensor | None:
        asking = self._hashed(query_info).sum(-1)[..., None, None]
        drawn = _mixed(asking + self._random(_odd, self.config.buckets, query_info))
        return self._visit((drawn >> 40).float())


def _odd(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Random odd numbers of 63 bits, int64 [count]; the same for a seed on every device."""
    drawn = torch.randint(1 << 62, (count,), generator=torch.Generator().manual_seed(seed), device="cpu")
    return (2 * drawn + 1).to(device)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """int64 whose every bit depends on every bit of x (the finaliser of splitmix64; overflow wraps around)."""
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)


def _directions(shape: tuple[int, int], seed: int, device: torch.device) -> torch.Tensor:
    """Random directions, float32 [D, n] of unit length; the same for a seed on every device."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return torch.nn.functional.normalize(drawn, dim=0).to(device)


UNTRAINED = {
    "lsh-reformer": Reformer,
    "lsh-gray": Hash,
    "lsh-tables": Hash,
    "random": Chance,
    "means": Means,
    "window": Selector,
    "full": Full,
}
"""Selectors that need no calibration."""


def why_no_replay_with(config: SparseConfig | None) -> str | None:
    """Why decode steps with this choice cannot be replayed; None if they can."""
    return None if config is None else config.why_no_kernel
