"""Checks that a patched model still computes what it did: logits of a padded batch, of a prompt, a chunk and steps."""

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from turbo_hf.cache.context_group import spread
from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.errors import Unsupported
from turbo_hf.layout import type_16bit
from turbo_hf.models.model_layers import layer_windows
from turbo_hf.models.versions import CACHE
from turbo_hf.ops.host_device import input_device

DECODED = 16
"""Tokens that are passed one by one, so that attention reads the compressed cache."""

CHUNK = 24
"""Tokens that join the prompt in a second pass: more than a decode step, over a past."""

PROMPT = 144
"""Tokens of the shorter prompts: two sealed blocks and an open one. The longest goes beyond the model's windows."""

LONGEST = 4096
"""Tokens of a window beyond which no prompt is made: eager attention keeps all scores in memory."""

WORK = 4e11
"""Parameters times tokens beyond which no prompt is made longer on a CPU: a few seconds."""

REACHES = ("index_topk", "indexer_budget", "original_max_position_embeddings", "attention_chunk_size")
"""Fields of a config with a number of tokens beyond which attention changes, besides windows."""

LOST = 0.5
"""Relative error of the logits at which a check fails: half of the signal is gone."""

SLACK, MOST = 4, 0.5
"""Without quantization, a check fails at an error of this many times the effect of rounding, or of `MOST`."""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Logits compared with the unpatched model's.

    Args:
        error: |logits - reference| / |reference|, each less its mean over the vocabulary.
        agreement: share of positions with the same most likely token.
        tokens: number of positions.
    """

    error: float
    agreement: float
    tokens: int

    @property
    def passed(self) -> bool:
        """Whether the logits are finite and closer to the reference than `LOST`."""
        return self.error < LOST  # false for NaN, too


class CheckBatch(NamedTuple):
    """Prompts of different length, padded at the left.

    Args:
        ids, mask: [rows, tokens].
        parts: number of tokens of each pass.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unpatched:
    """The unpatched model's logits, as `probe` gives them.

    Args:
        plain: in one pass.
        cached: over Transformers' own cache.
        rounding: the distance from `plain` of logits with other rounding in attention.
        half: the same with rounding to 16 bit, which is what pages of a wider model that quantize nothing do. Layers
            that round their inputs themselves (LLM.int8) make it more or less than in proportion.
    """

    plain: torch.Tensor
    cached: torch.Tensor
    rounding: float
    half: float


