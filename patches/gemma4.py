"""Gemma 4: its small models cut a prompt to its last tokens before the layers that share keys."""

from typing import Any


def slice_queries(module: Any, hidden: Any, extra: Any, positions: Any, masks: Any, *args: Any, **kwargs: Any) -> Any:
    """`_maybe_slice_kv_shared_inputs`, which cuts a prompt to its last tokens before the layers that share keys.

    It cuts the rows of 4D masks. A 2D mask has one column per key and no rows of queries, so it stays whole.
    """
    masks_4d = {kind: mask if mask is not None and mask.dim() == 4 else None for kind, mask in masks.items()}
    original = type(module)._maybe_slice_kv_shared_inputs
    *cut, cut_masks = original(module, hidden, extra, positions, masks_4d, *args, **kwargs)
    return *cut, {kind: mask if masks_4d[kind] is None else cut_masks[kind] for kind, mask in masks.items()}
