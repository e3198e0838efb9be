"""Sparse prompts of a patched model: which are, what they read, what the audit finds, and what the report says."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from all_pairs import in_one_test
from calibration_support import PROSE
from models import lab_model, left_padded, prompts, tiny_llama, tiny_mistral
from patching_support import tiny
from torch import Tensor

import turbo_hf
from turbo_hf import PromptSparsity, TurboConfig
from turbo_hf.layout import PROMPT_TILE as TILE
from turbo_hf.layout import Scoring
from turbo_hf.models.versions import CACHE
from turbo_hf.ops.prefill.reference_tiles import as_square
from turbo_hf.ops.prefill.tiles import density
from turbo_hf.sparse.prompts import PromptTally

SHORT = PromptSparsity(mass=0.3, peak=1.0, from_tokens=512, sink_tokens=1, window_tokens=1, tail_tokens=100)
EVERY = replace(SHORT, mass=1.0)


def lab_ids(tokens: int) -> Tensor:
    """Token ids [1, tokens] of prose."""
    _, tokenizer = lab_model()
    ids: Tensor = tokenizer(PROSE, return_tensors="pt").input_ids
    return ids.repeat(1, -(-tokens // ids.shape[1]))[:, :tokens]


def run(model: Any, config: TurboConfig, ids: Tensor, **more: Any) -> tuple[Any, Any]:
    """What `generate` gives of three tokens, and the report after it."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}
    with turbo_hf.patch(model, config) as handle:
        out = model.generate(
            **inputs, max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        return torch.stack(out.logits), handle.report()


@pytest.mark.parametrize("options", [{}, {"bits": 16}, {"attention": "half", "smooth_k": True}], ids=str)
def test_all_of_the_mass_is_a_dense_prompt(options: dict[str, Any]) -> None:
    model, _ = lab_model()
    # not torch's own SDPA, which adds up in another order
    config = TurboConfig(backend="reference", **options)
    dense, _ = run(model, config, lab_ids(700))
    got, report = run(model, replace(config, sparse_prompt=EVERY), lab_ids(700))
    assert torch.equal(got, dense)
    for layer in report.sparse_prompts:
        assert (layer.prompts, layer.density, layer.dropped_max) == (1, 1.0, 0.0)


def test_a_sparse_prompt_of_a_trained_model() -> None:
    """Its logits differ from the dense ones; what the audit finds is above 0 and within the bound."""
    model, _ = lab_model()
    ids = lab_ids(1100)
    dense, _ = run(model, TurboConfig(), ids)
    state = torch.get_rng_state()
    got, report = run(model, TurboConfig(sparse_prompt=SHORT), ids)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(got, dense)
    assert [layer.layer for layer in report.sparse_prompts] == list(range(6))
    for layer in report.sparse_prompts:
        assert layer.prompts == 1
        assert 0 < layer.density < 1
        assert layer.dropped_mean is not None
        assert layer.dropped_p95 is not None
        assert layer.dropped_max is not None
        assert 0 < layer.dropped_mean <= layer.dropped_p95 <= layer.dropped_max < 1
        assert layer.dropped_mean <= SHORT.bound
        assert len(layer.by_head) == layer.heads
        assert all(head.dropped_mean is not None and head.dropped_mean <= SHORT.bound for head in layer.by_head)
        assert sum(head.density for head in layer.by_head) / layer.heads == pytest.approx(layer.density)
        assert max(head.dropped_max or 0 for head in layer.by_head) == layer.dropped_max
    assert "% of the key tiles read by 1 sparse prompts; dropped softmax: mean" in str(report)
    assert "from 512 tokens up sparse (mass 0.3, peak 1, audited)" in str(report)
    # the last queries read every key, so that the first token of a model of one layer is the dense one
    assert (got[0] - dense[0]).abs().max() < (dense[0].amax() - dense[0].amin())


def test_the_tail_of_the_first_layer_is_dense() -> None:
    llama, ids, config = tiny_llama(num_hidden_layers=1), prompts(1, 900), TurboConfig(backend="reference")
    dense, _ = run(llama, config, ids)
    assert torch.equal(run(llama, replace(config, sparse_prompt=SHORT), ids)[0], dense)
    none = replace(config, sparse_prompt=replace(SHORT, tail_tokens=0))
    # 900 is no multiple of 128: the last, broken tile of queries reads all even so
    assert torch.equal(run(llama, none, ids)[0], dense)
    ids = prompts(1, 7 * TILE)
    assert not torch.equal(run(llama, none, ids)[0], run(llama, config, ids)[0])


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: tiny("gemma2", layer_types=["full_attention"] * 2, attn_logit_softcapping=5.0), id="cap"),
        pytest.param(
            lambda: tiny("gpt_oss", layer_types=["full_attention"] * 2, num_local_experts=2, num_experts_per_tok=2),
            id="sinks",
        ),
    ],
)
def test_caps_and_sinks_are_part_of_the_choice(model: Any) -> None:
    model, ids = model(), prompts(2, 700)
    config = TurboConfig(backend="reference")
    dense, _ = run(model, config, ids)
    assert torch.equal(run(model, replace(config, sparse_prompt=EVERY), ids)[0], dense)
    got, report = run(model, replace(config, sparse_prompt=SHORT), ids)
    assert not torch.equal(got, dense)
    for layer in report.sparse_prompts:
        assert layer.prompts == 2
        assert layer.density < 1
        assert layer.dropped_mean is not None
        assert 0 < layer.dropped_mean <= SHORT.bound


