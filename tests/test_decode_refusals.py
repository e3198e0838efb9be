"""`decode`: what it, or its kernel alone, refuses, and in which words."""

from typing import Any

import pytest
import torch
from all_pairs import in_one_test
from op_calls import decode, prefill
from stores import make_store, random_store

from turbo_hf.layout import KVStore

pytestmark = pytest.mark.usefixtures("poison")


def test_float64_is_refused_by_the_kernel_and_served_without_it(device: torch.device) -> None:
    store, q = random_store([70], 2, 64, device), torch.randn(1, 2, 1, 64, dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match='backend "triton" cannot run here: float64 has no kernel'):
        decode(q, store, scaling=1.0, backend="triton")
    assert decode(q, store, scaling=1.0).out.dtype == torch.float64


def test_head_dims_above_256_are_refused_by_the_kernel(device: torch.device) -> None:
    store, q = random_store([3], 1, 272, device), torch.randn(1, 1, 1, 272, device=device)
    with pytest.raises(ValueError, match="head dim 272 is above 256"):
        decode(q, store, scaling=1.0, backend="triton")


def test_blocks_that_do_not_fit_in_float32_are_refused_by_the_kernel(device: torch.device) -> None:
    store, q = random_store([3], 1, 128, device, block=128), torch.randn(1, 1, 1, 128, device=device)
    with pytest.raises(ValueError, match="blocks of 128 tokens of 128 channels do not fit in float32"):
        decode(q, store, scaling=1.0, mode="fp16", backend="triton")


@pytest.fixture
def small() -> KVStore:
    return random_store([4], 2, 16, torch.device("cpu"))


@pytest.mark.parametrize(
    "shape",
    [pytest.param((1, 3, 1, 16), id="heads"), pytest.param((1, 2, 1, 32), id="dim")],
)
def test_refuses_queries_of_another_shape(shape: tuple[int, ...], small: KVStore) -> None:
    with pytest.raises(ValueError, match=r"q must be \[B, Hq, M, 16\] with Hq a multiple of 2; got \(1, "):
        decode(torch.zeros(shape), small, scaling=1.0)


def test_refuses_another_batch(small: KVStore) -> None:
    with pytest.raises(ValueError, match=r"q has 2 rows on cpu; the cache holds 1 on cpu"):
        decode(torch.zeros(2, 2, 1, 16), small, scaling=1.0)


def test_refuses_another_device(small: KVStore) -> None:
    with pytest.raises(ValueError, match=r"q has 1 rows on meta; the cache holds 1 on cpu"):
        decode(torch.zeros(1, 2, 1, 16, device="meta"), small, scaling=1.0)


def test_refuses_integers(small: KVStore) -> None:
    with pytest.raises(ValueError, match=r"q must be float16, bfloat16, float32 or float64; got torch.int8"):
        decode(torch.zeros(1, 2, 1, 16, dtype=torch.int8), small, scaling=1.0)


def test_refuses_an_unknown_mode(small: KVStore) -> None:
    with pytest.raises(ValueError, match=r"mode must be one of turbo, fp16; got 'fast'"):
        decode(torch.zeros(1, 2, 1, 16), small, scaling=1.0, mode="fast")


def test_refuses_starts_of_another_batch(small: KVStore) -> None:
    with pytest.raises(ValueError, match=r"starts must be \[B\] = \[1\]; got \(2,\)"):
        decode(torch.zeros(1, 2, 1, 16), small, scaling=1.0, starts=torch.zeros(2, dtype=torch.int64))


def test_refuses_sinks_of_other_heads(small: KVStore) -> None:
    with pytest.raises(ValueError, match=r"sinks must be \[Hq\] = \[4\]; got \(2,\)"):
        decode(torch.zeros(1, 4, 1, 16), small, scaling=1.0, sinks=torch.zeros(2))


@in_one_test(
    ("options", "message"),
    [
        ({"window": 0}, "window must be at least 1 token"),
        ({"softcap": 0.0}, "softcap must be above 0"),
        ({"sas_threshold": 1.0}, "sas_threshold must be below 0"),
    ],
)
def test_options_that_leave_nothing_to_attend_to(options: dict[str, Any], message: str) -> None:
    q = torch.randn(1, 2, 1, 16)
    with pytest.raises(ValueError, match=message):
        prefill(q, q, q, scaling=1.0, **options)
    store = make_store(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16), [3])
    with pytest.raises(ValueError, match=message):
        decode(q, store, scaling=1.0, **options)


@in_one_test(
    ("change", "message"),
    [
        ({"sealed_host": (2,)}, r"store.sealed_host must hold the numbers in store.sealed, \(1,\); got \(2,\)"),
        ({"sealed_host": (1, 1)}, r"store.sealed_host must hold the numbers in store.sealed, \(1,\); got \(1, 1\)"),
        (
            {"sealed": torch.tensor([3])},
            r"store.sealed must give 1 rows of 0 to 1 blocks, as the table has; got \(3,\)",
        ),
        ({"sealed": torch.tensor([-1])}, r"store.sealed must give 1 rows of 0 to 1 blocks"),
        ({"sealed": torch.tensor([1, 1])}, r"store.sealed must be \[B\] = \[1\]; got \(2,\)"),
        ({"open_len": torch.tensor([1, 1])}, r"store.open_len must be \[B\] = \[1\]; got \(2,\)"),
        (
            {"table": torch.zeros(2, 1, dtype=torch.int64)},
            r"store.table must be \[B, blocks\] with B = 1; got \(2, 1\)",
        ),
    ],
)
def test_refuses_lengths_that_are_not_the_caches(change: dict[str, Any], message: str) -> None:
    store = random_store([70], 2, 16, torch.device("cpu"))._replace(**change)
    with pytest.raises(ValueError, match=message):
        decode(torch.zeros(1, 2, 1, 16), store, scaling=1.0)
