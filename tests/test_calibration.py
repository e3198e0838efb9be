"""Calibration: what is captured, what is made of it, what is kept, and how `patch` uses it."""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload  # type: ignore[import-untyped] # it has no types
from models import LAB_MODEL, lab_model, prompts, tiny_llama, tiny_mistral
from sklearn.cluster import KMeans  # type: ignore[import-untyped] # it has no types
from test_families import FAMILY_CASES, Case, build
from torch import Tensor
from transformers import AutoTokenizer, BloomConfig, BloomForCausalLM, T5Config, T5Model
from typer.testing import CliRunner

import turbo_hf
from turbo_hf import Calibration, TurboCache, TurboConfig
from turbo_hf.attention import Unsupported
from turbo_hf.calibration import artifacts, run
from turbo_hf.calibration.artifacts import FACTS, TENSORS, facts_hash, find, fingerprint
from turbo_hf.calibration.capture import Seen, capturing, probe, run_window
from turbo_hf.calibration.centroids import assign, choose_clusters, k_means
from turbo_hf.calibration.checkpoint import checkpoint_of, tokenizer_hash
from turbo_hf.calibration.heads import HeadPriorities, head_order
from turbo_hf.calibration.quality import SELECTIVITY, WAYS, _recalled, evaluate, mean_recall
from turbo_hf.calibration.query_model import (
    QueryModels,
    ResidualModels,
    _draw,
    classify,
    divergence,
    residual_width,
    stored_units,
    train,
)
from turbo_hf.calibration.run import calibrate, estimate, make_plan
from turbo_hf.calibration.samples import LARGEST, Samples, bucket_sums, true_mass
from turbo_hf.calibration.settings import Settings, resolve_settings
from turbo_hf.calibration.texts import token_windows
from turbo_hf.calibration.unfinished import PART
from turbo_hf.cli import app
from turbo_hf.config import HEAD_METRICS
from turbo_hf.ops.quantize import head_scores
from turbo_hf.rotary import unrotate

PROSE = (Path(turbo_hf.__file__).parent / "eval" / "haystack.txt").read_text()
TEXTS = [PROSE] * 8
SMALL = Settings(window=256, windows=3, queries=48, hidden=32, clusters=16, steps=8, batch=16, local=31, far=16)
HEADS = replace(SMALL, index=False)
NARROW: dict[str, Any] = {"architecture": "residual", "hidden": 4}
MIXED = TurboConfig(block_size=32, low_heads=0.5)


def lab(**options: Any) -> Calibration:
    model, tokenizer = lab_model()
    return calibrate(model, tokenizer, TEXTS, **{"settings": HEADS, **options})


@pytest.fixture(scope="module")
def indexed() -> Calibration:
    """The carried model with a small index."""
    return lab(settings=SMALL)


def test_a_pass_ends_behind_the_last_layer_that_it_is_for() -> None:
    model, tokenizer = lab_model()
    ran: list[int] = []
    hooks = [
        layer.mlp.register_forward_hook(lambda *args, index=index: ran.append(index))
        for index, layer in enumerate(model.model.layers)
    ]
    try:
        found = calibrate(model, tokenizer, TEXTS, settings=replace(SMALL, steps=1, windows=2, layers_at_once=4))
    finally:
        for hook in hooks:
            hook.remove()
    assert [layer.centroids is not None for layer in found.layers] == [True] * 6
    # two passes of the probe; two windows for layers 0 to 3, and for 4 and 5
    assert ran == [*range(6)] * 2 + [*range(3)] * 2 + [*range(5)] * 2


def reversed_heads(calibration: Calibration) -> Calibration:
    """The same with every head ranked the other way round."""
    layers = [replace(at, scores={name: -x for name, x in at.scores.items()}) for at in calibration.layers]
    return replace(calibration, layers=tuple(layers))


def same(a: Calibration, b: Calibration) -> bool:
    """Whether all that is stored is equal, bit by bit."""
    return a._files() == b._files()


# --- capture -----------------------------------------------------------------------------------------------------


def before_rotation(model: Any, ids: Tensor) -> tuple[dict[int, Seen], dict[int, Tensor]]:
    """What attention saw, and what each `k_proj` put out."""
    seen: dict[int, Seen] = {}
    true: dict[int, Tensor] = {}
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda m, a, out, i=i: true.update({i: out}))
        for i, layer in enumerate(model.model.layers)
    ]
    with capturing(model, lambda call: seen.update({call.source.index: call})):
        run_window(model, ids)
    for hook in hooks:
        hook.remove()
    return seen, true


