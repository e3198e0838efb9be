"""Decode over latents (MLA) for `bench decode`: our 16-bit kernel, narrower formats, and what torch can do itself."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.rows import NewColumns
from turbo_hf.config.turbo_config import PRESETS
from turbo_hf.eval.bench.checked import Check, Found, Prepared, judge, new_row, our_step
from turbo_hf.eval.bench.oracle import attend
from turbo_hf.eval.bench.random_cache import draw
from turbo_hf.eval.bench.rivals import LATENT_16, PRODUCTS
from turbo_hf.eval.bench.shapes import BLOCK, Case
from turbo_hf.eval.bench.timing import Conditions, Rotation, cold_copies
from turbo_hf.layout import AttentionOutput, KVStore, page_bytes
from turbo_hf.ops.latent.reference import reference_latent_decode
from turbo_hf.ops.store.quantize import dequantize

ROTARY = 64
"""Channels of the rotary part beside a latent of 512."""

EXPANDED = (192, 128)
"""Channels of the keys and values that a latent is expanded to, per query head."""

SCALING = EXPANDED[0] ** -0.5

_draw = partial(draw, dtype=torch.bfloat16)

LATENT_WIDTHS = ("16", "8", "4")


def latent_bytes(case: Case, width: str) -> int:
    """Bytes of the latents that a step reads."""
    return sum(case.lengths) // BLOCK * page_bytes(case.heads.dim, int(width), BLOCK, ROTARY)


def latent_step(case: Case, width: str, how: Conditions) -> Found:
    """The row of a step over latents of one width with its check, and what to time if the result is right."""
    name, device = LATENT_16 if width == "16" else f"latent {width} bit", how.device
    if width not in LATENT_WIDTHS:
        return new_row(case, name, True, 0, f"a latent has 16, 8 or 4 bit here; not {width}"), None
    generator = torch.Generator(device).manual_seed(how.seed + 1)
    batch, tokens, size = len(case.lengths), max(case.lengths), latent_bytes(case, width)
    q, q_rotary = (_draw(generator, batch, case.heads.query, 1, n) for n in (case.heads.dim, ROTARY))
    ops = how.ops(q, ((int(width), 1),), ROTARY)

    def store() -> KVStore:
        layer = TurboLayer(replace(PRESETS["int8"], bits=int(width)), latent=True)
        latent, rotary = (_draw(generator, batch, 1, tokens, n) for n in (case.heads.dim, ROTARY))
        layer.append(latent, rotary, NewColumns(tokens))
        layer.commit()
        return layer.kv_store()

    def step(own: KVStore) -> AttentionOutput:
        return ops.latent_decode(q, q_rotary, own, SCALING)

    def prepare() -> Prepared:
        stores = [store() for _ in range(cold_copies(size, device))]
        return [partial(step, own) for own in stores], partial(_check, q, q_rotary, stores[0])

    return our_step(case, name, size, device, prepare)


def _check(q: torch.Tensor, q_rotary: torch.Tensor, store: KVStore, got: AttentionOutput) -> Check:
    """All queries against float64 over the same latents, row by row, within the error of the reference."""
    model = reference_latent_decode(q, q_rotary, store, SCALING)
    length = int(store.sealed[0]) * store.block + int(store.open_len[0])
    latents, rotary = (x[:, :, :length] for x in dequantize(store, torch.float64))
    query = torch.cat((q, q_rotary), -1)
    # values have as many channels as keys: zeros beside the latent
    rows = [
        attend(own, torch.cat((k, r), -1), torch.cat((k, torch.zeros_like(r)), -1), scaling=SCALING, causal=False)
        for own, k, r in zip(query, latents, rotary, strict=True)
    ]
    exact = AttentionOutput(
        torch.stack([row.out[..., : q.shape[-1]] for row in rows]), torch.stack([x.lse for x in rows])
    )
    return judge(got, got, model, exact)


def torch_calls(case: Case, device: torch.device, seed: int) -> dict[str, Callable[[], Rotation]]:
    """What makes the rotation of each way of torch, over 16-bit latents, or over the keys and values made of them."""
    generator = torch.Generator(device).manual_seed(seed)
    batch, tokens, heads, rank = len(case.lengths), max(case.lengths), case.heads.query, case.heads.dim

    def over_latents(call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Rotation:
        q = _draw(generator, batch, 1, heads, rank + ROTARY)
        copies = cold_copies(latent_bytes(case, "16"), device)
        return Rotation(
            [partial(call, q, _draw(generator, batch, 1, tokens, rank + ROTARY)) for _ in range(copies)], device
        )

    def products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        weights = (q @ k.mT * SCALING).softmax(-1)
        return torch.matmul(weights, k[..., :rank])

    def sdpa(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, k[..., :rank], scale=SCALING)

    def expanded() -> Rotation:
        q = _draw(generator, batch, heads, 1, EXPANDED[0])
        copies = cold_copies(2 * batch * heads * tokens * sum(EXPANDED), device)
        kv = [tuple(_draw(generator, batch, heads, tokens, n) for n in EXPANDED) for _ in range(copies)]
        return Rotation([partial(scaled_dot_product_attention, q, k, v, scale=SCALING) for k, v in kv], device)

    return {
        PRODUCTS: partial(over_latents, products),
        "SDPA, latents": partial(over_latents, sdpa),
        "SDPA, expanded": expanded,
    }
