"""The bucket index of a cache: it follows every operation, and is made of keys before rotary embedding."""

import copy
import importlib
from typing import Any

import pytest
import torch
from calibration_support import PROSE
from graphs_support import an_index
from models import lab_model, prompts, tiny_llama
from op_calls import assign, ops_like
from sparse_cache_support import ANY, TRAINED, answers, bucketed, sparse
from torch import Tensor

import turbo_hf
from turbo_hf import Calibration
from turbo_hf.attention.sparse_step import PART
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.rows import NewColumns
from turbo_hf.calibration.index import classify
from turbo_hf.models.versions import CACHE
from turbo_hf.sparse.selectors import Centroids
from turbo_hf.sparse.undo_rotary import turns_by_halves


@pytest.fixture
def in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens stay in the order of time: `tests/test_bucket_order.py` is about the other one."""
    monkeypatch.setattr("turbo_hf.sparse.bucket_index.BucketIndex.sorts", False)


def layer_of() -> TurboLayer:
    config = sparse("kmeans-rotated", **ANY)
    assert config.sparse is not None
    return TurboLayer(config, selector=bucketed(config.sparse))


def feed(layer: TurboLayer, rows: list[list[Tensor]], tokens: int, starts: list[int] | None = None) -> None:
    """New random keys for every row, in the layer and in plain lists."""
    k = torch.randn(len(rows), 2, tokens, 16)
    assert isinstance(layer.selector, Centroids)
    layer.append(k, torch.randn_like(k), NewColumns(tokens, None, starts), layer.selector.buckets(ops_like(k), k))
    layer.commit()
    for row, keys in enumerate(rows):
        keys += list(k[row, :, 0 if starts is None else starts[row] :].unbind(1))


def check_index(layer: TurboLayer, rows: list[list[Tensor]]) -> None:
    """Every token has the bucket of its key, at its place in its row."""
    assert isinstance(layer.selector, Centroids)
    assert layer.lengths() == [len(keys) for keys in rows]
    for row, keys in enumerate(rows):
        want = layer.selector.buckets(layer.ops, torch.stack(keys, 1)[None])
        assert torch.equal(layer.bucket_index.buckets[row : row + 1, ..., : len(keys)], want)


@pytest.mark.usefixtures("in_time")
def test_the_index_follows_every_operation() -> None:
    layer, rows = layer_of(), [[], [], []]  # type: ignore[var-annotated]
    feed(layer, rows, 70, [0, 10, 5])
    check_index(layer, rows)
    for _ in range(3):
        feed(layer, rows, 1)
    feed(layer, rows, 66, [66, 0, 30])
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


def test_tokens_without_a_bucket_are_always_read() -> None:
    llama = tiny_llama(num_hidden_layers=3)
    config = sparse("kmeans-rotated", **ANY)
    ids, index = prompts(1, 90), an_index(llama)
    with turbo_hf.patch(llama, config, calibration=index) as handle:
        cache = handle.new_cache()
    # without the patch the cache answers with dense keys, and sees none that it could make buckets of
    llama(ids, **{CACHE: cache})
    assert all(bool((layer.bucket_index.buckets[..., :90] == -1).all()) for layer in cache.turbo_layers())
    with turbo_hf.patch(llama, config, calibration=index) as handle:
        llama(ids[:, :1], **{CACHE: cache})
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
    monkeypatch.setattr("turbo_hf.attention.sparse_step.PART", part)
    model, tokenizer = lab_model()
    inputs = tokenizer([PROSE[:600], PROSE[:200]], return_tensors="pt", padding=True)
    truth: list[Tensor] = []
    attention = model.model.layers[2].self_attn
    hook = attention.k_proj.register_forward_hook(lambda module, args, out: truth.append(out.detach()))
    with turbo_hf.patch(model, sparse("saap", **TRAINED), calibration=indexed) as handle:
        cache = handle.new_cache()
        model(**inputs, **{CACHE: cache})
        one = torch.ones(2, 1, dtype=torch.long)
        mask = torch.cat((inputs["attention_mask"], one), 1)
        model(inputs["input_ids"][:, -1:], attention_mask=mask, **{CACHE: cache})
    hook.remove()
    layer: Any = cache.layers[2]
    keys = torch.cat(truth, 1).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
    centroids: Any = indexed.layers[2].centroids
    found, score = assign(keys, centroids), torch.einsum("bhnd,hcd->bhnc", keys, centroids.float())
    best = score.topk(2).values
    # a key between two centroids may go to either, by the rounding of the inverse rotation
    clear = best[..., 0] - best[..., 1] > 1e-4 * best[..., 0].abs()
    for row, length in enumerate(layer.lengths()):
        own = layer.bucket_index.buckets[row, :, :length]
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
    monkeypatch.setattr("turbo_hf.attention.sparse_step.turns_by_halves", lambda *shape: False)
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
        model(**text, position_ids=place, **{CACHE: cache})
        # a second turn of 5 tokens, of which the second row has 3, padded at the right
        turn = torch.randint(3, 1000, (2, 5))
        mask = torch.cat((text["attention_mask"], torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])), 1)
        place = (mask.cumsum(-1) - 1)[:, -5:]
        both = model(turn, attention_mask=mask, position_ids=place, **{CACHE: cache}).logits
        alone: Any = handle.new_cache()
        one = tokenizer(PROSE[:300], return_tensors="pt")
        model(**one, **{CACHE: alone})
        want = model(turn[1:, :3], **{CACHE: alone}).logits
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
            own = found[row, :, 0].gather(-1, best.indices)
            # buckets that score alike may change places, by the rounding of the inverse rotation
            clear = best.values[:, -2] - best.values[:, -1] > 1e-3 * best.values.abs().amax(-1)
            assert bool(own[clear, :-1].all())
            assert not bool(own[clear, -1].any())
            compared += int(clear.sum())
    assert compared > 10
