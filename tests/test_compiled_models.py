"""torch.compile around a patched model, and around one that is not patched and given a TurboCache."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from choices import flat_config
from models import left_padded, prompts, tiny_llama
from torch import Tensor

import turbo_hf
from turbo_hf import TurboCache
from turbo_hf.cache.pass_mark import untraced
from turbo_hf.graphs.why_not import why_no_replay_of
from turbo_hf.models.versions import CACHE

CONFIG = flat_config(bits=4, block_size=32)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """What one test has compiled is not another's."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def answer(model: Any, **options: Any) -> Tensor:
    """Greedy tokens after a padded batch, whose rows seal a block while they are decoded."""
    batch = left_padded([prompts(1, length, length)[0] for length in (60, 45)])
    return torch.as_tensor(model.generate(**batch, max_new_tokens=8, do_sample=False, **options))


def forward(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


def call(model: Any) -> None:
    model.compile(backend="eager")


def layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")


def compiled() -> int:
    """Graphs so far."""
    return int(torch._dynamo.utils.counters["frames"]["ok"])


@pytest.mark.parametrize(("compile_it", "count"), [(forward, 2), (layers, 1)])
def test_a_patched_model_may_be_compiled(compile_it: Callable[[Any], None], count: int) -> None:
    """Hooks do not use up what torch compiles anew."""
    model = tiny_llama(num_hidden_layers=count, attn_implementation="sdpa")
    # from transformers 5.24 on, torch counts the renamed arguments' wrappers, of all kinds of modules, as one function
    limit: dict[str, Any] = {} if CACHE == "past_key_values" else {"recompile_limit": 16}
    with turbo_hf.patch(model, CONFIG) as handle:
        want, before = answer(model), compiled()
        compile_it(model)
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, **limit):
            assert torch.equal(answer(model), want)
        assert handle.memory().tokens == 60 + 45 + 2 * 7
        assert compiled() > before


def test_what_must_not_be_traced_is_called_directly() -> None:
    """Torch's own guard takes longer than the call; it is there in code that torch has given up on, too."""
    guarded: list[bool] = []

    def inner(x: Tensor) -> Tensor:
        files = [frame.filename for frame in inspect.stack(0)]
        guarded.append(any("_dynamo/eval_frame" in file for file in files[: files.index(__file__, 1)]))
        assert not torch.compiler.is_compiling()
        return x + len(guarded)

    hidden = untraced(inner)

    def outer(x: Tensor) -> Tensor:
        return hidden(x * 2) * 2

    ones = torch.ones(2)
    assert torch.equal(outer(ones), ones * 6)
    before = compiled()
    assert torch.equal(torch.compile(outer, backend="eager")(ones), ones * 8)
    # the code before and after the call, and not the call
    assert compiled() == before + 2

    def nothing_to_compile(x: Tensor) -> Tensor:
        return hidden(x)

    for _ in range(2):
        torch.compile(nothing_to_compile, backend="eager")(ones)
    assert guarded == [False, True, True, True]


@pytest.mark.parametrize("compile_it", [forward, call])
def test_an_own_loop_over_a_compiled_model(compile_it: Callable[[Any], None]) -> None:
    """No step is compiled after the first."""
    model = tiny_llama(num_hidden_layers=1, attn_implementation="sdpa")
    batch, counts = left_padded([prompts(1, length, length)[0] for length in (60, 45)]), []
    with turbo_hf.patch(model, CONFIG) as handle, torch.no_grad():

        def loop(cache: TurboCache | None) -> list[Tensor]:
            mask, found = batch["attention_mask"], []
            for step in range(8):
                at = mask.cumsum(-1) - 1 if step == 0 else mask.sum(-1, keepdim=True) - 1
                ids = batch["input_ids"] if step == 0 else batch["input_ids"][:, -1:]
                given = {} if cache is None else {CACHE: cache}
                out = model(ids, attention_mask=mask, position_ids=at, **given, use_cache=True)
                assert isinstance(out[CACHE], TurboCache)
                cache = out[CACHE]
                found.append(out.logits)
                mask = torch.nn.functional.pad(mask, (0, 1), value=1)
                counts.append(int(torch._dynamo.utils.counters["stats"]["unique_graphs"]))
            return found

        want = loop(None)
        counts.clear()
        compile_it(model)
        # one that the model makes, last
        for cache in (handle.new_cache(), handle.new_cache(), None):
            for one, other in zip(loop(cache), want, strict=True):
                torch.testing.assert_close(one, other)
    # a prompt, a step; and nothing for another cache
    assert counts[0] < counts[1]
    assert counts[1] == counts[15]


@pytest.mark.gpu
@pytest.mark.parametrize("compile_it", ["forward", "call"])
def test_on_a_gpu_by_inductor(compile_it: str) -> None:
    model = tiny_llama(attn_implementation="sdpa").cuda()
    batch = {name: x.cuda() for name, x in left_padded([prompts(1, 60)[0], prompts(1, 45, 1)[0]]).items()}
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    with turbo_hf.patch(model, replace(CONFIG, cuda_graphs=False)):
        want = model.generate(**batch, **options)
        if compile_it == "call":
            model.compile()
        else:
            model.forward = torch.compile(model.forward)
        first = model.generate(**batch, **options)
        before = compiled()
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(model.generate(**batch, **options), first)
        assert compiled() == before
    # sums are in another order, and a tie may fall otherwise
    assert (first == want).float().mean() > 0.9


def test_a_cache_of_an_unpatched_model_that_is_compiled() -> None:
    model = tiny_llama(num_hidden_layers=1, attn_implementation="sdpa")
    want, before = answer(model, **{CACHE: TurboCache(model.config, CONFIG)}), compiled()
    layers(model)
    cache = TurboCache(model.config, CONFIG)
    assert torch.equal(answer(model, **{CACHE: cache}), want)
    assert cache.get_seq_length() == 67
    assert compiled() > before


@pytest.mark.parametrize("compile_it", [forward, call, layers])
def test_steps_of_a_compiled_model_are_not_replayed(
    compile_it: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turbo_hf.graphs.why_not._why_no_replay_there", lambda *args: None)
    model = tiny_llama(num_hidden_layers=1)
    with turbo_hf.patch(model, CONFIG):
        assert why_no_replay_of(model) is None
        compile_it(model)
        assert why_no_replay_of(model) == "torch.compile has compiled it"
