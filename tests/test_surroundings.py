"""What is around a patched model: autocast, another default device, options for the ops, own loops, and threads that
generate while a patch is put on or taken off."""

import copy
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from calibration_support import SMALL as SETTINGS
from calibration_support import TEXTS
from choices import flat_config
from graphs_support import an_index
from models import lab_model, prompts, tiny_llama
from patching_support import EXACT, SMALL, changes, generate, snapshot, tiny
from tiny_families import build
from torch import Tensor

import turbo_hf
from turbo_hf import SparseConfig, TurboCache, TurboConfig
from turbo_hf.attention.turbo_attention import NAME
from turbo_hf.cache.memory import Memory
from turbo_hf.cache.storage import DECODE_TOKENS
from turbo_hf.calibration.run import calibrate
from turbo_hf.layout import Rounding, Scoring
from turbo_hf.models.versions import CACHE
from turbo_hf.ops.layer_ops import LayerOps
from turbo_hf.patching import other_threads

PLAIN = flat_config(bits=16, block_size=32, attention="native")


@pytest.fixture
def meta_by_default() -> Iterator[None]:
    """Tensors that name no device have no data, so that one of them anywhere shows."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def logits(model: Any, ids: torch.Tensor, held: Any) -> torch.Tensor:
    """Of a prompt and of eight tokens after it."""
    with torch.no_grad():
        parts = [ids[:, :-8], *ids[:, -8:].split(1, 1)]
        return torch.cat([model(part, **{CACHE: held}).logits for part in parts], 1).float()


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_autocast(family: str, narrow: torch.dtype) -> None:
    model: Any = tiny_llama(attn_implementation="sdpa") if family == "llama" else build(family)
    ids = prompts(2, 80) % 90
    exact = logits(model, ids, transformers.DynamicCache())
    with torch.autocast("cpu", dtype=narrow):
        plain = logits(model, ids, transformers.DynamicCache())
        with turbo_hf.patch(model, PLAIN) as handle:
            held = handle.new_cache()
            ours = logits(model, ids, held)
            model.generate(ids, max_new_tokens=4, do_sample=False)
    assert all(layer.dtype == narrow for layer in held.turbo_layers())
    # both round to the narrow type, at other places
    assert float((ours - plain).norm()) < 2 * float((plain - exact).norm())


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_products_of_codes(narrow: torch.dtype) -> None:
    """Queries like the keys: their codes' products are far above the largest float16."""
    model = tiny_llama(num_hidden_layers=1, hidden_size=256, head_dim=64)
    layer = model.model.layers[0].self_attn
    times = len(layer.q_proj.weight) // len(layer.k_proj.weight)
    layer.q_proj.weight.data.copy_(layer.k_proj.weight.repeat(times, 1))
    ids = torch.tensor([[7, 7, 9] * 20])
    with turbo_hf.patch(model, flat_config(bits=8, block_size=32, backend="reference")) as handle:
        exact = logits(model, ids, handle.new_cache())
        with torch.autocast("cpu", dtype=narrow):
            ours = logits(model, ids, handle.new_cache())
    assert float((ours - exact).norm()) < 0.02 * float(exact.norm())


def test_patching_with_another_default_device(meta_by_default: None) -> None:
    # what is looked at in a model with a bias on its keys, and what is probed of its rotary embedding
    sparse = SparseConfig(selector="kmeans", probes=2)
    with torch.device("cpu"):
        model = tiny("qwen2")
        index = an_index(model)
    with turbo_hf.patch(model, TurboConfig(sparse=sparse), calibration=index) as handle:
        assert handle.report().layers[0].storage == "2 x 4 bit"


def test_calibrating_with_another_default_device(request: pytest.FixtureRequest) -> None:

    model, tokenizer = lab_model()
    want = calibrate(model, tokenizer, TEXTS, settings=SETTINGS)
    request.getfixturevalue("meta_by_default")
    got = calibrate(model, tokenizer, TEXTS, settings=SETTINGS)
    assert got.digest() == want.digest()


