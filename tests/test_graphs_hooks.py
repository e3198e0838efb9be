"""Hooks of the user in captured steps: called in every step, between graphs, with the effects they have without."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from all_pairs import in_one_test
from graphs_support import PLAIN, SMALL, Again, Graphs, answer, ragged, watch_runners
from models import prompts, tiny_llama
from torch import Tensor

import turbo_hf
from turbo_hf.attention.cuts import cutting
from turbo_hf.errors import Unsupported
from turbo_hf.graphs.asides import Asides
from turbo_hf.graphs.step_runner import StepRunner
from turbo_hf.models.versions import CACHE
from turbo_hf.patching import generate_methods as generation

Noted = list[Tensor]


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[StepRunner]:
    return watch_runners(monkeypatch)


def listens(model: Any, noted: Noted) -> list[Any]:
    """One keeps what it sees, of several layers."""
    return [
        layer.mlp.register_forward_hook(lambda module, args, out: noted.append(out)) for layer in model.model.layers
    ]


def steers(model: Any, noted: Noted) -> list[Any]:
    """Returns another output, which the next layer reads, and changes with each step."""
    layer = model.model.layers[0]
    return [layer.register_forward_hook(lambda module, args, out: out + 0.1 * out.std())]


def steers_in_place(model: Any, noted: Noted) -> list[Any]:
    """Changes its input, which the residual sum reads again, and its output."""

    def hook(module: Any, args: Any, out: Tensor) -> None:
        args[0].mul_(1.1)
        out.add_(0.3)
        noted.append(out)

    return [model.model.layers[1].register_forward_hook(hook)]


def steers_by_data(model: Any, noted: Noted) -> list[Any]:
    """Changes what it is given where torch counts no change, and makes a pass of its own over another cache."""
    inner: list[int] = []

    def hook(module: Any, args: Any) -> None:
        args[0].data.add_(0.3)
        if not inner:
            inner.append(1)
            with torch.no_grad():
                model(prompts(1, 9).to(args[0].device))
            inner.clear()
            noted.append(args[0])

    return [model.model.layers[1].input_layernorm.register_forward_pre_hook(hook)]


def before(model: Any, noted: Noted) -> list[Any]:
    """Both kinds of hooks before a module, of which one is given keywords, and returns its first argument alone."""

    def keywords(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "input": kwargs["input"] * 2} if "input" in kwargs else kwargs

    mlp = model.model.layers[1].mlp
    return [
        mlp.register_forward_pre_hook(lambda module, args: args[0] + 0.2),
        mlp.gate_proj.register_forward_pre_hook(keywords, with_kwargs=True),
        mlp.register_forward_hook(lambda module, args, kwargs, out: noted.append(args[0]), with_kwargs=True),
    ]


def counts(model: Any, noted: Noted) -> list[Any]:
    """Does nothing in every second step, by what Python alone knows."""
    calls: list[int] = []

    def hook(module: Any, args: Any, out: Tensor) -> Tensor | None:
        calls.append(1)
        noted.append(out)
        return -out if len(calls) % 2 else None

    return [model.model.layers[0].mlp.register_forward_hook(hook)]


HOOKS: list[Any] = [
    pytest.param(made, id=made.__name__) for made in (listens, steers, steers_in_place, steers_by_data, before, counts)
]


@in_one_test(("make",), HOOKS)
def test_hooks_act_as_without_graphs(
    make: Callable[[Any, Noted], list[Any]], runners: list[StepRunner], device: torch.device
) -> None:
    model = tiny_llama(num_hidden_layers=3).to(device)
    inputs = {**ragged([20, 9]), "max_new_tokens": 12}
    bare = answer(model, PLAIN, **inputs)
    for call in ({}, {"num_beams": 2})[: 2 if make is steers else 1]:
        found, seen = [], []
        for config in (PLAIN, SMALL):
            noted: Noted = []
            hooks = make(model, noted)
            found.append(answer(model, config, **inputs, **call))
            seen.append([x.clone() for x in noted])
            for hook in hooks:
                hook.remove()
        assert torch.equal(*found)
        assert len(seen[0]) == len(seen[1])
        assert all(map(torch.equal, *seen))
        # each is of its own step
        assert not any(torch.equal(x, y) for x, y in zip(seen[1], seen[1][3:], strict=False))
        assert runners[-1].captures >= 1
        assert make is listens or call or not torch.equal(found[0], bare)
    assert not any(module._forward_hooks for module in model.modules())


def refused(model: Any, kind: str) -> Any:
    layer = model.model.layers[0]
    if kind == "cache":
        return layer.self_attn.register_forward_hook(lambda *args: None, with_kwargs=True)
    if kind == "shape":
        return layer.self_attn.register_forward_hook(lambda module, args, out: [*out])
    if kind == "attribute":
        return layer.mlp.register_forward_pre_hook(lambda module, args: setattr(model.model.norm, "shown", args[0]))
    return layer.mlp.register_forward_hook(lambda *args: None, always_call=True)


@in_one_test(
    ("kind", "words"),
    [
        pytest.param("cache", r"layers.0.self_attn is given a", id="cache"),
        pytest.param("shape", "layers.0.self_attn returns something of another form", id="shape"),
        pytest.param("attribute", "layers.0.mlp sets attributes of a module", id="attribute"),
        pytest.param("always", None, id="always"),
    ],
)
def test_hooks_that_cannot_be_called_between_graphs(
    kind: str, words: str | None, runners: list[StepRunner], device: torch.device
) -> None:
    model = tiny_llama().to(device)
    hook = refused(model, kind)
    inputs = {**ragged([20, 9]), "max_new_tokens": 6}
    want = answer(model, PLAIN, **inputs)
    with warnings.catch_warnings() if words is None else pytest.warns(UserWarning, match=words):
        assert torch.equal(answer(model, SMALL, **inputs), want)
    hook.remove()
    assert not runners[-1].captures


def test_a_hook_that_goes_or_changes_midway(
    runners: list[StepRunner], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    model, called = tiny_llama().to(device), []

    def returns(steps: int, of: Any, module: Any, args: Any, out: Tensor) -> Any:
        called.append(1)
        return out if len(called) < steps else of(out)

    ids = prompts(1, 40).to(model.device)
    with turbo_hf.patch(model, SMALL) as handle:
        mlp = model.model.layers[0].mlp

        def ends(of_ids: Tensor, scores: Tensor) -> Tensor:
            if of_ids.shape[1] == 48:
                hook.remove()
            return scores

        hook = mlp.register_forward_hook(functools.partial(returns, 1000, None))
        model.generate(ids, max_new_tokens=14, do_sample=False, logits_processor=[ends])
        assert len(called) == 9
        assert runners[-1].captures
        called.clear()
        cache = handle.new_cache()
        if device.type == "cpu":
            # whose replays are noted by nothing on the host
            monkeypatch.setattr(generation, "cuda_device", lambda _: Graphs(cache))
        with (
            mlp.register_forward_hook(functools.partial(returns, 10, lambda out: out[:, :0])),
            pytest.raises(Unsupported, match=r"layers.0.mlp returns something of another form .*cuda_graphs=False"),
        ):
            model.generate(ids, **{CACHE: cache}, max_new_tokens=14, do_sample=False)
        # the first layer has stored the last token
        cache.roll_back()
        assert cache.get_seq_length() == 40 + 8


@pytest.mark.parametrize("inference", [False, True])
def test_what_a_hook_is_given_between_graphs(inference: bool) -> None:
    """An expanded tensor, and one tensor twice; changed in place, both are."""

    class First(torch.nn.Module):
        def forward(self, x: Tensor, wide: Tensor) -> Tensor:
            return x

    module, cut = First(), Again()

    def hook(module: Any, args: Any, out: Tensor) -> None:
        assert args[0] is not x
        assert args[1].shape == wide.shape
        out.add_(1)
        assert torch.equal(args[0], out)

    module.register_forward_hook(hook)
    with torch.inference_mode(inference), torch.no_grad():
        x, wide = torch.zeros(3), torch.zeros(1).expand(4)
        asides = Asides(module, lambda hook: False)
        with asides.called(), cutting(cut):
            out = module(x, wide)
    assert out.tolist() == x.tolist() == [1, 1, 1]
    assert out is not x


@pytest.mark.parametrize(("other", "refused"), [("itself", False), ("a view", True), ("a tensor", False)])
def test_views_of_one_tensor_are_not_for_hooks_between_graphs(other: str, refused: bool) -> None:
    x = torch.ones(2, 3)
    second = {"itself": x, "a view": x.flatten(), "a tensor": x.clone()}[other]
    model = torch.nn.Linear(3, 3)
    model.register_forward_hook(lambda module, args, out: None)
    asides = Asides(model, lambda hook: False)
    (aside,) = asides.found()
    with cutting(None):
        aside(model, (x,), second)
    assert (aside.unfit == "is given two views of one tensor") == refused
