"""Chats over one cache: what is kept from turn to turn, and what an edited conversation costs."""

import copy
import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import lab_model, tiny_mistral
from transformers import GenerationConfig

import turbo_hf
from turbo_hf import Chat, TurboConfig
from turbo_hf.models.versions import CACHE

TEMPLATE = """{%- for message in messages -%}
{{ '\n' + message.role + ': ' + message.content.split('</think>')[-1] }}
{%- endfor -%}
{{ '\nassistant:' if add_generation_prompt else '' }}"""
LONG = "Read the notes below and remember every number in them, for you will be asked for one of them later. " * 6
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}


@pytest.fixture
def parts() -> Any:
    model, shared = lab_model()
    tokenizer = copy.deepcopy(shared)
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer


def anew(model: Any, tokenizer: Any, chat: Chat) -> str:
    """The last answer, computed from the whole conversation."""
    before = chat.messages[:-1]
    ids = tokenizer.apply_chat_template(before, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**ids, **OPTIONS)
    return str(tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def test_each_turn_computes_what_is_new(parts: Any) -> None:
    model, tokenizer = parts
    with turbo_hf.patch(model, TurboConfig(bits=16)):
        chat = Chat(model, tokenizer, [{"role": "system", "content": LONG}], **OPTIONS)
        assert chat.say("The special magic number is 4281. The number is") == anew(model, tokenizer, chat)
        assert (chat.reused, chat.dropped) == (0, 0)
        held = len(chat._seen)
        assert chat.say("And then?") == anew(model, tokenizer, chat)
        # letters of an answer may be other tokens when they are read again
        assert chat.reused > held - OPTIONS["max_new_tokens"]
        assert chat.reused + chat.dropped == held
        assert isinstance(chat._cache, turbo_hf.TurboCache)
        assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * 2]


@pytest.mark.parametrize("preset", ["turbo4", None])
def test_reasoning_of_earlier_turns_is_dropped_and_told(
    preset: str | None, parts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = parts
    handle = None if preset is None else turbo_hf.patch(model, preset)
    chat = Chat(model, tokenizer, [{"role": "system", "content": LONG}], **OPTIONS)
    chat.say("One.")
    prompt = len(chat._seen) + 1 - OPTIONS["max_new_tokens"]
    chat.messages[-1]["content"] = "I think.</think> Two."
    with caplog.at_level(logging.INFO, "turbo_hf"):
        said = chat.say("Three.")
    assert prompt - 1 <= chat.reused <= prompt + 1
    assert chat.dropped > OPTIONS["max_new_tokens"] - 3
    assert f"from token {chat.reused} on: {chat.dropped} tokens of the cache are dropped" in caplog.text
    if handle is None:
        assert said == anew(model, tokenizer, chat)
    else:
        handle.remove()


def test_an_edited_or_shorter_conversation_is_computed_from_there(parts: Any) -> None:
    model, tokenizer = parts
    with turbo_hf.patch(model, TurboConfig(bits=16)):
        chat = Chat(model, tokenizer, [{"role": "system", "content": LONG}], **OPTIONS)
        first = chat.say("One.")
        chat.messages = chat.messages[:1]
        assert chat.say("One.") == first
        # all of the prompt but the token that is passed
        assert chat.dropped == OPTIONS["max_new_tokens"]
        chat.messages[0] = {"role": "system", "content": "Short."}
        assert chat.say("Two.") == anew(model, tokenizer, chat)
        assert chat.reused < 10


@pytest.mark.parametrize("patched", [True, False])
def test_a_cache_that_cannot_be_cropped_is_made_anew(patched: bool, parts: Any) -> None:
    _, tokenizer = parts
    model = tiny_mistral(16, vocab_size=3072)
    with turbo_hf.patch(model, TurboConfig(bits=16)) if patched else nullcontext():
        chat = Chat(model, tokenizer, **OPTIONS)
        chat.say(LONG)
        held = len(chat._seen)
        chat.messages[0]["content"] = "Other."
        assert chat.say("Two.") == anew(model, tokenizer, chat)
        assert (chat.reused, chat.dropped) == (0, held)


def test_a_turn_that_breaks_off_is_as_if_not_said(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = parts
    with turbo_hf.patch(model):
        chat = Chat(model, tokenizer, **OPTIONS)
        chat.say("One.")
        before = list(chat.messages)

        class Ends:
            def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            chat.say("Two.", logits_processor=[Ends()])
        assert chat.messages == before
        chat.say("Two.")
        assert chat.reused == 0


def test_mistakes_are_told(parts: Any) -> None:
    model, tokenizer = parts
    with pytest.raises(ValueError, match="got num_beams=2"):
        Chat(model, tokenizer, num_beams=2).say("One.")
    with pytest.raises(ValueError, match="got num_return_sequences=3"):
        Chat(model, tokenizer).say("One.", num_return_sequences=3)
    for options in ({"cache_implementation": "static"}, {"use_cache": False}):
        # from a generation config, too
        for given in (options, {"generation_config": GenerationConfig(**options)}):
            with pytest.raises(ValueError, match=f"over its own cache; got {next(iter(options))}="):
                Chat(model, tokenizer).say("One.", **given)
    own: dict[str, Any]
    for own in ({CACHE: None}, {"return_dict_in_generate": True}, {"attention_mask": torch.ones(1, 3)}):
        with pytest.raises(ValueError, match=f"a chat sets {next(iter(own))} itself"):
            Chat(model, tokenizer, **own).say("One.")
    for messages in ("One.", None, ["One."], {"role": "user", "content": "One."}, [{"content": "One."}]):
        with pytest.raises(ValueError, match="messages must be a list of dicts"):
            Chat(model, tokenizer, messages)
    chat = Chat(model, tokenizer)
    chat.messages.append("One.")
    with pytest.raises(ValueError, match="messages must be a list of dicts"):
        chat.say("Two.")
    with pytest.raises(ValueError, match="text must be a string; got 5"):
        Chat(model, tokenizer).say(5)  # type: ignore[arg-type]
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="a chat needs a tokenizer with a chat template"):
        Chat(model, tokenizer)
