"""Decode steps of `generate` as graphs: the same tokens, and a pass of the model wherever a replay would be wrong.

Without a GPU a stand-in runs the step again where a graph is replayed: what is decided and counted is the same. That
launches are the same from one step to the next, which a graph takes for granted, is seen in the interpreter.
"""

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import SHAPE, left_padded, prompts, tiny_llama, tiny_mistral
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import turbo_hf
from turbo_hf import Calibration, SparseConfig, TurboCache, TurboConfig, graphs, patching, steps
from turbo_hf.attention import Unsupported
from turbo_hf.calibration.artifacts import LayerCalibration, fingerprint
from turbo_hf.calibration.checkpoint import Checkpoint
from turbo_hf.graphs import CudaDevice, StepRunner, describe
from turbo_hf.handle import Report
from turbo_hf.layer import TurboLayer
from turbo_hf.ops import launch_decode, launch_sparse, launch_store
from turbo_hf.selectors import Reformer

SMALL = TurboConfig(block_size=32)
PLAIN = TurboConfig(block_size=32, cuda_graphs=False)
LENGTHS = [60, 33, 5]
NEW = 75
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Again:
    """In place of a CUDA device: what was captured runs again. Counts both."""

    def __init__(self, device: Any = None, fails: str = ""):
        self.warmed = self.captured = self.replayed = 0
        self._fails = fails

    def warm(self, step: Callable[[], Any]) -> Any:
        self.warmed += 1
        return step()

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        if self._fails:
            raise RuntimeError(self._fails)
        self.captured += 1

        def replay() -> Any:
            self.replayed += 1
            return step()

        return replay


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[StepRunner]:
    """The runners of the `generate` calls of a test; without a GPU over stand-ins, and without kernels."""
    made: list[StepRunner] = []

    def make(*args: Any, **kwargs: Any) -> StepRunner:
        made.append(StepRunner(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(patching, "StepRunner", make)
    if not torch.cuda.is_available():
        monkeypatch.setattr(patching, "cuda_device", Again)
        monkeypatch.setattr(graphs, "_place_obstacle", lambda *args: None)
        monkeypatch.setattr(TurboLayer, "appends_in_place", lambda layer: layer.seen > 0)
    return made


def ragged(lengths: list[int] | None = None) -> dict[str, Any]:
    rows = LENGTHS if lengths is None else lengths
    return left_padded([prompts(1, length, seed=row)[0] for row, length in enumerate(rows)])


def answer(model: Any, config: TurboConfig, **options: Any) -> Tensor:
    """The tokens of one patched `generate`, sampled from one seed."""
    return answer_and_report(model, config, None, **options)[0]


def answer_and_report(
    model: Any, config: TurboConfig, calibration: Calibration | None, **options: Any
) -> tuple[Tensor, Report]:
    inputs = {name: x.to(model.device) if isinstance(x, Tensor) else x for name, x in options.items()}
    with turbo_hf.patch(model, config, calibration=calibration) as handle:
        torch.manual_seed(3)
        tokens = torch.as_tensor(model.generate(**{"max_new_tokens": NEW, "do_sample": False, **inputs}))
        return tokens, handle.report()


# --- the same tokens -----------------------------------------------------------------------------------------------

CALLS: list[Any] = [
    pytest.param({}, id="greedy"),
    pytest.param({"do_sample": True, "temperature": 2.0}, id="sampling"),
    pytest.param({"do_sample": True, "num_return_sequences": 2}, id="sequences"),
    pytest.param({"eos_token_id": 7, "pad_token_id": 0}, id="ends"),
    pytest.param({"prefill_chunk_size": 17}, id="chunked-prompt"),
    pytest.param({"repetition_penalty": 1.3}, id="processor"),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("lengths", [LENGTHS, [40]], ids=["ragged", "one-row"])
def test_tokens_are_those_without_graphs(call: dict[str, Any], lengths: list[int], runners: list[StepRunner]) -> None:
    model = tiny_llama().to("cuda" if torch.cuda.is_available() else "cpu")
    want = answer(model, PLAIN, **ragged(lengths), **call)
    assert not runners
    got = answer(model, SMALL, **ragged(lengths), **call)
    assert torch.equal(got, want)
    # a prompt in chunks asks for a runner of its own
    assert 1 <= sum(runner.captures for runner in runners) <= 4


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(TurboConfig(bits=8, block_size=32), id="8bit"),
        pytest.param(TurboConfig(low_heads=0.5, block_size=32), id="mixed"),
        pytest.param(TurboConfig(attention="fp16", block_size=32), id="fp16"),
        pytest.param(TurboConfig(buffer_scale="universal", block_size=32), id="universal"),
        pytest.param(TurboConfig(sas=True, sas_threshold=-7.0, block_size=32), id="sas"),
    ],
)
def test_tokens_of_other_configs(config: TurboConfig, runners: list[StepRunner]) -> None:
    model = tiny_llama().to("cuda" if torch.cuda.is_available() else "cpu")
    want = answer(model, replace(config, cuda_graphs=False), **ragged())
    assert torch.equal(answer(model, config, **ragged()), want)
    assert runners[-1].captures >= 1


def test_tokens_with_windows(runners: list[StepRunner]) -> None:
    model = tiny_mistral(40).to("cuda" if torch.cuda.is_available() else "cpu")
    want = answer(model, PLAIN, max_new_tokens=150, **ragged())
    assert torch.equal(answer(model, SMALL, max_new_tokens=150, **ragged()), want)
    assert runners[-1].captures >= 1


def an_index(model: Any) -> Calibration:
    """Random centroids and query classifiers of 16 buckets for a tiny model."""
    heads, dim = model.config.num_key_value_heads, SHAPE["head_dim"]
    shapes = {"weight_1": (dim, 32), "bias_1": (32,), "weight_2": (32, 16), "bias_2": (16,)}
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(heads, *shape, generator=generator), dim=-1)

    layers = []
    for index in range(model.config.num_hidden_layers):
        classifier = {name: drawn(*shape) for name, shape in shapes.items()}
        layers.append(LayerCalibration(index, {}, drawn(16, dim), classifier, rotated_centroids=drawn(16, dim)))
    return Calibration(fingerprint(model, Checkpoint("")), {}, tuple(layers), 0)


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param({"selector": "saap", "probes": 3}, id="saap"),
        pytest.param({"selector": "saap", "mass": 0.5, "most_probes": 5}, id="saap-mass"),
        pytest.param({"selector": "saap", "probes": 3, "dense_layers": (0,)}, id="saap-dense-layer"),
        pytest.param({"selector": "kmeans", "probes": 3}, id="kmeans"),
        pytest.param({"selector": "kmeans-rotated", "probes": 3}, id="kmeans-rotated"),
        pytest.param({"selector": "window"}, id="window"),
        pytest.param({"selector": "full"}, id="full"),
    ],
)
@pytest.mark.parametrize("lengths", [LENGTHS, [40]], ids=["ragged", "one-row"])
def test_tokens_and_counts_of_sparse_layers(
    lengths: list[int], choice: dict[str, Any], runners: list[StepRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    # pages of a single block are reserved at a time, and so steps captured again
    monkeypatch.setattr(steps, "AHEAD", 1)
    model = tiny_llama().to("cuda" if torch.cuda.is_available() else "cpu")
    plain = replace(PLAIN, sparse=SparseConfig(**{"window_tokens": 12, "dense_layers": (), **choice}))
    index = an_index(model)
    want, counted = answer_and_report(model, plain, index, **ragged(lengths))
    assert not runners
    got, report = answer_and_report(model, replace(plain, cuda_graphs="auto"), index, **ragged(lengths))
    assert torch.equal(got, want)
    assert runners[-1].captures >= 2
    assert "decode steps: CUDA graphs" in str(report)
    assert report.selectivity == counted.selectivity
    for read in report.selectivity:
        # 74 steps after the prompt, 2 KV heads
        assert read.there == 2 * sum(length + step for length in lengths for step in range(1, NEW))
        assert read.read == read.there if choice["selector"] == "full" else 0 < read.read < read.there


def test_passes_between_the_steps_of_sparse_layers(runners: list[StepRunner]) -> None:
    model = tiny_llama().to("cuda" if torch.cuda.is_available() else "cpu")
    plain = replace(PLAIN, sparse=SparseConfig(selector="saap", probes=3, window_tokens=12, dense_layers=()))
    index, found = an_index(model), []
    for config in (plain, replace(plain, cuda_graphs="auto")):
        with turbo_hf.patch(model, config, calibration=index) as handle:
            cache, said = handle.new_cache(), prompts(1, 40).to(model.device)
            for turn in range(3):
                said = torch.cat((said, prompts(1, 5, seed=turn).to(model.device)), 1)
                said = model.generate(said, past_key_values=cache, max_new_tokens=40, do_sample=False)
                cache.crop(-3)
                said = said[:, :-3]
            layers = cache.turbo_layers()
            buckets = [layer.bucket_index.buckets[..., : layer.lengths()[0]].tolist() for layer in layers]
            found.append((said.tolist(), buckets, handle.report().selectivity))
    assert found[0] == found[1]
    assert [runner.captures >= 1 for runner in runners] == [True] * 3


def test_an_answer_that_ends_early_leaves_nothing_reserved_and_nothing_full(runners: list[StepRunner]) -> None:
    model = tiny_llama().to("cuda" if torch.cuda.is_available() else "cpu")
    wide: list[int] = []

    def talk(config: TurboConfig) -> tuple[list[int], list[Any]]:
        held: list[Any] = []
        said = {name: x.to(model.device) for name, x in ragged([150, 100]).items()}
        with turbo_hf.patch(model, config) as handle:
            cache = handle.new_cache()

            def at(end: int) -> Callable[[Tensor, Tensor], Tensor]:
                def enough(ids: Tensor, scores: Tensor) -> Tensor:
                    wide.append(max(layer.pool.pages for layer in cache.turbo_layers()))
                    return torch.full((len(ids),), ids.shape[1] >= end, device=ids.device)

                return enough

            # the first ends where a row fills a block
            for end in (161, 169):
                options: dict[str, Any] = {"max_new_tokens": 400, "do_sample": False, "stopping_criteria": [at(end)]}
                ids = torch.as_tensor(model.generate(**said, past_key_values=cache, **options))
                new = ids.shape[1] - said["attention_mask"].shape[1]
                mask = torch.nn.functional.pad(said["attention_mask"], (0, new), value=1)
                said = {"input_ids": ids, "attention_mask": mask}
                runners.clear()
                # the stand-in for a graph holds its runner
                gc.collect()
                for layer in cache.turbo_layers():
                    assert layer.pool.pages == sum(layer.pool.sealed)
                    held.append((layer.pool.sealed, layer.buffer.length))
        return ids.flatten().tolist(), held

    assert talk(SMALL) == talk(PLAIN)
    assert max(wide) > 6 + 4 + 8


def test_turns_on_one_cache(runners: list[StepRunner]) -> None:
    model = tiny_llama().to("cuda" if torch.cuda.is_available() else "cpu")

    def talk(config: TurboConfig) -> list[int]:
        with turbo_hf.patch(model, config) as handle:
            cache, said = handle.new_cache(), prompts(1, 40).to(model.device)
            for turn in range(3):
                more = prompts(1, 5, seed=turn).to(model.device)
                said = torch.cat((said, more), 1)
                said = model.generate(said, past_key_values=cache, max_new_tokens=40, do_sample=False)
            tokens: list[int] = said[0].tolist()
            return tokens

    want = talk(PLAIN)
    assert talk(SMALL) == want
    assert len(runners) == 3
    assert all(runner.captures >= 1 for runner in runners)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param({"num_beams": 2}, id="beams"),
        pytest.param({"disable_compile": True}, id="disable_compile"),
        pytest.param({"use_cache": False}, id="no-cache"),
        pytest.param({"return_dict_in_generate": True, "output_hidden_states": True}, id="hidden-states"),
        pytest.param({"cache_implementation": "dynamic"}, id="other-cache"),
    ],
)
def test_calls_that_run_as_they_did(call: dict[str, Any], runners: list[StepRunner]) -> None:
    model = tiny_llama().to("cuda" if torch.cuda.is_available() else "cpu")
    results = []
    for config in (PLAIN, SMALL):
        with turbo_hf.patch(model, config), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ids = prompts(1, 40).to(model.device)
            result = model.generate(ids, max_new_tokens=10, do_sample=False, **call)
        results.append(result if isinstance(result, Tensor) else result.sequences)
    assert torch.equal(*results)
    assert all(runner.captures == 0 for runner in runners)


