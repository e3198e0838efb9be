"""`generate` on a sparse cache."""

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibration_support import PROSE
from models import lab_model, prompts, tiny_llama
from patching_support import tiny
from sparse_cache_support import ANY, TRAINED, answers, ragged, small, sparse
from torch import Tensor

import turbo_hf
from turbo_hf import Calibration, SparseConfig, TurboConfig
from turbo_hf.attention.sparse_step import _visited
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.new_columns import NewColumns
from turbo_hf.calibration.query_model import classify
from turbo_hf.models.versions import CACHE
from turbo_hf.sparse.bucket_index import BucketIndex
from turbo_hf.sparse.selectors import UNTRAINED, Centroids, Classifier, Reformer, Selector


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
@pytest.mark.parametrize("choice", [{"selector": "full"}, {"selector": "random", "buckets": 4, "probes": 4}], ids=str)
def test_reading_everything_is_dense_decode(llama: Any, choice: dict[str, Any], options: dict[str, Any]) -> None:
    config = replace(sparse(choice["selector"], **small(**choice)), **options)
    assert torch.equal(answers(llama, config, **ragged()), answers(llama, replace(config, sparse=None), **ragged()))


@pytest.mark.parametrize("choice", [{"selector": "full"}, {"selector": "random", "buckets": 4, "probes": 4}], ids=str)
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
        with turbo_hf.patch(model, each):
            found.append(
                model.generate(
                    **ragged(), max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
                )
            )
    for got, want in zip(*(answer.logits for answer in found), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("selector", ["lsh-reformer", "lsh-gray", "lsh-tables", "means", "window"])
def test_a_row_is_the_same_alone_and_in_a_batch(llama: Any, selector: str) -> None:
    config = sparse(selector, **small(selector, mass=0.6 if selector == "means" else None))
    batch = answers(llama, config, **ragged())
    dense = answers(llama, replace(config, sparse=None), **ragged())
    assert not torch.equal(batch, dense), "sparse decode changes no token"
    for row, length in enumerate((90, 70, 31)):
        assert torch.equal(answers(llama, config, input_ids=prompts(1, length, length))[0], batch[row])


@pytest.mark.parametrize("always", [{"window_tokens": 1 << 30}, {"sink_tokens": 1 << 30}, {"window_tokens": 5000}])
def test_always_read_tokens_beyond_the_context_read_every_key(llama: Any, always: dict[str, int]) -> None:
    for selector in ("means", "window", "lsh-reformer"):
        config = sparse(selector, **small(selector) | always)
        dense = answers(llama, replace(config, sparse=None), **ragged())
        assert torch.equal(answers(llama, config, **ragged()), dense)


def test_a_choice_by_chance_is_even_and_the_same_again(llama: Any) -> None:
    config = sparse("random", **ANY)
    with turbo_hf.patch(llama, config):
        again = [llama.generate(**ragged(), max_new_tokens=12, do_sample=False) for _ in range(2)]
    assert torch.equal(*again)
    assert not torch.equal(again[0][:, 90:], answers(llama, replace(config, sparse=None), 12, **ragged()))
    selectors = [
        UNTRAINED["random"](SparseConfig(selector="random", buckets=16, probes=3, seed=seed), 0) for seed in (0, 1)
    ]
    keys = torch.randn(1, 1, 4096, 16)
    one, other = (selector.buckets(keys) for selector in selectors)
    assert one is not None
    assert other is not None
    sizes = one.flatten().long().bincount(minlength=16)
    # 256 each, of deviation 15.5
    assert 256 - 5 * 15.5 < int(sizes.min()) <= int(sizes.max()) < 256 + 5 * 15.5
    assert 256 - 5 * 15.5 < int((one == other).sum()) < 256 + 5 * 15.5
    visited = selectors[0]._visited(torch.randn(1, 1, 512, 2, 16))
    assert visited is not None
    assert visited.sum(-1).unique().tolist() == [3]
    # 96 times each, of deviation 8.8
    times = visited.sum((0, 1, 2, 3))
    assert 96 - 5 * 8.8 < int(times.min()) <= int(times.max()) < 96 + 5 * 8.8


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("size", [5, 17, 40])
def test_a_chunked_prompt_has_the_same_index(llama: Any, size: int) -> None:
    config = sparse("lsh-reformer", **ANY, most_probes=None)
    ids = prompts(2, 90)
    found = []
    with turbo_hf.patch(llama, config) as handle:
        for chunk in (90, size):
            cache = handle.new_cache()
            for part in ids.split(chunk, 1):
                llama(part, **{CACHE: cache})
            found.append(cache.turbo_layers()[0].bucket_index.buckets[..., :90])
    # the first layer's keys do not hang on what attention made of the past
    assert torch.equal(*found)


def test_assisted_decoding_gives_the_same_tokens(llama: Any) -> None:
    # a draft's tokens choose keys each for itself, so that verifying them is decoding them
    config = replace(sparse("lsh-reformer", **ANY), bits=8)
    ids = prompts(1, 60).repeat(1, 2)
    plain = answers(llama, config, input_ids=ids)
    assert torch.equal(answers(llama, config, input_ids=ids, prompt_lookup_num_tokens=3), plain)


def test_beams_and_returned_sequences(llama: Any) -> None:
    config = sparse("lsh-reformer", **ANY)
    options = {"num_beams": 3, "num_return_sequences": 2}
    alone = answers(llama, config, input_ids=prompts(1, 70, 70), **options)
    batch = answers(llama, config, **ragged((90, 70)), **options)
    assert torch.equal(batch[2:], alone)


@pytest.mark.parametrize("selector", ["saap", "kmeans", "kmeans-rotated"])
def test_trained_selectors_generate(indexed: Calibration, selector: str) -> None:
    model, tokenizer = lab_model()
    inputs = tokenizer([PROSE[:900], PROSE[:500]], return_tensors="pt", padding=True)
    everything = answers(model, sparse(selector, probes=16, dense_layers=()), calibration=indexed, **inputs)
    dense = answers(model, replace(sparse("full"), sparse=None), **inputs)
    assert torch.equal(everything, dense)
    few = sparse(selector, **TRAINED)
    batch = answers(model, few, calibration=indexed, **inputs)
    alone = answers(model, few, calibration=indexed, **tokenizer(PROSE[:500], return_tensors="pt"))
    assert torch.equal(batch[1:], alone)


def test_visits_by_mass(indexed: Calibration) -> None:
    model, tokenizer = lab_model()
    inputs = tokenizer(PROSE[:900], return_tensors="pt")
    shares = []
    for mass, most in ((0.01, None), (0.5, None), (0.01, 3)):
        config = sparse("saap", mass=mass, most_probes=most, window_tokens=31)
        with turbo_hf.patch(model, config, calibration=indexed) as handle:
            model.generate(**inputs, max_new_tokens=4, do_sample=False)
            shares.append(sum(read.share_beyond for read in handle.report().selectivity))
    assert shares[0] > shares[1] > 0
    assert shares[0] > shares[2] > 0


def test_mass_is_that_of_the_keys_that_the_buckets_hold() -> None:
    index = BucketIndex(2, 3, 32, Reformer(SparseConfig(selector="lsh-reformer", **ANY), 0), torch.device("cpu"))
    index.append(torch.randint(-1, 8, (2, 3, 1, 90)).to(torch.int16), [0, 0], 90, None)
    held = torch.tensor([90, 31]) - 20
    sizes = index.sizes(8, held)
    for row, head in itertools.product(range(2), range(3)):
        own = index.buckets[row, head, 0, : int(held[row])].tolist()
        assert sizes[row, head].tolist() == [own.count(bucket) for bucket in range(8)]
    assert not index.sizes(8, torch.tensor([-5, 0])).any()

    shapes = {"weight_1": (16, 12), "bias_1": (12,), "weight_2": (12, 8), "bias_2": (8,)}
    weights = {name: torch.randn(3, *shape) for name, shape in shapes.items()}
    chosen = SparseConfig(mass=0.3)
    selector = Classifier(chosen, 1, torch.nn.functional.normalize(torch.randn(3, 8, 16), dim=-1), weights)
    assert selector.weighs == 8
    queries = torch.randn(2, 3, 1, 2, 16)
    _, logits = selector._buckets_and_query_info(torch.randn(2, 3, 1, 16), queries)
    visited = selector._visited(logits, sizes)
    assert visited is not None
    each = classify(weights, queries.permute(1, 0, 2, 3, 4).flatten(1, 3)).view(3, 2, 1, 2, 8).transpose(0, 1).mean(3)
    told = each.exp() * sizes[:, :, None]
    share = told / told.sum(-1, keepdim=True)
    seen = visited[:, :, :, 0]
    assert bool(((share * seen).sum(-1) > 1 - 0.3).all())
    last = each.masked_fill(~seen, torch.inf).argmin(-1, keepdim=True)
    assert bool(((share * seen).sum(-1) - share.gather(-1, last)[..., 0] <= 1 - 0.3 + 1e-6).all()), "none too many"
    assert not bool((seen & (sizes[:, :, None] == 0)).any())


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("starts", [None, [0, 9]], ids=["full", "padded"])
def test_mass_of_a_chunk_is_that_of_its_tokens_alone(starts: list[int] | None, independent: bool) -> None:
    chosen = SparseConfig(mass=0.4, window_tokens=6, independent=independent)
    shapes = {"weight_1": (16, 12), "bias_1": (12,), "weight_2": (12, 8), "bias_2": (8,)}
    weights = {name: torch.randn(3, *shape) for name, shape in shapes.items()}
    selector = Classifier(chosen, 1, torch.nn.functional.normalize(torch.randn(3, 8, 16), dim=-1), weights)
    whole = TurboLayer(TurboConfig(sparse=chosen, block_size=32, attention="fp16"), selector=selector)

    def append(layer: TurboLayer, k: Tensor, new: NewColumns) -> None:
        layer.append(k, k, new, selector.buckets(k))
        layer.commit()

    append(whole, torch.randn(2, 3, 22, 16), NewColumns(22))
    by_token = copy.deepcopy(whole)
    keys, queries = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 2, 16)
    append(whole, keys, NewColumns(16, None, starts))
    found = _visited(whole, selector.buckets_and_query_info(keys, queries)[1], 16, 2)
    assert found is not None
    for at in range(16):
        late = [int(at < start) for start in starts or [0, 0]]
        append(by_token, keys[:, :, at : at + 1], NewColumns(1, None, late if any(late) else None))
        _, query_info = selector.buckets_and_query_info(keys[:, :, at : at + 1], queries[:, :, at : at + 1])
        alone = _visited(by_token, query_info, 1, 2)
        assert alone is not None
        for row in range(2):
            assert late[row] or torch.equal(found[row, :, at], alone[row, :, 0])


