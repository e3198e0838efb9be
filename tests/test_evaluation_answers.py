"""Evaluation: the answers that a run keeps are JSON, whole, and asked for once; a results folder runs no code."""

import errno
import json
import math
import os
import resource
from pathlib import Path
from typing import Any, NoReturn

import pytest
from all_pairs import in_one_test
from models import LAB_MODEL, lab_model
from typer.testing import CliRunner

pytest.importorskip("lm_eval", reason='lm-eval is not installed: pip install -e ".[eval]"')
pytest.importorskip("datasets", reason='datasets is not installed: pip install -e ".[eval]"')

from lm_eval.api.instance import Instance

from turbo_hf.cli.main import app
from turbo_hf.config.whole_files import InUse, one_writer
from turbo_hf.eval.answers import AnsweredLM, Answers
from turbo_hf.eval.evaluate import Outcome, load_tasks, run_method
from turbo_hf.eval.model import TurboLM
from turbo_hf.eval.run_identity import LOCK, META, open_run
from turbo_hf.eval.suites import Limits
from turbo_hf.eval.tasks import carried_prose, needle_task, prose_task
from turbo_hf.eval.token_cache import Prompts

LIMITS = Limits(context=2048, longest=512)
GIVEN: dict[str, Any] = {
    "a": "a reply, \u2028 with ä and \ud83d",
    "b": "",
    "c": -12.345678901234567,
    "d": (-0.1, True),
    "e": (-math.inf, False),
    "f": 0,
}


