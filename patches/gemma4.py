"""Gemma 4."""

from typing import Any

from turbo_hf.patches.generic import Family


def slice_queries(module: Any, hidden: Any, extra: Any, positions: Any, masks: Any, *args: Any, **kwargs: Any) -> Any:
    """`_maybe_slice_kv_shared_inputs`, which cuts a prompt to its last tokens before the layers that share keys.

    It cuts rows of dense masks. A 2D mask has a column a key and none a query, so it stays whole.
    """
    dense = {kind: mask if mask is not None and mask.dim() == 4 else None for kind, mask in masks.items()}
    original = type(module)._maybe_slice_kv_shared_inputs
    *cut, cut_masks = original(module, hidden, extra, positions, dense, *args, **kwargs)
    return *cut, {kind: mask if dense[kind] is None else cut_masks[kind] for kind, mask in masks.items()}


FAMILY = Family(
    name="Gemma 4",
    model_types=("gemma4_text", "gemma4_unified_text", "gemma4", "gemma4_unified"),
    notes=(
        "Five of six layers have a sliding window; full layers may have another head dim and number of KV heads. The "
        "last layers of the small models read the keys of earlier ones (`num_kv_shared_layers`): both stay dense."
    ),
    methods={"_maybe_slice_kv_shared_inputs": slice_queries},
)
