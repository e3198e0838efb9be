"""Decode steps that can be replayed: what the host reserves for them beforehand, and counts afterwards.

A step seals the blocks that the step before has filled, appends one token to each row, and attends. It depends only on
tensors that keep their address. The host knows every length without asking the device, and therefore which rows seal,
to which pages, and which work split attention takes.

While a cache waits for a `crop` after each pass (assisted decoding), a step appends any number of tokens and seals
nothing. `crop` then takes tokens back, and seals blocks, in the same memory.
"""

import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from turbo_hf.attention.turbo_attention import sas_threshold
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.pass_mark import STEP, storing
from turbo_hf.cache.rows import RowState
from turbo_hf.cache.storage import ReplayState
from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.graphs.why_not import BLOCKS, linear_layers
from turbo_hf.ops.host_device import require_finite, shared

AHEAD = 8
"""Maximum number of blocks per row for which pages are reserved at a time: once used up, a step is captured again."""

SLACK = 32
"""Pages of a layer that may always be reserved; beyond them, one block per row, or a twentieth of the pages in use.
Unused pages are given back when steps end."""

STEPS = "a decode step"


@dataclass(slots=True)
class _Group:
    """Layers of one window and device with equal row states, which they share as `state`.

    reserved: blocks of each row, sealed or to come, for which there are pages.
    arrived: as in `ReplayState`.
    plans: as in `KVStore`, for each number of tokens per row that a step stores.
    sealed, open: the device's counts of each layer, int64 [layers, B].
    in_step: whether the launch that appends can seal: it reads INT8 open tokens, or latents.
    """

    layers: list[TurboLayer]
    window: int | None
    state: RowState
    arrived: torch.Tensor
    in_step: bool
    reserved: list[int] = field(default_factory=list)
    plans: dict[int, dict[Any, Any]] = field(default_factory=dict)
    sealed: torch.Tensor = field(default_factory=torch.Tensor)
    open: torch.Tensor = field(default_factory=torch.Tensor)

    @property
    def seals_in_step(self) -> bool:
        """Whether a step itself seals the blocks that are due."""
        return self.in_step and not self.state.recording

    def keep_counts(self) -> None:
        """Give all layers one state, and counts that are changed together."""
        device, shape = self.layers[0].device, (len(self.layers), len(self.state.open))
        self.sealed = torch.empty(shape, dtype=torch.int64, device=device)
        self.open = torch.empty_like(self.sealed)
        self.sealed.copy_(shared(self.state.sealed, device))
        self.open.copy_(shared(self.state.open, device))
        for layer, sealed, opened in zip(self.layers, self.sealed, self.open, strict=True):
            layer.state = self.state
            layer.device_counts.keep(self.state, sealed, opened)

    def become(self, state: RowState) -> None:
        """The layers hold this now, on the device too."""
        # an object of its own, by which `intact` knows it: layers that store as many tokens share one
        state = state._replace()
        for layer in self.layers:
            layer.device_counts.counted(self.state, state)
            layer.state = state
        self.state = state

    def plan(self, sealed: list[int]) -> None:
        """Attention of all steps is planned for these numbers of sealed blocks."""
        for plans in self.plans.values():
            for plan in plans.values():
                plan.update(sealed)

    def seals(self) -> bool:
        """Whether the next step seals a block of some row."""
        return not self.state.recording and self.state.is_due()

    def lacks_pages(self) -> bool:
        """Whether blocks are whole for which no page is reserved."""
        return any(map(operator.gt, self.state.with_sealed().sealed, self.reserved))


