"""The query classifier: which buckets hold what a query looks for (SAAP sec. 4, eq. 1), all heads trained at once."""

import math
from collections.abc import Callable

import torch

from turbo_hf.calibration.samples import Samples, true_mass
from turbo_hf.calibration.settings import Settings

MOMENTUM, EPSILON = 0.1, 1e-5
"""Of the batch norm, as in torch."""


class QueryModels(torch.nn.Module):
    """N classifiers D -> hidden -> C with batch norm and ReLU between, one for each KV head, in batched products."""

    def __init__(self, heads: int, dim: int, hidden: int, clusters: int, generator: torch.Generator):
        super().__init__()

        def uniform(*shape: int, fan: int) -> torch.nn.Parameter:
            return torch.nn.Parameter((torch.rand(*shape, generator=generator) * 2 - 1) / math.sqrt(fan))

        self.weight_1 = uniform(heads, dim, hidden, fan=dim)
        self.weight_2 = uniform(heads, hidden, clusters, fan=hidden)
        self.bias_2 = torch.nn.Parameter(torch.zeros(heads, 1, clusters))
        self.gain = torch.nn.Parameter(torch.ones(heads, 1, hidden))
        self.shift = torch.nn.Parameter(torch.zeros(heads, 1, hidden))
        self.mean: torch.Tensor
        self.variance: torch.Tensor
        self.register_buffer("mean", torch.zeros(heads, 1, hidden))
        self.register_buffer("variance", torch.ones(heads, 1, hidden))

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        """Logits [N, R, C] of queries [N, R, D] before rotary embedding; training: on the batch's own statistics."""
        # a bias before a batch norm has no effect, so the first layer has none
        x = torch.bmm(query, self.weight_1)
        variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        with torch.no_grad():
            self.mean.lerp_(mean, MOMENTUM)
            self.variance.lerp_(variance, MOMENTUM)
        x = (x - mean) * torch.rsqrt(variance + EPSILON) * self.gain + self.shift
        return torch.bmm(x.relu(), self.weight_2) + self.bias_2

    @torch.no_grad()
    def folded(self) -> dict[str, torch.Tensor]:
        """The trained classifiers with the batch norm inside the first layer, float32, as `classify` takes them."""
        factor = self.gain * torch.rsqrt(self.variance + EPSILON)
        return {
            "weight_1": self.weight_1 * factor,
            "bias_1": (self.shift - self.mean * factor)[:, 0],
            "weight_2": self.weight_2.detach().clone(),
            "bias_2": self.bias_2.detach()[:, 0].clone(),
        }


def classify(classifier: dict[str, torch.Tensor], query: torch.Tensor) -> torch.Tensor:
    """Logits [N, R, C] of queries [N, R, D] before rotary embedding, by the classifiers of N KV heads."""
    weights = {name: x.to(query.device).float() for name, x in classifier.items()}
    hidden = torch.baddbmm(weights["bias_1"][:, None], query.float(), weights["weight_1"]).relu()
    return torch.baddbmm(weights["bias_2"][:, None], hidden, weights["weight_2"])


def train(
    layers: list[Samples],
    buckets: list[list[torch.Tensor]],
    windows: int,
    clusters: int,
    settings: Settings,
    device: torch.device,
    advance: Callable[[], None],
) -> tuple[dict[str, torch.Tensor], float]:
    """Classifiers of all KV heads of layers of one shape, from the first `windows` windows.

    Args:
        layers: samples by layer; buckets: int64 [Hkv, L] by layer and window.
        advance: called after each step.

    Returns:
        `QueryModels.folded`, N = layers x Hkv, and the mean loss of the last tenth of the steps (nats).

    Source: SAAP eq. 1: KL divergence between the true mass by bucket and softmax f_q, on long-range queries. Unlike
    appendix A (40,000 steps at 1e-5) the learning rate is higher and falls, for far fewer steps: see `eval/results`.
    """
    seeded = torch.Generator().manual_seed(settings.seed)
    heads, groups, _, dim = layers[0].queries[0].shape
    models = QueryModels(len(layers) * heads, dim, settings.hidden, clusters, seeded).to(device)
    optimizer = torch.optim.Adam(models.parameters(), settings.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    pools = [[_pool(layer.far[w]) for layer in layers] for w in range(windows)]
    losses = []
    for _ in range(settings.steps):
        window = int(torch.randint(windows, (1,), generator=seeded))
        picks = [_draw(rows, settings.batch, seeded) for layer in pools[window] for rows in layer]
        pick = torch.stack(picks).view(len(layers), heads, -1)
        plain, query = (
            torch.cat([torch.take_along_dim(x.flatten(1, 2), at[..., None], 1) for x, at in zip(xs, pick, strict=True)])
            for xs in ([layer.plain_queries[window] for layer in layers], [layer.queries[window] for layer in layers])
        )
        places = [layer.positions[window].repeat(groups)[at] for layer, at in zip(layers, pick, strict=True)]
        with torch.no_grad():
            target, _ = true_mass(
                query.to(device),
                torch.cat(places).to(device),
                torch.cat([layer.keys[window] for layer in layers]).to(device),
                torch.cat([each[window] for each in buckets]).to(device),
                clusters,
                settings.local,
                layers[0].scaling,
                layers[0].softcap,
            )
        loss = divergence(target, models(plain.to(device).float())).mean(1)
        optimizer.zero_grad()
        # heads share no weights: the sum trains each on its own
        loss.sum().backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach().mean()))
        advance()
    last = losses[-max(1, len(losses) // 10) :]
    return models.folded(), sum(last) / len(last)


def divergence(target: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL divergence (nats) of softmax(logits) from the target, by row."""
    return (torch.xlogy(target, target) - target * logits.log_softmax(-1)).sum(-1)


def _pool(far: torch.Tensor) -> list[torch.Tensor]:
    """Rows to draw from for each KV head: its long-range queries; all of them for a head that has none."""
    rows = far.flatten(1)
    return [(row if bool(row.any()) else torch.ones_like(row)).nonzero().flatten() for row in rows]


def _draw(rows: torch.Tensor, count: int, seeded: torch.Generator) -> torch.Tensor:
    return rows[torch.randint(len(rows), (count,), generator=seeded)]
