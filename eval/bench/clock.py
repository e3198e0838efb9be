"""One `generate` of random prompts under a clock: what `bench generate` and `bench serve` time."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from transformers import LogitsProcessor

from turbo_hf.errors import out_of_memory
from turbo_hf.eval.bench.timing import free_memory, spread

Result = TypeVar("Result")

CHECKED = 2
"""New tokens whose logits are recorded: those of the prompt pass, and of the first step over the cache."""


class Clock(LogitsProcessor):
    """Notes when the logits of each new token are there. On a GPU by events: the host waits for nothing.

    Marks: the start, the logits of each new token, the end. first_logits: of the first row, (tokens before it [1, N],
    logits [1, V]) for the first CHECKED new tokens, if `record`.
    """

    def __init__(self, device: torch.device, record: bool = False) -> None:
        self.device, self.record = device, record
        self.marks: list[Any] = []
        self.first_logits: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """`scores`, unchanged."""
        self.mark()
        if self.record and len(self.first_logits) < CHECKED:
            self.first_logits.append((input_ids[:1].clone(), scores[:1].clone().float()))
        return scores

    def mark(self) -> None:
        """Note the time, once the device has done what it was given so far."""
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
            return
        with torch.cuda.device(self.device):
            event: Any = torch.cuda.Event(enable_timing=True)
            event.record()
        self.marks.append(event)

    def ms(self, start: int, end: int) -> float:
        """Milliseconds between two marks."""
        first, last = self.marks[start], self.marks[end]
        if self.device.type != "cuda":
            return 1e3 * float(last - first)
        last.synchronize()
        return float(first.elapsed_time(last))


def speed(clocks: Sequence[Clock], rows: int, new: int) -> dict[str, Any]:
    """Medians of several rounds of one `generate` of `new` tokens in each of `rows` rows.

    Returns:
        tokens_s: new tokens of all rows over the whole time, prompt included.
        first_ms: until the first token.
        first_spread: interquartile range of first_ms over it; None of a single round.
        step_ms: from one token to the next, mean of a round; None where there is no second one.
    """
    first = [clock.ms(0, 1) for clock in clocks]
    return {
        "tokens_s": 1e3 * rows * new / statistics.median(clock.ms(0, -1) for clock in clocks),
        "first_ms": statistics.median(first),
        "first_spread": spread(first) if len(first) > 1 else None,
        "step_ms": statistics.median(clock.ms(1, -2) / (new - 1) for clock in clocks) if new > 1 else None,
    }


def vocabulary_of(model: Any) -> int:
    """Tokens that the model knows."""
    size: int = model.config.get_text_config(decoder=True).vocab_size
    return size


def random_prompts(model: Any, rows: int, tokens: int, seed: int) -> torch.Tensor:
    """Ids, int64 [rows, tokens] on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, vocabulary_of(model), (rows, tokens), generator=generator)
    return ids.to(model.device)


def clocked(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, new: int, *, record: bool = False, **options: Any
) -> tuple[Clock, Any]:
    """One greedy `generate` of exactly `new` tokens: its clock, and what it returned as a dictionary.

    record: also the first logits. options: further ones of `generate`.
    """
    clock = Clock(model.device, record)
    clock.mark()
    made = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        logits_processor=[clock],
        return_dict_in_generate=True,
        **options,
    )
    clock.mark()
    return clock, made


def attempt(call: Callable[[], Result]) -> Result | None:
    """What the call returns; None where the memory does not suffice. All other errors as they are."""
    try:
        return call()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    free_memory()  # behind the handler: the error holds the frames that hold the tensors
    return None
