"""Buckets of keys, and which of them a step visits."""

from collections.abc import Callable

import pytest
import torch
from budgets import check, float_budget, largest
from op_calls import assign, assign_and_score, classify, score, visit
from torch import Tensor

pytestmark = pytest.mark.usefixtures("poison")


# --- buckets of keys ------------------------------------------------------------------------------------------------


def assign_new(keys: Tensor, centroids: Tensor, *, rotary: tuple[Tensor, Tensor] | None = None, backend: str) -> Tensor:
    """`assign`, as a step does it: beside the logits of queries."""
    queries = torch.randn(*keys.shape[:3], 3, keys.shape[3], device=keys.device).to(keys.dtype)
    found, _ = assign_and_score(keys, queries, centroids, rotary=rotary, backend=backend)
    model = some_classifier(centroids.shape[0], keys.shape[3], 20, 9, keys.device)
    again, _ = assign_and_score(keys, queries, centroids, model, rotary=rotary, backend=backend)
    assert torch.equal(again, found)
    return found


@pytest.mark.parametrize("assign", [assign, assign_new])
@pytest.mark.parametrize(("size", "dim"), [((1, 8), 16), ((5, 37), 80), ((20, 70), 128)])
def test_a_key_goes_to_its_nearest_centroid(
    size: tuple[int, int], dim: int, assign: Callable[..., Tensor], device: torch.device, backend: str
) -> None:
    check_nearest(size, dim, assign, device, backend)


@pytest.mark.parametrize("dim", [80, 128])
def test_many_keys_take_several_tiles_of_keys_and_of_centroids(dim: int, device: torch.device, backend: str) -> None:
    check_nearest((66, 130), dim, assign, device, backend)


def check_nearest(
    size: tuple[int, int], dim: int, assign: Callable[..., Tensor], device: torch.device, backend: str
) -> None:
    keys, buckets = size
    # numbers of few bits: products are exact, whatever the order of the sums
    k = torch.randint(-4, 5, (2, 2, keys, dim), device=device).half().transpose(1, 2).contiguous().transpose(1, 2)
    centroids = torch.randint(-4, 5, (2, buckets, dim), device=device).half()
    # the best for half of the keys, and once more in the last tile
    centroids[:, 0] *= 4
    centroids[:, -1] = centroids[:, 0]
    found = assign(k, centroids, backend=backend)
    assert found.dtype == torch.int16
    for row in range(2):
        for head in range(2):
            score = (k[row, head].double().cpu() @ centroids[head].double().cpu().T).tolist()
            # the first one in a tie
            assert found[row, head].tolist() == [each.index(max(each)) for each in score]


@pytest.mark.parametrize("assign", [assign, assign_new])
@pytest.mark.parametrize(("buckets", "broken"), [(5, torch.nan), (100, -torch.nan), (5, torch.inf)])
def test_a_key_that_is_not_finite_has_some_bucket(
    assign: Callable[..., Tensor], buckets: int, broken: float, device: torch.device, backend: str
) -> None:
    k, centroids = torch.randn(2, 3, 4, 16, device=device), torch.randn(3, buckets, 16, device=device)
    want = assign(k, centroids, backend=backend)
    k[0, 1, 2], k[1, 2, 3, 5] = broken, broken
    # twice: nothing of it stays behind
    for _ in range(2):
        found = assign(k, centroids, backend=backend)
        assert bool(((found >= 0) & (found < buckets)).all())
        found[0, 1, 2], found[1, 2, 3] = want[0, 1, 2], want[1, 2, 3]
        assert torch.equal(found, want)