def test_windows_are_short_already() -> None:
    model, ids = tiny_mistral(64), prompts(2, 600)
    got, report = run(model, TurboConfig(sparse_prompt=SHORT), ids)
    assert torch.equal(got, run(model, TurboConfig(), ids)[0])
    assert all(layer.prompts == 0 and not layer.dense for layer in report.sparse_prompts)


def test_a_short_second_turn_reads_every_key_of_the_first() -> None:
    llama, ids = tiny_llama(), prompts(1, 700)
    with turbo_hf.patch(llama, TurboConfig(sparse_prompt=SHORT)) as handle, torch.no_grad():
        short = llama(ids[:, :300], **{CACHE: handle.new_cache()})
        assert all(layer.prompts == 0 and not layer.dense for layer in handle.report().sparse_prompts)
        cache = short[CACHE]
        llama(ids[:, 300:], **{CACHE: cache})
        reason = "they add fewer than 1,024 tokens to a cache"
        assert [layer.dense for layer in handle.report().sparse_prompts] == [{reason: 1}] * 2
        # the same tally after reset, in copies and in other caches; none of its own after pickling
        cache.reset()
        llama(ids, **{CACHE: cache})
        llama(ids, **{CACHE: copy.deepcopy(handle.new_cache())})
        assert [layer.prompts for layer in handle.report().sparse_prompts] == [2, 2]
        assert pickle.loads(pickle.dumps(cache)).turbo_layers()[0].prompt_tally.prompts == 0


def test_rows_of_a_batch_read_as_they_do_alone() -> None:
    llama, ids = tiny_llama(), prompts(2, 600)
    batch, _ = run(llama, TurboConfig(sparse_prompt=SHORT), ids)
    assert torch.equal(run(llama, TurboConfig(sparse_prompt=SHORT), ids)[0], batch)
    for row in range(2):
        alone, _ = run(llama, TurboConfig(sparse_prompt=SHORT), ids[row : row + 1])
        assert torch.equal(alone[0, 0].argmax(-1), batch[0, row].argmax(-1))
        torch.testing.assert_close(alone[0, 0], batch[0, row], rtol=1e-4, atol=1e-4)


def test_padded_rows_read_as_they_do_alone() -> None:
    """Those that are long enough; the others read every key."""
    llama, lengths, tally = tiny_llama(), (700, 520, 300), PromptTally()
    rows = [prompts(1, n, n)[0] for n in lengths]
    given = left_padded(rows)
    batch, report = run(llama, TurboConfig(sparse_prompt=SHORT), given.pop("input_ids"), **given)
    assert [layer.prompts for layer in report.sparse_prompts] == [2, 2]
    for row, ids in enumerate(rows):
        alone, own = run(llama, TurboConfig(sparse_prompt=SHORT), ids[None])
        assert [layer.prompts for layer in own.sparse_prompts] == [int(len(ids) >= SHORT.from_tokens)] * 2
        torch.testing.assert_close(alone[0, 0], batch[0, row], rtol=1e-4, atol=1e-4)
    q, k = (torch.cat([x] * 3) for x in heads(700))
    starts = [700 - n for n in lengths]
    given = {"mode": "turbo", "backend": "auto"}
    kept = tally.tiles_to_read(SHORT, q, k, None, None, Scoring(1.0), starts=starts, **given)
    assert kept is not None
    for row in range(2):
        own = q[row : row + 1, :, starts[row] :], k[row : row + 1, :, starts[row] :]
        want = PromptTally().tiles_to_read(SHORT, *own, None, None, Scoring(1.0), **given)
        assert want is not None
        assert torch.equal(kept[row, :, : want.shape[2]], want[0])
    assert kept[2].all()
    assert tally.shares(0).prompts == 2


