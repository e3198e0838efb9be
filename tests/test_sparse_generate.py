"""`generate` on a sparse cache."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from calibration_support import PROSE
from graphs_support import an_index
from models import lab_model, prompts, tiny_llama
from patching_support import tiny
from sparse_cache_support import ANY, TRAINED, answers, ragged, small, sparse

import turbo_hf
from turbo_hf import Calibration


@pytest.fixture
def llama() -> Any:
    """Three layers, so that a sparse one reads what another sparse one wrote."""
    return tiny_llama(num_hidden_layers=3)


@pytest.fixture
def in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens stay in the order of time: `tests/test_bucket_order.py` is about the other one."""
    monkeypatch.setattr("turbo_hf.sparse.bucket_index.BucketIndex.sorts", False)


@pytest.mark.parametrize(
    "options", [{}, {"bits": 16}, {"attention": "auto"}, {"sas": True, "sas_threshold": -6.0}], ids=str
)
@pytest.mark.parametrize("choice", [{"selector": "full"}, {"selector": "kmeans-rotated", "probes": 16}], ids=str)
def test_reading_everything_is_dense_decode(llama: Any, choice: dict[str, Any], options: dict[str, Any]) -> None:
    config = replace(sparse(choice["selector"], **small(**choice)), **options)
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


@pytest.mark.parametrize("selector", ["kmeans-rotated", "window"])
def test_a_row_is_the_same_alone_and_in_a_batch(llama: Any, selector: str) -> None:
    config = sparse(selector, **small(selector))
    batch = answers(llama, config, **ragged())
    dense = answers(llama, replace(config, sparse=None), **ragged())
    assert not torch.equal(batch, dense), "sparse decode changes no token"
    for row, length in enumerate((90, 70, 31)):
        assert torch.equal(answers(llama, config, input_ids=prompts(1, length, length))[0], batch[row])


@pytest.mark.parametrize("always", [{"window_tokens": 1 << 30}, {"sink_tokens": 1 << 30}, {"window_tokens": 5000}])
def test_always_read_tokens_beyond_the_context_read_every_key(llama: Any, always: dict[str, int]) -> None:
    for selector in ("window", "kmeans-rotated"):
        config = sparse(selector, **small(selector) | always)
        dense = answers(llama, replace(config, sparse=None), **ragged())
        assert torch.equal(answers(llama, config, **ragged()), dense)


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
    model, tokenizer = lab_model()
    inputs = tokenizer([PROSE[:900], PROSE[:500]], return_tensors="pt", padding=True)
    everything = answers(model, sparse(selector, probes=16, read_all_layers=()), calibration=indexed, **inputs)
    dense = answers(model, replace(sparse("full"), sparse=None), **inputs)
    assert torch.equal(everything, dense)
    few = sparse(selector, **TRAINED)
    batch = answers(model, few, calibration=indexed, **inputs)
    alone = answers(model, few, calibration=indexed, **tokenizer(PROSE[:500], return_tensors="pt"))
    assert torch.equal(batch[1:], alone)
