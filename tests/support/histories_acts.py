"""What is done to a cache in a random history, and what it must hold afterwards."""

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import torch
from histories_support import (
    LINEAR_FAMILIES,
    TOKENS,
    WINDOWED,
    Compressed,
    Row,
    Subject,
    forward,
    largest,
)
from torch import Tensor

LONGEST = 150
"""Columns from which a history makes no more passes over prompts."""
MOST_ROWS = 4


class Fault(Exception):
    """Something that the cache got wrong."""


class History(NamedTuple):
    """acts: (name, seed) in order."""

    family: str
    config: str
    acts: tuple[tuple[str, int], ...]


class Seen(NamedTuple):
    """An answer. tokens: of the row, up to and with those asked about, the newest `len(logits)`; reopened: as below."""

    act: int
    tokens: tuple[int, ...]
    logits: Tensor
    reopened: int


@dataclass
class World:
    """A cache and what it must hold.

    life: what has happened to each row, for `check_alone`; None: not known. reopened: of each row how many crops have
    reached a sealed block.
    """

    cache: Compressed
    rows: list[Row]
    life: list[list[tuple[str, Any]] | None]
    reopened: list[int]

    @property
    def past(self) -> int:
        """Columns."""
        return len(self.rows[0])


class Act(NamedTuple):
    """call: does it to the cache. done: notes the result."""

    call: Callable[[], Any]
    done: Callable[[Any], None]


def tokens_of(row: Row) -> tuple[int, ...]:
    """The row without padding."""
    return tuple(column for column in row if column is not None)


def tokens_begin(row: Row) -> int:
    """The column of a row's first token."""
    return next((at for at, column in enumerate(row) if column is not None), len(row))


def tell(cache: Compressed, new: list[Row]) -> None:
    """What `TurboCache(attention_mask=...)` tells a cache."""
    mask = torch.tensor([[column is not None for column in row] for row in new])
    for layer in cache.turbo_layers():
        layer.given_mask = mask


