"""Caches on disk: what was saved goes on bit by bit; what differs or is damaged is refused, whole."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from all_pairs import in_one_test
from graphs_support import an_index, watch_runners
from histories_support import subject
from hypothesis import given
from hypothesis import strategies as st
from models import left_padded, prompts, tiny_llama, tiny_mistral
from sparse_cache_support import sparse
from tiny_families import build
from transformers.generation.streamers import BaseStreamer

import turbo_hf
from turbo_hf import TurboCache, TurboConfig, Unsupported
from turbo_hf.cache.saved_cache import MAKER
from turbo_hf.cache.saved_files import FACTS
from turbo_hf.config import whole_files
from turbo_hf.config.whole_files import facts_hash
from turbo_hf.models.versions import CACHE

Made = tuple[Any, TurboCache]


def llama(**options: Any) -> Callable[[], Made]:
    def make() -> Made:
        model = tiny_llama().requires_grad_(False)
        return model, turbo_hf.patch(model, TurboConfig(**{"bits": 4, "block_size": 32, **options})).new_cache()

    return make


def windows() -> Made:
    """A window in every layer, of which one is not compressed."""
    model = tiny_mistral(24).requires_grad_(False)
    model.model.layers[1].self_attn.is_cross_attention = True
    return model, turbo_hf.patch(model, TurboConfig(block_size=32), strict="fallback").new_cache()


def by_bucket() -> Made:
    model = tiny_llama().requires_grad_(False)
    config = sparse("kmeans-rotated", probes=2, window_tokens=8, dense_layers=())
    return model, turbo_hf.patch(model, config, calibration=an_index(model, 8)).new_cache()


def family(name: str) -> Callable[[], Made]:
    def make() -> Made:
        model = subject(name, "turbo4").patched
        return model, vars(model)[MAKER].make(model.config)

    return make


def latent() -> Made:
    model = build("deepseek_v3")
    return model, turbo_hf.patch(model, "turbo4").new_cache()


MIXED: dict[str, Any] = {"low_bits": 2, "low_heads": 0.5, "buffer_scale": "universal"}
KINDS: list[Any] = [
    pytest.param(llama(), id="turbo4"),
    pytest.param(llama(bits=8), id="int8"),
    pytest.param(llama(**MIXED), id="mixed-universal"),
    pytest.param(llama(value_bits=2, recent_tokens=64), id="values-at-2-bit"),
    pytest.param(llama(bits=2), id="turbo2"),
    pytest.param(llama(layer_bits=(2, (8, 4))), id="depths"),
    pytest.param(llama(bits=16, attention="fp16"), id="16-bit"),
    pytest.param(llama(backend="triton", low_bits=2, low_heads=0.5), id="kernels"),
    pytest.param(windows, id="windows"),
    pytest.param(by_bucket, id="sparse"),
    pytest.param(family("lfm2"), id="convolution"),
    pytest.param(family("qwen3_next"), id="recurrent"),
    pytest.param(latent, id="latent"),
]


def run(model: Any, cache: Any, ids: torch.Tensor, **given: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids % 63 + 1, **{CACHE: cache}, **given).logits
    return logits


@pytest.mark.parametrize("make", KINDS)
def test_a_loaded_cache_goes_on_bit_by_bit(make: Callable[[], Made], tmp_path: Path) -> None:
    model, cache = make()
    run(model, cache, prompts(2, 200))
    # two rows that share pages, one of them cut
    cache.reorder_cache(torch.tensor([1, 1]))
    run(model, cache, prompts(2, 1, 1))
    ids = prompts(2, 201)
    cache.save_pretrained(tmp_path, input_ids=ids)
    loaded = TurboCache.from_pretrained(tmp_path, model)
    for one, other in zip(cache.turbo_layers(), loaded.turbo_layers(), strict=True):
        assert one.state == other.state
        # pages of both rows are stored once
        assert other.pool.pages == len(set(one.pool.table[:, : max(one.state.sealed)].flatten().tolist()))
    assert torch.equal(loaded.known_ids(), ids)  # type: ignore[arg-type]
    assert make is not by_bucket or any(cache.turbo_layers()[0].bucket_index.sorted_blocks)
    for tokens, seed in ((1, 3), (40, 4), (1, 5)):
        new = prompts(2, tokens, seed)
        assert torch.equal(run(model, loaded, new), run(model, cache, new))


def test_ragged_rows_and_a_recording_cache(tmp_path: Path) -> None:
    model, cache = llama()()
    batch = left_padded([prompts(1, n, n)[0] for n in (70, 9, 40)])
    cache.activate_past_recording()
    run(model, cache, batch["input_ids"], attention_mask=batch["attention_mask"])
    cache.save_pretrained(tmp_path)
    loaded = TurboCache.from_pretrained(tmp_path, model)
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, 3), value=1)
    new = prompts(3, 3, 8)
    assert torch.equal(*(run(model, each, new, attention_mask=mask) for each in (loaded, cache)))
    for each in (loaded, cache):
        each.crop(-2)
    assert torch.equal(*(run(model, each, new[:, 1:], attention_mask=mask) for each in (loaded, cache)))


def test_heads_that_were_ranked_by_tokens_that_are_gone(tmp_path: Path) -> None:
    model, cache = llama(**MIXED)()
    run(model, cache, prompts(2, 40))
    cache.crop(-20)
    assert cache.turbo_layers()[0].ranked == [False, False]
    cache.save_pretrained(tmp_path, input_ids=prompts(2, 40)[:, :20])
    loaded = TurboCache.from_pretrained(tmp_path, model)
    assert torch.equal(*(run(model, each, prompts(2, 50, 1)) for each in (loaded, cache)))


def test_windows_that_record(tmp_path: Path) -> None:
    model, cache = windows()
    run(model, cache, prompts(1, 50))
    cache.activate_past_recording()
    run(model, cache, prompts(1, 7, 1))
    cache.save_pretrained(tmp_path, input_ids=prompts(1, 57))
    loaded = TurboCache.from_pretrained(tmp_path, model)
    for each in (loaded, cache):
        each.crop(-5)
    assert torch.equal(*(run(model, each, prompts(1, 3, 2)) for each in (loaded, cache)))


def test_generate_goes_on_from_a_saved_prompt(tmp_path: Path) -> None:
    model, cache = llama()()
    prompt, question = prompts(1, 90), prompts(1, 8, 1)
    run_of = {"max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        model(prompt, **{CACHE: cache})
    cache.save_pretrained(tmp_path)
    whole = torch.cat((prompt, question), 1)
    saved = TurboCache.from_pretrained(tmp_path, model)
    want = model.generate(whole, **{CACHE: copy.deepcopy(cache)}, **run_of)
    # a copy for each question
    got = model.generate(whole, **{CACHE: (first := copy.deepcopy(saved))}, **run_of)
    assert torch.equal(got, want)
    # `generate` has shown it its tokens
    first.save_pretrained(tmp_path)
    again = TurboCache.from_pretrained(tmp_path, model)
    assert torch.equal(again.known_ids(), want[:, :-1])  # type: ignore[arg-type]
    beams = copy.deepcopy(saved)
    with pytest.raises(ValueError, match=r"holds 1 rows, and input_ids has 2. .*batch_repeat_interleave"):
        model.generate(whole, **{CACHE: beams}, num_beams=2, **run_of)
    beams.batch_repeat_interleave(2)
    model.generate(whole, **{CACHE: beams}, num_beams=2, **run_of)
    other = whole.clone()
    other[0, 5] = other[0, 5] % 99 + 1
    with pytest.raises(ValueError, match=r"does not begin with the prompt of this saved cache: row 0 .* in column 5"):
        model.generate(other, **{CACHE: copy.deepcopy(saved)}, **run_of)
    with pytest.raises(ValueError, match=r"holds 90 columns, and input_ids has 90: pass .* one token more"):
        model.generate(prompt, **{CACHE: copy.deepcopy(saved)}, **run_of)


def test_what_is_not_saved(tmp_path: Path) -> None:
    model, cache = llama()()
    with pytest.raises(ValueError, match="holds no tokens"):
        cache.save_pretrained(tmp_path)
    run(model, cache, prompts(1, 40))
    run(model, cache, prompts(1, 40))
    with pytest.raises(ValueError, match=r"does not know all of its 80 tokens: pass them"):
        cache.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"input_ids must be .* int64 \[1, 80\]"):
        cache.save_pretrained(tmp_path, input_ids=prompts(1, 40))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        cache.save_pretrained(tmp_path / "file", input_ids=prompts(1, 80))
    plain = tiny_llama()
    alone = TurboCache(plain.config)
    run(plain, alone, prompts(1, 40))
    with pytest.raises(ValueError, match=r"does not know its model: pass it"):
        alone.save_pretrained(tmp_path)
    cache.layers[0].selector = object()
    cache.all_layers[0].ranked = [object()]
    with pytest.raises(Unsupported, match="no file can hold"):
        cache.save_pretrained(tmp_path / "new", input_ids=prompts(1, 80))
    # nothing half written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def saved_in(folder: Path) -> Any:
    model, cache = llama()()
    run(model, cache, prompts(1, 70))
    cache.save_pretrained(folder)
    return model


def other_weights(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight[3, 3] += 1


def other_config(model: Any) -> None:
    model.config.rms_norm_eps = 1e-3


@in_one_test(
    ("change", "options", "said"),
    [
        (other_weights, {}, "model.weights is"),
        (other_config, {}, "model.config.rms_norm_eps is"),
        (None, {"bits": 8}, "layers.0.config.bits is 4, and here it is 8"),
        (None, {"layer_bits": (4, 8)}, "layers.1.config.bits is 4, and here it is 8"),
        (None, {"dense_layers": (0,)}, r"config.dense_layers is \[\], and here it is \[0\]"),
    ],
)
def test_what_differs_is_named(change: Any, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    saved_in(tmp_path)
    model, _ = llama(**options)()
    if change is not None:
        change(model)
    with pytest.raises(ValueError, match=rf"does not fit: its {said}"):
        TurboCache.from_pretrained(tmp_path, model)
    with pytest.raises(ValueError, match="is not patched"):
        TurboCache.from_pretrained(tmp_path, tiny_llama())


def test_another_version_and_another_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved_in(tmp_path)
    # the same pages, said in another way
    for said in ({"value_bits": 4}, {"layer_bits": (4,)}, {"layer_bits": ((4, 4), 4)}):
        TurboCache.from_pretrained(tmp_path, llama(**said)()[0])
    cache = TurboCache.from_pretrained(tmp_path, model)
    run(model, cache, prompts(1, 1))
    cache.save_pretrained(tmp_path, input_ids=prompts(1, 71))
    # the former tensors are gone
    assert len(list(tmp_path.iterdir())) == 2
    assert TurboCache.from_pretrained(tmp_path, model).get_seq_length() == 71
    monkeypatch.setattr("turbo_hf.cache.saved_cache.__version__", "9.9")
    with pytest.raises(ValueError, match=r"its versions.turbo_hf is '.*', and here it is '9.9'"):
        TurboCache.from_pretrained(tmp_path, model)
    with pytest.raises(OSError, match="there is no saved cache"):
        TurboCache.from_pretrained(tmp_path / "none", model)


def test_bits_of_one_layer_by_depth_or_for_all(tmp_path: Path) -> None:
    def made(**options: Any) -> Made:
        model = tiny_llama(num_hidden_layers=1).requires_grad_(False)
        return model, turbo_hf.patch(model, TurboConfig(block_size=32, **options)).new_cache()

    model, cache = made(layer_bits=(8, (4, 2)))
    run(model, cache, prompts(1, 70))
    cache.save_pretrained(tmp_path)
    assert TurboCache.from_pretrained(tmp_path, made(bits=4, value_bits=2)[0]).get_seq_length() == 70
    with pytest.raises(ValueError, match="value_bits is 2, and here it is 4"):
        TurboCache.from_pretrained(tmp_path, made(bits=4)[0])


def test_tensors_that_are_replaced_before_they_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = saved_in(tmp_path), whole_files.open_file
    cache = TurboCache.from_pretrained(tmp_path, model)
    run(model, cache, prompts(1, 1))

    def late(path: Path) -> Any:
        monkeypatch.setattr("turbo_hf.cache.saved_files.open_file", before)
        cache.save_pretrained(tmp_path, input_ids=prompts(1, 71))
        return before(path)

    monkeypatch.setattr("turbo_hf.cache.saved_files.open_file", late)
    assert TurboCache.from_pretrained(tmp_path, model).get_seq_length() == 71


def test_a_write_that_breaks_off_leaves_the_former_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved_in(tmp_path)
    cache = TurboCache.from_pretrained(tmp_path, model)
    run(model, cache, prompts(1, 1))
    monkeypatch.setattr("turbo_hf.cache.saved_files._bytes", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.save_pretrained(tmp_path, input_ids=prompts(1, 71))
    assert len(list(tmp_path.iterdir())) == 2
    assert TurboCache.from_pretrained(tmp_path, model).get_seq_length() == 70


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("saved")
    model = saved_in(folder)
    return model, folder, {path.name: path.read_bytes() for path in folder.iterdir()}


@given(data=st.data())
def test_damaged_files_are_refused(whole: Any, data: st.DataObject) -> None:
    model, folder, files = whole
    name = data.draw(st.sampled_from(sorted(files)))
    content = bytearray(files[name])
    # most flips hit the beginning, where the names and shapes are
    at = data.draw(st.one_of(st.integers(0, min(900, len(content) - 1)), st.integers(0, len(content) - 2)))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    (folder / name).write_bytes(content)
    try:
        with pytest.raises(ValueError, match=r"the cache saved in .* (is damaged|has schema)"):
            TurboCache.from_pretrained(folder, model)
    finally:
        (folder / name).write_bytes(files[name])


@in_one_test("part", ["state", "shape", "table", "open"])
def test_shapes_that_contradict_each_other(part: str, tmp_path: Path) -> None:
    model = saved_in(tmp_path)
    facts = json.loads((tmp_path / FACTS).read_bytes())
    held: dict[str, Any] = dict(facts["held"][0]["map"])
    paths: dict[str, list[Any]] = {"state": ["map", 1, 1], "shape": [1], "table": ["tensor"], "open": [0, "tensor"]}
    keys = paths[part]
    place = held[part]
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = {"state": [9], "shape": 32, "table": "layers.0.order", "open": "layers.0.open.2"}[part]
    old = tmp_path / f"turbo_cache.{facts['sha256'][:16]}.safetensors"
    facts["sha256"] = facts_hash(facts, "sha256")
    old.rename(tmp_path / f"turbo_cache.{facts['sha256'][:16]}.safetensors")
    (tmp_path / FACTS).write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"the cache saved in .* is damaged"):
        TurboCache.from_pretrained(tmp_path, model)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"low_bits": 2, "low_heads": 0.5}, {"bits": 16, "attention": "fp16"}])
def test_on_a_gpu_under_captured_steps(options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_llama(head_dim=64, hidden_size=256).to("cuda", torch.bfloat16).requires_grad_(False)
    run_of: dict[str, Any] = {"max_new_tokens": 150, "do_sample": False}
    ids = prompts(2, 300).cuda()
    with turbo_hf.patch(model, TurboConfig(bits=4) if not options else TurboConfig(**options)) as handle:
        cache = handle.new_cache()
        reply = model.generate(ids, **{CACHE: cache}, **run_of)
        # pages are reserved, and blocks wait for the next step
        cache.save_pretrained(tmp_path)
        loaded = TurboCache.from_pretrained(tmp_path, model)
        assert all(layer.pool.paged[0].k.is_cuda for layer in loaded.turbo_layers())
        # the reply may hold the pad token
        run_of["attention_mask"] = torch.ones_like(reply)
        want, got = (model.generate(reply, **{CACHE: each}, **run_of) for each in (cache, loaded))
        assert torch.equal(got, want)


class _Saves(BaseStreamer):
    """Saves the cache of a `generate` call between two of its steps."""

    def __init__(self, cache: TurboCache, folder: Path):
        self.cache, self.folder, self.calls = cache, folder, 0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 30:
            self.cache.save_pretrained(self.folder)

    def end(self) -> None:
        pass


def test_saving_between_replayed_steps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runners = watch_runners(monkeypatch)
    model, cache = llama()()
    ids, run_of = prompts(1, 60), {"do_sample": False}
    want = model.generate(ids, max_new_tokens=60, **run_of)
    got = model.generate(ids, max_new_tokens=60, **{CACHE: cache}, streamer=_Saves(cache, tmp_path), **run_of)
    assert runners[-1].captures
    assert torch.equal(got, want)
    loaded = TurboCache.from_pretrained(tmp_path, model)
    held = loaded.get_seq_length()
    assert 60 < held < 100
    begun = {"input_ids": want[:, : held + 1], "attention_mask": torch.ones_like(want[:, : held + 1])}
    assert torch.equal(model.generate(**begun, max_new_tokens=119 - held, **{CACHE: loaded}, **run_of), want)


def test_tokens_that_were_not_compared_are_not_known(tmp_path: Path) -> None:
    model, cache = llama()()
    one, other = prompts(1, 40), prompts(1, 60, 1)
    run_of: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, CACHE: cache}
    model.generate(one, **run_of)
    held = cache.known_ids()
    assert held is not None
    # goes on with what the cache holds
    reply = model.generate(torch.cat((held, other[:, :5]), 1), **run_of)
    assert torch.equal(cache.known_ids(), reply[:, :-1])  # type: ignore[arg-type]
    # a beginning that the cache does not hold
    model.generate(other, **run_of)
    with pytest.raises(ValueError, match="does not know all of its"):
        cache.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="input_ids must be a tensor, int64"):
        cache.save_pretrained(tmp_path, input_ids=[[1, 2]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another model than this one has run"):
        cache.save_pretrained(tmp_path, model=tiny_llama(), input_ids=torch.zeros(1, cache.get_seq_length()).long())


def test_a_loaded_cache_that_went_on_is_compared_as_far_as_it_is_known(tmp_path: Path) -> None:
    model, cache = llama()()
    ids = prompts(1, 50)
    with torch.no_grad():
        model(ids[:, :40], **{CACHE: cache})
    kept = tmp_path / "turbo_cache.mine.safetensors"
    kept.write_bytes(b"")
    cache.save_pretrained(tmp_path)
    loaded = TurboCache.from_pretrained(tmp_path, model)
    # it knows its model
    loaded.save_pretrained(tmp_path)
    assert kept.exists()
    with torch.no_grad():
        model(ids[:, 40:47], **{CACHE: loaded})
    wrong = ids.clone()
    wrong[0, 3] += 1
    with pytest.raises(ValueError, match="in column 3, the saved prompt"):
        model.generate(wrong, **{CACHE: copy.deepcopy(loaded)}, max_new_tokens=2)
    model.generate(ids, **{CACHE: loaded}, max_new_tokens=2)
