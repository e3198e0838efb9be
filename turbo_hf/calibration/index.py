"""The index of sparse layers, all KV heads at once: centroids (spherical k-means on keys before rotary embedding, SAAP
sec. 4, appendix A), the query classifier (which buckets hold what a query looks for, SAAP sec. 4, eq. 1), and how good
both are on held-out windows: attention mass recalled for a given share of the keys.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from turbo_hf.calibration.capture import Samples, bucket_sums, long_range
from turbo_hf.calibration.settings import DEFAULT_CLUSTERS, MIN_KEYS, SMALLEST_CLUSTERS, Settings

COMPARED = 4096
"""Keys per head that are compared with all centroids at a time."""
KEYS_EACH = 256
"""Maximum number of keys per centroid that k-means uses; more change little."""


def sample_keys(count: int, clusters: int, generator: torch.Generator) -> torch.Tensor:
    """Which of `count` keys k-means looks at: int64, in order; all, or so many that there are `KEYS_EACH` for each."""
    most = clusters * KEYS_EACH
    return torch.arange(count) if count <= most else torch.randperm(count, generator=generator)[:most].sort().values


def choose_clusters(wanted: int | None, keys: int) -> int:
    """C for `keys` keys per head: `wanted`, or 1024 halved until each has 32 keys. ValueError: too few keys."""
    if wanted is not None:
        if wanted * 2 > keys:
            raise ValueError(
                f"{keys} keys per head are too few for {wanted} clusters (2 for each at least). Give more text, or "
                "fewer clusters."
            )
        return wanted
    clusters = DEFAULT_CLUSTERS
    while clusters * MIN_KEYS > keys and clusters > SMALLEST_CLUSTERS:
        clusters //= 2
    if clusters * 2 > keys:
        raise ValueError(f"{keys} keys per head are too few for clusters. Give more text.")
    return clusters


def k_means(keys: torch.Tensor, clusters: int, iterations: int, generator: torch.Generator) -> torch.Tensor:
    """Unit centroids [N, C, D] of keys [N, P, D], by head.

    generator: on the CPU, so that a seed means the same on every device. It picks the initial keys, and those that
    replace a centroid without keys.

    Source: SAAP appendix A: random start, 10 iterations; assignment by the largest inner product with unit centroids.
    """
    heads, count = keys.shape[:2]
    keys = keys.float()
    start = torch.stack([torch.randperm(count, generator=generator)[:clusters] for _ in range(heads)])
    found = _unit(torch.take_along_dim(keys, start.to(keys.device)[..., None], 1))
    for _ in range(iterations):
        buckets = assign(keys, found)
        total = torch.zeros_like(found)
        filled = torch.zeros(heads, clusters, device=keys.device)
        # in parts: the one-hot matrix of buckets would be larger than the keys
        for part, bucket in zip(keys.split(COMPARED, 1), buckets.split(COMPARED, 1), strict=True):
            member = (bucket[..., None] == torch.arange(clusters, device=keys.device)).to(part.dtype)
            total += torch.bmm(member.mT, part)
            filled += member.sum(1)
        spare = torch.randint(count, (heads, clusters), generator=generator).to(keys.device)
        other = torch.take_along_dim(keys, spare[..., None], 1)
        found = _unit(torch.where((filled > 0)[..., None], total, other))
    return found


def assign(keys: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Bucket of each key: int64 [N, P] of keys [N, P, D] and unit centroids [N, C, D], by largest inner product."""
    parts = [torch.bmm(part.float(), centroids.float().mT).argmax(-1) for part in keys.split(COMPARED, 1)]
    return torch.cat(parts, 1)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


EPSILON = 1e-5
"""Epsilon of the batch norm, as in torch."""


