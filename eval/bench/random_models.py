"""Models of known shapes with random weights: they cost the same as trained ones of that shape."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_model
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from turbo_hf.console import load_model, processes, remark
from turbo_hf.eval.bench.runner import require_choice
from turbo_hf.eval.bench.timing import free_memory
from turbo_hf.models.versions import CACHE


def _sizes(*sizes: int) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return dict(zip((*names, "num_hidden_layers", "vocab_size"), sizes, strict=False))


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


KINDS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], dict[str, Any]]] = {
    "llama3-8b": (LlamaConfig, _sizes(4096, 14336, 32, 8, 32, 128256) | _rope(5e5), _sizes(256, 256, 8, 2)),
    "qwen2.5-0.5b": (
        Qwen2Config,
        _sizes(896, 4864, 14, 2, 24, 151936) | _rope(1e6) | {"tie_word_embeddings": True},
        _sizes(112, 256, 7, 1),
    ),
    "qwen2.5-1.5b": (
        Qwen2Config,
        _sizes(1536, 8960, 12, 2, 28, 151936) | _rope(1e6) | {"tie_word_embeddings": True},
        _sizes(96, 256, 6, 1),
    ),
    "gemma3-270m": (
        Gemma3TextConfig,
        _sizes(640, 2048, 4, 1, 18, 262144) | {"head_dim": 256, "sliding_window": 512, "tie_word_embeddings": True},
        _sizes(64, 128, 4, 1) | {"head_dim": 32, "sliding_window": 16},
    ),
    "deepseek-v2-lite": (
        DeepseekV2Config,
        _sizes(2048, 10944, 16, 16, 27, 102400)
        | {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        | {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
        | {"first_k_dense_replace": 1},
        _sizes(64, 128, 4, 4)
        | {"kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}
"""Config class, sizes, and those at which `tiny` differs: the same ratio of heads."""

if CACHE == "cache":
    # older versions of Transformers name no tokens to attention functions; the class has the sizes of DeepSeek-V3.2
    KINDS["deepseek-v3.2"] = (
        transformers.DeepseekV32Config,
        {},
        KINDS["deepseek-v2-lite"][2]
        | {
            "q_lora_rank": 32,
            "index_topk": 64,
            "index_n_heads": 8,
            "index_head_dim": 32,
            "n_group": 1,
            "topk_group": 1,
        },
    )

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


def require_one_model(shape: object, model: str | None, layers: int | None, tiny: bool, device: torch.device) -> None:
    """ValueError where --model stands beside an option of random weights, or a CPU would run what is for a GPU."""
    if model is not None and (shape or layers is not None or tiny):
        raise ValueError("--model has a shape and layers of its own: leave out --shape, --layers and --tiny.")
    require_choice(device, bool(tiny or layers or model), "--model, --layers 1, or --tiny to try the command")


def bench_model(shape: str, model: str | None, layers: int | None, device: torch.device, *, tiny: bool) -> Any:
    """The model of that folder or Hub id; None: `random_model`, shared among torchrun's processes."""
    if model is not None:
        loaded = load_model(model, "auto" if processes()[1] > 1 else str(device))
        own = loaded.config._attn_implementation
        if own != "sdpa":
            remark(f"Transformers runs {model} with {own}, not with SDPA: so do the rows that are named SDPA.")
        return loaded
    drawn = random_model(shape, layers, device, tiny=tiny)
    return shared_out(drawn) if processes()[1] > 1 else drawn


def shared_out(model: Any) -> Any:
    """The same model, shared among torchrun's processes, each of which has drawn it and now stores it for itself."""
    with tempfile.TemporaryDirectory(prefix="turbo-bench-") as folder:
        # not `save_pretrained`, which writes in the first process alone
        model.config.to_json_file(Path(folder, "config.json"), use_diff=False)
        save_model(model, str(Path(folder, "model.safetensors")), metadata={"format": "pt"})
        del model
        free_memory()
        return load_model(folder, "auto")
