"""Drafts by a model's own first layers (`assistant_early_exit`)."""

from typing import Any

import pytest
import torch
from models import prompts
from patching_support import tiny
from transformers.generation.candidate_generator import EarlyExitCandidateGenerator

import turbo_hf
from turbo_hf import TurboConfig, Unsupported
from turbo_hf.models.versions import CACHE

SLIDING, FULL = "sliding_attention", "full_attention"
MIXED: dict[str, Any] = {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 40, "query_pre_attn_scalar": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "qwen3": {},
    "gemma2": MIXED,
    "gemma3_text": MIXED,
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "lfm2": {"layer_types": ["conv", FULL, FULL]},
}
EXACT = TurboConfig(bits=16, block_size=32, attention="fp16")


def model_of(kind: str, **options: Any) -> Any:
    return tiny(kind, **{"num_hidden_layers": 3, **options})


def answer(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.as_tensor(model.generate(ids, max_new_tokens=8, do_sample=False, **options))


def settled(model: Any) -> torch.Tensor:
    """A prompt after which no two tokens nearly tie: several times what 8 bits for 32 do to a logit."""
    for seed in range(200):
        ids = prompts(1, 80, seed)
        out = model.generate(ids, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True)
        best = torch.stack(out.logits).topk(2, -1).values
        if float((best[..., 0] - best[..., 1]).min()) > 0.1:
            return ids
    raise AssertionError("all prompts have ties")


@pytest.mark.parametrize("kind", FAMILIES)
def test_drafts_give_the_greedy_tokens(kind: str) -> None:
    model = model_of(kind, **FAMILIES[kind])
    ids = settled(model)
    want = answer(model, ids)
    for config in (EXACT, TurboConfig(bits=8, block_size=32, attention="fp16")):
        with turbo_hf.patch(model, config, strict="warn") as handle:
            own = handle.new_cache()
            for options in ({}, {CACHE: own}):
                assert torch.equal(answer(model, ids, assistant_early_exit=2, **options), want)
                assert torch.equal(answer(model, ids), want), "another call does not see the draft"
            assert own.get_seq_length() == 87
            assert len(handle.memory().layers) == 3
    # a draft's cache has the bits of the first layers
    with turbo_hf.patch(model, TurboConfig(layer_bits=(4, (8, 4), 4)), strict="warn") as handle:
        plain, own = answer(model, ids), handle.new_cache()
        assert answer(model, ids, assistant_early_exit=2, **{CACHE: own}).shape == (1, 88)
        assert [layer.lengths() for layer in own.turbo_layers()][-1] == [87]
        assert torch.equal(answer(model, ids), plain)
    assert model.config.num_hidden_layers == 3


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_draft_that_breaks_off_leaves_all_layers(error: type, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of("qwen3"), prompts(1, 80)
    with turbo_hf.patch(model, EXACT) as handle:
        want = answer(model, ids)
        own = handle.new_cache()

        def fail(*args: Any, **kwargs: Any) -> None:
            assert model.config.num_hidden_layers == 2
            raise error("planted")

        with monkeypatch.context() as planted:
            planted.setattr(EarlyExitCandidateGenerator, "_generate_candidates", fail)
            with pytest.raises(error, match="planted"):
                answer(model, ids, assistant_early_exit=2, **{CACHE: own})
        assert model.config.num_hidden_layers == 3
        assert torch.equal(answer(model, ids), want)
        assert torch.equal(answer(model, ids, **{CACHE: own}), want)
        assert len(handle.new_cache().layers) == 3


def test_a_class_without_early_exit_is_refused() -> None:
    """Its forward pass goes over all layers whatever the config says, and its cache is for the first ones alone."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2}
    model = model_of("gpt_oss", layer_types=[FULL] * 3, **experts)
    ids = prompts(1, 80)
    with turbo_hf.patch(model, EXACT, strict="warn"):
        want = answer(model, ids)
        with pytest.raises(Unsupported, match=r"over layer 1.*for the first 1.*without assistant_early_exit"):
            answer(model, ids, assistant_early_exit=1)
        assert torch.equal(answer(model, ids), want)
