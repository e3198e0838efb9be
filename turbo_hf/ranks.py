"""Tensor parallel: the processes ("ranks") that share a model's heads, and what they decide together.

Transformers splits the model (`from_pretrained(distributed_config=...)` under torchrun). Each rank then runs the same
calls over its own heads, and caches these alone. A rank that raises while others go on would leave them waiting in
the model's next sum over ranks, so that whatever one rank might decide by itself is agreed on.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from turbo_hf.errors import Unsupported

KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value", "c_attn", "qkv", "Wqkv")
"""Names of the modules whose output holds the keys, fused with queries or not."""

SPLIT = "colwise"
"""Style of Transformers' plans under which each rank keeps what it has computed; of others it gets that of all."""

WHOLE = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "sequence_parallel", "all_reduce")
"""Styles under which each rank holds all of a weight."""

_KINDS = (Unsupported, ValueError, TypeError, FileNotFoundError, OSError, RuntimeError)
ERRORS = {kind.__name__: kind for kind in _KINDS}
"""Kinds of errors that one rank raises for another, by their names; derived ones first."""

PATIENCE = 0.9
"""The share of a group's timeout after which a wait ends in an error: at its end NCCL aborts the process."""

SPIN = 2e-3
"""Seconds for which a wait for a GPU asks without a pause."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks among which a model's heads are split, as one of them sees them; without a group it is alone.

    Args:
        rank: the number of this one, from 0 on.
        count: how many there are.
        group: the process group that they are.
        device: where what they exchange must be.
    """

    rank: int = 0
    count: int = 1
    group: Any = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - a constant

    def __bool__(self) -> bool:
        """Whether there are others."""
        return self.count > 1

    @property
    def speaks(self) -> bool:
        """Whether this one issues warnings, of all that decide together."""
        return self.rank == 0

    def __deepcopy__(self, memo: Any) -> "Ranks":
        # of the same processes
        return self

    def __reduce__(self) -> Any:
        # what was pickled may be read where there are no other processes
        return Ranks, ()

    def heads(self, count: int) -> range:
        """Which of `count` heads of all ranks are this one's; they divide."""
        own = count // self.count
        return range(self.rank * own, (self.rank + 1) * own)

    def most(self, numbers: torch.Tensor) -> torch.Tensor:
        """For each of the numbers the largest of any rank. All ranks must call it, as all of what follows."""
        if not self:
            return numbers
        # no backend has to know bools
        kind = torch.int32 if numbers.dtype == torch.bool else numbers.dtype
        largest = numbers.to(self.device, kind, copy=True)
        try:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
            self._await_device()
        except (RuntimeError, TimeoutError) as error:
            raise ValueError(
                "a rank of this tensor parallel model has not made this call in time, or it failed "
                f"({error}). All ranks must make the same calls, in the same order. Start the processes anew."
            ) from error
        return largest.to(numbers.device)

    def _await_device(self) -> None:
        """Wait for what has been launched, an exchange last: TimeoutError where torch would wait for ever."""
        if self.device.type != "cuda":
            return
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        # backends need not have options
        options = getattr(self.group._get_backend(self.device), "options", None)
        patience = PATIENCE * getattr(options, "_timeout", timedelta(minutes=5)).total_seconds()
        begin = time.monotonic()
        while not done.query():
            waited = time.monotonic() - begin
            if waited > patience:
                raise TimeoutError(f"waited {waited:.0f} s")
            if waited > SPIN:
                time.sleep(SPIN / 20)

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """The tensors [B, heads, ...] of all ranks, of one shape, as one of all their heads."""
        if not self:
            return x
        each = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.count)]
        dist.all_gather(each, x.contiguous(), group=self.group)
        return torch.cat(each, 1)

    def texts(self, text: str) -> list[str]:
        """The text of each rank, in their order."""
        if not self:
            return [text]
        own = torch.frombuffer(bytearray(text.encode()) or bytearray(b" "), dtype=torch.uint8).to(self.device)
        longest = int(self.most(torch.tensor([len(own)], device="cpu")))
        # a space in front keeps an empty text a text
        padded = torch.full((longest,), ord(" "), dtype=torch.uint8, device=self.device)
        padded[: len(own)] = own
        each = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(each, padded, group=self.group)
        return [bytes(x.tolist()).decode().rstrip(" ") for x in each]

    def failure(self, error: Exception | None) -> Exception | None:
        """The error of the first rank that has one, as an error of its kind with its words; None: no rank has one."""
        if not self:
            return error
        kind = next((name for name, each in ERRORS.items() if isinstance(error, each)), "RuntimeError")
        said = self.texts("" if error is None else json.dumps([kind, str(error)]))
        first = next((json.loads(text) for text in said if text), None)
        if first is None:
            return None
        return error if error is not None and first == [kind, str(error)] else ERRORS[first[0]](first[1])

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is done inside fails on all ranks, with the same words, or on none. It must not wait for other ranks
        where one of them may already have failed."""
        error = None
        try:
            yield
        except Exception as raised:
            if not self:
                raise
            error = raised
        failure = self.failure(error)
        if failure is not None:
            raise failure from (None if failure is error else error)

    def require_same(self, facts: Mapping[str, str]) -> None:
        """ValueError, the same on all ranks, if a fact differs between them. facts: by a name for the message."""
        if not self:
            return
        said = [json.loads(text) for text in self.texts(json.dumps(dict(facts)))]
        for name in facts:
            for rank, theirs in enumerate(said):
                if theirs[name] != said[0][name]:
                    raise ValueError(
                        f"the ranks of this tensor parallel model must all be patched alike; {name} of rank 0: "
                        f"{said[0][name]}; of rank {rank}: {theirs[name]}. Call patch on every rank with the same "
                        "arguments, on machines that are alike."
                    )


ALONE = Ranks()
"""The ranks of a model that one process holds."""


def ranks_of(model: Any) -> Ranks:
    """The ranks that share a model's heads.

    Raises:
        Unsupported: the model is split in a way that is not known here.
    """
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        if isinstance(model, torch.nn.Module):
            _refuse_other_splits(model)
        return ALONE
    names = mesh.mesh_dim_names or ()
    # without names it is of tensor parallel alone (transformers 5.17)
    sizes = dict(zip(names, mesh.shape, strict=True)) if names else {}
    if sizes.get("pp", 1) > 1 or (not names and mesh.ndim > 1):
        raise Unsupported(
            "the layers of this model are split among processes (pipeline parallel), and one cache holds all layers. "
            "Load it with tensor parallel (DistributedConfig(tp_size=...)), or run it without the patch."
        )
    if names and "tp" not in names:
        return ALONE
    group = mesh.get_group("tp") if "tp" in names else mesh.get_group()
    count = dist.get_world_size(group)
    if count == 1:
        return ALONE
    # a number on the device that the backend of the group reads
    device = torch.device("cpu") if mesh.device_type == "cpu" else model.device
    return Ranks(dist.get_rank(group), count, group, device)


def _refuse_other_splits(model: Any) -> None:
    if not dist.is_available() or not dist.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 - slow to import, and needed here alone
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - as above

    if any(isinstance(x, FSDPModule) for x in model.modules()):
        return
    split = next((name for name, x in model.named_parameters() if isinstance(x, DTensor)), None)
    if split is not None:
        raise Unsupported(
            f"{split} is split among processes, and not by Transformers: what each of them caches is not known. Load "
            "the model with from_pretrained(..., distributed_config=DistributedConfig(tp_size=...))."
        )


def split_layers(model: Any, ranks: Ranks, heads: Mapping[int, tuple[Any, int]]) -> frozenset[int]:
    """The layers whose KV heads are split among the ranks; in the others every rank holds all of them.

    heads: for each layer its attention module and number of KV heads.

    Raises:
        Unsupported: they do not divide, or the plan does not tell how they are split.
    """
    if not ranks:
        return frozenset()
    plan: Mapping[str, str] = model.tp_plan or {}
    names = {module: name for name, module in model.named_modules()}
    found = set()
    for index, (module, count) in heads.items():
        path = _in_plan(names[module])
        styles = {name: plan.get(f"{path}.{name}") for name, _ in module.named_children()}
        keys = [styles[name] for name in KEY_PROJECTIONS if name in styles]
        if not keys and SPLIT in styles.values():
            raise Unsupported(
                f"layer {index}: the tensor parallel plan of {type(model).__name__} does not tell how its keys are "
                "split. Run it on one GPU, or without the patch."
            )
        if SPLIT in keys:
            if count % ranks.count:
                raise Unsupported(
                    f"layer {index} has {count} KV heads, which do not divide among {ranks.count} ranks: Transformers "
                    "cannot run it either. Load the model with a tp_size that divides them."
                )
            found.add(index)
    return frozenset(found)


def splits_weight(model: Any, name: str) -> bool:
    """Whether the tensor parallel plan of a model splits the weight of this name."""
    plan: Mapping[str, str] = model.tp_plan or {}
    path = _in_plan(name)
    style = plan.get(path, plan.get(path.rpartition(".")[0]))
    return style is not None and style not in WHOLE


def _in_plan(name: str) -> str:
    """The name of a module or weight as plans have it, without numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