def batch(model: PreTrainedModel) -> CheckBatch:
    """Fixed random prompts: one beyond the model's windows, if that is worth its time, and two of `PROMPT` and half."""
    config = model.config.get_text_config(decoder=True)
    reaches = [window or 0 for _, window in layer_windows(config)]
    reaches += [number for name in REACHES if isinstance(number := getattr(config, name, None), int)]
    reaches.append((getattr(config, "index_block_size", 0) or 0) * (getattr(config, "index_topk_blocks", 0) or 0))
    device = input_device(model)
    limit = min(LONGEST, WORK / max(1, model.num_parameters())) if device.type == "cpu" else LONGEST
    beyond = max((reach for reach in reaches if reach <= limit), default=0)
    longest = beyond + PROMPT + CHUNK + DECODED
    longest = min(longest, getattr(config, "max_position_embeddings", None) or longest)
    steps, chunk = min(DECODED, longest // 4), min(CHUNK, longest // 4)
    added = steps + chunk
    lengths = [longest, added + min(PROMPT, longest - added), added + min(PROMPT // 2, longest - added)]
    seeded = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (len(lengths), longest), generator=seeded, device="cpu")
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    parts = (longest - added, chunk, *[1] * steps)
    return CheckBatch(ids.to(device), mask.long().to(device), parts)


@torch.no_grad()
def probe(model: PreTrainedModel, cache: Any = None) -> torch.Tensor:
    """float32 logits [rows, tokens, vocabulary] of `batch`: of the end of the prompt, of a chunk, and of single tokens.

    `cache` None: in one pass, without a cache.
    """
    call: Any = model
    ids, mask, parts = batch(model)
    known = inspect.signature(type(model).forward).parameters
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    kept, total = min(DECODED, parts[0]), ids.shape[1]
    passes, kept_logits = (parts if cache is not None else (total,)), []
    for end, count in zip(torch.tensor(passes).cumsum(0).tolist(), passes, strict=True):
        here = slice(end - count, end)
        wanted = min(count, total - parts[0] + kept if cache is None else max(kept, parts[1]))
        options: dict[str, Any] = {CACHE: cache} if cache is not None else {"use_cache": False}
        if "position_ids" in known:
            options["position_ids"] = places[:, here]
        if "logits_to_keep" in known:
            options["logits_to_keep"] = wanted
        out = call(ids[:, here], attention_mask=mask[:, :end], **options)
        # a model without a head gives its states
        states = out.logits if hasattr(out, "logits") else out.last_hidden_state
        kept_logits.append(torch.as_tensor(states)[:, -wanted:].float())
    logits = torch.cat(kept_logits, 1)
    return logits[:, -(total - parts[0] + kept) :]


def compare(logits: torch.Tensor, reference: torch.Tensor) -> SelfCheck:
    """The figures of `SelfCheck` for two results of `probe`."""
    # a constant added to all logits of a position changes no probability
    centred = reference - reference.mean(-1, keepdim=True)
    difference = logits - logits.mean(-1, keepdim=True) - centred
    error = (difference.norm() / centred.norm()).item()
    agreement = (logits.argmax(-1) == reference.argmax(-1)).float().mean().item()
    return SelfCheck(error, agreement, reference[..., 0].numel())


def unpatched_logits(model: PreTrainedModel, modules: Collection[torch.nn.Module]) -> Unpatched:
    """What `require_agreement` compares with, taken before the patch. modules: the attention modules.

    Raises:
        Unsupported: the logits hold NaN or Inf.
    """
    plain = probe(model)
    if not plain.isfinite().all():
        raise Unsupported(
            "self-check: the unpatched model's own logits hold NaN or Inf, so that nothing can be compared. Check its "
            "weights and dtype, or patch without check=True."
        )
    rounding = _distance(_rounded(model, modules, model.dtype), plain)
    narrow = type_16bit(model.dtype)
    half = rounding if narrow == model.dtype else _distance(_rounded(model, modules, narrow), plain)
    return Unpatched(plain, probe(model, DynamicCache(config=model.config)), rounding, half)


def _rounded(model: PreTrainedModel, modules: Collection[torch.nn.Module], dtype: torch.dtype) -> torch.Tensor:
    """`probe` of a model whose attention modules are disturbed by one rounding of `dtype`."""
    hook = _Rounding(batch(model).mask, torch.finfo(dtype).eps)
    hooks = [module.register_forward_hook(hook) for module in modules]
    try:
        return probe(model)
    finally:
        for handle in hooks:
            handle.remove()


class _Rounding:
    """Forward hook of attention modules: moves what they give by random numbers, `eps` of its mean square root.

    Also drops what they give for padding, which is arbitrary: recurrent layers may read it. mask: [rows, tokens].
    """

    def __init__(self, mask: torch.Tensor, eps: float):
        self.mask, self.eps = mask, eps
        self.seeded: dict[torch.device, torch.Generator] = {}

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        x, *others = output if isinstance(output, tuple) else (output,)
        seeded = self.seeded.setdefault(x.device, torch.Generator(x.device).manual_seed(0))
        noise = torch.randn(x.shape, generator=seeded, device=x.device, dtype=torch.float32)
        size = self.eps * x.float().square().mean(-1, keepdim=True).sqrt()
        moved = (x.float() + size * noise).to(x.dtype) * self.mask[..., None].to(x)
        return (moved, *others) if isinstance(output, tuple) else moved


def require_agreement(
    model: PreTrainedModel, unpatched: Unpatched, config: TurboConfig, uncompressed: tuple[int, ...], cache: TurboCache
) -> None:
    """`Unsupported` if the patched model's logits are not its own: without a cache, with one that quantizes nothing,
    and with `cache`.

    Where nothing is quantized, only rounding is left, and `unpatched.rounding` is what it does to the logits. A wrong
    mask does more.
    """
    exact = TurboConfig(bits=16, attention="fp16", block_size=config.block_size, backend=config.backend)
    unrounded = TurboCache(model.config, exact, dense_layers=uncompressed)
    if cache.context is not None:
        spread(unrounded, cache.context)
    for case, got, want, rounding in (
        ("without a cache", probe(model), unpatched.plain, unpatched.rounding),
        ("over a cache that quantizes nothing", probe(model, unrounded), unpatched.cached, unpatched.half),
    ):
        distance = _distance(got, want)
        if not distance <= min(SLACK * rounding, MOST):
            raise Unsupported(
                f"self-check failed: {case}, the logits differ by {distance:.2%} from the unpatched model's, of which "
                f"rounding explains {rounding:.2%}. This model expects something of attention that a patch does not do "
                "(a mask, a keyword). The patch is off again; run this model without it."
            )
    result = compare(probe(model, cache), unpatched.plain)
    if not result.passed:
        raise Unsupported(
            f"self-check failed: the logits differ by {result.error:.0%} from the unpatched model's. The patch is "
            "off again; try a preset with more bits, or TurboConfig(dense_layers=...)."
        )


def _distance(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest relative error of a row's prompt, chunk or steps; for each of them, the median over its tokens.

    A router of experts that changes its mind about one token is no wrong mask, which shows at most tokens.
    """
    centred = reference - reference.mean(-1, keepdim=True)
    difference = logits - logits.mean(-1, keepdim=True) - centred
    errors = difference.norm(dim=-1) / centred.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    # NaN is larger than any number
    return max(float(part.median(-1).values.max().nan_to_num(torch.inf)) for part in errors.split(DECODED // 2, -1))
