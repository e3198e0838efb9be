"""Compile the prefill, store, append, decode and sparse kernels for a GPU without one, through their launchers.

A program of its own: Triton decides at import whether it interprets, and the driver below is a stub that only names the
target. One JSON line a launch: {"case", "kernel", "shared", "hash"}; launches of one hash share what is compiled.
`--all` takes minutes; `--capability 8.9` compiles for another GPU what comes nearest to its shared memory; `--table
FILE` writes what each kernel takes of each GPU.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from op_calls import taken
from stores import make_store
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.rows import NewColumns
from turbo_hf.config.turbo_config import PRESETS, TurboConfig
from turbo_hf.layout import AlwaysRead, HeadGroups, Rounding, Scoring, Visits
from turbo_hf.ops import gpu
from turbo_hf.ops.decode import launch as launch_decode
from turbo_hf.ops.kernel_norm import launch_rms_norm
from turbo_hf.ops.latent.launch import launch_latent_decode, launch_named_decode
from turbo_hf.ops.prefill import launch
from turbo_hf.ops.sparse import launch as launch_sparse
from turbo_hf.ops.store import launch as launch_store

SHARED_KIB = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}
"""KiB of shared memory that one program may have, by compute capability."""


class Stub:
    """What compiling asks of a driver."""

    def __init__(self, capability: str):
        self.capability = int(capability.replace(".", ""))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack, where registers are spilled."""
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([program, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", said)}
    return {"registers": found["REG"], "stack": found["STACK"]}


def compile_only(case: list[str], capability: str, *, all_facts: bool = False) -> None:
    """From here on a launch compiles its kernel, prints, and runs nothing."""
    stub = Stub(capability)
    driver.set_active(stub)
    room = SHARED_KIB[capability] << 10
    of_kernel = cache(lambda hash, cubin: resources(cubin))
    vars(gpu)["shared_memory"] = lambda device: room
    run: Any = JITFunction.run

    def warm(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        as_on_a_gpu = {"ASM": True, "PDL": stub.capability >= 90}
        options |= {name: value for name, value in as_on_a_gpu.items() if name in options}
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        facts = {"case": case[0], "kernel": self.__name__, "shared": kernel.metadata.shared, "hash": kernel.hash}
        if all_facts:
            facts |= of_kernel(kernel.hash, kernel.asm["cubin"])
        print(json.dumps(facts), flush=True)  # noqa: T201
        return kernel

    JITFunction.run = warm


def prefill(mode: str, dim: int, dtype: torch.dtype, past: Any = None, **options: Any) -> None:
    """One prefill of a ragged batch, which takes the general kernel."""
    q = torch.zeros(2, 300, 4, dim, dtype=dtype).transpose(1, 2)
    k, v = (torch.zeros(2, 300, 2, dim, dtype=dtype).transpose(1, 2) for _ in range(2))
    starts, window = torch.zeros(2, dtype=torch.int64), options.pop("window", None)
    scoring = taken(Scoring, {"scaling": 0.1} | options)
    rounding = taken(Rounding, {"mode": mode} | options)
    launch.launch_prefill(q, k, v, scoring, rounding, past, starts, window)


def one_output(dim: int, heads: int) -> None:
    """Decode and sparse decode of one row of one KV head: arguments of 1 are constants to Triton."""
    k, v = (torch.randn(1, 1, 150, dim) for _ in range(2))
    store = make_store(k, v, [150], groups=((4, 1),))
    q = torch.zeros(1, heads, 1, dim, dtype=torch.float16)
    launch_decode.launch_decode(q, store, Scoring(0.1))
    index, visited = torch.zeros(1, 1, 150, dtype=torch.int16), torch.zeros(1, 1, 1, 16, dtype=torch.bool)
    spans = torch.zeros(1, 1, 2, 2, dtype=torch.int16)
    launch_sparse.launch_sparse_decode(q, store, Scoring(0.1), Visits(index, visited, spans), AlwaysRead(1, 64))


def full(dim: int, block: int, heads: int) -> None:
    """Decode of a ragged batch where all is in 16 bit."""
    k, v = (torch.zeros(2, 2, 280, dim, dtype=torch.float16) for _ in range(2))
    store = make_store(k, v, [280, 70], groups=((16, 2),), block=block)
    launch_decode.launch_decode(torch.zeros(2, heads, 1, dim, dtype=torch.float16), store, Scoring(0.1))


def sparse(groups: HeadGroups, dim: int, dtype: torch.dtype, heads: int, **options: Any) -> None:
    """One sparse decode of a ragged batch, and the selection before it."""
    k, v = (torch.randn(2, 2, 150, dim) for _ in range(2))
    store = make_store(k, v, [150, 70], groups=groups)
    q = torch.zeros(2, heads, 1, dim, dtype=dtype)
    index = launch_sparse.launch_assign(k.to(dtype), torch.zeros(2, 1024, dim, dtype=torch.float16))
    shapes = {"weight_1": (2, dim, 512), "bias_1": (2, 512), "weight_2": (2, 512, 1024), "bias_2": (2, 1024)}
    model = {name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}
    grouped, turn = q.unflatten(1, (2, -1)).transpose(2, 3), (torch.zeros(1, 1, dim), torch.zeros(1, 1, dim))
    centroids = torch.zeros(2, 1024, dim, dtype=torch.float16)
    _, logits = launch_sparse.launch_assign_and_score(k[:, :, :1].to(dtype), grouped, centroids, model, rotary=turn)
    launch_sparse.launch_assign_and_score(k[:, :, :1].to(dtype), grouped, centroids)
    visits = Visits(index, launch_sparse.launch_visit(logits, 32), torch.zeros(2, 2, 2, 2, dtype=torch.int16))
    scoring = taken(Scoring, options := {"scaling": 0.1} | options)
    launch_sparse.launch_sparse_decode(q, store, scoring, visits, AlwaysRead(1, 2047), **options)


def latents() -> list[Any]:
    """Caches of latents of 512 channels, one per width."""
    stores = []
    for config in (TurboConfig(bits=16), PRESETS["int8"], PRESETS["turbo4"]):
        layer = TurboLayer(config, latent=True)
        layer.append(torch.randn(2, 1, 70, 512).half(), torch.randn(2, 1, 70, 64).half(), NewColumns(70))
        layer.commit()
        stores.append(layer.kv_store())
    return stores


def named(store: Any, heads: int) -> None:
    """Attention over 2,048 named latents, the shape of DeepSeek-V3.2 with 128 heads."""
    latent, rotary = (torch.zeros(2, heads, 1, n, dtype=torch.float16) for n in (512, 64))
    places = torch.zeros(2, 1, 2048, dtype=torch.int64)
    launch_named_decode(latent, rotary, store, places, places > 0, Scoring(0.1), False)


def _long(past: Any) -> Any:
    """The past with a table that has room for 4,096 tokens."""
    return past._replace(table=torch.zeros(2, 64, dtype=torch.int64))


def exchange() -> None:
    """Open tokens between 5 blocks and 3 slots, of 2 requests."""
    codes = (
        (torch.zeros(5, 2, 64, 80), torch.zeros(5, 2, 80, 64)),
        (torch.zeros(3, 2, 80, 80), torch.zeros(3, 2, 80, 80)),
    )
    blocks, slots = ((k.to(torch.int8), v.to(torch.int8), *torch.zeros(2, len(k), 2, k.shape[2])) for k, v in codes)
    launch_store.launch_exchange_open(blocks, slots, torch.zeros(4, 2, dtype=torch.int64).unbind(), 0)


QUICK = [(256, torch.bfloat16, "turbo"), (256, torch.bfloat16, "half"), (80, torch.float32, "half")]
"""The cases that come nearest to the limit of shared memory. Each compiles the 16-bit mode too, for heads with NaN."""


def nearest(capability: str) -> None:
    """What comes nearest to the limit where shared memory is less than an H200's."""
    case, kept = [""], latents()
    compile_only(case, capability)
    pasts = {}
    for dim, groups in ((128, ((4, 2),)), (256, ((16, 2),))):
        k, v = (torch.randn(2, 2, 80, dim).to(torch.bfloat16) for _ in range(2))
        pasts[dim] = make_store(k, v, [80, 70], groups=groups)
    case[0] = "turbo, d = 128"
    prefill("turbo", 128, torch.bfloat16, pasts[128])
    if capability == "12.0":
        # the rest takes as much shared memory as on 8.9
        return
    for mode, past in (("half", None), ("native", pasts[256])):
        case[0] = f"{mode}, d = 256"
        prefill(mode, 256, torch.bfloat16, past)
    case[0] = "native with SAS, d = 256"
    prefill("native", 256, torch.bfloat16, pasts[256], sas_threshold=-6.0)
    for width, dim, block in ((16, 128, 64), (4, 256, 64), (3, 64, 128), ((8, 3), 128, 64)):
        case[0] = f"decode, {width} bit, d = {dim}, blocks of {block}"
        k, v = (torch.zeros(1, 2, 2 * block, dim, dtype=torch.bfloat16) for _ in range(2))
        store = make_store(k, v, [2 * block], groups=((width, 2),), block=block)
        launch_decode.launch_decode(torch.zeros(1, 8, 1, dim, dtype=torch.bfloat16), store, Scoring(0.1))
    case[0] = "sparse, 8 bit, d = 128"
    sparse(((8, 2),), 128, torch.bfloat16, 8)
    for store in kept:
        case[0] = f"latent, {store.paged[0].bits} bit, 128 heads"
        latent, rotary = (torch.zeros(2, 128, 1, n, dtype=torch.float16) for n in (512, 64))
        launch_latent_decode(latent, rotary, store, 0.1, None, False)
        named(store, 128)


def main(everything: bool, capability: str = "9.0", *, all_facts: bool = False) -> None:
    """The quick cases, or every mode, head dim and type; every option once; each width of a page."""
    modes, types = ("turbo", "int8", "half", "fp8", "native"), (torch.bfloat16, torch.float32)
    cases = [(d, t, m) for d in (64, 80, 128, 256) for t in types for m in modes] if everything else QUICK
    pasts = {}
    for dim in {64, *(dim for dim, _, _ in cases)}:
        k, v = (torch.randn(2, 2, 80, dim) for _ in range(2))
        pasts[dim] = make_store(k, v, [80, 70])
    stores = {}
    for dim, groups in ((64, ((8, 1), (3, 1))), (128, ((4, 1), (2, 1)))):
        k, v = (torch.randn(2, 2, 128, dim) for _ in range(2))
        stores[dim] = make_store(k, v, [128, 70], groups=groups, sealed=[1, 1])
    case, kept = [""], latents()
    compile_only(case, capability, all_facts=all_facts)
    for dim, dtype, mode in cases:
        case[0] = f"{mode}, d = {dim}, {dtype}"
        prefill(mode, dim, dtype, pasts[dim])
    options = {"window": 70, "softcap": 5.0, "sinks": torch.zeros(4), "sas_threshold": -6.0}
    case[0] = "with every option"
    # numbers of 8 bit with an exponent are of 8.9 on
    prefill("turbo" if capability in ("8.0", "8.6") else "fp8", 64, torch.bfloat16, pasts[64], **options)
    # the past alone, of a rank of a context group that does not hold the open tokens
    case[0] = "a past that programs share"
    few, vars(gpu)["sms"] = gpu.sms, lambda device: 132
    prefill("native", 128 if everything else 64, torch.bfloat16, _long(pasts[128 if everything else 64]))
    vars(gpu)["sms"] = few
    case[0] = "exchange open tokens"
    exchange()
    case[0] = "RMSNorm of 8,192 channels"
    launch_rms_norm(torch.zeros(2, 8192, dtype=torch.bfloat16), torch.zeros(8192, dtype=torch.bfloat16), 1e-6, 1, False)
    for dim, store in stores.items():
        case[0] = f"append a step, d = {dim}"
        k = torch.zeros(2, 1, 2, dim, dtype=torch.bfloat16).transpose(1, 2)
        flags, balance = (torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)), torch.ones(2, dim)
        launch_store.launch_append_step(k, k, store, None, *flags)
        if dim == 64 or everything:
            case[0] = f"append a step with buckets, d = {dim}"
            noted = torch.zeros(2, 2, 1, 192, dtype=torch.int16), torch.zeros(2, 2, 1, 1, dtype=torch.int16)
            launch_store.launch_append_step(k, k, store, noted, *flags, balance=balance)
        if dim == 128 or everything:
            case[0] = f"append a step and balance queries, d = {dim}"
            q = torch.zeros(2, 8, 1, dim, dtype=torch.bfloat16)
            launch_store.launch_append_step(k, k, store, None, *flags, balance=balance, queries=q)
            launch_store.launch_append_tokens(k, k, store, None, *flags, balance=balance, queries=q)
        case[0] = f"append a prompt, d = {dim}"
        k = torch.zeros(2, 300, 2, dim, dtype=torch.bfloat16).transpose(1, 2)
        starts = torch.zeros(2, dtype=torch.int64)
        launch_store.launch_append_tokens(k, k, store, starts, *flags, balance=balance)
        # a table that has grown, the flags of other layers, and a prompt of another length
        for width, at in ((7, 1), (16, 4), (33, 3)):
            grown = store._replace(table=torch.zeros(2, width, dtype=torch.int64))
            others = torch.zeros(8, dtype=torch.int32)[at : at + 1], flags[1]
            case[0] = f"append a step, d = {dim}"
            launch_store.launch_append_step(k[:, :, :1], k[:, :, :1], grown, None, *others)
            case[0] = f"append a prompt, d = {dim}"
            some = k[:, :, : 256 + at]
            launch_store.launch_append_tokens(some, some, store, starts, *others, balance=balance)
        case[0] = f"seal open blocks, d = {dim}"
        launch_store.launch_seal_open(store, 1, moves=True)
    # those that come nearest to the limit of shared memory, and the one that has too much for them
    for dim, block in ((64, 128), (256, 64), (256, 128)):
        case[0] = f"decode in 16 bit, d = {dim}, blocks of {block}"
        full(dim, block, 8)
    case[0] = "seal open blocks of 16 bit"
    k = torch.zeros(2, 2, 128, 128)
    launch_store.launch_seal_open(make_store(k, k, [128, 70], groups=((16, 2),), sealed=[0, 0]), 2)
    for widths in (
        (((8, 2),), ((4, 2),), ((3, 2),), ((2, 2),), (((4, 2), 2),), ((4, 1), (2, 1)))
        if everything
        else (((4, 1), (2, 1)),)
    ):
        for dim in (64, 80, 128, 256) if everything else (128,):
            case[0] = f"sparse, {widths}, d = {dim}"
            sparse(widths, dim, torch.bfloat16, 8)
    read = torch.zeros(1, dtype=torch.int64)
    every = {"starts": torch.zeros(2, dtype=torch.int64), "softcap": 5.0, "sinks": torch.zeros(24), "read": read}
    case[0] = "sparse with every option"
    sparse(((4, 2),), 128, torch.float32, 24, **every)
    for store in kept:
        bits = store.paged[0].bits
        for heads in (16, 32, 128) if everything else ({8: 16}.get(bits, 128),):
            case[0] = f"latent, {bits} bit, {heads} heads"
            latent, rotary = (torch.zeros(2, heads, 1, n, dtype=torch.float16) for n in (512, 64))
            launch_latent_decode(latent, rotary, store, 0.1, None, False)
        # tiles of 16 heads, 32 and 64
        for heads in (16, 32, 128) if everything else (128,):
            case[0] = f"named latents, {bits} bit, {heads} heads"
            named(store, heads)
        launch_store.launch_seal_latents(store, 1, moves=True)
    case[0] = "one output"
    one_output(64, 4)


def table(path: Path) -> None:
    """A page of Markdown: the most that each kernel takes of each GPU. Exit if one does not fit."""

    def compiled(capability: str) -> list[dict[str, Any]]:
        words = [sys.executable, __file__, "--capability", capability, "--resources"]
        said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        return [json.loads(line) for line in said.splitlines() if line.startswith("{")]

    with ThreadPoolExecutor(2) as programs:
        found = dict(zip(SHARED_KIB, programs.map(compiled, SHARED_KIB), strict=True))
    lines = [
        "# What kernels take of a GPU",
        "",
        f"By compute capability, with triton {triton.__version__}: the most of all cases of",
        "`tests/support/compile_kernels.py --table`, which writes this page. KiB of shared memory / registers of a",
        "thread / bytes of its stack (spilled).",
        "",
        f"| kernel | {' | '.join(f'{name} ({room} KiB)' for name, room in SHARED_KIB.items())} |",
        f"|---{'|---' * len(found)}|",
    ]
    for kernel in sorted({row["kernel"] for rows in found.values() for row in rows}):
        own = {name: [row for row in rows if row["kernel"] == kernel] for name, rows in found.items()}
        most = {
            name: [max(row[key] for row in rows) for key in ("shared", "registers", "stack")]
            for name, rows in own.items()
        }
        if over := [name for name, (shared, *_) in most.items() if shared > SHARED_KIB[name] << 10]:
            raise SystemExit(f"{kernel} does not fit {', '.join(over)}")
        cells = [f"{-(-shared // 1024)} / {registers} / {stack}" for shared, registers, stack in most.values()]
        lines.append(f"| `{kernel}` | {' | '.join(cells)} |")
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--capability", choices=SHARED_KIB, default="9.0")
    parser.add_argument("--resources", action="store_true")
    parser.add_argument("--table", type=Path)
    asked = parser.parse_args()
    if asked.table is not None:
        table(asked.table)
    elif asked.resources:
        main(asked.all, asked.capability, all_facts=True)
    elif asked.capability == "9.0":
        main(asked.all)
    else:
        nearest(asked.capability)
