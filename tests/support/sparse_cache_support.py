"""Sparse configurations for tests of the cache and of `generate`."""

from typing import Any

import torch
from choices import flat_config
from graphs_support import an_index
from models import left_padded, prompts
from torch import Tensor

import turbo_hf
from turbo_hf import SparseConfig, TurboConfig
from turbo_hf.config.turbo_config import CALIBRATED
from turbo_hf.sparse.selectors import Centroids

ANY: dict[str, Any] = {"probes": 3, "window_tokens": 20, "read_all_layers": ()}
"""Choices small enough for short texts."""


def small(selector: str, **options: Any) -> dict[str, Any]:
    """`ANY`, but for what the selector does not look at."""
    return {k: v for k, v in {**ANY, **options}.items() if selector in CALIBRATED or k != "probes"}


TRAINED: dict[str, Any] = {"probes": 4, "window_tokens": 31}


def sparse(selector: str, **options: Any) -> TurboConfig:
    """4 bit with a sparse decode."""
    chosen: dict[str, Any] = {"selector": selector, **options}
    return flat_config(sparse=SparseConfig(**chosen), block_size=32, attention="native")


def bucketed(config: SparseConfig, buckets: int = 16, layer: int = 0) -> Centroids:
    """A selector with random centroids, for 2 heads of 16 channels."""
    centroids = torch.randn(2, buckets, 16, generator=torch.Generator().manual_seed(5), device="cpu")
    return Centroids(config, layer, torch.nn.functional.normalize(centroids, dim=-1), False)


def answers(model: Any, config: TurboConfig, tokens: int = 20, calibration: Any = None, **options: Any) -> Tensor:
    """New tokens under the patch, greedy. calibration: where one is needed, of random centroids by default."""
    if calibration is None and config.sparse is not None and config.sparse.selector in CALIBRATED:
        calibration = an_index(model)
    given = {"do_sample": False, "max_new_tokens": tokens, **options}
    with turbo_hf.patch(model, config, calibration=calibration):
        return torch.as_tensor(model.generate(**given)[:, options["input_ids"].shape[1] :])


def ragged(lengths: tuple[int, ...] = (90, 70, 31)) -> dict[str, Any]:
    return left_padded([prompts(1, length, length)[0] for length in lengths])
