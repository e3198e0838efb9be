"""The kernels compile for an H200, and fit its shared memory, on a machine that has none."""

import json
import os
import subprocess
import sys
from pathlib import Path

SHARED_MEMORY = 227 << 10
"""Bytes that one program may have on compute capability 9.0."""


def test_kernels_compile_and_fit() -> None:
    root = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(root / "compile_kernels.py")],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
        env=environment | {"PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wanted = {
        "decode_kernel",
        "prefill_kernel",
        "quantize_operands_kernel",
        "seal_kernel",
        "append_step_kernel",
        "sparse_decode_kernel",
    }
    wanted |= {
        "append_kernel",
        "seal_open_kernel",
        "assign_kernel",
        "layer_kernel",
        "logits_kernel",
        "visit_kernel",
        "list_kernel",
        "rank_kernel",
    }
    assert {kernel["kernel"] for kernel in kernels} >= wanted
    too_large = [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY]
    assert not too_large
    for what in (f"{x}, d = {d}" for x in ("a step", "a prompt", "a prompt without ranges") for d in (64, 128)):
        compiled = [kernel["hash"] for kernel in kernels if kernel["case"] == f"append {what}"]
        assert len(compiled) >= 3
        assert len(set(compiled)) == 1, f"append {what} is compiled again when the cache grows"
