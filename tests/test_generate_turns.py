"""Drafts, one cache over several calls, and loops of one's own."""

import copy
from typing import Any

import pytest
import torch
from all_pairs import all_pairs, in_turn
from generate_support import EXACT, EXACT4, MODES, answer, mistral, oracle, patched, ragged, story
from models import lab_model, left_padded, prompts, tiny_llama
from torch import Tensor

import turbo_hf
from turbo_hf import TurboCache, TurboConfig
from turbo_hf.models.versions import CACHE


@pytest.fixture(params=MODES)
def config(request: pytest.FixtureRequest) -> TurboConfig:
    """4 bit in both attention modes."""
    return TurboConfig(attention=request.param)


# --- drafts --------------------------------------------------------------------------------------------------------


@in_turn(
    config=[*EXACT, EXACT[1]],
    window=[pytest.param(None, id="full"), pytest.param(20, id="window20"), pytest.param(100, id="window100")],
)
def test_drafts_give_the_oracles_tokens(config: TurboConfig, window: int | None) -> None:
    model = mistral(window)
    # a prompt that repeats itself and what the model says to it, so that drafts are accepted and refused
    ids = prompts(1, 40)
    said = answer(model, input_ids=ids)
    ids = torch.cat((ids, said, ids, said[:, :9]), 1)
    # what the model said may hold the pad token, which is no padding here
    options: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "prompt_lookup_num_tokens": 5}
    assert torch.equal(patched(model, config, tokens=40, **options), oracle(model, config, tokens=40, **options))


@in_turn(bits=[8, 4], mode=MODES)
def test_prompt_lookup_gives_the_greedy_tokens(bits: Any, mode: Any) -> None:
    model, _ = lab_model()
    config = TurboConfig(bits=bits, attention=mode)
    want = patched(model, config, tokens=60, **story())
    assert want.shape[1] + story()["input_ids"].shape[1] > 64, "no block is sealed between drafts"
    assert torch.equal(patched(model, config, tokens=60, prompt_lookup_num_tokens=4, **story()), want)


@all_pairs(
    agrees=[pytest.param(True, id="good"), pytest.param(False, id="bad")],
    assistant_patched=[pytest.param(True, id="patched"), pytest.param(False, id="plain")],
    mode=MODES,
)
def test_an_assistant_gives_the_greedy_tokens(agrees: bool, assistant_patched: bool, mode: Any) -> None:
    model, _ = lab_model()
    config = TurboConfig(attention=mode)
    assistant = tiny_llama(vocab_size=model.config.vocab_size, eos_token_id=1)
    if agrees:
        assistant = copy.deepcopy(model)
    want = patched(model, config, tokens=60, **story())
    if assistant_patched:
        turbo_hf.patch(assistant, config)
    got = patched(model, config, tokens=60, assistant_model=assistant, **story())
    assert torch.equal(got, want)


