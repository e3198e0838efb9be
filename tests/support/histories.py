"""Random histories of a cache, drawn, played and judged by a plain oracle.

A history is a list of acts, each with a seed of its own: passes of all lengths over left-padded and ragged batches,
crops, reorders, selections, repeats, copies, resets, recording, and wrong calls.
What the cache must hold is kept beside it as lists of tokens. Every answer is compared with the unpatched model's to
the same tokens in one pass from nothing, and, where a cache loses something, with that of a row that lived alone.
"""

import copy
import pickle
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import torch
from histories_support import (
    CONFIGS,
    FAMILIES,
    LINEAR_FAMILIES,
    MODES,
    TOKENS,
    WINDOWED,
    Compressed,
    Row,
    Subject,
    error_of,
    error_of_padding,
    forward,
    largest,
    oracle,
    subject,
)
from torch import Tensor

from turbo_hf.cache.layer import TurboLayer

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


class Player(Acts):
    """Plays a history."""

    # --- the life of a history ---------------------------------------------------------------------------------

    def play(self) -> None:
        """Raises: Fault, or whatever the cache raised that it should not."""
        self.worlds = [self.new_world(Random(self.history.acts[0][1]))]
        for number, (name, seed) in enumerate(self.history.acts):
            self.number, r = number, Random(seed)
            world = self.worlds[-1]
            if name == "wrong":
                self.wrong(world, r)
            else:
                self.run(world, r, name)
        self.number += 1
        for world in self.worlds:
            logits = self.finish(world)
        self.check_store(world)
        self.check_alone(world, logits)
        self.judge()

    def run(self, world: World, r: Random, name: str) -> None:
        """An act that nothing disturbs."""
        act = getattr(self, name)(world, r)
        if act is None:
            return
        try:
            with MODES[r.choice(list(MODES))]():
                result = act.call()
        except ValueError as error:
            if not (name == "crop" and self.may_refuse_crop()):
                raise Fault(f"{name} is refused: {error}") from error
            self.counts["refused"] += 1
            return
        act.done(result)
        self.counts[name] += 1

    def may_refuse_crop(self) -> bool:
        """Whether there are layers that forget."""
        return self.history.family in (*LINEAR_FAMILIES, *WINDOWED)

    def finish(self, world: World) -> Tensor:
        """Logits of a last pass."""
        world.cache.stop_recording()
        for row in world.life:
            if row is not None:
                row.append(("stop", None))
        new: list[Row] = [[5 + n] for n in range(len(world.rows))]
        logits = self.ask(world, new, world.rows)
        self.note(world, new, logits, "patched")
        return logits

    def wrong(self, world: World, r: Random) -> None:
        """A call that must be refused, and change nothing."""
        count, past, cache = len(world.rows), world.past, world.cache
        if not past:
            return
        passes: list[Callable[[], Any]] = []
        calls: list[Callable[[], Any]] = [
            lambda: cache.crop(1), lambda: cache.crop(-past - 1), lambda: cache.reorder_cache(torch.tensor([count])),
            lambda: cache.batch_select_indices([-count - 1]), lambda: cache.batch_select_indices([]),
            lambda: cache.batch_repeat_interleave(0), lambda: cache.offload(0),
        ]  # fmt: skip
        if self.history.family not in LINEAR_FAMILIES:
            changed: list[Row] = [list(row) for row in world.rows]
            changed[0][0] = None if changed[0][0] is not None else 1
            passes.append(lambda: self.ask(world, [[1]] * count, changed))
            passes.append(lambda: self.ask(world, [[1]] * (count + 1), [*world.rows, world.rows[0]]))
        try:
            with MODES[r.choice(list(MODES))]():
                number = r.randrange(len(calls) + len(passes))
                (calls + passes)[number]()
        except ValueError:
            self.counts["wrong"] += 1
            try:
                cache.mark.require_whole()
            except ValueError:
                # earlier layers have stored what a later one has refused
                cache.reset()
                self.emptied(world)
            return
        raise Fault(f"wrong call {number} is accepted")

    def judge(self) -> None:
        """Compare all answers with the oracle's."""
        made, asked = self.made, {seen.tokens for seen in self.seen}
        ordered = sorted(asked)
        # what is the beginning of another row is answered with it
        whole = [row for row, later in zip(ordered, [*ordered[1:], ()], strict=True) if later[: len(row)] != row]
        answers = oracle(made, whole)
        for seen in self.seen:
            row = next(row for row in whole if row[: len(seen.tokens)] == seen.tokens)
            want = answers[row][len(seen.tokens) - len(seen.logits) : len(seen.tokens)]
            error = largest(seen.logits - want)
            # a block that is opened and sealed again is rounded again
            allowed = made.tolerance if made.exact else 2 * made.bound * (1 + seen.reopened)
            if error > allowed and not made.exact:
                # some tokens lose more than others
                allowed = 2 * error_of(made, seen.tokens) * (1 + seen.reopened)
            if error > allowed and self.history.family in LINEAR_FAMILIES:
                allowed = max(allowed, 2 * error_of_padding(made, seen.tokens))
            if not error <= allowed:
                raise Fault(
                    f"act {seen.act}: off by {error:.3g}, allowed {allowed:.3g}, after {len(seen.tokens)} tokens"
                )

    def check_store(self, world: World) -> None:
        """The first layer holds what it would hold of a row alone, fed at once, bit by bit."""
        layer = world.cache.layers[0 if self.history.family not in LINEAR_FAMILIES else 1]
        n = self.number % len(world.rows)
        if not isinstance(layer, TurboLayer) or world.reopened[n] or self.history.family == "qwen3_next":
            return
        tokens = tokens_of(world.rows[n])
        alone = self.made.new_cache()
        with torch.no_grad():
            forward(self.made.plain, [list(tokens)], [[]], alone)
        other: Any = alone.layers[world.cache.layers.index(layer)]
        width = layer.get_mask_sizes(0)[0]
        valid = [at for at, column in enumerate(world.rows[n][-width:]) if column is not None]
        for name in ("keys", "values"):
            got, want = (getattr(each, name) for each in (layer, other))
            if not torch.equal(got[n][:, valid][:, -want.shape[2] :], want[0][:, -len(valid) :]):
                raise Fault(f"{name} of row {n} in the first compressed layer are not those of the row alone")

    def check_alone(self, world: World, logits: Tensor) -> None:
        """A row that lived through the same alone ends with the same answer."""
        n = (self.number + 1) % len(world.rows)
        life = world.life[n]
        if life is None or self.made.exact or self.history.acts[-1][1] % 2:
            return
        # Transformers' linear layers know no padding in a row alone
        twice = 1 + (self.history.family in LINEAR_FAMILIES)
        cache, out = self.made.new_cache(), logits
        other = World(cache, [[] for _ in range(twice)], [None] * twice, [0] * twice)
        with torch.no_grad():
            for what, how in life:
                if what == "start":
                    cache.activate_past_recording()
                elif what == "stop":
                    cache.stop_recording()
                elif what == "crop":
                    cache.crop(-how)
                    other.rows = [row[: len(row) - how] for row in other.rows]
                else:
                    if what == "told":
                        tell(cache, [how] * twice)
                    out = self.ask(other, [how] * twice, other.rows, what)
                    other.rows = [[*row, *how] for row in other.rows]
        error = largest(out[0, -1] - logits[n, -1])
        if not error <= self.made.tolerance:
            raise Fault(f"row {n} alone ends off by {error:.3g}, allowed {self.made.tolerance:.3g}")