@pytest.mark.parametrize(
    "rope",
    [
        pytest.param({"rope_type": "default", "rope_theta": 1e4}, id="default"),
        pytest.param({"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, id="linear"),
        pytest.param(
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}, id="yarn"
        ),
    ],
)
def test_inverse_rotation_gives_what_the_projection_gave(rope: dict[str, Any]) -> None:
    model = tiny_llama(rope_parameters=rope)
    seen, true = before_rotation(model, prompts(1, 63))
    for index, call in seen.items():
        assert call.rotary is not None
        got = unrotate(call.source.module, call.key, call.rotary)
        torch.testing.assert_close(got, true[index].view(1, 63, 2, 16).transpose(1, 2))


@pytest.mark.parametrize("case", FAMILY_CASES, ids=lambda case: case.model_type)
def test_every_family_passes_the_probe(case: Case) -> None:
    found = probe(build(case.model_type, **case.options))
    assert sorted(found) == [i for i in range(len(found) + len(case.dense)) if i not in case.dense]
    assert {at.obstacle for at in found.values()} == {None}


@pytest.mark.parametrize(
    ("case", "without"),
    [(Case("smollm3", {"no_rope_layers": [1, 1, 0]}), [2]), (Case("gpt2", {"n_layer": 3, "n_head": 4}), [0, 1, 2])],
    ids=["smollm3", "gpt2"],
)
def test_layers_without_rotary_embedding_are_told_and_get_no_index(case: Case, without: list[int]) -> None:
    plan = make_plan(build(case.model_type, **case.options), SMALL)
    assert plan.notes == dict.fromkeys(without, "no index: it has no rotary embedding")
    assert [group.layers for group in plan.groups if not group.indexed] == [tuple(without)]


def test_a_wrong_inverse_fails_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turbo_hf.rotary._rotate", lambda module, x, cos, sin: x)
    for at in probe(tiny_llama()).values():
        assert "the inverse of its rotary embedding fails the probe (relative error" in str(at.obstacle)


def test_capture_changes_nothing_and_is_undone() -> None:
    model = tiny_llama()
    ids = prompts(1, 40)
    before = model(ids).logits
    hidden = []
    with capturing(model, lambda call: hidden.append(call.query)):
        run_window(model, ids)
    with pytest.raises(RuntimeError, match="stop"), capturing(model, lambda call: None):
        raise RuntimeError("stop")
    assert len(hidden) == 2
    assert torch.equal(model(ids).logits, before)
    assert model.config._attn_implementation == "eager"
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_patched_model_is_refused() -> None:
    model = tiny_llama()
    with turbo_hf.patch(model), pytest.raises(ValueError, match=r"patched: calibrate it first, or call remove"):
        make_plan(model, SMALL)


# --- head priorities ---------------------------------------------------------------------------------------------


def test_priorities_are_the_mean_over_blocks() -> None:
    k, v = torch.randn(1, 3, 150, 16), torch.randn(1, 3, 150, 16)
    got = HeadPriorities()
    got.add(k, v)
    for metric in HEAD_METRICS:
        blocks = [head_scores(k[:, :, i : i + 64], v[:, :, i : i + 64], metric)[0] for i in (0, 64)]
        torch.testing.assert_close(got.scores()[metric], torch.stack(blocks).mean(0))
    assert head_order(torch.tensor([1.0, 3.0, 1.0, 2.0])) == (1, 3, 0, 2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(("part", "name"), [("q_proj", "queries"), ("k_proj", "keys"), ("v_proj", "values")])
@pytest.mark.parametrize("layer", [0, 1])
def test_nan_activations_are_refused(layer: int, part: str, name: str, bad: float) -> None:
    model = tiny_llama()
    getattr(model.model.layers[layer].self_attn, part).weight.data[0, 0] = bad
    _, tokenizer = lab_model()
    model.resize_token_embeddings(len(tokenizer))
    for settings in (HEADS, SMALL):
        with pytest.raises(ValueError, match=rf"layer {layer}: {name} hold NaN or Inf"):
            calibrate(model, tokenizer, TEXTS, settings=settings)


def test_nan_that_only_the_texts_bring_is_refused() -> None:
    model = tiny_llama()
    _, tokenizer = lab_model()
    model.resize_token_embeddings(len(tokenizer))
    plan = make_plan(model, HEADS)
    windows = token_windows(TEXTS, tokenizer, HEADS.window, HEADS.windows)
    model.get_input_embeddings().weight.data[windows[0, 5]] = torch.nan
    with pytest.raises(ValueError, match="layer 0: queries hold NaN or Inf"):
        run._calibrate_group(model, plan.groups[0], plan, windows, lambda work: None)


# --- centroids ---------------------------------------------------------------------------------------------------


def test_k_means_is_as_good_as_scikit_learn() -> None:
    seeded = torch.Generator().manual_seed(0)
    centres = torch.nn.functional.normalize(torch.randn(2, 24, 16, generator=seeded), dim=-1)
    keys = centres.repeat(1, 40, 1) + 0.15 * torch.randn(2, 960, 16, generator=seeded)
    keys = torch.nn.functional.normalize(keys, dim=-1)
    found = k_means(keys, 24, 10, torch.Generator().manual_seed(1))
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(2, 24))
    assert torch.equal(found, k_means(keys, 24, 10, torch.Generator().manual_seed(1)))
    for head in range(2):
        ours = (keys[head] @ found[head].T).amax(-1).mean()
        oracle = KMeans(24, init="random", n_init=3, max_iter=10, random_state=0).fit(keys[head].numpy())
        theirs = torch.nn.functional.normalize(torch.tensor(oracle.cluster_centers_), dim=-1)
        # three starts against one: ours may end in a somewhat poorer optimum
        assert ours > (keys[head] @ theirs.T).amax(-1).mean() - 0.03


def test_k_means_fills_centroids_that_lost_their_keys() -> None:
    keys = torch.eye(8).repeat(1, 50, 1)  # 8 different keys for 16 centroids
    found = k_means(keys, 16, 10, torch.Generator().manual_seed(0))
    assert bool(torch.isfinite(found).all())
    assert assign(keys, found).max() < 16


def test_the_number_of_clusters_follows_the_data() -> None:
    assert [choose_clusters(None, keys) for keys in (10**6, 32 * 1024, 32 * 1024 - 1, 100)] == [1024, 1024, 512, 8]
    assert choose_clusters(50, 100) == 50
    with pytest.raises(ValueError, match="99 keys a head are too few for 50 clusters"):
        choose_clusters(50, 99)


# --- the query classifier ----------------------------------------------------------------------------------------


def test_true_mass_is_that_of_a_loop() -> None:
    query, key = torch.randn(2, 5, 8), torch.randn(2, 40, 8)
    position, buckets = torch.randint(20, 40, (2, 5)), torch.randint(0, 6, (2, 40))
    mass, sizes = true_mass(query, position, key, buckets, 6, 11, 0.3, 5.0)
    for n in range(2):
        for r in range(5):
            last = int(position[n, r]) - 12
            score = torch.tanh(key[n, 1 : last + 1] @ query[n, r] * 0.3 / 5) * 5
            want = torch.zeros(6).index_add(0, buckets[n, 1 : last + 1], score.softmax(-1))
            torch.testing.assert_close(mass[n, r], want)
            assert sizes[n, r].tolist() == buckets[n, 1 : last + 1].bincount(minlength=6).tolist()


def test_long_range_queries_are_those_whose_best_key_is_far() -> None:
    key = torch.zeros(1, 30, 4)
    key[0, 3], key[0, 0] = 1.0, 9.0  # key 3 is best of all but the sink
    query = torch.ones(1, 1, 2, 4)
    assert Samples(1.0, None)._is_far(query, key, torch.tensor([10, 20]), 8)[0, 0].tolist() == [False, True]


def untrained(query: Tensor, hidden: int, clusters: int) -> QueryModels:
    covariance = torch.stack([x.T.cov(correction=0) for x in query])
    return QueryModels(query.mean(1, keepdim=True), covariance, hidden, clusters, torch.Generator().manual_seed(0))


def test_folded_classifier_has_the_batch_norm_of_all_queries() -> None:
    query = torch.randn(2, 4000, 8) * 2 + 1
    models = untrained(query, 16, 5)
    with torch.no_grad():
        models.gain.uniform_(0.5, 2)
        models.shift.normal_()
        x = torch.bmm(query, models.weight_1)
        x = torch.nn.functional.batch_norm(x.transpose(0, 1).flatten(1), None, None, training=True).view(4000, 2, 16)
        hidden = (x.transpose(0, 1) * models.gain + models.shift).relu()
        want = torch.bmm(hidden, models.weight_2) + models.bias_2
        torch.testing.assert_close(classify(models.folded(), query), want, rtol=1e-4, atol=1e-4)
        assert torch.equal(models(query), classify(models.folded(), query))


@pytest.mark.parametrize("hidden", [16, 40])
def test_the_classifier_starts_at_k_means(hidden: int) -> None:
    query = torch.randn(2, 4000, 8) * 2 + 1
    models = untrained(query, hidden, 30)
    centroids = torch.nn.functional.normalize(torch.randn(2, 30, 8), dim=-1)
    models.start_at(3 * centroids)
    other = torch.randn(2, 500, 8)
    want = 3 * torch.bmm(other, centroids.mT)
    got = models(other).detach()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    # as exact as float32 is: no two buckets change places but those that are as good as equal
    ranked = want.gather(-1, got.argsort(-1, descending=True))
    assert bool((ranked.diff(dim=-1) < 1e-5).all())


def test_a_narrow_classifier_starts_at_random() -> None:
    query = torch.randn(1, 100, 8)
    models, same_seed = untrained(query, 15, 4), untrained(query, 15, 4)
    models.start_at(torch.randn(1, 4, 8))
    assert all(map(torch.equal, models.state_dict().values(), same_seed.state_dict().values()))


def test_residual_classifiers_fold_into_an_mlp() -> None:
    query = torch.randn(2, 4000, 8) * 2 + 1
    start = torch.randn(2, 30, 8)
    covariance = torch.stack([x.T.cov(correction=0) for x in query])
    seeded = torch.Generator().manual_seed(0)
    models = ResidualModels(query.mean(1, keepdim=True), covariance, 5, start, seeded)
    other = torch.randn(2, 500, 8)
    # narrower than twice the head dim, and at k-means all the same
    torch.testing.assert_close(models(other), torch.bmm(other, start.mT), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        for parameter in models.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=seeded) / 2)
        want = torch.bmm(other + classify(models.inner.folded(), other), models.weight) + models.bias
        assert not torch.allclose(want, torch.bmm(other, models.weight) + models.bias)
        stored = models.folded()
        assert {name: tuple(x.shape) for name, x in stored.items()} == {
            "weight_1": (2, 8, 5 + 16),
            "bias_1": (2, 5 + 16),
            "weight_2": (2, 5 + 16, 30),
            "bias_2": (2, 30),
        }
        torch.testing.assert_close(models(other), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(classify(stored, other), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dim", "clusters", "hidden"), [(8, 30, 40), (64, 64, 1024), (16, 4, 33)])
def test_a_residual_classifier_has_as_many_weights_as_the_mlp(dim: int, clusters: int, hidden: int) -> None:
    mean, covariance, seeded = torch.zeros(1, 1, dim), torch.eye(dim)[None], torch.Generator()
    mlp = QueryModels(mean, covariance, hidden, clusters, seeded)
    width = residual_width(dim, clusters, hidden)
    residual = ResidualModels(mean, covariance, width, torch.zeros(1, clusters, dim), seeded)
    ours, theirs = (sum(p.numel() for p in each.parameters()) for each in (residual, mlp))
    assert 0 <= theirs - ours < 2 * dim + 2, "one unit more would be too many"
    assert residual.folded()["bias_1"].shape[1] == stored_units(
        replace(SMALL, hidden=hidden, architecture="residual"), dim, clusters
    )


def test_a_residual_classifier_needs_room() -> None:
    with pytest.raises(
        ValueError, match=r"hidden must be at least 7 for a residual .* head dim 8 and 30 clusters.*got 6"
    ):
        residual_width(8, 30, 6)
    assert residual_width(8, 30, 7) == 1


def made_up(windows: int, turned: bool) -> tuple[Samples, list[Tensor], Tensor]:
    """A layer without rotary embedding whose classifier sees its queries, or sees them turned away from the keys."""
    seeded = torch.Generator().manual_seed(0)
    dim, length, count = 8, 200, 128
    turn = torch.linalg.qr(torch.randn(dim, dim, generator=seeded)).Q if turned else torch.eye(dim)
    samples = Samples(1.0, None)
    for _ in range(windows):
        keys = torch.randn(1, length, dim, generator=seeded)
        query = 2 * torch.randn(1, 2, count, dim, generator=seeded)
        samples.plain_keys.append(keys)
        samples.keys.append(keys)
        samples.plain_queries.append(query)
        samples.queries.append(query @ turn)
        samples.positions.append(torch.randint(100, length, (count,), generator=seeded))
        samples.far.append(torch.ones(1, 2, count, dtype=torch.bool))
    centroids = k_means(torch.cat(samples.keys, 1), 32, 5, seeded)
    return samples, [assign(keys, centroids) for keys in samples.keys], centroids


@pytest.mark.parametrize(
    ("turned", "architecture", "gain"),
    [(False, "mlp", 0.95), (False, "residual", 0.9), (True, "mlp", 4.0), (True, "residual", 4.0)],
)
def test_training_keeps_what_k_means_finds_and_learns_what_it_cannot(
    turned: bool, architecture: Any, gain: float
) -> None:
    samples, buckets, centroids = made_up(13, turned)
    found = []
    for steps in (1, 200):
        settings = replace(SMALL, hidden=64, steps=steps, batch=64, learning_rate=1e-2, architecture=architecture)
        classifier, loss = train([samples], [buckets], [centroids], 12, settings, lambda: None)
        judged = evaluate(samples, buckets, centroids, centroids, classifier, range(12, 13), settings.local, 0)
        found.append((float(loss), judged["loss"]))
    for before, after in zip(*found, strict=True):
        assert after < 0.75 * before
    recall, _, by_k_means, rotated, by_chance = (mean_recall([judged], way)[2] for way in WAYS)
    assert recall > gain * max(by_k_means, by_chance)
    # which sees the queries as they meet the keys
    assert rotated == pytest.approx(by_k_means) if not turned else rotated > 4 * by_k_means


def test_long_range_training_sees_long_range_queries_alone() -> None:
    samples, buckets, centroids = made_up(3, False)
    for far, query in zip(samples.far, samples.queries, strict=True):
        far[:, 1] = False
        query[:, 1] = torch.nan
    settings = replace(SMALL, hidden=64, steps=5, batch=64)
    made = [
        train([samples], [buckets], [centroids], 2, replace(settings, long_range=chosen), lambda: None)
        for chosen in (True, False)
    ]
    finite = [all(bool(x.isfinite().all()) for x in classifier.values()) for classifier, _ in made]
    assert finite == [True, False]


def test_each_head_draws_long_range_queries_of_its_own() -> None:
    settings, seeded = replace(SMALL, batch=200, long_range=True), torch.Generator().manual_seed(0)
    layers = [made_up(1, False)[0] for _ in range(3)]
    for number, layer in enumerate(layers[:2]):
        layer.far[0][:] = False
        layer.far[0][0, 1, 7 * number : 7 * number + 3] = True
    layers[2].far[0][:] = False
    pick, asking = _draw(layers, 0, settings, seeded)
    assert asking.tolist() == [True, True, False]
    # two query heads of 128 queries each
    assert [set(own.tolist()) for own in pick[:2]] == [{128, 129, 130}, {135, 136, 137}]


def test_a_head_without_a_long_range_query_stays_as_it_began() -> None:
    samples, buckets, centroids = made_up(2, False)
    without, *_ = made_up(2, False)
    for far in without.far:
        far[:] = False
    settings = replace(SMALL, hidden=16, steps=20, batch=32, long_range=True, learning_rate=1e-2)
    classifier, losses = train([samples, without], [buckets] * 2, [centroids] * 2, 2, settings, lambda: None)
    assert losses.isfinite().tolist() == [True, False]
    query = torch.randn(2, 50, 8)
    length = torch.cat(samples.plain_keys, 1).norm(dim=-1).mean()
    begun = torch.bmm(query, (centroids * length).mT.expand(2, -1, -1))
    got = classify(classifier, query)
    torch.testing.assert_close(got[1], begun[1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got[0], begun[0], rtol=0.01, atol=0.01)
    assert run._untrained(samples, 2) == ""
    assert run._untrained(without, 2) == "no long-range query to train heads 0 with"
    samples.far[1][:] = False
    message = "more than 16 tokens away, and window 1 has none. Take a smaller far, .* or long_range=False"
    with pytest.raises(ValueError, match=message):
        train([samples, without], [buckets] * 2, [centroids] * 2, 2, settings, lambda: None)


def test_divergence_counts_the_keys_of_a_bucket() -> None:
    target, logits = torch.rand(3, 7).softmax(-1), torch.randn(3, 7)
    sizes = torch.randint(1, 9, (3, 7)).float()
    told = sizes * logits.exp()
    want = torch.nn.functional.kl_div((told / told.sum(-1, keepdim=True)).log(), target, reduction="none").sum(-1)
    torch.testing.assert_close(divergence(target, logits, sizes), want)
    target, logits = torch.tensor([[0.0, 1.0]]), torch.zeros(1, 2, requires_grad=True)
    assert divergence(target, logits, torch.tensor([[3.0, 1.0]])).item() == pytest.approx(1.3862944)
    # a bucket without keys has no mass and no say, and teaches nothing
    alone = divergence(target, logits, torch.tensor([[0.0, 1.0]]))
    alone.sum().backward()
    assert logits.grad is not None
    assert alone.item() == 0
    assert logits.grad.abs().max() < 1e-30


def test_bucket_sums_are_products_with_members(device: torch.device) -> None:
    # shares as attention has them: a few large ones and many that a half cannot hold
    x = (6 * torch.randn(2, 3, 5000)).softmax(-1).to(device)
    seen = torch.rand(2, 3, 5000, device=device) < 0.5
    buckets = torch.randint(0, 4, (2, 5000), device=device)
    member = torch.nn.functional.one_hot(buckets, 4).double()
    sums, counts = bucket_sums((x, seen), buckets, 4)
    assert torch.equal(counts, (seen.double() @ member).float())
    # what rounding a share to a half loses: half of its last bit, or of the smallest half there is
    torch.testing.assert_close(sums.double(), x.double() @ member, rtol=2**-11, atol=5000 * 2**-25 / LARGEST)
    assert sums.dtype == counts.dtype == torch.float32


def test_training_recalls_more_than_chance() -> None:
    found = lab(
        settings=replace(SMALL, window=512, windows=5, queries=256, clusters=32, hidden=128, steps=150, batch=64)
    )
    judged = [dict(layer.quality) for layer in found.layers]
    recall = {way: mean_recall(judged, way) for way in WAYS}
    assert len(recall["classifier"]) == len(SELECTIVITY)
    for way in WAYS[:-1]:
        assert recall[way] == sorted(recall[way])
        assert recall[way][-1] > 1.5 * recall["random"][-1]


def test_recall_of_known_buckets() -> None:
    score, mass = torch.tensor([[[[3.0, 1.0, 2.0]]]]), torch.tensor([[[[0.6, 0.3, 0.1]]]])
    sizes = torch.tensor([[[2.0, 94.0, 4.0]]])
    got = _recalled(score, mass, sizes, torch.ones(1, 1, 1, dtype=torch.float64))
    # of 100 keys: half of bucket 0; bucket 0; half of bucket 2 too; all of 2, and 2 of 94 keys of 1
    want = torch.tensor([[0.3, 0.6, 0.65, 0.7 + 0.3 * 2 / 94]], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_recall_of_heads_that_choose_independently() -> None:
    # two heads of one KV head, best buckets first: 0, 1, 2 and 1, 0, 2
    score = torch.tensor([[[[3.0, 2.0, 1.0]], [[2.0, 3.0, 1.0]]]])
    mass = torch.tensor([[[[0.6, 0.3, 0.1]], [[0.2, 0.7, 0.1]]]])
    sizes = torch.tensor([[[2.0, 3.0, 95.0]]])
    got = _recalled(score, mass, sizes, torch.ones(1, 2, 1, dtype=torch.float64))
    # the first buckets are 5 keys together; the second ones are read already; 3 of 95 keys of the last
    want = [1.3 * 0.2, 1.3 * 0.4, 1.3 * 0.8, 1.3 + 0.5 + 0.2 * 3 / 95]
    torch.testing.assert_close(got, torch.tensor([want], dtype=torch.float64), rtol=1e-6, atol=0)


# --- the run -----------------------------------------------------------------------------------------------------


def test_a_run_makes_all_of_it_and_the_same_for_a_seed(indexed: Calibration) -> None:
    for layer in indexed.layers:
        assert set(layer.scores) == set(HEAD_METRICS)
        assert layer.centroids is not None
        assert layer.centroids.shape == (2, 16, 64)
        assert {name: tuple(x.shape) for name, x in layer.classifier.items()} == {
            "weight_1": (2, 64, 32),
            "bias_1": (2, 32),
            "weight_2": (2, 32, 16),
            "bias_2": (2, 16),
        }
        assert set(layer.quality["recall"]) == set(WAYS)
    assert same(indexed, lab(settings=SMALL))
    assert not same(indexed, lab(settings=replace(SMALL, seed=1)))


def test_an_offloaded_model_gives_the_same(indexed: Calibration) -> None:
    model, tokenizer = lab_model()
    model = copy.deepcopy(model)
    cpu_offload(model, "cpu")
    assert same(calibrate(model, tokenizer, TEXTS, settings=SMALL), indexed)


def test_a_classifier_that_float16_cannot_hold_leaves_its_layer_without_an_index(
    monkeypatch: pytest.MonkeyPatch, indexed: Calibration
) -> None:
    def wide(*args: Any) -> Any:
        classifier, loss = train(*args)
        bias = classifier["bias_1"].clone()
        bias[:2] = 1e6
        return classifier | {"bias_1": bias}, loss

    monkeypatch.setattr(run, "train", wide)
    first, *others = lab(settings=SMALL).layers
    assert first.note == run.HARDLY_VARY
    assert first.centroids is None
    assert first.scores
    assert others[0].centroids is not None


def test_sliding_layers_get_priorities_alone() -> None:
    _, tokenizer = lab_model()
    model = tiny_mistral(64)
    model.resize_token_embeddings(len(tokenizer))
    found = calibrate(model, tokenizer, TEXTS, settings=SMALL)
    assert [(bool(at.scores), at.centroids, at.note) for at in found.layers] == [
        (True, None, "no index: it has a sliding window")
    ] * 2


@pytest.mark.parametrize("stop", [0.1, 0.9])
def test_an_interrupted_run_goes_on(stop: float, tmp_path: Path, indexed: Calibration) -> None:
    done = 0.0
    captured: list[float] = []

    def interrupt(word: str, share: float) -> None:
        nonlocal done
        done += share
        if done > stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab(settings=SMALL, out=tmp_path, progress=interrupt)
    assert not (tmp_path / FACTS).exists()
    kept = len(list((tmp_path / PART).glob("group-*"))) if stop > 0.5 else 0
    assert kept == (1 if stop > 0.5 else 0)
    found = lab(settings=SMALL, out=tmp_path, resume=True, progress=lambda word, share: captured.append(share))
    assert sum(captured) == pytest.approx(1.0)
    assert same(found, indexed)
    assert same(Calibration.from_pretrained(tmp_path), indexed)
    assert not (tmp_path / PART).exists()


def test_resume_refuses_another_run(tmp_path: Path, indexed: Calibration) -> None:
    indexed.save_pretrained(tmp_path / PART / "group-0")
    others: list[dict[str, Any]] = [{"seed": 3}, {"architecture": "residual"}, {"long_range": True}]
    for other in others:
        with pytest.raises(ValueError, match="had other settings, texts or another model"):
            lab(settings=replace(SMALL, **other), out=tmp_path, resume=True)
    with pytest.raises(ValueError, match="resume needs out"):
        lab(resume=True)


def index_bytes(found: Calibration) -> int:
    return sum(x.nbytes for at in found.layers for n, x in at.tensors().items() if "scores" not in n)


def test_another_classifier_of_another_run(indexed: Calibration) -> None:
    model, _ = lab_model()
    settings = replace(SMALL, architecture="residual", long_range=True)
    found = lab(settings=settings)
    assert estimate(model, make_plan(model, settings))["file_bytes"] == index_bytes(found)
    for own, other in zip(found.layers, indexed.layers, strict=True):
        assert own.centroids is not None
        assert other.centroids is not None
        assert torch.equal(own.centroids, other.centroids)
        assert own.classifier["bias_1"].shape[1] == stored_units(settings, 64, 16) != SMALL.hidden
        assert own.quality["recall"]["k-means"] == other.quality["recall"]["k-means"]
        assert own.quality["recall"]["classifier"] != other.quality["recall"]["classifier"]
    sparse = TurboConfig(sparse=turbo_hf.SparseConfig(probes=4, window_tokens=31), block_size=32)
    with turbo_hf.patch(model, sparse, calibration=found) as handle:
        model.generate(prompts(1, 200), max_new_tokens=3, do_sample=False)
        assert handle.report().selectivity[0].share_beyond > 0


def test_estimate_counts_what_is_stored(indexed: Calibration) -> None:
    model, _ = lab_model()
    needs = estimate(model, make_plan(model, SMALL))
    assert all(x > 0 for x in needs.values())
    assert needs["file_bytes"] == index_bytes(indexed)
    samples = 2 * (SMALL.window + 2 * SMALL.queries) * 64 * model.dtype.itemsize * 4 * 2 * SMALL.windows
    assert needs["host_bytes"] == samples


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 100, "local": 90}, "too short for the long-range filter: with local=90 and far=16 they need 184"),
        ({"window": 63}, "Settings.window must be a whole number of at least 64; got 63"),
        ({"windows": 1}, "Settings.windows must be a whole number of at least 2; got 1"),
        ({"clusters": 32769}, "Settings.clusters must be at most 32768; got 32769"),
        ({"seed": 1 << 32}, "Settings.seed must be at most 4294967295; got 4294967296"),
        ({"clusters": 1}, "Settings.clusters must be a whole number of at least 2; got 1"),
        ({"seed": -1}, "Settings.seed must be a whole number of at least 0; got -1"),
        ({"learning_rate": 2.0}, "Settings.learning_rate must be a number between 0 and 1; got 2.0"),
        ({"index": 1}, "Settings.index must be True or False; got 1"),
        ({"long_range": 1}, "Settings.long_range must be True or False; got 1"),
        ({"architecture": "deep"}, "Settings.architecture must be 'mlp' or 'residual'; got 'deep'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **settings)


def test_bad_input() -> None:
    model, tokenizer = lab_model()
    with pytest.raises(ValueError, match="one of the presets fast, full; got 'slow'"):
        resolve_settings("slow")
    assert resolve_settings("fast", 6000).window == 6000
    with pytest.raises(ValueError, match="longer than the 100 positions"):
        resolve_settings(SMALL, 100)
    with pytest.raises(TypeError, match=r"must be a transformers.PreTrainedModel; got str"):
        calibrate("model", tokenizer, TEXTS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="too few for two windows of 256"):
        calibrate(model, tokenizer, ["A short text."], settings=HEADS)
    with pytest.raises(ValueError, match="no file or folder 'nowhere'"):
        calibrate(model, tokenizer, "nowhere", settings=HEADS)
    begun: list[float] = []
    for own, told in (({"clusters": 4000}, "too few for 4000 clusters"), (NARROW, "hidden must be at least 15 for")):
        with pytest.raises(ValueError, match=told):
            lab(settings=replace(SMALL, **own), progress=lambda _, share: begun.append(share))
    assert not begun, "told before the first pass"
    with pytest.raises(ValueError, match="it belongs to another model"):
        calibrate(tiny_llama(), tokenizer, TEXTS, settings=HEADS)
    with pytest.raises(ValueError, match=r"no layer of LlamaForCausalLM can be calibrated: .*24"):
        make_plan(build("llama", head_dim=24), SMALL)
    with pytest.raises(
        ValueError, match=r"in training mode, in which dropout changes what it sees. Call model.eval\(\)"
    ):
        make_plan(tiny_llama().train(), SMALL)
    small: dict[str, Any] = {"vocab_size": 100, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ValueError, match="T5Model is an encoder-decoder; only decoder-only models can be calibrated"):
        make_plan(T5Model(T5Config(**small)).eval(), SMALL)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=100, hidden_size=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(ValueError, match="no layer of BloomForCausalLM can be calibrated: it has no single attention"):
        make_plan(bloom, SMALL)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (None, "texts must be a .txt or .jsonl file, a folder .* strings; got NoneType"),
        (3, "texts must be .*; got int"),
        ([1], "texts must hold strings; number 0 is int"),
        ([PROSE[:200], Path("book.txt")], "texts must hold strings; number 1 is Posix"),
        (PROSE, r"a string names a .txt or .jsonl file.*characters. Pass a text as \[text\]"),
        ("two\nlines", r"this one has 9 characters. Pass a text as \[text\]"),
        (
            [str(LAB_MODEL.parents[1] / "eval" / "haystack.txt")],
            "number 0, .*haystack.txt', names a file. Strings are te",
        ),
        ({"a": PROSE}, "texts must be .*; got dict"),
        (b"text", "texts must be .*; got bytes"),
        ("", r"this one has 0 characters. Pass a text as \[text\]"),
        ("x" * 300, "there is no file or folder 'xxx"),
        (__file__, "test_calibration.py' is no .txt or .jsonl file. Rename it if it is plain text"),
    ],
    ids=range(12),
)
def test_texts_that_are_none(texts: Any, message: str) -> None:
    model, tokenizer = lab_model()
    with pytest.raises(ValueError, match=message):
        calibrate(model, tokenizer, texts, settings=HEADS)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    model, tokenizer = lab_model()
    tokenizer.save_pretrained(tmp_path)
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = made["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    other = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the tokenizer is not the model's own: it has token .* as"):
        calibrate(model, other, TEXTS, settings=HEADS)
    with pytest.raises(ValueError, match="tokenizer must be the model's own, as of AutoTokenizer; got NoneType"):
        calibrate(model, None, TEXTS, settings=HEADS)
    more = copy.deepcopy(tokenizer)
    more.add_special_tokens({"pad_token": "<mine>"})
    found = calibrate(model, more, TEXTS, settings=HEADS)
    assert found.fingerprint == lab().fingerprint
    elsewhere = replace(found, fingerprint={**found.fingerprint, "tokenizer": tokenizer_hash(other)})
    with pytest.raises(ValueError, match="it was made for a model with tokenizer"):
        turbo_hf.patch(model, "turbo-mixed", calibration=elsewhere)
    with turbo_hf.patch(model, "turbo-mixed", calibration=found):
        pass


def test_a_tokenizer_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = lab_model()
    found = lab()
    monkeypatch.setattr(model.config, "_name_or_path", str(tmp_path))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text("{")
    with pytest.warns(UserWarning, match="cannot be read, so that none is compared with it"):
        turbo_hf.patch(model, "turbo-mixed", calibration=found).remove()


def test_out_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    begun: list[float] = []
    with pytest.raises(ValueError, match=r"out must be a folder, or the name of a new one; .* is a file"):
        lab(out=tmp_path / "file", progress=lambda _, share: begun.append(share))
    assert not begun


def test_no_more_of_a_file_is_read_than_is_wanted(tmp_path: Path) -> None:
    _, tokenizer = lab_model()
    lines = [json.dumps({"text": PROSE})] * 20
    (tmp_path / "long.jsonl").write_text("\n".join([*lines, "no JSON"]))
    assert token_windows(tmp_path, tokenizer, 128, 4).shape == (4, 128)


def test_short_texts_of_any_length_are_texts() -> None:
    _, tokenizer = lab_model()
    rows = [".", "tests", PROSE[:300].replace("\n", " "), PROSE[300:4000].replace("\n", " ")]
    assert token_windows(rows * 3, tokenizer, 128, 6).shape == (6, 128)


def test_windows_of_texts(tmp_path: Path) -> None:
    _, tokenizer = lab_model()
    (tmp_path / "a.txt").write_text(PROSE)
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": PROSE[k::1]}) for k in (100, 200)))
    windows = token_windows(tmp_path, tokenizer, 128, 6)
    assert windows.shape == (6, 128)
    start = tokenizer(PROSE[:2000])["input_ids"][:128]
    assert windows[0].tolist() == start
    (tmp_path / "b.jsonl").write_text('{"words": 1}')
    with pytest.raises(ValueError, match='no JSON object with a "text"'):
        token_windows(tmp_path, tokenizer, 128, 6)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no .txt or .jsonl file"):
        token_windows(tmp_path / "empty", tokenizer, 128, 6)


# --- artifacts ---------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path, indexed: Calibration) -> None:
    indexed.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {FACTS, TENSORS, artifacts.CARD}
    found = Calibration.from_pretrained(tmp_path)
    assert same(found, indexed)
    assert found.source == str(tmp_path)
    for metric in HEAD_METRICS:
        assert found.head_orders(metric) == indexed.head_orders(metric)
    with pytest.raises(ValueError, match="metric must be one of"):
        found.head_orders("size")


def spoil(folder: Path, how: str) -> None:
    facts = json.loads((folder / FACTS).read_text())
    if how == "json":
        (folder / FACTS).write_text("{")
    elif how == "format":
        (folder / FACTS).write_text("[]")
    elif how == "bytes":
        content = bytearray((folder / TENSORS).read_bytes())
        content[-1] ^= 1
        (folder / TENSORS).write_bytes(bytes(content))
    elif how == "number":
        (folder / FACTS).write_text(json.dumps(facts | {"tokens": facts["tokens"] + 1}))
    elif how == "cut":
        (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:100])
    else:
        layer = {"index": 0, "note": "", "quality": {}}
        key, value = {
            "schema": ("schema", 1),
            "layers": ("layers", [{}]),
            "fingerprint": ("fingerprint", [1]),
            "note": ("layers", [layer | {"note": 3}]),
            "quality": ("layers", [layer | {"quality": None}]),
        }[how]
        facts[key] = value
        (folder / FACTS).write_text(json.dumps(facts | {"facts_sha256": facts_hash(facts)}))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("json", f"damaged: {FACTS} is no JSON"),
        ("format", "does not say that it is a turbo_hf calibration"),
        ("bytes", f"{TENSORS} is not the file that {FACTS} was written with"),
        ("cut", f"{TENSORS} is not the file that {FACTS} was written with"),
        ("schema", "has schema 1; this version reads 2"),
        ("number", f"{FACTS} is not as it was written"),
        ("layers", "damaged: KeyError"),
        ("fingerprint", "damaged: TypeError"),
        ("note", "damaged: TypeError: the note of layer 0 is 3, no text"),
        ("quality", "damaged: TypeError"),
    ],
)
def test_damaged_artifacts_are_refused(how: str, message: str, tmp_path: Path) -> None:
    lab().save_pretrained(tmp_path)
    spoil(tmp_path, how)
    with pytest.raises(ValueError, match=message):
        Calibration.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weight_2", None, "its index has no weight_2"),
        ("centroids", None, "its index has no centroids"),
        ("rotated_centroids", None, "its index has no rotated_centroids"),
        ("classifier", None, "its index has no weight_1"),
        ("centroids", lambda x: x[:, 0], r"centroids is \[2, 64\]"),
        ("weight_2", lambda x: x[..., 1:], r"weight_2 is \[2, 32, 15\], and should be \[2, 32, 16\]"),
        ("rotated_centroids", lambda x: x[..., 1:], r"rotated_centroids is .*, and should be"),
        ("centroids", lambda x: x[1:], "centroids is for 1 KV heads, and there are 2"),
        ("centroids", lambda x: x.to(torch.int8), "centroids is torch.int8"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    name: str, change: Any, message: str, tmp_path: Path, indexed: Calibration
) -> None:
    layer = next(layer for layer in indexed.layers if layer.centroids is not None)
    if name == "weight_2":
        parts = dict(layer.classifier)
        held = parts.pop(name)
        layer = replace(layer, classifier=parts if change is None else parts | {name: change(held)})
    else:
        empty: Any = {} if name == "classifier" else None
        own: dict[str, Any] = {name: empty if change is None else change(getattr(layer, name))}
        layer = replace(layer, **own)
    replace(indexed, layers=(layer,)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"damaged: layer {layer.index}: .*{message}"):
        Calibration.from_pretrained(tmp_path)


