"""The one runner of passes, for `generate` and for continuous batching: launched, then captured, then replayed."""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from turbo_hf.errors import Unsupported


class NotCaptured(Exception):
    """A pass could not be captured: nothing has been computed."""


@dataclass(slots=True)
class Kind:
    """Passes that one capture stands for.

    inputs: where they read theirs. mode: what else they depend on.
    launched: how many came before the capture. replay: None: there is none.
    """

    inputs: dict[str, Any] = field(default_factory=dict)
    mode: Any = None
    launched: int = 0
    replay: Callable[[], Any] | None = None


class Runner:
    """Passes by kind: their inputs go to memory that keeps its address, from which a capture reads them.

    Args:
        device: what captures passes, a `CudaDevice`; None: they are launched.
        why_not: why no pass can be captured, None if one can; asked at first, and whenever somebody has made a hook.
        demanded: whether that is an error.

    Attributes:
        captures: how many were made.
        warmups: passes of a kind that are launched before it is captured.
        kinds: by key, the least recently used first.
        off: whether all passes are launched from now on.
    """

    def __init__(self, device: Any, why_not: Callable[[], str | None] | None = None, demanded: bool = False):
        self.captures, self.warmups, self.off = 0, 1, device is None
        self.kinds: dict[Hashable, Kind] = {}
        self.device, self._why_not, self._demanded = device, why_not, demanded
        # how many hooks torch had made when `why_not` was called last
        self._hooks: int | None = None

    def look_for_hooks(self) -> str | None:
        """Turn off, and say why, if somebody has made a hook since that a replay would not call.

        Raises:
            Unsupported: captures are demanded.
        """
        if self.off or self._why_not is None or self._hooks == RemovableHandle.next_id:
            return None
        self._hooks, reason = RemovableHandle.next_id, self._why_not()
        if reason is not None:
            self.off = True
            self.demand(reason)
        return reason

    def demand(self, reason: str) -> None:
        """Raise `Unsupported` if passes must be captured, and cannot be for this reason."""
        if self._demanded:
            raise Unsupported(f'cuda_graphs=True: {reason}. Choose TurboConfig(cuda_graphs="auto") or False.')

    def take(self, key: Hashable, given: dict[str, Any], size: int | None = None, mode: Any = None) -> dict[str, Any]:
        """Copy the inputs of a pass to the memory of its kind, and return that.

        What is no tensor is part of a capture, and `mode` too: one that no longer fits is discarded.

        size: columns to which tensors are filled up with their last one; None: as many as they have.
        """
        kind = self.kinds.setdefault(key, Kind())
        old = kind.inputs
        same = (kind.mode, old.keys()) == (mode, given.keys()) and all(
            (old[name].shape[:-1], old[name].dtype) == (value.shape[:-1], value.dtype)
            if isinstance(value, torch.Tensor)
            else old[name] is value or old[name] == value
            for name, value in given.items()
        )
        if not same:
            self.drop(key)
            kind.mode = mode
            with torch.inference_mode(False):
                old = kind.inputs = {
                    name: value.new_empty((*value.shape[:-1], size or value.shape[-1]))
                    if isinstance(value, torch.Tensor)
                    else value
                    for name, value in given.items()
                }
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                tokens, memory = value.shape[-1], old[name]
                if tokens == memory.shape[-1]:
                    memory.copy_(value)
                else:
                    memory[..., :tokens].copy_(value)
                    memory[..., tokens:].copy_(value[..., -1:])
        return old

    def run(self, key: Hashable, step: Callable[[], Any], around: Callable[[], AbstractContextManager[Any]]) -> Any:
        """What `step` returns for a pass of this kind. around: entered while it is captured.

        Raises:
            NotCaptured: its capture has failed.
        """
        kind = self.kinds[key] = self.kinds.pop(key)
        if kind.launched < self.warmups:
            kind.launched += 1
            return self.device.warm(step)
        if kind.replay is None:
            try:
                with around():
                    kind.replay = self.device.capture(step)
            except Exception as error:
                raise NotCaptured(str(error)) from error
            self.captures += 1
        return kind.replay()

    def captured(self, key: Hashable) -> bool:
        """Whether there is a capture of passes of this kind."""
        return key in self.kinds and self.kinds[key].replay is not None

    def drop(self, *keys: Hashable) -> None:
        """Discard captures of these kinds. One pass is launched before the next one, as it may need a new kernel."""
        for kind in map(self.kinds.__getitem__, keys):
            kind.replay, kind.launched = None, min(kind.launched, self.warmups - 1)