def test_attentions_that_are_not_there_are_told() -> None:
    model = tiny_llama()
    with turbo_hf.patch(model, PLAIN) as handle, pytest.warns(UserWarning, match="output_attentions=True: "):
        model(prompts(1, 20), **{CACHE: handle.new_cache()}, output_attentions=True)


def test_low_heads_of_less_than_one_head_are_told() -> None:
    config = flat_config(bits=4, low_bits=2, low_heads=0.25)
    with pytest.warns(UserWarning, match=r"low_heads=0.25 is less than one KV head of each layer: all keep 4 bit"):
        handle = turbo_hf.patch(tiny_llama(), config)
    assert "2-bit heads" not in str(handle.report())
    handle.remove()
    # layers that are kept at 8 bit need none
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*less than one KV head")
        turbo_hf.patch(tiny_llama(), replace(config, int8_layers=(0, 1))).remove()


CHOSEN: dict[str, Any] = {"sas": True, "sas_threshold": -5.0}
THRESHOLD: dict[str, Any] = {"sas_threshold": -5.0}
PROMPT, CHUNK = 40, DECODE_TOKENS + 1


@pytest.mark.parametrize(
    ("mode", "tokens", "op", "said"),
    [
        pytest.param("int8", [PROMPT], "prefill", {**THRESHOLD, "mode": "int8"}, id="prompt"),
        pytest.param("int8", [PROMPT, CHUNK], "prefill", {**THRESHOLD, "mode": "int8"}, id="chunk"),
        pytest.param("int8", [PROMPT, 1], "decode", {**THRESHOLD, "mode": "turbo"}, id="step"),
        # short prompts are not rounded
        pytest.param("auto", [PROMPT], "prefill", {**THRESHOLD, "mode": "native"}, id="exact"),
    ],
)
@torch.no_grad()
def test_options_reach_the_ops(
    mode: Any, tokens: list[int], op: str, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def spied(name: str) -> Any:
        real = getattr(LayerOps, name)

        def spy(ops: LayerOps, *args: Any, **options: Any) -> Any:
            tuples = [x._asdict() for x in (*args, *options.values()) if isinstance(x, (Scoring, Rounding))]
            asked.append(
                (name, {"mode": ops.mode, **options, **dict(item for each in tuples for item in each.items())})
            )
            return real(ops, *args, **options)

        return spy

    for name in ("prefill", "decode"):
        monkeypatch.setattr(LayerOps, name, spied(name))
    model = tiny_llama(num_hidden_layers=1)
    with turbo_hf.patch(model, flat_config(attention=mode, block_size=32, **CHOSEN)) as handle:
        cache = handle.new_cache()
        for count in tokens:
            asked.clear()
            model(prompts(1, count), **{CACHE: cache})
    assert [name for name, _ in asked] == [op]
    assert {name: asked[0][1][name] for name in said} == said


@contextmanager
def said(here: bool = False) -> Iterator[list[str]]:
    """The warnings of a block, each time one is issued. here: they are issued at lines of this file."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
        texts += [str(warning.message) for warning in caught]
    assert not here or {warning.filename for warning in caught} <= {__file__}


@torch.no_grad()
def loop(model: Any, ids: torch.Tensor, **first: Any) -> tuple[list[int], Any]:
    """Ten greedy tokens of an own loop, and the cache that it ends with."""
    out, tokens = model(ids, **first), []
    for _ in range(10):
        tokens.append(int(out.logits[0, -1].argmax()))
        out = model(torch.tensor([[tokens[-1]]]), **{CACHE: out[CACHE]})
    return tokens, out[CACHE]


def test_use_cache_gives_a_compressed_cache() -> None:
    model, ids = tiny_llama(), prompts(1, 70)
    with turbo_hf.patch(model, SMALL) as handle, said() as texts:
        want = model.generate(ids, max_new_tokens=10, do_sample=False)[0, 70:].tolist()
        for call in ({"use_cache": True}, {"use_cache": True, CACHE: None}):
            tokens, cache = loop(model, ids, **call)
            assert isinstance(cache, TurboCache)
            assert tokens == want
            assert handle.memory() == cache.memory()
            assert handle.memory().tokens == 80
    assert not texts
    assert isinstance(loop(model, ids, use_cache=True)[1], transformers.DynamicCache)


def test_arguments_by_position() -> None:
    model, ids = tiny_llama(), prompts(2, 40)
    mask = torch.ones_like(ids)
    with turbo_hf.patch(model, SMALL) as handle, torch.no_grad():
        cache = handle.new_cache()
        want = model(ids, mask, None, cache).logits
        assert cache.get_seq_length() == 40
        for call in ((ids, mask, None, None, None, None, True), (ids, mask, None, None)):
            out = model(*call, **({} if len(call) > 4 else {"use_cache": True}))
            assert isinstance(out[CACHE], TurboCache)
            assert torch.equal(out.logits, want)
        assert isinstance(model(ids, use_cache=True, return_dict=False)[1], TurboCache)


def test_a_plain_call_is_the_models_own() -> None:
    """As lm-eval makes them: no cache is named, and `config.use_cache` is True by default."""
    model, ids = tiny_llama(attn_implementation="sdpa"), prompts(2, 70)
    with torch.no_grad():
        stock = model(ids).logits
    with turbo_hf.patch(model, "turbo2") as handle, torch.no_grad(), said() as texts:
        for call in ({}, {"use_cache": None}, {"use_cache": False}):
            out = model(ids, **call)
            assert torch.equal(out.logits, stock)
            assert not isinstance(getattr(out, CACHE), TurboCache)
        assert handle.memory() == Memory((), 0, 0)
    assert not texts


@pytest.mark.parametrize("tuples", [False, True])
def test_a_loop_over_each_other_cache_is_told_once(tuples: bool) -> None:
    model, ids = tiny_llama(attn_implementation="sdpa"), prompts(1, 70)
    with turbo_hf.patch(model, SMALL), torch.no_grad(), said(here=True) as texts:
        first = model(ids, return_dict=not tuples)
        cache = first[1]
        assert isinstance(cache, transformers.Cache)
        for _ in range(3):
            model(ids[:, :1], **{CACHE: cache})
        given = transformers.DynamicCache(config=model.config)
        for _ in range(2):
            model(ids, **{CACHE: given}, use_cache=True)
    assert len(texts) == 2
    assert f"a DynamicCache was passed as {CACHE}, so this call is not compressed." in texts[0]
    assert f"or pass {CACHE}=handle.new_cache()" in texts[0]


def test_a_loop_over_the_model_inside_is_told_once() -> None:
    model, ids = tiny_llama(), prompts(1, 40)
    with turbo_hf.patch(model, SMALL) as handle, torch.no_grad(), said() as texts:
        for outer in (model.model, model):
            out = model.model(ids, use_cache=True)
            assert isinstance(out[CACHE], transformers.DynamicCache)
            for _ in range(3):
                out = outer(ids[:, :1], **{CACHE: out[CACHE]})
        compressed = model.model(ids, **{CACHE: handle.new_cache()})
        model.model(ids[:, :1], **{CACHE: compressed[CACHE]})
    assert len(texts) == 2
    assert all("so this call is not compressed" in text for text in texts)


def test_a_model_without_a_head() -> None:
    ids, body = prompts(1, 70), transformers.LlamaModel(tiny_llama().config).eval()
    before, stock = snapshot(body), body(ids).last_hidden_state
    with pytest.warns(UserWarning, match=r"LlamaModel has no generate: pass handle.new_cache\(\)"):
        handle = turbo_hf.patch(body, EXACT)
    with handle, torch.no_grad():
        assert isinstance(body(ids, use_cache=True)[CACHE], TurboCache)
        torch.testing.assert_close(body(ids, **{CACHE: handle.new_cache()}).last_hidden_state, stock)
    assert not changes(before, snapshot(body))


# --- attn_implementation="turbo_hf" without a patch -------------------------------------------------------------------

UNPATCHED = 'attn_implementation="turbo_hf" has been set on a model without a patch: nothing is compressed'


def unpatched(model: Any) -> list[str]:
    """What two calls of `generate` say."""
    with said(here=True) as texts:
        for _ in range(2):
            model.generate(prompts(2, 40), max_new_tokens=3, do_sample=False)
    return [text for text in texts if UNPATCHED in text]


def test_attention_without_a_patch_is_told_once() -> None:
    model = tiny_llama(attn_implementation="sdpa")
    with torch.no_grad():
        stock = model(prompts(2, 40)).logits
    turbo_hf.patch(model, SMALL).remove()
    model.set_attn_implementation(NAME)
    assert len(unpatched(model)) == 1
    with torch.no_grad():
        torch.testing.assert_close(model(prompts(2, 40)).logits, stock)
    another: Any = transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**vars(tiny_llama().config)), attn_implementation=NAME
    )
    assert len(unpatched(another.eval())) == 1
    model.set_attn_implementation("sdpa")
    with turbo_hf.patch(model, SMALL):
        assert not unpatched(model)


def test_layers_that_a_patched_model_leaves_alone_say_nothing() -> None:
    options = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 16}
    model = tiny("llama4_text", **options, num_local_experts=2, intermediate_size_mlp=96, num_experts_per_tok=1)
    with turbo_hf.patch(model, SMALL):
        assert not unpatched(model)
        assert not unpatched(copy.deepcopy(model))


LATE = 60.0
"""Seconds after which a test gives up: never reached, however slow the machine."""


class Held(transformers.LogitsProcessor):
    """Holds a generation up after its first token."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.begun.set()
        assert self.go_on.wait(LATE)
        return scores


@contextmanager
def generating(model: Any) -> Iterator[tuple[Held, Future[Tensor]]]:
    """A thread that has begun to generate, and what it gives in the end."""
    held = Held()
    with ThreadPoolExecutor(1, thread_name_prefix="of the test") as pool:
        found = pool.submit(generate, model, logits_processor=transformers.LogitsProcessorList([held]))
        try:
            assert held.begun.wait(LATE)
            yield held, found
        finally:
            held.go_on.set()


def test_a_change_is_refused_while_another_thread_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    stock, before = generate(model), snapshot(model)
    monkeypatch.setattr(other_threads, "PATIENCE", 0.0)
    with generating(model) as (_, found):
        with pytest.raises(ValueError, match=r"thread 'of the test_0' runs this model, and patch\(\) would change it"):
            turbo_hf.patch(model)
        assert not changes(before, snapshot(model))
    assert torch.equal(found.result(), stock)
    handle = turbo_hf.patch(model, "turbo2")
    ours, patched = generate(model), snapshot(model)
    with generating(model) as (_, found):
        with pytest.raises(ValueError, match=r"remove\(\) would change it in the middle of a pass\. Wait until that"):
            handle.remove()
        assert not changes(patched, snapshot(model))
    assert torch.equal(found.result(), ours)
    assert not torch.equal(ours, stock)
    handle.remove()
    assert torch.equal(generate(model), stock)


def test_a_removal_waits_for_a_generation_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_threads, "PATIENCE", LATE)
    model = tiny_llama()
    stock = generate(model)
    handle = turbo_hf.patch(model, "turbo2")
    ours = generate(model)
    with generating(model) as (held, found):
        threading.Timer(0.05, held.go_on.set).start()
        handle.remove()
        assert held.go_on.is_set()
    assert torch.equal(found.result(), ours)
    assert torch.equal(generate(model), stock)


def test_a_model_is_patched_between_two_calls_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_threads, "PATIENCE", LATE)
    model, done = tiny_llama(), threading.Event()
    want = [generate(model)]
    with turbo_hf.patch(model, "turbo2"):
        want.append(generate(model))

    def run() -> None:
        while not done.is_set():
            got = generate(model)
            assert any(torch.equal(got, each) for each in want)

    kept = sys.getswitchinterval()
    with ThreadPoolExecutor(2) as pool:
        ran = [pool.submit(run) for _ in range(2)]
        sys.setswitchinterval(1e-5)
        try:
            for _ in range(60):
                turbo_hf.patch(model, "turbo2").remove()
        finally:
            sys.setswitchinterval(kept)
            done.set()
        for each in ran:
            each.result()
