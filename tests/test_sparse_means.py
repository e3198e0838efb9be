"""Sparse steps that choose blocks by the mean keys of pages: the means, the choice, and attention over it."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from all_pairs import all_pairs, in_one_test
from append_support import GROUPS, full_store, snapshot
from models import prompts, tiny_llama
from sparse_attention_support import sparse_store
from sparse_cache_support import ragged, sparse
from stores import make_store, page_codes, tokens
from torch import Tensor
from torch.testing import assert_close

import turbo_hf
from turbo_hf import SparseConfig, TurboConfig
from turbo_hf.attention import sparse_step
from turbo_hf.attention.sparse_step import audit_by_means
from turbo_hf.cache.new_columns import columns_of
from turbo_hf.layout import (
    NOTED_UNIT,
    UNQUANTIZED,
    AlwaysRead,
    ByMeans,
    HeadGroups,
    KVStore,
    PagedHeads,
    Scoring,
    Visits,
    empty_means,
    page_bytes,
)
from turbo_hf.models.versions import CACHE
from turbo_hf.ops.decode.contract import decode
from turbo_hf.ops.sparse.decode import sparse_decode
from turbo_hf.ops.sparse.reference_means import reference_read_blocks
from turbo_hf.ops.store.append import append_step, seal_open
from turbo_hf.sparse.selectors import Means

pytestmark = pytest.mark.usefixtures("poison")


# --- means ----------------------------------------------------------------------------------------------------------


def with_means(store: KVStore) -> KVStore:
    """The store, with room for means that nobody has written."""
    pages, slots = store.paged[0].k.shape[0], store.order.shape[1]
    return store._replace(means=empty_means(pages, slots, store.k_open.shape[3], store.order.device))


@all_pairs(groups=GROUPS, dim=[16, 80, 128])
def test_a_step_writes_the_mean_of_the_block_that_it_seals(
    groups: HeadGroups, dim: int, backend: str, device: torch.device
) -> None:
    store = with_means(full_store(dim, groups, device))
    before = snapshot(store)
    other = snapshot(store)._replace(means=with_means(store).means)
    k, v = (tokens(4, 2, 1, dim, device=device) for _ in range(2))
    for each, how in ((store, backend), (other, "reference")):
        flags = [torch.zeros(n, dtype=torch.int32, device=device) for n in (1, 4)]
        append_step(k, v, each, nonfinite=flags[0], arrived=flags[1], backend=how)
    assert store.means is not None
    assert other.means is not None
    for row, page in ((0, 0), (2, 3)):
        assert_close(store.means.mean[page], other.means.mean[page], rtol=0, atol=1)
        assert_close(store.means.scale[page], other.means.scale[page], rtol=2e-3, atol=0)
        for slot, head in enumerate(store.order[row].tolist()):
            keys = before.k_open[row, head, :64].double() * before.k_scale[row, head, :64].double()[:, None]
            unit, spread = store.means.scale[page, slot].double()
            got = store.means.mean[page, slot].double() * unit
            assert_close(spread, keys.std(0, correction=0).square().mean().sqrt(), rtol=0.02, atol=0)
            # half a step, whose scale is rounded up to bfloat16 and then to float16
            step = keys.mean(0).abs().amax() / 126
            assert (got - keys.mean(0)).abs().amax() <= (0.5 + 126 * 2**-11) * step


@pytest.mark.parametrize("groups", [((4, 2),), ((16, 1), (4, 1)), ((16, 2),)], ids=str)
def test_sealing_a_prompt_writes_means(groups: HeadGroups, backend: str, device: torch.device) -> None:
    k, v = (tokens(2, 2, 130, 48, dtype=torch.float16, device=device) for _ in range(2))
    store = make_store(k, v, [130, 70], groups=groups, sealed=[0, 0])
    table = torch.tensor([[1, 0], [2, 0]], device=device)
    paged = tuple(PagedHeads(pages.bits, *(torch.cat((x, x)) for x in pages[1:])) for pages in store.paged)
    sealed = torch.tensor([2, 1], device=device)
    found = []
    for how in (backend, "reference"):
        each = with_means(store._replace(paged=paged, table=table, sealed=sealed.clone()))
        seal_open(each, 2, backend=how)
        assert each.means is not None
        found.append(each.means)
    for row, page, first in ((0, 1, 0), (0, 0, 64), (1, 2, 0)):
        exact = k[row, :, first : first + 64].double().mean(1)
        for means in found:
            got = means.mean[page].double() * means.scale[page, :, :1].double()
            spread = k[row, :, first : first + 64].double().var(1, correction=0).mean(-1).sqrt()
            assert_close(means.scale[page, :, 1].double(), spread, rtol=0.02, atol=0)
            assert (got - exact).norm() < 0.02 * exact.norm()
        if dict(groups).get(UNQUANTIZED) is None:
            assert_close(found[0].mean[page], found[1].mean[page], rtol=0, atol=1)
            assert_close(found[0].scale[page], found[1].scale[page], rtol=2e-3, atol=0)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_means_take_at_most_a_sixtieth_of_a_page_of_4_bit(dim: int) -> None:
    means = empty_means(1, 1, dim, torch.device("cpu"))
    assert means.mean.nbytes + means.scale.nbytes <= 0.016 * page_bytes(dim, 4)


def require_means(layer: Any) -> None:
    """Assert that each page in use has the mean of the keys that it holds, as far as its bits go."""
    pool = layer.pool
    for row, sealed in enumerate(layer.state.sealed):
        for page in pool.table[row, :sealed].tolist():
            slot = 0
            for pages in pool.paged:
                for own in range(pages.k.shape[1]):
                    keys = page_codes(pages, page, own)[0].double()
                    if pages.bits != UNQUANTIZED:
                        keys = keys * pages.size[page, own, 0].double()[:, None]
                    got = pool.means.mean[page, slot].double() * pool.means.scale[page, slot, 0].double()
                    # the mean of what the page was packed from: its bits move each key by a share of its size
                    bound = 0.25 if pages.bits == 2 else 0.05
                    assert (got - keys.mean(0)).norm() < bound * keys.norm() / len(keys) ** 0.5
                    slot += 1


@pytest.mark.parametrize(
    "options",
    [{}, {"low_bits": 2, "low_heads": 0.5}, {"bits": 16}, {"bits": 8}, {"value_bits": 3}, {"backend": "triton"}],
    ids=str,
)
def test_means_stay_with_their_pages(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through new blocks, a crop into a block, beams, copies, and pages that move as others leave."""
    # the interpreter takes its time for each query
    monkeypatch.setattr(sparse_step, "AUDITED", 2)
    model = tiny_llama(num_hidden_layers=2)
    config = replace(sparse("means", mass=0.5, window_tokens=20, dense_layers=(1,)), **options)
    with turbo_hf.patch(model, config) as handle, torch.no_grad():
        cache = handle.new_cache()
        model(prompts(3, 100), **{CACHE: cache})
        layer = cache.turbo_layers()[0]
        assert cache.turbo_layers()[1].pool.means is None

        def step(count: int = 1) -> Tensor:
            return torch.as_tensor(model(prompts(layer.rows, count, count), **{CACHE: cache}).logits)

        for act in (
            lambda: [step() for _ in range(5)],
            lambda: cache.crop(-44),
            lambda: step(40),
            lambda: cache.reorder_cache(torch.tensor([0, 2, 0])),
            lambda: step(16),
            lambda: cache.batch_select_indices(torch.tensor([1, 2])),
        ):
            act()
            require_means(layer)
        copied = copy.deepcopy(cache)
        require_means(copied.turbo_layers()[0])
        # 2 KV heads of 16 channels
        assert layer.nbytes()["index"] == layer.pool.pages * 2 * (16 + 4)
        assert torch.equal(model(prompts(2, 1, 1), **{CACHE: copied}).logits, step())
        cache.reset()
        model(prompts(1, 64, 1), **{CACHE: cache})
        require_means(layer)


