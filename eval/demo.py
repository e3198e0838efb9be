"""The demonstration: the same prompts through the unpatched model and through each preset, side by side."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from turbo_hf.eval.methods import cache_size, until, without_plans
from turbo_hf.eval.needle import Needle
from turbo_hf.models.versions import CACHE
from turbo_hf.patching.patch_model import patch

BASELINE = "baseline"

NEW_TOKENS = 16
"""The longest reply."""


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One method's figures. Bytes are what the caches had allocated when `generate` returned, open buffers included.

    needle_right, needle_total: needles found, of all.
    tokens_equal_pct: of the replies' tokens, those equal to the unpatched model's.
    kv_bytes_per_token: per token that the caches hold.
    compression: times as small as the baseline.
    tokens_per_s: new tokens per second, prompts included.
    """

    method: str
    needle_right: int
    needle_total: int
    tokens_equal_pct: float
    kv_bytes_per_token: float
    compression: float
    tokens_per_s: float


class _Run(NamedTuple):
    replies: list[list[int]]
    kv_bytes_per_token: float
    seconds: float


def _run(
    model: Any, tokenizer: Any, texts: list[list[str]], advance: Callable[[int], None],
    rehearse: bool,
) -> _Run:  # fmt: skip
    """Greedy replies to batches of prompts, padded at the left; rehearse: run everything once before it is timed."""
    replies: list[list[int]] = []
    stored, cached, seconds = 0, 0, 0.0

    def reply(inputs: Any, count: int = NEW_TOKENS) -> Any:
        options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
        return model.generate(**inputs, **options, return_dict_in_generate=True)

    batches = [tokenizer(rows, return_tensors="pt", padding=True).to(model.device) for rows in texts]
    # timing starts once everything is loaded, and on a GPU compiled for each size
    for inputs in batches if rehearse else ():
        reply(inputs)
    reply(tokenizer(texts[0][:1], return_tensors="pt").to(model.device), 2)
    for inputs in batches:
        start = time.perf_counter()
        out = reply(inputs)
        new = out.sequences[:, inputs.input_ids.shape[1] :].tolist()
        seconds += time.perf_counter() - start
        size, held = cache_size(out[CACHE], len(new))
        stored, cached = stored + size, cached + held
        replies += [until(row, {tokenizer.eos_token_id, tokenizer.pad_token_id}) for row in new]
        advance(len(new))
    return _Run(replies, stored / cached, seconds)


def demo(
    model: Any,
    tokenizer: Any,
    prompts: list[Needle],
    methods: list[str],
    *,
    batch: int = 8,
    rehearse: bool | None = None,
    advance: Callable[[str, int], None] = lambda method, done: None,
) -> Iterator[tuple[DemoRow, list[str]]]:
    """Run the baseline, then each preset in `methods`; yields each one's row and its replies as text.

    Args:
        model, tokenizer: loaded; the tokenizer pads left.
        prompts: from `needles`.
        methods: presets, in order.
        batch: prompts per batch.
        rehearse: run everything once before timing starts; None: on a GPU, where kernels are compiled at first use.
        advance: called with the method and the number of prompts just finished.
    """
    base: _Run | None = None
    asked = [[p.prompt for p in prompts[at : at + batch]] for at in range(0, len(prompts), batch)]
    for method in [BASELINE, *methods]:
        patched = nullcontext() if method == BASELINE else patch(model, method)
        with torch.inference_mode(), without_plans(), patched:
            twice = model.device.type == "cuda" if rehearse is None else rehearse
            run = _run(model, tokenizer, asked, partial(advance, method), twice)
        base = base or run
        texts = tokenizer.batch_decode(run.replies, skip_special_tokens=True)
        pairs = list(zip(run.replies, base.replies, strict=True))
        same = sum(a == b for mine, theirs in pairs for a, b in zip(mine, theirs, strict=False))
        longest = sum(max(len(mine), len(theirs)) for mine, theirs in pairs)
        row = DemoRow(
            method=method,
            needle_right=sum(p.found_in(text) for p, text in zip(prompts, texts, strict=True)),
            needle_total=len(prompts),
            tokens_equal_pct=round(100 * same / longest, 2) if longest else 100.0,
            kv_bytes_per_token=round(run.kv_bytes_per_token, 1),
            compression=round(base.kv_bytes_per_token / run.kv_bytes_per_token, 2),
            tokens_per_s=round(sum(map(len, run.replies)) / run.seconds, 1),
        )
        yield row, texts
