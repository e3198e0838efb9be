"""What a prompt costs the host: waits for the device; and when it hears of NaN."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from choices import flat_config
from gpu_support import tensors_in
from graphs_support import an_index
from models import left_padded, prompts, tiny_llama
from op_calls import append_step, classify, exchange_open, latent_decode, named_decode, quantize_tokens, select_rows
from sparse_cache_support import bucketed
from stores import tokens
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import turbo_hf
from turbo_hf import SparseConfig, TurboCache
from turbo_hf.attention import prompt as attention
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.rows import NewColumns, columns_of
from turbo_hf.cache.storage import DECODE_TOKENS
from turbo_hf.eval.methods import without_plans
from turbo_hf.layout import Scoring
from turbo_hf.models.versions import CACHE
from turbo_hf.ops.kernel_norm import launch_rms_norm
from turbo_hf.ops.prefill.launch import unpack_tiles

READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.unique")
"""What waits for the device, where a tensor lies there."""

MESSAGE = "layer {}: keys or values hold NaN or Inf"


class Work(TorchDispatchMode):
    """Counts how often the host waits, or would; what a kernel does in the interpreter is not the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self._inside = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += not self._inside and str(func).rpartition(".")[0] in READS
        return func(*args, **(kwargs or {}))

    def launched(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run` of a kernel."""

        def uncounted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self._inside = True
            try:
                return run(kernel, *args, **kwargs)
            finally:
                self._inside = False

        return uncounted

    def listed(self, tolist: Callable[..., Any]) -> Callable[..., Any]:
        """`Tensor.tolist`, which no mode sees on a CPU, counted."""

        def counted(x: torch.Tensor) -> Any:
            self.reads += not self._inside
            return tolist(x)

        return counted


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    with monkeypatch.context() as patched, Work() as work:
        for kernel in (InterpretedFunction, JITFunction):
            patched.setattr(kernel, "run", work.launched(kernel.run))
        patched.setattr(torch.Tensor, "tolist", work.listed(torch.Tensor.tolist))
        yield work


KERNELS: dict[str, Any] = {"backend": "triton"}


def sparse_layer() -> TurboLayer:
    chosen = SparseConfig(selector="kmeans-rotated", probes=3, window_tokens=20, read_all_layers=())
    config = flat_config(sparse=chosen, attention="native", **KERNELS)
    return TurboLayer(config, selector=bucketed(chosen))


LAYERS = [
    pytest.param(lambda: TurboLayer(flat_config(**KERNELS)), id="4bit"),
    pytest.param(lambda: TurboLayer(flat_config(low_heads=0.5, **KERNELS), head_order=[1, 0]), id="mixed"),
    pytest.param(lambda: TurboLayer(flat_config(bits=16, **KERNELS)), id="16bit"),
    pytest.param(lambda: TurboLayer(flat_config(**KERNELS), window=50), id="window"),
    pytest.param(sparse_layer, id="sparse"),
]


def feed(layer: TurboLayer, k: torch.Tensor, new: NewColumns) -> None:
    shape = (k.shape[0], 2, k.shape[2])
    known = layer.selector is not None
    layer.append(k, k, new, torch.zeros(shape, dtype=torch.int16, device=k.device) if known else None, check_later=True)
    layer.commit(check_later=True)


@pytest.mark.parametrize("make", LAYERS)
def test_ragged_and_later_chunks_wait_for_nothing(
    make: Callable[[], TurboLayer], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    layer, first = make(), columns_of(torch.arange(150, device=device) >= torch.tensor([[0], [70]], device=device))
    with counting(monkeypatch) as work:
        for length, chunk in ((150, first), (70, NewColumns(70)), (60, NewColumns(60))):
            feed(layer, tokens(2, 2, length, 16, device=device), chunk)
    assert work.reads == 0


@pytest.mark.gpu
@pytest.mark.parametrize("make", LAYERS)
def test_on_a_gpu_a_prompt_waits_for_nothing(make: Callable[[], TurboLayer]) -> None:
    k, mask = tokens(2, 2, 150, 64, dtype=torch.float16, device="cuda"), torch.arange(150) >= torch.tensor([[0], [70]])
    chunk = columns_of(mask.cuda())
    feed(make(), k, chunk)
    layer = make()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            feed(layer, k, chunk)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("padded", "reads"), [(False, 1), (True, 2)], ids=["plain", "padded"])
def test_a_pass_of_a_model_reads_once_and_its_mask_once(
    padded: bool, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(num_hidden_layers=3)
    batch = left_padded([prompts(1, 70)[0], prompts(1, 66)[0]]) if padded else {"input_ids": prompts(2, 70)}
    with turbo_hf.patch(model, flat_config(backend="triton")) as handle, torch.no_grad():
        cache = handle.new_cache()
        held: list[int] = []
        monkeypatch.setattr(TurboCache, "require_finite", _noted(TurboCache.require_finite, held))
        with counting(monkeypatch) as work:
            module = model.model.layers[0].self_attn
            seen: list[int] = []
            module.register_forward_pre_hook(lambda *_: seen.append(work.reads))
            model.register_forward_hook(lambda *_: seen.append(work.reads))
            model(**batch, **{CACHE: cache})
    assert seen[1] - seen[0] == reads
    assert len(held) == 1


def _noted(run: Callable[..., None], calls: list[int]) -> Callable[..., None]:
    def noted(cache: TurboCache) -> None:
        calls.append(1)
        run(cache)

    return noted


# --- when NaN is told -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "backend"), [(torch.nan, "triton"), (torch.inf, "reference")])
def test_a_pass_names_the_layer_before_its_tokens_are_chosen(bad: float, backend: Any) -> None:
    model, chosen = tiny_llama(num_hidden_layers=3), list[Any]()

    def choose(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen.append(ids)
        return scores

    weight = model.model.layers[1].self_attn.v_proj.weight
    with turbo_hf.patch(model, flat_config(backend=backend)) as handle, torch.no_grad():
        kept = weight[0, 0].clone()
        weight[0, 0] = bad
        cache = handle.new_cache()
        with pytest.raises(ValueError, match=MESSAGE.format(1)):
            model(prompts(1, 66), **{CACHE: cache})
        with pytest.raises(ValueError, match=MESSAGE.format(1)):
            model.generate(prompts(1, 66), max_new_tokens=3, logits_processor=LogitsProcessorList([choose]))
        assert not chosen
        weight[0, 0] = kept
        # a cache that has stored it is refused at each later pass
        with pytest.raises(ValueError, match=MESSAGE.format(1) if backend == "triton" else "broke off"):
            model(prompts(1, 66), **{CACHE: cache})
        cache.reset()
        model(prompts(1, 66), **{CACHE: cache})
        assert not any(layer.unchecked for layer in cache.turbo_layers())


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_without_a_patch_nan_is_told_at_once(backend: Any) -> None:
    model = tiny_llama(num_hidden_layers=3)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    cache = TurboCache(model.config, flat_config(backend=backend))
    with pytest.raises(ValueError, match=MESSAGE.format(1)), torch.no_grad():
        model(prompts(1, 66), **{CACHE: cache})
    spoilt, unseen = cache.turbo_layers()[1:]
    # whether or not the tokens were stored, what is counted agrees
    assert not spoilt.is_initialized or spoilt.lengths() == [spoilt.seen]
    assert not unseen.seen


def test_an_uncompressed_layer_ends_the_pass_too() -> None:
    """One read for all layers, also where the last one is not compressed."""
    model = tiny_llama(num_hidden_layers=3)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] = torch.nan
    with (
        turbo_hf.patch(model, flat_config(backend="triton")),
        pytest.raises(ValueError, match=MESSAGE.format(0)),
        torch.no_grad(),
    ):
        model(prompts(1, 66), **{CACHE: TurboCache(model.config, "turbo4", uncompressed_layers=(2,))})


# --- the parts ------------------------------------------------------------------------------------------------------


def test_every_kernel_starts_on_the_device_of_its_tensors(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    # of a model over several GPUs most layers are not on the current one
    model = tiny_llama(num_hidden_layers=1).to(device)
    chosen = SparseConfig(selector="kmeans-rotated", probes=3, window_tokens=20, read_all_layers=())
    configs = [
        flat_config(attention="turbo", block_size=32, recent_tokens=0, cuda_graphs=False, **KERNELS),
        flat_config(attention="native", sparse=chosen, block_size=32, cuda_graphs=False, **KERNELS),
        flat_config(attention="int8", block_size=32, recent_tokens=0, cuda_graphs=False, **KERNELS),
    ]
    launched: dict[str, bool] = {}
    guards: list[torch.Tensor] = []

    @contextmanager
    def guard(x: torch.Tensor) -> Iterator[None]:
        guards.append(x)
        yield
        guards.pop()

    def noted(run: Callable[..., Any]) -> Callable[..., Any]:
        def start(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            name = kernel.fn.__name__
            # as `ops.kernel_launch.launch` takes a kernel's arguments
            assert {*kernel.arg_names[len(args) :]} <= kwargs.keys(), name
            places = {x.device for x in tensors_in(args)}
            # on the current GPU there is nothing to guard
            current = {torch.device("cuda", torch.cuda.current_device())} if device.type == "cuda" else set()
            launched[name] = launched.get(name, True) and places == ({guards[-1].device} if guards else current)
            return run(kernel, *args, **kwargs)

        return start

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "device_of", guard)
        # those that were launched before take a shorter way
        patched.setattr("turbo_hf.ops.kernel_launch._known", {})
        # programs share a past however short it is
        patched.setattr("turbo_hf.ops.gpu.sms", lambda device: 132)
        patched.setattr("turbo_hf.ops.tuning.LEAST_SHARE", 16)
        for kind in (InterpretedFunction, JITFunction):
            patched.setattr(kind, "run", noted(kind.run))
        for config in configs:
            with turbo_hf.patch(model, config, calibration=an_index(model)):
                # a block to seal, a chunk over it that is no decoding, and one step
                ids = prompts(1, 49 + DECODE_TOKENS + 1).to(device)
                model.generate(ids, max_new_tokens=2, do_sample=False, prefill_chunk_size=49)
        shapes = {"weight_1": (2, 16, 8), "bias_1": (2, 8), "weight_2": (2, 8, 4), "bias_2": (2, 4)}
        weights = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
        classify(torch.zeros(1, 2, 1, 2, 16, device=device), weights, **KERNELS)
        codes, _ = quantize_tokens(torch.zeros(1, 2, 64, 16, device=device), **KERNELS)
        select_rows([codes.new_zeros(2, 4)], [1, 0], **KERNELS)
        # the kernels on a GPU are for 16 bit
        latent = torch.zeros(1, 1, 70, 64, device=device, dtype=torch.bfloat16 if device.type == "cuda" else None)
        layer = TurboLayer(flat_config(bits=8, **KERNELS), latent=True)
        layer.append(latent, latent[..., :16].clone(), NewColumns(70))
        layer.commit()
        queries = latent[:, :, :1], latent[:, :, :1, :16], layer.kv_store()
        latent_decode(*queries, 1.0, **KERNELS)
        places = torch.zeros(1, 1, 4, dtype=torch.int64, device=device)
        named_decode(*queries, places, places == 0, Scoring(1.0), **KERNELS)
        plain, k = TurboLayer(flat_config(bits=8, **KERNELS)), torch.zeros(1, 2, 3, 16, device=device)
        plain.append(k, k.clone(), NewColumns(3))
        flag = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2)]
        for held, new, v in ((plain, k, k.clone()), (layer, latent, latent[..., :16].clone())):
            held.buffer.reserve(80, held.state.open)
            append_step(new[:, :, :1], v[:, :, :1], held.kv_store(), nonfinite=flag[0], arrived=flag[1], **KERNELS)
        unpack_tiles(plain.kv_store(), torch.int8)
        launch_rms_norm(k, None, 1e-6, 0, True)
        opened: Any = tuple(x.contiguous() for x in (k[:, :, :2], k[:, :, :2].mT, k[:, :, :2, 0], k[:, :, :2, 1]))
        slots: Any = tuple(x.clone() for x in opened)
        exchange_open(opened, slots, *torch.zeros(4, 1, dtype=torch.int64, device=device), **KERNELS)
    assert launched == dict.fromkeys(launched, True)
    in_gluon = {"hopper_prefill_kernel", "hopper_latent_kernel"}
    assert launched.keys() == set(all_kernels()) - in_gluon


def all_kernels() -> list[str]:
    """The names of what the package launches."""
    files = Path(turbo_hf.__file__).parent.glob("ops/**/kernel*.py")
    return [name for file in files for name in re.findall(r"^def (\w+_kernel)\(", file.read_text("utf-8"), re.M)]


def test_the_kernel_that_does_not_pad_gets_whole_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *args: args)
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda params: True)
    with FakeTensorMode():
        for dim, served in ((96, True), (100, False)):
            q, k = (torch.empty(1, heads, 16, dim, dtype=torch.float16, device="cuda") for heads in (4, 2))
            assert attention._flash_serves(q, k, k, True) == served, dim
    attention._flash.clear()


def test_short_prompts_do_without_a_plan_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[SDPBackend]] = []
    monkeypatch.setattr(attention, "PLAN_PAYS", 2 * 50**2)

    def kernels(order: list[SDPBackend], set_priority: bool) -> Any:
        assert set_priority
        orders.append(order)
        return nullcontext()

    monkeypatch.setattr(attention, "sdpa_kernel", kernels)
    for rows, length in ((2, 49), (2, 50)):
        q, k = torch.randn(rows, 4, length, 16), torch.randn(rows, 2, length, 16)
        attention._sdpa(q, k, k, 0.25)
    assert [order.index(SDPBackend.CUDNN_ATTENTION) for order in orders] == [1, 0]
    with without_plans():
        attention._sdpa(q, k, k, 0.25)
    assert SDPBackend.CUDNN_ATTENTION not in orders[-1], "who has switched it off gets it nowhere"


def test_layers_on_several_devices_share_one_plan() -> None:
    cache = TurboCache(tiny_llama(num_hidden_layers=3).config)
    first, second, third = cache.turbo_layers()
    mask = torch.tensor([[0, 1, 1], [1, 0, 1]])
    planned = cache.new_columns(mask, first, 3)
    # a device from which nothing can be read, as accelerate brings each layer a copy of its own
    for layer in (second, third):
        there = cache.new_columns(mask.to("meta"), layer, 3)
        assert there.starts == planned.starts == [1, 1]
        assert there.gather is not None
        assert there.gather.device.type == "meta"
    assert cache.new_columns(mask, second, 3) is planned
    assert cache.new_columns(mask.clone(), third, 3) is not planned, "another mask is another plan"