def test_the_report_tells_of_density_and_estimate() -> None:
    model = tiny_llama(num_hidden_layers=2)
    with turbo_hf.patch(model, sparse("means", mass=0.3, window_tokens=20, dense_layers=())) as handle:
        assert handle.report().selectivity[0].left is None
        model.generate(**ragged((150, 170)), max_new_tokens=6, do_sample=False)
        report = handle.report()
    assert "means, blocks of all but 0.3 of the mass, audited" in str(report)
    assert "4 audited heads dense" in str(report)
    for read in report.selectivity:
        assert read.dense < read.read < read.there
        assert read.left is not None
        assert 0 < read.left <= 0.3
        assert f"{read.left:.2%} of the attention left out, by estimate" in str(read)


@pytest.mark.parametrize("rows", [(400,), (400, 330)], ids=str)
def test_a_head_that_looks_for_one_key_reads_everything(
    rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The mean of its block does not show the key: the audit of the prompt's newest queries does, for each row."""
    monkeypatch.setattr(sparse_step, "AUDITED", 4)
    # of one row
    monkeypatch.setattr(sparse_step, "AUDITED_AT_ONCE", 8)
    model = tiny_llama(num_hidden_layers=1)
    options: dict[str, Any] = {"backend": backend, "rotate_keys": False}
    config = replace(sparse("means", mass=0.4, window_tokens=64, dense_layers=()), **options)
    with turbo_hf.patch(model, config) as handle, torch.no_grad():
        cache = handle.new_cache()
        model(**ragged(rows), **{CACHE: cache})
        before = handle.report().selectivity[0]
        # keys of one size; in the first row, the second KV head looks for one of them
        g = torch.Generator().manual_seed(0)
        n, group, dim = 400, layer_group(model), cache.turbo_layers()[0].dim
        k = torch.nn.functional.normalize(torch.randn(len(rows), 2, n, dim, generator=g), dim=-1)
        starts = None if len(rows) == 1 else torch.tensor([n - each for each in rows])
        cache.reset()
        layer = cache.turbo_layers()[0]
        layer.append(k, k, columns_of(torch.arange(n) >= n - torch.tensor(rows)[:, None]), turn=False)
        layer.commit()
        store, place = layer.kv_store(), torch.tensor([[n - 3]])

        def read_by_second(query: Tensor, rule: ByMeans) -> Tensor:
            first = store.of_rows(slice(0, 1))
            found = reference_read_blocks(query, first, Scoring(dim**-0.5), rule, AlwaysRead(1, 64), place)
            return found[0, 1, 0, : (n - 3) // 32]

        q = torch.zeros(len(rows), 2 * group, n, dim)
        for at in range(40, 300, 32):
            q[0, group:, -3] = 40 * k[0, 1, at] * dim**0.5
            if not read_by_second(q[:1, :, -3, None], ByMeans(0.4))[at // 32]:
                break
        audit_by_means(layer, q, starts, Scoring(dim**-0.5))
        assert layer.left_by_head is not None
        want = torch.full((len(rows), 2), 0.4)
        want[0, 1] = 0
        assert torch.equal(layer.left_by_head, want)
        read = handle.report().selectivity[0]
        assert (read.heads - before.heads, read.dense_heads - before.dense_heads) == (2 * len(rows), 1)
        assert read_by_second(q[:1, :, -3, None], ByMeans(0.4, None, layer.left_by_head[:1])).all()
        # it stays with its row
        cache.batch_repeat_interleave(2)
        assert torch.equal(layer.left_by_head, want.repeat_interleave(2, 0))


def test_audits_leave_calibrated_shares_alone() -> None:
    """Also those of a cache of one row, on the device where the calibration is."""
    shares = torch.tensor([0.1, 0.2], dtype=torch.float64)
    selector = Means(SparseConfig(selector="means"), 0, calibrated=shares)
    for rows in (1, 2):
        own = selector.left_by_head(rows, 2, shares.device)
        assert torch.equal(own, shares.float().expand(rows, 2))
        own.masked_fill_(torch.tensor(True), 0.0)
    assert shares.tolist() == [0.1, 0.2]


def layer_group(model: Any) -> int:
    """Query heads of a KV head."""
    return int(model.config.num_attention_heads // model.config.num_key_value_heads)


def test_means_do_not_go_with_sas() -> None:
    with pytest.raises(ValueError, match='selector "means" does not go with sas=True'):
        TurboConfig(sas=True, sparse=SparseConfig(selector="means"))


# --- the choice -----------------------------------------------------------------------------------------------------


def store_with(lengths: Sequence[int], heads: int, dim: int, device: torch.device, **how: Any) -> KVStore:
    """A cache whose pages have the means of random other keys of the same sizes: some blocks matter more."""
    store = with_means(sparse_store(lengths, heads, dim, device, **how))
    assert store.means is not None
    store.means.mean.copy_(torch.randint(-127, 128, store.means.mean.shape))
    store.means.scale.copy_(torch.rand(store.means.scale.shape) * torch.tensor([0.05, 4.0]))
    return store


def places(store: KVStore, queries: int, starts: Sequence[int] | None = None) -> Tensor:
    length = (store.sealed * store.block + store.open_len)[:, None]
    place = length - queries + torch.arange(queries, device=length.device)
    first = torch.tensor(starts or [0] * len(length), device=length.device)[:, None]
    return place.masked_fill(torch.arange(queries, device=length.device) < first, -1).clamp(min=-1)


def check_choice(q: Tensor, store: KVStore, scoring: Scoring, left: float, always: AlwaysRead, place: Tensor) -> None:
    """Assert that the blocks read are the fewest that leave `left` of the softmax over mean keys, in float64."""
    assert store.means is not None
    noted = torch.zeros(2, dtype=torch.int64, device=q.device)
    read = reference_read_blocks(q, store, scoring, ByMeans(left, noted), always, place)
    rest, block, group = 0.0, store.block, q.shape[1] // store.order.shape[1]
    for row, slot, column in [
        (r, s, m) for r in range(len(q)) for s in range(read.shape[1]) for m in range(q.shape[2])
    ]:
        head, at = int(store.order[row, slot]), int(place[row, column])
        closed = min(int(store.sealed[row]) * block, at + 1)
        new = max(0, at + 1 - always.window_tokens)
        forced = {
            n for n in range(-(-closed // block)) if n * block < min(always.sink_tokens, new) or (n + 1) * block > new
        }
        got = {n for n, taken in enumerate(read[row, head, column].tolist()) if taken}
        assert forced <= got <= set(range(-(-closed // block)))
        whole, need = closed // block, set[int]()
        page = store.table[row, :whole]
        unit, spread = store.means.scale[page, slot].double().unbind(-1)
        keys = store.means.mean[page, slot].double() * unit[:, None]
        allowed = set(forced)
        for one in range(head * group, head * group + group):
            asking = q[row, one, column].double()
            x, wide = keys @ asking * scoring.scaling, asking.norm() * spread * scoring.scaling
            most = math.log(block)
            x += torch.where(wide < (2 * most) ** 0.5, wide**2 / 2, wide * (2 * most) ** 0.5 - most)
            if scoring.softcap is not None:
                x = scoring.softcap * torch.tanh(x / scoring.softcap)
            p = x.softmax(0)
            taken = [n for n in forced if n < whole]
            covered = float(p[taken].sum())
            for n in p.argsort(descending=True).tolist():
                if n in forced:
                    continue
                if covered >= 1 - left - 1e-5:
                    # what is next to the cut may be read
                    allowed |= {m for m in range(whole) if x[m] >= x[n] - 1e-4} if covered < 1 - left + 1e-5 else set()
                    break
                covered += float(p[n])
                need.add(n)
                allowed |= {m for m in range(whole) if x[m] >= x[n] - 0.0065 * math.log(2)}
            if at >= 0 and whole:
                rest += 1 - float(p[[n for n in got if n < whole]].sum())
        assert need <= got <= allowed | forced
    assert int(noted[1]) == int((place >= 0).sum()) * q.shape[1]
    assert abs(int(noted[0]) / NOTED_UNIT - rest) < 1e-4 * max(1, int(noted[1]))


CASES: dict[str, Any] = {
    "ragged": {"lengths": [460, 64, 63, 200, 5], "heads": 2, "dim": 64, "queries": 1, "query_heads": 8},
    "several": {"lengths": [460, 200], "heads": 3, "dim": 80, "queries": 3, "query_heads": 9, "starts": [0, 2]},
    "mixed": {
        "lengths": [1100, 130], "heads": 3, "dim": 32, "queries": 2, "query_heads": 3, "groups": ((4, 2), (2, 1)),
        "block": 32,
    },
    "wide": {"lengths": [500], "heads": 1, "dim": 128, "queries": 1, "query_heads": 20, "groups": (((8, 4), 1),)},
    "open-alone": {"lengths": [20, 63], "heads": 2, "dim": 16, "queries": 2, "query_heads": 4, "starts": [1, 0]},
    "long-blocks": {"lengths": [800, 300], "heads": 2, "dim": 16, "queries": 2, "query_heads": 2, "block": 128},
}  # fmt: skip
RULES: dict[str, Any] = {
    "usual": {"left": 0.05, "always": AlwaysRead(1, 100)},
    "much": {"left": 0.7, "always": AlwaysRead(0, 1)},
    "little": {"left": 1e-4, "always": AlwaysRead(100, 64)},
    "all-new": {"left": 0.2, "always": AlwaysRead(3, 1 << 40)},
    "capped": {"left": 0.3, "always": AlwaysRead(1, 1), "softcap": 1.5},
    "sinks": {"left": 0.3, "always": AlwaysRead(70, 10), "sinks": True},
}


def test_a_head_whose_query_is_no_number_reads_everything(backend: str, device: torch.device) -> None:
    """So that NaN is not left out, and what another head of its group reads is the same on every backend."""
    store = store_with([700], 1, 32, device, block=32)
    q = torch.randn(1, 2, 1, 32, generator=torch.Generator().manual_seed(0)).to(device)
    q[0, 1, 0, 3] = torch.nan
    rule, always = ByMeans(0.9), AlwaysRead(0, 64)
    assert reference_read_blocks(q, store, Scoring(1.0), rule, always, places(store, 1))[..., : 700 // 32].all()
    got = sparse_decode(q, store, Scoring(1.0), rule, always, backend=backend)
    want = decode(q[:, :1], store, Scoring(1.0), backend="reference")
    assert torch.allclose(got.lse[:, :1], want.lse, atol=1e-3)


@all_pairs(case=CASES, rule=RULES)
def test_the_choice_and_attention_over_it(
    case: str, rule: str, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fewest blocks; and as if they were buckets that are visited, bit for bit. Long lists by several programs."""
    if backend == "triton":
        monkeypatch.setattr("turbo_hf.ops.sparse.launch.LISTED", 32)
    given, how = dict(CASES[case]), RULES[rule]
    queries, query_heads, starts = given.pop("queries"), given.pop("query_heads"), given.pop("starts", None)
    store = store_with(device=device, **given)
    q = tokens(len(store.order), query_heads, queries, given["dim"], device=device)
    sinks = torch.randn(query_heads, device=device) if how.get("sinks") else None
    scoring = Scoring(0.3 / given["dim"] ** 0.5, how.get("softcap"), sinks)
    place = places(store, queries, starts)
    check_choice(q, store, scoring, how["left"], how["always"], place)
    counts = torch.zeros(2, 3, dtype=torch.int64, device=device)
    read = reference_read_blocks(q, store, scoring, ByMeans(how["left"], counts[0, 1:]), how["always"], place)
    blocks = store.table.shape[1]
    bucket = torch.arange(blocks + 1, dtype=torch.int16, device=device)
    index = bucket.repeat_interleave(store.block).expand(*store.order.shape, -1).contiguous()
    spans = bucket[:, None].expand(*store.order.shape, -1, 2).contiguous()
    opened = torch.arange(blocks + 1, device=device) >= store.sealed[:, None]
    visited = torch.nn.functional.pad(read, (0, 1)) | opened[:, None, None]
    first = None if starts is None else torch.tensor(starts, device=device)
    options: dict[str, Any] = {"starts": first, "mode": "turbo", "backend": backend}
    visits = Visits(index, visited, spans)
    want = sparse_decode(q, store, scoring, visits, AlwaysRead(0, 1), read=counts[0, :1], **options)
    got = sparse_decode(
        q, store, scoring, ByMeans(how["left"], counts[1, 1:]), how["always"], read=counts[1, :1], **options
    )
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)
    assert counts[0, ::2].tolist() == counts[1, ::2].tolist()
    assert abs(int(counts[0, 1] - counts[1, 1])) <= 1e-5 * NOTED_UNIT * int(counts[0, 2]) + 4
    # shares of each row and KV head: the same one, and 0, which reads every block
    left_by_head = torch.full(store.order.shape, how["left"], device=device)
    left_by_head[:, -1] = 0
    full = sparse_decode(q, store, scoring, None, AlwaysRead(0, 1 << 30), **options)
    mixed = sparse_decode(q, store, scoring, ByMeans(0.5, None, left_by_head), how["always"], **options)
    group = query_heads // store.order.shape[1]
    # other lists, other parts of an output
    want_lse, want_out = (
        torch.cat((x[:, :-group], y[:, -group:]), 1) for x, y in zip(got[::-1], full[::-1], strict=True)
    )
    assert_close(mixed.lse, want_lse, rtol=1e-3, atol=1e-3)
    assert (mixed.out - want_out).norm() <= 0.02 * want_out.norm()


@in_one_test(
    ("changed", "message"),
    [
        ({"means": None}, "got no means, 0.05 and None"),
        ({"left": 0.0}, "got its means, 0.0 and None"),
        ({"sas_threshold": -6.0}, "got its means, 0.05 and -6.0"),
        ({"noted": torch.zeros(2)}, r"noted must be torch.int64 \[2\]; got torch.float32 \[2\]"),
        (
            {"left_by_head": torch.zeros(2)},
            r"left_by_head must be contiguous torch.float32 \[1, 2\]; got torch.float32 \[2\]",
        ),
    ],
)
def test_refusals(changed: dict[str, Any], message: str) -> None:
    store = store_with([200], 2, 16, torch.device("cpu"))
    store = store._replace(means=changed.get("means", store.means))
    rule = ByMeans(changed.get("left", 0.05), changed.get("noted"), changed.get("left_by_head"))
    scoring = Scoring(1.0, sas_threshold=changed.get("sas_threshold"))
    with pytest.raises(ValueError, match=message):
        sparse_decode(tokens(1, 2, 1, 16), store, scoring, rule, AlwaysRead(1, 64))


def test_what_has_no_kernel(device: torch.device) -> None:
    store = store_with([200], 2, 16, device)
    grown = store._replace(table=torch.nn.functional.pad(store.table, (0, 1 << 15)))
    q = tokens(1, 2, 1, 16, device=device)
    with pytest.raises(ValueError, match="32771 blocks per row are more than the 32768 that are chosen by means"):
        sparse_decode(q, grown, Scoring(1.0), ByMeans(0.05), AlwaysRead(1, 64), backend="triton")
    got, want = (sparse_decode(q, each, Scoring(1.0), ByMeans(0.05), AlwaysRead(1, 64)) for each in (grown, store))
    assert (got.out - want.out).abs().max() < 0.05 * want.out.abs().max()