class QueryModels(torch.nn.Module):
    """N classifiers D -> hidden -> C with batch norm and ReLU in between, one for each KV head, in batched products.

    The batch norm takes the mean and the variance over all training queries, which follow from the queries' own mean
    [N, 1, D] and covariance [N, D, D]: no running averages, and what is stored is what was trained.
    """

    def __init__(
        self, mean: torch.Tensor, covariance: torch.Tensor, hidden: int, clusters: int, generator: torch.Generator
    ):
        super().__init__()
        heads, _, dim = mean.shape

        def uniform(*shape: int, fan: int) -> torch.nn.Parameter:
            return torch.nn.Parameter((torch.rand(*shape, generator=generator) * 2 - 1) / math.sqrt(fan))

        self.weight_1 = uniform(heads, dim, hidden, fan=dim)
        self.weight_2 = uniform(heads, hidden, clusters, fan=hidden)
        self.bias_2 = torch.nn.Parameter(torch.zeros(heads, 1, clusters))
        self.gain = torch.nn.Parameter(torch.ones(heads, 1, hidden))
        self.shift = torch.nn.Parameter(torch.zeros(heads, 1, hidden))
        self.mean: torch.Tensor
        self.covariance: torch.Tensor
        self.register_buffer("mean", mean)
        self.register_buffer("covariance", covariance)

    @torch.no_grad()
    def start_at(self, centroids: torch.Tensor) -> None:
        """Initialize the logits to q . centroids, centroids [N, C, D] of any length; does nothing if hidden < 2 D.

        2 D hidden units pass the query through, since relu(x) - relu(-x) = x; the others start with no effect. Ours.
        """
        dim, hidden = self.weight_1.shape[1:]
        if hidden < 2 * dim:
            return
        self.weight_2.zero_()
        for sign, units in ((1, slice(dim)), (-1, slice(dim, 2 * dim))):
            self.weight_1[:, :, units] = sign * torch.eye(dim)
            self.weight_2[:, units] = sign * centroids.mT
        mean, deviation = self._statistics()
        self.gain[..., : 2 * dim] = deviation[..., : 2 * dim]
        self.shift[..., : 2 * dim] = mean[..., : 2 * dim]

    def _statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation [N, 1, hidden] of the batch norm's input, over all training queries."""
        # a bias before a batch norm has no effect, so the first layer has none
        variance = (self.weight_1 * torch.bmm(self.covariance, self.weight_1)).sum(1, keepdim=True)
        return torch.bmm(self.mean, self.weight_1), (variance + EPSILON).sqrt()

    def folded(self) -> dict[str, torch.Tensor]:
        """The classifiers with the batch norm folded into the first layer, float32, as `classify` takes them."""
        mean, deviation = self._statistics()
        factor = self.gain / deviation
        return {
            "weight_1": self.weight_1 * factor,
            "bias_1": (self.shift - mean * factor)[:, 0],
            "weight_2": self.weight_2,
            "bias_2": self.bias_2[:, 0],
        }

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        """Logits [N, R, C] of queries [N, R, D] before rotary embedding."""
        return classify(self.folded(), query)


def classify(classifier: dict[str, torch.Tensor], query: torch.Tensor) -> torch.Tensor:
    """Logits [N, R, C] of queries [N, R, D] before rotary embedding, by the classifiers of N KV heads."""
    weights = {name: x.to(query.device).float() for name, x in classifier.items()}
    hidden = torch.baddbmm(weights["bias_1"][:, None], query.float(), weights["weight_1"]).relu()
    return torch.baddbmm(weights["bias_2"][:, None], hidden, weights["weight_2"])


