"""`turbo-hf generate`: streamed text, chats, and what it says of mistakes."""

import errno
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from models import LAB_MODEL, lab_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import turbo_hf
from turbo_hf import TurboConfig
from turbo_hf.cli.generate import _continue, _sampling
from turbo_hf.cli.main import app

LAB = str(LAB_MODEL)
PROMPT = "The special magic number is 4281. The number is"
EXACT = TurboConfig(bits=16, attention="fp16", block_size=32)
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] == 'refuse' %}{{ raise_exception('no such word') }}{% endif %}"
    "{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise AssertionError(f"a connection was tried: {args}")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The carried model with a chat template."""
    folder = tmp_path_factory.mktemp("chatty")
    AutoModelForCausalLM.from_pretrained(LAB_MODEL, dtype="auto").save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(LAB_MODEL)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


def run(*words: str, code: int = 0, typed: str | bytes = "") -> Any:
    result = CliRunner().invoke(app, ["generate", *words, "--device", "cpu"], input=typed)
    assert result.exit_code == code, result.output
    return result


def test_a_reader_that_has_had_enough_ends_it_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("turbo_hf.cli.generate._continue", broken)
    result = run(LAB, PROMPT, code=1)
    assert "pipe" not in result.output
    assert "error" not in result.output.lower()


@pytest.mark.usefixtures("no_network")
def test_a_prompt_is_continued(tmp_path: Path) -> None:
    result = run(LAB, PROMPT, "--max-new-tokens", "8", "--memory", "--json")
    text, line = result.stdout.splitlines()
    facts = json.loads(line)
    (reply,) = facts["replies"]
    assert text == reply["text"]
    assert "4281" in text
    assert facts["config"] == TurboConfig().to_dict()
    assert facts["memory"]["tokens"] == reply["prompt_tokens"] + reply["new_tokens"] - 1
    assert f"KV cache: {facts['memory']['tokens']} tokens in {facts['memory']['bytes']:,} bytes, " in result.stderr
    assert f"{facts['memory']['compression']:.2f} x less than in bfloat16." in result.stderr
    # the text alone is on standard output
    assert run(LAB, PROMPT, "--max-new-tokens", "8").stdout == f"{text}\n"
    assert run(LAB, "-", "--max-new-tokens", "8", typed=f"{PROMPT}\n").stdout == f"{text}\n"
    mine = tmp_path / "mine.json"
    mine.write_text('{"preset": "int8", "block_size": 32}')
    facts = json.loads(
        run(
            LAB, PROMPT, "--config", str(mine), "--dtype", "float32", "--max-new-tokens", "2", "--json"
        ).stdout.splitlines()[-1]
    )
    assert facts["config"] == TurboConfig(bits=8, block_size=32).to_dict()
    assert facts["dtype"] == "torch.float32"


def test_it_says_what_generate_says() -> None:
    model, tokenizer = lab_model()
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with turbo_hf.patch(model, EXACT) as handle:
        want = model.generate(**inputs, max_new_tokens=12)[0, inputs.input_ids.shape[1] :]
        cache, ids = handle.new_cache(), inputs.input_ids[0].tolist()
        reply = _continue(model, tokenizer, ids, cache, {"max_new_tokens": 12})
        with pytest.raises(ValueError, match="the prompt has no tokens: there is nothing to continue"):
            _continue(model, tokenizer, [], cache, {})
    assert reply["text"] == tokenizer.decode(want, skip_special_tokens=True)
    assert reply["new_tokens"] == len(want)


def test_a_seed_repeats_what_is_sampled() -> None:
    words = (LAB, "The grass is", "--max-new-tokens", "9", "--temperature", "1.5")
    one, same, other = (run(*words, "--seed", seed).stdout for seed in ("1", "1", "2"))
    assert one == same != other
    greedy = run(*words[:4], "--temperature", "0").stdout
    assert greedy == run(*words[:4]).stdout, "the generation config of this model says greedy"


def test_sampling_is_as_the_generation_config_says_unless_it_is_chosen() -> None:
    assert _sampling(None) == {}
    assert _sampling(0.7) == {"do_sample": True, "temperature": 0.7}
    assert _sampling(0)["do_sample"] is False


