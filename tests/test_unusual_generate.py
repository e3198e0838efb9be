"""Calls of `generate` that do more: drafts by first layers, caches that a model drops, a part that generates."""

import copy
import inspect
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from choices import flat_config
from graphs_support import watch_runners
from models import SHAPE, left_padded, prompts, tiny_llama
from patching_support import tiny
from tiny_multimodal import build_multimodal, prompt
from transformers import DynamicCache, GenerationMixin, Phi3Config, Phi3ForCausalLM
from transformers.generation.candidate_generator import EarlyExitCandidateGenerator

import turbo_hf
from turbo_hf import TurboCache, TurboConfig
from turbo_hf.errors import Unsupported
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
EXACT = flat_config(bits=16, block_size=32, attention="native")


def model_of(kind: str, **options: Any) -> Any:
    return tiny(kind, **{"num_hidden_layers": 3, **options})


def answer(model: Any, input_ids: torch.Tensor, **options: Any) -> Any:
    return model.generate(
        input_ids, **{"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, **options}
    )


def tokens(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """The prompt, and eight tokens after it."""
    return torch.as_tensor(answer(model, ids, max_new_tokens=8, **options).sequences)


def settled(model: Any, lengths: list[int], apart: float = 0.03, **options: Any) -> dict[str, torch.Tensor]:
    """A left-padded batch after which no two tokens nearly tie, so that 16 bits for the model's 32 choose no other."""
    for seed in range(200):
        batch = left_padded([prompts(1, length, seed + row)[0] for row, length in enumerate(lengths)])
        out = answer(model, **batch, output_logits=True, **options)
        best = torch.stack(out.logits).topk(2, -1).values
        if float((best[..., 0] - best[..., 1]).min()) > apart:
            return batch
    raise AssertionError("all prompts have ties")


# --- drafts by a model's own first layers (`assistant_early_exit`) ---------------------------------------------------


@pytest.mark.parametrize("kind", FAMILIES)
def test_drafts_give_the_greedy_tokens(kind: str) -> None:
    model = model_of(kind, **FAMILIES[kind])
    # several times what 8 bits for 32 do to a logit
    ids = settled(model, [80], 0.1, max_new_tokens=8)["input_ids"]
    want = tokens(model, ids)
    mixed = flat_config(bits=16, block_size=32, attention="native", dense_layers=(0, 2), int8_layers=(1,))
    for config in (EXACT, mixed, flat_config(bits=8, block_size=32, attention="native")):
        with turbo_hf.patch(model, config, strict="warn") as handle:
            own = handle.new_cache()
            for options in ({}, {CACHE: own}):
                assert torch.equal(tokens(model, ids, assistant_early_exit=2, **options), want)
                assert torch.equal(tokens(model, ids), want), "another call does not see the draft"
            assert own.get_seq_length() == 87
            assert len(handle.memory().layers) == 3
    # a draft's cache has the bits of the first layers
    with turbo_hf.patch(model, TurboConfig(layer_bits=(4, (8, 4), 4)), strict="warn") as handle:
        plain, own = tokens(model, ids), handle.new_cache()
        assert tokens(model, ids, assistant_early_exit=2, **{CACHE: own}).shape == (1, 88)
        assert [layer.lengths() for layer in own.turbo_layers()][-1] == [87]
        assert torch.equal(tokens(model, ids), plain)
    assert model.config.num_hidden_layers == 3


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_draft_that_breaks_off_leaves_all_layers(error: type, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of("qwen3"), prompts(1, 80)
    with turbo_hf.patch(model, EXACT) as handle:
        want = tokens(model, ids)
        own = handle.new_cache()

        def fail(*args: Any, **kwargs: Any) -> None:
            assert model.config.num_hidden_layers == 2
            raise error("planted")

        with monkeypatch.context() as planted:
            planted.setattr(EarlyExitCandidateGenerator, "_generate_candidates", fail)
            with pytest.raises(error, match="planted"):
                tokens(model, ids, assistant_early_exit=2, **{CACHE: own})
        assert model.config.num_hidden_layers == 3
        assert torch.equal(tokens(model, ids), want)
        assert torch.equal(tokens(model, ids, **{CACHE: own}), want)
        assert len(handle.new_cache().layers) == 3


def test_a_class_without_early_exit_is_refused() -> None:
    """Its forward pass goes over all layers whatever the config says, and its cache is for the first ones alone."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2}
    model = model_of("gpt_oss", layer_types=[FULL] * 3, **experts)
    ids = prompts(1, 80)
    with turbo_hf.patch(model, EXACT, strict="warn"):
        want = tokens(model, ids)
        with pytest.raises(Unsupported, match=r"over layer 1.*for the first 1.*without assistant_early_exit"):
            tokens(model, ids, assistant_early_exit=1)
        assert torch.equal(tokens(model, ids), want)


# --- models that drop their cache, as Phi-3 where its rotary frequencies change ---------------------------------------

SWITCH = 70
"""Tokens up to which the models of this file use their short factors."""

forgets = "next_sequence_length" not in inspect.getsource(Phi3ForCausalLM.prepare_inputs_for_generation)
"""Whether this version of Transformers computes only the newest token again, as 5.17 does."""

whole = pytest.mark.skipif(forgets, reason="this version of Transformers loses the prompt, unpatched too")


def long_phi(kind: str = "phi3") -> Any:
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
    shape = {"rope_parameters": rope, "original_max_position_embeddings": SWITCH, "attn_implementation": "sdpa"}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2} if kind == "phimoe" else {}
    return tiny(kind, **shape, **experts)


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
    want = answer(model, **batch, **options)
    with turbo_hf.patch(model, EXACT, strict="warn") as handle:
        got = answer(model, **batch, **options)
        assert torch.equal(got.sequences, want.sequences)
        cache = got[CACHE]
        assert isinstance(cache, TurboCache)
        assert cache.get_seq_length() == want[CACHE].get_seq_length()
        assert handle.memory() == cache.memory()
        assert handle.memory().tokens > 0


@whole
@pytest.mark.parametrize("padded", [False, True])
def test_a_second_turn(padded: bool) -> None:
    """On the returned cache: one that holds less than the switch, whose tokens are computed again, and one beyond."""
    model = long_phi()
    for first, second in ((30, 50), (SWITCH + 20, 30)):
        batch = left_padded([prompts(1, n, n)[0] for n in ((first, first - 9) if padded else (first,))])
        then = prompts(len(batch["input_ids"]), second, 7)

        def turns(batch: dict[str, torch.Tensor] = batch, then: torch.Tensor = then) -> tuple[Any, Any]:
            out = answer(model, **batch, max_new_tokens=10)
            ids = torch.cat((out.sequences, then), 1)
            mask = torch.nn.functional.pad(batch["attention_mask"], (0, 10 + then.shape[1]), value=1)
            return out, answer(model, ids, attention_mask=mask, **{CACHE: out[CACHE]})

        want = turns()[1].sequences
        with turbo_hf.patch(model, EXACT):
            one, two = turns()
            assert torch.equal(two.sequences, want)
            assert two[CACHE] is one[CACHE]


def test_a_used_cache_refuses_what_it_does_not_continue() -> None:
    """Transformers slices the input by what the cache holds; below zero it answers from other tokens, unsaid."""
    model, ids = tiny_llama(), prompts(1, 30)
    with turbo_hf.patch(model, "int8"):
        used = answer(model, ids, max_new_tokens=4)[CACHE]
        beyond = prompts(1, 40)
        beyond[0, :30] = ids
        beyond[0, 7] = ids[0, 7] % 60 + 1
        embeds = model.get_input_embeddings()(ids)
        for given, said in (
            ({"input_ids": ids}, "holds 33 columns, and the input has 30"),
            ({"input_ids": ids[:, :5]}, "holds 33 columns, and the input has 5"),
            ({"inputs_embeds": embeds}, "holds 33 columns, and the input has 30"),
            ({"input_ids": beyond}, "does not begin with the prompt of this cache: row 0 .* in column 7"),
            ({"input_ids": beyond, "prefill_chunk_size": 3}, "does not begin with the prompt of this cache: row 0"),
        ):
            with pytest.raises(ValueError, match=said):
                model.generate(**given, **{CACHE: copy.deepcopy(used)}, max_new_tokens=4, do_sample=False)
        # new tokens alone go on if the mask shows the others
        mask = torch.ones(1, 35, dtype=torch.long)
        used.crop(-3)
        model.generate(prompts(1, 5), attention_mask=mask, **{CACHE: used}, max_new_tokens=2, do_sample=False)
        assert used.get_seq_length() == 36


@pytest.mark.parametrize(
    ("drafts", "embedded"),
    # a drafter reads no embeddings
    [("prompt_lookup_num_tokens", False), ("prompt_lookup_num_tokens", True), ("assistant_early_exit", False)],
)
def test_assisted_decoding_goes_on_from_a_used_cache(drafts: str, embedded: bool) -> None:
    """Transformers passes its first step the whole input, which the cache would hold twice."""
    model = model_of("qwen3")
    ids = settled(model, [80], max_new_tokens=8)["input_ids"]
    with turbo_hf.patch(model, EXACT, strict="warn"):
        want = tokens(model, ids)
        own = model(ids[:, :50], use_cache=True)[CACHE]
        given = {"inputs_embeds": model.get_input_embeddings()(ids)} if embedded else {"input_ids": ids}
        made = model.generate(**given, **{drafts: 2, CACHE: own}, max_new_tokens=8, do_sample=False)
        assert torch.equal(made[:, -8:], want[:, -8:])
        assert own.get_seq_length() == 87
        if embedded:
            return
        # new tokens alone, which with their drafts are as many as the mask has columns
        own = model(ids[:, :2], use_cache=True)[CACHE]
        given = {"input_ids": ids[:, 2:], "attention_mask": torch.ones_like(ids)}
        made = model.generate(**given, **{drafts: 2, CACHE: own}, max_new_tokens=8, do_sample=False)
        assert torch.equal(made[:, -8:], want[:, -8:])


@whole
def test_a_cache_of_ones_own_is_the_one_that_is_filled() -> None:
    model, ids = long_phi(), prompts(1, SWITCH - 5)
    want = answer(model, ids).sequences
    with turbo_hf.patch(model, "turbo4"):
        own = TurboCache(model.config, EXACT)
        out = answer(model, ids, **{CACHE: own})
    assert out[CACHE] is own
    assert torch.equal(out.sequences, want)
    assert own.get_seq_length() == SWITCH - 5 + 23


@whole
def test_replayed_steps_go_on_after_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    runners = watch_runners(monkeypatch)
    model, ids = long_phi(), prompts(2, SWITCH - 20)
    config = flat_config(block_size=32)
    options: dict[str, Any] = {"max_new_tokens": 60}
    with turbo_hf.patch(model, flat_config(block_size=32, cuda_graphs=False)):
        want = answer(model, ids, **options).sequences
    with turbo_hf.patch(model, config):
        assert torch.equal(answer(model, ids, **options).sequences, want)
    # before the switch, after it, and where pages run out
    assert runners[-1].captures >= 2


@whole
def test_new_tokens_alone_are_refused_at_the_switch() -> None:
    model = long_phi()
    with turbo_hf.patch(model, EXACT):
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
    with turbo_hf.patch(model, EXACT), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = answer(model, **batch)
    assert torch.equal(out.sequences, want)
    assert isinstance(out[CACHE], TurboCache)
    (warning,) = [x for x in caught if "lacks the prompt" in str(x.message)]
    assert warning.filename == __file__
    with turbo_hf.patch(model, EXACT), pytest.raises(Unsupported, match=r"lacks the prompt.*do not pad"):
        answer(model, **left_padded([prompts(1, SWITCH - 5)[0], prompts(1, 9)[0]]))


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
    with turbo_hf.patch(model, EXACT), pytest.raises(Unsupported, match=said):
        answer(model, ids)
    with turbo_hf.patch(model, EXACT, strict="warn") as handle:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = answer(model, ids)
        assert sum(str(x.message).startswith(said) for x in caught) == 1
        assert torch.equal(out.sequences, want)
        assert handle.memory().layers == (), "the cache that was dropped holds nothing of this answer"
        answer(model, ids, max_new_tokens=1)
        assert handle.memory().tokens == 10


# --- models whose `generate` calls that of their language model, and what `report` says of the last one ---------------


@pytest.mark.parametrize("family", ["blip-2", "instructblip", "instructblipvideo"])
def test_the_part_that_generates_is_patched(family: str) -> None:
    model = build_multimodal(family)
    text, image = prompt(model)
    given, name = {**text, **image}, type(model).__name__
    how: Any = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "eos_token_id": None}
    stock = model.generate(**given, **how)
    with pytest.warns(UserWarning, match=rf"{name}\.generate calls generate of model\.language_model"):
        handle = turbo_hf.patch(model, EXACT)
    with handle:
        ours = model.generate(**given, **how)
        assert handle.report().model == "OPTForCausalLM"
        tokens, layers = stock.sequences.shape[1] - 1, len(handle.report().layers)
        assert f"{tokens} tokens in a TurboCache, {layers} of {layers} layers compressed" in str(handle.report())
        with pytest.raises(ValueError, match="patched already"):
            turbo_hf.patch(model, EXACT)
    assert isinstance(getattr(ours, CACHE), TurboCache)
    assert torch.equal(ours.sequences, stock.sequences)
    assert not isinstance(getattr(model.generate(**given, **how), CACHE), TurboCache)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_5", "mistral3"])
def test_a_picture_is_described(family: str) -> None:
    example = runpy.run_path(str(Path(__file__).resolve().parents[1] / "examples" / "caption.py"))
    model = build_multimodal(family)
    text, image = prompt(model)
    assert image
    given = {**text, **image}
    stock = model.generate(**given, max_new_tokens=12, do_sample=False)
    assert torch.equal(example["caption"](model, given, {"bits": 16}, new=12), stock)
    assert example["caption"](model, given, new=12).shape == stock.shape


@pytest.mark.filterwarnings("ignore")
def test_a_part_that_cannot_be_compressed_is_refused() -> None:
    with pytest.raises(Unsupported, match="no layer of BlipTextLMHeadModel"):
        turbo_hf.patch(build_multimodal("blip"))


def test_the_report_says_where_the_last_tokens_are_stored() -> None:
    model: Any = tiny_llama()
    ids = prompts(2, 40)
    how: Any = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    layers = len(model.model.layers)
    compressed = f"last generate: 88 tokens in a TurboCache, {layers} of {layers} layers compressed"
    with turbo_hf.patch(model, EXACT) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert handle.report().generated == "last generate: none since the patch"
        model.generate(ids, **how)
        assert handle.report().generated == compressed
        assert compressed in str(handle.report())
        for given, why in (
            ({CACHE: DynamicCache(config=model.config)}, "a DynamicCache was passed"),
            ({"cache_implementation": "static"}, "cache_implementation='static'"),
            ({"use_cache": False}, "use_cache=False"),
        ):
            model.generate(ids, **how, **given)
            assert handle.report().generated == f"last generate: not compressed ({why})"
        cache = handle.new_cache()
        model.generate(ids, **how, **{CACHE: cache})
        assert handle.report().generated == compressed
        handle.new_cache()
        del cache
        assert handle.report().generated == "last generate: in a TurboCache, which is gone"
        model.set_attn_implementation("sdpa")
        model.generate(ids, **how)
        assert handle.report().generated == "last generate: not compressed (set_attn_implementation has chosen 'sdpa')"
    with turbo_hf.patch(model) as handle:
        cache = TurboCache(model.config, uncompressed_layers=(0,))
        model.generate(ids, **how, **{CACHE: cache})
        assert f"{layers - 1} of {layers} layers compressed" in handle.report().generated
