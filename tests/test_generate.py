"""`generate` on a patched model: exact attention, rows by themselves, memory, drafts, several calls."""

import copy
from typing import Any

import pytest
import torch
from generate_support import EXACT, EXACT4, MODES, answer, mistral, oracle, patched, ragged, story
from layer_support import tensors_of
from models import lab_model, prompts, tiny_llama

import turbo_hf
from turbo_hf import TurboConfig
from turbo_hf.models.versions import CACHE


@pytest.fixture(params=MODES)
def config(request: pytest.FixtureRequest) -> TurboConfig:
    """4 bit in both attention modes."""
    return TurboConfig(attention=request.param)


# --- exact attention is stock attention on the dequantised cache ---------------------------------------------------


@pytest.mark.parametrize("config", EXACT)
def test_greedy_tokens_are_the_oracles(llama: Any, config: TurboConfig) -> None:
    batch = ragged()
    assert torch.equal(patched(llama, config, **batch), oracle(llama, config, **batch))


@pytest.mark.parametrize("lengths", [[150, 150], [150, 126]], ids=["even", "padded"])
@pytest.mark.parametrize("config", EXACT)
def test_beam_search_finds_the_oracles_beams(llama: Any, config: TurboConfig, lengths: list[int]) -> None:
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, **ragged(lengths)}
    assert torch.equal(patched(llama, config, **options), oracle(llama, config, expand=3, **options))


@pytest.mark.parametrize("config", EXACT)
def test_samples_are_the_oracles(llama: Any, config: TurboConfig) -> None:
    options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, **ragged([70, 126])}
    torch.manual_seed(5)
    want = oracle(llama, config, expand=3, **options)
    torch.manual_seed(5)
    got = patched(llama, config, **options)
    assert torch.equal(got, want)
    assert len({tuple(row.tolist()) for row in got}) == 6


@pytest.mark.parametrize("size", [5, 64, 100])
def test_chunked_prefill_gives_the_oracles_tokens(llama: Any, size: int) -> None:
    options: dict[str, Any] = {"prefill_chunk_size": size, **ragged()}
    assert torch.equal(patched(llama, EXACT4, **options), oracle(llama, EXACT4, **options))


@pytest.mark.parametrize("window", [1, 20, 64, 100])
@pytest.mark.parametrize("size", [None, 50], ids=["whole", "chunked"])
def test_a_sliding_window_gives_the_oracles_tokens(window: int, size: int | None) -> None:
    model = mistral(window)
    options: dict[str, Any] = {"prefill_chunk_size": size, **ragged([250, 60, 125])}
    got = patched(model, EXACT4, **options)
    assert torch.equal(got, oracle(model, EXACT4, **options))
    assert not torch.equal(got, patched(mistral(None), EXACT4, **options))


# --- rows do not depend on each other ------------------------------------------------------------------------------


def test_input_embeddings_serve_as_a_prompt(llama: Any, config: TurboConfig) -> None:
    batch = ragged()
    want = patched(llama, config, **batch)
    embeddings = llama.get_input_embeddings()(batch["input_ids"])
    with turbo_hf.patch(llama, config):
        got = llama.generate(inputs_embeds=embeddings, attention_mask=batch["attention_mask"], max_new_tokens=24)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, {"prefill_chunk_size": 40}], ids=["greedy", "beams", "chunks"]
)
def test_no_full_precision_copy_survives(llama: Any, config: TurboConfig, options: dict[str, int]) -> None:
    with turbo_hf.patch(llama, config):
        out = llama.generate(**ragged(), max_new_tokens=10, return_dict_in_generate=True, **options)
    cache = out[CACHE]
    scales = {
        id(x)
        for layer in cache.turbo_layers()
        for x in (layer.buffer.k_scale, layer.buffer.v_scale, *(pages.size for pages in layer.pool.paged))
    }
    assert len(scales) == 2 * 3
    floats = [x for x in tensors_of(cache) if x.is_floating_point()]
    assert {id(x) for x in floats} == scales


@pytest.mark.parametrize("strict", ["raise", "fallback"])
def test_stop_strings_and_token_healing(strict: Any) -> None:
    """Transformers hands the tokenizer that they need on to the attention."""
    model, tokenizer = lab_model()
    batch = dict(tokenizer("The special magic number is 4281. The special magic number is", return_tensors="pt"))
    for options in ({"stop_strings": ["."]}, {"token_healing": True}):
        given: dict[str, Any] = {**batch, **options, "tokenizer": tokenizer, "max_new_tokens": 12, "do_sample": False}
        want = model.generate(**given)
        with turbo_hf.patch(model, "int8", strict=strict):
            assert torch.equal(model.generate(**given), want)


# --- drafts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", EXACT)
@pytest.mark.parametrize("window", [None, 20])
def test_drafts_give_the_oracles_tokens(config: TurboConfig, window: int | None) -> None:
    model = mistral(window)
    # a prompt that repeats itself and what the model says to it, so that drafts are accepted and refused
    ids = prompts(1, 40)
    said = answer(model, input_ids=ids)
    ids = torch.cat((ids, said, ids, said[:, :9]), 1)
    # what the model said may hold the pad token, which is no padding here
    options: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "prompt_lookup_num_tokens": 5}
    assert torch.equal(patched(model, config, tokens=40, **options), oracle(model, config, tokens=40, **options))