def test_layers_that_are_missing_are_told() -> None:
    model, _ = lab_model()
    found = lab()
    part = replace(found, layers=found.layers[:2])
    with pytest.raises(ValueError, match="it holds 2 of the 6 layers of its model"):
        turbo_hf.patch(model, "turbo-mixed", calibration=part)


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    found = lab()
    layer = replace(found.layers[0], scores={name: x * torch.nan for name, x in found.layers[0].scores.items()})
    replace(found, layers=(layer,)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="layer 0 holds NaN or Inf"):
        Calibration.from_pretrained(tmp_path)


def test_a_missing_artifact_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"the folder has no {FACTS}"):
        Calibration.from_pretrained(tmp_path)
    with pytest.raises(OSError, match="there is no such folder"):
        Calibration.from_pretrained(tmp_path / "gone")
    with pytest.raises(OSError, match="no-such"):
        Calibration.from_pretrained("nobody/no-such", local_files_only=True)


def test_fingerprints_tell_models_apart() -> None:
    model, tokenizer = lab_model()
    found = lab()
    assert found.mismatch(model, tokenizer) is None
    assert found.mismatch(tiny_llama()) == "it was made for a model with vocab_size 3072, and this one has 100"
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<another>"])
    assert "made for a model with tokenizer" in str(found.mismatch(model, other))
    assert fingerprint(model, checkpoint_of(model))["model"] == LAB_MODEL.name


