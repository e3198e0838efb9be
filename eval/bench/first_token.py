"""Time to the first token of a model with random weights, patched and not: what a long prompt costs as a whole."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.eval.bench.timing import Call, Stopwatch, side_by_side, speedup, spread
from turbo_hf.patching.patch_model import patch


@dataclass(frozen=True, slots=True)
class Row:
    """ms: median of the rounds; spread: interquartile range over it; speedup: times as fast as SDPA, by the rounds.

    peak_bytes: the most memory allocated during a call, weights included; 0 where it is not counted.
    """

    method: str
    ms: float
    spread: float
    speedup: float
    peak_bytes: int


@torch.inference_mode()
def first_token(
    model: Any, tokens: int, batch: int, methods: dict[str, TurboConfig], stopwatch: Stopwatch, seconds: float
) -> list[Row]:
    """Time `generate` of one token after a random prompt, unpatched (SDPA, DynamicCache) and under each config."""
    ids = torch.randint(10, model.config.vocab_size, (batch, tokens), device=stopwatch.device)
    mask = torch.ones_like(ids)

    def plain() -> None:
        model.generate(ids, attention_mask=mask, max_new_tokens=1, min_new_tokens=1, do_sample=False, pad_token_id=0)

    def patched(config: TurboConfig) -> None:
        with patch(model, config):
            plain()

    calls: dict[str, Call] = {"SDPA": plain}
    calls |= {name: partial(patched, config) for name, config in methods.items()}
    times = side_by_side(calls, stopwatch, seconds)
    return [
        Row(name, sorted(found)[len(found) // 2], spread(found), speedup(found, times["SDPA"]), _peak(calls[name]))
        for name, found in times.items()
    ]


def _peak(call: Any) -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated()
