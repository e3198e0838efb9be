"""What depends on the GPU: whether kernels run, and tiles that fit where there is less shared memory than an H200."""

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from budgets import check_exact, check_turbo
from choices import flat_config
from gpu_support import OnGpu
from models import tiny_llama
from op_calls import decode, ops_like
from prefill_support import check_prefill, step_queries
from stores import make_store, store_codes, tokens

import turbo_hf
from turbo_hf import TurboConfig
from turbo_hf.attention.prompt import _is_plain
from turbo_hf.attention.turbo_attention import sas_threshold
from turbo_hf.errors import Notices
from turbo_hf.graphs import why_not
from turbo_hf.layout import UNQUANTIZED, Scoring, Width
from turbo_hf.ops import gpu, tuning
from turbo_hf.patching import doctor
from turbo_hf.patching import patch_model as patching
from turbo_hf.patching.refusals import forecast

CONSUMER = 99 << 10
"""Bytes of shared memory a program, on capabilities 8.6, 8.9 and 12.0."""

A100 = 163 << 10


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU of before Ampere."""
    monkeypatch.setattr(gpu, "TRITON_FOUND", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="Tesla T4"))
    gpu.why_no_kernels_on.cache_clear()
    yield
    gpu.why_no_kernels_on.cache_clear()


TOO_OLD = "Tesla T4 has compute capability 7.5, and the kernels need 8.0"


@pytest.mark.usefixtures("old")
def test_a_gpu_that_is_too_old_is_told() -> None:
    q: Any = OnGpu(256, torch.float16)
    assert ops_like(q).why_no_kernel() == TOO_OLD
    # of which nobody knows how much shared memory it has
    assert ops_like(q, block=128, mode="native").why_no_step_kernel() == TOO_OLD


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("TRITON_FOUND", False, "the package triton is not installed"), ("hip", "6.4", "this torch is built for ROCm")],
)
def test_kernels_need_triton_and_cuda(name: str, value: object, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu if hasattr(gpu, name) else torch.version, name, value)
    assert words in str(gpu.why_no_kernels_on(torch.device("cuda", 0)))
    assert gpu.why_no_kernels_on(torch.device("cpu")) is None


def on_a_gpu(
    config: TurboConfig, devices: Any, dtype: torch.dtype, dims: set[int], latents: Any, notices: Notices
) -> None:
    """`forecast` for a model that is on a GPU, which this machine may not have."""
    forecast(config, [torch.device("cuda", 0)], dtype, dims, latents, notices)


def test_a_patch_warns_where_no_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "why_no_kernels_on", lambda device: TOO_OLD)
    monkeypatch.setattr(why_not, "why_no_kernels_on", gpu.why_no_kernels_on)
    monkeypatch.setattr(patching, "forecast", on_a_gpu)
    model = tiny_llama()
    with pytest.warns(UserWarning, match=f"plain torch, which is slow: {TOO_OLD}"), turbo_hf.patch(model) as handle:
        report = str(handle.report())
    assert f"decode steps: no CUDA graphs ({TOO_OLD})" in report
    assert f"slow: {TOO_OLD}" in report
    with pytest.raises(turbo_hf.Unsupported, match=f'backend "triton": attention runs in plain torch.*{TOO_OLD}'):
        turbo_hf.patch(model, flat_config(backend="triton"))
    # who asked for plain torch, or for silence, is not told
    turbo_hf.patch(model, flat_config(backend="reference")).remove()
    turbo_hf.patch(model, strict="fallback").remove()


@pytest.mark.parametrize(
    ("attention", "bits", "block", "dtype", "said"),
    [
        ("auto", 4, 64, torch.bfloat16, []),
        ("fp8", 4, 64, torch.bfloat16, ["prompts"]),
        ("half", 4, 64, torch.float32, ["prompts"]),
        ("native", 4, 128, torch.bfloat16, ["decode steps"]),
        ("auto", 16, 128, torch.bfloat16, ["decode steps"]),
        ("turbo", 4, 128, torch.bfloat16, []),
    ],
)
def test_a_patch_tells_what_a_small_gpu_cannot_run(
    attention: Any, bits: int, block: int, dtype: torch.dtype, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "why_no_kernels_on", lambda device: None)
    monkeypatch.setattr(gpu, "shared_memory", lambda device: CONSUMER)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 3090")
    config = flat_config(attention=attention, bits=bits, block_size=block)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forecast(config, [torch.device("cuda", n) for n in range(2)], dtype, {256}, [], notices := Notices("raise"))
    assert [line.split(" run in plain torch")[0] for line in notices.messages] == said
    assert [str(warning.message) for warning in caught] == notices.messages


@pytest.mark.usefixtures("old")
def test_the_doctor_and_auto_tell_of_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_gpu", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor, "COMPILERS", ("python3",))
    assert doctor.machine().problems == (TOO_OLD,)
    monkeypatch.setattr(doctor, "COMPILERS", ("no-such-compiler",))
    assert "needs a C compiler" in doctor.machine().problems[1]
    said = tuning.describe_prefill("auto", torch.device("cuda", 0), {64})
    assert said == f"prompts: native (auto; {TOO_OLD})"


def test_what_does_not_fit_is_told() -> None:
    errors = pytest.importorskip("triton.runtime.errors")

    with (
        pytest.raises(ValueError, match=r"head dim 256 .*181760.*smaller Expert.block_size"),
        gpu.explain_out_of_resources(torch.empty(1, 256)),
    ):
        raise errors.OutOfResources(181760, CONSUMER, "shared memory")


def test_half_in_float32_is_refused_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(1, 1, 1, 256)
    assert ops_like(x).why_no_kernel("half") is None
    monkeypatch.setattr(gpu, "shared_memory", lambda device: CONSUMER)
    assert str(ops_like(x).why_no_kernel("half")).endswith("this GPU has 99; modes turbo, int8 and native run")
    assert ops_like(x).why_no_kernel("turbo") is None


def test_large_blocks_of_16_bit_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(1, 1, 1, 256, dtype=torch.float16)
    assert ops_like(q, block=128, mode="native").why_no_step_kernel() is None
    monkeypatch.setattr(gpu, "shared_memory", lambda device: CONSUMER)
    told = ops_like(q, block=128, mode="native").why_no_step_kernel()
    assert told == "blocks of 128 tokens of 256 channels do not fit in float16; smaller ones do"
    assert ops_like(q, block=64, mode="native").why_no_step_kernel() is None


@pytest.mark.parametrize(
    ("changed", "plain"),
    [
        pytest.param({}, True, id="plain"),
        pytest.param({"window": 40}, True, id="window-of-the-prompt"),
        pytest.param({"window": 39}, False, id="window"),
        pytest.param({"starts": torch.zeros(1, dtype=torch.int64)}, False, id="padding"),
        pytest.param({"softcap": 30.0}, False, id="softcap"),
        pytest.param({"sinks": torch.zeros(8)}, False, id="sinks"),
        pytest.param({"sas": True}, False, id="sas"),
    ],
)
def test_torch_computes_plain_causal_prompts(changed: dict[str, Any], plain: bool) -> None:
    starts, softcap, sinks, window = (changed.get(name) for name in ("starts", "softcap", "sinks", "window"))
    scoring = Scoring(1.0, softcap, sinks, sas_threshold(flat_config(sas=changed.get("sas", False)), 40))
    q: Any = OnGpu(128, tokens=40)
    assert _is_plain(q, starts, window, scoring) is plain
    assert _is_plain(torch.empty(1, 8, 40, 128), starts, window, scoring) is plain


# --- what fits is right ---------------------------------------------------------------------------------------------


MEMORY = [pytest.param(CONSUMER, id="99K"), pytest.param(A100, id="163K")]


@pytest.fixture(params=MEMORY)
def memory(request: pytest.FixtureRequest) -> int:
    """Bytes of shared memory a program; tests that choose them in pairs with other things bring their own."""
    return int(request.param)


@pytest.fixture
def small(memory: int, monkeypatch: pytest.MonkeyPatch, poison: None) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available() and gpu.shared_memory(torch.device("cuda", 0)) < memory:
        pytest.skip("this GPU has less")
    monkeypatch.setattr(gpu, "shared_memory", lambda device: memory)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(
    ("mode", "sizes"), [("native", (64, 128)), ("half", (128, 64)), ("turbo", (256, 128)), ("turbo", (128, 64))]
)
def test_prefill_in_smaller_tiles(memory: int, mode: str, sizes: tuple[int, int], device: torch.device) -> None:
    dim, block = sizes
    shape, dtype = (2, 2, 140, dim), torch.float16 if mode == "half" else torch.float32
    k, v = (tokens(*shape, device=device) for _ in range(2))
    past = make_store(k, v, [140, 70], groups=((4, 1), (8, 1)), block=block)
    q = tokens(2, 4, 100, dim, device=device, dtype=dtype)
    k, v = (tokens(2, 2, 100, dim, device=device, dtype=dtype) for _ in range(2))
    check_prefill(q, k, v, mode, past=past, starts=[0, 30], window=150, backend="triton")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("block", [64, 128])
def test_prefill_over_16_bit_in_smaller_tiles(block: int, device: torch.device) -> None:
    k, v = (tokens(1, 2, 200, 256, dtype=torch.float16, device=device) for _ in range(2))
    past = make_store(k, v, [200], groups=((UNQUANTIZED, 2),), block=block)
    q = tokens(1, 4, 40, 256, dtype=torch.float16, device=device)
    check_prefill(q, k[:, :, :40], v[:, :, :40], "native", past=past, backend="triton")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(
    ("bits", "sizes"),
    [
        (16, (64, 128)), (16, (256, 64)), (8, (128, 64)), (4, (64, 128)), (4, (256, 64)), (3, (64, 128)),
        ((4, 2), (128, 64)), ((8, 3), (256, 64)),
    ],
)  # fmt: skip
def test_decode_in_smaller_tiles(memory: int, bits: Width, sizes: tuple[int, int], device: torch.device) -> None:
    dim, block = sizes
    k, v = (tokens(2, 2, 300, dim, dtype=torch.float16, device=device) for _ in range(2))
    store = make_store(k, v, [300, 70], groups=((bits, 2),), block=block)
    q = tokens(2, 4, 1, dim, dtype=torch.float16, device=device)
    got, rows = decode(q, store, scaling=0.1, backend="triton"), store_codes(store)
    if bits == UNQUANTIZED:
        check_exact(got, q, [row.values() for row in rows], scaling=0.1)
    else:
        check_turbo(got, step_queries(q, [0, 0], fused=device.type == "cuda"), q.dtype, rows, scaling=0.1)
