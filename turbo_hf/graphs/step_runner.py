"""Whole decode steps as CUDA graphs: the forward pass that `generate` calls, captured once and then replayed.

It takes the place of `generate`'s compiled forward pass. One pass of the model over one new token per row is captured;
`ReplayableSteps` knows when it can be replayed. In assisted decoding, passes over several tokens are captured too, one
for each power of two: a pass is filled up with copies of its last token, which are taken back. Every other pass goes to
the model unchanged.
"""

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from turbo_hf.attention.turbo_attention import HANDED_ON
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.pass_mark import STEP
from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.errors import warn
from turbo_hf.graphs.compiled_layers import CompiledLayers
from turbo_hf.graphs.kept_steps import KeptSteps, model_now
from turbo_hf.graphs.replayable_steps import ReplayableSteps
from turbo_hf.graphs.runner import NotCaptured, Runner
from turbo_hf.graphs.why_not import why_never_replayed, why_no_replay
from turbo_hf.layout import power_of_two
from turbo_hf.models.versions import CACHE
from turbo_hf.ranks import ALONE, Ranks

CONSTANTS = frozenset({"use_cache", "return_dict", "logits_to_keep"})
"""Keywords of a step that may be numbers, which become part of the capture; of other keywords, only those that are off.
What these ask for would be in outputs that the next replay overwrites."""

LOOKED_AT = frozenset({CACHE, "input_ids", "position_ids", "attention_mask", *HANDED_ON})
"""Keywords that prevent no capture by their values; a tensor among them must fit."""


