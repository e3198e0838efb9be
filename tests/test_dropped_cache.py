"""Models that drop their cache while they generate, as Phi-3 does where its rotary frequencies change."""

import inspect
import warnings
from typing import Any

import pytest
import torch
from generate_support import EXACT4
from graphs_support import watch_runners
from models import SHAPE, left_padded, prompts
from transformers import DynamicCache, GenerationMixin, Phi3Config, Phi3ForCausalLM, PhimoeConfig, PhimoeForCausalLM

import turbo_hf
from turbo_hf import TurboCache, TurboConfig, Unsupported
from turbo_hf.models.versions import CACHE

SWITCH = 70
"""Tokens up to which the models of this file use their short factors."""

FULL = TurboConfig(bits=16, block_size=32, attention="fp16")
forgets = "next_sequence_length" not in inspect.getsource(Phi3ForCausalLM.prepare_inputs_for_generation)
"""Whether this version of Transformers computes only the newest token again, as 5.17 does."""

whole = pytest.mark.skipif(forgets, reason="this version of Transformers loses the prompt, unpatched too")


def long_phi(kind: str = "phi3", **overrides: Any) -> Any:
    """A tiny Phi-3 or PhiMoE with two sets of rotary factors, far apart."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [6.0] * 8,
        "factor": 4.0,
        "short_mscale": 1.0,
        "long_mscale": 1.2,
        "original_max_position_embeddings": SWITCH,
    }
    shape = {**SHAPE, "attn_implementation": "sdpa", "original_max_position_embeddings": SWITCH, **overrides}
    torch.manual_seed(0)
    if kind == "phi3":
        return Phi3ForCausalLM(Phi3Config(**shape, rope_parameters=rope)).eval()
    config = PhimoeConfig(**shape, rope_parameters=rope, num_local_experts=2, num_experts_per_tok=2)
    model: Any = PhimoeForCausalLM._from_config(config, experts_implementation="eager")
    return model.eval()


def answer(model: Any, input_ids: torch.Tensor, **options: Any) -> Any:
    return model.generate(
        input_ids, **{"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, **options}
    )


def settled(model: Any, lengths: list[int]) -> dict[str, torch.Tensor]:
    """A left-padded batch after which no two tokens nearly tie, so that 16 bits for the model's 32 choose no other."""
    for seed in range(200):
        batch = left_padded([prompts(1, length, seed + row)[0] for row, length in enumerate(lengths)])
        out = answer(model, batch["input_ids"], attention_mask=batch["attention_mask"], output_logits=True)
        best = torch.stack(out.logits).topk(2, -1).values
        if float((best[..., 0] - best[..., 1]).min()) > 0.03:
            return batch
    raise AssertionError("all prompts have ties")


WAYS: dict[str, tuple[str, list[int], dict[str, Any]]] = {
    "switches": ("phi3", [SWITCH - 10], {}),
    "moe": ("phimoe", [SWITCH - 10], {}),
    "at-the-edge": ("phi3", [SWITCH], {}),
    "beyond": ("phi3", [SWITCH + 40], {}),
    "moe-beyond": ("phimoe", [SWITCH + 40], {}),
    "before": ("phi3", [20], {}),
    "padded": ("phi3", [SWITCH - 5, SWITCH - 15, 3], {}),
    "moe-padded": ("phimoe", [SWITCH - 5, SWITCH - 15], {}),
    "beams": ("phi3", [SWITCH - 5, SWITCH - 15], {"num_beams": 3, "num_return_sequences": 2}),
    "chunks": ("phi3", [SWITCH - 5], {"prefill_chunk_size": 20}),
    "chunks-beyond": ("phi3", [SWITCH + 60], {"prefill_chunk_size": SWITCH + 1}),
    "drafts": ("phi3", [SWITCH - 5], {"prompt_lookup_num_tokens": 3}),
    "early-exit": ("phi3", [SWITCH - 5], {"assistant_early_exit": 1}),
}


@whole
@pytest.mark.parametrize("way", WAYS)
def test_every_length_is_compressed_with_the_models_tokens(way: str) -> None:
    kind, lengths, options = WAYS[way]
    model = long_phi(kind)
    batch = settled(model, lengths)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    want = answer(model, ids, attention_mask=mask, **options)
    with turbo_hf.patch(model, FULL, strict="warn") as handle:
        got = answer(model, ids, attention_mask=mask, **options)
        assert torch.equal(got.sequences, want.sequences)
        cache = got[CACHE]
        assert isinstance(cache, TurboCache)
        assert cache.get_seq_length() == want[CACHE].get_seq_length()
        assert handle.memory() == cache.memory()
        assert handle.memory().tokens > 0


def test_the_factors_make_a_difference() -> None:
    model, ids = long_phi(), prompts(1, SWITCH - 5)
    want = answer(model, ids).sequences
    model.config.original_max_position_embeddings = 4096
    assert not torch.equal(answer(model, ids).sequences, want)


@whole
def test_four_bit_tokens_are_those_of_one_prompt() -> None:
    """At the switch all tokens are computed again: the cache is that of a prompt of so many."""
    model, ids = long_phi(), prompts(2, SWITCH - 5)
    with turbo_hf.patch(model, EXACT4) as handle:
        first = answer(model, ids, max_new_tokens=6)
        assert first[CACHE].get_seq_length() == SWITCH
        together = answer(model, ids, max_new_tokens=7)
        prompt = handle.new_cache()
        model(first.sequences, **{CACHE: prompt})
        for got, want in zip(together[CACHE].turbo_layers(), prompt.turbo_layers(), strict=True):
            assert got.lengths() == want.lengths() == [SWITCH + 1] * 2
            assert all(map(torch.equal, got.dequantized(SWITCH + 1), want.dequantized(SWITCH + 1)))


