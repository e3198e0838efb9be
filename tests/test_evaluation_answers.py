"""Evaluation: the answers that a run keeps are JSON, whole, of one run alone, and asked for once."""

import json
import math
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from cli_support import output_of
from models import LAB_MODEL, lab_model

pytest.importorskip("lm_eval", reason='lm-eval is not installed: pip install -e ".[eval]"')
pytest.importorskip("datasets", reason='datasets is not installed: pip install -e ".[eval]"')

from lm_eval.api.instance import Instance
from lm_eval.api.model import hash_args

from turbo_hf.config.whole_files import InUse, one_writer
from turbo_hf.eval.answers import AnsweredLM, Answers, Batch
from turbo_hf.eval.eval_command import LOCK
from turbo_hf.eval.evaluate import Outcome, answers_of, load_tasks, run_method
from turbo_hf.eval.methods import method_named
from turbo_hf.eval.model import TurboLM
from turbo_hf.eval.run_identity import identity
from turbo_hf.eval.suites import Limits
from turbo_hf.eval.tasks import carried_prose, needle_task, prose_task

LIMITS = Limits(context=2048, longest=512)
GIVEN: dict[str, Any] = {
    "a": "a reply, \u2028 with ä and \ud83d", "b": "", "c": -12.345678901234567, "d": (-0.1, True),
    "e": (-math.inf, False), "f": 0,
}  # fmt: skip
ABOUT = {"model": "a", "limit": None, "versions": {"torch": "2.0"}}
BEGUN = json.dumps({"identity": ABOUT}) + "\n"
BATCH = {"rows": 2, "new_tokens": 3, "seconds": 0.5, "kv_bytes": 100, "kv_tokens": 10, "keys": None}


def test_answers_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answers = Answers(path, ABOUT)
    batch = Batch(2, 3, 0.5, 100, 10, (9, 2, 4))
    answers.keep(batch)
    for key, answer in GIVEN.items():
        assert key not in answers
        answers[key] = answer
    for kept in (answers, Answers(path, ABOUT)):
        assert {key: kept[key] for key in GIVEN} == GIVEN
        assert kept.batches == [batch]
    assert [found.name for found in tmp_path.iterdir()] == ["answers.jsonl"]
    # a process that was killed leaves half a line: its answer is asked for again
    path.write_bytes(path.read_bytes()[:-5])
    half = Answers(path, ABOUT)
    assert "f" not in half
    half["f"] = 3.5
    assert {key: Answers(path, ABOUT)[key] for key in GIVEN} == {**GIVEN, "f": 3.5}


@pytest.mark.parametrize(
    "line",
    [
        *(f'{{"key": "a", "answer": {value}}}' for value in ("[1.0]", "[1, true]", "[1.0, 1]", "null", "true", "{}")),
        *('{"key": 1, "answer": "b"}', '{"key": "a"}', '{"key": "a", "answer": "b", "c": 1}', "[]", "{", "[" * 100_000),
        *("SQLite format 3\0", '{"key": "a", "answer": NaN}', '{"batch": 3}', BEGUN.strip()),
        *(
            json.dumps({"batch": {**BATCH, **wrong}})
            for wrong in ({"rows": 0}, {"rows": "2"}, {"rows": True}, {"seconds": "1"}, {"keys": [1, 2]}, {"more": 1})
        ),
    ],
)
def test_what_is_no_answer_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(BEGUN + line + "\n")
    with pytest.raises(ValueError, match=r"answers.jsonl' (is torn, or )?was changed: .* Delete it"):
        Answers(path, ABOUT)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("generate_until", "a", 1.5),
        ("generate_until", "a", (-1.0, True)),
        ("loglikelihood", (-1.0, True), -1.0),
        ("loglikelihood_rolling", -1.0, "\x1b[31m"),
    ],
)
def test_an_answer_of_another_kind_is_refused(kind: Any, right: Any, wrong: Any, tmp_path: Path) -> None:
    answers = Answers(tmp_path / "answers.jsonl", ABOUT)
    asked = Instance(kind, {}, ("a", {}), 0)
    lm = AnsweredLM(SimpleNamespace(set_cache_hook=lambda _: None, **{kind: lambda _: [right]}), answers)
    for _ in range(2):
        assert getattr(lm, kind)([asked]) == [right]
    answers[hash_args(kind, asked.args)] = wrong
    with pytest.raises(ValueError, match=r"answers.jsonl' was changed: .* is no answer. Delete it") as refused:
        getattr(lm, kind)([asked])
    assert str(refused.value).isprintable()


