"""Checks that a patched model still computes what it did: logits of a padded batch, of a prompt, a chunk and steps, and
how far its cache moves the distributions of a text."""

import inspect
import math
from collections.abc import Collection
from importlib import resources
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel, ProcessorMixin

from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.config.turbo_config import TurboConfig, unrounded
from turbo_hf.errors import Notices, Unsupported
from turbo_hf.layout import type_16bit
from turbo_hf.models.model_layers import layer_windows
from turbo_hf.models.versions import CACHE
from turbo_hf.ops.host_device import input_device
from turbo_hf.patching.divergence import (
    EVALUATE,
    NEVER,
    Divergence,
    Reading,
    compare_positions,
    log_probabilities,
    summarize,
    verdict,
)

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

TEXT = "moby_dick.txt"
"""Of `turbo_hf/texts`: what is read where there is a tokenizer."""

READ, TAIL, PASS = 320, 128, 16
"""Tokens of that text's prompt, if no more are kept open; tokens after it, whose distributions are compared; tokens of
one pass over these, as many as a decode step takes."""

BLOCKS = 4
"""Sealed blocks that the prompt has at least."""

SAMPLES = 8
"""Rows in which a model without a tokenizer samples the text, side by side."""

SLACK, MOST = 4, 0.5
"""Without quantization, a check fails at an error of this many times the effect of rounding, or of `MOST`."""


Unpatched = dict[str, tuple[torch.Tensor, float]]
"""By what was run, the unpatched model's logits, as `probe` gives them, and the distance from them of logits with other
rounding in attention."""


def batch(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Fixed random prompts of different length, padded at the left: ids and mask [rows, tokens], and the number of
    tokens of each pass. One goes beyond the model's windows, if that is worth its time; two are of `PROMPT` and half.
    """
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
    # beyond the windows, if there are any, then short ones
    lengths = sorted({longest, *(added + min(most, longest - added) for most in (PROMPT, PROMPT // 2))}, reverse=True)
    seeded = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (len(lengths), longest), generator=seeded, device="cpu")
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    parts = (longest - added, chunk, *[1] * steps)
    return ids.to(device), mask.long().to(device), parts


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


class CheckText(NamedTuple):
    """A text, and what the unpatched model says after each of its last tokens.

    Args:
        reading: its tokens and passes.
        reference: float32 log-probabilities [tokens, vocabulary].
        words: what it is.
    """

    reading: Reading
    reference: torch.Tensor
    words: str

    def check(self, model: PreTrainedModel, cache: Any) -> Divergence:
        """What a patched model makes of the text with that cache."""
        got = log_probabilities(model, self.reading, cache)
        return summarize([compare_positions(got, self.reference, self.reading)])


def check_text(model: PreTrainedModel, config: TurboConfig, tokenizer: Any) -> CheckText | None:
    """A text whose prompt has `BLOCKS` sealed blocks of `config` at least, if the model has positions for so many. Of
    an unpatched model; None: it has no head, so that there are no distributions.

    tokenizer: None: the model samples the text itself.

    Raises:
        Unsupported: its positions do not hold one block and what comes after it, or the tokenizer is another model's.
    """
    if model.get_output_embeddings() is None:
        return None
    text = model.config.get_text_config(decoder=True)
    opened = config.first_tokens + config.recent
    kept = opened + BLOCKS * config.expert.block_size
    room = getattr(text, "max_position_embeddings", None) or math.inf
    tail = TAIL if room > 2 * TAIL else PASS
    prompt = int(min(max(READ, kept), room - tail - 1))
    if prompt < opened + config.expert.block_size:
        raise Unsupported(
            f"self-check: this model has {room} positions, too few for a block that is kept at the preset's bits "
            f"({opened} first and newest tokens are not). Patch it without check=True."
        )
    count = prompt + tail + 1
    if isinstance(tokenizer, ProcessorMixin):
        # a processor of images takes them first, and has the tokenizer inside
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if tokenizer is None:
        ids, words = _sampled(model, count), "its own sampled text"
    else:
        shipped = resources.files("turbo_hf").joinpath("texts", TEXT).read_text("utf-8")
        ids, words = tokenizer(shipped[: 16 * count], return_tensors="pt").input_ids[:, :count], TEXT
        if ids.shape[1] < count or int(ids.max()) >= model.get_output_embeddings().weight.shape[0]:
            raise Unsupported(
                f"self-check: the tokenizer makes {ids.shape[1]} tokens of {TEXT}, the largest of them {ids.max()}, "
                f"where {count} of a vocabulary of {text.vocab_size} are expected. Pass the model's own tokenizer."
            )
    reading = Reading(ids.to(input_device(model)), (prompt, *[PASS] * (tail // PASS)))
    return CheckText(reading, log_probabilities(model, reading, DynamicCache(config=model.config)), words)


@torch.no_grad()
def _sampled(model: PreTrainedModel, count: int) -> torch.Tensor:
    """`count` tokens that the model samples from itself, [1, count]: several rows, one after the other."""
    call: Any = model
    device = input_device(model)
    seeded = torch.Generator(device).manual_seed(0)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    rows = torch.randint(vocabulary, (SAMPLES, 1), generator=seeded, device=device)
    cache, each = DynamicCache(config=model.config), -(-count // SAMPLES)
    while rows.shape[1] < each:
        logits = call(rows[:, -1:], **{CACHE: cache}).logits[:, -1].float()
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=seeded)
        rows = torch.cat((rows, drawn.to(device)), 1)
    return rows.reshape(1, -1)[:, :count]


def unpatched_logits(model: PreTrainedModel, modules: Collection[torch.nn.Module]) -> Unpatched:
    """What `require_agreement` compares with, taken before the patch: without a cache, and over Transformers' own.

    modules: the attention modules.

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
    # pages of a wider model that quantize nothing round to 16 bit, too. Layers that round their inputs themselves
    # (LLM.int8) make that more or less than in proportion
    narrow = type_16bit(model.dtype)
    half = rounding if narrow == model.dtype else _distance(_rounded(model, modules, narrow), plain)
    cached = probe(model, DynamicCache(config=model.config))
    return {"without a cache": (plain, rounding), "over a cache that quantizes nothing": (cached, half)}


def _rounded(model: PreTrainedModel, modules: Collection[torch.nn.Module], dtype: torch.dtype) -> torch.Tensor:
    """`probe` of a model whose attention modules are disturbed by one rounding of `dtype`."""
    hook = _Rounding(batch(model)[1], torch.finfo(dtype).eps)
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
    model: PreTrainedModel, unpatched: Unpatched, config: TurboConfig, uncompressed: tuple[int, ...]
) -> None:
    """`Unsupported` if the patched model's logits are not its own: without a cache, and with one that quantizes
    nothing.

    Where nothing is quantized, only rounding is left. A wrong mask does more to the logits.
    """
    exact = TurboCache(model.config, unrounded(config), uncompressed_layers=uncompressed)
    # an error of a pass says more than a difference
    got = [probe(model, cache) for cache in (None, exact)]
    for (case, (want, rounding)), logits in zip(unpatched.items(), got, strict=True):
        distance = _distance(logits, want)
        if not distance <= min(SLACK * rounding, MOST):
            raise Unsupported(
                f"self-check failed: {case}, the logits differ by {distance:.2%} from the unpatched model's, of which "
                f"rounding explains {rounding:.2%}. This model expects something of attention that a patch does not do "
                "(a mask, a keyword). The patch is off again; run this model without it."
            )


