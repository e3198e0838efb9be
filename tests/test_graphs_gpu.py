"""Captured steps on a GPU, and on several: a graph for each run of work on one of them."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from choices import flat_config
from graphs_support import PLAIN, SMALL, an_index, answer, answer_and_report, ragged
from models import SHAPE, prompts, tiny_llama
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

import turbo_hf
from turbo_hf import SparseConfig
from turbo_hf.graphs.devices import CudaDevice, Parts, only_moves
from turbo_hf.graphs.step_runner import StepRunner
from turbo_hf.graphs.why_not import why_no_replay_of
from turbo_hf.models.versions import CACHE
from turbo_hf.patching import generate_methods as generation


def half(**options: Any) -> Any:
    return tiny_llama(attn_implementation="sdpa", **options).to("cuda", torch.bfloat16)


SAAP = SparseConfig(selector="saap", probes=3, window_tokens=12, read_all_layers=())
SPARSE = [
    pytest.param(SAAP, id="saap"),
    pytest.param(replace(SAAP, selector="kmeans"), id="kmeans"),
    pytest.param(replace(SAAP, read_all_layers=(0,)), id="dense-layer"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("sparse", [pytest.param(None, id="dense"), *SPARSE])
def test_a_replayed_step_waits_for_nothing_but_the_mask(sparse: Any, runners: list[StepRunner]) -> None:
    model = half()
    config = replace(SMALL, sparse=sparse)
    # a block is sealed, so that the plan of attention has one from the first step on
    length = 56 + config.recent
    with turbo_hf.patch(model, config, calibration=an_index(model)) as handle, torch.no_grad():
        cache = handle.new_cache()
        ids = prompts(3, length).cuda()
        model(ids, **{CACHE: cache}, use_cache=True)
        runner = StepRunner(model, CudaDevice(model.device))
        new = ids[:, :1].contiguous()
        at = torch.full((3, 1), length, device="cuda")

        def step() -> None:
            runner(input_ids=new, position_ids=at, **{CACHE: cache}, use_cache=True, return_dict=True)

        for _ in range(4):
            step()
        assert runner.captures == 1
        assert runner._steps is not None
        sealed = 0
        for _ in range(60):
            seals = runner._steps.seals()
            sealed += seals
            torch.cuda.set_sync_debug_mode("error")
            try:
                # before a block is sealed the host asks once whether it holds NaN; the rest waits for nothing
                (runner._steps.begin if seals else step)()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            if seals:
                step()
        # dense layers keep first tokens open, and seal at other steps than sparse ones
        assert sealed == (4 if sparse is not None and sparse.read_all_layers else 2)
        assert runner.captures == 1
        for _ in range(300):
            step()
        # pages were reserved again
        assert runner.captures == 2
    assert cache.get_seq_length() == length + 364


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5])
def test_on_a_gpu_many_steps_take_few_captures(rows: int, runners: list[StepRunner]) -> None:
    model = half()
    batch = ragged([40 + 9 * row for row in range(rows)])
    want = answer(model, PLAIN, max_new_tokens=700, **batch)
    assert torch.equal(answer(model, SMALL, max_new_tokens=700, **batch), want)
    assert runners[-1].captures <= 8


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("sparse", SPARSE)
def test_on_a_gpu_many_steps_of_sparse_layers(sparse: Any, rows: int, runners: list[StepRunner]) -> None:
    model = half()
    index, plain = an_index(model), replace(PLAIN, sparse=sparse)
    batch = ragged([40 + 9 * row for row in range(rows)])
    want, counted = answer_and_report(model, plain, index, max_new_tokens=700, **batch)
    got, report = answer_and_report(model, replace(plain, cuda_graphs=True), index, max_new_tokens=700, **batch)
    assert torch.equal(got, want)
    assert report.selectivity == counted.selectivity
    assert runners[-1].captures <= 8


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gpt_oss", "mixtral", "phi3", "granite"])
def test_families_on_a_gpu(family: str, runners: list[StepRunner]) -> None:
    torch.manual_seed(0)
    extra: dict[str, Any] = (
        {"num_local_experts": 2, "num_experts_per_tok": 2} if family in ("gpt_oss", "mixtral") else {}
    )
    config = AutoConfig.for_model(family, **{**SHAPE, "tie_word_embeddings": False, **extra})
    model = AutoModelForCausalLM.from_config(config).eval().to("cuda", torch.bfloat16)
    want = answer(model, PLAIN, **ragged())
    assert torch.equal(answer(model, SMALL, **ragged()), want)
    assert runners[-1].captures >= 1


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_runs_without(runners: list[StepRunner]) -> None:
    model = half()
    want = answer(model, PLAIN, **ragged())
    forward = type(model.model.norm).forward
    model.model.norm.forward = lambda x: forward(model.model.norm, x) + 0 * float(x.sum().item() == 0.5)
    with pytest.warns(UserWarning, match="cannot be captured in a CUDA graph"):
        got = answer(model, SMALL, **ragged())
    assert torch.equal(got, want)
    # what torch leaves open after a spoilt capture is closed: numbers can be drawn, and steps captured
    assert torch.rand(1, device="cuda").isfinite().all()
    del model.model.norm.forward
    assert torch.equal(answer(model, SMALL, **ragged()), want)
    assert runners[-1].captures >= 1


@pytest.mark.gpu
def test_steps_are_captured_beside_memory_that_torch_keeps(runners: list[StepRunner]) -> None:
    model = half()
    want = answer(model, PLAIN, **ragged())
    block, blocks = 24 << 20, 40
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + block * blocks + (2 << 20)
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        kept = [torch.empty(block, dtype=torch.uint8, device="cuda") for _ in range(blocks)]
        del kept
        assert torch.equal(answer(model, SMALL, **ragged()), want)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert runners[-1].captures >= 1


HERE, THERE = torch.device("cuda", 0), torch.device("cuda", 1)


class Pretended(CudaDevice):
    """A device whose captures fail with `errors`, one after the other, and that notes what is done."""

    def __init__(self, errors: list[BaseException]) -> None:
        self.done: list[str] = []
        self.errors = errors
        self._streams: Any = {HERE: None}
        self._pools: Any = {}
        self._anchors = {}

    def _end_spoilt_capture(self) -> None:
        self.done.append("end")
        super()._end_spoilt_capture()

    def _in_one(self, device: torch.device, step: Callable[[], Any]) -> Callable[[], Any]:
        self.done.append("anchor" if device not in self._anchors else "capture")
        if device in self._anchors and self.errors:
            raise self.errors.pop(0)
        return step


FULL_MEMORY: list[BaseException] = [torch.OutOfMemoryError("full"), RuntimeError("CUDA error: out of memory")]
FULL_MEMORY += [RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")]


@pytest.mark.parametrize("error", FULL_MEMORY)
def test_a_capture_without_memory_is_tried_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Pretended([error])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: device.done.append("empty"))
    assert device.capture(lambda: 3)() == 3
    assert device.done == ["anchor", "capture", "end", "empty", "anchor", "capture"]


def test_a_capture_that_fails_otherwise_or_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    device = Pretended([RuntimeError("no")])
    with pytest.raises(RuntimeError, match="no"):
        device.capture(lambda: 3)
    assert device.done == ["anchor", "capture", "end", "anchor"]
    device = Pretended(FULL_MEMORY[:2])
    with pytest.raises(RuntimeError, match="out of memory"):
        device.capture(lambda: 3)
    assert device.done == ["anchor", "capture", "end", "anchor", "capture", "end", "anchor"]
    # and the next one begins anew
    assert device.capture(lambda: 4)() == 4


def test_no_garbage_is_collected_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    collecting: list[bool] = []

    def in_one(self: Pretended, device: torch.device, step: Callable[[], Any]) -> Callable[[], Any]:
        # not the graph that keeps the pool alive
        if device in self._anchors:
            step()
        return step

    def step() -> None:
        # another thread's capture, which ends first
        Pretended([]).capture(lambda: None)
        collecting.append(gc.isenabled())

    monkeypatch.setattr(Pretended, "_in_one", in_one)
    Pretended([]).capture(step)
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        Pretended([]).capture(lambda: 1 / 0)
    assert gc.isenabled()
    gc.disable()
    try:
        Pretended([]).capture(step)
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert collecting == [False, False]


@pytest.mark.gpu
def test_graphs_that_are_garbage_do_not_spoil_a_capture(runners: list[StepRunner]) -> None:
    model = half()
    want = answer(model, PLAIN, **ragged())
    assert torch.equal(answer(model, SMALL, **ragged()), want)
    # captures of the call before, in a circle that only a collection finds, at any allocation of the next
    circle: list[Any] = [runners[-1]]
    circle.append(circle)
    runners.clear()
    del circle
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        assert torch.equal(answer(model, SMALL, **ragged()), want)
    finally:
        gc.set_threshold(*before)
    assert runners[-1].captures >= 1


CONFIG = flat_config(block_size=32)


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
        monkeypatch.setattr("turbo_hf.graphs.why_not._why_no_replay_there", lambda *_: None)
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
    for config in (CONFIG, flat_config(low_bits=2, low_heads=0.5, block_size=32)):
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
