"""The ops of a layer: chosen once, by the first keys, and for nothing but another dtype or device again."""

import pytest
import torch
from choices import flat_config
from stores import tokens

from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.rows import NewColumns
from turbo_hf.layout import FIRST, Scoring
from turbo_hf.ops import backend as choices


def step(layer: TurboLayer, count: int, dtype: torch.dtype = torch.float32) -> None:
    """New tokens join the layer; then the last one attends."""
    k, v = (tokens(1, 2, count, 16, dtype=dtype) for _ in range(2))
    layer.append(k, v, NewColumns(count))
    layer.ops.decode(k[:, :, -1:], layer.kv_store(), Scoring(0.25))
    layer.commit()


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_steps_do_not_choose(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    right = choices.uses_triton

    def counted(*given: object) -> bool:
        asked.append(given)
        return right(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(choices, "uses_triton", counted)
    layer = TurboLayer(flat_config(backend=name, block_size=32))
    step(layer, FIRST + 70)
    # storing, and attention of steps
    assert len(asked) == 2
    for _ in range(30):
        step(layer, 1)
    assert len(asked) == 2
    assert layer.state.sealed == [2]


def test_another_dtype_chooses_anew() -> None:
    layer = TurboLayer(flat_config(backend="triton", block_size=32))
    step(layer, 40)
    step(layer, 1, torch.bfloat16)
    with pytest.raises(ValueError, match='backend "triton" cannot run here: float64 has no kernel'):
        step(layer, 1, torch.float64)
    layer = TurboLayer(flat_config(block_size=32))
    for dtype in (torch.float32, torch.float64):
        step(layer, 3, dtype)
        assert layer.ops.dtype == dtype


def test_another_device_chooses_anew() -> None:
    layer = TurboLayer(flat_config(block_size=32))
    for device in ("cpu", "meta"):
        k = torch.zeros(1, 2, 4, 16, device=device)
        layer.prepare_for(k, k)
        assert layer.ops.device == k.device


def test_what_cannot_run_is_refused_before_anything_is_stored() -> None:
    layer = TurboLayer(flat_config(backend="triton"))
    with pytest.raises(ValueError, match='backend "triton" cannot run here: head dim 528 is above 512'):
        layer.append(torch.zeros(1, 2, 4, 528), torch.zeros(1, 2, 4, 528), NewColumns(4))
    assert not layer.is_initialized