@dataclass
class Acts:
    """The acts of one history. number: of the one that is played."""

    history: History
    made: Subject
    worlds: list[World] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    number: int = 0

    def new_world(self, r: Random) -> World:
        rows, cache = r.randint(1, 3), self.made.new_cache()
        # every other history stores a prompt after its pass, as `generate` does on a GPU
        cache.deferred.wanted = self.history.acts[0][1] % 2 == 0
        return World(cache, [[] for _ in range(rows)], [[] for _ in range(rows)], [0] * rows)

    def advance(self, world: World, r: Random) -> Act | None:
        """A pass: a prompt, a chunk of it, a step, or several tokens; ragged or not; patched or not."""
        new = self.columns(world, r)
        rows = [[*old, *own] for old, own in zip(world.rows, new, strict=True)]
        route, given = "patched", None
        even = all(column is not None for row in new for column in row)
        inside = any(None in row[tokens_begin(row) :] for row in rows)
        # a cache of linear layers stays with the patched model, and so does one whose last pass was refused
        family, begun = self.history.family, world.cache.mark.now is not None
        plain = not (begun or family in LINEAR_FAMILIES or (inside and family in WINDOWED))
        if plain and r.random() < 0.15:
            if even:
                route = "plain"
            elif not world.past and not any(layer.is_initialized for layer in world.cache.turbo_layers()):
                # such a model does not show the cache its padding
                route = given = "told"
        mask = r.random() < 0.5

        def call() -> Tensor:
            if given is not None:
                tell(world.cache, new)
            return self.ask(world, new, world.rows, route, mask)

        return Act(call, lambda logits: self.note(world, new, logits, route))

    def columns(self, world: World, r: Random) -> list[Row]:
        """New columns of each row."""
        count, past = len(world.rows), world.past
        linear = self.history.family in LINEAR_FAMILIES
        width = r.randint(1, 48)
        if past:
            width = r.choice((1, 1, 1, r.randint(2, 6), r.randint(7, 16), r.randint(17, 40)))
            width = min(width, 6) if past > LONGEST else width
        new: list[Row] = [[r.randrange(1, TOKENS) for _ in range(width)] for _ in range(count)]
        # Transformers' linear layers take padding for tokens in a row alone and after the prompt
        fixed = linear and (past or count == 1)
        if r.random() < (0.2 if past else 0.5) and not fixed:
            left = linear or r.random() < 0.7
            for row in new:
                hidden = r.randint(0, width - 1 if not past else width)
                for at in range(hidden) if left else r.sample(range(width), hidden):
                    row[at] = None
            if not any(tokens_of(row) for row in new):
                new[0][-1] = 1
        return new

    def crop(self, world: World, r: Random) -> Act | None:
        """Take the newest columns off: few, many, or all of them."""
        past = world.past
        count = min(past, r.choice((0, 1, r.randint(1, 5), r.randint(1, 40), r.randint(1, 40), past)))
        rows = [row[: past - count] for row in world.rows]

        def call() -> None:
            world.cache.crop(-count)

        reached = self.reopened(world, count)

        def done(_: None) -> None:
            world.rows = rows
            world.reopened = [n + more for n, more in zip(world.reopened, reached, strict=True)]
            self.lived(world, ("crop", count))

        return Act(call, done)

    def reopened(self, world: World, count: int) -> list[bool]:
        """Of each row whether a crop by `count` columns reaches a sealed block."""
        gone = [len(tokens_of(row[world.past - count :])) for row in world.rows]
        layers = [layer for layer in world.cache.turbo_layers() if layer.is_initialized]
        return [any(n > layer.state.open[row] for layer in layers) for row, n in enumerate(gone)]

    def choose(self, world: World, r: Random) -> Act | None:
        """Reorder, select or repeat rows."""
        if not world.past:
            return None
        count, cache = len(world.rows), world.cache
        way = r.choice(("reorder", "list", "tuple", "mask", "slice", "repeat"))
        index = [r.randrange(count) for _ in range(r.randint(1, MOST_ROWS))]
        given: Any = index
        if way == "mask":
            kept = [r.random() < 0.6 for _ in range(count)]
            kept[r.randrange(count)] = True
            given, index = r.choice((kept, torch.tensor(kept))), [n for n in range(count) if kept[n]]
        elif way == "slice":
            given, index = slice(-1, None), [count - 1]
        elif way == "tuple":
            given = tuple(n - count for n in index)
        if way == "repeat" and 2 * count <= MOST_ROWS:
            index = [n for n in range(count) for _ in range(2)]
            call = lambda: cache.batch_repeat_interleave(2)  # noqa: E731
        elif way == "reorder":
            call = lambda: cache.reorder_cache(torch.tensor(index))  # noqa: E731
        else:
            call = lambda: cache.batch_select_indices(given)  # noqa: E731
        rows = [list(world.rows[n]) for n in index]

        def done(_: None) -> None:
            world.rows, world.reopened = rows, [world.reopened[n] for n in index]
            lives = [world.life[n] for n in index]
            world.life = [None if life is None else list(life) for life in lives]

        return Act(call, done)

    def fork(self, world: World, r: Random) -> Act | None:
        """A copy, with which the history goes on beside the original, or the other way round."""
        pickled, first = r.random() < 0.2, r.random() < 0.5

        def call() -> Any:
            return pickle.loads(pickle.dumps(world.cache)) if pickled else copy.deepcopy(world.cache)

        def done(twin: Any) -> None:
            other = copy.deepcopy({**vars(world), "cache": None})
            self.worlds = self.worlds[-2:]
            self.worlds.insert(0 if first else len(self.worlds), World(**{**other, "cache": twin}))

        return Act(call, done)

    def record(self, world: World, r: Random) -> Act | None:
        """Begin or end the recording of what may be cropped."""
        begin = r.random() < 0.6
        call = world.cache.activate_past_recording if begin else world.cache.stop_recording
        return Act(call, lambda _: self.lived(world, ("start" if begin else "stop", 0)))

    def look(self, world: World, r: Random) -> Act | None:
        """Read keys and values as users of a `DynamicCache` do."""
        cache = world.cache

        def call() -> list[Any]:
            return [(layer.keys, layer.values) for layer in cache.turbo_layers() if layer.is_initialized]

        def done(shown: list[Any]) -> None:
            width = cache.get_mask_sizes(0, len(cache.layers) - 1)[0]
            for k, v in shown:
                if k.shape != v.shape or k.shape[0] != len(world.rows) or largest(k) == torch.inf:
                    raise Fault(f"keys {k.shape}, values {v.shape} of {len(world.rows)} rows")
            if shown and shown[-1][0].shape[2] != width:
                raise Fault(f"keys of {shown[-1][0].shape[2]} columns, not {width}")

        return Act(call, done)

    def reset(self, world: World, r: Random) -> Act | None:
        """Forget everything."""
        return Act(world.cache.reset, lambda _: self.emptied(world, r))

    # --- what is noted ----------------------------------------------------------------------------------------

    def ask(self, world: World, new: list[Row], past: list[Row], route: str = "patched", mask: bool = True) -> Tensor:
        """Logits of a pass."""
        return forward(self.made.patched if route == "patched" else self.made.plain, new, past, world.cache, mask)

    def note(self, world: World, new: list[Row], logits: Tensor, route: str) -> None:
        """The pass has been made."""
        for n, own in enumerate(new):
            world.rows[n] = [*world.rows[n], *own]
            real = [at for at, column in enumerate(own) if column is not None]
            if real:
                kept = logits[n, real].detach().clone()
                self.seen.append(Seen(self.number, tokens_of(world.rows[n]), kept, world.reopened[n]))
            life = world.life[n]
            if life is not None:
                life.append((route, list(own)))

    def lived(self, world: World, event: tuple[str, Any]) -> None:
        for life in world.life:
            if life is not None:
                life.append(event)

    def emptied(self, world: World, r: Random | None = None) -> None:
        fresh = self.new_world(r or Random(self.number))
        world.rows, world.life, world.reopened = fresh.rows, fresh.life, fresh.reopened
