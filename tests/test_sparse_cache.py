"""The bucket index of a cache: keys before rotary embedding, the report, mistakes."""

import copy
import importlib
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibration_support import PROSE
from models import lab_model, prompts, tiny_llama, tiny_mistral
from sparse_cache_support import ANY, TRAINED, answers, ragged, small, sparse
from torch import Tensor

import turbo_hf
from turbo_hf import Calibration, SparseConfig, TurboCache, TurboConfig
from turbo_hf.calibration.artifacts import NO_INDEX
from turbo_hf.calibration.query_model import classify
from turbo_hf.chunk import Chunk
from turbo_hf.config import SELECTORS
from turbo_hf.layer import TurboLayer
from turbo_hf.ops.select import assign
from turbo_hf.rotary import turns_by_halves
from turbo_hf.selectors import UNTRAINED, Centroids, Hash, Reformer
from turbo_hf.sparse import PART


@pytest.fixture
def llama() -> Any:
    """Three layers, so that a sparse one reads what another sparse one wrote."""
    return tiny_llama(num_hidden_layers=3)


@pytest.fixture
def in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens stay in the order of time: `tests/test_bucket_order.py` is about the other one."""
    monkeypatch.setattr("turbo_hf.index.BucketIndex.sorts", False)


# --- the index ------------------------------------------------------------------------------------------------------


def layer_of(selector: str = "lsh-reformer") -> TurboLayer:
    config = sparse(selector, **small(selector))
    assert config.sparse is not None
    made = Reformer(config.sparse, 0) if selector == "lsh-reformer" else Hash(config.sparse, 0)
    return TurboLayer(config, selector=made)


def feed(layer: TurboLayer, rows: list[list[Tensor]], tokens: int, starts: list[int] | None = None) -> None:
    """New random keys for every row, in the layer and in plain lists."""
    k = torch.randn(len(rows), 2, tokens, 16)
    assert layer.selector is not None
    layer.append(k, torch.randn_like(k), Chunk(tokens, None, starts), layer.selector.buckets(k))
    layer.commit()
    for row, keys in enumerate(rows):
        keys += list(k[row, :, 0 if starts is None else starts[row] :].unbind(1))


def check_index(layer: TurboLayer, rows: list[list[Tensor]]) -> None:
    """Every token has the bucket of its key, at its place in its row."""
    assert layer.selector is not None
    assert layer.lengths() == [len(keys) for keys in rows]
    for row, keys in enumerate(rows):
        want = layer.selector.buckets(torch.stack(keys, 1)[None])
        assert want is not None
        assert torch.equal(layer.bucket_index.buckets[row : row + 1, ..., : len(keys)], want)


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("selector", ["lsh-reformer", "lsh-gray", "lsh-tables"])
def test_the_index_follows_every_operation(selector: str) -> None:
    layer, rows = layer_of(selector), [[], [], []]  # type: ignore[var-annotated]
    feed(layer, rows, 70)
    check_index(layer, rows)
    for _ in range(3):
        feed(layer, rows, 1)
    check_index(layer, rows)
    layer.crop(-5)
    rows = [keys[:-5] for keys in rows]
    check_index(layer, rows)
    layer.crop(-40)  # below a sealed block
    rows = [keys[:-40] for keys in rows]
    feed(layer, rows, 9)
    check_index(layer, rows)
    layer.reorder_cache(torch.tensor([2, 2, 0]))
    rows = [list(rows[2]), list(rows[2]), list(rows[0])]
    feed(layer, rows, 50)
    check_index(layer, rows)
    layer.batch_repeat_interleave(2)
    rows = [list(keys) for keys in rows for _ in range(2)]
    feed(layer, rows, 1)
    layer.batch_select_indices(torch.tensor([0, 5, 3, 1]))
    rows = [list(rows[row]) for row in (0, 5, 3, 1)]
    other, others = copy.deepcopy(layer), [list(keys) for keys in rows]
    feed(layer, rows, 33)
    check_index(layer, rows)
    check_index(other, others)
    assert other.selector is layer.selector
    layer.reset()
    rows = [[], []]
    feed(layer, rows, 40)
    check_index(layer, rows)


def test_buckets_side_by_side_in_gray_order_differ_in_one_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turbo_hf.selectors._directions", lambda shape, *_: torch.eye(*shape))
    bits = 6
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * bits)
    buckets = Hash(SparseConfig(selector="lsh-gray", buckets=2**bits, probes=3), 0).buckets(signs[None, None])
    assert buckets is not None
    assert buckets.flatten().sort().values.tolist() == list(range(2**bits))
    in_order = signs[buckets.flatten().long().argsort()]
    assert (in_order.diff(dim=0) != 0).sum(1).tolist() == [1] * (2**bits - 1)


@pytest.mark.parametrize("selector", ["lsh-reformer", "lsh-gray", "lsh-tables", "random"])
def test_each_layer_draws_numbers_of_its_own(selector: str) -> None:
    config, keys = sparse(selector, **small(selector)).sparse, torch.randn(1, 1, 200, 16)
    assert config is not None
    first, again, second = (UNTRAINED[selector](config, layer).buckets(keys) for layer in (0, 0, 1))
    assert first is not None
    assert again is not None
    assert second is not None
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@pytest.mark.usefixtures("in_time")
def test_the_index_of_ragged_rows() -> None:
    layer, rows = layer_of(), [[], [], []]  # type: ignore[var-annotated]
    feed(layer, rows, 70, [0, 40, 69])
    feed(layer, rows, 3, [0, 2, 1])
    feed(layer, rows, 1)
    feed(layer, rows, 66, [66, 0, 30])
    layer.crop(-2)
    rows = [keys[:-2] for keys in rows]
    feed(layer, rows, 1)
    check_index(layer, rows)


def test_tokens_without_a_bucket_are_always_read(llama: Any) -> None:
    config = sparse("lsh-reformer", **ANY)
    ids = prompts(1, 90)
    with turbo_hf.patch(llama, config) as handle:
        cache = handle.new_cache()
    # without the patch the cache answers with dense keys, and sees none that it could make buckets of
    llama(ids, past_key_values=cache)
    assert all(bool((layer.bucket_index.buckets[..., :90] == -1).all()) for layer in cache.turbo_layers())
    with turbo_hf.patch(llama, config) as handle:
        llama(ids[:, :1], past_key_values=cache)
    layer = cache.turbo_layers()[0]
    assert layer.selector is not None
    seen = layer.selector.tally.selectivity(0)
    assert seen.read == seen.there == 2 * 91


# --- buckets are made of keys before rotary embedding ---------------------------------------------------------------


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("part", [PART, 64])
def test_buckets_are_those_of_the_keys_before_rotary_embedding(
    indexed: Calibration, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turbo_hf.sparse.PART", part)
    model, tokenizer = lab_model()
    inputs = tokenizer([PROSE[:600], PROSE[:200]], return_tensors="pt", padding=True)
    truth: list[Tensor] = []
    attention = model.model.layers[2].self_attn
    hook = attention.k_proj.register_forward_hook(lambda module, args, out: truth.append(out.detach()))
    with turbo_hf.patch(model, sparse("saap", **TRAINED), calibration=indexed) as handle:
        cache = handle.new_cache()
        model(**inputs, past_key_values=cache)
        one = torch.ones(2, 1, dtype=torch.long)
        mask = torch.cat((inputs["attention_mask"], one), 1)
        model(inputs["input_ids"][:, -1:], attention_mask=mask, past_key_values=cache)
    hook.remove()
    layer: Any = cache.layers[2]
    keys = torch.cat(truth, 1).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
    centroids = indexed.layers[2].centroids
    assert centroids is not None
    found, score = assign(keys, centroids), torch.einsum("bhnd,hcd->bhnc", keys, centroids.float())
    best = score.topk(2).values
    # a key between two centroids may go to either, by the rounding of the inverse rotation
    clear = best[..., 0] - best[..., 1] > 1e-4 * best[..., 0].abs()
    for row, length in enumerate(layer.lengths()):
        own = layer.bucket_index.buckets[row, :, 0, :length]
        assert bool(((own == found[row, :, -length:]) | ~clear[row, :, -length:]).all())
    assert float(clear.float().mean()) > 0.9


@pytest.mark.parametrize(
    ("family", "halves"), [("llama", True), ("qwen3", True), ("cohere", False), ("glm4", False), ("gpt_oss", False)]
)
def test_the_layout_of_a_rotation_is_found_out(family: str, halves: bool) -> None:
    name = f"transformers.models.{family}.modeling_{family}"
    importlib.import_module(name)
    attention = type("Attention", (), {"__module__": name})()
    assert turns_by_halves(attention, 64, 64) is halves


def test_other_layouts_are_undone_by_the_family_itself(indexed: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = lab_model()
    inputs = tokenizer([PROSE[:600], PROSE[:300]], return_tensors="pt", padding=True)
    config = sparse("saap", **TRAINED)
    fused = answers(model, config, calibration=indexed, **inputs)
    monkeypatch.setattr("turbo_hf.sparse.turns_by_halves", lambda *shape: False)
    assert torch.equal(answers(model, config, calibration=indexed, **inputs), fused)


@pytest.mark.usefixtures("in_time")
@torch.no_grad()
def test_padding_in_the_middle_moves_the_rotation_along(indexed: Calibration) -> None:
    model, tokenizer = lab_model()
    text = tokenizer([PROSE[:600], PROSE[:300]], return_tensors="pt", padding=True)
    config = sparse("saap", **TRAINED)
    with turbo_hf.patch(model, config, calibration=indexed) as handle:
        cache: Any = handle.new_cache()
        place = (text["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        model(**text, position_ids=place, past_key_values=cache)
        # a second turn of 5 tokens, of which the second row has 3, padded at the right
        turn = torch.randint(3, 1000, (2, 5))
        mask = torch.cat((text["attention_mask"], torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])), 1)
        place = (mask.cumsum(-1) - 1)[:, -5:]
        both = model(turn, attention_mask=mask, position_ids=place, past_key_values=cache).logits
        alone: Any = handle.new_cache()
        one = tokenizer(PROSE[:300], return_tensors="pt")
        model(**one, past_key_values=alone)
        want = model(turn[1:, :3], past_key_values=alone).logits
    assert torch.equal(both[1:, :3].argmax(-1), want.argmax(-1))
    # the first sparse layer: what deeper ones see hangs on sums of another order
    found, own = (held.layers[1].bucket_index.buckets for held in (cache, alone))
    length = alone.turbo_layers()[1].lengths()[0]
    assert torch.equal(found[1, ..., :length], own[0, ..., :length])


@pytest.mark.parametrize("selector", ["saap", "kmeans"])
@torch.no_grad()
def test_visits_are_those_that_the_calibration_judges(
    indexed: Calibration, selector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode's ranking of buckets, and that of `quality.evaluate` for the same queries before rotary embedding."""
    model, tokenizer = lab_model()
    seen: dict[int, Tensor] = {}
    visited = Centroids.visited

    def spy(selector: Centroids, *args: Any) -> Tensor:
        seen[selector.layer] = found = torch.as_tensor(visited(selector, *args))
        return found

    monkeypatch.setattr(Centroids, "visited", spy)
    truth: dict[int, Tensor] = {}
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, out, at=index: truth.update({at: out}))
        for index, layer in enumerate(model.model.layers)
    ]
    inputs = tokenizer([PROSE[:900], PROSE[:200]], return_tensors="pt", padding=True)
    with turbo_hf.patch(model, sparse(selector, **TRAINED), calibration=indexed):
        model.generate(**inputs, do_sample=False, max_new_tokens=3)
    # the model is that of other tests too
    for hook in hooks:
        hook.remove()
    assert list(seen) == [1, 2, 3, 4, 5]
    compared = 0
    for index, found in seen.items():
        stored = indexed.layers[index]
        assert stored.centroids is not None
        heads, _, dim = stored.centroids.shape
        plain = truth[index].view(2, heads, -1, dim)
        assert plain.shape[2] > 1, "a group of one would not tell heads from groups"
        for row in range(2):
            by_bucket = {
                "saap": classify(dict(stored.classifier), plain[row]).sum(1),
                "kmeans": (plain[row] @ stored.centroids.float().mT).sum(1),
            }[selector]
            best = by_bucket.topk(TRAINED["probes"] + 1)
            own = found[row, :, 0, 0].gather(-1, best.indices)
            # buckets that score alike may change places, by the rounding of the inverse rotation
            clear = best.values[:, -2] - best.values[:, -1] > 1e-3 * best.values.abs().amax(-1)
            assert bool(own[clear, :-1].all())
            assert not bool(own[clear, -1].any())
            compared += int(clear.sum())
    assert compared > 10