def test_push_to_hub_uploads_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, bytes] = {}

    class Hub:
        def __init__(self, token: str | None) -> None:
            sent["token"] = str(token).encode()

        def create_repo(self, repo_id: str, **options: Any) -> None:
            sent["repo"] = repo_id.encode()

        def create_commit(self, repo_id: str, operations: Any, commit_message: str) -> Any:
            for each in operations:
                sent[each.path_in_repo] = each.path_or_fileobj
            return type("Commit", (), {"commit_url": f"https://{repo_id}/{commit_message}"})

    monkeypatch.setattr(artifacts, "HfApi", Hub)
    found = lab()
    url = found.push_to_hub("me/mine", token="t")
    assert url.startswith("https://me/mine/")
    assert {name: sent[name] for name in found._files()} == found._files()
    assert (sent["repo"], sent["token"]) == (b"me/mine", b"t")


def test_a_repository_in_the_hubs_cache_is_found_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = "a" * 40
    repo = tmp_path / "models--me--mine"
    lab().save_pretrained(repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    model = copy.deepcopy(lab_model()[0])
    model.config._name_or_path = "me/mine"
    found = find(checkpoint_of(model))
    assert found is not None
    assert found.source == "me/mine"
    with turbo_hf.patch(model, MIXED) as handle:
        assert "by calibration over 768 tokens (me/mine)" in str(handle.report())
    model.config._name_or_path = "me/another"
    assert find(checkpoint_of(model)) is None


# --- patch -------------------------------------------------------------------------------------------------------


def orders(handle: turbo_hf.Handle, model: Any) -> list[list[list[int]]]:
    """Order of heads by layer and row after a prompt of two rows."""
    cache = handle.new_cache()
    with torch.no_grad():
        model(prompts(2, 130), past_key_values=cache)
    return [layer.order.tolist() for layer in cache.turbo_layers()]


@pytest.mark.parametrize("metric", HEAD_METRICS)
def test_patch_takes_the_heads_from_a_calibration(metric: Any) -> None:
    model, _ = lab_model()
    found = lab()
    config = replace(MIXED, head_metric=metric)
    for calibration in (found, reversed_heads(found)):
        with turbo_hf.patch(model, config, calibration=calibration) as handle:
            want = calibration.head_orders(metric)
            assert orders(handle, model) == [[list(want[i])] * 2 for i in range(6)]
            assert "2-bit heads: by calibration over 768 tokens (this process)" in str(handle.report())
    assert reversed_heads(found).head_orders(metric) != found.head_orders(metric)


def test_the_order_stays_through_reset_crop_and_copies() -> None:
    model, _ = lab_model()
    found = reversed_heads(lab())
    want = [[list(order)] * 2 for order in found.head_orders("priority").values()]
    with turbo_hf.patch(model, MIXED, calibration=found) as handle:
        cache = handle.new_cache()
        with torch.no_grad():
            for tokens in (70, 100):
                model(prompts(2, tokens), past_key_values=cache)
                cache.crop(-tokens + 1)
                model(prompts(2, 64), past_key_values=cache)
                assert [layer.order.tolist() for layer in cache.turbo_layers()] == want
                cache.reset()
        twin = copy.deepcopy(model)
        out = twin.generate(prompts(1, 80), max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
        assert [layer.order.tolist() for layer in out.past_key_values.turbo_layers()] == [row[:1] for row in want]


def test_auto_looks_beside_the_checkpoint(tmp_path: Path) -> None:
    model = copy.deepcopy(lab_model()[0])
    model.config._name_or_path = str(tmp_path)
    with turbo_hf.patch(model, MIXED) as handle:
        assert "first 32 tokens (no calibration beside the checkpoint)" in str(handle.report())
    found = reversed_heads(lab())
    found.save_pretrained(tmp_path)
    for calibration in ("auto", tmp_path, str(tmp_path)):
        with turbo_hf.patch(model, MIXED, calibration=calibration) as handle:
            assert handle.report().heads == f"2-bit heads: by calibration over 768 tokens ({tmp_path})"
            assert orders(handle, model)[3] == [list(found.head_orders("priority")[3])] * 2
    with turbo_hf.patch(model, MIXED, calibration=None) as handle:
        assert handle.report().heads == "2-bit heads: chosen by each row's first 32 tokens"
    with turbo_hf.patch(model) as handle:
        assert handle.report().heads == ""
    with turbo_hf.patch(model, calibration=tmp_path) as handle:
        assert handle.report().heads.startswith("calibration: not used, for all heads")


def test_auto_says_what_is_wrong_with_what_it_finds(tmp_path: Path) -> None:
    model = copy.deepcopy(lab_model()[0])
    model.config._name_or_path = str(tmp_path)
    lab().save_pretrained(tmp_path)
    spoil(tmp_path, "bytes")
    with pytest.raises(Unsupported, match=r"damaged.* To go without it, pass calibration=None"):
        turbo_hf.patch(model, MIXED)
    with pytest.warns(UserWarning, match="damaged"):
        handle = turbo_hf.patch(model, MIXED, strict="warn")
    assert "damaged" in handle.report().warnings[0]
    assert handle.report().heads == "2-bit heads: chosen by each row's first 32 tokens"
    handle.remove()
    with pytest.raises(ValueError, match="damaged"):
        turbo_hf.patch(model, MIXED, strict="warn", calibration=tmp_path)
    assert model.config._attn_implementation == "eager"


def test_a_calibration_of_another_model_is_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    found = lab()
    message = "does not fit this model: it was made for a model with vocab_size 3072, and this one has 100"
    for strict in ("raise", "warn", "fallback"):
        with pytest.raises(ValueError, match=message):
            turbo_hf.patch(model, calibration=found, strict=strict)
    found.save_pretrained(tmp_path)
    model.config._name_or_path = str(tmp_path)
    with pytest.raises(Unsupported, match=message):
        turbo_hf.patch(model, MIXED)
    with pytest.raises(TypeError, match='or "auto"; got int'):
        turbo_hf.patch(model, calibration=3)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="nowhere"):
        turbo_hf.patch(model, calibration="nowhere")


def test_another_revision_is_told() -> None:
    model = copy.deepcopy(lab_model()[0])
    model.config._commit_hash = "b" * 40
    found = lab()
    found = replace(found, fingerprint={**found.fingerprint, "revision": "a" * 40})
    with turbo_hf.patch(model, MIXED, calibration=found) as handle:
        assert handle.report().warnings == (
            "the calibration was made for revision aaaaaaaaaaaa of the checkpoint; this is bbbbbbbbbbbb.",
        )


def test_a_cache_refuses_an_order_that_is_none() -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match=r"head_orders names layers \[5\]"):
        TurboCache(model.config, MIXED, head_orders={5: (0, 1)})
    cache = TurboCache(model.config, MIXED, head_orders={0: (1, 1)})
    with pytest.raises(ValueError, match=r"must name each of its 2 KV heads once; got \[1, 1\]"):
        model(prompts(1, 4), past_key_values=cache)


