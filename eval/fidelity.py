"""Next-token distributions of one model read through each cache, against its own in 16 bit: what `turbo-hf fidelity`
measures. Caches are the real ones, read by the paths that `generate` takes."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from turbo_hf.calibration.artifacts import Calibration
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.errors import out_of_memory, shortened
from turbo_hf.eval.bench.timing import free_memory
from turbo_hf.eval.methods import BASELINE, Method, applied, cache_size, method_named
from turbo_hf.models.versions import CACHE
from turbo_hf.ops.host_device import input_device
from turbo_hf.patching.divergence import (
    LIKE,
    UNSTEADY,
    Divergence,
    Positions,
    Reading,
    compare_positions,
    log_probabilities_after,
    read_prompt,
    summarize,
    verdict,
)

AGAIN, EAGER, PAGES = "16 bit again", "16 bit, eager", "16-bit pages"
"""The noise rows: the unpatched model in other passes, and by Transformers' plainest attention; our pages with
unrounded numbers."""

EAGER_TOKENS = 4096
"""Longest prompt of the eager row: that attention keeps all scores of a prompt."""

STEP = 16
"""Tokens of a pass on the path of decode steps, which take as many."""


class Case(NamedTuple):
    """One column of figures.

    Args:
        tokens: of the prompt.
        path: "steps": what follows is read in passes of `STEP` tokens, by the kernel of decode steps; "chunk": in one
            pass over the past; "answer": the model's own greedy continuation, in steps.
    """

    tokens: int
    path: str

    def passes(self, tail: int, again: bool = False) -> tuple[int, ...]:
        """Tokens of each pass, the prompt first. again: other passes over the same tokens."""
        if self.path == "chunk":
            return (self.tokens, *((tail // 2, tail - tail // 2) if again else (tail,)))
        size = STEP // 2 if again else STEP
        return (self.tokens, *[size] * (tail // size), *([tail % size] if tail % size else []))


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One method in one case.

    Args:
        method: its name. case: what was read.
        figures: None: it was refused, or failed.
        bytes_per_token: of its cache, all layers, after the last text; None if unknown.
        verdict: as `divergence.verdict` says; of a method that failed, why.
    """

    method: str
    case: Case
    figures: Divergence | None
    bytes_per_token: float | None
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON; figures that are not finite are None."""
        own = {} if self.figures is None else asdict(self.figures)
        finite = {name: value if math.isfinite(value) else None for name, value in own.items()}
        where = {"method": self.method, **self.case._asdict(), "verdict": self.verdict}
        return {**where, "bytes_per_token": self.bytes_per_token, **finite}


def rounded(keys: int, values: int, **more: Any) -> TurboConfig:
    """Keys and values of these bits."""
    return TurboConfig(bits=keys, value_bits=None if values == keys else values, **more)


def grid(widths: Sequence[int], latent: bool = False) -> list[Method]:
    """Widths of keys by widths of values; latent: of latents, which have one width."""
    pairs = [(keys, values) for keys in widths for values in widths if keys == values or not latent]
    return [Method(f"K{keys} V{values}", rounded(keys, values)) for keys, values in pairs]


def layer_map(layers: Sequence[int], bits: int, latent: bool = False) -> list[Method]:
    """Each of these layers alone: its keys at `bits` and its values at 8 bit, and the other way round; all others are
    pages of 16 bit. latent: its latents at `bits`."""
    sides = {"latents": (bits, bits)} if latent else {"keys": (bits, 8), "values": (8, bits)}
    return [
        Method(f"layer {one} {side}", rounded(*widths, int8_layers=(), dense_layers=tuple(set(layers) - {one})))
        for one in layers
        for side, widths in sides.items()
    ]


def measure(
    model: Any,
    windows: torch.Tensor,
    cases: Sequence[Case],
    methods: Sequence[Method],
    *,
    tail: int,
    noise: bool = True,
    calibration: Calibration | str | None = "auto",
    advance: Callable[[str], None] = lambda method: None,
) -> list[Fidelity]:
    """Read each text through each method's cache, and through Transformers' own.

    Args:
        model: unpatched.
        windows: int64 [texts, tokens], of `tokens` for the longest case and `tail` + 1 more.
        cases: what to read of them.
        methods: what to compare with the unpatched model.
        tail: tokens after the prompt, whose distributions are compared.
        noise: begin with the noise rows.
        calibration: as `applied` takes it.
        advance: called with the name of each method as it has read a text.

    Raises:
        torch.OutOfMemoryError: the unpatched model itself does not fit.
    """
    rows: list[Fidelity] = []
    noisy = [Method(AGAIN), Method(EAGER), Method(PAGES, TurboConfig(bits=16))]
    every = [*(noisy if noise else []), *methods]
    for tokens in dict.fromkeys(case.tokens for case in cases):
        # a prompt is read once through each cache: what follows it is read over copies
        own = [case for case in cases if case.tokens == tokens]
        found: dict[Case, dict[str, list[Positions]]] = {case: {at.name: [] for at in every} for case in own}
        sizes: dict[Case, dict[str, float]] = {case: {} for case in own}
        unread = {
            at.name: f"a prompt of {tokens} tokens shows nothing of it; from {at.config.begins} on it does"
            for at in every
            if at.config is not None and at.config.begins > tokens
        }
        if tokens > EAGER_TOKENS:
            unread[EAGER] = f"eager attention keeps all scores: not read above {EAGER_TOKENS} tokens"
        failed = {case: dict(unread) for case in own}
        for window in windows:
            readings = [_reading(model, window, case, tail) for case in own]
            prompt: Any = DynamicCache(config=model.config)
            read_prompt(model, readings[0], prompt)
            references = [log_probabilities_after(model, reading, copy.deepcopy(prompt)) for reading in readings]
            texts = list(zip(own, readings, references, strict=True))
            for method in every:
                # the first of the noise rows reads on from it; then its memory is free
                other, shared, prompt = method.name == AGAIN, prompt, None
                left = [text for text in texts if method.name not in failed[text[0]]]
                through = [reading._replace(passes=case.passes(tail, other)) for case, reading, _ in left]
                got: list[tuple[torch.Tensor, float]] = []
                try:
                    if left:
                        got.extend(_read(model, method, through, shared if other else None, calibration))
                except (ValueError, RuntimeError) as error:
                    # one method less; an error of the GPU itself would meet all that follows
                    if not isinstance(error, ValueError) and not out_of_memory(error):
                        raise
                    reason = "out of memory" if out_of_memory(error) else shortened(error)
                    # what has been read before stands
                    failed |= {case: {**failed[case], method.name: reason} for case, _, _ in left[len(got) :]}
                    free_memory()
                for (case, reading, reference), (log_p, size) in zip(left, got, strict=False):
                    found[case][method.name].append(compare_positions(log_p, reference, reading))
                    sizes[case][method.name] = size
                    advance(method.name)
        for case in own:
            rows += _judged(case, every, found[case], sizes[case], failed[case])
    return rows


def _read(
    model: Any, method: Method, readings: Sequence[Reading], prompt: Any, calibration: Calibration | str | None
) -> Iterator[tuple[torch.Tensor, float]]:
    """Of each reading, which have one prompt: log-probabilities of one method, and bytes per token of its cache.
    prompt: the unpatched model's cache of it, if that is the method's as well; else None."""
    with applied(model, method, calibration) as handle, _eager(model, method.name == EAGER):
        for place, reading in enumerate(readings, 1):
            if prompt is None or method.make is not None:
                # those of other packages need not be made for copies
                if handle is not None:
                    prompt = handle.new_cache()
                elif method.make is not None:
                    prompt = method.make(model, torch.ones_like(reading.ids))
                else:
                    prompt = DynamicCache(config=model.config)
                read_prompt(model, reading, prompt)
            cache = prompt if place == len(readings) else copy.deepcopy(prompt)
            log_p = log_probabilities_after(model, reading, cache)
            yield log_p, cache_size(cache, 1)[0] / (reading.ids.shape[1] - 1)


@contextmanager
def _eager(model: Any, wanted: bool) -> Iterator[None]:
    """Inside, if wanted, the model computes eager attention."""
    before = model.config._attn_implementation
    if wanted:
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        if wanted:
            model.set_attn_implementation(before)


def _judged(
    case: Case,
    methods: Iterable[Method],
    found: dict[str, list[Positions]],
    sizes: dict[str, float],
    failed: dict[str, str],
) -> Iterator[Fidelity]:
    noise = 0.0
    for method in methods:
        name = method.name
        if name in failed or not found[name]:
            yield Fidelity(name, case, None, None, failed.get(name, "not read"))
            continue
        figures = summarize(found[name])
        of_noise = name in (AGAIN, EAGER, PAGES)
        noise = max(noise, figures.kl) if name == AGAIN else noise
        yield Fidelity(name, case, figures, sizes[name], "noise" if of_noise else verdict(figures.kl, noise))


def _reading(model: Any, window: torch.Tensor, case: Case, tail: int) -> Reading:
    """The text of a case: of the window, or its beginning and what the model answers to it."""
    passes = case.passes(tail)
    ids = window[None, : case.tokens + tail + 1].to(input_device(model))
    if case.path == "answer":
        ids = continued(model, ids[:, : case.tokens], tail + 1)
    return Reading(ids, passes)


@torch.no_grad()
def continued(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    """`ids` and `count` tokens that the unpatched model goes on with, the most likely ones but for an end."""
    out: torch.Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        # what the checkpoint's own generation config may ask for
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        **{CACHE: DynamicCache(config=model.config)},
    )
    return out


def unsteady(rows: Iterable[Fidelity]) -> str | None:
    """A sentence if the unpatched model gives other distributions in other passes; None: it does not."""
    most = max((row.figures.kl for row in rows if row.method == AGAIN and row.figures is not None), default=0.0)
    if most <= UNSTEADY:
        return None
    return (
        f"The unpatched model differs from itself by {most:.4f} nats where the same tokens come in other passes, as "
        "layers do that lose state between passes of several tokens (Mamba 2). Figures compare caches in equal passes."
    )


def suggestion(rows: Sequence[Fidelity]) -> str:
    """The smallest of the patched methods that is like 16 bit in every case, as a sentence."""
    if not rows:
        return "None of these methods is of a patched model."
    by_name: dict[str, list[Fidelity]] = {}
    for row in rows:
        by_name.setdefault(row.method, []).append(row)
    sizes = {
        name: max(row.bytes_per_token or math.inf for row in own)
        for name, own in by_name.items()
        if all(row.verdict == LIKE for row in own)
    }
    if not sizes:
        return "No method is like 16 bit on this model: evaluate on your tasks before you use one."
    smallest = min(sizes, key=lambda name: (sizes[name], name))
    return f"The smallest that is like 16 bit here: {smallest}, {sizes[smallest]:,.0f} bytes per token."


def named(names: Sequence[str]) -> list[Method]:
    """The methods of these names; the baseline is always read. Errors as in `method_named`."""
    return [method_named(name) for name in dict.fromkeys(names) if name != BASELINE]
