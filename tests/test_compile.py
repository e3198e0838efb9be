"""The kernels compile for GPUs, and fit their shared memory, on a machine that has none."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.compile


def compiled(*arguments: str) -> list[dict[str, Any]]:
    """What `compile_kernels.py` prints."""
    program = Path(__file__).parent / "support" / "compile_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(program), *arguments], check=False, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(("capability", "kib"), [("8.9", 99), ("12.0", 99)])
def test_kernels_fit_gpus_with_less_shared_memory(capability: str, kib: int) -> None:
    kernels = compiled("--capability", capability)
    wanted = {"prefill_kernel"}
    wanted |= (
        {"decode_kernel", "sparse_decode_kernel", "latent_kernel", "named_kernel"} if capability == "8.9" else set()
    )
    assert {kernel["kernel"] for kernel in kernels} >= wanted
    assert not [kernel for kernel in kernels if kernel["shared"] > kib << 10]


def test_kernels_compile_and_fit() -> None:
    kernels = compiled()
    wanted = {
        "decode_kernel",
        "prefill_kernel",
        "quantize_operands_kernel",
        "append_step_kernel",
        "sparse_decode_kernel",
    }
    wanted |= {
        "append_kernel", "seal_open_kernel", "assign_kernel", "layer_kernel", "logits_kernel", "list_kernel",
        "rank_kernel", "latent_kernel", "seal_latents_kernel", "merge_kernel", "merge_parts_kernel",
        "exchange_open_kernel", "named_kernel", "rms_norm_kernel",
    }  # fmt: skip
    assert {kernel["kernel"] for kernel in kernels} >= wanted
    assert not [kernel for kernel in kernels if kernel["shared"] > 227 << 10]
    launches = {"a step": 4, "a prompt": 4}
    for what, count in ((f"{x}, d = {d}", count) for x, count in launches.items() for d in (64, 128)):
        hashes = [kernel["hash"] for kernel in kernels if kernel["case"] == f"append {what}"]
        assert len(hashes) == count
        assert len(set(hashes)) == 1, f"append {what} is compiled again when the cache grows"
