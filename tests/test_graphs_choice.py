"""What decides whether a step is captured, replayed or launched, hooks of the user among it; what a launch is given."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from choices import flat_config
from graphs_support import PLAIN, SMALL, Again, an_index, answer, ragged, watch_runners
from models import prompts, tiny_llama
from torch import Tensor
from transformers import GenerationMixin, LlamaForCausalLM

import turbo_hf
from turbo_hf import SparseConfig
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.errors import Unsupported
from turbo_hf.graphs.step_runner import StepRunner
from turbo_hf.layout import FIRST
from turbo_hf.models.versions import CACHE
from turbo_hf.ops.decode import launch as launch_decode
from turbo_hf.ops.sparse import launch as launch_sparse
from turbo_hf.ops.store import launch as launch_store

# --- what decides --------------------------------------------------------------------------------------------------


class Bench:
    """A patched model, a cache with a prompt in it, and a runner over a stand-in.

    padding: columns before the second row's prompt that are none of it.
    """

    def __init__(self, padding: int = 0, **options: Any):
        self.model = tiny_llama()
        self.handle = turbo_hf.patch(self.model, SMALL)
        self.cache = self.handle.new_cache()
        self.device = Again(**options)
        self.runner = StepRunner(self.model, self.device)
        self.padding = padding
        self.pass_(prompts(2, 40))

    @torch.no_grad()
    def pass_(self, ids: Tensor, call: Any = None, **options: Any) -> Any:
        """One pass, of which the runner or the model is told what `generate` tells."""
        at = self.cache.get_seq_length() + torch.arange(ids.shape[1]).expand(len(ids), -1)
        mask = torch.ones(len(ids), self.cache.get_seq_length() + ids.shape[1], dtype=torch.long)
        mask[1, : self.padding] = 0
        known = {"input_ids": ids, "position_ids": at, "attention_mask": mask, "use_cache": True}
        return (call or self.model)(**{**known, CACHE: self.cache, "return_dict": True, **options})

    def step(self, dtype: torch.dtype = torch.int64, **options: Any) -> Any:
        """One new token a row, through the runner."""
        return self.pass_(torch.full((2, 1), 5, dtype=dtype), self.runner, **options)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Steps that warmed, captures, replays."""
        return self.device.warmed, self.device.captured, self.device.replayed


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(TurboLayer, "in_place", True)
    bench = Bench()
    yield bench
    bench.handle.remove()


def test_one_step_warms_one_is_captured_others_are_replayed(bench: Bench) -> None:
    outputs = [bench.step() for _ in range(6)]
    assert bench.counts == (1, 1, 5)
    assert all(type(out) is type(outputs[0]) for out in outputs)
    assert outputs[0][CACHE] is bench.cache
    assert [layer.seen for layer in bench.cache.turbo_layers()] == [46, 46]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"output_hidden_states": True}, id="hidden-states"),
        pytest.param({"output_attentions": False, "position_ids": None}, id="no-positions"),
        pytest.param({"token_type_ids": torch.zeros(2, 1, dtype=torch.long)}, id="unknown-tensor"),
        pytest.param({"return_dict": False}, id="tuple"),
    ],
)
def test_other_calls_go_to_the_model(bench: Bench, options: dict[str, Any]) -> None:
    if "token_type_ids" in options:
        model = bench.runner._model
        bench.runner._model = lambda token_type_ids, **kwargs: model(**kwargs)
        bench.runner._model.training = False
    bench.step(**options)
    assert bench.counts == (0, 0, 0)
    assert bench.cache.get_seq_length() == 41


def test_gradients_go_to_the_model(bench: Bench) -> None:
    known = {"input_ids": torch.ones(2, 1, dtype=torch.long), "position_ids": torch.full((2, 1), 40)}
    out = bench.runner(**known, **{CACHE: bench.cache})
    with pytest.raises(RuntimeError, match="has no gradient"):
        out.logits.sum().backward()
    assert bench.counts == (0, 0, 0)


def test_changes_between_steps_begin_anew_and_wait_longer(bench: Bench) -> None:
    for _ in range(3):
        bench.step()
    assert bench.counts == (1, 1, 2)
    bench.cache.crop(-1)
    for _ in range(4):
        bench.step()
    assert bench.counts == (3, 2, 4)
    # in every second step: nothing is captured any more
    for _ in range(5):
        bench.cache.crop(-1)
        bench.step()
        bench.step()
    assert bench.counts == (13, 2, 4)


def test_a_token_that_the_mask_hides_goes_to_the_model(bench: Bench) -> None:
    for _ in range(3):
        bench.step()
    hidden = torch.ones(2, 44, dtype=torch.long)
    hidden[0, -1] = 0
    bench.step(attention_mask=hidden)
    assert bench.counts == (1, 1, 2)
    assert bench.cache.turbo_layers()[0].lengths() == [43, 44]