def heads(tokens: int = 8 * TILE) -> tuple[Tensor, Tensor]:
    """q [1, 2, tokens, 16], k [1, 2, tokens, 16]: keys of the second head cancel in the means of their tiles."""
    generator = torch.Generator().manual_seed(0)
    q, k = (0.1 * torch.randn(1, 2, tokens, 16, generator=generator) for _ in range(2))
    q[..., 0], k[:, :, :TILE, 0] = 2.0, 5.0
    k[:, 1, 2 * TILE, 0], k[:, 1, 2 * TILE + 1, 0] = 30.0, -30.0
    return q, k


def read_by(rule: PromptSparsity, tally: PromptTally, **options: Any) -> Tensor | None:
    given = {"mode": "turbo", "backend": "auto", **options}
    return tally.tiles_to_read(rule, *heads(), None, None, Scoring(1.0), **given)


def test_a_head_that_drops_too_much_is_computed_densely() -> None:
    rule, tally = replace(SHORT, mass=0.9, tail_tokens=0, sink_tokens=0), PromptTally()
    kept = read_by(replace(rule, audit=False), PromptTally())
    assert kept is not None
    assert density(kept, 8 * TILE).max() < 0.8
    audited = read_by(rule, tally)
    assert audited is not None
    assert torch.equal(audited[0, 0], kept[0, 0])
    assert audited[0, 1].all()
    found = tally.shares(3)
    assert (found.layer, found.prompts, found.heads, found.dense_heads) == (3, 1, 2, 1)
    assert found.dropped_mean is not None
    assert found.dropped_mean < rule.bound
    assert "1 of 2 heads dense" in str(found)


def test_a_tile_of_queries_that_would_read_nearly_all_reads_all() -> None:
    rule, tally = replace(SHORT, mass=0.9, audit=False), PromptTally()
    usual, all_above = (read_by(replace(rule, most_density=most), tally) for most in (1.0, 0.7))
    assert usual is not None
    assert all_above is not None
    few, got = as_square(usual, 8 * TILE), as_square(all_above, 8 * TILE)
    before = torch.arange(8)
    over = few.tril(-1).sum(-1) > 0.7 * before
    assert 0 < over[..., 2:].sum() < over[..., 2:].numel()
    assert torch.equal(got, few | over[..., None] & (before[:, None] > before))
    assert tally.shares(0).dense_heads == 0


def test_audited_queries_are_spread_over_all_but_the_tail_and_the_same_each_time() -> None:
    tally, cpu = PromptTally(), torch.device("cpu")
    first, other = tally.places(1000, cpu), tally.places(1001, cpu)
    assert len(first) == len(other) == 128
    assert (first.diff() > 0).all()
    assert first[-1] < 1000
    assert (first.double() * 128 / 1000 - torch.arange(128)).abs().max() < 1.2
    assert torch.equal(tally.places(1000, cpu), first)
    assert torch.equal(PromptTally().places(1000, cpu), first)
    assert not torch.equal(first, other)
    assert tally.places(5, cpu).tolist() == list(range(5))


@in_one_test(
    ("options", "message"),
    [
        ({"mass": 0.0}, r"PromptSparsity.mass must be above 0 and at most 1; got 0.0"),
        ({"mass": float("nan")}, r"PromptSparsity.mass must be above 0 and at most 1; got nan"),
        ({"peak": 1.5}, r"PromptSparsity.peak must be above 0 and at most 1; got 1.5"),
        ({"mass": True}, r"PromptSparsity.mass must be above 0 and at most 1; got True"),
        ({"mass": None}, r"PromptSparsity.mass must be above 0 and at most 1; got None"),
        ({"most_density": 0}, r"PromptSparsity.most_density must be above 0 and at most 1; got 0"),
        ({"tail_tokens": -1}, r"PromptSparsity.tail_tokens must be a whole number of at least 0; got -1"),
        ({"from_tokens": 895}, r"from_tokens must be at least sink_tokens \+ window_tokens \+ tail_tokens = 896"),
        ({"audit": 1}, r"PromptSparsity.audit must be one of True, False; got 1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptSparsity(**options)


@in_one_test(
    ("options", "message"),
    [
        ({"sparse_prompt": 0.9}, r"sparse_prompt must be a PromptSparsity or None; got 0.9"),
        ({"sparse_prompt": PromptSparsity(), "sas": True}, r"sparse_prompt does not go with sas=True"),
    ],
)
def test_a_config_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TurboConfig(**options)
    with pytest.raises(ValueError, match="PromptSparsity has no option mas"):
        TurboConfig.from_dict({"sparse_prompt": {"mas": 0.9}})
