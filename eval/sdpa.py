"""torch's SDPA in runs where hardly a shape comes twice."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_plans() -> Iterator[None]:
    """Inside, SDPA does without cuDNN, and takes FlashAttention or torch's own kernels.

    cuDNN makes a plan for each shape that it has not seen, and every decode step has one: over tasks of mixed lengths
    that takes longer than all the rest.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
