"""Buckets of keys, and which of them each query visits."""

from collections.abc import Mapping

import torch

from turbo_hf.config.turbo_config import MOST_BUCKETS
from turbo_hf.layout import CLASSIFIER, Rotary
from turbo_hf.ops.backend import uses_triton, why_no_kernel
from turbo_hf.ops.sparse.reference_select import (
    reference_assign,
    reference_assign_and_score,
    reference_classify,
    reference_score,
    reference_visit,
)


def assign(
    keys: torch.Tensor, centroids: torch.Tensor, *, rotary: Rotary | None = None, backend: str = "auto"
) -> torch.Tensor:
    """The bucket of each key: that of the centroid with the largest inner product, the first one in a tie.

    Args:
        keys: float [B, Hkv, M, D].
        centroids: float [Hkv, C, D], of unit length.
        rotary: cos and sin, [1 or B, M, r] with r up to D: the rotary embedding of the keys (half layout: channels c
            and c + r/2 rotate together) is undone first. None: keys are used as they are.
        backend: "auto", "triton" or "reference".

    Returns:
        int16 [B, Hkv, M], in [0, C).

    Raises:
        ValueError: shapes or devices that do not agree, or more centroids than 16 bits can number.

    Source: SAAP sec. 4 (spherical k-means).
    """
    _check_keys(keys, centroids)
    dim = centroids.shape[2]
    _check_rotary(rotary, keys.shape[0], keys.shape[2], dim)
    if keys.numel() and uses_triton(backend, keys.device, why_no_kernel(keys)):
        from turbo_hf.ops.sparse.launch import launch_assign  # noqa: PLC0415 - needs Triton

        return launch_assign(keys, centroids, rotary=rotary)
    return reference_assign(keys, centroids, rotary=rotary)


