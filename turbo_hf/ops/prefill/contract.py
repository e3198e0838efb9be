"""Attention of a prompt, or of a chunk of one over a compressed past."""

from typing import Any

import torch

from turbo_hf.config.turbo_config import ATTENTION_MODES
from turbo_hf.layout import AttentionOutput, KVStore
from turbo_hf.ops.backend import kernel_obstacle, uses_triton
from turbo_hf.ops.prefill import reference
from turbo_hf.ops.prefill import torch_op as library
from turbo_hf.ops.prefill.operands import check_v_scale
from turbo_hf.ops.prefill.torch_op import pack_past
from turbo_hf.ops.store.quantize import check_block, check_float


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scaling: float,
    past: KVStore | None = None,
    starts: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    mode: str = "turbo",
    sas_threshold: float | None = None,
    block: int = 128,
    v_scale: str = "block",
    smooth_k: bool = False,
    hadamard: bool = False,
    backend: str = "auto",
) -> AttentionOutput:
    """Attention of M new tokens over themselves and, optionally, over a compressed past.

    Args:
        q: float [B, Hq, M, D]. k, v: float [B, Hkv, M, D], not yet in the cache; Hq is a multiple of Hkv.
        scaling: factor on q . k.
        past: the cache of the preceding tokens.
        starts: int64 [B], the first real column of each row (left padding before it); None: no padding.
        causal: query i sees no key after its own; its position follows the past.
        window: how many tokens a query sees, including itself; None: all.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: float [Hq], one additional logit per head in the softmax denominator, without a value.
        mode: "turbo": INT8 Q, K, P and V, K and V with one scale per block. "int8": the same, K with one per token.
            "half": INT8 Q and K as in "int8", P and V in 16 bit. "fp8": INT8 Q and K as in "turbo", P and V in FP8
            (e4m3), each tile's product accumulated in float32. "fp16": all in q's dtype, as are heads with scores
            beyond `layout.SCORE_LIMIT`. Q has one scale per token in each; P one per query and key tile.
        sas_threshold: SAS softmax, which drops scores this far below the maximum of their block (of 32 keys in "fp16");
            None: the exponential.
        block: tokens per block of K and V, and per tile of P. Over the past, these are the past's own blocks.
        v_scale: scales of V in "turbo", "int8" and "fp8": one per "block", per "channel" of a row, or per row
            ("tensor").
        smooth_k: subtract the row's mean key from its keys before rounding, and add its contribution back to the
            scores.
        hadamard: rotate Q and K by a Hadamard matrix before rounding.
        backend: "auto", "triton" or "reference".

    Returns:
        out [B, Hq, M, D] in q's dtype, 0 at padding; lse float32 [B, Hq, M], natural log, including sinks, -inf at
        padding.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, an unknown mode or block, a window below 1, a softcap
            or sas_threshold of the wrong sign.

    Source: TurboAttention alg. 1 ("turbo"; exact exponential for the rescaling), INT-FlashAttention alg. 1 ("int8",
    "half"; P scaled by tile instead of by 127 of the running maximum), SageAttention2 (FP8 products accumulated in
    float32).
    """
    check_float("k", k)
    check_float("v", v)
    check_queries(q, k.shape[1], k.shape[3], mode, starts, sinks)
    check_scores(window, softcap, sas_threshold)
    check_block(block)
    for name, x in (("k", k), ("v", v)):
        if x.shape != k.shape or x.shape[0] != q.shape[0] or x.shape[2] != q.shape[2]:
            raise ValueError(
                f"{name} must be [B, Hkv, M, D] with B, M and D of q {tuple(q.shape)}; got {tuple(x.shape)}."
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} must be {q.dtype} on {q.device} like q; got {x.dtype} on {x.device}.")
    if past is not None:
        _check_past(past, k, mode)
    check_v_scale(v_scale)
    if mode == "fp16" and (smooth_k or hadamard):
        raise ValueError('smooth_k and hadamard prepare keys for rounding; mode "fp16" rounds none. Leave them out.')
    choices: dict[str, Any] = {
        "scaling": scaling,
        "past": past,
        "starts": starts,
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
        "mode": mode,
        "sas_threshold": sas_threshold,
        "block": block,
        "v_scale": v_scale,
        "smooth_k": smooth_k,
        "hadamard": hadamard,
    }
    if uses_triton(backend, q.device, kernel_obstacle(q, mode)):
        if not torch.compiler.is_compiling():
            from turbo_hf.ops.prefill import launch  # noqa: PLC0415 - needs Triton

            return launch.prefill(q, k, v, **choices)
        # torch.compile sees one operator
        tensors, numbers = pack_past(choices.pop("past"))
        return AttentionOutput(*library.prefill(q, k, v, tensors, numbers, **choices))
    return reference.prefill(q, k, v, **choices)


def _check_past(past: KVStore, k: torch.Tensor, mode: str) -> None:
    """ValueError unless the cache has the same rows and heads as k, in a form that this mode can read."""
    held = past.k_open
    if (held.shape[:2], held.shape[3], held.device) != (k.shape[:2], k.shape[3], k.device):
        raise ValueError(
            f"past must hold B, Hkv and D of k {tuple(k.shape)} on {k.device}; it holds {held.shape[0]} rows of "
            f"{held.shape[1]} heads of {held.shape[3]} channels on {held.device}."
        )
    if held.dtype != torch.int8 and mode != "fp16":
        raise ValueError(f'a past with heads of 16 bit is read in mode "fp16", which rounds nothing; got {mode!r}.')


def check_queries(
    q: torch.Tensor, kv_heads: int, dim: int, mode: str, starts: torch.Tensor | None, sinks: torch.Tensor | None
) -> None:
    """ValueError unless q, starts and sinks fit `kv_heads` heads of `dim` channels."""
    check_float("q", q)
    if q.shape[1] % kv_heads or q.shape[3] != dim:
        raise ValueError(f"q must be [B, Hq, M, {dim}] with Hq a multiple of {kv_heads}; got {tuple(q.shape)}.")
    if mode not in ATTENTION_MODES:
        raise ValueError(f"mode must be one of {', '.join(ATTENTION_MODES)}; got {mode!r}.")
    if starts is not None and starts.shape != q.shape[:1]:
        raise ValueError(f"starts must be [B] = [{q.shape[0]}]; got {tuple(starts.shape)}.")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks must be [Hq] = [{q.shape[1]}]; got {tuple(sinks.shape)}.")


def check_scores(window: int | None, softcap: float | None, sas_threshold: float | None) -> None:
    """ValueError unless each given option leaves something to attend to."""
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, the query itself; got {window}.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0; got {softcap}.")
    if sas_threshold is not None and not sas_threshold < 0:
        raise ValueError(f"sas_threshold must be below 0 (natural log units under the maximum); got {sas_threshold}.")