# --- the command -------------------------------------------------------------------------------------------------

SHORT = ["--window", "256", "--windows", "3", "--local", "31", "--far", "16", "--steps", "4", "--clusters", "16"]


def command(tmp_path: Path, *words: str, code: int = 0) -> str:
    (tmp_path / "text.txt").write_text(PROSE)
    line = ["calibrate", str(LAB_MODEL), "--texts", str(tmp_path), "--out", str(tmp_path / "out"), "--device", "cpu"]
    result = CliRunner().invoke(app, [*line, *words])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_writes_what_patch_reads(tmp_path: Path) -> None:
    printed = command(tmp_path, *SHORT, "--json")
    facts = json.loads(printed.strip().splitlines()[-1])
    assert facts["tokens"] == 768
    assert len(facts["layers"]) == 6
    found = Calibration.from_pretrained(tmp_path / "out")
    assert found.layers[0].centroids is not None
    assert "recall: long-range attention mass in 4 % of the keys" in " ".join(printed.split())
    with turbo_hf.patch(lab_model()[0], MIXED, calibration=tmp_path / "out") as handle:
        assert "by calibration" in handle.report().heads


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    printed = command(tmp_path, *SHORT, "--architecture", "residual", "--long-range", "--dry-run", "--json")
    facts = json.loads(printed.strip().splitlines()[-1])
    assert facts["seconds"] > 0
    assert facts["windows"] == 3
    assert "layers 0, 1, 2, 3: head priorities and index" in printed
    assert not (tmp_path / "out").exists()
    assert "layers 0, 1, 2, 3, 4, 5: head priorities" in command(tmp_path, *SHORT[:4], "--dry-run", "--heads-only")
    refused = command(tmp_path, *SHORT, "--clusters", "4000", "--dry-run", code=1)
    assert "too few for 4000 clusters" in " ".join(refused.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "slow"], "unknown preset 'slow'; presets are fast, full"),
        (["--architecture", "deep"], "Settings.architecture must be 'mlp' or 'residual'; got 'deep'"),
        (["--texts", "nowhere"], "no file or folder 'nowhere'"),
        (["--window", "1000"], "too short for the long-range filter"),
        (["--heads-only", "--window", "100000"], "longer than the 32768 positions"),
        (["--heads-only", "--window", "20000"], "too few for two windows of 20000"),
        (
            ["--heads-only", "--window", "20", "--dry-run"],
            "Settings.window must be a whole number of at least 64; got 20",
        ),
        (
            ["--heads-only", *SHORT, "--architecture", "mlp", "--long-range"],
            "no index: --clusters, --steps, --local, --far, --architecture, --long-range. Leave that out",
        ),
        (["--heads-only", "--window", "256", "--revision", "v2"], "and 'v2' says nothing of it. Leave it out"),
    ],
)
def test_mistakes_get_one_sentence(words: list[str], message: str, tmp_path: Path) -> None:
    printed = " ".join(command(tmp_path, *words, code=1).split())
    assert message in printed
    assert "Traceback" not in printed