class ReplayableSteps:
    """The replayed steps of one cache for which `why_no_replay` returned None.

    Args:
        cache: its layers are prepared at once.
        depth: of the call that a step is: `STEP`, or that of the model, if its own call has begun (`PassMark.enter`).
        move: takes the layers to the memory of earlier steps, as `KeptSteps.serve`; None: there are none.

    Attributes:
        moved: whether it did: steps are replayed as they were captured there.
    """

    name = "what decode steps prepare"

    def __init__(self, cache: TurboCache, depth: int = STEP, move: Callable[["ReplayableSteps"], bool] | None = None):
        # while steps run, nothing is read from the device
        cache.require_finite()
        self.mark = cache.mark
        self.mark.require_whole()
        self.cache, self.layers, self._depth = cache, cache.turbo_layers(), depth
        self.linear = linear_layers(cache)
        # the objects that captured steps use, by tokens per row, as `tensors` returned them
        self.used: dict[int, list[Any]] = {}
        # how many passes had begun with the newest step and its tokens, if the next can be replayed like it (`steady`)
        self._steady: tuple[int, int] | None = None
        self._prepare(move)
        cache.captured = weakref.ref(self)

    @storing
    def _prepare(self, move: Callable[["ReplayableSteps"], bool] | None) -> None:
        # one tensor of flags for each device, so that one read tells of all its layers
        self.nonfinite: list[torch.Tensor] = []
        for own in self._by_device().values():
            self.nonfinite.append(torch.cat([layer.nonfinite for layer in own]))
            for index, layer in enumerate(own):
                layer.nonfinite = self.nonfinite[-1][index : index + 1]
        self.groups: list[_Group] = []
        for layer in self.layers:
            if max(layer.state.open) > layer.state.block + layer.state.staying:
                if layer.state.recording:
                    layer.seal_prompt()
                else:
                    layer.commit(whole_prompt=True)
            self._join(layer)
        for group in self.groups:
            group.keep_counts()
        self.moved = move is not None and move(self)
        if not self.moved:
            self._reserve()

    def _by_device(self) -> dict[torch.device, list[TurboLayer]]:
        found: dict[torch.device, list[TurboLayer]] = {}
        for layer in self.layers:
            found.setdefault(layer.device, []).append(layer)
        return found

    def _join(self, layer: TurboLayer) -> None:
        """Add the layer to the group whose state equals its own, which it then shares."""
        in_step = layer.latent or layer.buffer.k.dtype == torch.int8
        known = (layer.window, layer.device, layer.state, in_step)
        alike = (x for x in self.groups if (x.window, x.arrived.device, x.state, x.in_step) == known)
        group = next(alike, None)
        if group is None:
            arrived = torch.zeros(layer.rows, dtype=torch.int32, device=layer.device)
            # a new object: earlier `ReplayableSteps` of the cache are no longer intact, and their `close` does nothing
            group = _Group([], layer.window, layer.state._replace(), arrived, in_step)
            self.groups.append(group)
        group.layers.append(layer)

    def _reserve(self, cropped: bool = False) -> None:
        """Reserve pages for blocks to come; first free those of blocks that have left the window.

        For all layers at once: a step is captured again for any of them. cropped: whether no `crop` will bring tokens
        back.
        """
        # captures of the current pages are of no more use: they must not keep them in memory
        self.used.clear()
        for group in self.groups:
            self._reserve_for(group, cropped)

    def _reserve_for(self, group: _Group, cropped: bool) -> None:
        before, block = group.state, group.state.block
        leaving = [min(n, held) for n, held in zip(before.leaving(group.window), before.sealed, strict=True)]
        if before.recording and not cropped:
            # a crop may bring them back
            leaving = [0] * len(leaving)
        ahead, after = self._ahead(group), before.without_front(leaving)
        group.reserved = [held + more for held, more in zip(after.sealed, ahead, strict=True)]
        for layer in group.layers:
            if any(leaving):
                layer.pool.follow(layer.pool.table.drop_front(before.sealed, leaving, shrink=False))
            layer.pool.follow(layer.pool.table.reserve(after.sealed, ahead))
            layer.buffer.reserve(block * (BLOCKS if before.recording else 1) + before.staying, before.open)
        if group.sealed.numel() and any(leaving):
            group.sealed.copy_(shared(after.sealed, group.sealed.device))
        group.become(after)
        for layer in group.layers:
            # capacity for the tokens of all reserved blocks, and of one open block after them
            layer.bucket_index.reserve((max(group.reserved) + 1) * block)
            if layer.index_keys is not None:
                padding = after.seen - max(after.lengths())
                layer.index_keys.reserve(padding + (max(group.reserved) + 1) * block)

    def _ahead(self, group: _Group) -> list[int]:
        state, rows = group.state, len(group.state.open)
        pages = group.layers[0].pool.pages
        most = min(AHEAD, max(1, SLACK // rows, pages // (20 * rows)))
        # at least those that are whole
        return [max(most, whole) for whole in state.whole()]

    def intact(self) -> bool:
        """Whether nothing but these steps has changed the layers."""
        return all(layer.state is group.state for group in self.groups for layer in group.layers)

    def seals(self) -> bool:
        """Whether the next step seals a block of some row."""
        return any(group.seals() for group in self.groups)

    def needs_pages(self) -> bool:
        """Whether the next step seals a block for which no page is reserved."""
        return any(group.seals() and group.lacks_pages() for group in self.groups)

    def steady(self, tokens: int) -> bool:
        """Whether this step only repeats the one before: no pass or operation came between, nothing is due, and `used`
        holds the objects that it uses. It then needs no `begin`."""
        return self._steady == (self.mark.begun, tokens)

    def unmoved(self, tokens: int) -> bool:
        """Whether the launches of a step use the same objects as those of the captured step over as many tokens."""
        tensors, old = self.tensors(tokens), self.used.get(tokens, [])
        return len(tensors) == len(old) and all(map(operator.is_, tensors, old))

    def require_finite(self) -> None:
        """ValueError if `nonfinite`, which is read from the device, names a layer."""
        require_finite({layer.index: layer.nonfinite for layer in self.layers}, self.mark.ranks)

    @storing
    def begin(self, tokens: int = 1) -> None:
        """Make ready for a step of `tokens` tokens per row: pages or room where needed, and the plans of attention."""
        if self.needs_pages():
            self._reserve()
        for group in self.groups:
            if group.state.recording:
                for layer in group.layers:
                    layer.buffer.reserve(max(group.state.open) + tokens, group.state.open)
                    if layer.index_keys is not None:
                        layer.index_keys.reserve(group.state.seen + tokens)
            if group.seals() and group.seals_in_step:
                group.plan(group.state.with_sealed().sealed)
            elif group.seals():
                self._seal(group)

    def mark_unfinished(self) -> None:
        """Mark the cache until `finish`: what begins meanwhile is a pass of its own, but within `running`.

        Raises:
            ValueError: it is broken already.
        """
        if self._depth == STEP:
            self.mark.begin(depth=STEP)
        self._stored = self.mark.turn(STEPS).stored
        self.mark.writing = STEPS

    @contextmanager
    def running(self, tokens: int = 1) -> Iterator[None]:
        """Inside, a pass over the cache is the step: layers do not count its tokens."""
        for group in self.groups:
            seals = group.seals_in_step
            sealed = group.state.with_sealed().sealed if seals else group.state.sealed
            plans = group.plans.setdefault(tokens, {})
            replay = ReplayState(tuple(sealed), plans, group.arrived, seals)
            for layer in group.layers:
                layer.replay = replay
        try:
            # the layers store, perhaps once more after a capture that failed
            self._stored.clear()
            self.mark.writing = None
            yield
        finally:
            self.mark.writing = STEPS
            self._no_step()

    def _no_step(self) -> None:
        for layer in self.layers:
            layer.replay = None

    @contextmanager
    def capturing(self, tokens: int) -> Iterator[None]:
        """Inside, a step is captured: on all ranks, as it holds their sums, or on none."""
        self.used[tokens] = self.tensors(tokens)
        with self.mark.ranks.together():
            yield

    def cancel(self) -> None:
        """After a capture that failed: nothing has been stored."""
        self._no_step()
        self._stored.clear()
        self._end()

    def _end(self) -> None:
        """The step has ended."""
        self.mark.writing = None
        if self._depth == STEP:
            # else the model's own call is still to end
            self.mark.end()

    def tensors(self, tokens: int = 1) -> list[Any]:
        """The objects that the launches of a step use. As long as they are the same, it can be replayed."""
        plans = [plan for group in self.groups for plan in group.plans.get(tokens, {}).values()]
        tensors: list[Any] = [plan.words for plan in plans]
        for layer in self.layers:
            pool, counts, state = layer.pool, layer.device_counts, layer.state
            tensors += (pool.paged, pool.table.on(layer.device), counts.sealed(state), layer.order)
            tensors += (layer.buffer.k, counts.open(state), layer.nonfinite, layer.bucket_index.buckets)
            tensors.append(layer.bucket_index.spans)
            tensors += [] if layer.selector is None else layer.selector.tensors()
            # where an indexer names columns, steps know which of them hold tokens
            tensors += [] if layer.index_keys is None else [layer.index_keys.kept, layer.valid_prefix]
            # of the next step; the threshold is cached, so `is` tells whether it changed
            tensors.append(sas_threshold(layer.config, layer.seen + tokens))
        for state in self.linear:
            tensors += (*state.conv_states.values(), *state.recurrent_states.values())
        return tensors

    @storing
    def close(self) -> None:
        """Seal blocks that are due, and give back unused reservations. No replay may follow."""
        if self.intact():
            for layer in self.layers:
                # NaN in the block is reported at the next use of the cache
                layer.commit(check_later=True)
                layer.pool.follow(layer.pool.table.trim(layer.state.sealed))
                layer.bucket_index.trim(max(layer.lengths()))
                if layer.index_keys is not None:
                    layer.index_keys.trim(layer.seen)

    def finish(self, tokens: int = 1, surplus: int = 0) -> None:
        """Count what the step has stored: `tokens` per row. The newest `surplus` are taken back."""
        for group in self.groups:
            before = group.state.with_sealed() if group.seals_in_step else group.state
            group.become(before.stored(tokens - surplus, None, decoding=True))
            if surplus:
                group.open.sub_(surplus)
            for layer in group.layers:
                if layer.selector is not None:
                    layer.selector.count(layer.lengths(), [1] * layer.rows, layer.heads)
        # looked up here, where the device is busy with the step, and not before the next one, which it waits for
        rests = self._depth == STEP and not any(group.state.recording or group.seals() for group in self.groups)
        self._steady = (self.mark.begun, tokens) if rests and self.unmoved(tokens) else None
        self._end()

    @storing
    def crop(self, columns: int) -> bool:
        """`TurboCache.crop` without a new capture, while blocks wait for it: True if it reaches no sealed block.

        False: nothing has changed.

        Raises:
            ValueError: a block that would be sealed may hold NaN or Inf. The cache is then broken.
        """
        groups, first = self.groups, self.layers[0]
        if self.linear or not (first.state.recording and self.intact()):
            return False
        if any(min(group.state.open) < columns for group in groups):
            return False
        after = [group.state.cropped(columns, [columns] * first.rows) for group in groups]
        if any(state.sealed != group.state.sealed for state, group in zip(after, groups, strict=True)):
            return False
        left = first.seen - columns
        masks = [layer.valid_prefix for layer in self.layers if layer.valid_prefix is not None]
        if any(mask.shape[1] > left for mask in masks) or any(layer.given_mask is not None for layer in self.layers):
            return False
        for state, group in zip(after, groups, strict=True):
            if columns:
                group.open.sub_(columns)
                group.become(state)
        due = [group for group in groups if group.state.is_due()]
        if due:
            self.require_finite()
        if any(group.lacks_pages() for group in due):
            self._reserve(cropped=True)
        for group in due:
            self._seal(group)
        return True

    def _seal(self, group: _Group) -> None:
        """Seal all whole blocks of open tokens, with a launch or two per layer; nothing moves."""
        before, after, whole = group.state, group.state.with_sealed(), group.state.whole()
        gone, device = [count * before.block for count in whole], group.open.device
        group.sealed.add_(shared(whole, device))
        group.become(before._replace(sealed=after.sealed))
        for layer in group.layers:
            layer.seal(before, whole)
            layer.buffer.drop_front_in_place(gone, after.open)
        group.open.sub_(shared(gone, device))
        group.become(after)
        group.plan(after.sealed)

    @storing
    def select_rows(self, rows: list[int]) -> bool:
        """`TurboCache.reorder_cache` without a new capture: True if every row is as long as the one that it replaces.

        False: nothing has changed.
        """
        unequal = any(group.state.selected(rows) != group.state for group in self.groups)
        # of latents: as `_bring_runner` in `patching/generate_methods.py`
        apart = self.linear or any(layer.bucket_index.bucketed or layer.latent for layer in self.layers)
        if unequal or apart or not self.intact() or any(layer.given_mask is not None for layer in self.layers):
            return False
        # each mask with what becomes of it: layers may share one
        masks = dict[int, tuple[torch.Tensor, torch.Tensor]]()
        for layer in self.layers:
            layer.pool.follow(layer.pool.table.select_rows_in_place(layer.state.sealed, rows))
            mask = layer.valid_prefix
            if mask is not None:
                if id(mask) not in masks:
                    masks[id(mask)] = mask, mask[shared(rows, mask.device)]
                layer.valid_prefix = masks[id(mask)][1]
        for own in self._by_device().values():
            own[0].ops.select_rows([x for layer in own for x in layer.buffer.tensors()], rows)
        return True