ACTS = {"advance": 10, "crop": 4, "choose": 3, "fork": 2, "record": 2, "look": 1, "reset": 1, "wrong": 1}
"""Acts, and how often they are drawn."""


def draw(seed: int) -> History:
    """The history of a seed."""
    r = Random(seed)
    family, config = r.choice(list(FAMILIES)), r.choice(list(CONFIGS))
    names = ["advance", *r.choices(list(ACTS), list(ACTS.values()), k=r.randint(2, 9))]
    return History(family, config, tuple((name, r.getrandbits(32)) for name in names))


def fault_of(history: History, counts: Counter[str] | None = None) -> str | None:
    """What is wrong with a cache of this history; None: nothing."""
    player = Player(history, subject(history.family, history.config), counts=Counter() if counts is None else counts)
    try:
        player.play()
    except Fault as fault:
        return f"act {player.number}: {fault}"
    except Exception as error:
        where = "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[-3:]))
        return f"act {player.number}: {type(error).__name__}: {error}\n{where}"
    return None


def shrunk(history: History) -> History:
    """As few acts of a faulty history as still show a fault."""
    at = 1
    while at < len(history.acts):
        shorter = history._replace(acts=history.acts[:at] + history.acts[at + 1 :])
        if fault_of(shorter) is not None:
            history = shorter
        else:
            at += 1
    return history
