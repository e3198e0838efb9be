"""A tiny model with what trained ones have and the carried one lacks: an attention sink, and values of uneven size."""

import math
from typing import Any

import torch
from models import tiny_llama
from transformers import DynamicCache

import turbo_hf
from turbo_hf.config.turbo_config import ConfigLike
from turbo_hf.models.versions import CACHE

SINK = 0
"""The token that every text of `sink_text` begins with."""

WIDTH, CONTENT, MARK, CONSTANT = 128, 64, 126, 127
"""Of the residual stream: channels; those that values read, the first ones; the sink's own; one that others share."""
SLOW = 63
"""A channel of a head that its rotary embedding hardly turns: at distance 1,000 by 0.01."""


def sink_model() -> Any:
    """3 layers, 4 query heads on 2 KV heads of 64 channels, float32, by hand from seeded numbers.

    Measured on 544 tokens, beside SmolLM2-135M-Instruct on Walden (layers 12 to 29):

    - Token 0 in the residual stream: 26 times as large as others (13 to 190).
    - Attention mass on token 0: 0.62 to 0.64 (0.27 to 0.62).
    - Its value's norm over the median: 0.11 to 0.15 (0.11 to 0.44).
    - Its key's: 0.32 (0.21 to 0.50), all of it in one slow channel, where other keys have the other sign.
    - Values of a block, largest over smallest norm: 4 to 7 (2 to 4; layers 3 to 9: 6 to 10).
    - KL to 16 bit of `turbo4` and `turbo-k4v2`, with one scale per block: 0.028 and 0.37 (0.017, 0.30; the carried
      model 0.002, 0.02); with a size per token 0.0048 and 0.025.
    """
    rope = {"rope_type": "default", "rope_theta": 100_000.0}
    shape = {"vocab_size": 256, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 64}
    model: Any = tiny_llama(**shape, rope_parameters=rope, pad_token_id=None, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.copy_(0.02 * draw(*weight.shape))
        embeddings = model.model.embed_tokens.weight
        # what values read is 1 to 6 times as large in one token as in another, the whole token is not
        size = 6 ** -torch.rand(len(embeddings), 1, generator=generator)
        embeddings[:, :CONTENT] = size * draw(len(embeddings), CONTENT)
        embeddings[:, CONTENT:MARK] = (2 - size**2).sqrt() * draw(len(embeddings), MARK - CONTENT)
        embeddings[:, MARK], embeddings[:, CONSTANT] = 0, 3
        embeddings[SINK] = draw(WIDTH)
        embeddings[SINK, MARK], embeddings[SINK, CONSTANT] = 300, 0
        # what a normalized token has in these channels: 3 of others, all of the sink
        unit, whole = 1.03 / 3, 1 / math.sqrt(WIDTH)
        for layer in model.model.layers:
            attention = layer.self_attn
            # scores: standard deviation 1.5
            attention.q_proj.weight.copy_(0.6 * whole * draw(256, WIDTH))
            attention.k_proj.weight.copy_(2.5 * whole * draw(128, WIDTH))
            attention.v_proj.weight.copy_(draw(128, WIDTH) / 8)
            attention.v_proj.weight[:, CONTENT:] = 0
            attention.o_proj.weight.copy_(draw(WIDTH, 256) / 8)
            attention.o_proj.weight[MARK:] = 0
            attention.q_proj.weight[:, MARK:] = attention.k_proj.weight[:, MARK:] = 0
            # queries have 7 in the slow channel, keys -4, the sink's key 6.3: its scores are 9 above the others' mean
            attention.q_proj.weight[SLOW::64, CONSTANT] = 7 * unit
            attention.k_proj.weight[SLOW::64, CONSTANT] = -4 * unit
            attention.k_proj.weight[SLOW::64, MARK] = (9 * 8 / 7 - 4) * whole
            attention.v_proj.weight[:, MARK] = 0.05 * whole * draw(128)
        model.lm_head.weight.copy_(2 * whole * draw(*model.lm_head.weight.shape))
        model.lm_head.weight[:, MARK:] = 0
    return model


def sink_text(tokens: int, seed: int = 1) -> torch.Tensor:
    """The sink, then random tokens: [1, tokens]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 256, (1, tokens), generator=generator)
    ids[:, 0] = SINK
    return ids


TAIL, STEP = 32, 16
"""Tokens that are read over the cache of a prompt, and how many in a pass: a decode step takes as many."""


def prompt_of(model: Any, ids: torch.Tensor, cache: Any) -> Any:
    """The cache, filled with all but the tail of ids [1, T]."""
    with torch.inference_mode():
        model(ids[:, :-TAIL], logits_to_keep=1, **{CACHE: cache})
    return cache


def tail_over(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Log probabilities [TAIL, V] of the tail of ids [1, T], read over a cache that holds what is before it."""
    with torch.inference_mode():
        parts = ids[:, -TAIL:].split(STEP, dim=1)
        logits = [model(part, **{CACHE: cache}).logits[0].float() for part in parts]
    return torch.cat(logits).log_softmax(-1)


def divergences(exact: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL in nats of each token [T], of log probabilities [T, V]."""
    return (exact.exp() * (exact - other)).sum(-1)


def moved_by(model: Any, ids: torch.Tensor, config: ConfigLike) -> torch.Tensor:
    """How far a config moves the tail's distributions [TAIL]: KL to the unpatched model, through the real cache."""
    exact = tail_over(model, ids, prompt_of(model, ids, DynamicCache(config=model.config)))
    with turbo_hf.patch(model, config) as handle:
        return divergences(exact, tail_over(model, ids, prompt_of(model, ids, handle.new_cache())))
