"""lm-evaluation-harness's Hugging Face model on the compressed cache, registered there as `turbo-hf`."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from turbo_hf.calibration.artifacts import Calibration
from turbo_hf.config.turbo_config import DEFAULT_PRESET
from turbo_hf.eval.answers import Batch
from turbo_hf.eval.methods import Method, applied, cache_size, method_named, until
from turbo_hf.models.versions import CACHE

Request = tuple[Any, list[int], list[int]]
"""(what the harness caches the answer under or None, context token ids, continuation token ids)."""


LOGITS = 1 << 31
"""Logits of a batch where its rows are chosen by their tokens: 8 GiB in float32."""


@register_model("turbo-hf")
class TurboLM(HFLM):  # type: ignore[misc]  # the harness has no types
    """HFLM with the compressed cache in the path of every task.

    Generation uses the patched `generate`. A log-likelihood is computed in passes over one cache: first the context
    without its last token, then the scored positions, `chunk` at a time. Thus every scored token reads a context that
    was stored in few bits (up to 16 scored tokens: by the decode path). Batches hold continuations of one length, so
    that no item's passes depend on its neighbors. Methods without a cache of their own run HFLM's code.

    Args:
        pretrained: a folder, a Hub id, or a loaded model.
        preset: a method of `turbo_hf.eval.methods`, or its name: fp16 (unpatched), presets, other caches.
        calibration: for methods that need one: itself, a folder or a Hub id; "auto": beside the checkpoint.
        chunk: scored tokens per pass.
        batch_tokens: maximum tokens per batch of `generate`: prompts, padding and replies; `batch_size` still limits
            its rows. None: no limit.
        on_batch: called with what each call of `generate` took.
        kwargs: HFLM's own arguments.

    Raises:
        ValueError: an unknown preset, a chunk below 1, or a model that cannot be patched.
    """

    def __init__(
        self,
        pretrained: Any,
        preset: str | Method = DEFAULT_PRESET,
        calibration: Calibration | str | None = "auto",
        chunk: int = 64,
        batch_tokens: int | None = None,
        on_batch: Callable[[Batch], None] | None = None,
        **kwargs: Any,
    ):
        # report a mistake before the model is loaded
        self.method = preset if isinstance(preset, Method) else method_named(preset)
        for name, value in (("chunk", chunk), ("batch_tokens", batch_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 token; got {value}.")
        super().__init__(pretrained, **kwargs)
        self.chunk = chunk
        self.batch_tokens = batch_tokens
        self._closed = False
        self._on_batch = on_batch
        self._keys = (0, 0, 0)
        self._stack = ExitStack()
        self.handle = self._stack.enter_context(applied(self.model, self.method, calibration))

    def close(self) -> None:
        """Remove the patch: the model is as before, and this object runs HFLM's own code. Calling it twice is
        harmless."""
        self._stack.close()
        self.handle = None
        self._closed = True

    def _new_cache(self, mask: torch.Tensor) -> Any:
        """The method's own cache for prompts of that mask; None: `generate` makes the one that it makes."""
        return None if self.method.make is None or self._closed else self.method.make(self.model, mask)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The replies, by HFLM's own code; with `batch_tokens`, in batches of like length that hold so many tokens."""
        if self.batch_tokens is None or not isinstance(self.batch_size, int) or not requests:
            replies: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
            return replies
        most = self.batch_size
        found: dict[int, str] = {}
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        # as many tokens as HFLM lets a reply have
        rooms = [int(request.args[1].get("max_gen_toks") or self.max_gen_toks) for request in requests]
        lengths = [len(ids) + room for ids, room in zip(prompts, rooms, strict=True)]
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="replies")
        try:
            ways = [str(request.args[1]) for request in requests]
            for batch in _budgeted(list(zip(lengths, ways, strict=True)), self.batch_tokens, most):
                self.batch_size_per_gpu = len(batch)
                own = super().generate_until([requests[at] for at in batch], disable_tqdm=True)
                found |= dict(zip(batch, own, strict=True))
                bar.update(len(batch))
        finally:
            self.batch_size_per_gpu = most
            bar.close()
        return [found[at] for at in range(len(requests))]

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        if self.handle is None and (self.method.make is None or self._closed):
            with self._fewer_rows(requests):
                found: list[tuple[float, bool]] = super()._loglikelihood_tokens(
                    requests, disable_tqdm=disable_tqdm, override_bs=override_bs
                )
            return found
        size = override_bs or (self.batch_size if isinstance(self.batch_size, int) else 1)
        size = min(size, self._rows_that_fit(requests, scored=self.chunk))
        answers: dict[int, tuple[float, bool]] = {}
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="log-likelihoods")
        for batch in _batches(requests, self.max_length, size):
            for at, answer in self._score(requests, batch):
                answers[at] = answer
                if requests[at][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[at][0], answer)
                bar.update(1)
        bar.close()
        return [answers[at] for at in range(len(requests))]

    def _rows_that_fit(self, requests: list[Request], scored: int | None = None) -> int:
        """Rows of a batch within `batch_tokens`, with logits of `scored` positions each (None: of all)."""
        if self.batch_tokens is None or not requests:
            return 1 << 30
        longest = min(int(self.max_length), max(len(context) + len(end) for _, context, end in requests))
        logits = int(scored or longest) * int(self.model.config.get_text_config(decoder=True).vocab_size)
        return max(1, min(self.batch_tokens // longest, LOGITS // logits))

    @contextmanager
    def _fewer_rows(self, requests: list[Request]) -> Iterator[None]:
        most = self.batch_size_per_gpu
        if isinstance(most, int):
            self.batch_size_per_gpu = min(most, self._rows_that_fit(requests))
        try:
            yield
        finally:
            self.batch_size_per_gpu = most

    @torch.inference_mode()
    def _score(
        self, requests: list[Request], batch: list[tuple[list[int], list[int]]]
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """`batch`: (input ids, the requests that share them); their continuations are of one length."""
        scored = len(requests[batch[0][1][0]][2])
        width = max(len(ids) for ids, _ in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long, device=self.device)
        mask = torch.zeros_like(ids)
        for row, (tokens, _) in enumerate(batch):
            ids[row, width - len(tokens) :] = torch.tensor(tokens, device=self.device)
            mask[row, width - len(tokens) :] = 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = self._new_cache(mask) if self.handle is None else self.handle.new_cache()
        sums: dict[int, float] = defaultdict(float)
        greedy: dict[int, bool] = defaultdict(lambda: True)
        first = width - scored
        starts = [0] * bool(first) + list(range(first, width, self.chunk))
        for start, end in zip(starts, [*starts[1:], width], strict=True):
            logits = self.model(
                input_ids=ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                **{CACHE: cache},
                use_cache=True,
                # of the context only the cache is wanted
                logits_to_keep=1 if start < first else end - start,
            ).logits
            if start < first:
                continue
            logs = logits.log_softmax(-1, dtype=self.softmax_dtype or torch.float32)
            best = logs.argmax(-1)
            for row, (_, members) in enumerate(batch):
                for at in members:
                    target = torch.tensor(requests[at][2][start - first : end - first], device=self.device)
                    sums[at] += float(logs[row].gather(-1, target[:, None]).sum())
                    greedy[at] &= bool((best[row] == target).all())
        for at, total in sums.items():
            yield at, (total, greedy[at])

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **generation_kwargs: Any) -> torch.Tensor:
        cache = self._new_cache(generation_kwargs["attention_mask"])
        if cache is not None:
            generation_kwargs[CACHE] = cache
        started = time.perf_counter()
        made = super()._model_generate(context, max_length, stop, return_dict_in_generate=True, **generation_kwargs)
        sequences: torch.Tensor = made.sequences
        if self._on_batch is not None:
            new = sequences[:, context.shape[1] :].tolist()
            seconds = time.perf_counter() - started
            ends = {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id}
            tokens = sum(len(until(row, ends)) for row in new)
            stored, held = cache_size(made[CACHE], len(context))
            self._on_batch(Batch(len(context), tokens, seconds, stored, held, self._keys_since()))
        return sequences

    def _keys_since(self) -> tuple[int, int, int] | None:
        layers = [] if self.handle is None else self.handle.report().selectivity
        if not layers:
            return None
        now = (sum(x.there for x in layers), sum(x.dense for x in layers), sum(x.read for x in layers))
        before, self._keys = self._keys, now
        return (now[0] - before[0], now[1] - before[1], now[2] - before[2])


def _budgeted(requests: list[tuple[int, str]], tokens: int, most: int) -> Iterator[list[int]]:
    """Indices of requests (length, options of `generate`) in batches of equal options, longest first, within budget."""
    order = sorted(range(len(requests)), key=lambda at: (requests[at][1], -requests[at][0], at))
    batch: list[int] = []
    for at in order:
        if batch:
            # the first of a batch is its longest, to which the others are padded
            width, way = requests[batch[0]]
            if way != requests[at][1] or len(batch) == most or (len(batch) + 1) * width > tokens:
                yield batch
                batch = []
        batch.append(at)
    if batch:
        yield batch


def _batches(requests: list[Request], longest: int, size: int) -> Iterator[list[tuple[list[int], list[int]]]]:
    """(input ids, requests) of like length, in batches of continuations of one length; equal inputs are run once."""
    groups: dict[int, dict[tuple[int, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for at, (_, context, continuation) in enumerate(requests):
        # the last token is scored, never fed; what is too long loses its left end, as in HFLM
        groups[len(continuation)][tuple((context + continuation)[-(longest + 1) : -1])].append(at)
    for _, inputs in sorted(groups.items(), reverse=True):
        order = sorted(inputs.items(), key=lambda pair: -len(pair[0]))
        for at in range(0, len(order), size):
            yield [(list(ids), members) for ids, members in order[at : at + size]]