@pytest.fixture(autouse=True)
def little_prose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of the suites are short."""
    monkeypatch.setattr("turbo_hf.eval.suites.carried_prose", lambda texts, sentences: carried_prose(texts, 12))


def test_answers_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answers = Answers(path)
    for key, answer in GIVEN.items():
        assert key not in answers
        answers[key] = answer
    for kept in (answers, Answers(path)):
        assert {key: kept[key] for key in GIVEN} == GIVEN
    assert [found.name for found in tmp_path.iterdir()] == ["answers.jsonl"]
    # a process that was killed leaves half a line: its answer is asked for again
    path.write_bytes(path.read_bytes()[:-5])
    half = Answers(path)
    assert "f" not in half
    half["f"] = 3.5
    assert {key: Answers(path)[key] for key in GIVEN} == {**GIVEN, "f": 3.5}


@in_one_test(
    "line",
    [
        *(f'{{"key": "a", "answer": {value}}}' for value in ("[1.0]", "[1, true]", "[1.0, 1]", "null", "true", "{}")),
        *('{"key": 1, "answer": "b"}', '{"key": "a"}', '{"key": "a", "answer": "b", "c": 1}', "[]", "{", "[" * 100_000),
        *("SQLite format 3\0", '{"key": "a", "answer": NaN}'),
    ],
)
def test_what_is_no_answer_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"answers.jsonl' (is torn, or )?was changed: .* Delete it"):
        Answers(path)


def test_answers_that_do_not_fit_the_disk_are_told(tmp_path: Path) -> None:
    answers = Answers(tmp_path / "answers.jsonl")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot be written: .*answers.jsonl'"):
            answers["key"] = "x" * 100_000
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "key" not in answers
    answers["key"] = "y"
    assert Answers(tmp_path / "answers.jsonl")["key"] == "y"


class Model:
    """A model of the harness that dies at its n-th answer, and counts what it is asked."""

    def __init__(self, dies: int):
        self.left, self.asked = dies, list[str]()
        self.hook: Any = None

    def set_cache_hook(self, hook: Any) -> None:
        self.hook = hook

    def _answer(self, kind: str, requests: list[Instance], answer: Any) -> list[Any]:
        for request in requests:
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            self.asked.append(request.args[0])
            self.hook.add_partial(kind, request.args, answer)
        return [answer for _ in requests]

    def loglikelihood(self, requests: list[Instance]) -> list[Any]:
        return self._answer("loglikelihood", requests, (-1.5, True))

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[Any]:
        return self._answer("loglikelihood_rolling", requests, -2.5)

    def generate_until(self, requests: list[Instance]) -> list[Any]:
        return self._answer("generate_until", requests, "reply")


@pytest.mark.parametrize(
    ("kind", "more", "answer"),
    [
        ("loglikelihood", ("end",), (-1.5, True)),
        ("loglikelihood_rolling", (), -2.5),
        ("generate_until", ({"until": ["."]},), "reply"),
    ],
)
def test_a_killed_call_goes_on_at_its_next_request(
    kind: str, more: tuple[Any, ...], answer: Any, tmp_path: Path
) -> None:
    requests = [Instance(kind, {}, (text, *more), at) for at, text in enumerate("abcde")]
    model = Model(3)
    first = Answers(tmp_path / "answers.jsonl")
    with pytest.raises(KeyboardInterrupt):
        getattr(AnsweredLM(model, first), kind)(requests)
    model.left = 10
    again = Answers(tmp_path / "answers.jsonl")
    lm = AnsweredLM(model, again)
    assert lm.left == 10
    assert getattr(lm, kind)(requests) == [answer] * 5
    assert model.asked == list("abcde")
    assert getattr(lm, kind)(requests) == [answer] * 5
    assert len(model.asked) == 5


def test_requests_that_sample_are_asked_each_time(tmp_path: Path) -> None:
    request = Instance("generate_until", {}, ("a", {"do_sample": True}), 0)
    model, answers = Model(10), Answers(tmp_path / "answers.jsonl")
    for _ in range(2):
        assert AnsweredLM(model, answers).generate_until([request]) == ["reply"]
    assert model.asked == ["a", "a"]


# --- runs ------------------------------------------------------------------------------------------------------------


def small_run(folder: Path) -> Outcome:
    model, tokenizer = lab_model()
    specs = [needle_task(tokenizer, [150], [0.0, 1.0], [0]), prose_task("prose", carried_prose(2, 4))]
    tasks, _ = load_tasks(specs, Prompts(tokenizer), LIMITS)
    return run_method("int8", "int8", model, Prompts(tokenizer), tasks, folder, batch=1, limits=LIMITS)


def test_a_method_is_read_from_whole_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, own = small_run(tmp_path), tmp_path / "int8"
    for name, remedy in (
        ("results.json", r"Delete '.*results.json', and the same command writes it and all samples anew"),
        ("samples_needle.jsonl", r"Delete '.*results.json', and the same command writes it and all samples anew"),
        ("batches.jsonl", r"Delete '.*int8', and the same command asks its items anew"),
    ):
        kept = (own / name).read_bytes()
        (own / name).write_bytes(kept[: len(kept) // 3] + b"\n")
        with pytest.raises(ValueError, match=f"{name}' is torn, or was changed: .*{remedy}"):
            small_run(tmp_path)
        (own / name).write_bytes(kept)
    results = r"results.json' was changed: it has no figures of .* Delete '.*results.json'"
    samples = r"samples_needle.jsonl' was changed: it has samples of {} items, not 2. Delete '.*results.json'"
    batches = r"batches.jsonl' was changed: .* no numbers. Delete '.*int8'"
    for name, old, new, message in (
        ("results.json", '"results"', '"result"', results),
        ("results.json", '"n-samples"', '"samples"', results),
        ("results.json", '"byte_perplexity,none": ', '"byte_perplexity,none": "much", "was": ', results),
        ("samples_needle.jsonl", '"doc_id"', '"id"', samples.format(0)),
        ("samples_needle.jsonl", '"doc_id": 1', '"doc_id": 0', samples.format(1)),
        ("batches.jsonl", '"rows": 1', '"rows": "1"', batches),
    ):
        text = (own / name).read_text("utf-8")
        assert old in text
        (own / name).write_text(text.replace(old, new), "utf-8")
        with pytest.raises(ValueError, match=message):
            small_run(tmp_path)
        (own / name).write_text(text, "utf-8")
    (own / "samples_needle.jsonl").unlink()
    with pytest.raises(ValueError, match=r"samples_needle.jsonl' is missing. Delete '.*results.json'"):
        small_run(tmp_path)

    def never(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("everything was answered before")

    # what the remedy promises
    (own / "results.json").unlink()
    monkeypatch.setattr(TurboLM, "_model_generate", never)
    monkeypatch.setattr(TurboLM, "_loglikelihood_tokens", never)
    again = small_run(tmp_path)
    assert again.samples == outcome.samples
    assert again.results["results"] == outcome.results["results"]
    assert again.batches == outcome.batches
    lines = (own / "answers.jsonl").read_text("utf-8").splitlines()
    assert {type(json.loads(line)["answer"]) for line in lines} == {str, float}


def test_a_full_disk_ends_a_run_with_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:

        def full(*_: Path) -> NoReturn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patched.setattr(Path, "replace", full)
        with pytest.raises(OSError, match=r"No space left on device: .*samples_"):
            small_run(tmp_path)
    assert {path.name for path in (tmp_path / "int8").iterdir()} == {"answers.jsonl", "batches.jsonl"}
    assert small_run(tmp_path).samples["needle"]


def command(folder: Path, code: int) -> str:
    words = ["eval", str(LAB_MODEL), "--task", "prose", "--limit", "1", "--longest", "512", "--device", "cpu"]
    result = CliRunner().invoke(app, [*words, "--out", str(folder)])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_a_folder_that_does_not_say_what_it_is_of_is_refused(tmp_path: Path) -> None:
    about = {"model": "a"}
    open_run(tmp_path, about)
    for content in ('{"identity": {', "[]", "{}", '{"identity": {"model": "a"}, "commands": 3}'):
        (tmp_path / META).write_text(content)
        with pytest.raises(ValueError, match=rf"{META}' .* restore it, or choose another --out"):
            open_run(tmp_path, about)
    (tmp_path / META).unlink()
    open_run(tmp_path, about)
    (tmp_path / META).unlink()
    (tmp_path / "turbo4").mkdir()
    (tmp_path / "turbo4" / "answers.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"holds results, but no {META}. It says which model"):
        open_run(tmp_path, about)


def test_ctrl_c_says_how_to_go_on_and_a_second_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    folder = tmp_path / "out"

    def interrupt(*_: Any, **__: Any) -> NoReturn:
        with pytest.raises(InUse, match="is in use"), one_writer(folder, LOCK):
            pass
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("turbo_hf.eval.eval_command.load", interrupt_before)
        told = command(folder, 130)
    assert "interrupted: nothing was begun, so that nothing is kept." in told
    with monkeypatch.context() as patched:
        patched.setattr(TurboLM, "_loglikelihood_tokens", interrupt)
        told = command(folder, 130)
    assert f"interrupted: what was done is kept in {folder}; the same command goes on with the rest." in told
    with one_writer(folder, LOCK):
        assert "is in use: another process is writing there" in command(folder, 1)
    assert "Kept in" in command(folder, 0)
    assert not (folder / LOCK).exists()


def interrupt_before(*_: Any, **__: Any) -> NoReturn:
    raise KeyboardInterrupt