def train(
    layers: list[Samples],
    buckets: list[list[torch.Tensor]],
    centroids: list[torch.Tensor],
    windows: int,
    settings: Settings,
    advance: Callable[[], None],
) -> dict[str, torch.Tensor]:
    """Classifiers of all KV heads of layers of one shape, from the first `windows` windows.

    Args:
        layers: samples by layer; buckets: int64 [Hkv, L] by layer and window; centroids: [Hkv, C, D] by layer.
        advance: called after each step.

    Returns:
        `QueryModels.folded`, N = layers x Hkv.

    Source: SAAP eq. 1, KL divergence between the true and the predicted mass by bucket. Ours, each measured in
    `eval/results`: the classifier predicts the mass per key, see `divergence`; it starts at k-means; it learns from all
    queries, not only long-range ones; fewer steps than appendix A's 40,000 at 1e-5, at a higher rate that decays.
    """
    seeded = torch.Generator().manual_seed(settings.seed)
    device = centroids[0].device
    models = _start(layers, centroids, windows, settings, seeded).to(device)
    optimizer = torch.optim.Adam(models.parameters(), settings.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    heads, groups, count, _ = layers[0].queries[0].shape
    for _ in range(settings.steps):
        window = int(torch.randint(windows, (1,), generator=seeded))
        # the same ones of the G x n queries of every KV head
        pick = torch.randint(groups * count, (settings.batch,), generator=seeded).expand(heads * len(layers), -1)
        plain, query = (
            torch.take_along_dim(_together(xs, device).flatten(1, 2), pick[..., None].to(device), 1)
            for xs in (
                [layer.pre_rotary_queries[window] for layer in layers],
                [layer.queries[window] for layer in layers],
            )
        )
        with torch.no_grad():
            places = layers[0].positions[window].repeat(layers[0].queries[window].shape[1])[pick].to(device)
            of_layer = (settings.local, layers[0].scaling, layers[0].softcap)
            # what is large has no name: it is gone before the backward pass
            target, sizes = bucket_sums(
                long_range(query, places, _together([layer.keys[window] for layer in layers], device), *of_layer),
                _together([each[window] for each in buckets], device),
                centroids[0].shape[1],
            )
        loss = divergence(target, models(plain), sizes).mean(1)
        optimizer.zero_grad()
        # heads share no weights: the sum trains each one independently
        loss.sum().backward()
        optimizer.step()
        schedule.step()
        advance()
    return {name: x.detach() for name, x in models.folded().items()}


def _together(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The tensors of several layers as one, on the device; from pinned memory, the host does not wait."""
    return torch.cat([x.to(device, non_blocking=True) for x in parts])


def _start(
    layers: list[Samples], centroids: list[torch.Tensor], windows: int, settings: Settings, seeded: torch.Generator
) -> QueryModels:
    """Classifiers that rank buckets as k-means does, on the CPU.

    Each key is replaced by its centroid, scaled to the mean length of keys: exp of the logit is then what a key of the
    bucket adds to the attention of a query, as in training.
    """
    device = centroids[0].device
    means, covariances, lengths = [], [], []
    for layer in layers:
        for head in range(len(layer.pre_rotary_queries[0])):
            queries = _together([x[head].flatten(0, 1) for x in layer.pre_rotary_queries[:windows]], device).float()
            means.append(queries.mean(0, keepdim=True).cpu())
            covariances.append(queries.T.cov(correction=0).cpu())
        norms = [keys.to(device, non_blocking=True).float().norm(dim=-1) for keys in layer.pre_rotary_keys[:windows]]
        lengths.append(torch.cat(norms, 1).mean(1).cpu() * layer.scaling)
    mean, covariance = torch.stack(means), torch.stack(covariances)
    start = torch.cat(centroids).float().cpu() * torch.cat(lengths)[:, None, None]
    models = QueryModels(mean, covariance, settings.hidden, start.shape[1], seeded)
    models.start_at(start)
    return models


def divergence(target: torch.Tensor, logits: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """KL divergence (nats), by row, between the true mass by bucket and size x exp(logit), as a share of their sum.

    sizes: keys that count in each bucket. A classifier trained in this way predicts the mass per key of the bucket,
    however many keys a text has there; for a given share of keys, buckets must be ranked by it. SAAP's softmax of the
    logits predicts the mass of whole buckets, and so prefers those that are large in the training texts.
    """
    log_mass = logits + sizes.clamp(min=torch.finfo(sizes.dtype).tiny).log()
    return (torch.xlogy(target, target) - target * log_mass.log_softmax(-1)).sum(-1)


SELECTIVITY = (0.01, 0.02, 0.04, 0.08)
"""Shares of the keys (without the always-read ones) that may be read."""

WAYS = ("classifier", "k-means", "k-means, rotated", "random")
"""How buckets are chosen: by the query classifier, by inner products with the centroids of keys before and after rotary
embedding (the latter have buckets of their own), by chance."""


@torch.no_grad()
def evaluate(
    samples: Samples,
    buckets: list[torch.Tensor],
    centroids: torch.Tensor,
    rotated: torch.Tensor,
    classifier: dict[str, torch.Tensor],
    windows: range,
    local: int,
    seed: int,
) -> dict[str, Any]:
    """Figures of one layer over the long-range queries of `windows`.

    Buckets are chosen as in decoding: scores summed over the query heads of a KV head, best buckets first, until the
    share of keys is read. The last bucket counts in part: the same share of its mass as of its keys.

    rotated: centroids [Hkv, C, D] of keys after rotary embedding.

    Returns, by name:
        recall: for each way of choosing (`WAYS`), the share of long-range attention mass at each of `SELECTIVITY`, the
            mean over long-range queries of all heads; null without any.
        queries: number of long-range queries for each KV head.
    """
    heads, clusters = centroids.shape[:2]
    seeded = torch.Generator().manual_seed(seed)
    total = {way: torch.zeros(len(SELECTIVITY), dtype=torch.float64) for way in WAYS}
    counted = torch.zeros(heads, dtype=torch.float64)
    device = centroids.device
    for window in windows:
        keys = samples.keys[window].to(device, non_blocking=True)
        turned = assign(keys, rotated)
        parts = (samples.pre_rotary_queries[window], samples.queries[window], samples.far[window])
        for plain, query, far, at in zip(
            *(x.split(64, 2) for x in parts), samples.positions[window].split(64), strict=True
        ):
            groups, rows = query.shape[1], query.shape[2]
            asking, places = query.flatten(1, 2).to(device), at.repeat(heads, groups).to(device)
            pairs = long_range(asking, places, keys, local, samples.scaling, samples.softcap)
            mass, sizes = bucket_sums(pairs, buckets[window], clusters)
            flat = plain.flatten(1, 2).to(device).float()
            logits = classify(classifier, flat)
            # keys that count depend on the position alone
            shape = (heads, groups, rows, clusters)
            sizes = sizes.view(shape)[:, 0]
            scores = {
                "classifier": logits.view(shape).sum(1),
                "k-means": torch.bmm(flat, centroids.float().mT).view(shape).sum(1),
                "random": torch.rand(heads, rows, clusters, generator=seeded).to(device),
            }
            weight = far.to(device).double()
            mass = mass.view(shape)
            for way, score in scores.items():
                total[way] += _recalled(score, mass, sizes, weight).cpu()
            mass, sizes = bucket_sums(pairs, turned, clusters)
            score = torch.bmm(asking.float(), rotated.float().mT).view(shape).sum(1)
            recalled = _recalled(score, mass.view(shape), sizes.view(shape)[:, 0], weight)
            total["k-means, rotated"] += recalled.cpu()
            counted += weight.sum((1, 2)).cpu()
    count = int(counted.sum())
    recall = {way: [round(x, 4) for x in (sums / count).tolist()] if count else None for way, sums in total.items()}
    return {"recall": recall, "queries": [int(x) for x in counted.tolist()]}


def _recalled(score: torch.Tensor, mass: torch.Tensor, sizes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sum over weighted queries of the mass in the buckets that are read, [selectivities].

    score, sizes: [Hkv, n, C]; mass: [Hkv, G, n, C]; weight: [Hkv, G, n].
    """
    order = score.argsort(-1, descending=True)
    size = sizes.gather(-1, order)
    before = size.cumsum(-1) - size
    seen = mass.gather(-1, order[:, None].expand_as(mass)).double()
    allowed = sizes.sum(-1, keepdim=True)
    parts = [((allowed * limit - before) / size.clamp(min=1)).clamp(0, 1) for limit in SELECTIVITY]
    each = [(seen * part[:, None]).sum(-1) * weight for part in parts]
    return torch.stack([x.sum() for x in each])
