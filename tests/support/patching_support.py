"""Models, inputs and passes for the tests of `patch`."""

from typing import Any

import torch
from choices import flat_config
from models import SHAPE, left_padded, prompts
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

LENGTHS = (160, 150, 31)
NEW = 8
WINDOW = 24
SMALL = flat_config(block_size=32)
EXACT = flat_config(block_size=32, attention="native")
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}


def padded() -> dict[str, Tensor]:
    """Three prompts of different length, padded at the left."""
    return left_padded([prompts(1, length, length)[0] for length in LENGTHS])


def generate(model: Any, **options: Any) -> Tensor:
    """Greedy tokens after `padded`, or after other inputs."""
    inputs = {} if "input_ids" in options else padded()
    return torch.as_tensor(model.generate(**{"max_new_tokens": NEW, **inputs, **options}, do_sample=False))


@torch.no_grad()
def logits(model: Any, input_ids: Tensor, **options: Any) -> Tensor:
    """Logits of one pass."""
    return torch.as_tensor(model(input_ids, **options).logits)


def tiny(model_type: str, **options: Any) -> PreTrainedModel:
    """A random model of another family, of the shape of `tiny_llama`."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SHAPE, "tie_word_embeddings": False, **options})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.eval()
    return model


BIASED = {3: -600.0, 21: 800.0}
"""Key biases that are far larger than what keys vary by, by channel: of both KV heads."""


def biased(**options: Any) -> Any:
    """A tiny Qwen2 as trained ones are: in layer 0 two channels have large key biases, which queries hardly meet."""
    model: Any = tiny("qwen2", **options)
    for layer in model.model.layers:
        layer.input_layernorm.weight.data.uniform_(0.5, 2)
    attention = model.model.layers[0].self_attn
    # scores that noise does not drown
    attention.q_proj.weight.data *= 0.2
    heads = attention.q_proj.weight.data.unflatten(0, (-1, 2, 8))
    for channel, size in BIASED.items():
        attention.k_proj.bias.data[channel] = size
        heads[:, :, channel % 8] *= 0.005
    return model


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Every object that Python holds of a model and its configs, by name."""
    held: dict[str, Any] = {}
    owners = {**dict(model.named_modules()), "config": model.config}
    if model.can_generate():
        owners["generation"] = model.generation_config
    for name, owner in owners.items():
        held[f"{name} class"] = type(owner)
        for key, value in vars(owner).items():
            held[f"{name}.{key}"] = value
            if isinstance(value, dict):
                held |= {f"{name}.{key}[{inner}]": x for inner, x in value.items()}
    return held


def changes(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Names under which there is now another object, or none, or one more."""
    both = before.keys() & after.keys()
    return (before.keys() ^ after.keys()) | {name for name in both if before[name] is not after[name]}


class WrittenOut(modeling_llama.LlamaAttention):
    """Llama's attention, for classes that do something of their own between the cache and the attention function."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Tensor | None = None,
        past_key_values: Any = None, cache: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        # what it is called depends on the version
        cache = past_key_values if cache is None else cache
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
        query, key = modeling_llama.apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        key, kwargs = self.changed(key), kwargs | self.blocks(key.shape[2])
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, modeling_llama.eager_attention_forward
        )
        out, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights

    def changed(self, key: Tensor) -> Tensor:
        """The keys that attention gets."""
        return key

    def blocks(self, keys: int) -> dict[str, Any]:
        """More keywords for attention."""
        return {}


class Doubling(WrittenOut):
    """Attention that changes its keys after the cache has seen them, as DiffLlama and JetMoe do."""

    def changed(self, key: Tensor) -> Tensor:
        """Twice the keys."""
        return 2 * key
