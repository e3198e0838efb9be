"""Error of each mode against exact attention, on random numbers as in the papers, and on a trained model's inputs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from turbo_hf.eval.bench.capture import Captured
from turbo_hf.eval.bench.oracle import Errors, attend, errors, fp8_attention
from turbo_hf.eval.bench.prefill import options_of
from turbo_hf.layout import Rounding, Scoring
from turbo_hf.ops.prefill import contract as op

FP8_TENSOR = "FP8 tensor-level (simulated)"

DISTRIBUTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "N(0,1)": torch.randn,
    "U(-0.5,0.5)": lambda *shape, **how: torch.rand(*shape, **how) - 0.5,
}


class Method(NamedTuple):
    """A mode of `ops.prefill` and its options, under the name that the tables show."""

    name: str
    options: dict[str, Any]


METHODS = (
    Method("fp16", {"mode": "fp16"}),
    Method("half", {"mode": "half"}),
    Method("turbo", {"mode": "turbo"}),
    Method("int8, V tensor", {"mode": "int8", "v_scale": "tensor"}),
    Method("int8, V block", {"mode": "int8", "v_scale": "block"}),
    Method("int8, V channel", {"mode": "int8", "v_scale": "channel"}),
    Method("fp8", {"mode": "fp8"}),
)
"""What is compared, beside the simulated FP8."""


@dataclass(frozen=True, slots=True)
class Row:
    """Errors of one method on one input. source: a distribution, or "layer 3" of a model. tokens: keys and queries."""

    source: str
    tokens: int
    method: str
    norm: float
    mre: float
    elementwise: float


def random_errors(
    distribution: str,
    tokens: int,
    methods: list[Method],
    *,
    heads: int,
    dim: int,
    causal: bool,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    options: dict[str, Any],
) -> Iterator[Row]:
    """Errors on q, k, v [1, heads, tokens, dim] drawn from `distribution` and rounded to `dtype`, method by method.

    `options`: further ones of `ops.prefill`, the same for all methods.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shape = (1, heads, tokens, dim)
    draw = DISTRIBUTIONS[distribution]
    q, k, v = (draw(*shape, generator=generator, device=device).to(dtype) for _ in range(3))
    layer = Captured(0, q, k, v, {"scaling": dim**-0.5})
    return _rows(distribution, layer, methods, causal, options)


def model_errors(layers: list[Captured], methods: list[Method], *, options: dict[str, Any]) -> Iterator[Row]:
    """Errors on what a model's attention layers were given, layer by layer and method by method."""
    for layer in layers:
        yield from _rows(f"layer {layer.index}", layer, methods, True, options)


def mean(rows: list[Row]) -> list[Row]:
    """One row per method and length: the mean over the sources."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.tokens, row.method), []).append(row)
    return [
        Row("mean", tokens, method, *(sum(figures) / len(own) for figures in zip(*map(_figures, own), strict=True)))
        for (tokens, method), own in groups.items()
    ]


def _figures(row: Row) -> Errors:
    return Errors(row.norm, row.mre, row.elementwise)


def _rows(source: str, layer: Captured, methods: list[Method], causal: bool, options: dict[str, Any]) -> Iterator[Row]:
    q, k, v, about = layer.q, layer.k, layer.v, {**layer.about, "causal": causal}
    exact = attend(q[0], k[0], v[0], **about).out
    scoring = Scoring(about["scaling"], about.get("softcap"), about.get("sinks"))
    tokens = q.shape[2]
    for method in methods:
        given = {**method.options, **options_of(method.options["mode"], options)}
        backend = given.pop("backend", "auto")
        got = op.prefill(
            q, k, v, scoring, Rounding(**given), causal=causal, window=about.get("window"), backend=backend
        )
        yield Row(source, tokens, method.name, *errors(got.out[0], exact))
    yield Row(source, tokens, FP8_TENSOR, *errors(fp8_attention(q[0], k[0], v[0], **about), exact))
