"""Processes that are ranks of a group of two, and what each of them is asked."""

import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from graphs_support import Again

from turbo_hf.cache.layer import TurboLayer
from turbo_hf.graphs import why_not
from turbo_hf.graphs.devices import CudaDevice
from turbo_hf.graphs.step_runner import StepRunner
from turbo_hf.patching import generate_methods as generation

SUPPORT = Path(__file__).resolve().parent
COUNT = 2


def seen_by_ranks(script: str, folder: Path, device: str) -> list[dict[str, Any]]:
    """What each rank of a script of this folder has seen (`run_rank`)."""
    paths = [str(SUPPORT), str(SUPPORT.parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["WORLD_SIZE"] = str(COUNT)
    command = [sys.executable, str(SUPPORT / script)]
    # on a CPU the first rank makes the others, once it has imported what all need
    started = [
        subprocess.Popen([*command, str(n), str(folder), device], env=env, stderr=subprocess.PIPE, text=True)
        for n in range(1 if device == "cpu" else COUNT)
    ]
    try:
        errors = [process.communicate(timeout=1500)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all((folder / f"{n}.json").exists() for n in range(COUNT)), "\n".join(errors)
    found = [json.loads((folder / f"{n}.json").read_text()) for n in range(COUNT)]
    for seen in found:
        for case in seen.values():
            assert not (isinstance(case, str) and "Traceback" in case), case
    return found


def both(ranks: Any, case: str) -> Any:
    """What the ranks of a fixture, of which they are the first part, have seen, where it is the same."""
    first, second = (found[case] for found in ranks[0])
    assert first == second
    return first


def run_rank(asks: Callable[[int, Path, str], Any], cases: Callable[[str], Sequence[str]]) -> None:
    """Be the rank that the arguments of this process name: RANK FOLDER cpu|cuda [CASE ...]; on a CPU be all ranks.

    What the cases return goes to FOLDER/RANK.json. cases: all of them, on a device.
    """
    rank, folder, device = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    others: list[int] = []
    # no collection of garbage looks through what is imported
    gc.freeze()
    if device == "cpu":
        for other in range(1, COUNT):
            others.append(os.fork())
            if not others[-1]:
                rank, others = other, []
                break
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if device == "cuda":
        torch.cuda.set_device(rank)
    store: Any = vars(dist)["FileStore"](str(folder / "store"), COUNT)
    backend = "gloo" if device == "cpu" else "nccl"
    # a rank that waits for one that does not come ends in an error; on a GPU the other may be compiling kernels
    wait = timedelta(seconds=30 if device == "cpu" else 300)
    dist.init_process_group(backend, store=store, rank=rank, world_size=COUNT, timeout=wait)
    asked = asks(rank, folder, device)
    found = {}
    for case in sys.argv[4:] or cases(device):
        try:
            found[case] = getattr(asked, case)()
        except Exception:
            found[case] = traceback.format_exc()
            break
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if device == "cuda":
        # a rank that ends takes its part of a sum with it, for which the other still waits
        dist.barrier()
        torch.cuda.synchronize()
    for process in others:
        os.waitpid(process, 0)
    os._exit(0)


def error_of(act: Callable[[], Any]) -> str:
    """What `act` raises, with the name of its class; "" if nothing."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def stand_ins(device: str, fails: str = "") -> Iterator[list[Any]]:
    """The runners of `generate` inside; on a CPU over a device that runs again what it has captured."""
    made: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        made.append(StepRunner(*args, **kwargs))
        return made[-1]

    def fail(device: Any, step: Any) -> Any:
        raise RuntimeError(fails)

    changes: list[tuple[Any, str, Any]] = [(generation, "StepRunner", make)]
    if device == "cpu":
        changes += [
            (generation, "cuda_device", lambda device: Again(device, fails)),
            (why_not, "_why_no_replay_there", lambda model: None),
            (TurboLayer, "in_place", True),
        ]
    elif fails:
        changes.append((CudaDevice, "capture", fail))
    with ExitStack() as inside:
        for change in changes:
            inside.enter_context(mock.patch.object(*change))
        yield made
