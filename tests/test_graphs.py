"""Replayed steps give the tokens of steps that are launched; `patch` and the report tell of them."""

import copy
import gc
import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from choices import flat_config
from graphs_support import LENGTHS, NEW, PLAIN, SMALL, an_index, answer, answer_and_report, ragged
from models import left_padded, prompts, tiny_llama, tiny_mistral
from tiny_families import build
from torch import Tensor
from transformers.models.llama import modeling_llama

import turbo_hf
from turbo_hf import SparseConfig, TurboConfig
from turbo_hf.attention import turbo_attention
from turbo_hf.config.turbo_config import with_options
from turbo_hf.errors import Unsupported
from turbo_hf.graphs import replayable_steps as steps
from turbo_hf.graphs import why_not
from turbo_hf.graphs.step_runner import StepRunner
from turbo_hf.graphs.why_not import describe
from turbo_hf.layout import FIRST
from turbo_hf.models.versions import CACHE

# --- the same tokens -----------------------------------------------------------------------------------------------
CALLS: list[tuple[dict[str, Any], list[int]]] = [
    ({}, LENGTHS),
    ({}, [60]),
    ({"do_sample": True, "temperature": 2.0}, LENGTHS),
    ({"do_sample": True, "num_return_sequences": 2}, LENGTHS),
    ({"eos_token_id": 7, "pad_token_id": 0}, LENGTHS),
    ({"prefill_chunk_size": 17}, LENGTHS),
    ({"prefill_chunk_size": 17}, [60]),
    ({"repetition_penalty": 1.3}, LENGTHS),
    # what stop strings bring along
    ({"tokenizer": object()}, LENGTHS),
]


LONGER = [FIRST + length for length in LENGTHS]
"""Every row soon has a block, which ranks its heads."""
BEAMS: list[dict[str, Any]] = [
    {"num_beams": 3, "num_return_sequences": 2},
    {"num_beams": 3, "do_sample": True, "temperature": 3.0},
    {"num_beams": 2, "prefill_chunk_size": 17},
]


@pytest.mark.parametrize(
    "config",
    [SMALL, with_options(SMALL, low_heads=0.5, low_bits=2), with_options(SMALL, bits=2)],
)
@pytest.mark.parametrize(("call", "lengths"), [*zip(BEAMS, (LONGER, [60], LONGER), strict=True)])
def test_beams_are_reordered_between_replays(
    call: dict[str, Any], lengths: list[int], config: TurboConfig, runners: list[StepRunner], device: torch.device
) -> None:
    for model in (tiny_llama().to(device), tiny_mistral(40).to(device)):
        want = answer(model, replace(config, cuda_graphs=False), **ragged(lengths), **call)
        assert not runners
        assert torch.equal(answer(model, config, **ragged(lengths), **call), want)
        # also the runner that a prompt in chunks has asked for
        assert 1 <= runners[0].captures <= 3
        runners.clear()


@pytest.mark.parametrize(
    "family",
    ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "bamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe",
     "nemotron_h", "olmo_hybrid", "kimi_linear", "bailing_hybrid"],
)  # fmt: skip
def test_layers_with_a_state_of_fixed_size(family: str, runners: list[StepRunner], device: torch.device) -> None:
    model: Any = build(family)
    model.to(device)
    inputs: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}
    asked = [left_padded([prompts(1, n)[0] % 40 + 10 for n in (length, 33)]) for length in (60, 45)]
    want = [answer(model, PLAIN, **x, **inputs) for x in asked]
    assert not runners
    with warnings.catch_warnings():
        # that a step cannot be captured
        warnings.filterwarnings("error", "turbo_hf: this model's decode step")
        for x, tokens in zip(asked, want, strict=True):
            assert torch.equal(answer(model, SMALL, **x, **inputs), tokens)
            assert torch.equal(
                answer(model, SMALL, **x, **inputs, num_beams=2), answer(model, PLAIN, **x, **inputs, num_beams=2)
            )
    if device.type == "cpu":
        assert runners[0].captures >= 1


