"""Which windows and keys a calibration is made from, and which windows judge it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from calibration_support import SMALL, lab
from stores import tokens
from torch import Tensor

from turbo_hf.calibration import run
from turbo_hf.calibration.heads import HeadPriorities
from turbo_hf.calibration.quality import evaluate
from turbo_hf.calibration.query_model import train
from turbo_hf.calibration.samples import Samples

KeysOfLayers = list[list[Tensor]]


@pytest.mark.parametrize(("windows", "learned"), [(3, 2), (14, 12)])
def test_an_index_is_judged_on_windows_that_it_was_not_learned_from(
    windows: int, learned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clustered: list[KeysOfLayers] = []
    trained: list[tuple[list[Samples], int]] = []
    judged: list[list[int]] = []
    centroids = run._centroids

    def spy_on_centroids(layers: KeysOfLayers, *rest: Any) -> Any:
        clustered.append(layers)
        return centroids(layers, *rest)

    def spy_on_training(layers: list[Samples], buckets: Any, made: Any, learned: int, *rest: Any) -> Any:
        trained.append((layers, learned))
        return train(layers, buckets, made, learned, *rest)

    def spy_on_judging(layer: Any, buckets: Any, own: Any, turned: Any, stored: Any, held_out: Any, *rest: Any) -> Any:
        judged.append(list(held_out))
        return evaluate(layer, buckets, own, turned, stored, held_out, *rest)

    monkeypatch.setattr(run, "_centroids", spy_on_centroids)
    monkeypatch.setattr(run, "train", spy_on_training)
    monkeypatch.setattr(run, "evaluate", spy_on_judging)
    found = lab(settings=replace(SMALL, windows=windows, queries=16, steps=1))
    assert [count for _, count in trained] == [learned] * len(trained)
    assert judged == [list(range(learned, windows))] * len(found.layers)
    for number, (layers, _) in enumerate(trained):
        for name, own in zip(("pre_rotary_keys", "keys"), clustered[2 * number : 2 * number + 2], strict=True):
            for layer, used in zip(layers, own, strict=True):
                held = getattr(layer, name)
                assert len(held) == windows
                assert all(map(torch.equal, used, held[:learned]))
                assert len(used) == learned


def test_sinks_take_no_part_in_the_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []

    def spy(keys: Tensor, clusters: int, *_: Any) -> Tensor:
        given.append(keys)
        return torch.zeros(len(keys), clusters, keys.shape[2])

    monkeypatch.setattr(run, "k_means", spy)
    heads, windows, length, dim = 2, 3, 50, 4
    number = torch.arange(2 * windows * heads * length).view(2, windows, heads, length)
    layers = [[keys[..., None].expand(-1, -1, dim).float() for keys in layer] for layer in number]
    run._centroids(layers, 8, SMALL, 0, torch.device("cpu"))
    # by layer and head, all keys of all windows but the first of each
    want = number[..., 1:].transpose(1, 2).reshape(2 * heads, windows * (length - 1))
    assert torch.equal(given[0][..., 0].long(), want)


def test_priorities_are_the_mean_over_the_blocks_of_all_windows() -> None:
    parts, whole = HeadPriorities(), HeadPriorities()
    k, v = tokens(1, 3, 192, 16), tokens(1, 3, 192, 16)
    # the second part has one block more
    for at in (slice(64), slice(64, 192)):
        parts.add(k[:, :, at], v[:, :, at])
    whole.add(k, v)
    assert parts.scores().keys() == whole.scores().keys()
    for metric, score in whole.scores().items():
        torch.testing.assert_close(parts.scores()[metric], score)
