"""Models and answers for the tests of steps that are replayed."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from choices import flat_config
from models import SHAPE, left_padded, prompts
from torch import Tensor

import turbo_hf
from turbo_hf import Calibration, TurboCache, TurboConfig
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.calibration.artifacts import LayerCalibration, fingerprint
from turbo_hf.calibration.checkpoint import Checkpoint
from turbo_hf.graphs import why_not
from turbo_hf.graphs.step_runner import StepRunner
from turbo_hf.models.versions import CACHE
from turbo_hf.patching import generate_methods as generation
from turbo_hf.patching.handle import Report

SMALL = flat_config(block_size=32)
PLAIN = flat_config(block_size=32, cuda_graphs=False)
LENGTHS = [60, 33, 5]
NEW = 40


class Again:
    """In place of a CUDA device: what was captured runs again. Counts both."""

    def __init__(self, device: Any = None, fails: str = ""):
        self.warmed = self.captured = self.replayed = 0
        self._fails = fails

    def warm(self, step: Callable[[], Any]) -> Any:
        self.warmed += 1
        return step()

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        if self._fails:
            raise RuntimeError(self._fails)
        self.captured += 1

        def replay() -> Any:
            self.replayed += 1
            return step()

        return replay


class Graphs(Again):
    """As `Again`; a replay runs in one piece, and nothing on the host notices it, as that of a CUDA graph."""

    def __init__(self, cache: TurboCache):
        super().__init__()
        self._mark = cache.mark

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        again = super().capture(step)

        def replay() -> Any:
            now, trace = self._mark.now, sys.gettrace()
            assert now is not None
            before = set(now.stored)
            sys.settrace(None)
            try:
                return again()
            finally:
                now.stored.clear()
                now.stored.update(before)
                sys.settrace(trace)

        return replay


def watch_runners(monkeypatch: pytest.MonkeyPatch) -> list[StepRunner]:
    """The runners of all `generate` calls to come; without a GPU over stand-ins, and without kernels."""
    made: list[StepRunner] = []

    def make(*args: Any, **kwargs: Any) -> StepRunner:
        made.append(StepRunner(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(generation, "StepRunner", make)
    if not torch.cuda.is_available():
        monkeypatch.setattr(generation, "cuda_device", Again)
        monkeypatch.setattr(why_not, "_why_no_replay_there", lambda *args: None)
        monkeypatch.setattr(TurboLayer, "in_place", True)
    return made


def ragged(lengths: list[int] | None = None) -> dict[str, Any]:
    rows = LENGTHS if lengths is None else lengths
    return left_padded([prompts(1, length, seed=row)[0] for row, length in enumerate(rows)])


def answer(model: Any, config: TurboConfig, **options: Any) -> Tensor:
    """The tokens of one patched `generate`, sampled from one seed."""
    return answer_and_report(model, config, None, **options)[0]


def answer_and_report(
    model: Any, config: TurboConfig, calibration: Calibration | None, **options: Any
) -> tuple[Tensor, Report]:
    inputs = {name: x.to(model.device) if isinstance(x, Tensor) else x for name, x in options.items()}
    with turbo_hf.patch(model, config, calibration=calibration) as handle:
        torch.manual_seed(3)
        tokens = torch.as_tensor(model.generate(**{"max_new_tokens": NEW, "do_sample": False, **inputs}))
        return tokens, handle.report()


def an_index(model: Any, buckets: int = 16, seed: int = 5) -> Calibration:
    """Random centroids and query classifiers for a tiny model."""
    heads, dim = model.config.num_key_value_heads, SHAPE["head_dim"]
    shapes = {"weight_1": (dim, 32), "bias_1": (32,), "weight_2": (32, buckets), "bias_2": (buckets,)}
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(heads, *shape, generator=generator), dim=-1)

    layers = []
    for index in range(model.config.num_hidden_layers):
        classifier = {name: drawn(*shape) for name, shape in shapes.items()}
        centroids, rotated = drawn(buckets, dim), drawn(buckets, dim)
        layers.append(LayerCalibration(index, {}, centroids, classifier, rotated_centroids=rotated))
    return Calibration(fingerprint(model, Checkpoint("")), {}, tuple(layers), 0)


def replayed(
    device: Callable[[TurboCache], Any], steps: int, within: bool = False
) -> Callable[[Any, TurboCache], None]:
    """The `do` of an `Operation`: a step that warms, one that is captured, replayed ones; then the runner goes.

    within: the runner is called from within the model's call, as in a beam search.
    """

    @torch.no_grad()
    def run(route: Any, cache: TurboCache) -> None:
        model = route.model
        forward = functools.partial(type(model).forward, model) if within else None
        runner = StepRunner(model, device(cache), forward=forward)
        step = functools.partial(model, **{generation.RUNNER: runner}) if within else runner
        for _ in range(steps):
            held = cache.get_seq_length()
            new = route.ids[:, held : held + 1].contiguous()
            at = torch.full_like(new, held)
            step(input_ids=new, position_ids=at, **{CACHE: cache}, use_cache=True, return_dict=True)
        # a capture that an injected error broke off is not tried again
        assert runner.captures or runner.off

    return run
