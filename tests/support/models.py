"""Tiny models for the tests: seeded random ones built from configs, and the carried trained one.

Models and their inputs are `Any` here: Transformers annotates `generate` so that no call of it type-checks.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

VOCABULARY = 100
LAB_MODEL = Path(__file__).resolve().parents[2] / "examples" / "lab-llama-4m"

# weights wide enough that logits lie far apart: greedy tokens then vary, and do not hang on the last bit
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
    "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    "attn_implementation": "eager",
}  # fmt: skip


def tiny_llama(**overrides: Any) -> Any:
    """2 layers, 4 query heads on 2 KV heads of 16 channels, float32, eager, eval, without an end token."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **overrides})).eval()


def tiny_mistral(window: int | None, **overrides: Any) -> Any:
    """The same shape with a sliding window of `window` tokens in every layer; None: full attention."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**{**SHAPE, "sliding_window": window, **overrides})).eval()


@functools.cache
def lab_model() -> tuple[Any, Any]:
    """The trained model of examples/lab-llama-4m in float32 with eager attention, and its tokenizer (pads left)."""
    model = AutoModelForCausalLM.from_pretrained(LAB_MODEL, dtype=torch.float32, attn_implementation="eager")
    return model.eval(), AutoTokenizer.from_pretrained(LAB_MODEL)


def prompts(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Random token ids [rows, tokens], none of them the pad token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (rows, tokens), generator=generator)


def left_padded(rows: list[torch.Tensor]) -> dict[str, Any]:
    """`input_ids` and `attention_mask` of 1D prompts, padded at the left with token 0."""
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (width - len(row), 0)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}
