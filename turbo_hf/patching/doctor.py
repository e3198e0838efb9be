"""What this machine and model can do, and if not, why."""

import platform
import shutil
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from turbo_hf.calibration.checkpoint import checkpoint_of, own_tokenizer
from turbo_hf.config.turbo_config import ABLATIONS, DEFAULT_PRESET, PRESETS
from turbo_hf.errors import Unsupported, warn
from turbo_hf.models.versions import version_of, version_problem
from turbo_hf.ops.gpu import why_no_kernels_on
from turbo_hf.patches.generic import is_latent
from turbo_hf.patches.layers import attention_layers
from turbo_hf.patching.divergence import Divergence
from turbo_hf.patching.handle import Report
from turbo_hf.patching.meta_model import key_bias_note, meta_model, patch_report
from turbo_hf.patching.patch_model import patch
from turbo_hf.patching.selfcheck import check_text

COMPILERS = ("clang", "gcc")
"""What Triton builds its launcher with, as it looks for them."""

PACKAGES = ("turbo_hf", "torch", "triton", "transformers", "accelerate", "safetensors", "huggingface_hub")


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine has.

    Args:
        versions: by package; "not installed" without one.
        gpus: name, memory and compute capability of each.
        problems: what keeps turbo_hf from running as tested, one sentence each.
    """

    versions: dict[str, str]
    gpus: tuple[str, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `patch` does with a model.

    Args:
        report: of the default preset; None if the model is refused.
        checks: each preset's self-check, by name. text: what they read.
        refusal: why the model cannot be patched, or its self-check has failed; else None.
        unknown: what cannot be known without weights, one sentence each.
    """

    report: Report | None
    checks: dict[str, Divergence]
    refusal: str | None
    unknown: tuple[str, ...] = ()
    text: str = ""


def machine() -> Machine:
    """Inspect this machine."""
    versions = {"python": platform.python_version()}
    versions |= {package: version_of(package) or "not installed" for package in PACKAGES}
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = tuple(_gpu(i) for i in range(count))
    problems = [version_problem(), *{why_no_kernels_on(torch.device("cuda", i)) for i in range(count)}]
    if count and not any(map(shutil.which, COMPILERS)):
        problems.append("neither gcc nor clang found: on a GPU Triton needs a C compiler (or CC) and Python's headers")
    return Machine(versions, gpus, tuple(x for x in problems if x is not None))


def _gpu(index: int) -> str:
    gpu: Any = torch.cuda.get_device_properties(index)
    return f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"


def diagnose(model: Any) -> Diagnosis:
    """Patch a loaded model with each preset, read a text through its cache and through the unpatched model's, and
    remove the patch."""
    checks: dict[str, Divergence] = {}
    unknown, refusal, text = [], None, None
    try:
        own = own_tokenizer(checkpoint_of(model), warn)
        try:
            # one text for all presets, which keep as many tokens open
            text = check_text(model, PRESETS[DEFAULT_PRESET], own)
        except Unsupported as error:
            unknown.append(str(error))
        try:
            with patch(model, DEFAULT_PRESET, check=text is not None, tokenizer=own) as handle:
                report = handle.report()
        except Unsupported as error:
            refusal = str(error)
            # if that is not what was refused, the table still says what presets do
            with patch(model, DEFAULT_PRESET) as handle:
                report = handle.report()
        latent = any(is_latent(at.module) for at in attention_layers(model) if at.module is not None)
        for preset, config in (PRESETS | ABLATIONS).items():
            # a short text shows nothing of sparse presets, which need a calibration; latents have no values
            if text is not None and config.sparse is None and not (latent and config.value_bits is not None):
                with patch(model, config, strict="fallback") as handle:
                    checks[preset] = text.check(model, handle.new_cache())
    except ValueError as error:
        return Diagnosis(None, {}, str(error))
    return Diagnosis(report, checks, refusal, tuple(unknown), "" if text is None else text.words)


def diagnose_config(config: PreTrainedConfig) -> Diagnosis:
    """The same for a config alone: what patching with the default preset would do, and no self-check."""
    try:
        model = meta_model(config)
        report = patch_report(model, DEFAULT_PRESET)
    except ValueError as error:
        return Diagnosis(None, {}, str(error))
    unknown = ("Logits were not compared: there are no weights here.", key_bias_note(model, report))
    # how prompts run depends on the device
    return Diagnosis(replace(report, prompts=""), {}, None, tuple(x for x in unknown if x is not None))