def test_drafts_leave_a_cache_that_can_go_on(llama: Any) -> None:
    ids = prompts(1, 60)
    repeated = torch.cat((ids, ids, ids[:, :50]), 1)
    with turbo_hf.patch(llama, EXACT4) as handle:
        cache = handle.new_cache()
        first = llama.generate(repeated, **{CACHE: cache}, max_new_tokens=40, prompt_lookup_num_tokens=5)
        # everything but the newest token is cached, drafts that were refused are not
        assert [layer.lengths() for layer in cache.turbo_layers()] == [[first.shape[1] - 1]] * 2
        assert all(layer.state.sealed == [(first.shape[1] - 1) // 64] for layer in cache.turbo_layers())
        again = handle.new_cache()
        llama(first[:, :-1], **{CACHE: again})
        for mine, other in zip(cache.turbo_layers()[:1], again.turbo_layers()[:1], strict=True):
            got, want = mine.kv_store(), other.kv_store()
            assert torch.equal(got.paged[0].k[got.table], want.paged[0].k[want.table])
        # a call without drafts seals its blocks itself
        llama.generate(first, **{CACHE: cache}, max_new_tokens=64)
        assert all(layer.state.sealed == [(first.shape[1] + 63) // 64] for layer in cache.turbo_layers())


# --- one cache, several calls --------------------------------------------------------------------------------------


def turns(model: Any, batch: dict[str, Any], then: dict[str, Any], cache: TurboCache | None) -> Tensor:
    """Generate, append the second prompt, generate on. Returns the second answer."""
    options: dict[str, Any] = {"max_new_tokens": 10, "return_dict_in_generate": True}
    if cache is not None:
        options[CACHE] = cache
    first = model.generate(**batch, **options)
    ids = torch.cat((first.sequences, then["input_ids"]), 1)
    generated = torch.ones(len(ids), 10, dtype=torch.int64)
    mask = torch.cat((batch["attention_mask"], generated, then["attention_mask"]), 1)
    options[CACHE] = first[CACHE]
    second = model.generate(input_ids=ids, attention_mask=mask, **options)
    assert second[CACHE] is first[CACHE]
    assert second[CACHE].get_seq_length() == ids.shape[1] + 9
    new: Tensor = second.sequences[:, ids.shape[1] :]
    return new


@pytest.mark.parametrize("new", [[30, 30, 30], [3, 40, 17], [5, 2, 1]], ids=["even", "padded", "short"])
def test_a_second_turn_answers_like_its_rows_alone(llama: Any, config: TurboConfig, new: list[int]) -> None:
    lengths = [60, 125, 1]
    batch = ragged(lengths)
    then = left_padded([prompts(1, n, seed=10 + row)[0] for row, n in enumerate(new)])
    with turbo_hf.patch(llama, config):
        together = turns(llama, batch, then, None)
        for row, (length, n) in enumerate(zip(lengths, new, strict=True)):
            one = {name: x[row : row + 1, -length:] for name, x in batch.items()}
            two = {name: x[row : row + 1, -n:] for name, x in then.items()}
            if (n <= 16) == (then["input_ids"].shape[1] <= 16):
                assert torch.equal(turns(llama, one, two, None)[0], together[row])


def test_a_second_turn_gives_the_oracles_tokens(llama: Any) -> None:
    batch = ragged([60, 125, 1])
    then = left_padded([prompts(1, n, seed=10 + n)[0] for n in (3, 40, 17)])
    mask = torch.cat((batch["attention_mask"], torch.ones(3, 10, dtype=torch.int64), then["attention_mask"]), 1)
    want = turns(llama, batch, then, TurboCache(llama.config, EXACT4, attention_mask=mask))
    with turbo_hf.patch(llama, EXACT4):
        assert torch.equal(turns(llama, batch, then, None), want)


def test_a_prefix_is_continued_twice(llama: Any, config: TurboConfig) -> None:
    prefix = prompts(1, 100)
    tails = [prompts(1, 40, seed=1), prompts(1, 30, seed=2)]
    with turbo_hf.patch(llama, config) as handle:
        cache = handle.new_cache()
        llama(prefix, **{CACHE: cache})
        answers = []
        for tail in (*tails, tails[0]):
            ids = torch.cat((prefix, tail), 1)
            answers.append(answer(llama, input_ids=ids, **dict[str, Any]({CACHE: copy.deepcopy(cache)})))
        assert cache.get_seq_length() == 100
        fresh = []
        for tail in tails:
            own = handle.new_cache()
            llama(prefix, **{CACHE: own})
            fresh.append(answer(llama, input_ids=torch.cat((prefix, tail), 1), **dict[str, Any]({CACHE: own})))
    assert torch.equal(answers[0], answers[2])
    assert torch.equal(answers[0], fresh[0])
    assert torch.equal(answers[1], fresh[1])


def test_a_cache_filled_in_inference_mode_goes_on_outside_it(llama: Any, config: TurboConfig) -> None:
    # 36 open tokens in room for 48: the next ones are written into the tensors that are there
    ids = torch.cat((prompts(1, 100), prompts(1, 5, seed=1)), 1)
    with turbo_hf.patch(llama, config) as handle:
        caches = [handle.new_cache(), handle.new_cache()]
        with torch.inference_mode():
            llama(ids[:, :100], **{CACHE: caches[0]})
        with torch.no_grad():
            llama(ids[:, :100], **{CACHE: caches[1]})
        caches.append(copy.deepcopy(caches[0]))
        got = [answer(llama, tokens=40, input_ids=ids, **dict[str, Any]({CACHE: cache})) for cache in caches]
        with torch.inference_mode():
            inside = answer(llama, input_ids=ids[:, :100])
        outside = answer(llama, input_ids=ids[:, :100])
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[2], got[1])
    assert torch.equal(inside, outside)


def test_a_cache_refuses_another_batch_and_another_past(llama: Any) -> None:
    with turbo_hf.patch(llama) as handle:
        cache = handle.new_cache()
        batch = ragged([20, 9])
        first = llama.generate(**batch, **{CACHE: cache}, max_new_tokens=3)
        with pytest.raises(ValueError, match="differs from the one under which the cached tokens were stored"):
            llama.generate(first, attention_mask=torch.ones_like(first), **{CACHE: cache}, max_new_tokens=3)
        with pytest.raises(ValueError, match="differs from the one under which the cached tokens were stored"):
            llama(first[:, -1:], **{CACHE: cache})
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


# --- a loop of one's own -------------------------------------------------------------------------------------------


def test_a_loop_of_ones_own_gives_the_tokens_of_generate(llama: Any, config: TurboConfig) -> None:
    batch = ragged()
    mask, ids, tokens = batch["attention_mask"], batch["input_ids"], []
    with turbo_hf.patch(llama, config) as handle, torch.no_grad():
        want = answer(llama, tokens=8, **batch)
        cache = handle.new_cache()
        for _ in range(8):
            position = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            logits = llama(ids, attention_mask=mask, position_ids=position, **{CACHE: cache}).logits
            ids = logits[:, -1:].argmax(-1)
            tokens.append(ids)
            mask = torch.cat((mask, torch.ones_like(ids)), 1)
    assert torch.equal(torch.cat(tokens, 1), want)


@pytest.mark.parametrize("lengths", [[60, 125, 64], [70, 1, 70]], ids=["long", "single"])
def test_a_right_padded_prompt_is_read_like_its_rows_alone(llama: Any, config: TurboConfig, lengths: list[int]) -> None:
    rows = [prompts(1, length, seed=row) for row, length in enumerate(lengths)]
    width = max(lengths)
    ids = torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[1])) for row in rows])
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    with turbo_hf.patch(llama, config) as handle, torch.no_grad():
        cache = handle.new_cache()
        logits = llama(ids, attention_mask=mask.long(), **{CACHE: cache}).logits
        token = prompts(3, 1, seed=9)
        after = torch.cat((mask, torch.ones(3, 1, dtype=torch.bool)), 1).long()
        place = torch.tensor(lengths)[:, None]
        step = llama(token, attention_mask=after, position_ids=place, **{CACHE: cache}).logits
        for row, length in enumerate(lengths):
            own = handle.new_cache()
            alone = llama(rows[row], **{CACHE: own}).logits
            alone_step = llama(token[row : row + 1], **{CACHE: own}).logits
            assert torch.equal(logits[row, :length].argmax(-1), alone[0].argmax(-1))
            assert torch.equal(step[row].argmax(-1), alone_step[0].argmax(-1))
            assert cache.turbo_layers()[0].lengths()[row] == length + 1


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
