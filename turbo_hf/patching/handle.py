"""What `patch()` returns: the handle of the patch, a report of what it did, and the caches that it makes."""

import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from turbo_hf.attention.registration import register
from turbo_hf.attention.turbo_attention import NAME
from turbo_hf.cache.memory import SHOWN, Memory, group_layers, measure
from turbo_hf.cache.passes import DeferredStores
from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.graphs.compiled_layers import CompiledLayers
from turbo_hf.graphs.why_not import hooked_module
from turbo_hf.layout import HeadGroups, in_words
from turbo_hf.patching.norms import restore_norms
from turbo_hf.patching.other_threads import alone
from turbo_hf.ranks import ALONE, Ranks
from turbo_hf.sparse.selectors import Selectivity, Selector


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What was done with one layer.

    Args:
        index: the layer's number.
        groups: (width, number of KV heads) as in `TurboConfig.head_groups`, widest first; (): in full precision.
        window: how many tokens a query sees; None: all.
        reason: why it is not stored at the config's widths; "" if it is.
        refused: whether it stays in full precision because it cannot be compressed.
        kept_int8: whether it is kept at 8 bit although the config may ask for less.
        bias_step: the INT8 step that its key bias forces, in standard deviations of a key channel, if that is why it is
            kept at 8 bit; else 0.
        balanced: whether its keys are divided by a number per channel before they are rounded, and queries multiplied
            by it, as a key bias makes channels uneven.
        latent: whether it keeps latents (MLA), which count as one head.
    """

    index: int
    groups: HeadGroups
    window: int | None
    reason: str
    refused: bool = False
    kept_int8: bool = False
    bias_step: float = 0.0
    balanced: bool = False
    latent: bool = False

    @property
    def storage(self) -> str:
        """The groups in words: "2 x 4 bit", "2 x 4/2 bit" for keys and values, "8 bit" for a layer kept at 8 bit,
        "latent 4 bit", or "dense"."""
        if self.latent and self.groups:
            return f"latent {self.groups[0][0]} bit"
        if self.kept_int8:
            return "8 bit"
        return " + ".join(f"{heads} x {in_words(width)} bit" for width, heads in self.groups) or "dense"


@dataclass(frozen=True, slots=True)
class Report:
    """What `patch` did, as a table under `str()`, with layers that are alike in one line.

    Args:
        model: the class name of the model.
        family: the name of its family, or a note that it runs on the generic path.
        notes: what is special about the family's attention.
        config: the config that was asked for.
        layers: what was done with each layer, in order.
        prompts: how the attention of prompts is computed.
        steps: how decode steps run.
        warnings: the warnings that were issued, or that strict "fallback" only logged.
        heads: what decided the widths of layers, or which heads get the low bits; "" if all have the same width.
        sparse: for each layer, what chooses the keys that decode steps read, or why they read all of them; {} without
            `TurboConfig.sparse`.
        selectivity: for each sparse layer, what its steps have read since the patch was applied.
        serving: whether continuous batching can run, and the prompt tokens that stored prefixes have saved.
        ranks: of a tensor parallel model, how many share it and which heads each of them holds; "" for one process.
            Heads of `layers`, and `selectivity`, are those of this rank.
        check: what `patch(check=True)` found; "" without it.
        generated: what the last `generate` has stored its tokens in.
    """

    model: str
    family: str
    notes: str
    config: TurboConfig
    layers: tuple[LayerReport, ...]
    prompts: str
    steps: str
    warnings: tuple[str, ...]
    heads: str = ""
    sparse: Mapping[int, str] = field(default_factory=dict)
    selectivity: tuple[Selectivity, ...] = ()
    serving: str = ""
    ranks: str = ""
    check: str = ""
    generated: str = ""

    def __str__(self) -> str:
        lines = [f"{self.model} ({self.family})", *([f"  {self.notes}"] if self.notes else [])]
        lines += [f"  {self.ranks}"] if self.ranks else []
        lines += [f"  {at}: {words}" for at, words in group_layers((at.index, self._of(at)) for at in self.layers)]
        lines += self._read()
        of_all = (self.heads, self.prompts, self.steps, self.serving, self.generated, self.check)
        lines += [f"  {text}" for text in of_all if text]
        return "\n".join(lines + [f"  note: {text}" for text in self.warnings])

    def _read(self) -> list[str]:
        """The share of keys that each sparse layer has read, in words; for many layers the lowest and the highest."""
        counted = [read for read in self.selectivity if read.there]
        groups = group_layers((read.layer, str(read)) for read in counted)
        if len(groups) <= SHOWN:
            return [f"  {layers}: {words}" for layers, words in groups]
        least, most = min(counted, key=attrgetter("share")), max(counted, key=attrgetter("share"))
        return [
            f"  least, layer {least.layer}: {least}",
            f"  most, layer {most.layer}: {most}",
            f"  all {len(counted)} sparse layers: see `selectivity`",
        ]

    def _of(self, at: LayerReport) -> str:
        """What was done with one layer, in words."""
        window = f", window {at.window}" if at.window else ""
        reason = f"; {at.reason}" if at.reason else ""
        sparse = f"; {self.sparse[at.index]}" if at.index in self.sparse else ""
        balanced = ", keys balanced" if at.balanced else ""
        return f"{at.storage}{balanced}{window}{reason}{sparse}"


class HeadSizes(NamedTuple):
    """Channels of a KV head; of latent attention those of the latent and of the rotary part, and of the keys and values
    that all heads make of them."""

    dim: int
    rotary_dim: int | None = None
    expanded: int = 0


@dataclass(slots=True)
class CacheMaker:
    """Makes the caches of a patched model, and remembers the newest for `Handle.memory`.

    Args:
        layers: number of the model's layers.
        config: the options of the patch.
        int8_layers, uncompressed_layers: layers kept at 8 bit, and in Transformers' own cache.
        head_orders: KV heads by their need of bits, for each layer that a calibration covers.
        selectors: the selectors of the sparse layers, by number.
        balances: what keys are divided by, for each layer that is balanced.
        made: number of caches made so far.
        newest: the latest cache, as long as it exists.
        measured: bytes of the latest cache when it was released.
        unmeasured: its layers, and what they were still to store, as long as nobody has asked.
        active: whether the patch is on.
        ranks: those that share the model.
        told: caches of Transformers' own that have caused a warning.
        groups: of each layer, (width, KV heads) of each width; (): not compressed.
        sizes: those of the heads of compressed layers.
        why_not_served: why continuous batching cannot run; None: it can.
        why_not_captured: why its steps cannot be CUDA graphs, as far as the patch knows; None: they can.
        serving: what its managers have in common; None before the first one.
        generated: the cache of the last `generate`, or words in its place.
    """

    layers: int
    config: TurboConfig
    int8_layers: tuple[int, ...]
    uncompressed_layers: tuple[int, ...]
    head_orders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    selectors: Mapping[int, Selector] = field(default_factory=dict)
    balances: Mapping[int, torch.Tensor] = field(default_factory=dict)
    made: int = 0
    newest: "weakref.ref[TurboCache] | None" = None
    measured: Memory | None = None
    unmeasured: tuple[list[Any], DeferredStores] | None = None
    active: bool = True
    ranks: Ranks = ALONE
    told: "weakref.WeakSet[Cache]" = field(default_factory=weakref.WeakSet)
    groups: tuple[HeadGroups, ...] = ()
    sizes: frozenset[HeadSizes] = frozenset()
    why_not_served: str | None = None
    why_not_captured: str | None = None
    serving: Any = None
    generated: "weakref.ref[TurboCache] | str" = "none since the patch"

    def make(self, model_config: PreTrainedConfig) -> TurboCache:
        """A cache with the choices of this patch; for the first layers only, if the config has fewer layers."""
        count = model_config.get_text_config(decoder=True).num_hidden_layers
        config = self.config
        if count < self.layers:
            # the layers at 8 bit that the config names are in the patch's own list
            dense = tuple(index for index in config.dense_layers if index < count)
            bits: Any = config.layer_bits and config.layer_bits[:count]
            config = replace(config, dense_layers=dense, int8_layers=(), layer_bits=bits)
        cache = TurboCache(
            model_config,
            config,
            int8_layers=[index for index in self.int8_layers if index < count],
            uncompressed_layers=[index for index in self.uncompressed_layers if index < count],
            head_orders={index: order for index, order in self.head_orders.items() if index < count},
            selectors={index: selector for index, selector in self.selectors.items() if index < count},
            balances={index: balance for index, balance in self.balances.items() if index < count},
        )
        cache.mark.ranks = self.ranks
        # `memory()` leaves out drafts by the first layers alone
        if count == self.layers:
            self.made, self.unmeasured = self.made + 1, None
            self.newest = weakref.ref(cache)
            # the layers outlive the cache for one call, so that its last state can be measured
            weakref.finalize(cache, self._measure, self.made, cache.layers, cache.deferred).atexit = False
        return cache

    def _measure(self, number: int, layers: list[Any], deferred: DeferredStores) -> None:
        if number != self.made:
            return
        if deferred:
            # a prompt alone, which is stored if anyone asks: the first token does not wait for it
            deferred.hollow()
            self.unmeasured = layers, deferred
        else:
            self.measured = measure(layers, self.ranks.count)

    def last_generate(self) -> str:
        """For the report."""
        if isinstance(self.generated, str):
            return f"last generate: {self.generated}"
        cache = self.generated()
        # references to one cache are one object
        if cache is None and self.generated is not self.newest:
            return "last generate: in a TurboCache, which is gone"
        now = self._of_newest() if cache is None else cache.memory()
        stored = sum(any(count for kind, count in layer.items() if kind != "dense") for layer in now.layers)
        return f"last generate: {now.tokens:,} tokens in a TurboCache, {stored} of {len(now.layers)} layers compressed"

    def forget(self, cache: TurboCache, other: Any) -> None:
        """The model has replaced `cache` by another one, so `memory` no longer reports it."""
        self.generated = f"not compressed (the model has put a {type(other).__name__} in the place of its TurboCache)"
        if self.newest is not None and self.newest() is cache:
            self.made, self.newest, self.measured, self.unmeasured = self.made + 1, None, None, None

    def memory(self) -> Memory:
        """Bytes of the newest cache: as it is now, or as it was when it was released."""
        served = None if self.serving is None else self.serving.memory()
        if served is not None:
            memory: Memory = served
            return memory
        return self._of_newest()

    def _of_newest(self) -> Memory:
        cache = self.newest() if self.newest is not None else None
        if cache is not None:
            return cache.memory()
        if self.unmeasured is not None:
            layers, deferred = self.unmeasured
            with suppress(ValueError):
                deferred.store()
            self.measured, self.unmeasured = measure(layers, self.ranks.count), None
        return self.measured or Memory((), 0, 0, self.ranks.count)

    def __reduce__(self) -> Any:
        # a copied or pickled model makes its own caches, and needs the names in its config to be registered
        names = ("layers", "config", "int8_layers", "uncompressed_layers", "ranks")
        kept = {name: getattr(self, name) for name in names}
        kept |= {name: dict(getattr(self, name)) for name in ("head_orders", "selectors", "balances")}
        return _maker_of_a_copy, (kept,)


def _maker_of_a_copy(kept: dict[str, Any]) -> CacheMaker:
    register()
    # a copy has no handle, so no message can name one
    return CacheMaker(**kept, active=False)


@dataclass(slots=True, repr=False, eq=False)
class Handle:
    """A patch that is on. `remove()` takes it off, as does leaving a `with` block."""

    _model: PreTrainedModel
    _report: Report
    _maker: CacheMaker
    _hooks: list[RemovableHandle]
    _replaced: list[tuple[torch.nn.Module, str, Any]]
    _previous: str | dict[str, str]
    _norms: list[tuple[torch.nn.Module, type]]
    _compiled: CompiledLayers | None = None
    _active: bool = field(default=True)

    def __repr__(self) -> str:
        return f"<turbo_hf.Handle of {type(self._model).__name__}, {'on' if self._active else 'off'}>"

    def __enter__(self) -> "Handle":
        self._require_active()
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the patch: hooks are removed, attributes restored to the same objects. A second call does nothing.

        Raises:
            ValueError: another thread runs the model, and goes on for seconds; the patch is still on.
        """
        if not self._active:
            return
        if self._maker.serving is not None:
            from turbo_hf.serving.manager import end_managers  # noqa: PLC0415 - not of Transformers before 5.19

            # while their passes can still run
            end_managers(self._maker.serving, self._model)
        with alone(self._model, "remove()"):
            self._remove()

    def _remove(self) -> None:
        self._active = False
        for hook in self._hooks:
            hook.remove()
        for module, name, before in self._replaced:
            if before is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = before
        restore_norms(self._norms)
        self._maker.active = False
        if self._compiled is not None:
            self._compiled.remove()
        if self._model.config.get_text_config(decoder=True)._attn_implementation == NAME:
            self._model.set_attn_implementation(self._previous)

    def report(self) -> Report:
        """What was patched, what was left alone and why, and what has happened so far."""
        read = tuple(selector.tally.selectivity(layer) for layer, selector in self._maker.selectors.items())
        steps = self._report.steps + (f"; {self._compiled.words()}" if self._compiled is not None else "")
        hooked = hooked_module(self._model)
        if hooked is not None and self._maker.why_not_captured is None:
            steps = f"decode steps: launched, since {hooked} has a hook"
        serving = self._report.serving
        if self._maker.serving is not None:
            serving = self._maker.serving.words() or serving
        generated = self._maker.last_generate()
        report = replace(self._report, steps=steps, serving=serving, selectivity=read, generated=generated)
        gone = () if self._active else ("the patch has been removed, and the model is what it was",)
        return replace(report, warnings=report.warnings + gone)

    def memory(self) -> Memory:
        """Bytes by layer and kind of the newest cache made by `generate` or `new_cache`: as it is now, or as it was
        when it was released. While a manager of continuous batching exists, of the blocks in its pool that hold tokens.
        For any other cache, call its own `memory()`."""
        return self._maker.memory()

    def new_cache(self) -> TurboCache:
        """An empty cache like those that `generate` gets, for your own loop: `model(ids, cache=cache)`
        (`past_key_values=cache` before transformers 5.24).

        Raises:
            ValueError: the patch has been removed.
        """
        self._require_active()
        return self._maker.make(self._model.config)

    def _require_active(self) -> None:
        if not self._active:
            raise ValueError("This patch has been removed. Call turbo_hf.patch(model) for a new one.")
