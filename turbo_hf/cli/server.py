"""The app that `turbo-hf serve` runs: Transformers' own, for one patched model.

What that app would pass over in a request is refused here. Imports Transformers' server as it is from 5.20 on, with
fastapi and openai.
"""

import asyncio
import inspect
import json
import re
import threading
import time
import uuid
from typing import Any

import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import (
    X_REQUEST_ID,
    BaseHandler,
    CBGenerateManager,
    CBStreamer,
    GenerationState,
    _StreamError,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingTemperatureLogitsWarper,
    ContinuousBatchingTopKLogitsWarper,
    ContinuousBatchingTopPLogitsWarper,
)
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from turbo_hf.cli.generate import LEAST_TEMPERATURE
from turbo_hf.console import err
from turbo_hf.errors import Unsupported, shortened

ROUTES = ("/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/health")
"""What is served; Transformers' other routes load models and read audio."""

USUAL_TOKENS = 1024
"""Tokens that a request may generate if it does not say."""

KNOWN = {
    "temperature", "top_p", "top_k", "do_sample", "bos_token_id", "eos_token_id", "pad_token_id", "max_length",
    "max_new_tokens", "use_cache", "cache_implementation", "transformers_version", "_from_model_config",
}  # fmt: skip
"""Options of a model's generation config that the server follows or has no use for."""

REFUSED = ("stop", "frequency_penalty", "logit_bias", "generation_config", "suffix")
"""Fields that Transformers' app knows, but not with continuous batching."""

WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "stream_options")
"""Fields that the answer does not depend on: usage is always sent."""

USUAL = {
    "n": 1, "best_of": 1, "parallel_tool_calls": True, "tool_choice": "auto", "truncation": "disabled",
    "response_format": {"type": "text"}, "modalities": ["text"], "text": {"format": {"type": "text"}},
}  # fmt: skip
"""Values of fields, beside empty ones, that ask for what is done anyway."""

WARM = ((4, 1200), (4, 1200), (32, 8), (64, 8))
"""Requests of its own with which the server begins: at a time, and tokens of their prompts. The second time these are
stored; many rows have kernels of their own."""

FLAGS = ("stream", "ignore_eos")
"""Fields that are true or false, by default false. The second is of vLLM: an answer is as long as it may be."""

NUMBERS = {"temperature": (0, 2), "top_p": (1e-6, 1)}
COUNTS = {"max_tokens": 1, "max_completion_tokens": 1, "max_output_tokens": 1, "seed": 0}


class OneModel(ModelManager):
    """The model that is patched already, by the name it was given; requests that name another are refused."""

    def __init__(self, model: Any, tokenizer: Any, name: str):
        self._pair = model, tokenizer
        super().__init__(force_model=name)

    def load_model_and_processor(self, *_: Any, **__: Any) -> Any:
        """The one there is."""
        return self._pair

    def list_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        """The one there is; Transformers before 5.24 lists all that is downloaded."""
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "local"}]

    # so called before 5.24
    get_gen_models = list_models


