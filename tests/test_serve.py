"""`turbo-hf serve`, met by OpenAI's own client on loopback."""

import importlib.util
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cli_support import check_refused, last_json, output_of, run
from models import LAB_MODEL
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoTokenizer

import turbo_hf
from turbo_hf.cli.serve import OLDEST

openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx2" if importlib.util.find_spec("httpx2") else "httpx")
if Version(transformers.__version__) < Version(OLDEST):
    pytest.skip(f"serve needs transformers {OLDEST}", allow_module_level=True)
# it imports fastapi, too
from turbo_hf.cli import server as served  # noqa: E402

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
QUESTION = "The special magic number is {}. The number is"
POOL = 4096


class Running:
    """A server, the model behind it, and a client."""

    def __init__(self, name: str, model: Any, tokenizer: Any, requests: served.Requests, port: int):
        self.name, self.model, self.tokenizer, self.requests, self.port = name, model, tokenizer, requests, port
        url = f"http://127.0.0.1:{port}/v1"
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600)

    def chat(self, text: str, **options: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        return self.client.chat.completions.create(**{"model": self.name, "messages": messages, **options})

    def text(self, text: str, **options: Any) -> str:
        return str(self.chat(text, **{"max_tokens": 8, "temperature": 0, **options}).choices[0].message.content)

    def refusal(self, **options: Any) -> str:
        with pytest.raises(openai.APIStatusError) as raised:
            self.chat(QUESTION.format(1), **options)
        assert 400 <= raised.value.status_code < 500
        return str(raised.value.body["message"] if isinstance(raised.value.body, dict) else raised.value.body)

    @property
    def left(self) -> int:
        """Requests that hold memory."""
        return len(self.requests.cache.allocator.slot_of)


def until(condition: Any) -> None:
    """Wait for what must come, however slow the machine is."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(LAB_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # every answer is as long as it may be
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    listener = socket.create_server(("127.0.0.1", 0))
    with turbo_hf.patch(model):
        requests = served.Requests(model, POOL)
        app = served.app_of(model, tokenizer, str(folder), requests)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield Running(str(folder), model, tokenizer, requests, listener.getsockname()[1])
        server.should_exit = True
        thread.join()


def test_models_are_listed(running: Running) -> None:
    (listed,) = running.client.models.list().data
    assert listed.id == running.name


def test_first_requests_of_its_own_leave_nothing(running: Running) -> None:
    running.requests.warm()
    assert not running.requests.waiting
    assert running.requests.tokens == 0
    assert running.requests.cache.serving.prompt_tokens == 0
    until(lambda: not running.left)


def test_two_clients_at_once_and_one_that_hangs_up(running: Running) -> None:
    gone = running.chat("A long story begins here.", max_tokens=3000, stream=True, temperature=1)
    until(lambda: running.left)
    # ids of clients' own choice may be alike
    alike = {"extra_headers": {"x-request-id": "mine"}}
    with ThreadPoolExecutor(2) as clients:
        first, second = clients.map(lambda n: running.text(QUESTION.format(n), **alike), (4281, 1234))
    assert "4281" in first
    assert "1234" in second
    gone.close()
    until(lambda: not running.requests.waiting and not running.left)
    assert not running.requests._cb.output_router.result_handlers


def test_who_hangs_up_before_the_answer_ends_it(running: Running) -> None:
    before = running.requests.tokens
    hasty = running.client.with_options(timeout=0.5)
    with pytest.raises(openai.APITimeoutError):
        hasty.completions.create(model=running.name, prompt="Once", max_tokens=4000, temperature=1)
    until(lambda: not running.requests.waiting and not running.left)
    assert running.requests.tokens - before < 4000


def test_streams_responses_and_completions_say_the_same(running: Running) -> None:
    text = QUESTION.format(4281)
    whole = running.chat(text, max_tokens=4, temperature=0)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 4)
    parts = list(running.chat(text, max_tokens=4, temperature=0, stream=True))
    said = whole.choices[0].message.content
    assert "".join(part.choices[0].delta.content or "" for part in parts) == said
    assert parts[-1].choices[0].finish_reason == "length"
    answered = running.client.responses.create(model=running.name, input=text, max_output_tokens=4, temperature=0)
    assert answered.output_text == said
    continued = running.client.completions.create(model=running.name, prompt=text + " ", max_tokens=4, temperature=0)
    assert continued.choices[0].text == said


def test_requests_of_one_pass_sample_each_as_they_ask(running: Running) -> None:
    text = "The wind was cold, and the men of the village"
    greedy = running.text(text, max_tokens=24)
    with ThreadPoolExecutor(6) as clients:
        sampled = list(clients.map(lambda n: running.text(text, max_tokens=24, temperature=1.5 * (n % 2)), range(6)))
    assert sampled[0] == sampled[2] == sampled[4] == greedy
    assert len({greedy, *sampled[1::2]}) == 4
    # of one token, however warm
    assert running.text(text, max_tokens=24, temperature=2, top_p=1e-6) == greedy


def test_a_seed_repeats_the_answer_of_a_request_alone(running: Running) -> None:
    text = "The wind was cold, and the men of the village"
    until(lambda: not running.left)
    first, again, other = (running.text(text, max_tokens=24, temperature=1.5, seed=seed) for seed in (7, 7, 8))
    assert first == again != other


def test_draws_have_the_softmax_s_chances() -> None:
    torch.manual_seed(0)
    scores = torch.tensor([0.7, 0.2, 0.1, 0.0]).log().expand(20000, 4)
    drawn = served.Draw()(scores, torch.ones(20000, dtype=torch.int32)).argmax(-1).bincount(minlength=4) / 20000
    # five standard errors
    assert torch.allclose(drawn, torch.tensor([0.7, 0.2, 0.1, 0.0]), atol=5 * 0.5 / 20000**0.5)
    assert not drawn[3]


def test_a_shared_system_prompt_is_stored_once(running: Running) -> None:
    system, serving = "Read the notes and remember every number in them. " * 20, running.requests.cache.serving
    running.text(system + QUESTION.format(1))
    before = serving.hit_tokens
    assert "77" in running.text(system + QUESTION.format(77))
    assert serving.hit_tokens - before >= 64
    line = served.Meter(running.requests).line(50, 5.0)
    assert "0 requests; 50 tokens in 5.0 s (10.0/s)" in line
    assert f"% of {serving.prompt_tokens} prompt tokens were stored; cache: " in line


def test_what_does_not_fit_is_refused_and_the_next_is_served(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "USUAL_TOKENS", 12)
    longest = running.requests.longest
    assert POOL <= longest < POOL + 512
    message = running.refusal(max_tokens=longest)
    assert f"and an answer of up to {longest} do not fit" in message
    assert f"this server has room for {longest} tokens of one request" in message
    with pytest.raises(openai.BadRequestError, match="Shorten the prompt"):
        running.text("word " * longest)
    answer = running.chat(QUESTION.format(4281))
    assert "4281" in answer.choices[0].message.content
    assert answer.usage.completion_tokens == 12


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": 2}, "n=2 is not supported"),
        ({"stop": ["."]}, "stop=['.'] is not supported"),
        ({"frequency_penalty": 1}, "frequency_penalty=1 is not supported"),
        ({"response_format": {"type": "json_object"}}, "is not supported"),
        ({"temperature": 3}, "temperature must be a number from 0 to 2; got 3."),
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1 on; got 0."),
        ({"messages": []}, "messages must be a list of objects with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/hosts"}}]}]},
         "a message may hold text alone; got a part of type 'image_url'."),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "the request cannot be read: KeyError: 'type'"),
        ({"model": "/etc"}, "requested '/etc'"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}}, "may not set 'chat_template'"),
        ({"extra_body": {"generation_config": "{}"}}, "generation_config='{}' is not supported"),
        ({"extra_body": {"chat_template_kwargs": {"thinking": 1}}}, "the chat template knows no 'thinking'."),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools: the chat template of this model knows"),
        ({"extra_body": {"stream": "yes"}}, "stream must be true or false; got 'yes'."),
        ({"extra_body": {"top_k": 3}}, "Unexpected fields in the request: {'top_k'}. Leave them out."),
    ],
)  # fmt: skip
def test_what_would_be_passed_over_is_refused(running: Running, given: dict[str, Any], message: str) -> None:
    assert message in running.refusal(**given)
    assert not running.left


def test_refusals_have_the_form_of_openai(running: Running) -> None:
    def post(path: str, body: bytes) -> Any:
        address = f"http://127.0.0.1:{running.port}{path}"
        return httpx.post(address, content=body, headers={"content-type": "application/json"}, timeout=600)

    for path, body, code, said in (
        ("/v1/completions", b"{", 400, "the body must be a JSON object: JSON decode error."),
        ("/v1/completions", b"[]", 400, "the body must be a JSON object: Input should be a valid dictionary."),
        ("/v1/completions", b'{"prompt": ["a", "b"]}', 400, "prompt must be one string; got ['a', 'b']."),
        ("/v1/nothing", b"{}", 404, "Not Found"),
    ):
        answer = post(path, body)
        assert answer.status_code == code
        assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-7])
def test_the_least_temperatures_are_greedy(running: Running, temperature: float) -> None:
    text = QUESTION.format(4281)
    assert running.text(text, temperature=temperature, seed=1) == running.text(text)


def test_templates_that_know_tools_get_them(running: Running) -> None:
    tokenizer = running.tokenizer
    before = tokenizer.chat_template
    tokenizer.chat_template = "{% for tool in tools or () %}{{ tool.function.name }} {% endfor %}" + TEMPLATE
    try:
        own = running.chat("Hello", max_tokens=1, tools=[{"type": "function", "function": {"name": "find the way"}}])
    finally:
        tokenizer.chat_template = before
    assert own.usage.prompt_tokens > running.chat("Hello", max_tokens=1).usage.prompt_tokens


def test_no_route_reads_other_files(running: Running) -> None:
    for path in ("/load_model", "/reset", "/v1/audio/transcriptions", "/v1/systemone"):
        with pytest.raises(openai.NotFoundError):
            running.client.post(f"..{path}" if path[:3] != "/v1" else path[3:], cast_to=object, body={"model": "/etc"})


def test_mistakes_at_the_command_get_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        check_refused("Choose another --host or --port", "serve", str(LAB_MODEL), "--port", str(taken.getsockname()[1]))
    check_refused("no folder", "serve", str(tmp_path / "none"), "--port", "0")
    monkeypatch.setattr("turbo_hf.cli.serve.OLDEST", "99.0")
    check_refused("serve needs transformers 99.0 or newer", "serve", str(LAB_MODEL))
    monkeypatch.setattr("turbo_hf.cli.serve.NEEDED", ("fastapi", "no_such_package"))
    check_refused('serve needs no_such_package: pip install "turbo_hf[serve]"', "serve", str(LAB_MODEL))


def test_a_workload_is_replayed(running: Running) -> None:
    address = f"http://127.0.0.1:{running.port}/v1"
    args = ("--requests", "3", "--workload", "shared", "--prefix", "70", "--new", "4", "--ignore-eos", "--json")
    (row,) = last_json(run("bench", "replay", address, "--model", running.name, *args))["rows"]
    assert (row["method"], row["requests"]) == (address, 3)
    assert row["note"].startswith("12 tokens of 12 asked for, prompts of ")
    assert row["tokens_s"] > 0
    assert 0 < row["between_ms"]["p50"] <= row["between_ms"]["p99"]


def test_an_answer_ends_at_the_end_token_unless_that_is_ignored(running: Running) -> None:
    question = QUESTION.format(4281) + " "
    asked = {"model": running.name, "prompt": question, "max_tokens": 6, "temperature": 0}
    first = running.client.completions.create(**asked)
    end = running.tokenizer(first.choices[0].text, add_special_tokens=False).input_ids[1]
    running.model.generation_config.eos_token_id = end
    try:
        ended = running.client.completions.create(**asked).usage.completion_tokens
        whole = running.client.completions.create(**asked, extra_body={"ignore_eos": True})
    finally:
        running.model.generation_config.eos_token_id = None
    assert ended < 6
    assert whole.usage.completion_tokens == 6
    with pytest.raises(openai.BadRequestError, match="ignore_eos must be true or false; got 'yes'"):
        running.client.completions.create(**asked, extra_body={"ignore_eos": "yes"})


def test_a_server_that_is_not_there_is_a_sentence(running: Running) -> None:
    words = ("bench", "replay", "http://127.0.0.1:9/v1", "--model", running.name, "--requests", "1")
    assert "failed: APIConnectionError" in output_of(*words, code=1)
