"""Buckets of keys, which of them each query visits, and attention of the newest tokens over these buckets."""

from collections.abc import Mapping

import torch

from turbo_hf.layout import AlwaysRead, AttentionOutput, KVStore, Rotary, Scoring, Visits
from turbo_hf.ops.backend import Choice
from turbo_hf.ops.checks import check_queries, check_shape
from turbo_hf.ops.decode.contract import check_lengths
from turbo_hf.ops.sparse.reference import (
    reference_assign,
    reference_assign_and_score,
    reference_sparse_decode,
    reference_visit,
)


class SparseOps(Choice):
    """Ops of a layer whose decode steps read part of its keys."""

    def assign(self, keys: torch.Tensor, centroids: torch.Tensor, *, rotary: Rotary | None = None) -> torch.Tensor:
        """The bucket of each key: that of the centroid with the largest inner product, the first one in a tie.

        Args:
            keys: float [B, Hkv, M, D].
            centroids: float [Hkv, C, D], of unit length; C fits in 16 bits.
            rotary: cos and sin, [1 or B, M, r] with r up to D: the rotary embedding of the keys (half layout: channels
                c and c + r/2 rotate together) is undone first. None: keys are used as they are.

        Returns:
            int16 [B, Hkv, M], in [0, C).

        Raises:
            ValueError: keys or a rotary embedding that do not agree with the centroids.

        Source: SAAP sec. 4 (spherical k-means).
        """
        _check_keys(keys, centroids, rotary)
        if keys.numel() and self.bucket_kernels:
            from turbo_hf.ops.sparse.launch import launch_assign  # noqa: PLC0415 - needs Triton

            return launch_assign(keys, centroids, rotary=rotary)
        return reference_assign(keys, centroids, rotary=rotary)

    def assign_and_score(
        self,
        keys: torch.Tensor,
        queries: torch.Tensor,
        centroids: torch.Tensor,
        classifier: Mapping[str, torch.Tensor] | None = None,
        *,
        rotary: Rotary | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a decode step asks of the index: buckets of its keys (`assign`), and logits of its queries, which
        `visit` reads. On a GPU the first do not need a launch of their own.

        Logits are inner products with the centroids, or those of the classifier: two linear layers with a ReLU in
        between, one pair for each KV head. Both are summed over the query heads of a group.

        Args:
            keys: float [B, Hkv, M, D]. queries: float [B, Hkv, M, G, D], of the same tokens.
            centroids, rotary: as in `assign`, the latter of both.
            classifier: "weight_1" [Hkv, D, hidden], "bias_1" [Hkv, hidden], "weight_2" [Hkv, hidden, C], "bias_2"
                [Hkv, C]; None: without one.

        Returns:
            Buckets int16 [B, Hkv, M], logits float32 [B, Hkv, M, C].

        Raises:
            ValueError: keys, queries or a rotary embedding that do not agree with the centroids.

        Source: SAAP sec. 2 (inverted lists), sec. 4 (f_q), sec. 5 (outputs of a group added).
        """
        _check_keys(keys, centroids, rotary)
        check_shape("queries", queries, (*keys.shape[:3], "G", keys.shape[3]), keys.device)
        if queries.numel() and self.bucket_kernels:
            from turbo_hf.ops.sparse.launch import launch_assign_and_score  # noqa: PLC0415 - needs Triton

            return launch_assign_and_score(keys, queries, centroids, classifier, rotary=rotary)
        return reference_assign_and_score(keys, queries, centroids, classifier, rotary=rotary)

    def visit(self, logits: torch.Tensor, *, probes: int) -> torch.Tensor:
        """Which buckets a step visits: the `probes` of the largest logits, for all query heads of a KV head.

        Args:
            logits: float [B, Hkv, M, C], finite: the output of the classifier, or of another selector.
            probes: buckets to visit, from 1 to C.

        Returns:
            bool [B, Hkv, M, C]; in a tie, the first bucket.

        Raises:
            ValueError: a backend that cannot run.

        Source: SAAP sec. 4, 5 (l buckets, the queries of a group together).
        """
        if logits.numel() and self.bucket_kernels:
            from turbo_hf.ops.sparse.launch import launch_visit  # noqa: PLC0415 - needs Triton

            return launch_visit(logits, probes)
        return reference_visit(logits, probes)

    def sparse_decode(
        self,
        q: torch.Tensor,
        store: KVStore,
        scoring: Scoring,
        visits: Visits | None,
        always: AlwaysRead,
        *,
        starts: torch.Tensor | None = None,
        read: torch.Tensor | None = None,
    ) -> AttentionOutput:
        """Causal attention of each row's M newest tokens over some of the cached keys, reading each key once.

        A query at position p of its row attends to the key at position t <= p if t < sink_tokens, or t > p -
        window_tokens, or the query heads of its KV head visit the key's bucket. The M queries are independent: the
        result for one does not depend on the others. Scores and sums are computed as in `ops.decode.contract`.

        Args:
            q: float [B, Hq, M, D], as in `ops.decode.contract`.
            store: one layer's cache, including the M tokens.
            scoring, starts: as in `ops.decode.contract`.
            visits: buckets of keys, and which of them queries visit (`turbo_hf.layout.Visits`); None: no key has a
                bucket, so that only those of `always` are read.
            always: the first and newest tokens, which each query reads.
            read: int64 [1], to which the number of keys read is added, over rows, KV heads and queries, counting a key
                once if several query heads of a KV head read it; None: not counted.

        Returns:
            out [B, Hq, M, D] in q's dtype, 0 where a row has no token; lse float32 [B, Hq, M], natural log, over the
            attended keys, including sinks, -inf where a row has no token.

        Raises:
            ValueError: queries or lengths that do not agree with the store, a softcap of the wrong sign.

        Source: SAAP sec. 4, appendix F.
        """
        _, kv_heads, _, dim = store.k_open.shape
        check_queries(q, kv_heads, dim, scoring)
        check_lengths(store, q)
        run = reference_sparse_decode
        if self.step_kernels and self.bucket_kernels:
            from turbo_hf.ops.sparse.launch import launch_sparse_decode  # noqa: PLC0415 - needs Triton

            run = launch_sparse_decode
        return run(q, store, scoring, visits, always, starts, self.mode, read)


def _check_keys(keys: torch.Tensor, centroids: torch.Tensor, rotary: Rotary | None) -> None:
    """ValueError unless keys, and the rotary embedding that a model brings with them, agree with the centroids."""
    heads, _, dim = centroids.shape
    check_shape("keys", keys, ("B", heads, "M", dim), centroids.device)
    rows, _, tokens, _ = keys.shape
    for part in rotary or ():
        shape = part.shape
        if part.dim() != 3 or shape[0] not in (1, rows) or shape[1] != tokens or shape[2] > dim or shape[2] % 2:
            raise ValueError(
                f"rotary must be cos and sin of [1 or {rows}, {tokens}, r], r even and at most {dim}; got "
                f"{tuple(shape)}."
            )
