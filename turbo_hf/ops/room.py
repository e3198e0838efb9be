"""Error message for a kernel that does not fit a GPU. Imported only where one runs, as it needs Triton."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from triton.runtime.errors import OutOfResources


@contextmanager
def room_for(x: torch.Tensor) -> Iterator[None]:
    """ValueError that says what to do if a kernel for tensors like x needs more than this GPU has."""
    try:
        yield
    except OutOfResources as error:
        raise ValueError(
            f"The kernel for head dim {x.shape[-1]} in {x.dtype} does not fit this GPU: {error} Take a smaller "
            'TurboConfig.block_size, another TurboConfig.attention, or backend="reference" (plain torch, slow).'
        ) from error
