"""Passes of continuous batching: those that bring one token of each request, and short prompts, are CUDA graphs.

Imports Transformers' continuous batching as it is from 5.19 on.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import stream_context

from turbo_hf.errors import Unsupported, warn
from turbo_hf.graphs.devices import CudaDevice, Device
from turbo_hf.graphs.step_runner import hooked_module
from turbo_hf.layout import power_of_two
from turbo_hf.ops.decode.stream_k import SteadyPlans
from turbo_hf.ops.host_device import require_finite
from turbo_hf.serving.pace import Pace
from turbo_hf.serving.rows import LEAST, MOST, MOST_ROWS, Layout, Prompts, Row, StepRows, most_blocks

GRAPHS = 48
"""Maximum number of captures that are kept: each takes megabytes outside of what is planned."""


STAGED = ("input_ids", "position_ids", "logits_indices", "logits_processor_args")
"""What a pass reads of its inputs, beside what the cache knows."""


class SharedInputs:
    """Tensors that captures read and write in place of the two sets of asynchronous batching, so that one capture
    serves both."""

    def __init__(self) -> None:
        self._own: list[torch.Tensor] = []
        # of each set, all of the memory in which its tensors lie
        self._given: dict[int, dict[int, torch.Tensor]] = {}

    def take(self, pair: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of these tensors of set number `pair`, at the same addresses each time."""
        if pair not in self._given:
            wholes = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
            self._given[pair] = {
                place: torch.empty(0, dtype=torch.int32, device=tensors[0].device).set_(storage)
                for place, storage in wholes.items()
            }
            self._own = self._own or [x.clone() for x in self._given[pair].values()]
        of = dict(zip(self._given[pair], self._own, strict=True))
        for given, own in zip(self._given[pair].values(), self._own, strict=True):
            own.copy_(given)
        return [of[x.untyped_storage().data_ptr()].as_strided(x.shape, x.stride(), x.storage_offset()) for x in tensors]


def capture_device(device: torch.device) -> Device | None:
    """How passes on `device` are captured; None: they are not."""
    return CudaDevice(device) if device.type == "cuda" else None


