"""Captures that outlive their `generate` call serve the next one, or are made anew where they must be."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from choices import flat_config
from graphs_support import NEW, PLAIN, SMALL, Again, answer, ragged, watch_runners
from models import prompts, tiny_llama, tiny_mistral
from patching_support import biased
from tiny_families import build
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import turbo_hf
from turbo_hf import TurboConfig
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.graphs import kept_steps
from turbo_hf.graphs.devices import cuda_device
from turbo_hf.graphs.kept_steps import model_now
from turbo_hf.graphs.step_runner import StepRunner
from turbo_hf.patching import generate_methods as generation


class Addresses(Again):
    """As `Again`; a replay must find every tensor of the cache where the capture found it, as a CUDA graph does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self.seen: list[Any] = []
        store_of = TurboLayer.kv_store

        def kv_store(layer: TurboLayer) -> Any:
            store = store_of(layer)
            replay = layer.replay
            if replay is not None:
                pages = [x for heads in store.paged for x in heads[1:]]
                held = [*pages, *store, replay.arrived, layer.nonfinite, layer.balance]
                held += [plan.words for plan in replay.plans.values()]
                held += [] if layer.index_keys is None else [layer.index_keys.kept]
                self.seen.append([(x.data_ptr(), x.shape, x.stride()) for x in held if isinstance(x, Tensor)])
            return store

        monkeypatch.setattr(TurboLayer, "kv_store", kv_store)

    def capture(self, step: Any) -> Any:
        known: list[Any] = []
        again = super().capture(step)

        def replay() -> Any:
            self.seen = []
            out = again()
            known[:] = known or self.seen
            assert self.seen == known, "a replay reads other memory than its capture"
            return out

        return replay


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[StepRunner]:
    """All runners; without a GPU one stand-in captures for all of them, as one GPU would."""
    runners = watch_runners(monkeypatch)
    if not torch.cuda.is_available():
        one = Addresses(monkeypatch)
        monkeypatch.setattr(generation, "cuda_device", lambda *devices: one)
    return runners


def captures(made: list[StepRunner]) -> int:
    return sum(runner.captures for runner in made)


def greedy(model: Any, **options: Any) -> Tensor:
    inputs = {name: x.to(model.device) if isinstance(x, Tensor) else x for name, x in options.items()}
    mask = torch.ones_like(inputs["input_ids"])
    return torch.as_tensor(
        model.generate(**{"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, **inputs})
    )


def captured_by(made: list[StepRunner], model: Any, asked: list[dict[str, Any]], config: TurboConfig) -> list[int]:
    """How many captures there are after each of these calls, whose tokens are those of launched steps."""
    want = [answer(model, replace(config, cuda_graphs=False), **inputs) for inputs in asked]
    counts = []
    with turbo_hf.patch(model, config):
        for inputs, tokens in zip(asked, want, strict=True):
            assert torch.equal(greedy(model, **inputs), tokens)
            counts.append(captures(made))
    return counts


def test_the_next_calls_replay_from_their_first_step(made: list[StepRunner], device: torch.device) -> None:
    model = tiny_llama().to(device)
    asked = [{"input_ids": prompts(1, length, seed=length)} for length in (60, 61, 33, 5, 70)]
    assert captured_by(made, model, asked, SMALL)[-1] == 1
    assert len(made) == 1


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(flat_config(bits=8, block_size=32), id="8bit"),
        pytest.param(flat_config(low_heads=0.5, block_size=32), id="mixed"),
        pytest.param(flat_config(value_bits=2, block_size=32, recent_tokens=32), id="recent"),
        pytest.param(flat_config(layer_bits=(2, (8, 4)), block_size=32, recent_tokens=32), id="depths"),
        pytest.param(flat_config(bits=16, block_size=32), id="16bit"),
    ],
)
@pytest.mark.parametrize("window", [None, 40])
def test_tokens_of_ragged_batches(
    config: TurboConfig, window: int | None, made: list[StepRunner], device: torch.device
) -> None:
    model: Any = (tiny_llama() if window is None else tiny_mistral(window)).to(device)
    asked = [ragged([length, 33, 9]) for length in (90, 50, 90, 120)]
    counts = captured_by(made, model, asked, config)
    assert counts[1] == counts[0], "fewer pages fit"


def test_latents_are_captured_in_each_call(made: list[StepRunner], device: torch.device) -> None:
    model: Any = build("deepseek_v3")
    model.to(device)
    asked = [{"input_ids": prompts(2, length, seed=length) % 40} for length in (60, 40)]
    captured_by(made, model, asked, SMALL)
    assert len(made) == 2