INDEPENDENT: list[dict[str, Any]] = [
    {"selector": "saap", "probes": 3},
    {"selector": "saap", "mass": 0.3, "most_probes": 6},
    {"selector": "kmeans", "probes": 3},
    {"selector": "lsh-reformer", "probes": 3, "buckets": 8},
    {"selector": "lsh-gray", "probes": 3, "buckets": 8},
    {"selector": "lsh-tables", "buckets": 8, "tables": 3},
]


@pytest.mark.parametrize("choice", INDEPENDENT, ids=str)
def test_an_independent_head_visits_what_it_would_alone(choice: dict[str, Any]) -> None:
    batch, heads, tokens, group, dim = 2, 3, 2, 4, 16
    config = SparseConfig(independent=True, **choice)
    centroids = torch.nn.functional.normalize(torch.randn(heads, 8, dim), dim=-1)
    shapes = {"weight_1": (dim, 12), "bias_1": (12,), "weight_2": (12, 8), "bias_2": (8,)}
    weights = {name: torch.randn(heads, *shape) for name, shape in shapes.items()}
    selector: Selector
    if config.selector == "saap":
        selector = Classifier(config, 1, centroids, weights)
    elif config.selector == "kmeans":
        selector = Centroids(config, 1, centroids, True)
    else:
        selector = UNTRAINED[config.selector](config, 1)
    queries = torch.randn(batch, heads, tokens, group, dim)
    rotary = (torch.randn(batch, tokens, 8), torch.randn(batch, tokens, 8)) if selector.pre_rotary else None
    sizes = torch.randint(0, 9, (batch, heads, 8)).float() if selector.weighs else None
    keys = torch.randn(batch, heads, tokens, dim)
    buckets, query_info = selector.buckets_and_query_info(keys, queries, rotary)
    together = selector.buckets(keys, rotary)
    assert buckets is not None
    assert together is not None
    assert torch.equal(buckets, together)
    found = selector.visited(query_info, group, sizes)
    assert found is not None
    assert found.shape == (batch, heads * group, tokens, selector.tables, 8)
    for head in range(heads * group):
        kv, member = divmod(head, group)
        _, own = selector._buckets_and_query_info(keys, queries[:, :, :, member : member + 1], rotary)
        alone = selector._visited(own, sizes)
        assert alone is not None
        assert torch.equal(found[:, head], alone[:, kv])
    assert not torch.equal(found[:, 0], found[:, 1])