@pytest.mark.usefixtures("no_network")
def test_lines_are_messages_after_those_before_them(chatty: str, tmp_path: Path) -> None:
    exact, words = tmp_path / "exact.json", ["--chat", "--max-new-tokens", "12", "--dtype", "float32", "--json"]
    exact.write_text(json.dumps(EXACT.to_dict()))
    words += ["--config", str(exact)]
    said = ["The special magic number is 4281. What is it?", "And again?"]
    result = run(chatty, *words, typed=f"{said[0]}\n\n  \n{said[1]}\n")
    facts = json.loads(result.stdout.splitlines()[-1])
    model: Any = AutoModelForCausalLM.from_pretrained(chatty, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(chatty)
    messages: list[dict[str, str]] = []
    for text, reply in zip(said, facts["replies"], strict=True):
        messages.append({"role": "user", "content": text})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        want = model.generate(**ids, max_new_tokens=12)[0, ids["input_ids"].shape[1] :]
        assert reply["text"] == tokenizer.decode(want, skip_special_tokens=True)
        assert reply["prompt_tokens"] == ids["input_ids"].shape[1]
        assert reply["text"] in result.stdout
        messages.append({"role": "assistant", "content": reply["text"]})
    assert facts["memory"]["tokens"] == sum(facts["replies"][1][name] for name in ("prompt_tokens", "new_tokens")) - 1
    once = json.loads(run(chatty, said[0], *words).stdout.splitlines()[-1])
    assert once["replies"][0]["text"] == facts["replies"][0]["text"]


@pytest.mark.parametrize(
    "asked",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"num_beams": 3},
        {"num_return_sequences": 2, "num_beams": 2},
        {"stop_strings": ["no such words"]},
    ],
    ids=str,
)
def test_one_reply_whatever_the_checkpoint_asks_for(tmp_path: Path, asked: dict[str, Any]) -> None:
    for file in LAB_MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    own = tmp_path / "generation_config.json"
    options = json.loads(own.read_text())
    own.unlink()
    own.write_text(json.dumps(options | asked))
    text, line = run(str(tmp_path), PROMPT, "--max-new-tokens", "8", "--json").stdout.splitlines()
    (reply,) = json.loads(line)["replies"]
    assert text.strip() == "4281."
    # each token is stored once, and the newest has not been read yet
    assert json.loads(line)["memory"]["tokens"] == reply["prompt_tokens"] + reply["new_tokens"] - 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([LAB], "there is no prompt: write it behind the model, or - for standard input, or chat with --chat."),
        ([LAB, "hi", "--chat"], "has no chat template. Without --chat, it continues the prompt as plain text."),
        ([LAB, "hi", "--dtype", "int8"], "unknown dtype int8; choose from auto, float32, bfloat16, float16."),
        ([LAB, "hi", "--temperature", "-1"], "the temperature must be 0 (greedy) or a number above; got -1.0."),
        ([LAB, "hi", "--temperature", "nan"], "the temperature must be 0 (greedy) or a number above; got nan."),
        ([LAB, "hi", "--preset", "turbo5"], "got 'turbo5'"),
        ([LAB, "hi", "--preset", "saap"], 'selector "saap" needs a calibration'),
        (["./nowhere", "hi"], "there is no folder './nowhere', and no repository of the Hub can have this name."),
    ],
)
def test_mistakes_get_one_sentence(words: list[str], message: str) -> None:
    result = run(*words, code=1)
    assert "Traceback" not in result.output
    assert message in " ".join(result.output.split())


def test_a_template_that_refuses_is_told(chatty: str) -> None:
    result = run(chatty, "refuse", "--chat", code=1)
    assert "the chat template of this model refuses the conversation: no such word" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("words", "typed"),
    [(["-"], b"caf\xe9"), (["caf\udce9"], ""), (["--chat"], b"caf\xe9\n")],
    ids=["input", "argument", "line"],
)
def test_bytes_that_are_no_text_are_told(chatty: str, words: list[str], typed: str | bytes) -> None:
    told = " ".join(run(chatty, *words, code=1, typed=typed).output.split())
    assert "error: the prompt is not UTF-8 text. Convert it first." in told


def test_a_full_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("turbo_hf.cli.generate._continue", full)
    told = " ".join(run(LAB, "hi", code=1).output.split())
    assert "error: the memory of cpu is full. Take a shorter prompt or fewer bits." in told