# --- the report -----------------------------------------------------------------------------------------------------


def test_the_report_counts_keys(llama: Any) -> None:
    config = sparse("window", **small("window", dense_layers=(0,)))
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
    assert "layer 0: 2 x 4 bit; reads every key: by dense_layers" in text
    assert "layer 1: 2 x 4 bit; window" in text
    assert "of the keys read, 0.00% of those beyond the dense part" in text


def test_rows_without_a_key_beyond_the_dense_part_are_counted_as_they_are(llama: Any) -> None:
    config = sparse("window", **small("window"))
    reports = []
    for lengths in ((12, 9), (40, 9)):
        with turbo_hf.patch(llama, config) as handle:
            llama.generate(**ragged(lengths), max_new_tokens=4, do_sample=False)
            reports.append(handle.report())
    # 3 steps after the prompt, 2 KV heads; a sink and 20 tokens are always read
    dense = [
        2 * sum(min(21, length + step) for length in lengths for step in (1, 2, 3)) for lengths in ((12, 9), (40, 9))
    ]
    there = [dense[0], 2 * (41 + 42 + 43 + 10 + 11 + 12)]
    for report, always, all_keys in zip(reports, dense, there, strict=True):
        assert {(read.there, read.dense, read.read) for read in report.selectivity} == {(all_keys, always, always)}
    assert "every key read: none was beyond the dense part" in str(reports[0])
    assert "every key read" not in str(reports[1])


