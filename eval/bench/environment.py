"""What must be published with a figure: the machine, the versions, the commit."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from turbo_hf.models.versions import version_of
from turbo_hf.patching.doctor import machine

SHOWN = ("torch", "triton", "transformers", "sageattention", "driver")


def facts(device: torch.device) -> dict[str, Any]:
    """Device, versions (None: not there) and commit (None: no checkout), ready for JSON."""
    gpu: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    versions: dict[str, Any] = {**machine().versions, "sageattention": version_of("sageattention")}
    if gpu is not None:
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": _driver()}
    return {
        "device": str(device),
        "gpu": None if gpu is None else gpu.name,
        "sms": None if gpu is None else gpu.multi_processor_count,
        "versions": versions,
        "commit": _commit(),
    }


def headline(found: dict[str, Any]) -> str:
    """One human-readable line."""
    versions = [f"{name} {found['versions'][name]}" for name in SHOWN if found["versions"].get(name)]
    commit = f", commit {found['commit']}" if found["commit"] else ""
    return f"{found['gpu'] or 'CPU'}; {', '.join(versions)}{commit}"


def _driver() -> str | None:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = _output(asked).splitlines()
    return lines[0].strip() if lines else None


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    # a package that is installed below somebody else's checkout has no commit of its own
    if not (root / ".git").exists():
        return None
    commit = _output(["git", "-C", str(root), "describe", "--always", "--dirty"]).strip()
    return commit or None


def _output(words: list[str]) -> str:
    if shutil.which(words[0]) is None:
        return ""
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=30).stdout