# --- what decides --------------------------------------------------------------------------------------------------


class Bench:
    """A patched model, a cache with a prompt in it, and a runner over a stand-in."""

    def __init__(self, **options: Any):
        self.model = tiny_llama()
        self.handle = turbo_hf.patch(self.model, SMALL)
        self.cache = self.handle.new_cache()
        self.device = Again(**options)
        self.runner = StepRunner(self.model, None, self.device)
        self.mask = torch.ones(2, 40, dtype=torch.long)
        self.pass_(prompts(2, 40))

    @torch.no_grad()
    def pass_(self, ids: Tensor, call: Any = None, **options: Any) -> Any:
        """One pass, of which the runner or the model is told what `generate` tells."""
        at = self.cache.get_seq_length() + torch.arange(ids.shape[1]).expand(len(ids), -1)
        self.mask = torch.ones(len(ids), self.cache.get_seq_length() + ids.shape[1], dtype=torch.long)
        known = {"input_ids": ids, "position_ids": at, "attention_mask": self.mask, "use_cache": True}
        return (call or self.model)(**{**known, "past_key_values": self.cache, "return_dict": True, **options})

    def step(self, **options: Any) -> Any:
        """One new token a row, through the runner."""
        return self.pass_(torch.full((2, 1), 5), self.runner, **options)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Steps that warmed, captures, replays."""
        return self.device.warmed, self.device.captured, self.device.replayed


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(TurboLayer, "appends_in_place", lambda layer: layer.seen > 0)
    bench = Bench()
    yield bench
    bench.handle.remove()


def test_one_step_warms_the_next_is_captured_all_others_are_replayed(bench: Bench) -> None:
    outputs = [bench.step() for _ in range(6)]
    assert bench.counts == (1, 1, 5)
    assert all(type(out) is type(outputs[0]) for out in outputs)
    assert outputs[0].past_key_values is bench.cache
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


def test_passes_of_several_tokens_go_to_the_model(bench: Bench) -> None:
    bench.pass_(prompts(2, 3), bench.runner)
    assert bench.counts == (0, 0, 0)


def test_gradients_go_to_the_model(bench: Bench) -> None:
    known = {"input_ids": torch.ones(2, 1, dtype=torch.long), "position_ids": torch.full((2, 1), 40)}
    out = bench.runner(**known, past_key_values=bench.cache)
    with pytest.raises(RuntimeError, match="has no gradient"):
        out.logits.sum().backward()
    assert bench.counts == (0, 0, 0)


def test_what_happens_between_steps_begins_anew_and_waits_longer(bench: Bench) -> None:
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


def test_a_changed_mask_is_refused_as_ever(bench: Bench) -> None:
    bench.step()
    changed = torch.ones(2, 42, dtype=torch.long)
    changed[0, 3] = 0
    with pytest.raises(ValueError, match="differs from the one under which the cached tokens were stored"):
        bench.step(attention_mask=changed)


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
    for _ in range(20):
        bench.step()
    with pytest.raises(ValueError, match="layer 0: keys or values hold NaN or Inf"):
        bench.step()
    assert bench.cache.turbo_layers()[0].pool.sealed == [1, 1]


@pytest.mark.parametrize("before", [0, 4], ids=["warming", "replaying"])
def test_after_a_step_that_was_broken_off_the_next_is_refused(bench: Bench, before: int) -> None:
    for _ in range(before):
        bench.step()
    hook = bench.model.model.layers[1].self_attn.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.step()
    hook.remove()
    counts = bench.counts
    with pytest.raises(ValueError, match=f"hold {40 + before} and {41 + before} tokens: an earlier pass ended"):
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
    monkeypatch.setattr(TurboLayer, "appends_in_place", lambda layer: layer.seen > 0)
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
    demanding.runner = StepRunner(demanding.model, None, demanding.device, demanded=True)
    demanding.step()
    with pytest.raises(Unsupported, match="cannot be captured"):
        demanding.step()


@pytest.mark.parametrize("when", ["sys.is_finalizing", "turbo_hf.graphs._capturing"])
def test_where_nothing_can_run_nothing_is_closed(when: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.step()
    steps = bench.runner._steps
    assert steps is not None
    closed: list[Any] = []
    monkeypatch.setattr(steps, "close", lambda: closed.append(steps))
    monkeypatch.setattr(when, lambda *args: True)
    bench.runner.__del__()
    assert not closed


# --- patch and report ----------------------------------------------------------------------------------------------


def test_remove_puts_back_what_was_there() -> None:
    model = tiny_llama()
    before = dict(vars(model))
    handle = turbo_hf.patch(model, SMALL)
    assert {"get_compiled_call", "_valid_auto_compile_criteria"} <= set(vars(model))
    handle.remove()
    assert {name: id(x) for name, x in vars(model).items()} == {name: id(x) for name, x in before.items()}
    with turbo_hf.patch(model, PLAIN):
        assert "get_compiled_call" not in vars(model)


def test_a_copy_of_a_patched_model_has_runners_of_its_own(runners: list[StepRunner]) -> None:
    model = tiny_llama().to("cuda" if torch.cuda.is_available() else "cpu")
    with turbo_hf.patch(model, SMALL):
        twin = copy.deepcopy(model)
        ids = prompts(1, 40).to(model.device)
        want = model.generate(ids, max_new_tokens=10, do_sample=False)
    assert torch.equal(twin.generate(ids, max_new_tokens=10, do_sample=False), want)
    assert [runner._model for runner in runners] == [model, twin]


def test_a_hook_of_the_user_is_called_in_every_step(runners: list[StepRunner]) -> None:
    model = tiny_llama().to("cuda" if torch.cuda.is_available() else "cpu")
    called: list[int] = []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *args: called.append(1))
    with turbo_hf.patch(model, SMALL):
        model.generate(prompts(1, 40).to(model.device), max_new_tokens=10, do_sample=False)
    hook.remove()
    assert len(called) == 10
    assert not runners
    with turbo_hf.patch(model, TurboConfig(cuda_graphs=True)):
        hook = model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
        with pytest.raises(Unsupported, match=r"cuda_graphs=True: model.layers.0.mlp has hooks"):
            model.generate(prompts(1, 40).to(model.device), max_new_tokens=10)
        hook.remove()
        # looked for in each call: also in a module that has come since
        model.generate(prompts(1, 40).to(model.device), max_new_tokens=10)
        assert len(runners) == 1
        model.model.layers[1].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU())
        model.model.layers[1].mlp.act_fn[0].register_forward_hook(lambda *args: None)
        # a module that holds what holds it
        model.model.layers[1].mlp.act_fn.add_module("back", model.model.layers[1].mlp)
        with pytest.raises(Unsupported, match=r"cuda_graphs=True: model.layers.1.mlp.act_fn.0 has hooks"):
            model.generate(prompts(1, 40).to(model.device), max_new_tokens=10)


def test_a_cache_that_can_never_be_replayed_is_an_error_where_graphs_are_demanded(runners: list[StepRunner]) -> None:
    model = tiny_llama().double().to("cuda" if torch.cuda.is_available() else "cpu")
    batch = {"input_ids": prompts(1, 40).to(model.device), "max_new_tokens": 5}
    demanded = pytest.raises(Unsupported, match=r"cuda_graphs=True: .*(float64 has no kernel|runs without kernels)")
    with turbo_hf.patch(model, TurboConfig(cuda_graphs=True)), demanded:
        model.generate(**batch)
    with turbo_hf.patch(model, TurboConfig(cuda_graphs="auto")):
        model.generate(**batch)
    assert [runner.captures for runner in runners] == [0, 0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_all_is_as_before() -> None:
    model = tiny_llama()
    with turbo_hf.patch(model, SMALL) as handle:
        assert "decode steps: CUDA graphs, once the model is on a GPU" in str(handle.report())
        model.generate(prompts(1, 40), max_new_tokens=3)
    demanded = pytest.raises(Unsupported, match="cuda_graphs=True: the model is on cpu")
    with turbo_hf.patch(model, TurboConfig(cuda_graphs=True)), demanded:
        model.generate(prompts(1, 40), max_new_tokens=3)


@pytest.mark.parametrize(
    ("config", "dense", "known", "words"),
    [
        pytest.param(SMALL, [], True, "CUDA graphs", id="auto"),
        pytest.param(PLAIN, [], True, "no CUDA graphs (cuda_graphs=False)", id="off"),
        pytest.param(SMALL, [3], True, "no CUDA graphs (layer 3 is dense)", id="dense"),
        pytest.param(SMALL, [], False, "no CUDA graphs (family without a test", id="family"),
        pytest.param(TurboConfig(cuda_graphs=True), [], False, "CUDA graphs", id="demanded"),
        pytest.param(TurboConfig(sas=True), [], True, "no CUDA graphs (the SAS threshold", id="sas"),
        pytest.param(
            TurboConfig(sparse=SparseConfig(independent=True)),
            [],
            True,
            "no CUDA graphs (SparseConfig.independent has no kernel)",
            id="independent",
        ),
        pytest.param(
            TurboConfig(backend="reference"),
            [],
            True,
            'no CUDA graphs (backend "ref',
            id="reference",
        ),
    ],
)
def test_the_report_says_how_steps_run(config: TurboConfig, dense: list[int], known: bool, words: str) -> None:
    text, reason = describe(config, dense, known, cuda=True)
    assert text.startswith(f"decode steps: {words}")
    assert (reason is None) == (not words.startswith("no") or config.cuda_graphs is False)


@pytest.mark.parametrize("selector", ["lsh-reformer", "lsh-gray", "lsh-tables", "random"])
def test_selectors_that_draw_on_the_host_run_without(selector: Any, runners: list[StepRunner]) -> None:
    model = tiny_llama().to("cuda" if torch.cuda.is_available() else "cpu")
    probes = None if selector == "lsh-tables" else 3
    sparse = replace(SMALL, sparse=SparseConfig(selector=selector, window_tokens=16, buckets=16, probes=probes))
    reason = f'selector "{selector}" draws numbers on the host'
    with turbo_hf.patch(model, sparse) as handle:
        assert f"decode steps: no CUDA graphs ({reason})" in str(handle.report())
        assert not [name for name in (patching.MAY_COMPILE, patching.COMPILED) if name in model.__dict__]
    assert torch.equal(answer(model, sparse, **ragged()), answer(model, replace(sparse, cuda_graphs=False), **ragged()))
    assert not runners
    with pytest.raises(Unsupported, match=f"cuda_graphs=True: {reason}"):
        turbo_hf.patch(model, replace(sparse, cuda_graphs=True))


def test_a_runner_leaves_a_sparse_cache_to_the_model(runners: list[StepRunner]) -> None:
    """A runner that was made before the cache was chosen."""
    model = tiny_llama()
    with turbo_hf.patch(model, SMALL):
        chosen = SparseConfig(selector="lsh-reformer", window_tokens=16, buckets=16, probes=3)
        cache = TurboCache(model.config, TurboConfig(sparse=chosen), selectors={1: Reformer(chosen, 1)})
        model.generate(prompts(1, 40), past_key_values=cache, max_new_tokens=6)
    assert [runner.captures for runner in runners] == [0]


def test_what_cannot_be_is_refused_where_it_was_demanded() -> None:
    model = tiny_llama()
    with pytest.raises(Unsupported, match="cuda_graphs=True: layer 0 is dense"):
        turbo_hf.patch(model, TurboConfig(cuda_graphs=True, dense_layers=(0,)))
    # a patch that was refused has left nothing behind
    turbo_hf.patch(model, SMALL).remove()


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
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU replays")
def test_launches_of_a_graph_are_those_of_the_steps_it_stands_for(
    selector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[Any] = []
    sparse_kernels = [(launch_sparse, name) for name in vars(launch_sparse) if name.endswith("_kernel")]
    for module, name in ((launch_decode, "decode_kernel"), (launch_store, "append_step_kernel"), *sparse_kernels):
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), notes))
    model = tiny_llama(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    probes = None if selector == "window" else 3
    sparse = selector and SparseConfig(selector=selector, probes=probes, window_tokens=12, dense_layers=())
    captured: list[int] = []

    class Noting(Again):
        def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
            captured.append(len(notes))
            return super().capture(step)

    tokens = []
    for graph in (False, True):
        with (
            turbo_hf.patch(
                model, TurboConfig(block_size=32, backend="triton", sparse=sparse), calibration=an_index(model)
            ) as handle,
            torch.inference_mode(),
        ):
            cache, ids = handle.new_cache(), ragged([66, 61])
            at = (ids["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            mask = ids["attention_mask"]
            out = model(**ids, position_ids=at, past_key_values=cache, use_cache=True)
            runner = StepRunner(model, None, Noting())
            found = []
            notes.clear()
            for _ in range(8):
                new = out.logits[:, -1:].argmax(-1)
                found.append(new)
                mask, at = torch.nn.functional.pad(mask, (0, 1), value=1), at[:, -1:] + 1
                known = {"input_ids": new, "attention_mask": mask, "position_ids": at, "past_key_values": cache}
                out = (runner if graph else model)(**known, use_cache=True, return_dict=True)
            tokens.append(torch.cat(found, 1))
    assert torch.equal(*tokens)
    # the second row seals in the fourth step
    assert cache.turbo_layers()[0].lengths() == [74, 69]
    assert runner.captures == 1
    each = (len(notes) - captured[0]) // 7
    steps = [notes[n : n + each] for n in range(captured[0], len(notes), each)]
    assert len(steps) == 7
    assert each >= 2
    assert all(step == steps[0] for step in steps)


# --- on a GPU ------------------------------------------------------------------------------------------------------


def half(**options: Any) -> Any:
    return tiny_llama(attn_implementation="sdpa", **options).to("cuda", torch.bfloat16)


SAAP = SparseConfig(selector="saap", probes=3, window_tokens=12, dense_layers=())
SPARSE = [
    pytest.param(SAAP, id="saap"),
    pytest.param(replace(SAAP, selector="kmeans"), id="kmeans"),
    pytest.param(replace(SAAP, dense_layers=(0,)), id="dense-layer"),
]


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("sparse", [pytest.param(None, id="dense"), *SPARSE])
def test_a_replayed_step_waits_for_nothing_but_the_mask(sparse: Any, runners: list[StepRunner]) -> None:
    model = half()
    config = replace(SMALL, sparse=sparse)
    with turbo_hf.patch(model, config, calibration=an_index(model)) as handle, torch.no_grad():
        cache = handle.new_cache()
        ids = prompts(3, 40).cuda()
        model(ids, past_key_values=cache, use_cache=True)
        runner = StepRunner(model, None, CudaDevice(model.device))
        new = ids[:, :1].contiguous()
        at = torch.full((3, 1), 40, device="cuda")

        def step() -> None:
            runner(input_ids=new, position_ids=at, past_key_values=cache, use_cache=True, return_dict=True)

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
        assert sealed == 2
        assert runner.captures == 1
        for _ in range(300):
            step()
        # pages were reserved again
        assert runner.captures == 2
    assert cache.get_seq_length() == 404


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("rows", [1, 5])
def test_on_a_gpu_many_steps_take_few_captures(rows: int, runners: list[StepRunner]) -> None:
    model = half()
    batch = ragged([40 + 9 * row for row in range(rows)])
    want = answer(model, PLAIN, max_new_tokens=700, **batch)
    assert torch.equal(answer(model, SMALL, max_new_tokens=700, **batch), want)
    assert runners[-1].captures <= 8


@pytest.mark.gpu
@CUDA
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
@CUDA
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
@CUDA
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
@CUDA
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


class Pretended(CudaDevice):
    """A device whose captures fail with `errors`, one after the other, and that notes what is done."""

    def __init__(self, errors: list[BaseException]) -> None:
        self.done: list[str] = []
        self.errors = errors
        self._anchor = None

    def _cast_anchor(self) -> None:
        self.done.append("anchor")
        self._anchor = lambda: None

    def _end(self) -> None:
        self.done.append("end")
        self._anchor = None

    def _captured(self, step: Callable[[], Any]) -> Callable[[], Any]:
        self.done.append("capture")
        if self.errors:
            raise self.errors.pop(0)
        return step


FULL_MEMORY = [torch.OutOfMemoryError("full"), RuntimeError("CUDA error: out of memory")]


@pytest.mark.parametrize("error", FULL_MEMORY)
def test_a_capture_without_memory_is_tried_again_with_what_torch_keeps(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    device = Pretended(list(FULL_MEMORY))
    with pytest.raises(RuntimeError, match="out of memory"):
        device.capture(lambda: 3)
    assert device.done == ["anchor", "capture", "end", "anchor", "capture", "end", "anchor"]
    # and the next one begins anew
    assert device.capture(lambda: 4)() == 4
