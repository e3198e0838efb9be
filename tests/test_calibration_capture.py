"""Calibration: what is captured of attention, priorities of heads, centroids and query classifiers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from calibration_support import HEADS, SMALL, TEXTS
from families_support import Case, build, families
from models import lab_model, prompts, tiny_llama
from sklearn.cluster import KMeans  # type: ignore[import-untyped] # it has no types
from torch import Tensor

import turbo_hf
from turbo_hf.calibration import run
from turbo_hf.calibration.capture import LARGEST, Samples, Seen, bucket_sums, capturing, long_range, probe, run_window
from turbo_hf.calibration.heads import HeadPriorities, head_order, head_scores
from turbo_hf.calibration.index import (
    WAYS,
    QueryModels,
    _recalled,
    assign,
    choose_clusters,
    classify,
    divergence,
    evaluate,
    k_means,
    train,
)
from turbo_hf.calibration.run import calibrate, make_plan
from turbo_hf.calibration.texts import token_windows
from turbo_hf.config.turbo_config import HEAD_METRICS
from turbo_hf.models.model_layers import LATENT_TYPES
from turbo_hf.sparse.undo_rotary import undo_rotary


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
        got = undo_rotary(call.source.module, call.key, call.rotary)
        torch.testing.assert_close(got, true[index].view(1, 63, 2, 16).transpose(1, 2))


@families
def test_every_family_passes_the_probe(case: Case) -> None:
    if case.model_type in LATENT_TYPES:
        pytest.skip("latent attention has nothing to calibrate, and is refused")
    found = probe(build(case.model_type, **case.options))
    assert sorted(found) == [i for i in range(len(found) + len(case.dense)) if i not in case.dense]
    learned = case.model_type == "gpt_bigcode"
    assert {why for _, why in found.values()} == {"it has no rotary embedding" if learned else None}


@pytest.mark.parametrize(
    ("case", "without"),
    [(Case("smollm3", {"no_rope_layers": [1, 1, 0]}), [2]), (Case("gpt2", {"n_layer": 3, "n_head": 4}), [0, 1, 2])],
    ids=["smollm3", "gpt2"],
)
def test_layers_without_rotary_embedding_get_no_index(case: Case, without: list[int]) -> None:
    plan = make_plan(build(case.model_type, **case.options), SMALL)
    assert plan.notes == dict.fromkeys(without, "no index: it has no rotary embedding")
    assert [group.layers for group in plan.groups if not group.indexed] == [tuple(without)]


def test_a_wrong_inverse_fails_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turbo_hf.sparse.undo_rotary.rotate", lambda module, x, cos, sin: x)
    for at in probe(tiny_llama()).values():
        assert "the inverse of its rotary embedding fails the probe (relative error" in str(at[1])


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
    with turbo_hf.patch(model), pytest.raises(ValueError, match=r"patched\. Call remove\(\) on its handle"):
        make_plan(model, SMALL)


def test_priorities_are_the_mean_over_blocks() -> None:
    k, v = torch.randn(1, 3, 214, 16), torch.randn(1, 3, 214, 16)
    got = HeadPriorities()
    # the second window has one block more
    for at in (slice(64), slice(64, 214)):
        got.add(k[:, :, at], v[:, :, at])
    for metric in HEAD_METRICS:
        blocks = [head_scores(k[:, :, i : i + 64], v[:, :, i : i + 64], metric)[0] for i in (0, 64, 128)]
        torch.testing.assert_close(got.scores()[metric], torch.stack(blocks).mean(0))
    assert head_order(torch.tensor([1.0, 3.0, 1.0, 2.0])) == (1, 3, 0, 2)


@pytest.mark.parametrize(
    ("layer", "projection", "name", "bad"),
    [
        (0, "q_proj", "queries", torch.nan),
        (1, "k_proj", "keys", torch.inf),
        (1, "v_proj", "values", torch.nan),
    ],
)
def test_nan_activations_are_refused(layer: int, projection: str, name: str, bad: float) -> None:
    model = tiny_llama()
    getattr(model.model.layers[layer].self_attn, projection).weight.data[0, 0] = bad
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
    with pytest.raises(ValueError, match="99 keys per head are too few for 50 clusters"):
        choose_clusters(50, 99)


# --- the query classifier ----------------------------------------------------------------------------------------


def test_true_mass_is_that_of_a_loop() -> None:
    query, key = torch.randn(2, 5, 8), torch.randn(2, 40, 8)
    position, buckets = torch.randint(20, 40, (2, 5)), torch.randint(0, 6, (2, 40))
    mass, sizes = bucket_sums(long_range(query, position, key, 11, 0.3, 5.0), buckets, 6)
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


def made_up(windows: int, turned: bool) -> tuple[Samples, list[Tensor], Tensor]:
    """A layer without rotary embedding whose classifier sees its queries, or sees them turned away from the keys."""
    seeded = torch.Generator().manual_seed(0)
    dim, length, count = 8, 200, 128
    turn = torch.linalg.qr(torch.randn(dim, dim, generator=seeded)).Q if turned else torch.eye(dim)
    samples = Samples(1.0, None)
    for _ in range(windows):
        keys = torch.randn(1, length, dim, generator=seeded)
        query = 2 * torch.randn(1, 2, count, dim, generator=seeded)
        samples.pre_rotary_keys.append(keys)
        samples.keys.append(keys)
        samples.pre_rotary_queries.append(query)
        samples.queries.append(query @ turn)
        samples.positions.append(torch.randint(100, length, (count,), generator=seeded))
        samples.far.append(torch.ones(1, 2, count, dtype=torch.bool))
    centroids = k_means(torch.cat(samples.keys, 1), 32, 5, seeded)
    return samples, [assign(keys, centroids) for keys in samples.keys], centroids


@pytest.mark.parametrize(("turned", "gain"), [(False, 0.95), (True, 4.0)])
def test_training_learns_what_k_means_cannot_find(turned: bool, gain: float) -> None:
    samples, buckets, centroids = made_up(13, turned)
    found = []
    for steps in (1, 200):
        settings = replace(SMALL, hidden=64, steps=steps, batch=64, learning_rate=1e-2)
        classifier = train([samples], [buckets], [centroids], 12, settings, lambda: None)
        judged = evaluate(samples, buckets, centroids, centroids, classifier, range(12, 13), settings.local, 0)
        found.append(judged["recall"]["classifier"][2])
    # of queries as they are, k-means is right from the start
    assert found[1] > 2 * found[0] or not turned
    recall, by_k_means, rotated, by_chance = (judged["recall"][way][2] for way in WAYS)
    assert recall > gain * max(by_k_means, by_chance)
    # which sees the queries as they meet the keys
    assert rotated == pytest.approx(by_k_means) if not turned else rotated > 4 * by_k_means


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


def test_recall_of_known_buckets() -> None:
    score, mass = torch.tensor([[[3.0, 1.0, 2.0]]]), torch.tensor([[[[0.6, 0.3, 0.1]]]])
    sizes = torch.tensor([[[2.0, 94.0, 4.0]]])
    got = _recalled(score, mass, sizes, torch.ones(1, 1, 1, dtype=torch.float64))
    # of 100 keys: half of bucket 0; bucket 0; half of bucket 2 too; all of 2, and 2 of 94 keys of 1
    want = torch.tensor([0.3, 0.6, 0.65, 0.7 + 0.3 * 2 / 94], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
