"""Two processes, one per rank: how a test starts them, and how each tells what it has seen."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

COUNT = 2
SUPPORT = Path(__file__).resolve().parent


def run_ranks(script: str, folder: Path, device: str) -> list[dict[str, Any]]:
    """What each rank has seen, by case. script: in this folder, one whose `main` calls `tell`."""
    paths = [str(SUPPORT), str(SUPPORT.parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SUPPORT / script)]
    started = [
        subprocess.Popen([*command, str(n), str(folder), device], env=env, stderr=subprocess.PIPE, text=True)
        for n in range(COUNT)
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
            assert not isinstance(case, str) or "Traceback" not in case, case
    return found


def tell(make: Callable[[int, Path, str], Any], cases: Callable[[str], Iterable[str]]) -> None:
    """Be one rank: `RANK FOLDER DEVICE [CASE ...]`. What it has seen of these cases, or of all, goes to a file.

    make: of rank, folder and device; its methods are the cases. cases: the names of those asked for on a device.
    """
    rank, folder, device = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(COUNT)}
    if device == "cuda":
        torch.cuda.set_device(rank)
    store: Any = vars(dist)["FileStore"](str(folder / "store"), COUNT)
    backend = "gloo" if device == "cpu" else "nccl"
    # a rank that waits for one that does not come ends in an error; on a GPU the other may be compiling kernels
    wait = timedelta(seconds=30 if device == "cpu" else 300)
    dist.init_process_group(backend, store=store, rank=rank, world_size=COUNT, timeout=wait)
    asked, found = make(rank, folder, device), {}
    for case in sys.argv[4:] or cases(device):
        try:
            found[case] = getattr(asked, case)()
        except Exception:
            found[case] = traceback.format_exc()
            break
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)
