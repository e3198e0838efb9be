"""`generate` on a patched model: exact attention, rows by themselves, memory, the trained model."""

import copy
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from all_pairs import in_turn
from generate_support import EXACT, EXACT4, MODES, answer, mistral, oracle, patched, ragged, story
from hypothesis import given, settings
from hypothesis import strategies as st
from models import lab_model, left_padded, prompts, tiny_llama
from torch import Tensor
from transformers import DynamicCache

import turbo_hf
from turbo_hf import TurboCache, TurboConfig
from turbo_hf.attention.masks import mask_4d
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


@pytest.mark.parametrize("config", EXACT)
def test_the_oracle_notices_quantization_and_padding(llama: Any, config: TurboConfig) -> None:
    batch = ragged()
    want = oracle(llama, config, **batch)
    assert not torch.equal(want, answer(llama, **batch)), "quantization changes no token"
    shown = {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(batch["attention_mask"])}
    assert not torch.equal(want, oracle(llama, config, **shown)), "padding changes no token"
    if config.bits < 8:
        padded = answer(llama, **dict[str, Any]({CACHE: TurboCache(llama.config, config)}), **batch)
        assert not torch.equal(want, padded), "where a block begins changes no token"


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


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128])
def test_prompts_at_the_edge_of_a_block(llama: Any, tokens: int) -> None:
    ids = prompts(2, tokens)
    assert torch.equal(patched(llama, EXACT4, input_ids=ids), oracle(llama, EXACT4, input_ids=ids))
    assert patched(llama, EXACT4, tokens=1, input_ids=ids).shape == (2, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("mode", MODES)
def test_half_precision_models_generate(dtype: torch.dtype, mode: Any) -> None:
    model = tiny_llama().to(dtype)
    with turbo_hf.patch(model, TurboConfig(attention=mode)):
        out = model.generate(**ragged(), max_new_tokens=8, return_dict_in_generate=True, output_logits=True)
    assert out.sequences.shape == (4, 125 + 8)
    assert all(logits.isfinite().all() for logits in out.logits)
    assert all(layer.dtype == dtype for layer in out[CACHE].turbo_layers())


# --- rows do not depend on each other ------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5])
def test_a_batch_answers_like_its_rows_alone(llama: Any, config: TurboConfig, rows: int) -> None:
    lengths = [60, 125, 1, 64, 130][:rows]
    batch = ragged(lengths)
    together = patched(llama, config, **batch)
    for row, length in enumerate(lengths):
        alone = patched(llama, config, input_ids=batch["input_ids"][row : row + 1, -length:])
        assert torch.equal(together[row], alone[0])


def test_a_row_that_ends_early_does_not_disturb_the_others(llama: Any, config: TurboConfig) -> None:
    batch = ragged([60, 125, 64])
    free = patched(llama, config, **batch)
    end = int(free[1, 5])
    stopped = patched(llama, config, eos_token_id=end, pad_token_id=0, **batch)
    for row, whole in enumerate(free.tolist()):
        stop = whole.index(end) + 1 if end in whole else len(whole)
        assert stopped[row, :stop].tolist() == whole[:stop]
        assert not stopped[row, stop:].any()


def test_input_embeddings_serve_as_a_prompt(llama: Any, config: TurboConfig) -> None:
    batch = ragged()
    want = patched(llama, config, **batch)
    embeddings = llama.get_input_embeddings()(batch["input_ids"])
    with turbo_hf.patch(llama, config):
        got = llama.generate(inputs_embeds=embeddings, attention_mask=batch["attention_mask"], max_new_tokens=24)
    assert torch.equal(got, want)


@given(data=st.data())
@settings(max_examples=60)
def test_passes_of_a_batch_are_those_of_its_rows_alone(llama: Any, data: st.DataObject) -> None:
    mode: Any = data.draw(st.sampled_from(MODES))
    bits, low_heads, block = data.draw(st.sampled_from([(8, 0.0, 32), (4, 0.5, 32), (3, 0.0, 64), (2, 0.0, 64)]))
    window = data.draw(st.sampled_from([None, None, 7, 40, 64]))
    config = TurboConfig(attention=mode, bits=bits, low_heads=low_heads, block_size=block, sas=data.draw(st.booleans()))
    model = llama if window is None else mistral(window)
    rows = data.draw(st.integers(2, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    mask = torch.zeros(rows, 0, dtype=torch.int64)
    with turbo_hf.patch(model, config) as handle, torch.no_grad():
        batch: Any = handle.new_cache()
        alone = [handle.new_cache() for _ in range(rows)]
        for _ in range(data.draw(st.integers(1, 5))):
            change = data.draw(st.sampled_from(["none", "none", "reorder", "crop"]))
            if change == "reorder" and mask.shape[1]:
                index = data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows))
                batch.reorder_cache(torch.tensor(index))
                alone, mask = [copy.deepcopy(alone[row]) for row in index], mask[index]
            if change == "crop" and window is None:
                kept = data.draw(st.integers(min(1, mask.shape[1]), mask.shape[1]))
                gone = mask[:, kept:].sum(-1).tolist()
                if bool(mask[:, :kept].any(-1).all()):
                    batch.crop(kept - mask.shape[1])
                    for cache, count in zip(alone, gone, strict=True):
                        cache.crop(-count)
                    mask = mask[:, :kept]
            tokens = data.draw(st.sampled_from([1, 1, 5, 16, 17, 40, 70]))
            valid = torch.rand(rows, tokens, generator=generator) < data.draw(st.sampled_from([0.3, 0.9, 1.0]))
            side = data.draw(st.sampled_from(["left", "right", "holes"]))
            valid = valid if side == "holes" else valid.sort(-1, descending=side == "right").values
            # what runs as a prompt, or as tokens, must do so for each row alone
            needed = 17 if tokens > 16 else 0 if mask.shape[1] else tokens
            valid[:, tokens - needed :] = True
            ids, mask = prompts(rows, tokens), torch.cat((mask, valid.long()), 1)
            position = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens:]
            logits = model(ids, attention_mask=mask, position_ids=position, **{CACHE: batch}).logits
            for row, cache in enumerate(alone):
                seen, count = cache.get_seq_length(), int(valid[row].sum())
                if count:
                    place = torch.arange(seen, seen + count)[None]
                    own = model(ids[row : row + 1, valid[row]], position_ids=place, **{CACHE: cache}).logits[0]
                    # far less than one INT8 step anywhere would make
                    noise = torch.finfo(torch.float32).eps * own.abs().max()
                    assert bool(((logits[row, valid[row]] - own).abs() < noise).all())


