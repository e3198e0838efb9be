"""Sparse chunks over a compressed past: which key tiles they read, attention over them, and what they drop."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from all_pairs import all_pairs, in_one_test
from gpu_support import NO_FP8, has_fp8
from models import lab_model, left_padded, prompts, tiny_llama
from op_calls import prefill
from stores import make_store, store_codes
from test_sparse_prompts import SHORT, lab_ids
from torch import Tensor

import turbo_hf
from turbo_hf import PromptSparsity, TurboConfig
from turbo_hf.eval.bench.check import judge
from turbo_hf.layout import PROMPT_TILE as TILE
from turbo_hf.layout import AttentionOutput, KVStore, Scoring, TileRule
from turbo_hf.models.versions import CACHE
from turbo_hf.ops.prefill.launch_tiles import launch_list_tiles
from turbo_hf.ops.prefill.reference_tiles import as_square, past_tiles
from turbo_hf.ops.prefill.tiles import SparseKeys, choose_tiles, density, dropped_mass, sparse_keys
from turbo_hf.sparse import prompts as sparse_prompts
from turbo_hf.sparse.prompts import PromptTally

pytestmark = pytest.mark.usefixtures("poison")

SCALING = 0.2
SCORINGS = (Scoring(SCALING), Scoring(SCALING, softcap=0.7), Scoring(SCALING, sinks=torch.tensor([5.0, -1.0])))
BARE = TileRule(mass=0.5, peak=1.0, sink_tokens=0, window_tokens=0, tail_tokens=0)
BACKENDS = ("reference", "triton")


def on(device: torch.device, scoring: Scoring) -> Scoring:
    return scoring if scoring.sinks is None else scoring._replace(sinks=scoring.sinks.to(device))


def heads(rows: int, tokens: int, device: torch.device, dtype: torch.dtype = torch.float32, dim: int = 32) -> Any:
    """q [rows, 2, tokens, dim]; k, v of one KV head; keys of a tile are alike, so that shares differ."""
    generator = torch.Generator().manual_seed(tokens + dim)
    tiles = -(-tokens // TILE)
    shift = torch.randn(rows, 1, tiles, dim, generator=generator).repeat_interleave(TILE, 2)[:, :, :tokens] * 1.5
    q, k, v = (torch.randn(rows, n, tokens, dim, generator=generator) for n in (2, 1, 1))
    return tuple(x.to(device, dtype) for x in (q, k + shift, v))


def past_of(lengths: list[int], device: torch.device, dtype: torch.dtype = torch.float32, **how: Any) -> KVStore:
    """A cache of such keys and values, of one KV head."""
    _, k, v = heads(len(lengths), max(lengths), device, dtype)
    return make_store(k, v, lengths, **how)


def random_kept(q: Tensor, past: int, share: float = 0.5) -> Tensor:
    tiles = -(-q.shape[2] // TILE)
    drawn = torch.rand(
        *q.shape[:2], tiles * past + tiles * (tiles - 1) // 2, generator=torch.Generator().manual_seed(1)
    )
    return (drawn < share).to(q.device, torch.uint8)


@all_pairs(
    form=((32, torch.float32), (80, torch.float16)),
    rule=(BARE, TileRule(0.7, 0.3, 1, TILE, 3), BARE._replace(mass=1e-6), BARE._replace(mass=1.0)),
    scoring=SCORINGS,
    backend=BACKENDS,
)
def test_a_chunk_chooses_and_drops_what_the_whole_prompt_would(
    form: tuple[int, torch.dtype], rule: TileRule, scoring: Scoring, backend: str, device: torch.device
) -> None:
    (dim, dtype), tokens, past, scoring = form, 6 * TILE + 7, 3, on(device, scoring)
    q, k, _ = heads(2, tokens, device, dtype, dim)
    chunk, tail = q[:, :, past * TILE :], rule._replace(tail_tokens=min(rule.tail_tokens, 7))
    whole = choose_tiles(q, k, tail, scoring, backend=backend)
    kept = choose_tiles(chunk, k, tail, scoring, backend=backend)
    assert past_tiles(kept, chunk.shape[2]) == past
    assert torch.equal(as_square(kept, chunk.shape[2]), as_square(whole, tokens)[:, :, past:])
    assert torch.equal(kept, choose_tiles(chunk, k, tail, scoring, backend="reference"))
    assert rule != BARE or not kept.all()
    places = torch.arange(0, chunk.shape[2], 13, device=device)
    got = dropped_mass(chunk, k, kept, places, scoring, backend=backend)
    want = dropped_mass(q, k, whole, places + past * TILE, scoring, backend=backend)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    # keys that all queries read besides take their part of the softmax
    rest = k[:, :, 40:61] + 0.3
    got = dropped_mass(chunk, k, kept, places, scoring, rest, backend=backend)
    seen = torch.arange(tokens, device=device) <= places[:, None] + past * TILE
    score = torch.cat((k, rest), 2).double()
    score = chunk[:, :, places].double() @ score.mT * SCALING
    score = score if scoring.softcap is None else scoring.softcap * (score / scoring.softcap).tanh()
    score[..., :tokens] = score[..., :tokens].masked_fill(~seen, -torch.inf)
    if scoring.sinks is not None:
        score = torch.cat((score, scoring.sinks.double()[:, None, None].expand(2, -1, len(places), 1)), -1)
    read = as_square(kept, chunk.shape[2])[:, :, places // TILE].repeat_interleave(TILE, -1)[..., :tokens]
    exact = (score.softmax(-1)[..., :tokens] * ~read).sum(-1)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)


@all_pairs(bits=(16, 8, 4, (4, 2)), block=(32, 64, 128), backend=BACKENDS)
def test_the_keys_of_a_past(bits: Any, block: int, backend: str, device: torch.device) -> None:
    """Whole tiles, then the chunk's; apart, what no tile holds: the last blocks and the open tokens."""
    length, sealed = 3 * TILE + 101, (3 * TILE + 101) // block
    _, k, v = heads(2, length + 50, device, torch.float16)
    store = make_store(k, v, [length] * 2, block=block, groups=((bits, 1),))
    got = sparse_keys(store, k[:, :, length:], sealed, length - sealed * block, backend=backend)
    for row, codes in enumerate(store_codes(store)):
        held, _ = (x.to(device) for x in codes.values())
        want = SparseKeys(torch.cat((held[:, : 3 * TILE], k[row, :, length:].double()), 1), held[:, 3 * TILE :])
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one[row].double(), other, rtol=1e-3, atol=1e-4)