@pytest.mark.parametrize(
    ("draft", "assistant_patched", "config"),
    [
        ("good", True, TurboConfig()), ("good", False, EXACT4), ("bad", False, TurboConfig()), ("bad", True, EXACT4),
    ],
)  # fmt: skip
def test_drafts_give_the_greedy_tokens(draft: str, assistant_patched: bool, config: TurboConfig) -> None:
    model, _ = lab_model()
    want = patched(model, config, tokens=60, **story())
    assert want.shape[1] + story()["input_ids"].shape[1] > 64, "no block is sealed between drafts"
    other = tiny_llama(vocab_size=model.config.vocab_size, eos_token_id=1)
    assistant = copy.deepcopy(model) if draft == "good" else other
    if assistant_patched:
        turbo_hf.patch(assistant, config)
    assert torch.equal(patched(model, config, tokens=60, assistant_model=assistant, **story()), want)


def test_drafts_leave_a_cache_that_can_go_on(llama: Any) -> None:
    ids = prompts(1, 60)
    repeated = torch.cat((ids, ids, ids[:, :50]), 1)
    with turbo_hf.patch(llama, EXACT4) as handle:
        cache = handle.new_cache()
        first = llama.generate(repeated, **{CACHE: cache}, max_new_tokens=40, prompt_lookup_num_tokens=5)
        # everything but the newest token is cached, drafts that were refused are not
        assert [layer.lengths() for layer in cache.turbo_layers()] == [[first.shape[1] - 1]] * 2
        assert all(
            layer.state.sealed == [(first.shape[1] - 1 - layer.state.staying) // 64] for layer in cache.turbo_layers()
        )
        again = handle.new_cache()
        llama(first[:, :-1], **{CACHE: again})
        for mine, other in zip(cache.turbo_layers()[:1], again.turbo_layers()[:1], strict=True):
            got, want = mine.kv_store(), other.kv_store()
            assert torch.equal(got.paged[0].k[got.table], want.paged[0].k[want.table])
        # a call without drafts seals its blocks itself
        llama.generate(first, **{CACHE: cache}, max_new_tokens=64)
        assert all(
            layer.state.sealed == [(first.shape[1] + 63 - layer.state.staying) // 64] for layer in cache.turbo_layers()
        )


def test_a_cache_refuses_another_batch_and_another_past(llama: Any) -> None:
    with turbo_hf.patch(llama) as handle:
        cache = handle.new_cache()
        batch = ragged([20, 9])
        first = llama.generate(**batch, **{CACHE: cache}, max_new_tokens=3)
        with pytest.raises(ValueError, match="differs from the one under which the cached tokens were stored"):
            llama.generate(first, attention_mask=torch.ones_like(first), **{CACHE: cache}, max_new_tokens=3)
        with pytest.raises(ValueError, match="differs from the one under which the cached tokens were stored"):
            llama(first[:, -1:], **{CACHE: cache})
        changed = torch.nn.functional.pad(batch["attention_mask"], (0, 3), value=1)
        changed[1, 15] = 0
        with pytest.raises(ValueError, match="differs from the one under which the cached tokens were stored"):
            llama(first[:, -1:], attention_mask=changed, **{CACHE: cache})
        with pytest.raises(ValueError, match=r"holds 2 rows of 2 heads of .* channels; this pass brings 3"):
            llama(prompts(3, 1), attention_mask=torch.ones(3, 23), **{CACHE: cache})
        with pytest.raises(ValueError, match="attention_mask has 3 rows, this pass 2"):
            llama(first[:, -1:], attention_mask=torch.ones(3, 23), **{CACHE: cache})
        # a row without padding needs no mask
        cache.batch_select_indices(torch.tensor([0]))
        llama(first[:1, -1:], **{CACHE: cache})
        with pytest.raises(ValueError, match="holds 1 rows"):
            llama(prompts(3, 1), **{CACHE: cache})
        with pytest.raises(ValueError, match="attention_mask has 5 columns; the cache holds 23"):
            llama(prompts(1, 1), attention_mask=torch.ones(1, 5), **{CACHE: cache})


def test_a_pass_may_be_all_padding(llama: Any, config: TurboConfig) -> None:
    ids = prompts(1, 40)
    mask = (torch.arange(40) >= 13).long()[None]
    want = patched(llama, config, input_ids=ids[:, 13:])
    padded = patched(llama, config, input_ids=ids, attention_mask=mask)
    assert torch.equal(padded, want)
    assert torch.equal(
        patched(llama, EXACT4, input_ids=ids, attention_mask=mask, prefill_chunk_size=5),
        oracle(llama, EXACT4, input_ids=ids, attention_mask=mask, prefill_chunk_size=5),
    )