def test_padding_that_changes_is_refused_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TurboLayer, "in_place", True)
    bench = Bench(padding=9)
    for _ in range(3):
        bench.step()
    assert bench.counts == (1, 1, 2)
    # one column of the padding, which the cache does not hold
    bench.padding = 8
    with pytest.raises(ValueError, match="differs from the one under which the cached tokens were stored"):
        bench.step()


def test_a_mask_is_read_unless_generate_has_only_lengthened_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Tensor] = []
    confirmed = StepRunner._confirmed

    def reads(*given: Any) -> bool:
        read.append(given[2])
        return confirmed(*given)

    monkeypatch.setattr(StepRunner, "_confirmed", reads)
    masks = [torch.ones(2, 40, dtype=torch.long)]

    def step(hides: bool = False) -> int:
        masks.append(torch.cat((masks[-1], masks[-1].new_ones(2, 1)), 1))
        bench.runner.grown(masks[-2], masks[-1])
        if hides:
            masks[-1][1, -1] = 0
        bench.step(attention_mask=masks[-1])
        return len(read)

    # the step that warms, and the one that is captured
    assert [step() for _ in range(5)] == [1, 2, 2, 2, 2]
    # another tensor that is the same
    masks[-1] = masks[-1].clone()
    assert [step(), step()] == [3, 3]
    counts = bench.counts
    # one that was changed: its token is padding in the second row
    assert step(hides=True) == 4
    assert bench.counts == counts
    assert bench.cache.layers[0].valid_prefix is not None
    assert step() == 5


def test_training_mode_is_refused_and_not_replayed(bench: Bench) -> None:
    for _ in range(3):
        bench.step()
    bench.model.train()
    with pytest.raises(Unsupported, match="the model is in training mode"):
        bench.step()
    assert bench.counts == (1, 1, 2)


def test_ids_of_another_type_are_captured_anew(bench: Bench) -> None:
    for dtype in [torch.int64] * 3 + [torch.int32] * 3:
        bench.step(dtype)
    assert bench.counts == (2, 2, 4)


def test_nan_is_told_before_its_block_is_sealed(bench: Bench) -> None:
    broken = bench.model.lm_head.weight.new_full((64,), torch.nan)
    for _ in range(3):
        bench.step()
    weight = bench.model.model.embed_tokens.weight
    kept = weight[5].clone()
    with torch.no_grad():
        weight[5] = broken
        bench.step()
        weight[5] = kept
    for _ in range(FIRST + 32 + 32 - 44):
        bench.step()
    with pytest.raises(ValueError, match="layer 0: keys or values hold NaN or Inf"):
        bench.step()
    assert bench.cache.turbo_layers()[0].state.sealed == [0, 0]


@pytest.mark.parametrize("before", [0, 4], ids=["warming", "replaying"])
def test_after_a_step_that_was_broken_off_the_next_is_refused(bench: Bench, before: int) -> None:
    for _ in range(before):
        bench.step()
    hook = bench.model.model.layers[1].self_attn.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.step()
    hook.remove()
    counts = bench.counts
    with pytest.raises(ValueError, match=r"an earlier pass .* broke off"):
        bench.step()
    assert bench.counts == counts


def test_another_cache_is_another_beginning(bench: Bench) -> None:
    for _ in range(3):
        bench.step()
    bench.cache = bench.handle.new_cache()
    bench.pass_(prompts(2, 50))
    for _ in range(4):
        bench.step()
    assert bench.counts == (3, 2, 4)


def test_a_capture_that_fails_warns_once_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TurboLayer, "in_place", True)
    bench, plain = Bench(fails="no"), Bench()
    bench.step()
    with pytest.warns(UserWarning, match=r"cannot be captured in a CUDA graph \(no\)"):
        got = [bench.step().logits]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got += [bench.step().logits for _ in range(40)]
    want = [plain.step().logits for _ in range(42)][1:]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    demanding = Bench(fails="no")
    demanding.runner = StepRunner(demanding.model, demanding.device, demanded=True)
    demanding.step()
    with pytest.raises(Unsupported, match="cannot be captured"):
        demanding.step()