def test_beams_of_layers_without_buckets(runners: list[StepRunner], device: torch.device) -> None:
    model = tiny_llama().to(device)
    sparse = SparseConfig(selector="window", window_tokens=12, read_all_layers=())
    inputs = {**ragged([70, 40]), "num_beams": 2, "max_new_tokens": 30}
    want = answer(model, replace(PLAIN, sparse=sparse), **inputs)
    assert torch.equal(answer(model, replace(SMALL, sparse=sparse), **inputs), want)
    assert runners[-1].captures >= 1


def test_beams_under_another_wrapper_of_forward(runners: list[StepRunner]) -> None:
    model = tiny_llama()
    want = answer(model, PLAIN, **ragged(), num_beams=2)
    with turbo_hf.patch(model, SMALL):
        inner = model.forward

        def forward(
            input_ids: Any, attention_mask: Any, position_ids: Any, use_cache: Any, logits_to_keep: Any,
            return_dict: Any, cache: Any = None, past_key_values: Any = None,
        ) -> Any:  # fmt: skip
            given = locals()
            names = [name for name in inspect.signature(forward).parameters if given[name] is not None]
            return inner(**{name: given[name] for name in names})

        model.forward = forward
        got = model.generate(**ragged(), num_beams=2, max_new_tokens=NEW, do_sample=False)
    model.__dict__.pop("forward", None)
    assert torch.equal(got, want)
    assert not runners


@pytest.mark.parametrize(("call", "lengths"), CALLS)
def test_tokens_are_those_without_graphs(
    call: dict[str, Any], lengths: list[int], runners: list[StepRunner], device: torch.device
) -> None:
    model = tiny_llama().to(device)
    want = answer(model, PLAIN, **ragged(lengths), **call)
    assert not runners
    got = answer(model, SMALL, **ragged(lengths), **call)
    assert torch.equal(got, want)
    # a prompt in chunks asks for a runner of its own
    assert 1 <= sum(runner.captures for runner in runners) <= 4


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(flat_config(bits=8, block_size=32), id="8bit"),
        pytest.param(flat_config(low_heads=0.5, block_size=32), id="mixed"),
        pytest.param(flat_config(value_bits=2, block_size=32), id="k4v2"),
        pytest.param(flat_config(value_bits=2, block_size=32, recent_tokens=32), id="recent"),
        pytest.param(flat_config(layer_bits=(2, (8, 4)), block_size=32, recent_tokens=32), id="depths"),
        pytest.param(flat_config(attention="native", block_size=32), id="native"),
        pytest.param(flat_config(sas=True, sas_threshold=-7.0, block_size=32), id="sas"),
        pytest.param(flat_config(sas=True, block_size=32), id="sas-by-length"),
        pytest.param(flat_config(bits=16, block_size=32), id="16bit"),
    ],
)
def test_tokens_of_other_configs(config: TurboConfig, runners: list[StepRunner], device: torch.device) -> None:
    model = tiny_llama().to(device)
    want = answer(model, replace(config, cuda_graphs=False), **ragged(LONGER))
    assert torch.equal(answer(model, config, **ragged(LONGER)), want)
    assert runners[-1].captures >= 1