def judged(text: CheckText | None, model: PreTrainedModel, handle: Any, notices: Notices) -> str:
    """What a patched model makes of the text, for the report. A preset that must not be used on this model is refused,
    and one that may lose answers noted.

    text: None: there is none. handle: of the patch.
    """
    if text is None:
        return "self-check: logits as before; without a head there is no distribution to compare"
    found = text.check(model, handle.new_cache())
    outcome = verdict(found.kl)
    said = (
        f"self-check: KL {found.kl:.4f} nats to the unpatched model over {found.positions} tokens of {text.words}, "
        f"{found.same_top:.0%} the same most likely token: {outcome}"
    )
    if outcome == NEVER:
        remedy = 'Try more bits, leave layers dense (turbo-hf fidelity --map), or pass strict="warn" to go on.'
        notices.refuse(f"{said}.", f"The patch is off again. {remedy}")
    elif outcome == EVALUATE:
        notices.note(f"{said}.")
    begins = handle.report().config.begins
    unseen = "" if text.reading.passes[0] >= begins else f" (what is sparse from {begins} tokens on was not read)"
    return said + unseen


def _distance(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest relative error of a row's prompt, chunk or steps; for each of them, the median over its tokens.

    A router of experts that changes its mind about one token is no wrong mask, which shows at most tokens.
    """
    centred = reference - reference.mean(-1, keepdim=True)
    difference = logits - logits.mean(-1, keepdim=True) - centred
    errors = difference.norm(dim=-1) / centred.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    # NaN is larger than any number
    return max(float(part.median(-1).values.max().nan_to_num(torch.inf)) for part in errors.split(DECODED // 2, -1))
