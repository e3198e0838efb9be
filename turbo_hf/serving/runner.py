"""Passes of continuous batching: those that bring one token of each request, and short prompts, are CUDA graphs.

Imports Transformers' continuous batching as it is from 5.19 on.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import stream_context

from turbo_hf.errors import warn
from turbo_hf.graphs.runner import NotCaptured, Runner
from turbo_hf.layout import power_of_two
from turbo_hf.ops.decode.stream_k import SteadyPlans
from turbo_hf.ops.host_device import require_finite
from turbo_hf.serving.pace import Pace
from turbo_hf.serving.rows import LEAST, MOST, MOST_ROWS, Layout, Prompts, Row, StepRows, most_blocks

GRAPHS = 48
"""Maximum number of captures that are kept: each takes megabytes outside of what is planned."""


STAGED = ("input_ids", "position_ids", "logits_indices", "logits_processor_args")
"""What a pass reads of its inputs, beside what the cache knows."""


class TurboModelRunner(ModelRunner):
    """Transformers' runner, which prepares what the cache reads of a pass, and replays steps.

    A pass in which each request brings one token, and holds others, is computed with a row for each slot: tokens are
    put into the order of slots before the model sees them, and logits back. A few short prompts may follow them
    (`Layout`).

    Args:
        graphs: captures passes, by layout; off: they are launched. If it demands captures, then those of steps alone.
        options: of Transformers' runner.
    """

    cache: Any

    def __init__(self, graphs: Runner, **options: Any):
        super().__init__(**options)
        self.pad_inputs, self.graphs = False, graphs
        # whether passes with prompts may be captured
        self._prompts = True
        self._layouts: dict[tuple[int, ...], Layout] = {}
        # the layout of the last pass, if it was replayed
        self.replayed: tuple[int, ...] | None = None
        layers = len(self.cache.storage.nonfinite)
        self._flags = torch.zeros(2, layers, dtype=torch.int32, pin_memory=self.cache.storage.nonfinite.is_cuda)

    def maybe_pad_inputs(self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
        """Tokens of the coming pass: as many as slots, if each request brings one."""
        self.pad_inputs = use_decode_fast_path
        # nothing is read by index
        return (self.cache.allocator.rows() if use_decode_fast_path else num_q_tokens), 0

    def warmup(self, model: Any) -> None:
        """Nothing: steps are captured when they are needed."""

    @property
    def _pair(self) -> int:
        """Which of the two sets of inputs of asynchronous batching is current."""
        return getattr(self.inputs_and_outputs, "current_pair", 0)

    def compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
        """See Transformers."""
        with stream_context(self.inputs_and_outputs.compute_stream):
            self.graphs.look_for_hooks()
            rows = self.cache.begin_pass()
            key, self.replayed = self._key(rows), None
            if key is None:
                self.cache.mix(rows)
                super().compute_batch(model, batch_data)
            else:
                self._fixed(model, batch_data, rows, key)
            self._flags[self._pair].copy_(self.cache.storage.nonfinite, non_blocking=True)

    def require_finite(self) -> None:
        """ValueError, if NaN or Inf was stored by the pass that has been waited for last."""
        require_finite(dict(enumerate(self._flags[self._pair])))

    def _key(self, rows: list[Row]) -> tuple[int, ...] | None:
        """The sizes of the layout of a pass of these requests: slots, and columns of their table; prompts, tokens of
        each, and columns of their table; whether these hold tokens. None: its shape is its own."""
        steps, prompts = [row for row in rows if row.is_step], [row for row in rows if not row.is_step]
        if any(row.new > 1 for row in steps):
            return None
        of_steps = (self.cache.allocator.rows(prompts=bool(prompts)), most_blocks(steps)) if steps else (0, 0)
        if not prompts:
            return (*of_steps, 0, 0, 0, 0)
        count, new = power_of_two(len(prompts)), power_of_two(max(LEAST, *(row.new for row in prompts)))
        own = self.graphs.off or not self._prompts or len({row.past > 0 for row in prompts}) > 1
        most = of_steps[0] + count * new > self.cache.max_batch_tokens
        # a past is unpacked for all rows at once
        most |= count * max(row.past + row.new for row in prompts) > self.cache.storage.shape.together
        if own or most or count > MOST_ROWS or count * new > MOST:
            return None
        return (*of_steps, count, new, max(16, most_blocks(prompts)), int(prompts[0].past > 0))

    def _layout(self, key: tuple[int, ...]) -> Layout:
        """The layout of these sizes; see `_key`."""
        if key not in self._layouts:
            storage, (size, blocks, count, new, own_blocks, past) = self.cache.storage, key
            shape, device = storage.shape, storage.device
            plans = None if self.graphs.off else SteadyPlans()
            steps = StepRows(size, blocks, 1, shape, device, plans) if size else None
            prompts = Prompts(count, new, own_blocks, bool(past), device) if count else None
            self._layouts[key] = Layout(steps, prompts, shape, device, storage.spare)
        return self._layouts[key]

    def _fixed(self, model: Any, batch_data: dict[str, Any], rows: list[Row], key: tuple[int, ...]) -> None:
        """A pass of `rows` in the layout of these sizes."""
        layout = self._layout(key)
        layout.fill(rows)
        self.cache.now = layout.as_pass()
        known = batch_data["logits_indices"].shape[0]
        for name in ("input_ids", "position_ids"):
            batch_data[name] = _sized(batch_data[name], layout.tokens)
        for name in ("logits_indices", "logits_processor_args"):
            batch_data[name] = _sized(batch_data[name], layout.outputs)
        # those of an earlier pass may lie there
        batch_data["logits_indices"][known:].zero_()
        ids = zip(("carried", "before", "out"), self.inputs_and_outputs.get_cb_kwargs(), strict=True)
        # one capture serves both sets of inputs of asynchronous batching
        given = {name: batch_data[name] for name in STAGED} | dict(ids)
        read = given if self.graphs.off else self.graphs.take(key, given)
        batch_data |= {name: read[name] for name in STAGED}
        if self.supports_logits_to_keep(model):
            batch_data["logits_to_keep"] = batch_data["logits_indices"]
        forward: Any = functools.partial(_in_layout, model, layout)
        outputs = read["carried"], read["before"], read["out"]
        step = functools.partial(self._forward_process_and_sample, forward, batch_data, *outputs)
        if self.graphs.off:
            step()
        else:
            self.replayed = key if self.graphs.captured(key) else None
            self._run(key, step)
        if read is not given:
            given["out"][:, : layout.outputs].copy_(read["out"][:, : layout.outputs])

    def _run(self, key: tuple[int, ...], step: Callable[[], Any]) -> None:
        """Compute a pass of this layout, by its capture from the second time on."""
        try:
            self.graphs.run(key, step, self._making_room)
        except NotCaptured as error:
            of_prompts = bool(key[2])
            name = "passes with prompts" if of_prompts else "steps"
            why = f"{name} of continuous batching cannot be captured"
            if not of_prompts:
                self.graphs.demand(f"{why} ({error})")
            warn(f"turbo_hf: {why} and are launched: {error}")
            self._prompts, self.graphs.off = False, not of_prompts
        else:
            return
        self.graphs.device.warm(step)

    @contextmanager
    def _making_room(self) -> Iterator[None]:
        """Discard the least recently used of `GRAPHS` captures, which may still run."""
        captured = list(filter(self.graphs.captured, self.graphs.kinds))
        if len(captured) >= GRAPHS:
            if self.inputs_and_outputs.compute_stream is not None:
                self.inputs_and_outputs.compute_stream.synchronize()
            del self.graphs.kinds[captured[0]]
        yield


def _carried(ios: Any) -> torch.Tensor:
    """In place of `infer_carry_over_ids`, which takes a millisecond: the same, by NumPy."""
    new, old = (
        ios.io_pairs[pair].host_io.req_id_to_new_token_position for pair in (ios.current_pair, 1 - ios.current_pair)
    )
    ids = np.full(ios.max_batch_tokens, -1, dtype=np.int32)
    for n, request in enumerate(old):
        if request in new:
            ids[new[request]] = n
    return torch.from_numpy(ids)


def _sized(x: torch.Tensor, size: int) -> torch.Tensor:
    """x [..., n] with `size` columns: the tensors of Transformers go on behind what a pass fills."""
    return x.as_strided((*x.shape[:-1], size), x.stride())


def _in_layout(model: Any, layout: Layout, **inputs: Any) -> Any:
    """The model's output for `inputs`, whose tokens it sees in the order of the layout."""
    for name in ("input_ids", "position_ids"):
        inputs[name] = inputs[name].index_select(1, layout.order)
    keep = inputs.get("logits_to_keep")
    if keep is not None:
        inputs["logits_to_keep"] = layout.place.index_select(0, keep)
    out = model(**inputs)
    if keep is None:
        out.logits = out.logits.index_select(1, layout.place)
    return out


