"""Steps of a model whose layers lie on several devices (`device_map`): a graph for each run of work on one of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import prompts, tiny_llama
from torch._subclasses.fake_tensor import FakeTensorMode

import turbo_hf
from turbo_hf import TurboConfig
from turbo_hf.graphs.devices import Parts, only_moves
from turbo_hf.graphs.step_runner import StepRunner, why_no_replay_of
from turbo_hf.patching import generate_methods as generation

HERE, THERE = torch.device("cuda", 0), torch.device("cuda", 1)
CONFIG = TurboConfig(block_size=32)


class Graph:
    """In place of a CUDA graph. device: that it was begun on."""

    def __init__(self, device: torch.device):
        self.device, self.ended = device, 0

    def capture_end(self) -> None:
        self.ended += 1


class Pieces(Parts):
    """As they are; tensors without memory are asked for their device by an operator of their own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args) if func.namespace == "prim" else super().__torch_dispatch__(func, types, args, kwargs)


def recorded(step: Any) -> list[Any]:
    """The devices of a step's parts, each with its copies. step: gets a tensor on the first device."""
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(2, 3, device=HERE)
        parts = Pieces(Graph)
        with parts:
            out = step(x)
        parts.end()
    assert all(part.graph.ended == 1 for part in parts.parts)
    for copies, graph in parts.parts:
        assert all(target.device == graph.device != source.device for target, source in copies)
    assert out.device == HERE
    return [(part.graph.device.index, len(part.copies)) for part in parts.parts]


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    """Two values of the first device are used twice on the second one, as positions by each layer."""
    rotary = x * 3
    x = x + 1
    for _ in range(2):
        x = x.to(THERE) + rotary.to(THERE) + rotary.to(THERE)
    return x.to(HERE)


def spoilt(x: torch.Tensor) -> torch.Tensor:
    """A value changes after it was copied."""
    first = x.to(THERE) + 1
    x.view(-1).add_(1)
    second = x.to(THERE) + first
    torch.add(x, 1, out=x)
    second = x.to(THERE) + second
    x = second.to(HERE)
    return x + torch.ones(3, device=HERE)


@pytest.mark.parametrize("inference", [False, True])
def test_a_step_is_cut_where_it_changes_devices(inference: bool) -> None:
    with torch.inference_mode(inference):
        assert recorded(there_and_back) == [(0, 0), (1, 2), (0, 1)]
        assert recorded(spoilt) == [(1, 1), (0, 0), (1, 1), (0, 0), (1, 1), (0, 1)]
        with pytest.raises(RuntimeError, match="works on 2 devices at once"):
            recorded(lambda x: x + torch.ones(3, device=THERE))


def test_what_a_model_over_devices_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny_llama()
    hooks.add_hook_to_module(model.lm_head, hooks.AlignDevicesHook("cpu"))
    assert only_moves(model.lm_head._hf_hook)
    assert not only_moves(hooks.ModelHook())
    with turbo_hf.patch(model):
        monkeypatch.setattr("turbo_hf.graphs.step_runner._why_no_replay_there", lambda *_: None)
        assert why_no_replay_of(model) is None
        model.lm_head._hf_hook.offload = True
        assert "lm_head has hooks" in str(why_no_replay_of(model))
        model.lm_head._hf_hook.offload = False
        # moved by hand: nothing moves what lies between
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to("meta"))
        assert why_no_replay_of(model) == "its weights lie on 2 devices"


@pytest.mark.gpu2
def test_steps_over_two_gpus_are_replayed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    tiny_llama(num_hidden_layers=4).save_pretrained(tmp_path)
    places = {f"model.layers.{n}": int(n > 1) for n in range(4)}
    places |= {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, dtype=torch.float32)
    ids, made = prompts(3, 70).to(0), []

    class Runner(StepRunner):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(generation, "StepRunner", Runner)
    for config in (CONFIG, TurboConfig(low_bits=2, low_heads=0.5, block_size=32)):
        for options in ({}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}):
            rows = ids[:1] if "prompt_lookup_num_tokens" in options else ids
            made.clear()
            answers = []
            for graphs in (False, True):
                with turbo_hf.patch(model, replace(config, cuda_graphs=graphs)):
                    how = {"max_new_tokens": 100, "do_sample": False, **options}
                    answers += [model.generate(rows, **how).tolist() for _ in range(2)]
            assert all(found == answers[0] for found in answers), options
            assert sum(runner.captures for runner in made) >= 2, options
    with turbo_hf.patch(model, CONFIG), torch.inference_mode():
        assert model.generate(ids, max_new_tokens=40, do_sample=False).shape == (3, 110)
    layer = model.model.layers[3].self_attn.v_proj.weight

    def spoil(ids: Any, scores: Any) -> Any:
        if ids.shape[1] == 80:
            layer.data[0] = torch.nan
        return scores

    with turbo_hf.patch(model, CONFIG), pytest.raises(ValueError, match="layer 3: keys or values hold NaN"):
        model.generate(ids, max_new_tokens=100, do_sample=False, logits_processor=[spoil])