def test_states_of_fixed_size(made: list[StepRunner], device: torch.device) -> None:
    model: Any = build("qwen3_5_text")
    model.to(device)
    asked = [{"input_ids": prompts(2, length, seed=length) % 40 + 10} for length in (60, 40, 50)]
    want = [answer(model, PLAIN, **inputs) for inputs in asked]
    with turbo_hf.patch(model, SMALL):
        held = model.generate(asked[0]["input_ids"].to(device), max_new_tokens=9, return_dict_in_generate=True)
        layers = [layer for layer in held.past_key_values.layers if not isinstance(layer, TurboLayer)]
        states = [x.clone() for layer in layers for *_, x in kept_steps._states(layer)]
        for inputs, tokens in zip(asked, want, strict=True):
            assert torch.equal(greedy(model, **inputs), tokens)
    assert all(map(torch.equal, states, [x for layer in layers for *_, x in kept_steps._states(layer)]))
    assert captures(made) == 2 or torch.cuda.is_available()


def test_balanced_keys(made: list[StepRunner], device: torch.device) -> None:
    model: Any = biased().to(device)
    asked = [{"input_ids": prompts(1, length, seed=length)} for length in (60, 40)]
    with turbo_hf.patch(model, SMALL) as handle:
        assert any(layer.balance is not None for layer in handle.new_cache().turbo_layers())
    assert captured_by(made, model, asked, SMALL) == [1, 1]


def test_what_does_not_fit_is_captured_anew(made: list[StepRunner], device: torch.device) -> None:
    model = tiny_llama().to(device)
    asked: list[dict[str, Any]] = [
        {"input_ids": prompts(1, 60)},
        {"input_ids": prompts(2, 60)},
        {"input_ids": prompts(2, 400)},
        {"input_ids": prompts(1, 60)},
    ]
    assert captured_by(made, model, asked, SMALL) == [1, 2, 3, 4]