class Draw(ContinuousBatchingLogitsProcessor):
    """Gumbel noise for requests that sample: the highest of noisy scores is a draw of their softmax. So requests that
    sample and greedy ones share a pass."""

    supported_kwargs = {"draw": int}  # noqa: RUF012 - as in Transformers
    ignored_kwargs = ()

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Greedy."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Whether each request samples."""
        asked = [request.state.logit_processor_kwargs.get("draw", 0) for request in requests_with_new_token]
        return torch.tensor(asked, dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """scores [tokens, vocabulary]."""
        noise = torch.empty_like(scores).exponential_().clamp_min_(torch.finfo(scores.dtype).tiny).log_()
        return torch.where(tensor_arg[: scores.size(0), None] > 0, scores - noise, scores)


class Requests(CBGenerateManager):
    """The requests of one manager of continuous batching, each with its own sampling, and what came of them.

    pool: tokens that the pool shall hold; None: as memory allows.

    Raises:
        Unsupported: this model cannot be served.
    """

    def __init__(self, model: Any, pool: int | None = None):
        cuda = model.device.type == "cuda"
        blocks: Any = {} if pool is None else {"num_blocks": -(-pool // 256), "page_size": 256}
        # processors of scores take memory beside the pool
        share: Any = {"max_memory_percent": 0.8} if cuda and pool is None else {}
        config = ContinuousBatchingConfig(max_batch_tokens=2048 if cuda else 512, **blocks, **share)
        super().__init__(config)
        own, self._model = model.generation_config, model
        self.left_out = sorted(set(own.to_diff_dict()) - KNOWN)
        ends = GenerationConfig(do_sample=False, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id)
        self._cb: Any = model.init_continuous_batching(ends, continuous_batching_config=config)
        self._vocabulary = model.config.get_text_config().vocab_size
        processors: Any = self._cb.logit_processor
        processors.logits_processor += [
            ContinuousBatchingTemperatureLogitsWarper(TemperatureLogitsWarper(1.0)),
            ContinuousBatchingTopKLogitsWarper(TopKLogitsWarper(self._vocabulary)),
            ContinuousBatchingTopPLogitsWarper(TopPLogitsWarper(1.0)),
            Draw(),
        ]
        processors.tensors_required, processors.do_processing = 4, True
        processors._retrieve_processors_kwargs()
        self._cb.warmup()
        self.cache: Any = self._cb.batch_processor.cache
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.longest = min(self.cache.capacity, context or self.cache.capacity)
        self.waiting: set[str] = set()
        self.tokens = 0
        self._cb.start()

    def init_cb(self, model: Any, gen_config: GenerationConfig) -> None:
        """Nothing: it runs, and each request has its own config."""

    def warm(self) -> None:
        """Answer a few requests of its own, so that no client waits for kernels to compile and steps to be captured.

        Unsupported: one failed.
        """

        async def ask_all(count: int, tokens: int, word: str) -> None:
            length = min(tokens, self.longest - 4)
            prompts = (
                [(i if i < length // 2 else i * (n + 2)) % self._vocabulary for i in range(max(1, length - n))]
                for n in range(count)
            )
            asked = GenerationConfig(max_new_tokens=3)
            for output in await asyncio.gather(
                *(self._answer(ids, asked, f"{word} {n}") for n, ids in enumerate(prompts))
            ):
                if output.error is not None:
                    raise Unsupported(f"a first request failed: {output.error}")

        for number, (count, tokens) in enumerate(WARM):
            asyncio.run(ask_all(count, tokens, f"first {number}"))
        serving = self.cache.serving
        self.tokens = serving.hit_tokens = serving.prompt_tokens = 0

    def forget(self, name: str) -> None:
        """End a request that nobody waits for."""
        if name in self.waiting:
            self.waiting.discard(name)
            self._cb.cancel_request(name)
            self._cb.output_router.result_handlers.pop(name, None)

    def _send(self, ids: list[int], wanted: GenerationConfig, name: str, take: Any) -> None:
        """Begin a request, whose outputs `take` gets. HTTPException: it does not fit."""
        self._check_alive(name)
        if not ids:
            raise HTTPException(400, "the prompt has no tokens: there is nothing to continue.")
        left = self.longest - len(ids)
        new = min(USUAL_TOKENS, left) if wanted.max_new_tokens is None else wanted.max_new_tokens
        if not 0 < new <= left:
            raise HTTPException(
                400,
                f"a prompt of {len(ids)} tokens and an answer of up to {max(1, new)} do not fit: this server has room "
                f"for {self.longest} tokens of one request. Shorten the prompt or lower the maximum.",
            )
        # whether the answer ended by its length is told by this
        wanted.max_new_tokens = new
        sampled = bool(wanted.do_sample)
        draw = {
            "draw": int(sampled),
            "temperature": float(wanted.temperature or 1.0) if sampled else 1.0,
            "top_k": int(wanted.top_k or self._vocabulary) if sampled else self._vocabulary,
            "top_p": float(wanted.top_p or 1.0) if sampled else 1.0,
        }
        seen = 0

        def deliver(output: Any) -> None:
            nonlocal seen
            self.tokens += len(output.generated_tokens) - seen
            seen = len(output.generated_tokens)
            if output.is_finished() or output.error is not None:
                self.waiting.discard(name)
            if output.error is not None:
                err.print(f"request {name} failed: {output.error}", markup=False, highlight=False, soft_wrap=True)
            take(output)

        # before the request, which may end at once
        self._cb.register_result_handler(name, deliver)
        self.waiting.add(name)
        ends = {"max_new_tokens": new, "eos_token_id": wanted.eos_token_id}
        if self._cb.add_request(ids, request_id=name, streaming=True, **ends, **draw) is None:
            self.forget(name)
            raise HTTPException(503, "the server is ending, and takes no more requests.")

    async def _answer(self, ids: list[int], wanted: GenerationConfig, name: str) -> Any:
        """The output of a request that has ended, or failed."""
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def take(output: Any) -> None:
            if (output.is_finished() or output.error is not None) and not ended.done():
                ended.set_result(output)

        self._send(ids, wanted, name, take)
        return await ended

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> Any:
        """See Transformers."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        streamer = CBStreamer(self._cb, request_id, processor._tokenizer, loop, queue, response_parser)

        def take(output: Any) -> None:
            streamer.put(output)
            if output.error is not None:
                # Transformers writes it between quotes
                queue.put_nowait(_StreamError(json.dumps(output.error)[1:-1]))
            elif output.is_finished():
                streamer.end()

        self._send(inputs["input_ids"], gen_config, request_id, take)
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """See Transformers."""
        output = await self._answer(inputs["input_ids"], gen_config, request_id)
        if output.error is not None:
            raise HTTPException(500, f"request {request_id} failed: {output.error}")
        text = processor.decode(output.generated_tokens, skip_special_tokens=True)
        return text, len(inputs["input_ids"]), output.generated_tokens


class OneManager(GenerationState):
    """Every request goes to `requests`."""

    def __init__(self, requests: Requests):
        super().__init__(continuous_batching=True)
        self._cb_manager: Any = requests

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        """The one there is."""
        return self._cb_manager


class Checked(BaseHandler):
    """Refuses what Transformers' handler would pass over, or fail at without saying why."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """See Transformers."""
        body.update((field, body.get(field) or False) for field in FLAGS)
        try:
            return await super().handle_request(body, request_id)  # type: ignore[misc] # of the class beside this one
        except HTTPException as refusal:
            reason, found = refusal.detail, refusal
        except RuntimeError:
            raise
        except Exception as error:  # templates and conversions raise what they like
            reason = f"the request cannot be read: {shortened(error)}"
            found = HTTPException(400, reason)
        err.print(f"request {request_id} refused: {reason}", markup=False, highlight=False, soft_wrap=True)
        raise found

    def _validate_request(self, body: dict[str, Any]) -> None:
        try:
            super()._validate_request({field: value for field, value in body.items() if field != "ignore_eos"})
        except HTTPException as refusal:
            raise HTTPException(refusal.status_code, f"{refusal.detail}. Leave them out.") from refusal
        for field in FLAGS:
            if not isinstance(body[field], bool):
                raise HTTPException(400, f"{field} must be true or false; got {body[field]!r}.")
        if not isinstance(body.get("prompt", ""), str):
            raise HTTPException(400, f"prompt must be one string; got {body['prompt']!r}. Send a request for each.")
        for field in body.keys() & {*self._unused_fields, *REFUSED} - {*WITHOUT_EFFECT}:
            if body[field] and body[field] != USUAL.get(field):
                raise HTTPException(400, f"{field}={body[field]!r} is not supported by this server. Leave it out.")
        for field, (least, most) in NUMBERS.items():
            value = body.get(field)
            if value is not None and not (type(value) in (int, float) and least <= value <= most):
                raise HTTPException(400, f"{field} must be a number from {least} to {most}; got {value!r}.")
        for field, least in COUNTS.items():
            value = body.get(field)
            if value is not None and not (type(value) is int and least <= value < 1 << 63):
                raise HTTPException(400, f"{field} must be a whole number from {least} on; got {value!r}.")
        messages = body.get("messages", [{"role": "user"}])
        if not (isinstance(messages, list) and messages and all(isinstance(x, dict) and "role" in x for x in messages)):
            raise HTTPException(400, f"messages must be a list of objects with a role, not empty; got {messages!r}.")
        self._check_template(body.get("tools"), body.get("chat_template_kwargs") or ())

    def _check_template(self, tools: Any, kwargs: Any) -> None:
        """HTTPException: the chat template does not know what the request passes to it."""
        if not (tools or kwargs):
            return
        tokenizer: Any = self.model_manager.load_model_and_processor("")[1]
        names = set(re.findall(r"\w+", tokenizer.get_chat_template(tools=tools or None)))
        if tools and "tools" not in names:
            raise HTTPException(400, "tools: the chat template of this model knows none. Leave them out.")
        for field in kwargs:
            if field in inspect.signature(tokenizer.apply_chat_template).parameters:
                raise HTTPException(400, f"chat_template_kwargs may not set {field!r}, which the server decides.")
            if field not in names:
                raise HTTPException(400, f"chat_template_kwargs: the chat template knows no {field!r}. Leave it out.")

    def _build_generation_config(self, body: dict[str, Any], model_generation_config: Any, use_cb: bool = False) -> Any:
        asked = any(body.get(field) is not None for field in COUNTS if field != "seed")
        wanted = super()._build_generation_config(body, model_generation_config, use_cb=use_cb)
        if not asked:
            wanted.max_new_tokens = None
        if body.get("temperature") is not None:
            wanted.do_sample = body["temperature"] >= LEAST_TEMPERATURE
        if body["ignore_eos"]:
            wanted.eos_token_id = -1
        return wanted

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict[str, Any]], modality: Any) -> list[dict[str, Any]]:
        """See Transformers. HTTPException: a part is no text."""
        for message in messages:
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                if part["type"] not in ("text", "input_text", "output_text"):
                    raise HTTPException(400, f"a message may hold text alone; got a part of type {part['type']!r}.")
        return BaseHandler.get_processor_inputs_from_messages(messages, modality)


class Chat(Checked, ChatCompletionHandler):
    """/v1/chat/completions"""


class Completions(Checked, CompletionHandler):
    """/v1/completions"""


class Responses(Checked, ResponseHandler):
    """/v1/responses"""


class HangUps:
    """Gives each request a name of its own, and ends it when its client has gone."""

    def __init__(self, app: Any, requests: Requests):
        self._app, self._requests = app, requests

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name, messages = uuid.uuid4().hex, asyncio.Queue[Any]()
        others = [pair for pair in scope["headers"] if pair[0].lower() != X_REQUEST_ID.encode()]
        named = {**scope, "headers": [*others, (X_REQUEST_ID.encode(), name.encode())]}

        async def listen() -> None:
            while True:
                messages.put_nowait(message := await receive())
                if message["type"] == "http.disconnect":
                    return

        listening = asyncio.create_task(listen())
        answering = asyncio.create_task(self._app(named, messages.get, send))
        try:
            await asyncio.wait({listening, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                answering.cancel()
                await asyncio.wait({answering})
            if not answering.cancelled():
                # what it raised
                answering.result()
        finally:
            listening.cancel()
            self._requests.forget(name)


async def _in_their_words(_: Request, refusal: HTTPException) -> JSONResponse:
    """A refusal as clients of OpenAI read it."""
    kind = "invalid_request_error" if refusal.status_code < 500 else "server_error"
    of_error = {"message": refusal.detail, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": of_error}, status_code=refusal.status_code)


async def _not_read(request: Request, refusal: RequestValidationError) -> JSONResponse:
    """A body that is no JSON object."""
    said = f"the body must be a JSON object: {refusal.errors()[0]['msg']}."
    return await _in_their_words(request, HTTPException(400, said))


def app_of(model: Any, tokenizer: Any, name: str, requests: Requests) -> FastAPI:
    """Transformers' app for this model, under this name, with `ROUTES` alone."""
    manager, state = OneModel(model, tokenizer, name), OneManager(requests)
    given: Any = {"model_manager": manager, "generation_state": state}
    none: Any = None
    app = build_server(
        manager, Chat(**given), Completions(**given), Responses(**given),
        transcription_handler=none, systemone_handler=none, generation_state=state,
    )  # fmt: skip
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") in ROUTES]
    # its own, and those of unknown routes and methods
    for kind in (HTTPException, 404, 405):
        app.exception_handler(kind)(_in_their_words)
    app.exception_handler(RequestValidationError)(_not_read)
    app.add_middleware(HangUps, requests=requests)
    return app


class Meter(threading.Thread):
    """Writes a line on stderr every `every` seconds in which a token came or a request waited."""

    def __init__(self, requests: Requests, every: float = 5.0):
        super().__init__(daemon=True)
        self._requests, self._every, self._end = requests, every, threading.Event()

    def run(self) -> None:
        """Until `stop`."""
        tokens, then = 0, time.monotonic()
        while not self._end.wait(self._every):
            now, count = time.monotonic(), self._requests.tokens
            if count != tokens or self._requests.waiting:
                err.print(self.line(count - tokens, now - then), markup=False, highlight=False, soft_wrap=True)
            tokens, then = count, now

    def line(self, new: int, seconds: float) -> str:
        """Requests, tokens, stored prefixes and memory."""
        cache, serving = self._requests.cache, self._requests.cache.serving
        held, found, of = cache.memory(), serving.hit_tokens, serving.prompt_tokens
        return (
            f"{len(self._requests.waiting)} requests; {new} tokens in {seconds:.1f} s ({new / seconds:.1f}/s); "
            f"{found / max(1, of):.0%} of {of} prompt tokens were stored; cache: {held.tokens} tokens in "
            f"{held.total / 1e6:.1f} of {cache.cache_tensor.nbytes / 1e6:.1f} MB"
        )

    def stop(self) -> None:
        """End it."""
        self._end.set()