def test_answers_of_another_run_are_not_merged(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    Answers(path, ABOUT)
    with pytest.raises(ValueError, match=r"limit was None, now 3; versions.torch was '2.0', now '2.1'. Results of"):
        Answers(path, {**ABOUT, "limit": 3, "versions": {"torch": "2.1"}})
    # what a stranger wrote
    strange = {**ABOUT, "model": "\x1b]0;b\7", **dict.fromkeys(map("\x1b[{}m".format, range(900)), 1)}
    path.write_text(json.dumps({"identity": strange}) + "\n")
    with pytest.raises(ValueError, match=r"and 897 more\. Results of") as refused:
        Answers(path, {**ABOUT, "limit": 1})
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1000
    # what an earlier version kept
    path.write_text('{"key": "a", "answer": "b"}\n')
    with pytest.raises(ValueError, match="does not begin with what its answers are of"):
        Answers(path, ABOUT)


def test_items_of_other_seeds_are_another_run() -> None:
    model, tokenizer = lab_model()
    found = []
    for seed in (0, 0, 1):
        tasks, _ = load_tasks([needle_task(tokenizer, [150], [0.5], [seed])], tokenizer, LIMITS)
        found.append(identity(model, tokenizer, tasks, {"suite": "smoke"}))
    assert found[0] == found[1]
    assert found[0]["tasks"] != found[2]["tasks"]
    assert found[0] == {**found[2], "tasks": found[0]["tasks"]}


def test_answers_that_do_not_fit_the_disk_are_told(tmp_path: Path) -> None:
    answers = Answers(tmp_path / "answers.jsonl", {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot be written: .*answers.jsonl'"):
            answers["key"] = "x" * 100_000
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "key" not in answers
    answers["key"] = "y"
    assert Answers(tmp_path / "answers.jsonl", {})["key"] == "y"


# --- runs ------------------------------------------------------------------------------------------------------------


def small_run(folder: Path) -> Outcome:
    model, tokenizer = lab_model()
    specs = [needle_task(tokenizer, [150], [0.0, 0.5, 1.0], [0]), prose_task("prose", carried_prose(2, 4))]
    tasks, _ = load_tasks(specs, tokenizer, LIMITS)
    method = method_named("int8")
    answers = answers_of("int8", method, folder, {})
    return run_method("int8", method, model, tokenizer, tasks, folder, answers, batch=1, limits=LIMITS)


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    original = TurboLM._model_generate

    def dies(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TurboLM, "_model_generate", dies)
    with pytest.raises(KeyboardInterrupt):
        small_run(tmp_path)
    assert lab_model()[0].config._attn_implementation == "eager"
    assert not (tmp_path / "int8" / "results.json").exists()
    outcome = small_run(tmp_path)
    # two answered, one lost; only that one is asked again
    assert len(asked) == 4
    assert sum(batch.rows for batch in outcome.batches) == 3


def command(folder: Path, code: int) -> str:
    words = ["eval", str(LAB_MODEL), "--task", "prose", "--limit", "1", "--longest", "512", "--device", "cpu"]
    return output_of(*words, "--out", str(folder), code=code)


def interrupt_before(*_: Any, **__: Any) -> NoReturn:
    raise KeyboardInterrupt


def test_ctrl_c_says_how_to_go_on_and_a_second_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setattr("turbo_hf.eval.tasks.carried_prose", lambda texts, sentences: carried_prose(texts, 12))
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