@whole
@pytest.mark.parametrize("padded", [False, True])
def test_a_second_turn(padded: bool) -> None:
    """On the returned cache: one that holds less than the switch, whose tokens are computed again, and one beyond."""
    model = long_phi()
    for first, second in ((30, 50), (SWITCH + 20, 30)):
        batch = left_padded([prompts(1, n, n)[0] for n in ((first, first - 9) if padded else (first,))])
        then = prompts(len(batch["input_ids"]), second, 7)

        def turns(batch: dict[str, torch.Tensor] = batch, then: torch.Tensor = then) -> tuple[Any, Any]:
            out = answer(model, batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=10)
            ids = torch.cat((out.sequences, then), 1)
            mask = torch.nn.functional.pad(batch["attention_mask"], (0, 10 + then.shape[1]), value=1)
            return out, answer(model, ids, attention_mask=mask, **{CACHE: out[CACHE]})

        want = turns()[1].sequences
        with turbo_hf.patch(model, FULL):
            one, two = turns()
            assert torch.equal(two.sequences, want)
            assert two[CACHE] is one[CACHE]


@whole
def test_replayed_steps_go_on_after_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    runners = watch_runners(monkeypatch)
    model, ids = long_phi(), prompts(2, SWITCH - 20)
    config = TurboConfig(block_size=32)
    options: dict[str, Any] = {"max_new_tokens": 60}
    with turbo_hf.patch(model, TurboConfig(block_size=32, cuda_graphs=False)):
        want = answer(model, ids, **options).sequences
    with turbo_hf.patch(model, config):
        assert torch.equal(answer(model, ids, **options).sequences, want)
    # before the switch, after it, and where pages run out
    assert runners[-1].captures >= 2


@whole
def test_only_new_tokens_are_refused_where_all_are_needed() -> None:
    model = long_phi()
    with turbo_hf.patch(model, FULL):
        out = answer(model, prompts(1, 40), max_new_tokens=2)
        new, mask = prompts(1, SWITCH + 1, 1), torch.ones(1, 41 + SWITCH + 1, dtype=torch.long)
        held = out[CACHE]
        with pytest.raises(Unsupported, match=r"passes only the newest 71 of 112 tokens.*Pass all of them"):
            answer(model, new, attention_mask=mask, **{CACHE: held})
        assert held.get_seq_length() == 41


def newest_alone(model: Any, input_ids: Any, **kwargs: Any) -> Any:
    """Inputs of the newest token alone where all are to be computed again, as Phi-4-multimodal has them."""
    cache, prepare = kwargs.get(CACHE), GenerationMixin.prepare_inputs_for_generation
    if cache is not None and SWITCH >= cache.get_seq_length() > 0 and input_ids.shape[1] > SWITCH:
        kwargs[CACHE] = None
    return prepare(model, input_ids, **kwargs)


class Forgetful(Phi3ForCausalLM):
    """It loses the prompt."""

    prepare_inputs_for_generation: Any = newest_alone


def test_a_model_that_loses_the_prompt_is_told_of() -> None:
    torch.manual_seed(0)
    model = Forgetful(Phi3Config(**SHAPE)).eval()
    batch = settled(model, [SWITCH - 5])
    want = answer(model, **batch).sequences
    with turbo_hf.patch(model, FULL), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = answer(model, **batch)
    assert torch.equal(out.sequences, want)
    assert isinstance(out[CACHE], TurboCache)
    (warning,) = [x for x in caught if "lacks the prompt" in str(x.message)]
    assert warning.filename == __file__
    with turbo_hf.patch(model, FULL), pytest.raises(Unsupported, match=r"lacks the prompt.*do not pad"):
        answer(model, **left_padded([prompts(1, SWITCH - 5)[0], prompts(1, 9)[0]]))


# --- models that bring another cache ----------------------------------------------------------------------------------


class Fickle(Phi3ForCausalLM):
    """Its forward pass goes on with a cache of its own after ten tokens."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        if kwargs.get(CACHE) is not None and kwargs[CACHE].get_seq_length() == 12:
            kwargs[CACHE] = DynamicCache(config=self.config)
        return super().forward(input_ids, **kwargs)


def others_inputs(model: Any, input_ids: Any, **kwargs: Any) -> Any:
    """Inputs with a cache of the model's own after ten tokens."""
    cache, prepare = kwargs.get(CACHE), GenerationMixin.prepare_inputs_for_generation
    if cache is not None and cache.get_seq_length() == 12:
        kwargs[CACHE] = DynamicCache(config=model.config)
    return prepare(model, input_ids, **kwargs)


class FickleInputs(Phi3ForCausalLM):
    """Its inputs bring another cache."""

    prepare_inputs_for_generation: Any = others_inputs


@pytest.mark.parametrize("kind", [Fickle, FickleInputs])
def test_another_cache_is_told_of(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind(Phi3Config(**SHAPE)).eval()
    ids = prompts(1, 10)
    want = answer(model, ids).sequences
    said = f"{kind.__name__} has put a DynamicCache in the place of its TurboCache"
    with turbo_hf.patch(model, FULL), pytest.raises(Unsupported, match=said):
        answer(model, ids)
    with turbo_hf.patch(model, FULL, strict="warn") as handle:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = answer(model, ids)
        assert [str(x.message).startswith(said) for x in caught] == [True]
        assert torch.equal(out.sequences, want)
        assert handle.memory().layers == (), "the cache that was dropped holds nothing of this answer"
        answer(model, ids, max_new_tokens=1)
        assert handle.memory().tokens == 10
