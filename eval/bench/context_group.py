"""One layer's decode step over a context that is spread over the GPUs of a group, beside the same on one of them.

torchrun --nproc-per-node 2 -m turbo_hf.eval.bench.context_group 131k 1M
"""

import json
import sys
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from turbo_hf.attention.context_group import decode_parts
from turbo_hf.cache.context_group import ContextRanks, context_ranks
from turbo_hf.eval.bench.decode_cases import Case
from turbo_hf.eval.bench.random_cache import packed_stores
from turbo_hf.eval.bench.shapes import SHAPES, parse_tokens
from turbo_hf.layout import KVStore, Scoring
from turbo_hf.ops.decode.contract import decode

SHAPE = "llama3-8b"
CALLS, ROUNDS = 20, 9


def own_store(store: KVStore, context: ContextRanks) -> KVStore:
    """What this rank would hold of the store."""
    known = store.sealed_host
    assert known is not None
    sealed = [context.own(blocks) for blocks in known]
    table = store.table[:, context.rank :: context.count].contiguous()
    return store._replace(table=table, sealed=torch.tensor(sealed, device=table.device), sealed_host=tuple(sealed))


def microseconds(call: Callable[[], Any], captured: bool) -> float:
    """Of one of CALLS calls back to back, in a CUDA graph or launched by the host; median of ROUNDS."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        # on the stream that has warmed up: what is kept for a stream is there already
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            for _ in range(CALLS):
                call()
    found = []
    for _ in range(ROUNDS):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        if captured:
            graph.replay()
        else:
            for _ in range(CALLS):
                call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return float(median(found))


def measure(tokens: int, context: ContextRanks, device: torch.device) -> dict[str, Any]:
    """Times in microseconds, of the slowest rank; and how far the two outputs lie apart."""
    heads = SHAPES[SHAPE]
    case = Case(SHAPE, heads, (tokens + 20,), ragged=False)
    groups = ((4, heads.kv),)
    store = packed_stores(case, groups, 1, device, seed=1)[0]
    own, scoring = own_store(store, context), Scoring(heads.dim**-0.5)
    q = torch.randn(1, heads.query, 1, heads.dim, device=device, dtype=torch.float16)
    dist.broadcast(q, 0)
    how: dict[str, Any] = {"starts": None, "mode": "turbo", "backend": "auto"}
    part = torch.zeros(1, heads.query, 1, heads.dim + 1, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "one": lambda: decode(q, store, scoring, **how).out,
        "group": lambda: decode_parts(context, q, own, scoring, **how),
        "own part": lambda: decode(q, own, scoring, **how).out,
        "exchange": lambda: context.gathered(part),
    }
    found: dict[str, Any] = {"tokens": tokens, "GB": case.packed_bytes(groups) / 1e9}
    one, spread = calls["one"]().float(), calls["group"]().float()
    found["apart"] = float((one - spread).abs().max() / one.abs().max())
    for name, call in calls.items():
        for captured in (False, True):
            us = torch.tensor(microseconds(call, captured), device=device)
            dist.all_reduce(us, dist.ReduceOp.MAX)
            found[name if captured else f"{name} launched"] = round(float(us), 1)
    found["gain"] = round(found["one"] / found["group"], 3)
    found["TB/s"] = round(found["GB"] * 1e3 / found["group"], 3)
    found["TB/s of one"] = round(found["GB"] * 1e3 / found["one"], 3)
    return found


def main() -> None:
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)
    context = context_ranks(dist.group.WORLD, SimpleNamespace(device=device))
    assert context is not None
    for size in sys.argv[1:] or ["131k", "1M"]:
        # not the default stream, on which nothing can be captured
        with torch.cuda.stream(torch.cuda.Stream(device)):
            found = measure(parse_tokens(size), context, device)
        if context.rank == 0:
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