# --- what is not compressed, and what is refused -------------------------------------------------------------------


def test_without_a_cache_nothing_is_quantized(llama: Any) -> None:
    batch = ragged()
    want = answer(llama, tokens=6, use_cache=False, **batch)
    assert torch.equal(patched(llama, "turbo2", tokens=6, use_cache=False, **batch), want)


def test_a_foreign_cache_works_with_a_warning(llama: Any) -> None:
    batch = ragged()
    want = answer(llama, **batch)
    with pytest.warns(UserWarning, match=rf"a DynamicCache was passed as {CACHE}, so this call is not compressed"):
        got = patched(llama, "turbo2", **dict[str, Any]({CACHE: DynamicCache(config=llama.config)}), **batch)
    assert torch.equal(got, want)


def test_a_static_cache_works_with_a_warning(llama: Any) -> None:
    batch = ragged()
    want = answer(llama, **batch)
    with pytest.warns(UserWarning, match="cache_implementation='static' asks for Hugging Face's own cache"):
        got = patched(llama, "turbo2", cache_implementation="static", **batch)
    assert torch.equal(got, want)


def test_a_compressed_call_warns_of_nothing(llama: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patched(llama, "turbo4", **ragged())


def test_a_pass_left_to_hugging_face_stores_no_padding(llama: Any) -> None:
    batch = ragged([70, 9])
    mask = batch["attention_mask"]
    after = torch.cat((mask, torch.ones(2, 1, dtype=torch.int64)), 1)
    steps = []
    with turbo_hf.patch(llama, EXACT4, strict="fallback") as handle, torch.no_grad():
        every = mask_4d(mask, mask.shape[1], mask.shape[1], causal=True, window=None, device=mask.device)
        for shown in (mask, every):
            cache = handle.new_cache()
            position = (mask.cumsum(-1) - 1).clamp(min=0)
            llama(**{**batch, "attention_mask": shown}, position_ids=position, **{CACHE: cache})
            assert [layer.lengths() for layer in cache.turbo_layers()] == [[70, 9]] * 2
            place = after.sum(-1, keepdim=True) - 1
            token = prompts(2, 1)
            steps.append(llama(token, attention_mask=after, position_ids=place, **{CACHE: cache}).logits)
    assert torch.equal(steps[0].argmax(-1), steps[1].argmax(-1))


def test_rows_of_padding_are_refused(llama: Any) -> None:
    batch = ragged([20, 9, 5])
    batch["attention_mask"][1] = 0
    with pytest.raises(ValueError, match=r"rows \[1\] of attention_mask are all padding"):
        patched(llama, "turbo4", **batch)


def test_training_on_a_compressed_cache_is_refused(llama: Any) -> None:
    ids = prompts(2, 80)
    model = copy.deepcopy(llama)
    with turbo_hf.patch(model) as handle:
        model.train()
        with pytest.raises(ValueError, match=r"training mode.*Call model.eval\(\)"):
            model(ids, **{CACHE: handle.new_cache()})
        # without a compressed cache training goes on as ever
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        want = copy.deepcopy(llama)
        want.train()
        want(ids, labels=ids, use_cache=False).loss.backward()
        for mine, other in zip(model.parameters(), want.parameters(), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(mine.grad, other.grad)
        model.eval()
        loss = model(ids, labels=ids, **{CACHE: handle.new_cache()}).loss
        with pytest.raises(RuntimeError, match="attention over a compressed cache has no gradient"):
            loss.backward()


# --- memory --------------------------------------------------------------------------------------------------------


def reachable(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor behind an object."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        return
    parts = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple | set) else ()
    for part in (*parts, *getattr(thing, "__dict__", {}).values()):
        yield from reachable(part, seen)


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
    floats = [x for x in reachable(cache, set()) if x.is_floating_point()]
    assert {id(x) for x in floats} == scales


# --- the trained model ---------------------------------------------------------------------------------------------


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


def lookup(pairs: int, seed: int) -> tuple[str, str]:
    """A JSON object of random keys and values with a question for one of them, and the answer."""
    generator = random.Random(seed)
    items = [(f"{generator.getrandbits(32):08x}", f"{generator.getrandbits(32):08x}") for _ in range(pairs)]
    key, value = items[seed % pairs]
    text = ", ".join(f'"{k}": "{v}"' for k, v in items)
    return (
        "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
        f'{{{text}}}\n\nKey: "{key}"\nThe value associated with the specified key is:',
        f' "{value}"',
    )


@in_turn(
    config=[
        pytest.param("int8", id="int8"),
        pytest.param("turbo4", id="turbo4"),
        pytest.param("turbo-mixed", id="turbo-mixed"),
        pytest.param(EXACT4, id="fp16"),
        pytest.param(TurboConfig(sas=True), id="sas"),
        pytest.param(TurboConfig(buffer_scale="universal"), id="universal"),
        pytest.param(TurboConfig(int8_layers=(0,), dense_layers=(5,)), id="layers"),
    ],
    size=[pytest.param(64, id="chunked"), pytest.param(None, id="whole")],
)
def test_the_trained_model_finds_its_values(config: str | TurboConfig, size: int | None) -> None:
    model, tokenizer = lab_model()
    tasks = [lookup(pairs, seed) for seed, pairs in enumerate((3, 9, 12))]
    batch = tokenizer([text for text, _ in tasks], return_tensors="pt", padding=True)
    got = patched(model, config, tokens=12, prefill_chunk_size=size, **batch)
    for text, (_, value) in zip(tokenizer.batch_decode(got, skip_special_tokens=True), tasks, strict=True):
        assert text.startswith(value)


@pytest.mark.parametrize("config", EXACT)
def test_the_trained_model_gives_the_oracles_tokens(config: TurboConfig) -> None:
    model, tokenizer = lab_model()
    assert model.config._attn_implementation == "eager"
    batch = tokenizer([lookup(pairs, pairs)[0] for pairs in (2, 5)], return_tensors="pt", padding=True)
    assert torch.equal(patched(model, config, tokens=20, **batch), oracle(model, config, tokens=20, **batch))


def test_the_trained_model_reasons_as_without_the_patch() -> None:
    model, _ = lab_model()
    want = answer(model, tokens=60, **story())
    for config in ("int8", "turbo4", "turbo-mixed"):
        assert torch.equal(patched(model, config, tokens=60, **story()), want)


def test_what_prepares_keys_for_rounding_is_left_out_where_auto_rounds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_llama(), left_padded([prompts(1, n, seed=n)[0] for n in (40, 30)])
    monkeypatch.setattr("turbo_hf.attention.prompt.prefill_mode", lambda *given: "fp16")
    answers = []
    for config in (TurboConfig(smooth_k=True), TurboConfig()):
        with turbo_hf.patch(model, config):
            answers.append(model.generate(**batch, max_new_tokens=4, do_sample=False))
    assert torch.equal(*answers)