def over_tiles(
    q: Tensor, k: Tensor, v: Tensor, store: KVStore, kept: Tensor, starts: list[int], scoring: Scoring
) -> AttentionOutput:
    """Softmax written out in float64, over what `kept` and each row's past leave; 0 and -inf at padding."""
    out, lse = torch.zeros_like(q, dtype=torch.float64), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float64)
    tokens = q.shape[2]
    square, past = as_square(kept, tokens), past_tiles(kept, tokens)
    for row, codes in enumerate(store_codes(store)):
        start, (held, values) = starts[row], (x.to(q.device) for x in codes.values())
        length, count = held.shape[1], tokens - start
        tile = torch.arange(length, device=q.device) // TILE
        whole = min(past, int(store.sealed[row]) * store.block // TILE)
        query = torch.arange(count, device=q.device)
        of_past = square[row][:, query // TILE][..., tile.clamp(max=max(whole - 1, 0))] | (tile >= whole)
        of_chunk = square[row][:, query // TILE][..., past + query // TILE] & (query <= query[:, None])
        keys, values = (
            torch.cat(pair, 1) for pair in ((held, k[row, :, start:].double()), (values, v[row, :, start:].double()))
        )
        score = q[row, :, start:].double() @ keys.mT * scoring.scaling
        score = score if scoring.softcap is None else scoring.softcap * (score / scoring.softcap).tanh()
        score = score.masked_fill(~torch.cat((of_past, of_chunk), -1), -torch.inf)
        total = score.logsumexp(-1)
        if scoring.sinks is not None:
            total = torch.logaddexp(total, scoring.sinks.double()[:, None])
        lse[row, :, start:] = total
        out[row, :, start:] = (score - total[..., None]).exp() @ values
    return AttentionOutput(out, lse)


@all_pairs(
    case=(("turbo", torch.float32), ("fp16", torch.float32), ("half", torch.float16), ("fp8", torch.float16)),
    # lengths of the pasts, and of the padding before the chunks
    rows=(([2 * TILE + 70], None), ([3 * TILE], None), ([300, 0, 90], [0, 5, 140])),
    block=(64, 32, 128),
    scoring=SCORINGS,
    backend=BACKENDS,
)
def test_attention(
    case: tuple[str, torch.dtype],
    rows: tuple[list[int], list[int] | None],
    block: int,
    scoring: Scoring,
    backend: str,
    device: torch.device,
) -> None:
    (mode, dtype), (lengths, starts), scoring = case, rows, on(device, scoring)
    if mode == "fp8" and not has_fp8(device):
        pytest.skip(NO_FP8)
    if device.type == "cuda" and (mode, dtype) == ("fp16", torch.float32):
        pytest.skip("prompts in float32 are dense on a GPU")
    q, k, v = heads(len(lengths), TILE + 17, device, dtype)
    store = past_of(lengths, device, dtype, block=block, groups=((8, 1),))
    kept = random_kept(q, max(lengths) // block * block // TILE)
    given: dict[str, Any] = {**scoring._asdict(), "mode": mode, "past": store}
    given["starts"] = None if starts is None else torch.tensor(starts, device=device)
    first = [0] * len(lengths) if starts is None else starts
    got = prefill(q, k, v, kept=kept, backend=backend, **given)
    dense = prefill(q, k, v, backend=backend, **given)
    exact = over_tiles(q, k, v, store, kept, first, scoring)
    if backend == "reference":
        # within what the mode costs where every key is read
        whole = over_tiles(q, k, v, store, torch.ones_like(kept), first, scoring)
        off, mine = ((a.out.double() - b.out).norm(dim=-1) for a, b in ((dense, whole), (got, exact)))
        size = exact.out.norm(dim=-1).clamp(min=1e-9)
        assert (mine / size).max() <= 3 * (off / whole.out.norm(dim=-1).clamp(min=1e-9)).max() + 1e-5
        torch.testing.assert_close(got.lse.double(), exact.lse, rtol=0.02, atol=0.02)
    else:
        model = prefill(q, k, v, kept=kept, backend="reference", **given)
        parts = [
            [AttentionOutput(x.out[row, :, start:], x.lse[row, :, start:]) for row, start in enumerate(first)]
            for x in (got, model, exact)
        ]
        for mine, other, true in zip(*parts, strict=True):
            if mine.lse.numel():
                assert judge(mine, AttentionOutput(mine.out.double(), mine.lse.double()), other, true).problem == ""
    assert (dense.out - got.out).abs().max() > 0.02
    every = prefill(q, k, v, kept=torch.ones_like(kept), backend=backend, **given)
    assert torch.equal(every.out, dense.out)
    assert torch.equal(every.lse, dense.lse)


def test_lists(device: torch.device) -> None:
    """The chunk's own tiles, then the past's; a row with a shorter past has no more of its tiles than these."""
    q, _, _ = heads(2, 2 * TILE + 1, device)
    store = past_of([4 * TILE, 2 * TILE + 64], device)
    kept = random_kept(q, 4, 0.7)
    listed, count, of_past = launch_list_tiles(kept, q.shape[2], store)
    square, size = as_square(kept, q.shape[2]).cpu(), 3 * 4 + 3
    entries = listed[:-2].view(4, size).tolist()
    for row, head, tile in product(range(2), range(2), range(3)):
        ours = [t for t in reversed(range(tile)) if square[row, head, tile, 4 + t]]
        theirs = [t for t in reversed(range((4, 2)[row])) if square[row, head, tile, t]]
        at = tile * 4 + tile * (tile - 1) // 2
        found = entries[2 * row + head][at : at + 4 + tile]
        assert found == ours + theirs + [0] * (4 + tile - len(ours) - len(theirs))
        assert (int(count[2 * row + head, tile]), int(of_past[2 * row + head, tile])) == (len(ours), len(theirs))


def test_what_a_dropped_tile_of_the_past_holds_is_not_read(device: torch.device) -> None:
    q, k, v = heads(1, TILE, device)
    store = past_of([3 * TILE + 80], device)
    kept = torch.tensor([1, 0, 1], dtype=torch.uint8, device=device).expand(1, 2, 3).contiguous()
    given: dict[str, Any] = {"scaling": SCALING, "mode": "turbo", "kept": kept, "backend": "triton"}
    want = prefill(q, k, v, past=store, **given)
    for page in store.table[0, 2:4].tolist():
        store.paged[0].size[page] = torch.nan
    assert torch.equal(prefill(q, k, v, past=store, **given).out, want.out)
    # but for the blocks behind the whole tiles
    store.paged[0].size[store.table[0, 6]] = torch.nan
    assert not torch.equal(prefill(q, k, v, past=store, **given).out, want.out)


@in_one_test(
    ("options", "message"),
    [
        ({"window": 500}, "kept is for causal prompts without a window, which attend to themselves"),
        ({"own": False}, "kept is for causal prompts without a window, which attend to themselves"),
        ({"kept": torch.ones(1, 2, 5, dtype=torch.uint8)}, r"uint8 \[1, 2, 3\] .* got torch.uint8 \[1, 2, 5\]"),
        ({"past": None}, r"uint8 \[1, 2, 0\] .* got torch.uint8 \[1, 2, 3\]"),
    ],
)
def test_prefill_refuses(options: dict[str, Any], message: str) -> None:
    q, k, v = heads(1, TILE, torch.device("cpu"))
    past = past_of([3 * TILE], torch.device("cpu"))
    given = {"kept": torch.ones(1, 2, 3, dtype=torch.uint8), "past": past, **options}
    with pytest.raises(ValueError, match=message):
        prefill(q, k, v, scaling=SCALING, mode="fp16", **given)


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of few tokens may be sparse."""
    monkeypatch.setattr(sparse_prompts, "LEAST_ADDED", 200)


def in_chunks(model: Any, config: TurboConfig, ids: Tensor, size: int, **more: Any) -> tuple[Tensor, Any]:
    """Logits of the last token of a prompt that is given `size` tokens at a time, and the report."""
    with turbo_hf.patch(model, config) as handle, torch.no_grad():
        cache = handle.new_cache()
        for first in range(0, ids.shape[1], size):
            seen = {name: x[:, : first + size] for name, x in more.items()}
            if seen:
                seen["position_ids"] = (seen["attention_mask"].cumsum(1) - 1).clamp(min=0)[:, first:]
            out = model(ids[:, first : first + size], **{CACHE: cache}, **seen)
        return out.logits[:, -1], handle.report()


@pytest.mark.parametrize("options", [{}, {"bits": 16}], ids=str)
@pytest.mark.usefixtures("short_chunks")
def test_chunks_of_a_trained_model(options: dict[str, Any]) -> None:
    """All of the mass gives the dense bits; less is within the bound, and the report shows it."""
    model, _ = lab_model()
    ids, config = lab_ids(900), TurboConfig(backend="reference", **options)
    dense, _ = in_chunks(model, config, ids, 450)
    every, _ = in_chunks(model, replace(config, sparse_prompt=replace(SHORT, mass=1.0)), ids, 450)
    assert torch.equal(every, dense)
    got, report = in_chunks(model, replace(config, sparse_prompt=SHORT), ids, 450)
    assert not torch.equal(got, dense)
    for layer in report.sparse_prompts:
        # the first chunk is shorter than sparse prompts are
        assert (layer.prompts, layer.continued) == (1, 1)
        assert 0 < layer.density < 1
        assert layer.dropped_mean is not None
        assert 0 < layer.dropped_mean <= SHORT.bound
    assert "read by 1 sparse prompts, 1 of them over a cache; dropped softmax: mean" in str(report)


@pytest.mark.usefixtures("short_chunks")
def test_rows_of_a_batch_read_as_they_do_alone_over_a_past() -> None:
    """Padded rows, whose pasts have different lengths."""
    llama, lengths, config = tiny_llama(), (1000, 820, 300), TurboConfig(sparse_prompt=SHORT)
    rows = [prompts(1, n, n)[0] for n in lengths]
    given = left_padded(rows)
    batch, report = in_chunks(llama, config, given.pop("input_ids"), 500, **given)
    assert [layer.prompts for layer in report.sparse_prompts] == [2, 2]
    for row, ids in enumerate(rows):
        # chunks that end where those of the batch do
        alone, first = turbo_hf.patch(llama, config), len(ids) - 500
        with alone as handle, torch.no_grad():
            cache = handle.new_cache()
            if first > 0:
                llama(ids[None, :first], **{CACHE: cache})
            out = llama(ids[None, max(first, 0) :], **{CACHE: cache}).logits[:, -1]
            assert [layer.prompts for layer in handle.report().sparse_prompts] == [int(len(ids) > 512)] * 2
        torch.testing.assert_close(out[0], batch[row], rtol=1e-4, atol=1e-4)


def test_short_additions_and_sorted_or_open_pasts_are_dense_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, _ = heads(1, 300, torch.device("cpu"))
    store = past_of([700], torch.device("cpu"))._replace(sealed_host=(10,))
    given: dict[str, Any] = {"held": [700], "mode": "turbo", "backend": "auto"}
    rule, scoring = PromptSparsity(from_tokens=896), Scoring(SCALING)
    tally = PromptTally()
    assert tally.tiles_to_read(rule, q, k, store, None, scoring, **given) is None
    assert tally.tiles_to_read(rule, q, k, store, 999, scoring, **given) is None
    assert tally.tiles_to_read(rule, q, k, store, None, scoring, sorted_past=True, **given) is None
    assert dict(tally.dense) == {
        "they add fewer than 1,024 tokens to a cache": 1,
        "they continue a cache that is in the order of buckets": 1,
    }
    monkeypatch.setattr(sparse_prompts, "LEAST_ADDED", 300)
    # of 700 tokens, 60 are in no sealed block, as the device knows it too
    tally, store, rule = PromptTally(), store._replace(sealed_host=None), replace(rule, tail_tokens=0)
    assert tally.tiles_to_read(rule, q, k, store, None, scoring, **given) is not None
    monkeypatch.setattr(sparse_prompts, "MOST_OPEN", 59)
    assert tally.tiles_to_read(rule, q, k, store, None, scoring, **given) is None
    assert dict(tally.dense) == {"more than 59 tokens before them are not sealed yet": 1}


@pytest.mark.usefixtures("short_chunks")
def test_a_head_whose_past_deceives_is_computed_densely() -> None:
    """Two keys of a tile cancel in its mean, and every query looks for one of them."""
    q, k, _ = (0.1 * x for x in heads(1, 3 * TILE, torch.device("cpu")))
    _, held, values = (0.1 * x for x in heads(1, 6 * TILE, torch.device("cpu")))
    q[..., 0] = 2.0
    held[:, :, TILE, 0], held[:, :, TILE + 1, 0] = 90.0, -90.0
    held[:, :, 4 * TILE : 5 * TILE, 0] = 8.0
    store = make_store(held, values, [6 * TILE], groups=((16, 1),))._replace(sealed_host=(12,))
    rule = PromptSparsity(mass=0.9, peak=1.0, from_tokens=400, sink_tokens=0, window_tokens=0, tail_tokens=0)
    given: dict[str, Any] = {"held": [6 * TILE], "mode": "fp16", "backend": "auto"}
    kept = PromptTally().tiles_to_read(replace(rule, audit=False), q, k, store, None, Scoring(1.0), **given)
    assert kept is not None
    assert density(kept, q.shape[2]).max() < 0.5
    tally = PromptTally()
    kept = tally.tiles_to_read(rule, q, k, store, None, Scoring(1.0), **given)
    assert kept is not None
    assert kept.all()
    assert (tally.shares(0).dense_heads, tally.shares(0).continued) == (2, 1)