def classify(
    queries: torch.Tensor,
    classifier: Mapping[str, torch.Tensor],
    *,
    rotary: Rotary | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """A query classifier's logits for each bucket: two linear layers with a ReLU in between, one pair for each KV head,
    summed over the query heads of a group.

    Args:
        queries: float [B, Hkv, M, G, D], grouped by KV head.
        classifier: "weight_1" [Hkv, D, hidden], "bias_1" [Hkv, hidden], "weight_2" [Hkv, hidden, C], "bias_2" [Hkv, C].
        rotary: rotary embedding of the queries, as in `assign`.
        backend: "auto", "triton" or "reference".

    Returns:
        Logits float32 [B, Hkv, M, C].

    Raises:
        ValueError: shapes that do not agree.

    Source: SAAP sec. 4 (f_q), sec. 5 (outputs of a group added).
    """
    _check_classifier(classifier, queries.device)
    weight = classifier["weight_1"]
    if queries.dim() != 5 or (queries.shape[1], queries.shape[4]) != weight.shape[:2]:
        raise ValueError(
            f"queries must be [B, {weight.shape[0]}, M, G, {weight.shape[1]}], as the classifier is; got "
            f"{tuple(queries.shape)}."
        )
    _check_rotary(rotary, queries.shape[0], queries.shape[2], queries.shape[4])
    if queries.numel() and uses_triton(backend, queries.device, why_no_kernel(queries)):
        from turbo_hf.ops.sparse.launch import launch_classify  # noqa: PLC0415 - needs Triton

        return launch_classify(queries, classifier, rotary=rotary)
    return reference_classify(queries, classifier, rotary=rotary)


def score(
    queries: torch.Tensor, centroids: torch.Tensor, *, rotary: Rotary | None = None, backend: str = "auto"
) -> torch.Tensor:
    """The inner products of queries with centroids, summed over the query heads of a group.

    Args:
        queries: float [B, Hkv, M, G, D], grouped by KV head.
        centroids: float [Hkv, C, D].
        rotary: rotary embedding of the queries, as in `assign`.
        backend: "auto", "triton" or "reference".

    Returns:
        float32 [B, Hkv, M, C].

    Raises:
        ValueError: shapes that do not agree.

    Source: SAAP sec. 2 (inverted lists of k-means, several of which are visited).
    """
    heads, _, dim = centroids.shape
    if queries.dim() != 5 or (queries.shape[1], queries.shape[4]) != (heads, dim):
        raise ValueError(f"queries must be [B, {heads}, M, G, {dim}], as centroids are; got {tuple(queries.shape)}.")
    if queries.device != centroids.device:
        raise ValueError(f"queries and centroids must be on one device; got {queries.device} and {centroids.device}.")
    _check_rotary(rotary, queries.shape[0], queries.shape[2], dim)
    if queries.numel() and uses_triton(backend, queries.device, why_no_kernel(queries)):
        from turbo_hf.ops.sparse.launch import launch_score  # noqa: PLC0415 - needs Triton

        return launch_score(queries, centroids, rotary=rotary)
    return reference_score(queries, centroids, rotary=rotary)


def assign_and_score(
    keys: torch.Tensor,
    queries: torch.Tensor,
    centroids: torch.Tensor,
    classifier: Mapping[str, torch.Tensor] | None = None,
    *,
    rotary: Rotary | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a decode step asks of the index: `assign` for its keys and, for its queries, `score`, or `classify` with a
    classifier. On a GPU the first does not need a launch of its own.

    Args:
        keys: float [B, Hkv, M, D]. queries: float [B, Hkv, M, G, D], of the same tokens.
        centroids, classifier, rotary, backend: as in `assign`, `score` and `classify`.

    Returns:
        Buckets int16 [B, Hkv, M], logits float32 [B, Hkv, M, C].

    Raises:
        ValueError: shapes or devices that do not agree, or more centroids than 16 bits can number.

    Source: as for these functions.
    """
    heads, _, dim = centroids.shape
    _check_keys(keys, centroids)
    if classifier is not None:
        _check_classifier(classifier, keys.device)
    weight = centroids if classifier is None else classifier["weight_1"].mT
    if queries.dim() != 5 or (*queries.shape[:3], queries.shape[4]) != keys.shape or weight.shape[::2] != (heads, dim):
        raise ValueError(
            f"queries must be [{', '.join(map(str, keys.shape[:3]))}, G, {dim}], as keys are, and the classifier for "
            f"{heads} heads of {dim}; got {tuple(queries.shape)} and {tuple(weight.mT.shape)}."
        )
    if not queries.device == weight.device == keys.device:
        raise ValueError(
            "keys, queries and centroids must be on one device; got "
            f"{keys.device}, {queries.device} and {weight.device}."
        )
    _check_rotary(rotary, keys.shape[0], keys.shape[2], dim)
    if queries.numel() and uses_triton(backend, keys.device, why_no_kernel(keys) or why_no_kernel(queries)):
        from turbo_hf.ops.sparse.launch import launch_assign_and_score  # noqa: PLC0415 - needs Triton

        return launch_assign_and_score(keys, queries, centroids, classifier, rotary=rotary)
    return reference_assign_and_score(keys, queries, centroids, classifier, rotary=rotary)


def _check_keys(keys: torch.Tensor, centroids: torch.Tensor) -> None:
    heads, buckets, dim = centroids.shape
    if keys.dim() != 4 or (keys.shape[1], keys.shape[3]) != (heads, dim) or keys.device != centroids.device:
        raise ValueError(
            f"keys must be [B, {heads}, M, {dim}] on {centroids.device}, as centroids are; got {tuple(keys.shape)} on "
            f"{keys.device}."
        )
    if buckets > MOST_BUCKETS:
        raise ValueError(f"centroids must be at most {MOST_BUCKETS} per head; got {buckets}.")


def _check_classifier(classifier: Mapping[str, torch.Tensor], device: torch.device) -> None:
    names = CLASSIFIER
    missing = [name for name in names if name not in classifier]
    if missing:
        raise ValueError(f"classifier must hold {', '.join(names)}; it lacks {', '.join(missing)}.")
    layers = [classifier[name] for name in names]
    shapes = [tuple(x.shape) for x in layers]
    if len(shapes[0]) == len(shapes[2]) == 3 and all(x.device == device for x in layers):
        (heads, _, hidden), buckets = shapes[0], shapes[2][2]
        if shapes[1:] == [(heads, hidden), (heads, hidden, buckets), (heads, buckets)]:
            return
    raise ValueError(
        f"classifier must be {', '.join(names)} of [Hkv, D, hidden], [Hkv, hidden], [Hkv, hidden, C], [Hkv, C] on "
        f"{device}; got {', '.join(f'{tuple(x.shape)} on {x.device}' for x in layers)}."
    )


def _check_rotary(rotary: Rotary | None, rows: int, tokens: int, dim: int) -> None:
    for part in rotary or ():
        shape = part.shape
        if part.dim() != 3 or shape[0] not in (1, rows) or shape[1] != tokens or shape[2] > dim or shape[2] % 2:
            raise ValueError(
                f"rotary must be cos and sin of [1 or {rows}, {tokens}, r], r even and at most {dim}; got "
                f"{tuple(shape)}."
            )


def visit(logits: torch.Tensor, *, probes: int, backend: str = "auto") -> torch.Tensor:
    """Which buckets a step visits: the `probes` of the largest logits, for all query heads of a KV head.

    Args:
        logits: float [B, Hkv, M, C], finite: the output of the classifier, or of another selector.
        probes: buckets to visit.
        backend: "auto", "triton" or "reference".

    Returns:
        bool [B, Hkv, M, C]; in a tie, the first bucket.

    Raises:
        ValueError: logits of another shape, or probes outside 1 to C.

    Source: SAAP sec. 4, 5 (l buckets, the queries of a group together).
    """
    if logits.dim() != 4:
        raise ValueError(f"logits must be [B, Hkv, M, C]; got {tuple(logits.shape)}.")
    buckets = logits.shape[-1]
    if not 1 <= probes <= buckets:
        raise ValueError(f"probes must be from 1 to the {buckets} buckets; got {probes}.")
    why = "float64 has no kernel" if logits.dtype == torch.float64 else None
    if logits.numel() and uses_triton(backend, logits.device, why):
        from turbo_hf.ops.sparse.launch import launch_visit  # noqa: PLC0415 - needs Triton

        return launch_visit(logits, probes)
    return reference_visit(logits, probes)
