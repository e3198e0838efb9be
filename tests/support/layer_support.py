"""A cache layer in plain Python that keeps every token, and helpers for the tests that compare `TurboLayer` with it."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from choices import flat_config
from op_calls import quantize_tokens, seal_blocks
from torch import Tensor

from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.rows import NewColumns, columns_of
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.layout import KVStore, PagedHeads
from turbo_hf.ops.store.reference import reference_unpack_blocks

CONFIGS = [
    pytest.param(TurboConfig(bits=8), id="8bit"),
    pytest.param(TurboConfig(bits=4), id="4bit"),
    pytest.param(TurboConfig(bits=3), id="3bit"),
    pytest.param(TurboConfig(bits=2), id="2bit"),
    pytest.param(flat_config(bits=4, low_bits=2, low_heads=0.5), id="mixed"),
    pytest.param(flat_config(bits=8, low_bits=3, low_heads=0.5, head_metric="entropy", block_size=32), id="mixed8-3"),
    pytest.param(flat_config(bits=4, block_size=32), id="block32"),
    pytest.param(flat_config(bits=8, value_bits=3, low_bits=4, low_heads=0.5), id="pairs"),
    pytest.param(flat_config(bits=4, block_size=128), id="block128"),
    pytest.param(flat_config(value_bits=2, block_size=32, recent_tokens=64), id="recent"),
]
HEADS = 3
"""Three, so that an order of heads differs from its inverse."""


class Token(NamedTuple):
    """One token. k, v: INT8 codes [Hkv, D], of sealed blocks numbers; k_scale, v_scale: float32 [Hkv]."""

    k: Tensor
    k_scale: Tensor
    v: Tensor
    v_scale: Tensor


class NaiveRow:
    """One row: a list of columns, a list of sealed blocks, a list of open tokens."""

    def __init__(self, config: TurboConfig, window: int | None = None):
        self.config, self.window = config, window
        self.first = config.first_tokens if window is None else 0
        self.columns: list[bool] = []
        self.pages: list[list[PagedHeads]] = []
        self.open: list[Token] = []
        self.dropped = 0

    def append(self, k: Tensor, v: Tensor, valid: Iterable[bool]) -> None:
        """Columns k, v [Hkv, M, D], of which those under `valid` are tokens."""
        for column, real in enumerate(valid):
            self.columns.append(real)
            if real:
                codes = [quantize_tokens(x[None, :, column : column + 1]) for x in (k, v)]
                self.open.append(Token(*(x[0, :, 0] for pair in codes for x in pair)))

    def commit(self) -> None:
        """Seal whole blocks, one after the other; then drop those that no later query sees."""
        block, first = self.config.expert.block_size, self.first
        while len(self.open) >= first + block + self.config.recent:
            due = self.open[first : first + block]
            k, k_scale, v, v_scale = (torch.stack(x, 1) for x in zip(*due, strict=True))
            self.open = self.open[:first] + self.open[first + block :]
            groups = self.config.head_groups(k.shape[0])
            page, slot = [], 0
            for bits, count in groups:
                own = slice(slot, slot + count)
                page.append(seal_blocks(k[own][None], k_scale[own][None], v[own][None], v_scale[own][None], bits))
                slot += count
            self.pages.append(page)
        while self.window is not None and self.held() - block >= self.window - 1 and self.pages:
            del self.pages[0]
            self.dropped += block

    def held(self) -> int:
        """Tokens that the row can still give."""
        return len(self.pages) * self.config.expert.block_size + len(self.open)

    def can_crop(self, columns: int) -> bool:
        """Whether the window is still whole with the newest `columns` columns gone."""
        gone = sum(self.columns[len(self.columns) - columns :])
        visible = self.held() + self.dropped - gone
        if self.window is not None:
            visible = min(visible, self.window - 1)
        return self.held() - gone >= visible

    def crop(self, columns: int) -> None:
        """Take columns off one by one; a sealed block that is reached becomes open tokens first."""
        for _ in range(columns):
            if not self.columns.pop():
                continue
            if self.pages and len(self.open) == self.first:
                self.open += [
                    token._replace(k=token.k.round().to(torch.int8), v=token.v.round().to(torch.int8))
                    for token in self.tokens(self.pages.pop())
                ]
            self.open.pop()

    def tokens(self, page: list[PagedHeads]) -> list[Token]:
        """The tokens that a sealed block stands for, numbers in units of their sizes."""
        slots = [(pages, slot) for pages in page for slot in range(pages.k.shape[1])]
        # in float32, as the layer has them; what they are is told by tests of pages
        numbers = [[x[0, slot] for x in reference_unpack_blocks(pages)] for pages, slot in slots]
        k, v = (torch.stack(x) for x in zip(*numbers, strict=True))
        k_size, v_size = torch.stack([pages.size[0, slot].float() for pages, slot in slots]).unbind(1)
        return [Token(k[:, n], k_size[:, n], v[:, n], v_size[:, n]) for n in range(k.shape[1])]

    def values(self, columns: int, dim: int) -> tuple[Tensor, Tensor]:
        """Dequantised keys and values [Hkv, columns, D] of the newest columns, 0 at padding and what was dropped."""
        sealed = [token for page in self.pages for token in self.tokens(page)]
        held = self.open[: self.first] + sealed + self.open[self.first :]
        k, v = torch.zeros(2, HEADS, len(self.columns), dim)
        place = -self.dropped
        for column, real in enumerate(self.columns):
            if real and place >= 0:
                token = Token(*(x.cpu() for x in held[place]))
                k[:, column] = token.k * token.k_scale[:, None]
                v[:, column] = token.v * token.v_scale[:, None]
            place += real
        first = len(self.columns) - columns
        return k[:, first:], v[:, first:]


def assert_row(store: KVStore, row: int, want: NaiveRow) -> None:
    """The row of the cache is, bit by bit, the naive row."""
    assert int(store.sealed[row]) == len(want.pages)
    assert int(store.open_len[row]) == len(want.open)
    for n, page in enumerate(want.pages):
        at = store.table[row, n]
        for got, expected in zip(store.paged, page, strict=True):
            assert got.bits == expected.bits
            for name in ("k", "v", "meta", "size"):
                assert torch.equal(getattr(got, name)[at].cpu(), getattr(expected, name)[0].cpu()), (name, n)
    assert store.order[row].tolist() == list(range(store.order.shape[1]))
    if want.open:
        count = len(want.open)
        k, k_scale, v, v_scale = (torch.stack(x, 1).cpu() for x in zip(*want.open, strict=True))
        assert torch.equal(store.k_open[row, :, :count].cpu(), k)
        assert torch.equal(store.v_open[row, :, :, :count].mT.cpu(), v)
        assert torch.equal(store.k_scale[row, :, :count].cpu(), k_scale)
        assert torch.equal(store.v_scale[row, :, :count].cpu(), v_scale)


def assert_layer(layer: TurboLayer, want: list[NaiveRow]) -> None:
    """The layer is, bit by bit, the naive rows; what it says of itself and what it dequantises too."""
    store = layer.kv_store()
    assert layer.rows == len(want)
    assert layer.get_seq_length() == layer.seen == len(want[0].columns)
    assert layer.lengths() == [row.held() for row in want]
    assert layer.state.dropped == [row.dropped for row in want]
    if layer.valid is None:
        assert all(all(row.columns) for row in want)
    else:
        assert layer.valid.tolist() == [row.columns for row in want]
    past = layer.seen if layer.window is None else min(layer.seen, layer.window - 1)
    assert layer.get_mask_sizes(3) == (past + 3, layer.seen - past)
    dense = layer.dequantized(past)
    for number, row in enumerate(want):
        assert_row(store, number, row)
        for got, expected in zip(dense, row.values(past, layer.dim), strict=True):
            assert torch.equal(got[number].cpu(), expected)


def assert_same_rows(a: TurboLayer, row_a: int, b: TurboLayer, row_b: int) -> None:
    """A row of one layer is, bit by bit, a row of another."""
    x, y = a.kv_store(), b.kv_store()
    assert x.sealed[row_a] == y.sealed[row_b]
    assert x.open_len[row_a] == y.open_len[row_b]
    sealed, count = int(x.sealed[row_a]), int(x.open_len[row_a])
    if sealed:
        assert torch.equal(x.order[row_a], y.order[row_b])
    for one, other in zip(x.paged, y.paged, strict=True):
        for name in ("k", "v", "meta", "size"):
            own = getattr(one, name)[x.table[row_a, :sealed]]
            assert torch.equal(own, getattr(other, name)[y.table[row_b, :sealed]]), name
    for name, end in (("k_open", 2), ("k_scale", 2), ("v_open", 3), ("v_scale", 2)):
        own = getattr(x, name)[row_a].narrow(end - 1, 0, count)
        assert torch.equal(own, getattr(y, name)[row_b].narrow(end - 1, 0, count)), name


def random_kv(rows: int, tokens: int, dim: int = 16, heads: int = HEADS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values [rows, heads, tokens, dim] whose channels, heads and tokens differ in size."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, rows, heads, tokens, dim, generator=generator)
    size = torch.rand(2, rows, heads, tokens, 1, generator=generator) * torch.rand(dim, generator=generator) * 4
    return k * size[0], v * size[1]


def feed(layer: TurboLayer, k: Tensor, v: Tensor, valid: Tensor | None = None) -> None:
    """One pass, as the attention function does it: append aligned tokens, then commit."""
    chunk = NewColumns(k.shape[2]) if valid is None else columns_of(valid)
    layer.append(chunk.align(k), chunk.align(v), chunk)
    layer.commit()


def filled(
    config: TurboConfig, k: Tensor, v: Tensor, valid: Tensor | None = None, window: int | None = None
) -> TurboLayer:
    """A layer that took all columns in one pass."""
    layer = TurboLayer(config, window)
    feed(layer, k, v, valid)
    return layer


def tensors_of(thing: Any, seen: set[int] | None = None) -> list[Tensor]:
    """Every tensor that can be reached from an object through attributes, containers and dicts."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return [thing]
    parts: list[Any] = []
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, list | tuple | set):
        parts = list(thing)
    elif hasattr(thing, "__dict__"):
        parts = list(vars(thing).values())
    return [tensor for part in parts for tensor in tensors_of(part, seen)]


def allocated(layer: TurboLayer) -> int:
    """Bytes of the storages behind a layer, each counted once; of the host's table, what a device would hold."""
    table, _ = layer.pool.table.on(layer.device), layer.kv_store()
    # an order of heads may be the same numbers, and then shares its storage with the table
    others = [x for x in tensors_of(layer) if x is not table]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in others}
    return sum(storages.values()) + table.nbytes
