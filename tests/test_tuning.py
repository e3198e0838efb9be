"""What "auto" chooses, and what it says about it."""

from itertools import product

import pytest
import torch
from gpu_support import OnGpu

from turbo_hf.config.turbo_config import ATTENTION_MODES
from turbo_hf.ops import gpu, tuning
from turbo_hf.ops.backend import WIDE_HALF
from turbo_hf.ops.gpu import H200_SHARED
from turbo_hf.ops.tuning import decode_tiles, describe_prefill, prefill_mode, prefill_tiles


def mode(attention: str, tokens: int, dim: int, dtype: torch.dtype = torch.bfloat16, past: int = 0) -> str:
    return prefill_mode(attention, OnGpu(dim, dtype, tokens), past)  # type: ignore[arg-type]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu, "hopper", lambda device: True)
    monkeypatch.setattr(gpu, "why_no_kernels_on", lambda device: None)
    monkeypatch.setattr(gpu, "sms", lambda device: 132)


@pytest.mark.usefixtures("h200")
def test_auto_computes_in_8_bit_where_that_was_measured_faster() -> None:
    assert mode("auto", 4095, 128) == "native"
    assert mode("auto", 4096, 128) == "turbo"
    assert mode("auto", 1 << 17, 64) == "native"
    assert mode("auto", 1 << 17, 128, torch.float32) == "native"
    # a chunk: twice as many pairs of a query and a key
    assert mode("auto", 1024, 128, past=15871) == "native"
    assert mode("auto", 1024, 128, past=15872) == "turbo"
    assert mode("auto", 512, 128, past=1 << 17) == "turbo"
    assert mode("auto", 1024, 64, past=1 << 17) == "native"


@pytest.mark.parametrize(
    ("capability", "triton", "faster"), [((9, 0), "3.6.0", True), ((9, 0), "3.7.1", False), ((8, 9), "3.6.0", False)]
)
def test_the_kernel_for_hopper_runs_where_it_was_tried(
    capability: tuple[int, int], triton: str, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And elsewhere "auto" keeps the model's precision."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("triton.__version__", triton)
    gpu.hopper.cache_clear()
    gpu.why_no_kernels_on.cache_clear()
    assert gpu.hopper(torch.device("cuda")) == faster
    assert mode("auto", 1 << 17, 128) == ("turbo" if faster else "native")
    said = describe_prefill("auto", torch.device("cuda"), {128})
    assert ("needs triton 3.6.x" in said) == (capability == (9, 0) and not faster)
    gpu.hopper.cache_clear()
    gpu.why_no_kernels_on.cache_clear()


def test_a_named_mode_is_itself() -> None:
    assert mode("fp8", 10, 64) == "fp8"
    assert prefill_mode("auto", torch.zeros(1, 1, 10, 64)) == "native"


@pytest.mark.usefixtures("h200")
def test_report_says_what_auto_does() -> None:
    here = torch.device("cuda")
    text = "head dim 64: native (8 bit was not measured faster here); head dim 128: native, from 4096 tokens up turbo"
    text += ", fewer over a long past"
    assert describe_prefill("auto", here, {128, 64}) == f"prompts (auto): {text}"
    assert describe_prefill("half", here, {64}) == "prompts: half"
    assert describe_prefill("auto", torch.device("cpu"), {64}) == "prompts: native (auto, without a GPU)"


SHARED = [H200_SHARED, 163 << 10, 99 << 10]
"""Bytes of shared memory a program: Hopper, A100, and what people have at home."""


def test_tiles_fit_shared_memory() -> None:
    """Keys and values in flight. What the compiler adds was looked at when they were chosen."""
    for case in product(ATTENTION_MODES, (32, 64, 128, 256), (2, 4), SHARED):
        kind, dim, itemsize, shared = case
        if kind == "half" and itemsize == 4 and dim == 256 and shared < WIDE_HALF:
            continue  # refused
        tiles = prefill_tiles(kind, dim, itemsize, 128, shared)
        wide = {"native": (itemsize, itemsize), "half": (1, itemsize)}.get(kind, (1, 1))
        # elsewhere the tile at work has left shared memory: as compiled
        waiting = tiles.stages if shared == H200_SHARED else max(1, tiles.stages - 1)
        fits = tiles.block_n * dim * sum(wide) * waiting <= shared
        # only a mode without scales of P may take shorter tiles than the block that shares one
        assert fits, (case, tiles)
        assert tiles.block_n == 128 or kind == "native", case


def test_decode_tiles_fit_shared_memory() -> None:
    widths = [(16, 16), *product((8, 4, 3, 2), (8, 4, 3, 2))]
    for case in product(SHARED, (32, 64, 128), (32, 64, 128, 256), widths, (False, True)):
        shared, block, dim, both, many = case
        tiles, room = decode_tiles(block * dim, both, False, many=many, shared=shared), shared - tuning.RESERVED
        waiting = tiles.blocks * (tiles.stages - 1) * block * dim * sum(both) // 8
        # what is unpacked passes through shared memory too, at 3 bit beside what waits
        unpacked = tiles.blocks * block * dim * sum(bits < 8 for bits in both)
        fits = tiles.occupancy * waiting <= room and unpacked <= room
        fits = fits and (3 not in both or unpacked + waiting <= shared)
        assert fits, (case, tiles)
        assert tiles.warps * tiles.occupancy <= 8, case  # warps of an SM that have 255 registers


def test_float32_over_16_bit_has_room_for_both() -> None:
    for codes, shared in product((32 * 32, 64 * 64, 128 * 64), SHARED):
        tiles = decode_tiles(codes, (16, 16), False, itemsize=4, shared=shared)
        assert (tiles.stages - 1) * codes * 4 + codes * 4.75 <= shared, (codes, tiles)  # as compiled