def test_a_cache_that_its_caller_keeps_stays_as_it_is(made: list[StepRunner], device: torch.device) -> None:
    model = tiny_llama().to(device)
    first, second = prompts(1, 60), prompts(1, 50, seed=2)
    more = torch.cat([answer(model, PLAIN, input_ids=first).cpu(), prompts(1, 9, seed=3)], 1)
    want = answer(model, PLAIN, input_ids=second)
    with turbo_hf.patch(model, PLAIN):
        held = model.generate(first.to(device), max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
        follows = greedy(model, input_ids=more, past_key_values=held.past_key_values)
    with turbo_hf.patch(model, SMALL):
        kept = model.generate(first.to(device), max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
        assert torch.equal(greedy(model, input_ids=second), want)
        assert torch.equal(greedy(model, input_ids=more, past_key_values=kept.past_key_values), follows)
        # a layer of it counts as much
        layer = kept.past_key_values.layers[0]
        del kept
        before = layer.keys.clone()
        assert torch.equal(greedy(model, input_ids=second), want)
        assert torch.equal(layer.keys, before)


def test_turns_over_one_cache(made: list[StepRunner], device: torch.device) -> None:
    model, turn = tiny_llama().to(device), prompts(1, 20, seed=3).to(device)

    def talk(config: TurboConfig) -> Tensor:
        with turbo_hf.patch(model, config) as handle:
            cache, ids = handle.new_cache(), prompts(1, 60).to(device)
            for _ in range(4):
                ids = torch.cat([greedy(model, input_ids=ids, past_key_values=cache), turn], 1)
        return ids

    want = talk(PLAIN)
    assert torch.equal(talk(SMALL), want)
    assert captures(made) == 1


def test_a_call_within_another(made: list[StepRunner], device: torch.device) -> None:
    model = tiny_llama().to(device)
    first, second = prompts(1, 60), prompts(1, 50, seed=2)
    want = [answer(model, PLAIN, input_ids=ids) for ids in (first, second)]
    inner = []

    def asks(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == 70:
            inner.append(greedy(model, input_ids=second))
        return scores

    with turbo_hf.patch(model, SMALL):
        for _ in range(2):
            assert torch.equal(greedy(model, input_ids=first, logits_processor=[asks]), want[0])
            assert torch.equal(inner.pop(), want[1])


def test_a_call_that_breaks_off(made: list[StepRunner], device: torch.device) -> None:
    model = tiny_llama().to(device)
    want = answer(model, PLAIN, input_ids=prompts(1, 50))

    def breaks(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == 70:
            raise KeyboardInterrupt
        return scores

    with turbo_hf.patch(model, SMALL):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                greedy(model, input_ids=prompts(1, 60), logits_processor=[breaks])
            assert torch.equal(greedy(model, input_ids=prompts(1, 50)), want)


def _weight(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data = model.model.layers[1].mlp.up_proj.weight.data * 2


def _scaling(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def _module(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()


def _removed(model: Any) -> None:
    model.model.norm.register_parameter("weight", None)
    model.model.norm.weight = torch.nn.Parameter(torch.full((model.config.hidden_size,), 0.5, device=model.device))


def _listed(model: Any) -> None:
    model.model.layers[0].mlp.adapters.append("b")


def _turned(model: Any) -> None:
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t()


def _nested(model: Any) -> None:
    model.model.layers[0].mlp.options["a"]["b"] = 3


def _object(model: Any) -> None:
    model.model.layers[0].mlp.held.scale = 3


@pytest.mark.parametrize("change", [_weight, _scaling, _module, _removed, _listed, _turned, _nested, _object])
def test_a_changed_model_is_captured_anew(change: Any, made: list[StepRunner], device: torch.device) -> None:
    model, ids = tiny_llama().to(device), prompts(1, 60)
    mlp = model.model.layers[0].mlp
    mlp.adapters, mlp.options, mlp.held = ["a"], {"a": {"b": 2}}, SimpleNamespace(scale=2)
    with turbo_hf.patch(model, SMALL):
        greedy(model, input_ids=ids)
        greedy(model, input_ids=ids)
        assert captures(made) == 1
        change(model)
        got = greedy(model, input_ids=ids)
        assert captures(made) == 2
    assert torch.equal(got, answer(model, PLAIN, input_ids=ids))


def test_numbers_of_weights_that_change_in_place_are_read(made: list[StepRunner], device: torch.device) -> None:
    model, ids = tiny_llama().to(device), prompts(1, 60)
    with turbo_hf.patch(model, SMALL):
        greedy(model, input_ids=ids)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        got = greedy(model, input_ids=ids)
    assert torch.equal(got, answer(model, PLAIN, input_ids=ids))


def test_a_change_that_is_taken_back_is_not_captured(made: list[StepRunner], device: torch.device) -> None:
    model, ids = tiny_llama().to(device), prompts(1, 60)
    want, attention = answer(model, PLAIN, input_ids=ids), model.model.layers[0].self_attn
    plain = attention.scaling

    def changes(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == 61:
            attention.scaling = 2 * plain
        return scores

    with turbo_hf.patch(model, SMALL):
        greedy(model, input_ids=ids, logits_processor=[changes])
        attention.scaling = plain
        assert torch.equal(greedy(model, input_ids=ids), want)
    assert captures(made) == 2


def test_classes_and_subclasses_of_tensors(made: list[StepRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    before = model_now(model)
    assert model_now(model) == before
    with monkeypatch.context() as patched:
        patched.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: x)
        assert model_now(model) != before
    assert model_now(model) == before
    # whose memory is not known
    model.lm_head.weight = torch.nn.Parameter(TwoTensor(model.lm_head.weight.data, model.lm_head.weight.data))
    assert model_now(model) != model_now(model)


def test_a_runner_of_an_earlier_call_asks_again_why_not(made: list[StepRunner], device: torch.device) -> None:
    model, ids = tiny_llama().to(device), prompts(1, 60)
    with turbo_hf.patch(model, SMALL):
        greedy(model, input_ids=ids)
        model.model.layers[0].mlp.compile(backend="eager")
        greedy(model, input_ids=ids)
        assert captures(made) == 1


def test_a_change_of_torch_is_one_of_the_model() -> None:
    model = tiny_llama()
    before = model_now(model)
    torch.set_float32_matmul_precision("high")
    try:
        assert model_now(model) != before
    finally:
        torch.set_float32_matmul_precision("highest")
    matmul: Any = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        # the older switch then raises
        before = model_now(model)
        kept, matmul.fp32_precision = matmul.fp32_precision, "tf32"
        try:
            assert model_now(model) != before
        finally:
            matmul.fp32_precision = kept
        assert model_now(model) == before


def test_weights_and_modules_are_not_kept_alive() -> None:
    model = tiny_llama()
    now = model_now(model)
    weight, module = weakref.ref(model.lm_head.weight), weakref.ref(model.model.layers[0])
    del model
    gc.collect()
    assert weight() is None
    assert module() is None
    assert now


def test_hooks_end_the_replays(made: list[StepRunner], device: torch.device) -> None:
    model, ids, calls = tiny_llama().to(device), prompts(1, 60), []
    with turbo_hf.patch(model, SMALL):
        greedy(model, input_ids=ids)
        hook = model.model.layers[0].register_forward_hook(lambda *args: calls.append(1))
        greedy(model, input_ids=ids)
        assert len(calls) == NEW
        hook.remove()
        greedy(model, input_ids=ids)
        assert captures(made) == 2


def test_little_is_kept_and_nothing_after_remove(
    made: list[StepRunner], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    model, ids = tiny_llama().to(device), prompts(1, 60)
    monkeypatch.setattr(kept_steps, "MOST_BYTES", 100)
    handle = turbo_hf.patch(model, SMALL)
    greedy(model, input_ids=ids)
    greedy(model, input_ids=ids)
    assert captures(made) == 2
    monkeypatch.undo()
    runner = weakref.ref(made[-1])
    made.clear()
    handle.remove()
    del handle
    gc.collect()
    assert runner() is None


@pytest.mark.gpu
def test_one_call_after_another_allocates_no_more(device: torch.device) -> None:
    model = tiny_llama().to(device)
    with turbo_hf.patch(model, SMALL):
        held = []
        for length in (60, 50, 40, 60, 30, 60):
            greedy(model, input_ids=prompts(1, length, seed=length))
            gc.collect()
            held.append(torch.cuda.memory_allocated())
        assert max(held[1:]) <= held[0] + 4096
    assert cuda_device(model.device) is cuda_device(model.device)
