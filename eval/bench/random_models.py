"""Models of known shapes with random weights: they cost the same as trained ones of that shape."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from transformers import AutoModelForCausalLM, DeepseekV2Config, LlamaConfig, PreTrainedConfig, Qwen2Config

from turbo_hf.console import load_model
from turbo_hf.eval.bench.timing import free_memory

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "vocab_size",
)
LATENT = (
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _sizes(names: tuple[str, ...], *numbers: int) -> dict[str, Any]:
    return dict(zip(names, numbers, strict=False))


KINDS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], dict[str, Any]]] = {
    "llama3-8b": (
        LlamaConfig,
        _sizes(SIZES, 4096, 14336, 32, 8, 32, 128256) | _rope(500000.0),
        _sizes(SIZES, 256, 256, 8, 2),
    ),
    "qwen2.5-0.5b": (
        Qwen2Config,
        _sizes(SIZES, 896, 4864, 14, 2, 24, 151936) | _rope(1000000.0) | {"tie_word_embeddings": True},
        _sizes(SIZES, 112, 256, 7, 1),
    ),
    "deepseek-v2-lite": (
        DeepseekV2Config,
        _sizes(SIZES, 2048, 10944, 16, 16, 27, 102400)
        | _sizes(LATENT, 512, 128, 64, 128, 64, 6, 1408)
        | {"q_lora_rank": None, "n_shared_experts": 2, "first_k_dense_replace": 1},
        _sizes(SIZES, 64, 128, 4, 4) | _sizes(LATENT, 64, 16, 16, 16, 4, 2, 32),
    ),
}
"""Config class, sizes, and those at which `tiny` differs: the same ratio of heads."""

TINY = {"num_hidden_layers": 2, "vocab_size": 512}


def random_model(shape: str, layers: int | None, device: torch.device, *, tiny: bool = False) -> Any:
    """A bfloat16 model of KINDS under SDPA, its weights drawn on the device; `layers` None: as many as it has.

    tiny: at a size for tests.
    """
    kind, sizes, small = KINDS[shape]
    chosen = sizes | (small | TINY if tiny else {})
    if layers is not None:
        chosen["num_hidden_layers"] = layers
    # no prompt is too long: a random model has no positions that it was trained for
    config = kind(**chosen | {"max_position_embeddings": 1 << 20})
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()


def shared_out(model: Any) -> Any:
    """The same model, shared among torchrun's processes, each of which has drawn it and now stores it for itself."""
    with tempfile.TemporaryDirectory(prefix="turbo-bench-") as folder:
        # not `save_pretrained`, which writes in the first process alone
        model.config.to_json_file(Path(folder, "config.json"), use_diff=False)
        save_model(model, str(Path(folder, "model.safetensors")), metadata={"format": "pt"})
        del model
        free_memory()
        return load_model(folder, "auto")


def random_drafter(model: Any, drafted: int) -> Any:
    """A small Llama of random weights with the vocabulary of `model`, which drafts `drafted` tokens at a time."""
    sizes = {"hidden_size": min(512, model.config.hidden_size), "num_attention_heads": 4, "num_hidden_layers": 2}
    config = LlamaConfig(
        **sizes, intermediate_size=1024, vocab_size=model.config.vocab_size, max_position_embeddings=1 << 20
    )
    with torch.device(model.device):
        drafter: Any = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation="sdpa")
    # the same number each time, or an adaptive schedule would draft less and less for a random drafter
    drafter.generation_config.update(
        num_assistant_tokens=drafted, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    return drafter.eval()