def turned(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """x [B, H, M, D] after rotary embedding, by complex numbers."""
    cos, sin = (part.double()[:, None] for part in rotary)
    size = cos.shape[-1]
    half = torch.complex(x[..., : size // 2].double(), x[..., size // 2 : size].double())
    half = half * torch.complex(cos, sin)[..., : size // 2]
    return torch.cat((half.real, half.imag, x[..., size:].double()), -1)


def some_rotary(rows: int, columns: int, channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin with an attention factor, as yarn has one."""
    angle = (torch.rand(rows, columns, channels // 2, device=device) * 7).repeat(1, 1, 2)
    return 1.25 * angle.cos(), 1.25 * angle.sin()


@pytest.mark.parametrize("assign", [assign, assign_new])
@pytest.mark.parametrize(("rows", "size"), [(1, (64, 64)), (2, (80, 32))])
def test_rotary_embedding_is_undone_on_the_way(
    rows: int, size: tuple[int, int], assign: Callable[..., Tensor], device: torch.device, backend: str
) -> None:
    dim, channels = size
    rotary = some_rotary(rows, 3, channels, device)
    plain = torch.randn(2, 3, 3, dim, device=device)
    centroids = torch.nn.functional.normalize(torch.randn(3, 50, dim, device=device), dim=-1)
    keys = turned(plain, rotary).float()
    found = assign(keys, centroids, rotary=rotary, backend=backend)
    score = torch.einsum("bhnd,hcd->bhnc", plain.double(), centroids.double())
    best = score.topk(2).values
    clear = best[..., 0] - best[..., 1] > 1e-4
    assert bool(((found == score.argmax(-1)) | ~clear).all())
    assert bool((found != assign(keys, centroids, backend=backend)).any())
    queries = turned(plain, rotary).float().unflatten(1, (3, 1)).transpose(2, 3)
    model = some_classifier(3, dim, 40, 33, device)
    got = classify(queries, model, rotary=rotary, backend=backend)
    want = classify(plain.unflatten(1, (3, 1)).transpose(2, 3), model, backend=backend)
    # a rotation and its inverse in float32: a few roundings of each channel
    check("logits", got, want.double().cpu(), 32 * torch.finfo(torch.float32).eps * dim * largest(want))


def some_classifier(heads: int, dim: int, hidden: int, buckets: int, device: torch.device) -> dict[str, Tensor]:
    shapes = {"weight_1": (dim, hidden), "bias_1": (hidden,), "weight_2": (hidden, buckets), "bias_2": (buckets,)}
    return {name: torch.randn(heads, *shape, device=device) / shape[0] ** 0.5 for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("group", "dim", "hidden", "buckets", "rows", "tokens"),
    [(1, 16, 8, 5, 1, 1), (1, 16, 8, 5, 3, 2), (4, 64, 130, 70, 1, 1), (4, 64, 130, 70, 2, 2), (3, 80, 64, 33, 3, 2)],
)
def test_classify_is_two_layers(
    group: int, dim: int, hidden: int, buckets: int, rows: int, tokens: int, device: torch.device, backend: str
) -> None:
    model = some_classifier(2, dim, hidden, buckets, device)
    queries = torch.randn(rows, 2 * group, tokens, dim, device=device).unflatten(1, (2, group)).transpose(2, 3)
    got = classify(queries, model, backend=backend)

    def layers(dtype: torch.dtype) -> Tensor:
        w1, b1, w2, b2 = (model[name].cpu().to(dtype) for name in ("weight_1", "bias_1", "weight_2", "bias_2"))
        x = torch.einsum("bhmgd,hdu->bhmgu", queries.cpu().to(dtype), w1) + b1[:, None, None]
        y = torch.einsum("bhmgu,huc->bhmgc", x.relu(), w2) + b2[:, None, None]
        return y.sum(3)

    exact = layers(torch.float64)
    size = group * (largest(exact) + hidden**0.5)
    check("logits", got, exact, float_budget(exact, layers(torch.float32), size, torch.float32))


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("size", [(1, 16, 5), (4, 64, 70), (3, 80, 200)])
def test_score_is_the_sum_of_inner_products(
    size: tuple[int, int, int], turns: bool, device: torch.device, backend: str
) -> None:
    group, dim, buckets = size
    centroids = torch.nn.functional.normalize(torch.randn(2, buckets, dim, device=device), dim=-1)
    plain = torch.randn(3, 2 * group, 2, dim, device=device)
    rotary = some_rotary(3, 2, 16, device) if turns else None
    heads = plain if rotary is None else turned(plain, rotary).float()
    got = score(heads.unflatten(1, (2, group)).transpose(2, 3), centroids, rotary=rotary, backend=backend)

    def products(dtype: torch.dtype) -> Tensor:
        q = plain.cpu().to(dtype).unflatten(1, (2, group))
        return torch.einsum("bhgmd,hcd->bhmgc", q, centroids.cpu().to(dtype)).sum(3)

    exact = products(torch.float64)
    # a rotation and its inverse take a few roundings more
    summed = group * (largest(exact) + dim**0.5) * (8 if turns else 1)
    check("scores", got, exact, float_budget(exact, products(torch.float32), summed, torch.float32))


def test_assign_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"keys must be \[B, 2, M, 16\] on cpu; got torch.float32 \[1, 3, 4, 16\]"):
        assign(torch.zeros(1, 3, 4, 16), torch.zeros(2, 8, 16))
    rotary = (torch.zeros(1, 4, 16), torch.zeros(1, 4, 16))
    with pytest.raises(ValueError, match=r"rotary must be cos and sin of \[1 or 2, 3, r\], r even"):
        assign(torch.zeros(2, 2, 3, 16), torch.zeros(2, 8, 16), rotary=rotary)
    with pytest.raises(ValueError, match=r"queries must be \[1, 2, 3, G, 16\] on cpu; got .* \[1, 2, 3, 4, 8\]"):
        assign_and_score(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 4, 8), torch.zeros(2, 8, 16))


# --- buckets that are visited ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("probes", "buckets"), [(1, 2), (2, 2), (2, 37), (1, 256)])
def test_visits_are_the_best_buckets(probes: int, buckets: int, device: torch.device, backend: str) -> None:
    # sixteenths: many buckets are equal, of which the first is the better one
    logits = (torch.randint(-48, 49, (2, 3, 2, buckets), device=device) / 16).to(torch.float16)
    found = visit(logits, probes=probes, backend=backend)
    assert found.dtype == torch.bool
    for at in ((0, 0, 0), (1, 2, 1), (1, 0, 1)):
        score = logits[at].tolist()
        order = sorted(range(buckets), key=lambda bucket: -score[bucket])
        assert set(found[at].nonzero().flatten().tolist()) == set(order[:probes])


def test_buckets_are_compared_with_those_of_another_tile(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("turbo_hf.ops.sparse.launch"), "COMPARED", 32)
    logits = torch.randn(2, 1, 1, 40, device=device)
    for probes in (1, 8):
        assert torch.equal(*(visit(logits, probes=probes, backend=name) for name in ("triton", "reference")))


def test_visits_of_every_number(backend: str) -> None:
    logits = torch.randn(1, 1, 1, 33)
    counts = [int(visit(logits, probes=n, backend=backend).sum()) for n in range(1, 34)]
    assert counts == list(range(1, 34))
