"""A sparse cache: `generate` over it, what is told of it and of its memory, and mistakes."""

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibration_support import PROSE
from graphs_support import an_index
from models import lab_model, prompts, tiny_llama, tiny_mistral
from patching_support import tiny
from sparse_cache_support import ANY, TRAINED, answers, ragged, small, sparse

import turbo_hf
from turbo_hf import Calibration, SparseConfig, TurboCache, TurboConfig
from turbo_hf.calibration.artifacts import NO_INDEX
from turbo_hf.config.turbo_config import with_options
from turbo_hf.models.versions import CACHE
from turbo_hf.sparse.selectors import Selector


@pytest.fixture(autouse=True)
def dense_layers_seal_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As sparse ones do, which are compared with them."""
    for stay in ("first_tokens", "recent"):
        monkeypatch.setattr(TurboConfig, stay, 0)


@pytest.fixture
def llama() -> Any:
    """Three layers, so that a sparse one reads what another sparse one wrote."""
    return tiny_llama(num_hidden_layers=3)


# --- the report -----------------------------------------------------------------------------------------------------


def test_the_report_counts_keys(llama: Any) -> None:
    config = sparse("window", **small("window", read_all_layers=(0,)))
    with turbo_hf.patch(llama, config) as handle:
        assert str(handle.report()).count("% of the keys") == 0
        llama.generate(**ragged((90, 70)), max_new_tokens=5, do_sample=False)
        report = handle.report()
    assert [read.layer for read in report.selectivity] == [1, 2]
    # 4 steps after the prompt, 2 KV heads; a step reads its own token too
    there = 2 * sum(length + step for length in (90, 70) for step in (1, 2, 3, 4))
    for read in report.selectivity:
        assert (read.there, read.dense, read.read) == (there, 2 * 8 * 21, 2 * 8 * 21)
        assert read.share == 2 * 8 * 21 / there
        assert read.share_beyond == 0
    text = str(report)
    assert "layer 0: 2 x 4 bit; reads every key: by read_all_layers" in text
    assert "layers 1, 2: 2 x 4 bit; window" in text
    assert "of the keys read, 0.00% of those not always read" in text


def test_rows_whose_keys_are_all_always_read(llama: Any) -> None:
    with turbo_hf.patch(llama, sparse("window", **small("window"))) as handle:
        llama.generate(**ragged((12, 9)), max_new_tokens=4, do_sample=False)
        report = handle.report()
    # 3 steps after the prompt, 2 KV heads; a sink and 20 tokens would always be read
    there = 2 * sum(length + step for length in (12, 9) for step in (1, 2, 3))
    assert {(read.there, read.dense, read.read) for read in report.selectivity} == {(there, there, there)}
    assert "every key read: all are always read" in str(report)


def test_the_index_is_part_of_the_memory(llama: Any) -> None:
    config = sparse("kmeans-rotated", **{**ANY, "read_all_layers": (0,)})
    with turbo_hf.patch(llama, config, calibration=an_index(llama)) as handle:
        cache = handle.new_cache()
        llama(prompts(3, 224), **{CACHE: cache})
        memory = handle.memory()
    assert "index" not in memory.layers[0]
    # 2 bytes a token, and 4 a block of those in order, which end before the 20 newest tokens and 64 more
    assert memory.layers[1]["index"] == 3 * 2 * (256 * 2 + 4 * 4)
    assert memory.total == sum(memory.by_kind.values())


def test_a_window_layer_reads_every_key() -> None:
    model = tiny_mistral(40)
    with pytest.raises(ValueError, match=r"no layer of this model can be sparse\. Layer 1 reads every key: it has"):
        turbo_hf.patch(model, sparse("window", **small("window")))


def test_a_copied_model_keeps_its_selectors(indexed: Calibration) -> None:
    model, tokenizer = lab_model()
    inputs = tokenizer(PROSE[:500], return_tensors="pt")
    config = sparse("saap", **TRAINED)
    with turbo_hf.patch(model, config, calibration=indexed):
        want = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        assert torch.equal(copy.deepcopy(model).generate(**inputs, max_new_tokens=8, do_sample=False), want)


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probes": 0}, "SparseConfig.probes must be a whole number of at least 1; got 0"),
        ({"probes": 2.0}, r"SparseConfig.probes must be a whole number of at least 1; got 2\.0"),
        ({"probes": 3, "selector": "window"}, 'SparseConfig.probes has no effect with selector "window"'),
        ({"selector": "best"}, "SparseConfig.selector must be one of 'saap', 'kmeans', .*; got 'best'"),
        ({"window_tokens": 0}, "SparseConfig.window_tokens must be a whole number of at least 1; got 0"),
        ({"sink_tokens": -1}, "SparseConfig.sink_tokens must be a whole number of at least 0; got -1"),
        ({"sink_tokens": True}, "SparseConfig.sink_tokens must be a whole number of at least 0; got True"),
        ({"window_tokens": "1"}, "SparseConfig.window_tokens must be a whole number of at least 1; got '1'"),
        ({"window_tokens": 10**30}, f"SparseConfig.window_tokens must be at most 1073741824; got {10**30}"),
        ({"sink_tokens": (1 << 30) + 1}, "SparseConfig.sink_tokens must be at most 1073741824; got 1073741825"),
        ({"read_all_layers": [-1]}, r"SparseConfig.read_all_layers must be a tuple of layer indices; got \(-1,\)"),
    ],
)
def test_a_wrong_choice_gets_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseConfig(**options)


def test_wrong_places_for_a_sparse_config() -> None:
    with pytest.raises(ValueError, match=r"selectors names layers \[7\]; the model has layers 0 to 1"):
        TurboCache(tiny_llama().config, selectors={7: Selector(SparseConfig(), 7)})


def test_a_calibration_is_needed_and_must_fit(llama: Any, indexed: Calibration) -> None:
    for selector in ("saap", "kmeans", "kmeans-rotated"):
        with pytest.raises(ValueError, match=f'selector "{selector}" needs a calibration of this model, and there is'):
            turbo_hf.patch(llama, sparse(selector))
    with pytest.raises(ValueError, match="does not fit this model: it was made for a model with"):
        turbo_hf.patch(llama, "saap", calibration=indexed)
    model, _ = lab_model()
    with pytest.raises(ValueError, match=r"at most the 16 buckets of a head; it is 32 unless it is given"):
        turbo_hf.patch(model, "saap", calibration=indexed)
    with pytest.raises(ValueError, match="probes must be at most the 16 buckets of a head; got 17"):
        turbo_hf.patch(model, sparse("saap", probes=17), calibration=indexed)
    message = "steps visit 8 of the 16 buckets of a head, and so read most keys"
    found = sparse("kmeans", probes=8)
    # once, not for each layer
    with pytest.warns(UserWarning, match=message) as caught:
        turbo_hf.patch(model, found, calibration=indexed).remove()
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with turbo_hf.patch(model, found, calibration=indexed, strict="fallback") as handle:
            assert [line.startswith(message) for line in handle.report().warnings] == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        turbo_hf.patch(model, sparse("kmeans", probes=7), calibration=indexed).remove()
    with pytest.raises(ValueError, match=r"SparseConfig\.read_all_layers names layer 9; the last is 5"):
        turbo_hf.patch(model, sparse("saap", probes=4, read_all_layers=(9,)), calibration=indexed)
    bare = replace(indexed, layers=tuple(replace(layer, centroids=None, classifier={}) for layer in indexed.layers))
    with pytest.raises(ValueError, match=r"no layer of this model can be sparse\. Layer 5 reads every key: the cal"):
        turbo_hf.patch(model, sparse("saap", probes=4), calibration=bare)
    without = (replace(layer, centroids=None, note=NO_INDEX + "it was cold") for layer in indexed.layers[4:])
    some = replace(indexed, layers=(*indexed.layers[:4], *without))
    with turbo_hf.patch(model, sparse("saap", probes=4), calibration=some) as handle:
        text = str(handle.report())
    assert "reads every key: it was cold" in text
    assert "saap, 4 of 16 buckets" in text


@pytest.mark.parametrize(
    "options", [{}, {"bits": 16}, {"attention": "auto"}, {"sas": True, "sas_threshold": -6.0}], ids=str
)
@pytest.mark.parametrize("choice", [{"selector": "full"}, {"selector": "kmeans-rotated", "probes": 16}], ids=str)
def test_reading_everything_is_dense_decode(llama: Any, choice: dict[str, Any], options: dict[str, Any]) -> None:
    config = with_options(sparse(choice["selector"], **small(**choice)), **options)
    assert torch.equal(answers(llama, config, **ragged()), answers(llama, replace(config, sparse=None), **ragged()))


@pytest.mark.parametrize("choice", [{"selector": "full"}, {"selector": "kmeans-rotated", "probes": 16}], ids=str)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 2}, id="sinks"),
        # far below the largest scores
        pytest.param("gemma2", {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 16}, id="cap"),
    ],
)
def test_sinks_and_a_cap_of_scores_are_those_of_dense_decode(
    family: str, options: dict[str, Any], choice: dict[str, Any]
) -> None:
    model: Any = tiny(family, layer_types=["full_attention"] * 2, **options)
    for layer in model.model.layers if family == "gpt_oss" else []:
        # so much that heads give most of their attention to them
        layer.self_attn.sinks.data.fill_(5.0)
    config = sparse(choice["selector"], **small(**choice))
    found = []
    for each in (config, replace(config, sparse=None)):
        with turbo_hf.patch(model, each, calibration=an_index(model)):
            found.append(
                model.generate(
                    **ragged(), max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
                )
            )
    for got, want in zip(*(answer.logits for answer in found), strict=True):
        assert torch.equal(got, want)


def test_assisted_decoding_gives_the_same_tokens(llama: Any) -> None:
    # a draft's tokens choose keys each for itself, so that verifying them is decoding them
    config = replace(sparse("kmeans-rotated", **ANY), bits=8)
    ids = prompts(1, 60).repeat(1, 2)
    plain = answers(llama, config, input_ids=ids)
    assert torch.equal(answers(llama, config, input_ids=ids, prompt_lookup_num_tokens=3), plain)


def test_beams_and_returned_sequences(llama: Any) -> None:
    config = sparse("kmeans-rotated", **ANY)
    options = {"num_beams": 3, "num_return_sequences": 2}
    alone = answers(llama, config, input_ids=prompts(1, 70, 70), **options)
    batch = answers(llama, config, **ragged((90, 70)), **options)
    assert torch.equal(batch[2:], alone)


@pytest.mark.parametrize("selector", ["saap", "kmeans", "kmeans-rotated"])
def test_trained_selectors_generate(indexed: Calibration, selector: str) -> None:
    """In float64: summed in another order, no number comes near another code."""
    carried, tokenizer = lab_model()
    model = copy.deepcopy(carried).double()
    inputs = tokenizer([PROSE[:900], PROSE[:500]], return_tensors="pt", padding=True)
    everything = answers(model, sparse(selector, probes=16, read_all_layers=()), calibration=indexed, **inputs)
    dense = answers(model, replace(sparse("full"), sparse=None), **inputs)
    assert torch.equal(everything, dense)
    few = sparse(selector, **TRAINED)
    batch = answers(model, few, calibration=indexed, **inputs)
    alone = answers(model, few, calibration=indexed, **tokenizer(PROSE[:500], return_tensors="pt"))
    assert torch.equal(batch[1:], alone)
