"""Evaluation: a run and what it leaves, a killed one that goes on, the command; the report of given verdicts;
and answers that are kept: JSON, whole, of one run alone, asked for once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calibration_support import lab
from cli_support import check_refused, last_json
from cli_support import run as run_command
from models import LAB_MODEL, lab_model

pytest.importorskip("lm_eval", reason='lm-eval is not installed: pip install -e ".[eval]"')
pytest.importorskip("datasets", reason='datasets is not installed: pip install -e ".[eval]"')

import math
import resource
from types import SimpleNamespace
from typing import NoReturn

import pytest
from cli_support import output_of
from lm_eval.api.instance import Instance
from lm_eval.api.model import hash_args

from turbo_hf import TurboConfig
from turbo_hf.calibration.widths import Widths
from turbo_hf.config.whole_files import InUse, one_writer
from turbo_hf.eval.answers import AnsweredLM, Answers, Batch, identity
from turbo_hf.eval.eval_command import LOCK, _calibration
from turbo_hf.eval.evaluate import Outcome, answers_of, load_tasks, quiet, run_method
from turbo_hf.eval.methods import AGAIN, BASELINE, method_named
from turbo_hf.eval.model import TurboLM
from turbo_hf.eval.output import EvalReport, markdown
from turbo_hf.eval.plots import accuracy_plot, needle_map
from turbo_hf.eval.report import length_class, noise, report, stamps, tables
from turbo_hf.eval.scorers import OWN, Scorer, needle_cells, worst
from turbo_hf.eval.suites import Limits
from turbo_hf.eval.tasks import Spec, carried_prose, needle_task, prose_task

LIMITS = Limits(context=2048, longest=512)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Spec], dict[str, Outcome]]:
    """A small suite on the carried model: needles and perplexity, the baseline twice and one preset."""
    model, tokenizer = lab_model()
    quiet()
    folder = tmp_path_factory.mktemp("run")
    specs = [needle_task(tokenizer, [200, 300], [0.0, 1.0], [0]), prose_task("prose", carried_prose(1, 8))]
    tasks, notes = load_tasks(specs, tokenizer, LIMITS)
    assert not notes
    outcomes = {}
    for label, base in ((BASELINE, BASELINE), (AGAIN, BASELINE), ("turbo4", "turbo4")):
        method = method_named(base)
        given = (model, tokenizer, tasks, folder, answers_of(label, method, folder, {}))
        outcomes[label] = run_method(label, method, *given, batch=4, limits=LIMITS)
    return folder, specs, outcomes


def test_a_run_keeps_samples_results_and_sizes(run: tuple[Path, list[Spec], dict[str, Outcome]]) -> None:
    folder, _, outcomes = run
    for label, outcome in outcomes.items():
        own = folder / label.replace(" ", "-")
        kept = [json.loads(line) for line in (own / "samples_needle.jsonl").read_text().splitlines()]
        assert kept == json.loads(json.dumps(outcome.samples["needle"], default=str))
        assert len(kept) == 4
        # prompts are kept once, and known to be the same
        assert all(("prompt" in sample["doc"]) == (label == BASELINE) for sample in kept)
        prompts = [json.dumps(sample["doc"]["prompt"]) for sample in outcomes[BASELINE].samples["needle"]]
        arguments = [json.dumps(sample["arguments"]) for sample in kept]
        assert not any(prompt in own for prompt, own in zip(prompts, arguments, strict=True))
        assert [s["prompt_hash"] for s in kept] == [s["prompt_hash"] for s in outcomes[BASELINE].samples["needle"]]
        assert sum(batch.rows for batch in outcome.batches) == 4
        assert {"results", "configs", "versions", "n-samples"} <= set(json.loads((own / "results.json").read_text()))


def test_the_report_pairs_methods_and_measures_bytes(run: tuple[Path, list[Spec], dict[str, Outcome]]) -> None:
    _, specs, outcomes = run
    found = report(specs, outcomes)
    (row,) = found["accuracy"]
    assert (row["task"], row["items"], row["headline"], row["stock"]) == ("needle", 4, True, True)
    again, turbo4 = row["methods"][AGAIN], row["methods"]["turbo4"]
    assert (again["lost"], again["gained"], again["p"]) == (0, 0, 1.0)
    assert turbo4["kept"] + turbo4["gained"] == turbo4["right"]
    assert row["methods"][BASELINE]["right"] >= 3
    base, ours = found["serving"][BASELINE], found["serving"]["turbo4"]
    # 6 layers, 2 KV heads of 64, keys and values, float32
    assert base["kv_bytes_per_token"] == 6 * 2 * 64 * 2 * 4
    assert base["compression"] == 1.0
    assert ours["compression"] == pytest.approx(base["kv_bytes_per_token"] / ours["kv_bytes_per_token"])
    assert ours["compression"] > 4
    perplexity = {row["metric"]: row["methods"] for row in found["perplexity"]}
    words = perplexity["word_perplexity"]
    assert words[BASELINE] == words[AGAIN] != words["turbo4"]
    assert words["turbo4"] == pytest.approx(words[BASELINE], rel=0.05)
    assert noise(found) == "Noise floor: 0 of 4 items differ between two baseline runs in different batches."


def test_tables_and_pictures(run: tuple[Path, list[Spec], dict[str, Outcome]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    _, specs, outcomes = run
    found = report(specs, outcomes)
    versions = {"lm_eval": "a", "transformers": "b", "torch": "c"}
    about = {"model": "m", "model_fingerprint": "f", "dtype": "float32", "device": "cpu", "suite": "s", "batch": 4}
    about |= {"seed": 1, "limit": 3, "versions": versions}
    text = markdown(EvalReport("a title", stamps(about), tables(found), ["a note"], {}, []))
    assert "LIMITED to 3 items a task" in text
    assert "- a note" in text
    assert "LIMITED" not in " ".join(stamps({**about, "limit": None}))
    for title, headings, rows in tables(found):
        assert title in text
        assert all(len(row) == len(headings) for row in rows)
    base, ours = (needle_cells(outcomes[label].samples["needle"]) for label in (BASELINE, "turbo4"))
    assert set(base) == {(length, depth) for length in (200, 300) for depth in (0.0, 1.0)}
    (length, depth), share = worst(ours)
    assert f"| turbo4 | {sum(ours.values()) / 4:.3f} | {share:.2f} | {length} | {depth:.0%} |" in text
    assert worst({(1, 0.5): 0.5, (2, 0.0): 0.0, (2, 1.0): 0.0}) == ((2, 0.0), 0.0)
    needle_map(base, ours, "turbo4", tmp_path / "needle.png")
    assert accuracy_plot(found, "title", tmp_path / "accuracy.png")
    assert not accuracy_plot({**found, "means": []}, "title", tmp_path / "none.png")
    for name in ("needle", "accuracy"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_says_what_a_calibration_chose(tmp_path: Path) -> None:
    widths = Widths(((4, 4), (8, 8), (3, 3), (4, 2), (4, 4), (8, 8)), 5.0, 0.002, 640)
    replace(lab(), widths=widths).save_pretrained(tmp_path)
    _, configs = _calibration(lab_model()[0], [method_named("calibrated"), method_named("kivi4")], str(tmp_path))
    assert configs["kivi4"] is None
    assert configs["calibrated"] == {**TurboConfig(compile=False).to_dict(), "layer_bits": [4, 8, 3, [4, 2], 4, 8]}


def test_a_task_that_does_not_fit_is_skipped_and_told() -> None:
    _, tokenizer = lab_model()
    specs = [needle_task(tokenizer, [400], [0.5], [0]), prose_task("prose", carried_prose(1, 40))]
    tasks, notes = load_tasks(specs, tokenizer, Limits(context=300, longest=300))
    # text is read in windows, so that it always fits
    assert list(tasks) == ["prose"]
    assert len(notes) == 1
    assert notes[0].startswith("needle: skipped; it takes ")
    with pytest.raises(ValueError, match=r"no task of this suite is left to run. needle: skipped"):
        load_tasks(specs[:1], tokenizer, Limits(context=300, longest=300))


def test_the_command_runs_a_suite_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setattr("turbo_hf.eval.tasks.carried_prose", lambda texts, sentences: carried_prose(texts, 12))

    mine, out = tmp_path / "mine.yaml", tmp_path / "out"
    mine.write_text("preset: turbo2\ndense_layers: [0]\nattention: native\n")
    words = ["eval", str(LAB_MODEL), "--limit", "1", "--longest", "512", "--device", "cpu", "--out", str(out)]
    words += ["--json", "--methods"]
    both = f"turbo4,{mine}"
    result = run_command(*words, both)
    found = last_json(result)
    assert "LIMITED to 1 items a task: a smoke test, not a result." in result.stdout
    assert found["meta"]["calibration"] is None
    of_file = TurboConfig(bits=2, dense_layers=(0,), attention="native", compile=False).to_dict()
    assert found["meta"]["configs"] == {"turbo4": TurboConfig(compile=False).to_dict(), str(mine): of_file}
    assert list(found["serving"]) == [BASELINE, AGAIN, "turbo4", str(mine)]
    assert found["serving"]["turbo4"]["compression"] > 1.5
    names = {path.name for path in out.iterdir()}
    reports = {f"report.{ending}" for ending in ("html", "md", "json")}
    assert reports | {"accuracy.png", "needle-turbo4.png", "turbo4", "fp16-again"} <= names
    assert json.loads((out / "report.json").read_text())["accuracy"] == found["accuracy"]
    whole = (out / "report.html").read_text()
    assert whole.count("data:image/png;base64,") == 3
    assert whole.count("<table>") == whole.count("</table>") == 7
    # everything that the page shows is inside it
    assert "http" not in whole

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("everything was answered before")

    monkeypatch.setattr(TurboLM, "_model_generate", never)
    # the same options in other words
    mine.write_text("bits: 2\nattention: native\ndense_layers: [0]\n")
    assert last_json(run_command(*words, both))["accuracy"] == found["accuracy"]
    with pytest.raises(AssertionError, match="everything was answered before"):
        run_command(*words, f"{both},turbo4+low_heads=0.25")
    partial = json.loads((out / "report.json").read_text())
    assert partial["notes"][0] == "UNFINISHED: turbo4+low_heads=0.25 still to run; the same command goes on."
    assert partial["accuracy"] == found["accuracy"]
    assert "UNFINISHED" in (out / "report.md").read_text()
    check_refused("batch was 8, now 2", *words, both, "--batch", "2")
    mine.write_text("bits: 3\nattention: native\ndense_layers: [0]\n")
    check_refused("config.bits was 2, now 3.", *words, both)


# --- the report, of verdicts that are written down here --------------------------------------------------------------


def outcome(*tasks: list[int], one_length: tuple[int, ...] = ()) -> Outcome:
    """Verdicts of tasks t0, t1, ..., whose items have 100, 200, 400, ... tokens, or all of them 100."""
    samples = {
        f"t{i}": [
            {"doc_id": n, "doc": {"length": 100 if i in one_length else 100 << n}, "filter": "none", "right": right}
            for n, right in enumerate(own)
        ]
        for i, own in enumerate(tasks)
    }
    return Outcome({"results": {}}, samples, [Batch(4, 8, 2.0, 100, 10)])


def test_no_table_shows_dashes_alone() -> None:
    specs = [Spec("t0", {}, OWN)]
    silent = replace(outcome([1]), batches=[])
    # log-likelihoods alone: no cache was measured, nothing was generated
    shown = tables(report(specs, {BASELINE: silent, "x": silent}))
    assert "memory and speed of generation" not in [table.title for table in shown]
    # a run of which one method is still to generate
    *_, memory = tables(report(specs, {BASELINE: outcome([1]), "x": outcome([1]), "y": silent}))
    assert [row[0] for row in memory.rows] == [BASELINE, "x"]


def test_means_leave_out_what_the_baseline_cannot_do() -> None:
    good, bad = [1, 1, 1, 1, 0], [1, 0, 0, 0, 0]
    specs = [Spec("t0", {}, OWN), Spec("t1", {}, (Scorer("other", metric="right"), *OWN))]
    found = report(specs, {BASELINE: outcome(good, bad), "x": outcome([1, 1, 0, 0, 1], bad)})
    every, sure = found["means"]
    assert (every["tasks"], every["items"], sure["tasks"], sure["items"]) == (2, 10, 1, 5)
    assert every["methods"]["x"]["accuracy"] == pytest.approx(0.4)
    assert (sure["methods"]["x"]["lost"], sure["methods"]["x"]["gained"]) == (2, 1)
    assert sure["methods"]["x"]["p"] == 1.0
    # lengths 100, 200, ... in classes of powers of two, both tasks together
    assert [(row["up_to"], row["items"]) for row in found["lengths"]] == [(128 << n, 2) for n in range(5)]
    assert [row["methods"]["x"]["right"] for row in found["lengths"]] == [2, 1, 0, 0, 1]
    # of five pairs -1 -1 +1: variance (3 - 5 * 0.2 ** 2) / 4, and the other task has no difference
    error = pytest.approx(100 * (0.7 / 5) ** 0.5 / 2)
    assert found["differences"] == [{"method": "x", "mean": -10.0, "stderr": error, "worst_task": "t0", "worst": -20.0}]
    assert found["needles"] == {}
    # one item has no error, nor has a mean that it is part of
    single = report(specs[:1], {BASELINE: outcome([1]), "x": outcome([0])})
    assert single["means"][0]["methods"]["x"]["stderr"] is single["differences"][0]["stderr"] is None
    titled = {title: rows for title, _, rows in tables(single)}
    assert titled["points of accuracy against fp16 ± standard error of the pairs"][0][1] == "-100.00"
    figures = {"simulated": False, "prompts": 4, "kv_bytes_per_token": 10, "compression": 1.0, "tokens_per_s": 4.0}
    assert found["serving"]["x"] == figures


def test_the_standard_error_of_a_share_is_that_of_a_sample() -> None:
    """sqrt(p (1 - p) / (n - 1)): of 4 right of 5, sqrt(0.8 * 0.2 / 4)."""
    found = report([Spec("t0", {}, OWN)], {BASELINE: outcome([1, 1, 1, 1, 0]), "x": outcome([1, 0, 0, 0, 0])})
    error = pytest.approx((0.8 * 0.2 / 4) ** 0.5)
    for row in (found["accuracy"][0], found["means"][0]):
        assert row["methods"][BASELINE]["stderr"] == error
        assert row["methods"]["x"]["stderr"] == error


def test_a_length_belongs_to_the_power_of_two_that_it_does_not_exceed() -> None:
    lengths = {1: 1, 1023: 1024, 1024: 1024, 1025: 2048, 0: 0}
    assert {n: length_class({"length": n}) for n in lengths} == lengths
    assert length_class({}) == 0


def test_a_task_of_one_length_tells_nothing_of_lengths() -> None:
    specs = [Spec("t0", {}, OWN), Spec("t1", {}, OWN)]
    several, one = [1, 1, 0], [1, 1, 1, 0]
    found = report(specs, {BASELINE: outcome(several, one, one_length=(1,))})
    assert [(row["up_to"], row["items"]) for row in found["lengths"]] == [(128, 1), (256, 1), (512, 1)]
    assert report(specs[1:], {BASELINE: outcome(several, one, one_length=(1,))})["lengths"] == []


# --- the answers that a run keeps ------------------------------------------------------------------------------------


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
