"""How far a compressed cache moves a model's next-token distributions: the figures of llama.cpp's `--kl-divergence`."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from turbo_hf.models.versions import CACHE

LIKE, SMALL, EVALUATE, NEVER = "like 16 bit", "small", "evaluate on your tasks", "do not use"

BOUNDS = ((0.003, LIKE), (0.01, SMALL), (0.1, EVALUATE))
"""Mean KL in nats up to which each verdict holds; above the last one `NEVER`. docs/evaluation.md argues for them."""

UNSTEADY = BOUNDS[1][0] / 2
"""Mean KL in nats of 16 bit to itself above which other passes are no noise, and excuse no cache: layers that lose
state between passes of several tokens (Mamba 2) move it by a tenth."""

SPLIT = 256
"""Positions that are compared at a time: of a large vocabulary, each takes megabytes."""


class Reading(NamedTuple):
    """A text that is read through a cache.

    Args:
        ids: int64 [1, tokens + 1]; the last token is only predicted.
        passes: tokens of each pass; the first one is the prompt, whose predictions are not compared.
    """

    ids: torch.Tensor
    passes: tuple[int, ...]


class Positions(NamedTuple):
    """What is compared at each position of a text, [positions] each.

    Args:
        kl: KL(reference || method) of the next token's distribution, float64, nats.
        moved: the method's probability of the right token less the reference's, float64.
        same: whether both have the same most likely token, bool.
        nll, reference_nll: -log of the probability of the right token, float64, nats.
    """

    kl: torch.Tensor
    moved: torch.Tensor
    same: torch.Tensor
    nll: torch.Tensor
    reference_nll: torch.Tensor


@dataclass(frozen=True, slots=True)
class Divergence:
    """A method against a reference, over all positions of all texts. Standard errors are those of means of texts, since
    positions of one text are alike; NaN for a single text.

    Args:
        kl, kl_error: mean KL in nats, and its standard error.
        kl_median, kl_99, kl_999, kl_max: median, quantiles and maximum of KL.
        moved_rms, moved_99: root mean square, and 99 % quantile of the size, of the change of the right token's
            probability.
        same_top: share of positions with the same most likely token.
        perplexity: of the method. ratio, ratio_error: over the reference's, and its standard error.
        positions, texts: how many.
    """

    kl: float
    kl_error: float
    kl_median: float
    kl_99: float
    kl_999: float
    kl_max: float
    moved_rms: float
    moved_99: float
    same_top: float
    perplexity: float
    ratio: float
    ratio_error: float
    positions: int
    texts: int


def verdict(kl: float, noise: float = 0.0) -> str:
    """The mean KL in words that a user can act on. noise: the mean KL of 16 bit to itself, twice which is like 16 bit
    if it is no more than `UNSTEADY`.

    NaN is never like 16 bit.
    """
    if noise <= UNSTEADY and kl <= 2 * noise:
        return LIKE
    return next((words for bound, words in BOUNDS if kl <= bound), NEVER)


def log_probabilities(model: Any, reading: Reading, cache: Any) -> torch.Tensor:
    """float32 log-probabilities [positions, vocabulary] of the token after each one that follows the prompt."""
    read_prompt(model, reading, cache)
    return log_probabilities_after(model, reading, cache)


@torch.no_grad()
def read_prompt(model: Any, reading: Reading, cache: Any) -> None:
    """The first pass."""
    _pass(model, reading.ids[:, : reading.passes[0]], cache, 1)


@torch.no_grad()
def log_probabilities_after(model: Any, reading: Reading, cache: Any) -> torch.Tensor:
    """As `log_probabilities`, over a cache that holds the prompt."""
    end, *counts = reading.passes
    found = []
    for count in counts:
        logits = _pass(model, reading.ids[:, end : end + count], cache, count)
        found.append(logits[0].float().log_softmax(-1))
        end += count
    return torch.cat(found)


def _pass(model: Any, ids: torch.Tensor, cache: Any, keep: int) -> torch.Tensor:
    """Logits of a pass: of its `keep` newest tokens, where the model can leave out the others."""
    options: dict[str, Any] = {CACHE: cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
        options["logits_to_keep"] = keep
    return torch.as_tensor(model(ids, **options).logits)


def compare_positions(got: torch.Tensor, reference: torch.Tensor, reading: Reading) -> Positions:
    """`Positions` of two results of `log_probabilities` for the same text."""
    right = reading.ids[0, reading.passes[0] + 1 :, None].to(got.device)
    parts = [_compare(*part) for part in zip(*(x.split(SPLIT) for x in (got, reference, right)), strict=True)]
    return Positions(*map(torch.cat, zip(*parts, strict=True)))


def divergences(got: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """KL(reference || got) float64 [..., positions] of log-probabilities [..., positions, vocabulary], in nats."""
    # a probability of 0 adds nothing; the sum of many terms of both signs may round to less than 0
    terms = torch.where(reference.isneginf(), 0.0, reference.exp() * (reference - got))
    return terms.sum(-1, dtype=torch.float64).clamp(min=0)


def _compare(got: torch.Tensor, reference: torch.Tensor, right: torch.Tensor) -> Positions:
    own, base = got.gather(1, right)[:, 0].double(), reference.gather(1, right)[:, 0].double()
    return Positions(
        divergences(got, reference), own.exp() - base.exp(), got.argmax(-1) == reference.argmax(-1), -own, -base
    )


def summarize(texts: Sequence[Positions]) -> Divergence:
    """The figures over all positions of the texts."""
    kl, moved, same, nll, base = (torch.cat([part.cpu() for part in parts]) for parts in zip(*texts, strict=True))
    median, most, nearly_all = torch.quantile(kl, torch.tensor([0.5, 0.99, 0.999], dtype=kl.dtype)).tolist()
    ratio = (nll.mean() - base.mean()).exp().item()
    return Divergence(
        kl.mean().item(),
        _error([part.kl.mean().item() for part in texts]),
        median,
        most,
        nearly_all,
        kl.max().item(),
        moved.square().mean().sqrt().item(),
        moved.abs().quantile(0.99).item(),
        same.double().mean().item(),
        nll.mean().exp().item(),
        ratio,
        # of exp(x), to first order
        ratio * _error([(part.nll - part.reference_nll).mean().item() for part in texts]),
        len(kl),
        len(texts),
    )


def _error(means: list[float]) -> float:
    """Standard error of the mean of these."""
    if len(means) < 2:
        return math.nan
    return torch.tensor(means, dtype=torch.float64).std().item() / math.sqrt(len(means))
