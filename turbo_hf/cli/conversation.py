"""Text from a patched model: streamed, on one cache that goes on from turn to turn."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TextStreamer

from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.models.versions import CACHE
from turbo_hf.patching.handle import Handle


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model said, without special tokens.

    prompt_tokens: all that it answers, with the earlier turns.
    reused_tokens: those of them that were cached already.
    new_tokens: those of the reply.
    seconds: for prompt and reply.
    """

    text: str
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    seconds: float


def sampling(temperature: float | None, top_p: float | None) -> dict[str, Any]:
    """Options of `generate`; where nothing is chosen, the model's own generation config holds.

    Raises:
        ValueError: a temperature below 0 or not finite, a `top_p` that is not above 0 and at most 1, or one beside
            temperature 0, which is greedy.
    """
    if temperature is not None and not 0 <= temperature < float("inf"):
        raise ValueError(f"the temperature must be 0 (greedy) or a number above; got {temperature}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top-p must be a share of probability, above 0 and at most 1; got {top_p}.")
    if temperature == 0:
        if top_p is not None:
            raise ValueError("temperature 0 is greedy, and top-p has no effect beside it. Leave one of them out.")
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    given = {"temperature": temperature, "top_p": top_p}
    chosen = {name: value for name, value in given.items() if value is not None}
    return {"do_sample": True, **chosen} if chosen else {}


class Conversation:
    """A patched model, what was said so far, and the cache that holds it.

    Args:
        model, tokenizer: loaded; `model` is patched. handle: of the patch.
        options: further ones of `generate`.
    """

    def __init__(self, model: Any, tokenizer: Any, handle: Handle, options: dict[str, Any]):
        self._model, self._tokenizer, self._handle, self._options = model, tokenizer, handle, options
        self._messages: list[dict[str, str]] = []
        self._cached: list[int] = []
        self.cache: TurboCache = handle.new_cache()

    def complete(self, prompt: str) -> Reply:
        """Stream the continuation of a text to stdout. ValueError: the text has no tokens."""
        return self._generate(self._tokenizer(prompt)["input_ids"])

    def answer(self, message: str) -> Reply:
        """Stream the reply to the next message of a chat to stdout. ValueError: the chat template refuses it."""
        said = [*self._messages, {"role": "user", "content": message}]
        try:
            ids = self._tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
        except Exception as error:  # a template is the model's own code, and may raise anything
            raise ValueError(f"the chat template of this model refuses the conversation: {error}") from error
        reply = self._generate(ids)
        self._messages = [*said, {"role": "assistant", "content": reply.text}]
        return reply

    def _generate(self, ids: list[int]) -> Reply:
        if not ids:
            raise ValueError("the prompt has no tokens: there is nothing to continue.")
        began = time.perf_counter()
        reused = len(self._cached)
        # a template may write an earlier turn otherwise than it was generated, for one without its reasoning
        if not (len(ids) > reused and ids[:reused] == self._cached):
            self.cache, reused = self._handle.new_cache(), 0
        tokens = torch.tensor([ids], device=self._model.device)
        spoken = self._model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            streamer=TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True),
            # for stop strings
            tokenizer=self._tokenizer,
            pad_token_id=self._tokenizer.pad_token_id,
            **self._options,
            **{CACHE: self.cache},
        )[0].tolist()
        # the newest token was not read yet
        self._cached = spoken[: self.cache.get_seq_length()]
        new = spoken[len(ids) :]
        text = self._tokenizer.decode(new, skip_special_tokens=True)
        return Reply(text, len(ids), reused, len(new), round(time.perf_counter() - began, 3))
