"""Random histories of a cache, drawn, played and judged by a plain oracle.

A history is a list of acts, each with a seed of its own: passes of all lengths over left-padded and ragged batches,
crops, reorders, selections, repeats, copies, resets, recording, and wrong calls.
What the cache must hold is kept beside it as lists of tokens. Every answer is compared with the unpatched model's to
the same tokens in one pass from nothing, and, where a cache loses something, with that of a row that lived alone.
"""

import traceback
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from histories_acts import Acts, Fault, History, World, tell, tokens_of
from histories_support import (
    CONFIGS,
    FAMILIES,
    LINEAR_FAMILIES,
    MODES,
    WINDOWED,
    Row,
    error_of,
    error_of_padding,
    forward,
    largest,
    oracle,
    subject,
)
from torch import Tensor

from turbo_hf.cache.layer import TurboLayer


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
            lambda: cache.crop(1),
            lambda: cache.crop(-past - 1),
            lambda: cache.reorder_cache(torch.tensor([count])),
            lambda: cache.batch_select_indices([-count - 1]),
            lambda: cache.batch_select_indices([]),
            lambda: cache.batch_repeat_interleave(0),
            lambda: cache.offload(0),
        ]
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


ACTS = {
    "advance": 10,
    "crop": 4,
    "choose": 3,
    "fork": 2,
    "record": 2,
    "look": 1,
    "reset": 1,
    "wrong": 1,
}
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
