"""Hooks of the user: each is called in every step, with the effects that it has without graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs_support import PLAIN, SMALL, answer, ragged, watch_runners
from models import prompts, tiny_llama
from torch import Tensor

import turbo_hf
from turbo_hf import TurboConfig
from turbo_hf.errors import Unsupported
from turbo_hf.graphs.step_runner import StepRunner

LAUNCHED = "decode steps: launched, since {} has a hook"


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[StepRunner]:
    return watch_runners(monkeypatch)


@pytest.mark.parametrize("call", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}])
def test_hooks_act_as_without_graphs(call: dict[str, Any], runners: list[StepRunner], device: torch.device) -> None:
    """One returns another output, one another input, one keeps what it sees."""
    model = tiny_llama(num_hidden_layers=3).to(device)
    inputs = {**ragged([20, 9] if "num_beams" in call or not call else [20]), "max_new_tokens": 12}
    bare = answer(model, PLAIN, **inputs, **call)
    noted, layers = list[Tensor](), model.model.layers
    hooks = [
        layers[0].register_forward_hook(lambda module, args, out: out + 0.1 * out.std()),
        layers[1].mlp.register_forward_pre_hook(lambda module, args: args[0] * 1.5),
        layers[2].mlp.register_forward_hook(lambda module, args, out: noted.append(out)),
    ]
    want = answer(model, PLAIN, **inputs, **call)
    seen = [*noted]
    noted.clear()
    assert torch.equal(answer(model, SMALL, **inputs, **call), want)
    for hook in hooks:
        hook.remove()
    assert not torch.equal(want, bare)
    assert len(seen) == len(noted)
    assert all(map(torch.equal, seen, noted))
    assert not any(runner.captures for runner in runners)


@pytest.mark.parametrize("place", ["mlp", "model", "everywhere"])
def test_the_report_says_that_steps_are_launched(place: str, runners: list[StepRunner], device: torch.device) -> None:
    model, called = tiny_llama().to(device), list[int]()
    ids = prompts(1, 40).to(model.device)

    def note(*args: Any) -> None:
        called.append(1)

    with turbo_hf.patch(model, SMALL) as handle:
        before = handle.report().steps
        # after the patch
        module: Any = {"mlp": model.model.layers[0].mlp, "model": model}.get(place)
        everywhere: Callable[..., Any] = torch.nn.modules.module.register_module_forward_hook
        hook = everywhere(note) if module is None else module.register_forward_hook(note)
        named = {"mlp": "model.layers.0.mlp", "model": "the model", "everywhere": "every module"}[place]
        try:
            assert handle.report().steps == LAUNCHED.format(named)
            model.generate(ids, max_new_tokens=10, do_sample=False)
        finally:
            hook.remove()
        assert len(called) >= 10
        assert not runners[-1].captures if runners else True
        assert handle.report().steps == before
        model.generate(ids, max_new_tokens=10, do_sample=False)
        assert runners[-1].captures


@pytest.mark.parametrize("demanded", [False, True])
def test_a_hook_that_comes_among_captured_steps_misses_none(
    demanded: bool, runners: list[StepRunner], device: torch.device
) -> None:
    model, called, hooks = tiny_llama().to(device), list[int](), list[Any]()
    replayed = list[int]()

    def comes(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == 46:
            assert runners[-1].captures
            replayed.append(replays())
            hooks.append(model.model.layers[0].mlp.register_forward_hook(lambda *args: called.append(1)))
        return scores

    def replays() -> int:
        # in place of a GPU, whose replays call no hook
        return int(getattr(runners[-1]._device, "replayed", 0))

    ids = prompts(1, 40).to(model.device)
    with turbo_hf.patch(model, TurboConfig(block_size=32, cuda_graphs=demanded or "auto")) as handle:
        options: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}
        want = model.generate(ids, **options)
        if demanded:
            with pytest.raises(Unsupported, match=r"cuda_graphs=True: model.layers.0.mlp has hooks"):
                model.generate(ids, logits_processor=[comes], **options)
            assert not called
            return
        assert torch.equal(model.generate(ids, logits_processor=[comes], **options), want)
        # tokens 8 to 14
        assert len(called) == 7
        assert replayed == [replays()]
        assert handle.report().steps == LAUNCHED.format("model.layers.0.mlp")
        # removed, the next call captures again
        hooks.pop().remove()
        model.generate(ids, **options)
        assert runners[-1].captures