def test_a_threshold_that_falls_is_captured_anew(
    runners: list[StepRunner], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    # 1,024 tokens take too long
    monkeypatch.setattr(turbo_attention, "SHORT", 64)
    model, config = tiny_llama().to(device), flat_config(sas=True, block_size=32)
    want = answer(model, replace(config, cuda_graphs=False), **ragged([50]))
    assert torch.equal(answer(model, config, **ragged([50])), want)
    # the plan of a GPU's attention is another one from the first sealed block on
    assert runners[-1].captures == (3 if device.type == "cuda" else 2)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_tokens_under_autocast(narrow: torch.dtype, runners: list[StepRunner], device: torch.device) -> None:
    model, found = tiny_llama().to(device), []
    for config in (PLAIN, SMALL):
        with torch.autocast(device.type, narrow):
            found.append(answer(model, config, **ragged()))
    assert torch.equal(*found)
    assert runners[-1].captures >= 1


def test_autocast_that_ends_midway(runners: list[StepRunner], device: torch.device) -> None:
    model, found = tiny_llama().to(device), []

    class Ends:
        """Switches autocast off after 20 tokens."""

        def __init__(self) -> None:
            self.left = 20

        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            self.left -= 1
            torch.set_autocast_enabled(device.type, self.left > 0)
            return scores

    for config in (PLAIN, SMALL):
        with torch.autocast(device.type, torch.bfloat16):
            found.append(answer(model, config, **ragged([60]), logits_processor=[Ends()]))
    assert torch.equal(*found)
    assert runners[-1].captures >= 2


@pytest.mark.parametrize(("dense", "call"), [((0,), {}), ((1, 2), {}), ((0,), {"num_beams": 2})])
def test_tokens_beside_layers_that_are_not_rounded(
    dense: tuple[int, ...], call: dict[str, Any], runners: list[StepRunner], device: torch.device
) -> None:
    config = replace(SMALL, dense_layers=dense)
    for model, lengths in ((tiny_llama(num_hidden_layers=3), [30, 11]), (tiny_mistral(24, num_hidden_layers=3), [33])):
        inputs = {**ragged(lengths), "max_new_tokens": 12, **call}
        want = answer(model.to(device), replace(config, cuda_graphs=False), **inputs)
        assert torch.equal(answer(model, config, **inputs), want)
        assert runners[-1].captures >= 1


@pytest.mark.parametrize(
    ("choice", "lengths"),
    [
        ({"selector": "saap", "probes": 3}, LENGTHS),
        ({"selector": "saap", "probes": 3}, [60]),
        ({"selector": "saap", "probes": 3, "read_all_layers": (0,)}, LENGTHS),
        ({"selector": "kmeans", "probes": 3}, LENGTHS),
        ({"selector": "kmeans-rotated", "probes": 3}, LENGTHS),
        ({"selector": "window"}, LENGTHS),
        ({"selector": "full"}, LENGTHS),
    ],
)
def test_tokens_and_counts_of_sparse_layers(
    choice: dict[str, Any], lengths: list[int], runners: list[StepRunner], monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:  # fmt: skip
    # pages of a single block are reserved at a time, and so steps captured again
    monkeypatch.setattr(steps, "AHEAD", 1)
    model = tiny_llama().to(device)
    plain = replace(PLAIN, sparse=SparseConfig(**{"window_tokens": 12, "read_all_layers": (), **choice}))
    index = an_index(model)
    want, counted = answer_and_report(model, plain, index, **ragged(lengths))
    assert not runners
    got, report = answer_and_report(model, replace(plain, cuda_graphs="auto"), index, **ragged(lengths))
    assert torch.equal(got, want)
    assert runners[-1].captures >= 2
    assert "decode steps: CUDA graphs" in str(report)
    assert report.selectivity == counted.selectivity
    for read in report.selectivity:
        # the steps after the prompt, 2 KV heads
        assert read.there == 2 * sum(length + step for length in lengths for step in range(1, NEW))
        assert read.read == read.there if choice["selector"] == "full" else 0 < read.read < read.there


SPARSE = SparseConfig(probes=3, window_tokens=12, read_all_layers=())


@pytest.mark.parametrize("sparse", [None, SPARSE])
def test_passes_between_steps(sparse: Any, runners: list[StepRunner], device: torch.device) -> None:
    model = tiny_llama().to(device)
    plain = replace(PLAIN, sparse=sparse)
    index, found = an_index(model), []
    for config in (plain, replace(plain, cuda_graphs="auto")):
        with turbo_hf.patch(model, config, calibration=index if sparse else None) as handle:
            cache, said = handle.new_cache(), prompts(1, 40).to(model.device)
            for turn in range(3):
                said = torch.cat((said, prompts(1, 5, seed=turn).to(model.device)), 1)
                # a token may be the one that pads
                mask = torch.ones_like(said)
                said = model.generate(said, **{CACHE: cache}, attention_mask=mask, max_new_tokens=40, do_sample=False)
                cache.crop(-3)
                said = said[:, :-3]
            layers = cache.turbo_layers()
            buckets = [layer.bucket_index.buckets[..., : layer.lengths()[0]].tolist() for layer in layers if sparse]
            found.append((said.tolist(), buckets, handle.report().selectivity))
    assert found[0] == found[1]
    assert [runner.captures >= 1 for runner in runners] == [True] * 3


def test_an_answer_that_ends_early_leaves_nothing_reserved(runners: list[StepRunner], device: torch.device) -> None:
    model = tiny_llama().to(device)
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
                ids = torch.as_tensor(model.generate(**said, **{CACHE: cache}, **options))
                new = ids.shape[1] - said["attention_mask"].shape[1]
                mask = torch.nn.functional.pad(said["attention_mask"], (0, new), value=1)
                said = {"input_ids": ids, "attention_mask": mask}
                runners.clear()
                # the stand-in for a graph holds its runner
                gc.collect()
                for layer in cache.turbo_layers():
                    assert layer.pool.pages == sum(layer.state.sealed)
                    held.append((layer.state.sealed, layer.state.open))
        return ids.flatten().tolist(), held

    assert talk(SMALL) == talk(PLAIN)
    assert max(wide) > 6 + 4 + 8


@pytest.mark.parametrize(
    "call",
    [
        pytest.param({"disable_compile": True}, id="disable_compile"),
        pytest.param({"use_cache": False}, id="no-cache"),
        pytest.param({"return_dict_in_generate": True, "output_hidden_states": True}, id="hidden-states"),
        pytest.param({"cache_implementation": "dynamic"}, id="other-cache"),
    ],
)
def test_calls_that_run_as_they_did(call: dict[str, Any], runners: list[StepRunner], device: torch.device) -> None:
    model = tiny_llama().to(device)
    results = []
    for config in (PLAIN, SMALL):
        with turbo_hf.patch(model, config), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ids = prompts(1, 40).to(model.device)
            result = model.generate(ids, max_new_tokens=10, do_sample=False, **call)
        results.append(result if isinstance(result, Tensor) else result.sequences)
    assert torch.equal(*results)
    assert all(runner.captures == 0 for runner in runners)


# --- patch and report ----------------------------------------------------------------------------------------------


def test_a_copy_of_a_patched_model_has_runners_of_its_own(runners: list[StepRunner], device: torch.device) -> None:
    model = tiny_llama().to(device)
    with turbo_hf.patch(model, SMALL):
        twin = copy.deepcopy(model)
        ids = prompts(1, 40).to(model.device)
        want = model.generate(ids, max_new_tokens=10, do_sample=False)
    assert torch.equal(twin.generate(ids, max_new_tokens=10, do_sample=False), want)
    assert [runner._model for runner in runners] == [model, twin]


def test_hooks_are_looked_for_in_each_call(runners: list[StepRunner], device: torch.device) -> None:
    model = tiny_llama().to(device)
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    with turbo_hf.patch(model, TurboConfig(cuda_graphs=True)):
        ids = prompts(1, 40).to(model.device)
        # also in a module that has come since the last one
        model.generate(ids, **options)
        assert len(runners) == 1
        model.model.layers[1].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU())
        model.model.layers[1].mlp.act_fn[0].register_forward_hook(lambda *args: None, always_call=True)
        # a module that holds what holds it
        model.model.layers[1].mlp.act_fn.add_module("back", model.model.layers[1].mlp)
        with pytest.raises(Unsupported, match=r"cuda_graphs=True: model.layers.1.mlp.act_fn.0 has hooks"):
            model.generate(ids, **options)


def test_demanded_graphs_of_a_cache_without_kernels(runners: list[StepRunner], device: torch.device) -> None:
    model = tiny_llama().double().to(device)
    batch = {"input_ids": prompts(1, 40).to(model.device), "max_new_tokens": 5}
    demanded = pytest.raises(Unsupported, match=r"cuda_graphs=True: .*(float64 has no kernel|runs without kernels)")
    with turbo_hf.patch(model, TurboConfig(cuda_graphs=True)), demanded:
        model.generate(**batch)
    with turbo_hf.patch(model, TurboConfig(cuda_graphs="auto")):
        model.generate(**batch)
    assert [runner.captures for runner in runners] == [0, 0]


def hide_a_column(monkeypatch: pytest.MonkeyPatch, from_prompt: bool) -> None:
    """Llamas hide column 7, which takes a 4D mask: in all passes, or in decode steps alone."""
    llama: Any = modeling_llama
    make = llama.create_causal_mask

    def masked(**given: Any) -> Any:
        if from_prompt or given["inputs_embeds"].shape[1] == 1:
            given["and_mask_function"] = lambda row, head, query, column: column != 7
        return make(**given)

    monkeypatch.setattr(llama, "create_causal_mask", masked)


@pytest.mark.filterwarnings("ignore:layer .*the attention mask is no causal")
def test_steps_in_full_precision_are_not_replayed(
    runners: list[StepRunner], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    hide_a_column(monkeypatch, from_prompt=True)
    model, found = tiny_llama().to(device), []
    batch = {"input_ids": prompts(1, 40).to(model.device), "max_new_tokens": 20, "do_sample": False}
    for config in (PLAIN, SMALL):
        with turbo_hf.patch(model, config, strict="warn"):
            found.append(model.generate(**batch))
    assert torch.equal(*found)
    assert not runners[-1].captures
    demanded = pytest.raises(Unsupported, match="cuda_graphs=True: a pass over this cache was computed in full")
    with turbo_hf.patch(model, replace(SMALL, cuda_graphs=True), strict="warn"), demanded:
        model.generate(**batch)


@pytest.mark.filterwarnings("ignore:layer .*the attention mask is no causal")
def test_a_step_found_to_be_in_full_precision_is_refused(
    runners: list[StepRunner], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    hide_a_column(monkeypatch, from_prompt=False)
    model = tiny_llama().to(device)
    ids = prompts(1, 40).to(model.device)
    with turbo_hf.patch(model, SMALL, strict="warn") as handle:
        cache = handle.new_cache()
        with pytest.raises(Unsupported, match=r"this decode step cannot run .*cuda_graphs=False"):
            model.generate(ids, **{CACHE: cache}, max_new_tokens=20, do_sample=False)
        with pytest.raises(ValueError, match="broke off"):
            model.generate(prompts(1, 41).to(model.device), **{CACHE: cache}, max_new_tokens=19, do_sample=False)
    assert not runners[-1].captures


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
        (SMALL, [], True, "CUDA graphs"),
        (PLAIN, [], True, "no CUDA graphs (cuda_graphs=False)"),
        (SMALL, [3], True, "no CUDA graphs (layer 3 is dense)"),
        (SMALL, [], False, "no CUDA graphs (family without a test"),
        (TurboConfig(cuda_graphs=True), [], False, "CUDA graphs"),
        (TurboConfig(bits=16, sparse=SPARSE), [], True, "no CUDA graphs (16-bit pages of sparse layers)"),
        (flat_config(backend="reference"), [], True, 'no CUDA graphs (backend "ref'),
    ],
)
def test_the_report_says_how_steps_run(
    config: TurboConfig, dense: list[int], known: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(why_not, "why_no_kernels_on", lambda device: None)
    text, reason = describe(config, dense, known, torch.device("cuda"))
    assert text.startswith(f"decode steps: {words}")
    assert (reason is None) == (not words.startswith("no") or config.cuda_graphs is False)


def test_what_cannot_be_is_refused_where_it_was_demanded() -> None:
    model = tiny_llama()
    with pytest.raises(Unsupported, match='cuda_graphs=True: backend "reference" has no kernels'):
        turbo_hf.patch(model, flat_config(cuda_graphs=True, backend="reference"))
    # a patch that was refused has left nothing behind
    turbo_hf.patch(model, SMALL).remove()