@pytest.mark.parametrize(("selector", "choice"), [("saap", {"mass": 0.2}), ("kmeans", {"probes": 4})], ids=str)
def test_independent_heads_generate(indexed: Calibration, selector: str, choice: dict[str, Any]) -> None:
    model, tokenizer = lab_model()
    inputs = tokenizer([PROSE[:900], PROSE[:500]], return_tensors="pt", padding=True)
    few = sparse(selector, window_tokens=31, independent=True, **choice)
    batch = answers(model, few, calibration=indexed, **inputs)
    alone = answers(model, few, calibration=indexed, **tokenizer(PROSE[:500], return_tensors="pt"))
    assert torch.equal(batch[1:], alone)
    read = []
    for config in (few, sparse(selector, window_tokens=31, **choice)):
        with turbo_hf.patch(model, config, calibration=indexed) as handle:
            model.generate(**inputs, max_new_tokens=2, do_sample=False)
            report = handle.report()
            read.append(sum(each.read for each in report.selectivity))
        assert (f"2 x 4 bit; {selector}, each query head by itself, " in str(report)) is (config is few)
    # as many buckets for each head are more for the heads of a group
    assert read[0] > read[1] or "mass" in choice
    if "probes" in choice:
        everything = sparse(selector, probes=16, independent=True, dense_layers=())
        dense = answers(model, replace(sparse("full"), sparse=None), **inputs)
        assert torch.equal(answers(model, everything, calibration=indexed, **inputs), dense)


@pytest.mark.parametrize("selector", ["lsh-reformer", "lsh-gray", "lsh-tables"])
def test_independent_heads_of_hashing_selectors(llama: Any, selector: str) -> None:
    config = sparse(selector, independent=True, **small(selector))
    batch = answers(llama, config, **ragged())
    assert torch.equal(answers(llama, config, input_ids=prompts(1, 70, 70))[0], batch[1])
    plain = replace(config, bits=8)
    ids = prompts(1, 60).repeat(1, 2)
    # a draft's tokens choose keys each for itself
    assert torch.equal(
        answers(llama, plain, input_ids=ids, prompt_lookup_num_tokens=3), answers(llama, plain, input_ids=ids)
    )
