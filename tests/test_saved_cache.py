"""Caches on disk: what was saved goes on bit by bit; what differs or is damaged is refused, whole."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from choices import flat_config
from families_support import INDEXERS
from graphs_support import watch_runners
from hypothesis import given
from hypothesis import strategies as st
from models import left_padded, prompts, tiny_llama
from safetensors import SafetensorError
from saved_support import MIXED, Make, by_bucket, family, llama, windows
from transformers.generation.streamers import BaseStreamer

import turbo_hf
from turbo_hf import TurboCache, TurboConfig, Unsupported
from turbo_hf.cache.saved_files import CACHE as KIND
from turbo_hf.models.versions import CACHE

KINDS: list[Any] = [
    pytest.param(llama(), id="turbo4"),
    pytest.param(llama(bits=8), id="int8"),
    pytest.param(llama(**MIXED), id="mixed"),
    pytest.param(llama(value_bits=2, recent_tokens=64), id="values-at-2-bit"),
    pytest.param(llama(bits=2), id="turbo2"),
    pytest.param(llama(layer_bits=(2, (8, 4))), id="depths"),
    pytest.param(llama(bits=16, attention="native"), id="16-bit"),
    pytest.param(llama(backend="triton", low_bits=2, low_heads=0.5), id="kernels"),
    pytest.param(windows, id="windows"),
    pytest.param(by_bucket, id="sparse"),
    pytest.param(family("lfm2"), id="convolution"),
    pytest.param(family("qwen3_next"), id="recurrent"),
    pytest.param(family("deepseek_v3"), id="latent"),
    *[pytest.param(family("deepseek_v32"), id="indexed")] * INDEXERS,
]


def run(model: Any, cache: Any, ids: torch.Tensor, **given: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids % 63 + 1, **{CACHE: cache}, **given).logits
    return logits


@pytest.mark.parametrize("make", KINDS)
def test_a_loaded_cache_goes_on_bit_by_bit(make: Make, tmp_path: Path) -> None:
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
        assert other.pool.pages == len(set(one.pool.table.numbers[:, : max(one.state.sealed)].flatten().tolist()))
    assert torch.equal(loaded.known_ids(), ids)  # type: ignore[arg-type]
    assert make is not by_bucket or any(cache.turbo_layers()[0].bucket_index.sorted_blocks)
    for tokens, seed in ((1, 3), (40, 4), (1, 5)):
        new = prompts(2, tokens, seed)
        assert torch.equal(run(model, loaded, new), run(model, cache, new))


def again(model: Any, cache: TurboCache, folder: Path, ids: torch.Tensor, cut: int = 0, **given: Any) -> None:
    """A saved cache goes on as the loaded one, `cut` tokens before its end."""
    cache.save_pretrained(folder, input_ids=ids)
    both = cache, TurboCache.from_pretrained(folder, model)
    for each in both:
        each.crop(-cut)
    assert torch.equal(*(run(model, each, prompts(len(ids), 50, 1), **given) for each in both))


def test_ragged_rows_cut(tmp_path: Path) -> None:
    model, cache = llama()()
    batch = left_padded([prompts(1, n, n)[0] for n in (70, 9, 40)])
    cache.activate_past_recording()
    run(model, cache, batch["input_ids"], attention_mask=batch["attention_mask"])
    with pytest.raises(ValueError, match=r"waits for a crop .*: call stop_recording\(\)"):
        cache.save_pretrained(tmp_path)
    cache.stop_recording()
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, 48), value=1)
    again(model, cache, tmp_path, batch["input_ids"], 2, attention_mask=mask)


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
    got = model.generate(whole, **{CACHE: copy.deepcopy(saved)}, **run_of)
    assert torch.equal(got, want)
    beams = copy.deepcopy(saved)
    with pytest.raises(ValueError, match=r"holds 1 rows, and input_ids has 2. .*batch_repeat_interleave"):
        model.generate(whole, **{CACHE: beams}, num_beams=2, **run_of)
    beams.batch_repeat_interleave(2)
    model.generate(whole, **{CACHE: beams}, num_beams=2, **run_of)
    other = whole.clone()
    other[0, 5] = other[0, 5] % 99 + 1
    with pytest.raises(ValueError, match=r"does not begin with the prompt of this cache: row 0 .* in column 5"):
        model.generate(other, **{CACHE: copy.deepcopy(saved)}, **run_of)
    with pytest.raises(ValueError, match=r"holds 90 columns, and the input has 90: pass .* one token more"):
        model.generate(prompt, **{CACHE: copy.deepcopy(saved)}, **run_of)


def test_what_is_not_saved(tmp_path: Path) -> None:
    model, cache = llama()()
    with pytest.raises(ValueError, match="holds no tokens"):
        cache.save_pretrained(tmp_path)
    run(model, cache, prompts(1, 40))
    run(model, cache, prompts(1, 40))
    with pytest.raises(ValueError, match=r"does not know all of its 80 tokens: pass them"):
        cache.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"input_ids.* is int64 \[1, 40\].*, and should be int64 \[1, 80\]"):
        cache.save_pretrained(tmp_path, input_ids=prompts(1, 40))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        cache.save_pretrained(tmp_path / "file", input_ids=prompts(1, 80))
    plain = tiny_llama()
    alone = TurboCache(plain.config)
    run(plain, alone, prompts(1, 40))
    with pytest.raises(ValueError, match="no patched model has run over this TurboCache"):
        alone.save_pretrained(tmp_path)
    cache.layers[0].selector = object()
    cache.all_layers[0].valid_prefix = object()
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
    model.model.layers[1].mlp.up_proj.weight *= 1.01


def other_config(model: Any) -> None:
    model.config.rms_norm_eps = 1e-3


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (other_weights, {}, "model.weights is"),
        (other_config, {}, "model.config.rms_norm_eps is"),
        (None, {"bits": 8}, "layers.0.config.bits is 4, and should be 8"),
        (None, {"layer_bits": (4, 8)}, "layers.1.config.bits is 4, and should be 8"),
        (None, {"dense_layers": (0,)}, "layers.0.config.bits is 4, and should be 16"),
        (None, {"block_size": 64}, "layers.0.config.recent_tokens is 32, and should be 64"),
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
    same: Any = {"backend": "reference"}, {"value_bits": 4}, {"recent_tokens": 32}
    for said in (*same, {"layer_bits": (4, 4)}, {"layer_bits": ((4, 4), 4)}):
        TurboCache.from_pretrained(tmp_path, llama(**said)()[0])
    cache = TurboCache.from_pretrained(tmp_path, model)
    run(model, cache, prompts(1, 1))
    cache.save_pretrained(tmp_path, input_ids=prompts(1, 71))
    assert [path.name for path in tmp_path.iterdir()] == [KIND.file]
    assert TurboCache.from_pretrained(tmp_path, model).get_seq_length() == 71
    monkeypatch.setattr("turbo_hf.cache.saved_cache.__version__", "9.9")
    with pytest.raises(ValueError, match=r"its versions.turbo_hf is '.*', and should be '9.9'"):
        TurboCache.from_pretrained(tmp_path, model)
    with pytest.raises(OSError, match="there is no saved cache"):
        TurboCache.from_pretrained(tmp_path / "none", model)


def test_a_write_that_breaks_off_leaves_the_former_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved_in(tmp_path)
    cache = TurboCache.from_pretrained(tmp_path, model)
    run(model, cache, prompts(1, 1))

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("turbo_hf.cache.saved_files.save_file", full)
    with pytest.raises(OSError, match=f"cannot be written: No space left on device: .*{KIND.file}"):
        cache.save_pretrained(tmp_path, input_ids=prompts(1, 71))
    assert [path.name for path in tmp_path.iterdir()] == [KIND.file]
    assert TurboCache.from_pretrained(tmp_path, model).get_seq_length() == 70


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, bytes]:
    path = tmp_path_factory.mktemp("saved") / KIND.file
    return saved_in(path.parent), path, path.read_bytes()


@given(data=st.data())
def test_a_damaged_file_is_refused(whole: Any, data: st.DataObject) -> None:
    model, path, right = whole
    content = bytearray(right)
    # most flips hit the beginning, where the names and shapes are
    at = data.draw(st.one_of(st.integers(0, 9000), st.integers(0, len(content) - 1)))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"the cache saved in .* (is damaged|has schema|does not fit)"):
        TurboCache.from_pretrained(path.parent, model)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"low_bits": 2, "low_heads": 0.5}, {"bits": 16, "attention": "native"}])
def test_on_a_gpu_under_captured_steps(options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_llama(head_dim=64, hidden_size=256).to("cuda", torch.bfloat16).requires_grad_(False)
    run_of: dict[str, Any] = {"max_new_tokens": 150, "do_sample": False}
    ids = prompts(2, 300).cuda()
    with turbo_hf.patch(model, TurboConfig(bits=4) if not options else flat_config(**options)) as handle:
        cache = handle.new_cache()
        reply = model.generate(ids, **{CACHE: cache}, **run_of)
        # pages are reserved, and blocks wait for the next step
        cache.save_pretrained(tmp_path, input_ids=reply[:, :-1])
        loaded = TurboCache.from_pretrained(tmp_path, model)
        assert all(layer.pool.paged[0].k.is_cuda for layer in loaded.turbo_layers())
        # the reply may hold the pad token
        run_of["attention_mask"] = torch.ones_like(reply)
        want, got = (model.generate(reply, **{CACHE: each}, **run_of) for each in (cache, loaded))
        assert torch.equal(got, want)


class _Saves(BaseStreamer):
    """Saves the cache of a `generate` call between two of its steps."""

    def __init__(self, cache: TurboCache, folder: Path):
        self.cache, self.folder, self.ids = cache, folder, torch.zeros(1, 0, dtype=torch.int64)

    def put(self, value: torch.Tensor) -> None:
        if self.ids.shape[1] == 90:
            self.cache.save_pretrained(self.folder, input_ids=self.ids[:, : self.cache.get_seq_length()])
        self.ids = torch.cat((self.ids, value.view(1, -1)), 1)

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


def test_tokens_of_a_refused_pass_are_not_known(tmp_path: Path) -> None:
    model = tiny_llama()
    with turbo_hf.patch(model) as handle, torch.no_grad():
        cache, ids = handle.new_cache(), prompts(1, 20)
        with pytest.raises(ValueError, match="rows"):
            model(ids, attention_mask=torch.ones(2, 20, dtype=torch.long), **{CACHE: cache})
        model(inputs_embeds=model.get_input_embeddings()(ids.flip(1)), **{CACHE: cache})
        with pytest.raises(ValueError, match="does not know all of its 20 tokens"):
            cache.save_pretrained(tmp_path)


def test_tokens_of_later_passes_are_not_known(tmp_path: Path) -> None:
    model, cache = llama()()
    model.generate(prompts(1, 40), max_new_tokens=3, do_sample=False, **{CACHE: cache})
    with pytest.raises(ValueError, match="does not know all of its 42 tokens"):
        cache.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"input_ids.* is .*, and should be int64 \[1, 42\]"):
        cache.save_pretrained(tmp_path, input_ids=[[1, 2]])  # type: ignore[arg-type]
    cache.crop(-2)
    cache.save_pretrained(tmp_path)
    assert torch.equal(TurboCache.from_pretrained(tmp_path, model).known_ids(), prompts(1, 40))  # type: ignore[arg-type]


def test_a_loaded_cache_that_went_on_is_compared(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match="in column 3, the cache"):
        model.generate(wrong, **{CACHE: copy.deepcopy(loaded)}, max_new_tokens=2)
    model.generate(ids, **{CACHE: loaded}, max_new_tokens=2)