class TurboBatchProcessor(ContinuousBatchProcessor):
    """Transformers' processor with a `TurboModelRunner`, whose argument `graphs` is."""

    cache: Any
    model_runner: Any

    def __init__(self, graphs: Runner, **options: Any):
        super().__init__(**options)
        self.model_runner = TurboModelRunner(
            graphs,
            logit_processor=self.logit_processor,
            cb_config=self.cb_config,
            cache=self.cache,
            inputs_and_outputs=self.inputs_and_outputs,
            do_sample=self.do_sample,
            return_logprobs=self.return_logprobs,
        )
        self._pace, self._begun = Pace(), 0.0
        ios: Any = self.inputs_and_outputs
        if self.use_async_batching:
            ios.infer_carry_over_ids = functools.partial(_carried, ios)

    def prepare_next_batch(self) -> bool:
        """See Transformers. While a pass runs, it waits for requests as long as the GPU need not wait."""
        if self.use_async_batching:
            now = time.perf_counter()
            pause = self._pace.wait(now)
            time.sleep(pause)
            # what it slept too long counts as preparation, so that threads that keep it from waking are reckoned with
            self._begun = now + pause
        return bool(super().prepare_next_batch())

    def _generation_step(self, model: Any) -> None:
        """See Transformers."""
        super()._generation_step(model)
        self._pace.launched(self.model_runner.replayed, self._begun, time.perf_counter())

    def reset(self) -> None:
        """See Transformers."""
        super().reset()
        self._pace.reset()

    def update_batch(self) -> None:
        """See Transformers. Raises: ValueError, if NaN or Inf was stored."""
        ios: Any = self.inputs_and_outputs
        if self.use_async_batching:
            over = ios.io_pairs[ios.current_pair].d2h_over
            runs = not over.query()
            over.synchronize()
            self._pace.ended(time.perf_counter(), just_now=runs)
        self.model_runner.require_finite()
        super().update_batch()
