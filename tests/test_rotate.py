"""Rotation of keys and queries: scores stay, keys come back, and no key depends on its neighbours."""

import pytest
import torch
from all_pairs import in_one_test, in_turn
from budgets import float_budget, largest
from choices import BACKENDS
from hypothesis import given
from hypothesis import strategies as st
from stores import tokens

from turbo_hf.ops.store.rotate import rotate_keys, rotate_queries, unrotate_keys

DIMS = [pytest.param(dim, id=f"d{dim}") for dim in (16, 64, 80, 96, 128, 256)]


@in_turn(dim=DIMS, dtype=[torch.float32, torch.bfloat16, torch.float16], backend=BACKENDS[::-1])
def test_scores_stay(dim: int, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    q, k = (tokens(2, heads, 33, dim, device=device).to(dtype) for heads in (4, 2))
    turned = rotate_queries(q, backend), rotate_keys(k, backend)
    assert turned[0].dtype == dtype
    assert turned[1].dtype == torch.float32
    want = q.double().cpu() @ k.double().cpu().repeat_interleave(2, 1).mT
    got = turned[0].double().cpu() @ turned[1].double().cpu().repeat_interleave(2, 1).mT
    # one rounding of each rotated query, a float32 rounding of each key
    size = largest(q.double().norm(dim=-1)) * largest(k.double().norm(dim=-1))
    assert largest(got - want) <= float_budget(want, want, size, dtype)


@in_turn(dim=DIMS, dtype=[torch.float16, torch.float32, torch.bfloat16])
def test_the_kernel_gives_the_references_bits(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    k = tokens(2, 3, 21, dim, device=device).to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    # the interpreter cuts bfloat16 short where a GPU rounds it
    narrow = dtype != torch.bfloat16 or device.type == "cuda"
    for rotate in (rotate_keys, unrotate_keys, *([rotate_queries] if narrow else [])):
        assert torch.equal(rotate(k, "triton"), rotate(k, "reference"))


def test_rotated_keys_in_their_own_type_are_clamped_to_its_range(backend: str, device: torch.device) -> None:
    k = tokens(1, 2, 40, 64, device=device).half()
    assert torch.equal(rotate_keys(k, backend, narrow=True), rotate_keys(k, backend).half())
    k[0, 0, 0], k[0, 1, 0, 0] = 60000.0, torch.nan
    turned = rotate_keys(k, backend, narrow=True)
    assert turned[0, 0, 0, 0] == torch.finfo(torch.float16).max
    assert turned[0, 1, 0].isnan().all()


@pytest.mark.parametrize("dim", DIMS)
def test_keys_come_back(dim: int, backend: str, device: torch.device) -> None:
    k = tokens(1, 2, 40, dim, device=device)
    back = unrotate_keys(rotate_keys(k, backend), backend)
    assert largest(back - k) <= float_budget(k.double(), k, largest(k.double().norm(dim=-1)), torch.float32)


@in_one_test("dim", DIMS)
def test_the_matrix_is_orthogonal_with_equal_entries(dim: int, device: torch.device) -> None:
    unit = torch.eye(dim, device=device)[None, None]
    matrix = rotate_keys(unit)[0, 0]
    size = dim & -dim
    assert int((matrix != 0).sum()) == dim * size
    assert matrix.abs().unique().tolist()[-1] == 2.0 ** -((size.bit_length() - 1) // 2)
    assert torch.equal(rotate_queries(unit)[0, 0] @ matrix.T, torch.eye(dim, device=device))


@given(cut=st.integers(1, 60), rows=st.integers(1, 3))
def test_a_key_does_not_depend_on_its_neighbours(cut: int, rows: int) -> None:
    for backend in BACKENDS:
        k = tokens(rows, 2, 61, 64)
        whole = rotate_keys(k, backend)
        assert torch.equal(whole[:, :, :cut], rotate_keys(k[:, :, :cut], backend))
        rest = k[-1:, :, cut:].transpose(1, 2).contiguous().transpose(1, 2)
        assert torch.equal(whole[-1:, :, cut:], rotate_keys(rest, backend))


def test_one_outlier_channel_is_spread() -> None:
    k = tokens(1, 2, 64, 128)
    k[..., 5] = 100.0
    assert largest(rotate_keys(k)) * 8 / 128**0.5 < largest(k) / 4


def test_no_float_is_refused() -> None:
    with pytest.raises(ValueError, match="x must be"):
        rotate_keys(torch.zeros(1, 1, 1, 16, dtype=torch.int8))