class TurboModelRunner(ModelRunner):
    """Transformers' runner, which prepares what the cache reads of a pass, and replays steps.

    A pass in which each request brings one token, and holds others, is computed with a row for each slot: tokens are
    put into the order of slots before the model sees them, and logits back. A few short prompts may follow them
    (`Layout`). Its first time at a size such a pass is launched, the second time captured.

    Args:
        device: how steps are captured; None: they are launched.
        demanded: whether a step that cannot be captured is an error; a pass with prompts never is one.
        prompts: whether passes with prompts may be captured.
        options: of Transformers' runner.
    """

    cache: Any

    def __init__(self, device: Device | None, demanded: bool, prompts: bool, **options: Any):
        super().__init__(**options)
        self.pad_inputs = False
        self._device, self._demanded, self._prompts = device, demanded, prompts
        self._rows: dict[tuple[int, int], StepRows] = {}
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._shared = SharedInputs()
        # by layout; None: that was launched once
        self._replays: dict[tuple[int, ...], Callable[[], Any] | None] = {}
        # how many hooks torch had made when those of the model were looked for last
        self._hooks: int | None = None
        # the layout of the last pass, if it was replayed
        self.replayed: tuple[int, ...] | None = None
        self.captures = 0
        layers = len(self.cache.storage.nonfinite)
        self._flags = torch.zeros(2, layers, dtype=torch.int32, pin_memory=self.cache.storage.nonfinite.is_cuda)

    def maybe_pad_inputs(self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
        """Tokens of the coming pass: as many as slots, if each request brings one."""
        self.pad_inputs = use_decode_fast_path
        # nothing is read by index
        return (self.cache.allocator.rows() if use_decode_fast_path else num_q_tokens), 0

    def launch(self) -> None:
        """From now on steps are launched."""
        self._device = None

    def warmup(self, model: Any) -> None:
        """Nothing: steps are captured when they are needed."""

    @property
    def _pair(self) -> int:
        """Which of the two sets of inputs of asynchronous batching is current."""
        return getattr(self.inputs_and_outputs, "current_pair", 0)

    def compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
        """See Transformers."""
        with stream_context(self.inputs_and_outputs.compute_stream):
            self._look_for_hooks(model)
            rows = self.cache.begin_pass()
            key, self.replayed = self._key(rows), None
            if key is None:
                self.cache.mix(rows)
                super().compute_batch(model, batch_data)
            else:
                self._fixed(model, batch_data, rows, key)
            self._flags[self._pair].copy_(self.cache.storage.nonfinite, non_blocking=True)

    def _look_for_hooks(self, model: Any) -> None:
        """Steps are launched once the model has a hook of the user's. Raises `Unsupported` if they must be captured."""
        if self._device is None or self._hooks == RemovableHandle.next_id:
            return
        self._hooks, hooked = RemovableHandle.next_id, hooked_module(model)
        if hooked is not None and self._demanded:
            raise Unsupported(f"cuda_graphs=True: {hooked} has hooks, which a replay would not call. Remove them.")
        if hooked is not None:
            self.launch()

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
        shape = self.cache.storage.shape
        ranked = any(self.cache.storage.ranks_heads) and any(not shape.split(row.past)[0] for row in prompts)
        own = self._device is None or not self._prompts or ranked or len({row.past > 0 for row in prompts}) > 1
        most = of_steps[0] + count * new > self.cache.max_batch_tokens
        # a past is unpacked for all rows at once
        most |= count * max(row.past + row.new for row in prompts) > shape.together
        if own or most or count > MOST_ROWS or count * new > MOST:
            return None
        return (*of_steps, count, new, max(16, most_blocks(prompts)), int(prompts[0].past > 0))

    def _layout(self, key: tuple[int, ...]) -> Layout:
        """The layout of these sizes; see `_key`."""
        if key not in self._layouts:
            storage = self.cache.storage
            size, blocks, count, new, own_blocks, past = key
            if size and (size, blocks) not in self._rows:
                plans = None if self._device is None else SteadyPlans()
                self._rows[size, blocks] = StepRows(size, blocks, 1, storage.shape, storage.device, plans)
            prompts = None
            if count:
                prompts = Prompts(count, new, own_blocks, bool(past), storage.device)
            steps = self._rows.get((size, blocks))
            self._layouts[key] = Layout(steps, prompts, storage.shape, storage.device, storage.spare)
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
        given = [*(batch_data[name] for name in STAGED), *self.inputs_and_outputs.get_cb_kwargs()]
        read = given
        if self._device is not None and hasattr(self.inputs_and_outputs, "io_pairs"):
            read = self._shared.take(self._pair, given)
        batch_data |= zip(STAGED, read, strict=False)
        if self.supports_logits_to_keep(model):
            batch_data["logits_to_keep"] = batch_data["logits_indices"]
        forward: Any = functools.partial(_in_layout, model, layout)
        step = functools.partial(self._forward_process_and_sample, forward, batch_data, *read[len(STAGED) :])
        if self._device is None:
            step()
        elif any(self.cache.storage.ranks_heads) and layout.ranks_heads:
            # the host tells which rows rank their heads
            self._device.warm(step)
        else:
            self._replay(self._device, key, step)
        if read is not given:
            given[-1][:, : layout.outputs].copy_(read[-1][:, : layout.outputs])

    def _replay(self, device: Device, key: tuple[int, ...], step: Callable[[], Any]) -> None:
        """Compute a step, by its capture from the second time on."""
        if key not in self._replays:
            self._replays[key] = None
            device.warm(step)
            return
        # the least recently used come first
        replay = self._replays.pop(key)
        if replay is None:
            self._forget_oldest()
            try:
                replay = device.capture(step)
            except Exception as error:
                of_prompts = bool(key[2])
                if self._demanded and not of_prompts:
                    raise
                name = "passes with prompts" if of_prompts else "steps"
                warn(f"turbo_hf: {name} of continuous batching cannot be captured and are launched: {error}")
                self._prompts = False
                self._device = self._device if of_prompts else None
                device.warm(step)
                return
            self.captures += 1
        else:
            self.replayed = key
        self._replays[key] = replay
        replay()

    def _forget_oldest(self) -> None:
        captured = [key for key, replay in self._replays.items() if replay is not None]
        if len(captured) >= GRAPHS:
            if self.inputs_and_outputs.compute_stream is not None:
                self.inputs_and_outputs.compute_stream.synchronize()
            del self._replays[captured[0]]


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
    """Transformers' processor with a `TurboModelRunner`, whose arguments `device`, `demanded` and `prompts` are."""

    cache: Any
    model_runner: Any

    def __init__(self, device: Device | None, demanded: bool, prompts: bool, **options: Any):
        super().__init__(**options)
        self.model_runner = TurboModelRunner(
            device,
            demanded,
            prompts,
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