# --- datasets of the Hub --------------------------------------------------------------------------------------------


class FakeHub:
    """In place of the package datasets: one dataset, and what was asked for."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.rows, self.read = rows, 0
        self.asked: tuple[Any, ...] = ()

    def load_dataset(self, *args: Any, **options: Any) -> Any:
        self.asked = (*args, options)
        for row in self.rows:
            self.read += 1
            yield row


def test_a_dataset_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tokenizer = lab_model()
    hub = FakeHub([{"text": PROSE}] * 50)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    found = token_windows("someone/books:long", tokenizer, 256, 3)
    assert torch.equal(found, token_windows([PROSE] * 50, tokenizer, 256, 3))
    assert hub.asked == ("someone/books", "long", {"split": "train", "streaming": True})
    assert hub.read < 50, "what is not needed is not fetched"


def test_a_dataset_that_cannot_be_read_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, tokenizer = lab_model()
    start = "texts: there is no file or folder 'someone/books', and "
    monkeypatch.setitem(sys.modules, "datasets", FakeHub([{"content": PROSE}]))
    with pytest.raises(ValueError, match=start + "the dataset of that name cannot be read: rows have no column"):
        token_windows("someone/books", tokenizer, 256, 3)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=start + "to stream a dataset of that name the package datasets is needed"):
        token_windows("someone/books", tokenizer, 256, 3)
    words = ["calibrate", str(LAB_MODEL), "--texts", "someone/books", "--out", str(tmp_path), "--device", "cpu"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "the package datasets is needed" in " ".join(result.output.split())


def test_a_real_dataset_without_a_network_says_why() -> None:
    pytest.importorskip("datasets")
    _, tokenizer = lab_model()
    with pytest.raises(ValueError, match="the dataset of that name cannot be read"):
        token_windows("no-one-at-all/nothing-at-all", tokenizer, 256, 3)
