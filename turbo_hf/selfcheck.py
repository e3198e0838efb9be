"""Checks that a patched model still computes what it did: logits over a short text, both prompt and decoding."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from turbo_hf.errors import Unsupported
from turbo_hf.transfer import input_device

DECODED = 16
"""Tokens that are fed one by one, so that attention reads the compressed cache."""

PROMPT = 144
"""Tokens of the prompt: two sealed blocks and an open one."""

LOST = 0.5
"""Relative error of the logits at which a check fails: half of the signal is gone."""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """error: |logits - reference| / |reference|, mean taken off; agreement: share of equal most likely tokens."""

    error: float
    agreement: float
    tokens: int

    @property
    def passed(self) -> bool:
        """Whether the logits are finite and closer to the reference than `LOST`."""
        return self.error < LOST  # false for NaN, too


@torch.no_grad()
def probe(model: PreTrainedModel, cache: Any = None) -> torch.Tensor:
    """float32 logits [DECODED + 1, vocabulary] after a fixed random prompt: the prompt's, then token by token.

    `cache` None: in one pass, without a cache.
    """
    call: Any = model
    config = model.config.get_text_config(decoder=True)
    tokens = min(PROMPT + DECODED, getattr(config, "max_position_embeddings", None) or PROMPT + DECODED)
    seeded = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, tokens), generator=seeded, device="cpu").to(input_device(model))
    prompt = tokens - DECODED
    if cache is None:
        logits = call(ids, use_cache=False).logits[0, prompt - 1 :]
    else:
        parts = [ids[:, :prompt], *(ids[:, i : i + 1] for i in range(prompt, tokens))]
        logits = torch.cat([call(part, past_key_values=cache).logits[0, -1:] for part in parts])
    return torch.as_tensor(logits).float()


def compare(logits: torch.Tensor, reference: torch.Tensor) -> SelfCheck:
    """The figures of `SelfCheck` for two results of `probe`."""
    # a constant added to all logits of a position changes no probability
    centred = reference - reference.mean(-1, keepdim=True)
    difference = logits - logits.mean(-1, keepdim=True) - centred
    error = (difference.norm() / centred.norm()).item()
    agreement = (logits.argmax(-1) == reference.argmax(-1)).float().mean().item()
    return SelfCheck(error, agreement, len(reference))


def require_agreement(logits: torch.Tensor, reference: torch.Tensor) -> None:
    """`Unsupported` if the check of a patch has failed."""
    if not reference.isfinite().all():
        raise Unsupported(
            "self-check: the unpatched model's own logits hold NaN or Inf, so that nothing can be compared. Check its "
            "weights and dtype, or patch without check=True."
        )
    found = compare(logits, reference)
    if not found.passed:
        raise Unsupported(
            f"self-check failed: the logits differ by {found.error:.0%} from the unpatched model's. The patch is "
            "off again; try a preset with more bits, or TurboConfig(dense_layers=...)."
        )
