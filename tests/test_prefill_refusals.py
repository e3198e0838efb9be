"""`prefill`: what it refuses, and in which words."""

from typing import Any

import pytest
import torch
from all_pairs import in_one_test
from op_calls import prefill
from stores import make_store

pytestmark = pytest.mark.usefixtures("poison")


def zeros(**changed: torch.Tensor) -> dict[str, Any]:
    """Arguments of the smallest prefill, some of them changed."""
    return {name: torch.zeros(1, 2, 4, 16) for name in ("q", "k", "v")} | changed


@in_one_test("name", ["q", "k", "v"])
def test_refuses_integers(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be float16, bfloat16, float32 or float64; got torch.int8"):
        prefill(**zeros(**{name: torch.zeros(1, 2, 4, 16, dtype=torch.int8)}), scaling=1.0)


@in_one_test("name", ["q", "k", "v"])
def test_refuses_another_rank(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be \[B, H, M, D\]; got shape \(2, 4, 16\)"):
        prefill(**zeros(**{name: torch.zeros(2, 4, 16)}), scaling=1.0)


def test_refuses_head_dims_that_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match=r"k has head dim 24; packed blocks need a multiple of 16"):
        prefill(*(torch.zeros(1, 2, 4, 24) for _ in range(3)), scaling=1.0)


@pytest.mark.parametrize("shape", [pytest.param((1, 3, 4, 16), id="heads"), pytest.param((1, 2, 4, 32), id="dim")])
def test_refuses_queries_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"q must be \[B, Hq, M, 16\] with Hq a multiple of 2; got \(1, "):
        prefill(**zeros(q=torch.zeros(shape)), scaling=1.0)


@in_one_test(
    ("name", "shape"),
    [
        pytest.param("k", (2, 2, 4, 16), id="k-rows"),
        pytest.param("k", (1, 2, 5, 16), id="k-tokens"),
        pytest.param("v", (1, 1, 4, 16), id="v-heads"),
        pytest.param("v", (1, 2, 4, 32), id="v-dim"),
    ],
)
def test_refuses_keys_and_values_of_another_shape(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be \[B, Hkv, M, D\] with B, M and D of q \(1, 2, 4, 16\); got"):
        prefill(**zeros(**{name: torch.zeros(shape)}), scaling=1.0)


@pytest.mark.parametrize("name", ["k", "v"])
def test_refuses_another_dtype_or_device(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be torch.float32 on cpu like q; got torch.float16 on cpu"):
        prefill(**zeros(**{name: torch.zeros(1, 2, 4, 16, dtype=torch.float16)}), scaling=1.0)
    with pytest.raises(ValueError, match=rf"{name} must be torch.float32 on cpu like q; got torch.float32 on meta"):
        prefill(**zeros(**{name: torch.zeros(1, 2, 4, 16, device="meta")}), scaling=1.0)


@in_one_test(
    "shape",
    [
        pytest.param((2, 2, 4, 16), id="rows"),
        pytest.param((1, 1, 4, 16), id="heads"),
        pytest.param((1, 2, 4, 32), id="dim"),
    ],
)
def test_refuses_a_past_of_another_shape(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    past = make_store(x, x, [4] * shape[0])
    with pytest.raises(ValueError, match=r"past must hold B, Hkv and D of k \(1, 2, 4, 16\) on cpu; it holds "):
        prefill(**zeros(), scaling=1.0, past=past)


def test_refuses_an_unknown_mode() -> None:
    with pytest.raises(ValueError, match=r"mode must be one of turbo, int8, half, fp8, fp16; got 'fast'"):
        prefill(**zeros(), scaling=1.0, mode="fast")


def test_refuses_other_block_sizes() -> None:
    with pytest.raises(ValueError, match=r"block must be one of 32, 64, 128 tokens; got 16"):
        prefill(**zeros(), scaling=1.0, block=16)


def test_refuses_an_unknown_scale_of_values() -> None:
    with pytest.raises(ValueError, match=r"v_scale must be one of block, channel, tensor; got 'row'"):
        prefill(**zeros(), scaling=1.0, v_scale="row")


def test_refuses_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match=r"backend must be one of auto, triton, reference; got 'cuda'"):
        prefill(**zeros(), scaling=1.0, backend="cuda")


def test_refuses_starts_of_another_batch() -> None:
    with pytest.raises(ValueError, match=r"starts must be \[B\] = \[1\]; got \(2,\)"):
        prefill(**zeros(), scaling=1.0, starts=torch.zeros(2, dtype=torch.int64))


def test_refuses_sinks_of_other_heads() -> None:
    with pytest.raises(ValueError, match=r"sinks must be \[Hq\] = \[2\]; got \(3,\)"):
        prefill(**zeros(), scaling=1.0, sinks=torch.zeros(3))