def test_the_index_is_part_of_the_memory(llama: Any) -> None:
    with turbo_hf.patch(llama, sparse("lsh-reformer", **{**ANY, "dense_layers": (0,)})) as handle:
        cache = handle.new_cache()
        llama(prompts(3, 224), past_key_values=cache)
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
        ({"selector": "random", "buckets": 8, "probes": 9}, "probes must be at most the 8 buckets of a head; got 9"),
        (
            {"selector": "random", "buckets": 8},
            "at most the 8 buckets of a head; it is 32 unless it is given. Take fewer",
        ),
        ({"mass": 0.0}, r"SparseConfig.mass must be a number between 0 and 1; got 0\.0"),
        ({"mass": 1.0}, r"SparseConfig.mass must be a number between 0 and 1; got 1\.0"),
        ({"mass": 1}, "SparseConfig.mass must be a number between 0 and 1; got 1"),
        ({"mass": 0.1, "probes": 4}, "SparseConfig takes probes or mass, not both"),
        ({"mass": 0.1, "selector": "kmeans"}, 'SparseConfig.mass needs selector "saap", whose scores are shares; got'),
        ({"most_probes": 4}, "SparseConfig.most_probes has no effect without mass"),
        ({"selector": "lsh-gray", "buckets": 1000}, "must be a power of two with selector .lsh-gray.*; got 1000"),
        ({"mass": 0.1, "most_probes": 0}, "SparseConfig.most_probes must be a whole number of at least 1; got 0"),
        ({"independent": 1}, "SparseConfig.independent must be one of True, False; got 1"),
        ({"independent": True, "selector": "full"}, 'independent has no effect with selector "full". Leave it out'),
        ({"independent": True, "selector": "window"}, 'no effect with selector "window". Leave it out, or take one of'),
        ({"probes": 3, "selector": "window"}, 'SparseConfig.probes has no effect with selector "window"'),
        ({"probes": 3, "selector": "full"}, 'SparseConfig.probes has no effect with selector "full"'),
        ({"probes": 3, "selector": "lsh-tables"}, 'SparseConfig.probes has no effect with selector "lsh-tables"'),
        (
            {"buckets": 64},
            r'SparseConfig.buckets has no effect with selector "saap".*take one of lsh-reformer, lsh-gray',
        ),
        ({"tables": 8, "selector": "random"}, 'SparseConfig.tables has no effect with selector "random"'),
        ({"seed": 1 << 32}, "SparseConfig.seed must be at most 4294967295; got 4294967296"),
        ({"selector": "best"}, "SparseConfig.selector must be one of 'saap', 'kmeans', .*; got 'best'"),
        ({"buckets": 1}, "SparseConfig.buckets must be a whole number of at least 2; got 1"),
        ({"selector": "random", "buckets": 40000}, "SparseConfig.buckets must be at most 32768; got 40000"),
        ({"window_tokens": 0}, "SparseConfig.window_tokens must be a whole number of at least 1; got 0"),
        ({"sink_tokens": -1}, "SparseConfig.sink_tokens must be a whole number of at least 0; got -1"),
        ({"dense_layers": [0]}, r"SparseConfig.dense_layers must be a tuple of layer indices; got \[0\]"),
    ],
)
def test_a_wrong_choice_gets_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseConfig(**options)


