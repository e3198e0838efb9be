"""The ops of one layer, chosen once, when its shapes are known."""

import torch

from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.layout import HeadGroups, widths_of
from turbo_hf.ops.decode.contract import DecodeOps
from turbo_hf.ops.latent.contract import LatentOps
from turbo_hf.ops.prefill.contract import PrefillOps
from turbo_hf.ops.sparse.contract import SparseOps
from turbo_hf.ops.store.contract import StoreOps


class LayerOps(StoreOps, LatentOps, PrefillOps, DecodeOps, SparseOps):
    """All ops of a layer: Triton kernels, or the reference in plain torch, as `Choice` says."""


def ops_of(config: TurboConfig, like: torch.Tensor, groups: HeadGroups, rotary_dim: int | None = None) -> LayerOps:
    """The ops of a layer whose keys, or latents, are like the tensor `like` [..., D].

    groups: width and number of heads of each width. rotary_dim: as of `Choice`.
    """
    return LayerOps(
        config.expert.backend,
        like.device,
        like.dtype,
        like.shape[-1],
        rotary_dim,
        block=config.expert.block_size,
        bits=max(widths_of(width)[0] for width, _ in groups),
        mode=config.decode_attention,
    )
