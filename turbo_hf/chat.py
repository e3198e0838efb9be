"""A chat over one cache that is kept from turn to turn."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from turbo_hf.errors import logger
from turbo_hf.models.versions import CACHE

OWN = (
    "inputs", "input_ids", "inputs_embeds", "attention_mask", "cache", "past_key_values", "return_dict_in_generate"
)  # fmt: skip
"""Options of `generate` that a chat sets."""

NEEDED = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "cache_implementation": None}
"""What others must be; None is as good."""


class Chat:
    """A conversation whose turns share one cache.

    Each turn brings all messages through the chat template, which drops what it drops (reasoning of earlier answers).
    Where the tokens are not those of the cache, the cache is cropped to the prefix that they share, or made anew if its
    layers cannot be cropped (sliding windows); the rest is computed. So answers are those of the whole conversation.

    Args:
        model: a patched model; one that is not patched has Transformers' cache.
        tokenizer: one with a chat template.
        messages: how the conversation begins: dicts with "role" and "content".
        options: of `generate`, for each turn.

    Attributes:
        messages: list of dicts, the conversation so far; it may be edited between turns.
        reused, dropped: of the last turn, tokens that the cache held already, and tokens that it held in vain: a
            message to the logger `turbo_hf.errors` (INFO) says so, too.

    Raises:
        ValueError: no chat template, or messages that are none.
    """

    def __init__(self, model: Any, tokenizer: Any, messages: Any = (), **options: Any):
        if not tokenizer.chat_template:
            raise ValueError("a chat needs a tokenizer with a chat template; this one has none. Set chat_template.")
        self.messages, self.reused, self.dropped = _checked(messages), 0, 0
        self._model, self._tokenizer, self._options = model, tokenizer, options
        self._cache: Any = None
        # the tokens that it holds
        self._seen: list[int] = []

    def say(self, text: str, **options: Any) -> str:
        """The answer to `text`, without special tokens. A turn that breaks off leaves the messages as they were.

        options: of `generate`, for this turn.

        Raises:
            ValueError: no string, messages that are none, or options for several answers, beams, or another cache.
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a string; got {text!r}. Other messages go into chat.messages.")
        chosen = {**self._options, **options}
        if taken := [name for name in OWN if name in chosen]:
            raise ValueError(f"a chat sets {', '.join(taken)} itself. Leave that out.")
        for name, needed in NEEDED.items():
            given = chosen.get(name, getattr(chosen.get("generation_config") or self._model.generation_config, name))
            if given not in (None, needed):
                raise ValueError(
                    f"a chat has one answer, in one row over its own cache; got {name}={given!r}. Set it to {needed}."
                )
        turn = [*_checked(self.messages), {"role": "user", "content": text}]
        ids = self._tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
        cache = self._prefix_of(ids)
        # an error in the pass leaves it in no known state
        self._cache, self._seen = None, []
        tokens = torch.tensor([ids], device=self._model.device)
        given = {CACHE: cache, "return_dict_in_generate": True, "attention_mask": torch.ones_like(tokens)}
        made = self._model.generate(tokens, **chosen, **given)
        said = made.sequences[0].tolist()
        self._cache = made[CACHE]
        self._seen = said[: self._cache.get_seq_length()]
        answer = str(self._tokenizer.decode(said[len(ids) :], skip_special_tokens=True))
        self.messages = [*turn, {"role": "assistant", "content": answer}]
        return answer

    def _prefix_of(self, ids: list[int]) -> Any:
        """The cache, with no token that `ids` does not begin with, and at least one less; None: there is none."""
        pairs = enumerate(zip(self._seen, ids[:-1], strict=False))
        same = next((n for n, (held, wanted) in pairs if held != wanted), min(len(self._seen), len(ids) - 1))
        self.reused, self.dropped, cache = same, len(self._seen) - same, self._cache
        if self.dropped:
            try:
                cache.crop(-self.dropped)
            except (ValueError, RuntimeError):  # ours, and those of a cache of Transformers
                self.reused, self.dropped, cache = 0, len(self._seen), None
            logger.info(
                "chat: the conversation is not that of the cache from token %d on: %d tokens of the cache are dropped, "
                "%d are kept",
                same, self.dropped, self.reused,
            )  # fmt: skip
        return cache


def _checked(messages: Any) -> list[Any]:
    """The messages as a list. ValueError: they are none."""
    found = list(messages) if isinstance(messages, Iterable) else [messages]
    for one in found:
        # other kinds of messages are Transformers' to judge
        if one is None or isinstance(one, str) or (isinstance(one, Mapping) and "role" not in one):
            raise ValueError(
                f'messages must be a list of dicts with "role" and "content"; got {str(one)[:80]!r} there.'
            )
    return found
