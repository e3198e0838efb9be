"""Tasks and scorers of the evaluation: right answers score 1, wrong ones 0, and what is missing is told."""

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import lab_model

pytest.importorskip("lm_eval", reason='lm-eval is not installed: pip install -e ".[eval]"')
pytest.importorskip("datasets", reason='datasets is not installed: pip install -e ".[eval]"')

from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from turbo_hf.eval.evaluate import load_tasks, quiet
from turbo_hf.eval.scorers import right_choice, right_number, right_statement
from turbo_hf.eval.suites import BBH_TASKS, BOOKS, Limits, build
from turbo_hf.eval.tasks import Spec

LIMITS = Limits(context=8192, longest=512, limit=3)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return lab_model()[1]


@pytest.fixture(scope="module", autouse=True)
def _one_index() -> Iterator[None]:
    """The harness' index of its stock tasks, read once: it takes ten seconds each time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("turbo_hf.eval.evaluate.TaskManager", functools.cache(TaskManager))
        yield


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of local data sets, laid out as the README says, with rows of our own making."""
    rows: dict[str, list[dict[str, Any]]] = {
        "gsm8k/test.jsonl": [{"question": "How many?", "answer": "8 and 10 make 18.\n#### 1,018"}] * 3,
        "aqua/test.jsonl": [{"question": "How much?", "options": ["A)1", "B)2", "C)3", "D)4", "E)5"], "correct": "B"}],
        "wikitext2/test_documents.jsonl": [{"page": "= A title =\nWords stand here ."}],
    }
    shots = [{"question": "Half?", "options": list("12345"), "rationale": "It is one.", "correct": "A"}] * 4
    files = {name: "".join(json.dumps(row) + "\n" for row in own) for name, own in rows.items()}
    files["aqua/cot_4shot.json"] = json.dumps(shots)
    files |= {f"books/{name}.txt": "It was a day like others. " * 200 for name in BOOKS if name != "waverley"}
    for name in BBH_TASKS:
        files[f"bbh/{name}.json"] = json.dumps({"examples": [{"input": "Which?", "target": "(B)"}]})
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


class Oracle(LM):  # type: ignore[misc]  # the harness has no types
    """Answers every task with its own target, or (wrong) never."""

    def __init__(self, targets: dict[str, str]):
        super().__init__()
        self.targets = targets

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        return [self.targets.get(request.args[0], "no") for request in requests]

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return [(-1.0, False) for _ in requests]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        return [-1.0 for _ in requests]


def stated(task: str, target: str) -> str:
    """A reply that gives the target as the task wants it: GSM8K's strict match with a capital letter, BBH's without."""
    if task.startswith("gsm8k"):
        return f" The answer is {target.rsplit('#### ', maxsplit=1)[-1]}."
    return f" So the answer is {target}." if task.startswith(("bbh", "aqua")) else f" {target}"


def test_gold_answers_score_one_and_wrong_ones_nothing(data: Path, tokenizer: Any) -> None:
    quiet()
    (data / "books" / "waverley.txt").write_text("Sixty years ago. " * 200)
    specs: list[Spec] = []
    tasks: dict[str, Any] = {}
    for suite, longest in (("core", 4096), ("long", 1024)):
        own, _ = build(suite, tokenizer, Limits(8192, longest, 2), data)
        # a task of two suites is one task here
        own = [spec for spec in own if spec.name not in tasks]
        loaded, notes = load_tasks(own, tokenizer, Limits(8192, 4096, 2))
        assert not notes
        specs += own
        tasks |= loaded
    assert {"gsm8k_cot", "aqua_cot", "wikitext", "needle"} <= set(tasks)
    assert {"books", "wikitext_long"} <= set(tasks)
    assert sum(name.startswith("bbh_cot_fewshot_") for name in tasks) == 27
    gold = {
        request.args[0]: stated(name, str(task.doc_to_target(request.doc)))
        for name, task in tasks.items()
        if task.OUTPUT_TYPE == "generate_until"
        for request in task.instances
    }
    for targets, share in ((gold, 1.0), ({}, 0.0)):
        found = evaluate(lm=Oracle(targets), task_dict={"tasks": tasks}, limit=2, bootstrap_iters=0)["samples"]
        for spec in specs:
            for scorer in spec.scorers:
                verdicts = list(scorer.verdicts(found[spec.name]).values())
                assert verdicts, (spec.name, scorer.name)
                assert sum(verdicts) / len(verdicts) == share, (spec.name, scorer.name)


def test_without_the_hub_the_local_files_are_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach it")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    specs, _ = build("core", tokenizer, replace(LIMITS, longest=1024))
    for name, files in (
        ("gsm8k_cot", "DIR/gsm8k/test.jsonl"),
        ("bbh_cot_fewshot_snarks", "DIR/bbh/snarks.json"),
        ("agieval_aqua_rat", "DIR/aqua/cot_4shot.json and DIR/aqua/test.jsonl"),
        ("wikitext", "DIR/wikitext2/test_documents.jsonl"),
    ):
        own = [spec for spec in specs if spec.name == name]
        with pytest.raises(ValueError, match=f"{name}: Couldn't reach it. Without the Hub: --data DIR, with {files}"):
            load_tasks(own, tokenizer, LIMITS)


@pytest.mark.parametrize(
    ("scorer", "target", "reply", "right"),
    [
        (right_number, "some steps\n#### 18", "So 9 * 2 = 18. The answer is 18", True),
        (right_number, "some steps\n#### 18", "The answer is $18.", True),
        (right_number, "some steps\n#### 18", "The answer is $18.00 for 3 eggs.", True),
        (right_number, "some steps\n#### 18", "8 + 10 is\n18", True),
        (right_number, "some steps\n#### 18", "The answer is 17. Not 18.", False),
        (right_number, "some steps\n#### 18", "The answer is 1.8", False),
        (right_number, "some steps\n#### 18", "I do not know", False),
        (right_statement, "(B)", "So the answer is (B)", True),
        (right_statement, "(B)", "So the answer is (B).", True),
        (right_statement, "True", "So the answer is True.\n\nMore", True),
        (right_statement, "1.5", "So the answer is 1.5.", True),
        (right_statement, "(B)", "So the answer is (A). No, the answer is (B).", False),
        (right_statement, "(B)", "(B)", False),
        (right_choice, "(b)", "The answer is (b).", True),
        (right_choice, "(b)", "the answer is B", True),
        (right_choice, "(b)", "(a) is too small, so (b)", True),
        (right_choice, "(b)", "(a)", False),
    ],
)
def test_corrected_scorers(scorer: Callable[[Any], bool], target: str, reply: str, right: bool) -> None:
    assert scorer({"resps": [[reply]], "target": target}) == right


def test_suites_refuse_and_tell(tokenizer: Any, data: Path) -> None:
    with pytest.raises(ValueError, match=r"expected books/waverley.txt in the data folder"):
        build("long", tokenizer, LIMITS, data)
    _, notes = build("smoke", tokenizer, LIMITS)
    assert notes == ["needle: lengths 1024 left out (--longest 512, 8192 positions)."]
    specs, _ = build("reasoning", tokenizer, LIMITS)
    assert {"gsm8k_cot", "agieval_aqua_rat"} <= {spec.name for spec in specs}
