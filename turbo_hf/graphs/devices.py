"""Where decode steps are captured: one GPU, or several that share the layers of a model (`device_map`)."""

import functools
import gc
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from turbo_hf.errors import out_of_memory


class Part(NamedTuple):
    """A piece of a step over several devices: copies from other devices, then a graph of one device's work."""

    copies: list[tuple[torch.Tensor, torch.Tensor]]
    graph: Any


class Parts(TorchDispatchMode):
    """Records a step as parts: a graph of torch holds the work of one device alone.

    A part ends where work on another device begins. What one device needs of another is copied before the part that
    needs it: by then the part that made it has been launched, and torch's copies wait for both devices.

    begin: makes a device current, and begins a graph on it.
    """

    def __init__(self, begin: Callable[[torch.device], Any]):
        super().__init__()
        self.parts: list[Part] = []
        self._begin = begin
        self._here: torch.device | None = None
        self._empty = True
        # by source and kind: a source, and its copy, as long as neither has been written to
        self._copied: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def go_to(self, device: torch.device) -> Part:
        """End the part, and begin one on this device, unless that has just begun."""
        if self._here != device or not self._empty:
            self.end()
            self.parts.append(Part([], self._begin(device)))
            self._here, self._empty = device, True
        return self.parts[-1]

    def end(self) -> None:
        """End the part that is recorded."""
        here, self._here = self._here, None
        if here is None:
            return
        try:
            if self._empty:
                # torch warns of a graph without work
                torch.zeros(1, device=here)
        finally:
            self.parts[-1].graph.capture_end()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Where an operator is launched, or that a later copy takes its place."""
        kwargs = kwargs or {}
        if func.namespace == "aten" and torch.is_inference_mode_enabled():
            # operators that consist of others come here as they are
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        places = {x.device for x in tensors if x.device.type == "cuda"}
        named = kwargs.get("device")
        there = None if named is None else torch.device(named)
        if there is not None and there.type != "cuda":
            there = None
        elif there is not None and there.index is None:
            there = torch.device("cuda", torch.cuda.current_device())
        if func is torch.ops.aten._to_copy.default and places and there is not None:
            if places != {there}:
                return self._copy_of(args[0], there, kwargs.get("dtype") or args[0].dtype)
        elif func is torch.ops.aten.copy_.default and len(places) > 1:
            self._written(func, args, kwargs)
            self.go_to(args[0].device).copies.append((args[0], args[1]))
            return args[0]
        if there is not None:
            places.add(there)
        if len(places) > 1:
            raise RuntimeError(f"{func} works on {len(places)} devices at once")
        if places and places != {self._here}:
            self.go_to(*places)
        self._empty = False
        self._written(func, args, kwargs)
        return func(*args, **kwargs)

    def _copy_of(self, source: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """In place of `source.to(device, dtype)`."""
        key = (id(source), device, dtype)
        if key not in self._copied:
            # at the beginning of a part: what has been recorded of this one may use the same memory before
            part = self.go_to(device)
            with torch.inference_mode(False):  # written again in any mode
                part.copies.append((torch.empty_like(source, dtype=dtype, device=device), source))
            self._copied[key] = part.copies[-1]
        return self._copied[key][0]

    def _written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forget copies of, and to, what an operator writes to."""
        if func._schema.is_mutable and self._copied:
            schema = func._schema.arguments
            given = {at.name: x for at, x in zip(schema, args, strict=False)} | kwargs
            written = [given.get(at.name) for at in schema if at.alias_info is not None and at.alias_info.is_write]
            memory = {x.untyped_storage()._cdata for x in tree_leaves(written) if isinstance(x, torch.Tensor)}
            for key, pair in list(self._copied.items()):
                if any(x.untyped_storage()._cdata in memory for x in pair):
                    # the tensors themselves stay in the list of their part
                    del self._copied[key]


_counting = threading.Lock()
_captures: list[bool] = []


def _without_collection(function: Callable[..., Any]) -> Callable[..., Any]:
    """Inside, Python collects no garbage: it may hold a graph, and freeing one spoils what its thread captures."""

    @functools.wraps(function)
    def called(*args: Any) -> Any:
        with _counting:
            # of threads that capture at a time, the last one to end turns it on again
            _captures.append(gc.isenabled() or any(_captures))
            gc.disable()
        try:
            return function(*args)
        finally:
            with _counting:
                if _captures.pop() and not _captures:
                    gc.enable()

    return called


