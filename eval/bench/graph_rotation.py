"""The cost of a decode step on a device: launches replayed by a graph, and what the host adds without one."""

import time
from functools import lru_cache

import torch

from turbo_hf.eval.bench.timing import Call

LAUNCHES = 8
"""Minimum launches per graph: they share the cost of a replay and of reading the clock."""

MOST_COPIES = 1024
"""Maximum number of copies: below the size where it is reached, the launch and not memory takes the time."""

EAGER_CALLS = 50


def cold_copies(size: int, device: torch.device) -> int:
    """How many copies of `size` bytes, read one after the other, leave nothing of the first in L2; 2 without a GPU.

    At most MOST_COPIES: of caches below 4 x L2 / MOST_COPIES a part is in L2.
    """
    if device.type != "cuda":
        return 2
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return min(4 * cache // size + 1, MOST_COPIES)


class Rotation:
    """One call that runs `calls` in turn, `launches` launches in all: on a GPU the replay of a CUDA graph."""

    def __init__(self, calls: list[Call], device: torch.device) -> None:
        self.first, self.device = calls[0], device
        self.launches = max(len(calls), LAUNCHES if device.type == "cuda" else 0)
        self._calls = [calls[i % len(calls)] for i in range(self.launches)]
        self._graph = self._captured() if device.type == "cuda" else None

    def __call__(self) -> None:
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def eager_us(self) -> float:
        """Microseconds of a call without a graph, by the wall clock: the host's time, or the device's if longer."""
        if self.device.type != "cuda":
            return self._wall_us(1)
        with torch.cuda.device(self.device):
            self._wall_us(3)
            return self._wall_us(EAGER_CALLS)

    def _wall_us(self, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            self.first()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 1e6 * (time.perf_counter() - start) / calls

    def _run(self) -> None:
        for call in self._calls:
            call()

    def _captured(self) -> torch.cuda.CUDAGraph:
        with torch.cuda.device(self.device):
            stream = _capture_stream(self.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._run()  # plans, workspaces and compilation: a capture may not allocate or wait for them
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self._run()
        return graph


@lru_cache(maxsize=8)
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all graphs, which refer to workspaces: launches keep one per stream and shape, and only the newest 16."""
    return torch.cuda.Stream(device)