class StepRunner(Runner):
    """The forward passes of a `generate` call: replayed where that is correct, the model's own elsewhere.

    The first steady step runs normally, the second is captured, later ones are replayed. This begins again whenever
    pages have been reserved or a plan has moved, every few hundred steps. An outside change between two steps (another
    pass, a crop, reordered rows) restarts it too, with one more normal step each time, so that a change in every step
    costs little. A kind is a number of tokens per row. Captures outlive the call: they serve the next one from its
    first step on, where its cache fits (`KeptSteps`).

    Args:
        model: the patched model.
        device: as in `Runner`.
        demanded: if True, a cache whose steps can never be replayed, and a step that cannot be captured, are errors;
            else the model runs normally, after a warning if a capture failed.
        compiled: the compiled layers; None: none are. Those of the first step, whose mask is checked, never are.
        forward: the model's `forward`, if it is called from within the model's call, behind its hooks (beam search,
            assisted decoding); None: it takes the place of that call.
        why_not: as in `Runner`.
    """

    def __init__(
        self,
        model: Any,
        device: Any,
        demanded: bool = False,
        compiled: CompiledLayers | None = None,
        forward: Callable[..., Any] | None = None,
        why_not: Callable[[], str | None] | None = None,
    ):
        super().__init__(device, why_not, demanded)
        # as often as steps have begun anew in this call
        self.warmups = 0
        self._pass: Callable[..., Any] = model if forward is None else forward
        self._depth = STEP if forward is None else STEP + 1
        self._model, self.compiled = model, compiled
        self._steps: ReplayableSteps | None = None
        # of the `generate` before, and what the model was at the newest capture
        self._kept: KeptSteps | None = None
        self._model_now: list[Any] = []
        # whether layers of the step over one token are the compiled ones
        self._fused = False
        # the mask that has been read, or what `generate` has made of it since, and the version of that tensor
        self._mask: tuple[torch.Tensor, int] | None = None

    def __call__(self, **kwargs: Any) -> Any:
        """`model(**kwargs)`."""
        tokens = 0 if self.off else self._tokens_of(kwargs)
        # here and not before the prompt, which would wait for it
        reason = self.look_for_hooks() if tokens else None
        if reason is not None and self.compiled is not None:
            self.compiled.refuse(reason, lasting=False)
        if not tokens or self.off:
            return self._pass(**kwargs)
        mask, steps = kwargs.get("attention_mask"), self._steps_over(kwargs)
        size = power_of_two(tokens)
        steady = steps is not None and steps.steady(size)
        if steps is None or not ((steady and self._knows(mask)) or self._confirmed(steps, mask)):
            return self._pass(**kwargs)
        inputs, autocast = self._take(kwargs, size)
        if not steady and steps.needs_pages():
            # captures use the current pages
            self.drop(*self.kinds)
        if size == 1 and self.compiled is not None and not self.captured(size):
            self._fused = self._compiles(self.compiled, steps, inputs, autocast)
        steps.mark_unfinished()
        if not steady:
            steps.begin(size)
            if self.captured(size) and not steps.unmoved(size):
                self.drop(size)
        step = functools.partial(self._step, inputs, size, autocast)
        try:
            out = self.run(size, step, functools.partial(self._capturing, steps, size))
        except NotCaptured as error:
            steps.cancel()
            self._not_captured(error, size == 1 and self._fused, steps.mark.ranks.speaks)
            out = None
        if out is None:
            return self._pass(**kwargs)
        # a new object: a caller may remove entries from the output, which the next one must have
        out = type(out)(**{**out, CACHE: kwargs[CACHE]} if CACHE in out else out)
        if size > 1:
            kept = min(kwargs.get("logits_to_keep") or tokens, tokens)
            out["logits"] = out["logits"][:, tokens - kept : tokens]
        steps.finish(size, size - tokens)
        return out

    def grown(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """`generate` has appended a column of ones to the mask `before`: if that has been read, `after` need not be."""
        # in inference mode torch does not count changes
        known = self._knows(before) and not after.is_inference()
        self._mask = (after, after._version) if known else None

    def _knows(self, mask: torch.Tensor | None) -> bool:
        """Whether this mask, as it is now, has been read since the cache's rows were last changed."""
        known = self._mask
        return mask is None or (known is not None and known[0] is mask and known[1] == mask._version)

    def _steps_over(self, kwargs: dict[str, Any]) -> ReplayableSteps | None:
        """What prepares the steps over the cache of this pass; None: as it is now, none can be replayed.

        Raises:
            Unsupported: they never can be, and must be.
        """
        cache, known = kwargs[CACHE], self._steps
        if known is not None and known.cache is cache and known.intact():
            return known
        kinds, kept, self._kept = self.kinds, self._kept, None
        self._forget()
        if self._demanded and (lasting := why_never_replayed(cache)) is not None:
            self.demand(lasting)
        if why_no_replay(cache) is not None:
            return None
        move = None if kept is None else functools.partial(kept.serve, model=model_now(self._model))
        self._steps = ReplayableSteps(cache, self._depth, move)
        if self._steps.moved:
            self.kinds = kinds
        else:
            self.warmups += 1
        return self._steps

    def _capturing(self, steps: ReplayableSteps, size: int) -> AbstractContextManager[None]:
        if self._depth == STEP:
            self._model_now = model_now(self._model)
        return steps.capturing(size)

    def end(self, keep: bool = True) -> bool:
        """`generate` has ended. keep: its captures. Returns whether there are any."""
        # what may have changed until the next call makes no hook: it asks again why nothing can be captured
        self._hooks, steps = None, self._steps
        if steps is None:
            return self._kept is not None and not self.off
        # The end may also be that of the interpreter, where torch aborts over new tensors; it may come while another
        # runner captures, where what is launched does not run; or in the midst of a later pass over the cache.
        ends = steps.mark.now is None and not (sys.is_finalizing() or any(map(_capturing, steps.nonfinite)))
        kinds, self.warmups = self.kinds, 0
        self._forget()
        if ends and keep and not self.off and steps.intact():
            self._kept = KeptSteps.of(steps, self._model_now)
            self.kinds = {} if self._kept is None else kinds
        if ends:
            steps.close()
        return self._kept is not None

    def __del__(self) -> None:
        if hasattr(self, "_steps"):
            self.end(keep=False)

    def _tokens_of(self, kwargs: dict[str, Any]) -> int:
        """How many tokens per row a call passes to a TurboCache; 0 if it is no step, or asks for anything else.

        One, or up to `DRAFTED_TOKENS` while the cache waits for a `crop`. No device read.
        """
        cache, ids, at = (kwargs.get(name) for name in (CACHE, "input_ids", "position_ids"))
        if not (isinstance(cache, TurboCache) and isinstance(ids, torch.Tensor) and isinstance(at, torch.Tensor)):
            return 0
        # there is one that is compressed
        first: Any = next((x for x in cache.layers if isinstance(x, TurboLayer)), None)
        tokens, mask = ids.shape[-1], kwargs.get("attention_mask")
        fits = (
            (ids.dim() == 2 and len(ids) == getattr(first, "rows", 0) and at.shape[-1] == tokens)
            # accelerate moves them in each pass
            and ids.device.type == first.device.type
            and (tokens == 1 or (first.record_past and first.is_decoding(tokens)))
            and (mask is None or (isinstance(mask, torch.Tensor) and mask.shape == (len(ids), first.seen + tokens)))
            and all(
                name in LOOKED_AT or value is None or (isinstance(value, int) and (name in CONSTANTS or not value))
                for name, value in kwargs.items()
            )
            and (kwargs.get("use_cache", True) and kwargs.get("return_dict", True))
            and not (torch.is_grad_enabled() or self._model.training or _capturing(ids))
        )
        return tokens if fits else 0

    def _confirmed(self, steps: ReplayableSteps, mask: torch.Tensor | None) -> bool:
        """Whether the mask matches what the cache holds, and no new token is padding. One read from the device.

        Raises:
            ValueError: a block that is about to be sealed may hold NaN or Inf.
        """
        known = steps.layers[0].valid_prefix
        padded = 0 if known is None else known.shape[1]
        proofs = [] if mask is None else [mask[:, padded:].all()]
        if mask is not None and known is not None:
            proofs.append((mask[:, :padded].bool() == known).all())
        if steps.seals():
            found = [steps.mark.ranks.most(flags) for flags in steps.nonfinite]
            proofs += [(bad == 0).all().to(steps.layers[0].device) for bad in found]
        if not proofs or bool(proofs[0] if len(proofs) == 1 else torch.stack(proofs).all()):
            self._mask = None if mask is None or mask.is_inference() else (mask, mask._version)
            return True
        if steps.seals():
            steps.require_finite()
        return False

    def _take(self, kwargs: dict[str, Any], size: int) -> tuple[dict[str, Any], torch.dtype | None]:
        """The inputs of this step where a replayed step over `size` tokens reads them, without a cache and a mask; and
        the type of autocast."""
        given = {name: value for name, value in kwargs.items() if name not in (CACHE, "attention_mask")}
        if size > 1 and given.get("logits_to_keep"):
            # those of all tokens; the newest may be fillers
            given["logits_to_keep"] = 0
        kind = kwargs["input_ids"].device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return self.take(size, given, size, autocast), autocast

    def _compiles(
        self, compiled: CompiledLayers, steps: ReplayableSteps, inputs: dict[str, Any], autocast: torch.dtype | None
    ) -> bool:
        """Whether the layers of the step over one token are the compiled ones."""
        if autocast is not None:
            compiled.refuse("autocast is on", lasting=False)
            return False
        if steps.linear:
            # a first run that only compiles would change their states
            compiled.refuse("layers of linear attention are not compiled", lasting=False)
            return False
        whole = {**inputs, CACHE: steps.cache}

        def dry() -> None:
            steps.mark_unfinished()
            try:
                with steps.running():
                    self.device.warm(functools.partial(self._pass, attention_mask=None, **whole))
            finally:
                # nothing has been stored
                steps.cancel()

        return compiled.ready(self._model, whole, dry)

    def _step(self, inputs: dict[str, Any], size: int, autocast: torch.dtype | None) -> Any:
        """The step itself."""
        assert self._steps is not None
        whole = {**inputs, CACHE: self._steps.cache}
        casts: AbstractContextManager[Any] = nullcontext()
        if autocast is not None:
            # weights that autocast keeps in another type are not kept for the graph: it casts them itself
            casts = torch.autocast(inputs["input_ids"].device.type, autocast, cache_enabled=False)
        compiled = self.compiled if self._fused and size == 1 else None
        with self._steps.running(size), casts, nullcontext() if compiled is None else compiled.steps(whole):
            # no mask: no new token is padding, and the cache knows its own padding
            out = self._pass(attention_mask=None, **whole)
        if CACHE in out:
            # a capture that is kept keeps no cache
            out[CACHE] = None
        return out

    def _not_captured(self, error: NotCaptured, fused: bool, speaks: bool) -> None:
        """Say that a capture has failed: not compiled, the step may still be captured; else all steps run normally.

        Raises:
            Unsupported: steps must be captured.
        """
        self._forget()
        if fused and self.compiled is not None:
            self.compiled.refuse(f"it cannot be captured in a CUDA graph: {error}")
            return
        self.off = True
        reason = f"this model's decode step cannot be captured in a CUDA graph ({error})"
        self.demand(reason)
        if speaks:
            warn(f"turbo_hf: {reason}; it runs without. TurboConfig(cuda_graphs=False) is silent.")

    def _forget(self) -> None:
        self._steps, self.kinds, self._mask = None, {}, None


def _capturing(x: torch.Tensor) -> bool:
    """Whether launches over x would be captured instead of run."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class Call:
    """A runner in the hands of one `generate`, whose end is that of this object.

    idle: where the runner is left for the next one, if it has captures.
    """

    def __init__(self, runner: StepRunner, idle: list[StepRunner]):
        self.runner, self._idle = runner, idle

    def __call__(self, **kwargs: Any) -> Any:
        """`model(**kwargs)`."""
        return self.runner(**kwargs)

    def __del__(self) -> None:
        if self.runner.end():
            self._idle[:] = [self.runner]


class HandOff(threading.local):
    """Passes a runner from where `generate` asks whether it may compile to where it asks for the compiled call. Each
    thread has its own.

    demanded, compiled: as in `StepRunner`. ranks: those that share the model, and capture its steps together.

    Attributes:
        idle: a runner of an earlier `generate`, whose captures may serve the next one; at most one.
    """

    def __init__(self, demanded: bool, compiled: CompiledLayers | None = None, ranks: Ranks = ALONE):
        self.demanded, self.compiled, self.ranks = demanded, compiled, ranks
        self.idle: list[StepRunner] = []
        self._runner: StepRunner | None = None
        self._taken: weakref.ref[Call] | None = None

    def give(self, runner: StepRunner | None) -> None:
        """Set what this thread's next `take` returns."""
        self._runner = runner

    def take(self) -> Call | None:
        """The runner that was given in this thread, once."""
        runner, self._runner = self._runner, None
        call = None if runner is None else Call(runner, self.idle)
        self._taken = None if call is None else weakref.ref(call)
        return call

    def taken(self) -> StepRunner | None:
        """The runner that this thread has taken last, as long as its `generate` lasts."""
        call = None if self._taken is None else self._taken()
        return None if call is None else call.runner

    def __reduce__(self) -> Any:
        return HandOff, (self.demanded, self.compiled, self.ranks)
