"""torch's SDPA in runs where hardly a shape comes twice."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_plans() -> Iterator[None]:
    """Inside, SDPA does without cuDNN, and takes FlashAttention or torch's own kernels.

    cuDNN makes a plan for each shape that it has not seen, and every decode step has one. Seen on an H200, beside other
    work: of two equal runs over tasks of mixed lengths the first took 124 s, the second, which knew the shapes, 43 s.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