def test_wrong_places_for_a_sparse_config() -> None:
    with pytest.raises(ValueError, match=r"TurboConfig\.sparse must be a SparseConfig or None; got 'saap'"):
        TurboConfig(sparse="saap")  # type: ignore[arg-type]
    for lacking, said in (
        (SparseConfig(independent=True), "SparseConfig.independent"),
        (SparseConfig(selector="lsh-tables"), "lsh"),
    ):
        with pytest.raises(
            ValueError, match=rf'backend "triton" cannot run here: .*{said}.* has no kernel\. Choose "auto"'
        ):
            TurboConfig(sparse=lacking, backend="triton")
        assert TurboConfig(sparse=lacking).sparse is lacking
    with pytest.raises(ValueError, match=r"selectors names layers \[7\]; the model has layers 0 to 1"):
        TurboCache(tiny_llama().config, selectors={7: Reformer(SparseConfig(), 7)})


def test_every_selector_has_a_name_and_a_maker() -> None:
    from turbo_hf.config import CALIBRATED  # noqa: PLC0415

    assert {*CALIBRATED, *UNTRAINED} == set(SELECTORS)


def test_a_calibration_is_needed_and_must_fit(llama: Any, indexed: Calibration) -> None:
    for selector in ("saap", "kmeans", "kmeans-rotated"):
        with pytest.raises(ValueError, match=f'selector "{selector}" needs a calibration of this model, and there is'):
            turbo_hf.patch(llama, sparse(selector))
    with pytest.raises(ValueError, match="does not fit this model: it was made for a model with"):
        turbo_hf.patch(llama, "saap", calibration=indexed)
    model, _ = lab_model()
    with pytest.raises(
        ValueError, match=r"at most the 16 buckets of a head; it is 32 unless it is given\. Take fewer, or"
    ):
        turbo_hf.patch(model, "saap", calibration=indexed)
    with pytest.raises(ValueError, match="probes must be at most the 16 buckets of a head; got 17"):
        turbo_hf.patch(model, sparse("saap", probes=17), calibration=indexed)
    with pytest.warns(UserWarning, match="steps visit 8 of the 16 buckets of a head, and so read most keys"):
        turbo_hf.patch(model, sparse("kmeans", probes=8), calibration=indexed).remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        turbo_hf.patch(model, sparse("kmeans", probes=7), calibration=indexed).remove()
    with pytest.raises(ValueError, match=r"SparseConfig\.dense_layers names layer 9; the last is 5"):
        turbo_hf.patch(model, sparse("saap", probes=4, dense_layers=(9,)), calibration=indexed)
    bare = replace(indexed, layers=tuple(replace(layer, centroids=None, classifier={}) for layer in indexed.layers))
    with pytest.raises(ValueError, match=r"no layer of this model can be sparse\. Layer 5 reads every key: the cal"):
        turbo_hf.patch(model, sparse("saap", probes=4), calibration=bare)
    without = (replace(layer, centroids=None, note=NO_INDEX + "it was cold") for layer in indexed.layers[4:])
    some = replace(indexed, layers=(*indexed.layers[:4], *without))
    with turbo_hf.patch(model, sparse("saap", probes=4), calibration=some) as handle:
        text = str(handle.report())
    assert "reads every key: it was cold" in text
    assert "saap, 4 of 16 buckets" in text