@pytest.mark.parametrize("when", ["sys.is_finalizing", "turbo_hf.graphs.step_runner._capturing"])
def test_where_nothing_can_run_nothing_is_closed(when: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.step()
    steps = bench.runner._steps
    assert steps is not None
    closed: list[Any] = []
    monkeypatch.setattr(steps, "close", lambda: closed.append(steps))
    monkeypatch.setattr(when, lambda *args: True)
    bench.runner.__del__()
    assert not closed


def test_a_runner_released_within_a_later_pass(bench: Bench) -> None:
    bench.step()
    steps = bench.runner._steps
    assert steps is not None
    assert steps.mark.now is None
    closed: list[Any] = []
    steps.close = lambda: closed.append(steps)  # type: ignore[method-assign]
    steps.mark.begin()
    bench.runner.__del__()
    assert not closed
    steps.mark.end()
    bench.runner._steps = steps
    bench.runner.__del__()
    assert closed == [steps]


# --- launches ------------------------------------------------------------------------------------------------------


class Recorder:
    """A kernel that notes with what it is launched: grid, numbers, and the memory of what outlives a step."""

    def __init__(self, kernel: Any, notes: list[Any]):
        self._kernel, self._notes = kernel, notes

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            self._notes.append((grid, _numbers(args), _numbers(tuple(options.values()))))
            return self._kernel[grid](*args, **options)

        return launch


def _numbers(values: tuple[Any, ...]) -> list[Any]:
    return [
        _numbers(x) if isinstance(x, tuple) else (x.dtype, x.shape, x.stride()) if isinstance(x, Tensor) else x
        for x in values
    ]


@pytest.mark.parametrize("selector", [None, "window", "saap"])
def test_launches_of_a_graph_are_those_of_its_steps(selector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[Any] = []
    sparse_kernels = [(launch_sparse, name) for name in vars(launch_sparse) if name.endswith("_kernel")]
    for module, name in ((launch_decode, "decode_kernel"), (launch_store, "append_step_kernel"), *sparse_kernels):
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), notes))
    model = tiny_llama(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    probes = None if selector == "window" else 3
    sparse = selector and SparseConfig(selector=selector, probes=probes, window_tokens=12, read_all_layers=())
    captured: list[int] = []

    class Noting(Again):
        def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
            captured.append(len(notes))
            return super().capture(step)

    tokens = []
    for graph in (False, True):
        with (
            turbo_hf.patch(
                model, flat_config(block_size=32, backend="triton", sparse=sparse), calibration=an_index(model)
            ) as handle,
            torch.inference_mode(),
        ):
            cache, ids = handle.new_cache(), ragged([66, 62])
            at = (ids["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            mask = ids["attention_mask"]
            out = model(**ids, position_ids=at, **{CACHE: cache}, use_cache=True)
            runner = StepRunner(model, Noting())
            found = []
            notes.clear()
            for _ in range(4):
                new = out.logits[:, -1:].argmax(-1)
                found.append(new)
                mask, at = torch.nn.functional.pad(mask, (0, 1), value=1), at[:, -1:] + 1
                known = {"input_ids": new, "attention_mask": mask, "position_ids": at, CACHE: cache}
                out = (runner if graph else model)(**known, use_cache=True, return_dict=True)
            tokens.append(torch.cat(found, 1))
    assert torch.equal(*tokens)
    # the second row seals in the third step, the first that is nothing but a replay
    assert cache.turbo_layers()[0].lengths() == [70, 66]
    assert runner.captures == 1
    each = (len(notes) - captured[0]) // 3
    steps = [notes[n : n + each] for n in range(captured[0], len(notes), each)]
    assert len(steps) == 3
    assert each >= 2
    assert all(step == steps[0] for step in steps)


def hides_at_46(mask: Any) -> None:
    if mask is not None and mask.shape[1] == 46:
        mask[:, -1] = 0


class Makes(LlamaForCausalLM):
    """It makes its masks itself."""

    def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        updated = super()._update_model_kwargs_for_generation(*args, **kwargs)
        mask = updated["attention_mask"]
        mask[:, -1] = int(mask.shape[1] % 7 > 0)
        return updated


class Changes(LlamaForCausalLM):
    """It changes its masks in place."""

    def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask: Any = None, **rest: Any) -> Any:
        hides_at_46(attention_mask)
        return super().prepare_inputs_for_generation(input_ids, attention_mask=attention_mask, **rest)


@pytest.mark.parametrize("inference", [False, True], ids=["no-grad", "inference"])
@pytest.mark.parametrize("kind", [Makes, Changes, None])
def test_masks_that_others_make_are_read(kind: Any, inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a model's own class, and of a method put in the place of Transformers' own."""
    runners, model = watch_runners(monkeypatch), tiny_llama()
    model.__class__ = kind or LlamaForCausalLM
    own = GenerationMixin._update_model_kwargs_for_generation

    def hides(self: Any, *args: Any, **kwargs: Any) -> Any:
        updated = own(self, *args, **kwargs)
        hides_at_46(updated["attention_mask"])
        return updated

    if kind is None:
        monkeypatch.setattr(GenerationMixin, "_update_model_kwargs_for_generation", hides)
    with torch.inference_mode(inference):
        want = answer(model, PLAIN, **ragged([40, 37]))
        assert torch.equal(answer(model, SMALL, **ragged([40, 37])), want)
    assert runners[-1].captures


LAUNCHED = "decode steps: launched, since {} has a hook"


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
        return int(getattr(runners[-1].device, "replayed", 0))

    ids = prompts(1, 40).to(model.device)
    with turbo_hf.patch(model, flat_config(block_size=32, cuda_graphs=demanded or "auto")) as handle:
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
