"""Families of models as tests build them, and their oracle: Hugging Face's own eager attention over the same cache.

The oracle is the unpatched model, in eager mode, with a `TurboCache` of the same config: without the hook such a cache
stores the same codes and returns dense keys and values, so that all masks, windows, caps and sinks are Transformers'.
"""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from choices import flat_config
from models import SHAPE, VOCABULARY, left_padded, prompts
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention

from turbo_hf import TurboConfig
from turbo_hf.models.model_layers import INDEXED as INDEXED_LAYERS
from turbo_hf.models.sources import hands_indices
from turbo_hf.models.versions import CACHE

LENGTHS = (94, 65, 61)
NEW = 6
WINDOW = 40

SLIDING, FULL, LINEAR, CHUNKED = "sliding_attention", "full_attention", "linear_attention", "chunked_attention"
MIXED = {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": WINDOW}
# as many experts as are chosen: a router that changes its mind would hide what attention does
EXPERTS = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), 1),
}
DELTA_NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA_NET |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16)
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16}
LATENT = {"kv_lora_rank": 32, "v_head_dim": 32, "first_k_dense_replace": 1}
LATENT |= dict.fromkeys(("q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 16)
INDEXERS = INDEXED_LAYERS in DYNAMIC_LAYER_TYPE_MAPPING and hands_indices(GlmMoeDsaAttention)
"""Whether this Transformers lets indexers name tokens to other attention functions than its own."""
INDEXED = {**LATENT, **EXPERTS, "num_key_value_heads": 4, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 24}
QWEN4 = {f"indexer_{name}": n for name, n in (("n_heads", 2), ("kv_heads", 1), ("head_dim", 16), ("budget", 16))}
QWEN4 |= {"indexer_compress_ratio": 4, **DELTA_NET, **EXPERTS}
CHUNKS = {"num_hidden_layers": 4, "layer_types": [*[CHUNKED] * 3, FULL]}
CHUNKS |= {"attention_chunk_size": 48, "intermediate_size_mlp": 96}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4}
QUARTER_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
BY_LAYER = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY}
SHARED = {"layer_types": [SLIDING, FULL] * 3, "sliding_window": WINDOW, **BY_LAYER}
SHARED |= {"num_hidden_layers": 6, "num_kv_shared_layers": 2}


class Case(NamedTuple):
    """dense: layers that the patch leaves to Hugging Face. variant: tells cases of one type apart."""

    model_type: str
    options: dict[str, Any]
    dense: tuple[int, ...] = ()
    variant: str = ""


FAMILY_CASES = (
    Case("llama", {}),
    Case("mistral", {"sliding_window": WINDOW}),
    Case("mixtral", {"sliding_window": WINDOW, **EXPERTS}),
    Case("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    Case("qwen3", {}),
    Case("qwen3_moe", EXPERTS),
    Case("phi3", {"partial_rotary_factor": 0.5}),
    Case("gemma2", {**MIXED, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    Case("gemma3_text", {**MIXED, "query_pre_attn_scalar": 16}),
    Case("gemma4_text", {**SHARED, "global_head_dim": 32}, dense=(2, 3, 4, 5)),
    Case(
        "gemma4_text",
        {**MIXED, **BY_LAYER, "global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        variant="-heads",
    ),
    Case("gpt_oss", {**MIXED, **EXPERTS}),
    Case("gpt_neox", {"rope_parameters": QUARTER_ROPE}),
    Case("gpt_neox", {"use_parallel_residual": False}, variant="-one-residual"),
    Case("gpt_bigcode", {**GPT2, "n_positions": 4096}),
    Case("gpt_bigcode", {**GPT2, "n_positions": 4096, "multi_query": False}, variant="-many-heads"),
    Case("olmo2", {}),
    Case("granite", {"attention_multiplier": 0.2}),
    Case("qwen3_next", {"layer_types": [LINEAR, FULL, LINEAR], **DELTA_NET, **EXPERTS}, dense=(0, 2)),
    Case("bamba", {"attn_layer_indices": [1], **MAMBA}, dense=(0, 2)),
    Case("deepseek_v3", {**LATENT, **EXPERTS, "num_key_value_heads": 4}),
    *(Case(name, INDEXED) for name in ("deepseek_v32", "glm_moe_dsa") if INDEXERS),
)
GENERIC_CASES = (
    Case("stablelm", {}),
    Case("starcoder2", {"sliding_window": WINDOW}),
    Case("smollm3", {"no_rope_layers": [1, 1, 0]}),
    Case("cohere2", {**MIXED, "logit_scale": 1.0}),
    Case("exaone4", MIXED),
    Case("glm4", {}),
    Case("olmo3", MIXED),
    Case("phi", {"partial_rotary_factor": 0.5}),
    Case("nemotron", {}),
    Case("phimoe", {"sliding_window": WINDOW, **EXPERTS}),
    Case("gpt2", GPT2),
    Case("bert", {"is_decoder": True}),
    Case("ctrl", {**GPT2, "n_positions": 4096, "dff": 96}),
    Case("llama4_text", {**CHUNKS, **EXPERTS}, dense=(0, 1, 2)),
    Case(
        "gemma3n_text",
        {**SHARED, "activation_sparsity_pattern": [0.0] * 6, "laurel_rank": 8, "altup_num_inputs": 2},
        dense=(2, 3, 4, 5),
    ),
)
CASES = [pytest.param(case, id=case.model_type + case.variant) for case in FAMILY_CASES]
EVERYTHING = [pytest.param(case, id=case.model_type + case.variant) for case in FAMILY_CASES + GENERIC_CASES]
families = pytest.mark.parametrize("case", CASES)


def build(model_type: str, **options: Any) -> PreTrainedModel:
    """A random model of three layers: 4 query heads on 2 KV heads of 16 channels, float32, eager, eval."""
    shape = {**SHAPE, "num_hidden_layers": 3, "initializer_range": 0.15, "tie_word_embeddings": False, **options}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **shape)
    # grouped matrix products know no float64
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    model.eval()
    return model


def padded(seed: int = 0) -> dict[str, Tensor]:
    """Three prompts of different length, padded at the left."""
    ids = prompts(len(LENGTHS), max(LENGTHS), seed)
    return left_padded([row[-length:] for row, length in zip(ids, LENGTHS, strict=True)])


def exact(bits: int) -> TurboConfig:
    """Attention on the dequantised cache; blocks of 32, so that all prompts seal some."""
    return flat_config(attention="native", bits=bits, block_size=32, recent_tokens=0)


def generate(model: Any, batch: dict[str, Tensor], **options: Any) -> GenerateDecoderOnlyOutput:
    """NEW greedy tokens and their logits."""
    out: GenerateDecoderOnlyOutput = model.generate(
        **batch, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
    )
    return out


@torch.no_grad()
def logits(model: Any, input_ids: Tensor, attention_mask: Tensor, cache: Any = None) -> Tensor:
    """Logits of a pass over the newest columns of a mask."""
    place = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
    options = {"attention_mask": attention_mask, "position_ids": place, CACHE: cache, "use_cache": cache is not None}
    return torch.as_tensor(model(input_ids, **options).logits)


def alone(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Logits of all real tokens in float64, each row without the others and without padding."""
    double = copy.deepcopy(model).double()
    rows = [ids[keep.bool()][None] for ids, keep in zip(*batch.values(), strict=True)]
    return torch.cat([logits(double, row, torch.ones_like(row))[0] for row in rows])
