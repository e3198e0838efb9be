"""What a prompt's pass leaves to be stored later: whoever asks for the layers finds it stored, and nothing is lost."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from choices import flat_config
from models import left_padded, prompts, tiny_llama, tiny_mistral

import turbo_hf
from turbo_hf import TurboCache
from turbo_hf.cache import passes
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.passes import DeferredStores
from turbo_hf.graphs.why_not import is_compiled
from turbo_hf.models.versions import CACHE
from turbo_hf.patching import generate_methods

SMALL = flat_config(block_size=32)
TOKENS = 50


@pytest.fixture
def small() -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """A model, its patch, a prompt."""
    model = tiny_llama()
    with turbo_hf.patch(model, SMALL) as handle:
        yield model, handle, prompts(2, TOKENS)


def deferring(handle: Any) -> TurboCache:
    """An empty cache whose first prompt is stored later."""
    cache: TurboCache = handle.new_cache()
    cache.deferred.wanted = True
    return cache


@torch.no_grad()
def started(model: Any, handle: Any, ids: torch.Tensor) -> TurboCache:
    """A cache whose prompt is still to be stored."""
    cache = deferring(handle)
    model(ids, **{CACHE: cache})
    assert cache.deferred
    assert all(not layer.is_initialized or layer.seen == 0 for layer in cache.all_layers)
    return cache


@torch.no_grad()
def goes_on(model: Any, ids: torch.Tensor, cache: TurboCache) -> list[torch.Tensor]:
    """Logits of a step, a chunk and a step."""
    return [model(part, **{CACHE: cache}).logits for part in (ids[:, :1], ids[:, :30], ids[:, :1])]


READERS: dict[str, Callable[[TurboCache], Any]] = {
    "nothing": lambda cache: None, "length": lambda cache: cache.get_seq_length(),
    "memory": lambda cache: cache.memory(), "copy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)), "rows": lambda cache: cache.reorder_cache([0, 1]),
    "recording": lambda cache: (cache.activate_past_recording(), cache.stop_recording()), "keys": list,
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("window", [None, 40], ids=["full", "window"])
def test_it_is_stored_before_anything_reads_it(window: int | None, reader: Callable[[TurboCache], Any]) -> None:
    model = tiny_llama() if window is None else tiny_mistral(window)
    ids = prompts(2, TOKENS)
    with turbo_hf.patch(model, SMALL) as handle:
        plain = handle.new_cache()
        with torch.no_grad():
            model(ids, **{CACHE: plain})
        cache = started(model, handle, ids)
        kept = reader(cache)
        assert not isinstance(kept, TurboCache) or kept.get_seq_length() == TOKENS
        want, got = (goes_on(model, ids, each) for each in (plain, cache))
    assert all(torch.equal(*pair) for pair in zip(want, got, strict=True))
    assert cache.get_seq_length() == plain.get_seq_length()


Small = tuple[Any, Any, torch.Tensor]


def test_it_is_cropped_and_forgotten_as_if_it_were_stored(small: Small) -> None:
    cache = started(*small)
    cache.crop(-10)
    assert cache.get_seq_length() == TOKENS - 10
    cache = started(*small)
    cache.reset()
    assert cache.get_seq_length() == 0
    started(*small)
    # that of a cache which nobody holds any more
    assert small[1].memory().tokens == 2 * TOKENS


def test_a_layer_that_is_read_within_the_pass_holds_it() -> None:
    """By the thread that runs the pass; another one finds it without."""
    model, given = tiny_llama(), left_padded([prompts(1, TOKENS)[0], prompts(1, TOKENS)[0, 7:]])
    held: list[int] = []
    with turbo_hf.patch(model, SMALL) as handle, torch.no_grad():
        cache, plain = deferring(handle), handle.new_cache()

        def look(*_: Any) -> None:
            other = threading.Thread(target=lambda: held.append(cache.get_seq_length()))
            other.start()
            other.join()
            held.extend((cache.get_seq_length(0), cache.get_seq_length(1)))

        hook = model.model.layers[1].register_forward_pre_hook(look)
        first = model(**given, **{CACHE: cache}).logits
        hook.remove()
        assert held == [0, TOKENS, 0]
        assert torch.equal(first, model(**given, **{CACHE: plain}).logits)
        for (keys, values, _), (same_keys, same_values, _) in zip(cache, plain, strict=True):
            assert torch.equal(keys, same_keys)
            assert torch.equal(values, same_values)


@torch.no_grad()
def test_storing_that_breaks_off_breaks_the_cache(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = started(*small)
    with monkeypatch.context() as broken:
        broken.setattr(TurboLayer, "commit", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.get_seq_length()
    model, _, ids = small
    with pytest.raises(ValueError, match=r"store\(\) over this TurboCache broke off"):
        model(ids, **{CACHE: cache})
    cache.reset()
    model(ids, **{CACHE: cache})
    assert cache.get_seq_length() == TOKENS


@torch.no_grad()
def test_nan_and_a_layer_that_is_called_twice_are_refused(small: Small) -> None:
    model, handle, ids = small
    own = model.model.embed_tokens.weight[ids[0, 3]].clone()
    model.model.embed_tokens.weight[ids[0, 3]] = torch.nan
    with pytest.raises(ValueError, match="NaN or Inf"):
        model(ids, **{CACHE: deferring(handle)})
    model.model.embed_tokens.weight[ids[0, 3]] = own
    model.model.layers[1].self_attn.register_forward_hook(
        lambda module, args, kwargs, out: module.forward(*args, **kwargs), with_kwargs=True
    )
    with pytest.raises(ValueError, match="broke off"):
        model(ids, **{CACHE: deferring(handle)})


@pytest.mark.parametrize("call", ["pass", "generate", "recording"])
def test_the_cache_is_refused_within_its_own_pass(call: str, small: Small) -> None:
    model, handle, ids = small
    cache = deferring(handle)
    calls = {
        "pass": lambda: model.model(ids[:, :3], **{CACHE: cache}),
        "generate": lambda: model.generate(ids[:, :3], **{CACHE: cache}, max_new_tokens=2),
        "recording": cache.activate_past_recording,
    }

    def nested(*_: Any) -> None:
        with pytest.raises(ValueError, match="TurboCache"):
            calls[call]()

    hook = model.lm_head.register_forward_pre_hook(nested)
    with torch.no_grad():
        model(ids, **{CACHE: cache})
    hook.remove()
    assert cache.get_seq_length() == TOKENS


@torch.no_grad()
def test_one_prompt_alone_is_deferred_and_not_much(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    model, handle, ids = small
    cache = started(*small)
    for _ in range(2):
        model(ids, **{CACHE: cache})
        assert not cache.deferred
        cache.reset()
    monkeypatch.setattr(passes, "MOST_BYTES", 1000)
    cache = deferring(handle)
    model(ids, **{CACHE: cache})
    assert not cache.deferred
    assert cache.all_layers[1].seen == TOKENS


def test_generate_defers_the_prompts_of_its_own_caches(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_llama().to(device), prompts(2, TOKENS).to(device)
    taken: list[bool] = []
    take = DeferredStores.take

    def watched(*args: Any) -> bool:
        taken.append(take(*args))
        return taken[-1]

    monkeypatch.setattr(DeferredStores, "take", watched)
    if device.type == "cpu":
        monkeypatch.setattr(generate_methods, "_may_defer", lambda model: True)
    with turbo_hf.patch(model, SMALL) as handle:
        many = model.generate(ids, max_new_tokens=20, do_sample=False)
        assert taken == [True, True]
        assert handle.memory().tokens == 2 * (TOKENS + 19)
        one = model.generate(ids, max_new_tokens=1, do_sample=False)
        assert taken == [True] * 4
        assert handle.memory().tokens == 2 * TOKENS
        given = model.generate(ids, **{CACHE: handle.new_cache()}, max_new_tokens=20, do_sample=False)
        assert taken[4:] == [False, False]
    assert torch.equal(many, given)
    assert torch.equal(many[:, : TOKENS + 1], one)


def test_compiled_models_defer_nothing() -> None:
    model = tiny_llama()
    assert not generate_methods._may_defer(model)
    model.forward = torch.compile(model.forward, backend="eager")
    assert is_compiled(model)