class CudaDevice:
    """One GPU, or several that hold a model's layers between them; a step begins on the first.

    Of each a separate stream, and memory that all graphs captured there share, so that only one of them runs at a time.
    """

    def __init__(self, *devices: torch.device):
        streams = [torch.cuda.Stream(device) for device in devices]
        self._streams = {stream.device: stream for stream in streams}
        self._pools = {device: torch.cuda.graph_pool_handle() for device in self._streams}
        # a graph of each pool that stays: once it has lost its last graph, torch no longer captures into it
        self._anchors: dict[torch.device, Callable[[], Any]] = {}

    def warm(self, step: Callable[[], Any]) -> Any:
        """Run the step itself, so that a capture finds everything compiled and allocated."""
        for stream in self._streams.values():
            step = functools.partial(_aside, stream, step)
        return step()

    @_without_collection
    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """A call that replays the step and returns what it returned. Computes nothing.

        Other threads may go on using the device.
        """
        try:
            return self._captured(step)
        except BaseException as error:
            if not (isinstance(error, RuntimeError) and out_of_memory(error)):
                self._recover()
                raise
        # memory that torch's allocator keeps after a prompt cannot be released during a capture. After the handler,
        # because the error keeps the frames, and these the spoilt graph, alive
        self._end_spoilt_capture()
        torch.cuda.empty_cache()
        try:
            return self._captured(step)
        except BaseException:
            self._recover()
            raise

    def _captured(self, step: Callable[[], Any]) -> Callable[[], Any]:
        self._keep_pools_alive()
        first, *others = self._streams
        return self._in_parts(step) if others else self._in_one(first, step)

    def _keep_pools_alive(self) -> None:
        for device in [device for device in self._streams if device not in self._anchors]:
            self._anchors[device] = self._in_one(device, functools.partial(torch.zeros, 1, device=device))

    def _end_spoilt_capture(self) -> None:
        """After a spoilt capture torch's allocator still records into the pools: end that, and take new ones."""
        for device, pool in self._pools.items():
            # torch has no public call for this; if it is missing or has been made, a new pool suffices
            with suppress(AttributeError, RuntimeError):
                torch._C._cuda_endAllocateToPool(device.index, pool)
            self._pools[device] = torch.cuda.graph_pool_handle()
        self._anchors = {}

    def _recover(self) -> None:
        """End a spoilt capture. Then make one that succeeds, which releases torch's generator from the spoilt graph."""
        self._end_spoilt_capture()
        self._keep_pools_alive()

    def _begin(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        """From here on the graph records what is launched on the device's stream, which must be the current one."""
        # not torch.cuda.graph: it releases the allocator's memory, which costs the next prompt milliseconds
        graph.capture_begin(pool=self._pools[device], capture_error_mode="thread_local")

    def _in_one(self, device: torch.device, step: Callable[[], Any]) -> Callable[[], Any]:
        """A step whose work is on one device, as one graph."""
        graph, stream = torch.cuda.CUDAGraph(), self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            try:
                self._begin(graph, device)
                out = step()
                graph.capture_end()
            except BaseException:
                # a stream that still captures would abort the process later; an error in ending it is less informative
                # than the first one
                with suppress(RuntimeError):
                    graph.capture_end()
                raise

        def replay() -> Any:
            graph.replay()
            return out

        return replay

    def _in_parts(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """A step over several devices, as `Parts`."""

        def begin(device: torch.device) -> torch.cuda.CUDAGraph:
            # of both: a graph records the current stream of the current device
            torch.cuda.set_stream(self._streams[device])
            graph = torch.cuda.CUDAGraph()
            self._begin(graph, device)
            return graph

        recorder = Parts(begin)
        with ExitStack() as streams:
            for device, stream in reversed(self._streams.items()):
                stream.wait_stream(torch.cuda.current_stream(device))
                streams.enter_context(torch.cuda.stream(stream))
            try:
                with recorder:
                    out = step()
                recorder.end()
            except BaseException:
                # as above
                with suppress(RuntimeError):
                    recorder.end()
                raise
        parts = recorder.parts

        def replay() -> Any:
            for copies, graph in parts:
                for target, source in copies:
                    target.copy_(source)
                graph.replay()
            return out

        return replay


def _aside(stream: torch.cuda.Stream, step: Callable[[], Any]) -> Any:
    """The step, on a stream that waits for what has been launched, and for which all that follows waits."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            return step()
    finally:
        # also after an error: what the step has used may be used again
        current.wait_stream(stream)


_of_thread = threading.local()


def cuda_device(*devices: torch.device) -> CudaDevice:
    """What captures on these devices. One for each thread: graphs of two threads may run at a time."""
    known: dict[tuple[torch.device, ...], CudaDevice] = _of_thread.__dict__.setdefault("devices", {})
    if devices not in known:
        known[devices] = CudaDevice(*devices)
    return known[devices]


def only_moves(hook: Any) -> bool:
    """Whether a hook of accelerate does nothing but move tensors between devices, which a capture sees and repeats."""
    kind = type(hook)
    return (kind.__module__, kind.__name__) == ("accelerate.hooks", "AlignDevicesHook") and not hook.offload
