"""The process that compiles layers for another one (`ahead`), which sends a job as a line.

Its standard output is one line that says why that failed, or nothing.
"""

import json
import os
import sys
import threading
from pathlib import Path

import torch
from torch._inductor import config as inductor_config
from transformers import AutoConfig, AutoModelForCausalLM

from turbo_hf.attention.registration import register, switch_attention
from turbo_hf.attention.turbo_attention import NAME
from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.errors import Unsupported, shortened
from turbo_hf.graphs.ahead import Job, described
from turbo_hf.graphs.compiled_layers import CompiledLayers, regions_of
from turbo_hf.models.versions import CACHE


def _end_with_the_other() -> None:
    """The pipe has no more lines: at its end, the process that has begun this one has ended."""
    sys.stdin.read()
    os._exit(1)


def compile_ahead(job: Job) -> None:
    """Compile the layers of a job.

    Raises:
        Unsupported: its config describes other layers, or they cannot be compiled.
    """
    if torch.get_float32_matmul_precision() != job["precision"]:
        # what is set is another key of torch's caches than the same by default
        torch.set_float32_matmul_precision(job["precision"])
    # which does nothing for a negative number
    torch.cuda.set_device(job["current"])
    config = AutoConfig.for_model(**job["config"])
    with torch.device(job["device"]):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, job["dtype"])).eval()
        ids = torch.zeros(job["rows"], 1, dtype=torch.int64)
    model.requires_grad_(job["gradients"])
    if [described(region.layer) for region in regions_of(model)] != job["layers"]:
        raise Unsupported("its layers are not those of its config alone; compile=True compiles them")
    register()
    switch_attention(model, NAME)
    cache = TurboCache(model.config, TurboConfig())
    inputs = {"input_ids": ids, "position_ids": torch.zeros_like(ids), CACHE: cache, "use_cache": True}
    compiled = CompiledLayers()
    with torch.inference_mode(job["inference"]), torch.no_grad():
        if not compiled.ready(model, inputs, lambda: model(**inputs)):
            raise Unsupported(compiled.reason)


def main() -> None:
    """Compile what the line on standard input says."""
    os.nice(10)
    # no processes of its own
    inductor_config.compile_threads = 1
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_other, daemon=True).start()
    try:
        compile_ahead(job)
        Path(job["mark"]).touch()
    except Exception as error:
        sys.stdout.write(f"{error if isinstance(error, Unsupported) else shortened(error)}\n")
        sys.stdout.flush()
        os._exit(1)
    # threads of torch's compiler are not waited for
    os._exit(0)
