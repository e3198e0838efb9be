"""Evaluation through lm-evaluation-harness: the model adapter, the tasks, a run and what it leaves."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import LAB_MODEL, lab_model, prompts, tiny_llama
from typer.testing import CliRunner

pytest.importorskip("lm_eval", reason='lm-eval is not installed: pip install -e ".[eval]"')
pytest.importorskip("datasets", reason='datasets is not installed: pip install -e ".[eval]"')

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

from turbo_hf.cli import app
from turbo_hf.eval.evaluate import Outcome, load_tasks, quiet, run_method
from turbo_hf.eval.methods import AGAIN, BASELINE, EAGER, applied, method_named
from turbo_hf.eval.model import Batch, TurboLM
from turbo_hf.eval.output import Report, markdown
from turbo_hf.eval.prompts import Prompts
from turbo_hf.eval.record import META, fingerprint, identity, open_run
from turbo_hf.eval.report import noise, report, stamps, tables
from turbo_hf.eval.report_plots import accuracy_plot, memory_plot, needle_cells, needle_map, worst
from turbo_hf.eval.scorers import OWN, Scorer
from turbo_hf.eval.sdpa import without_plans
from turbo_hf.eval.suites import Limits
from turbo_hf.eval.tasks import Spec, carried_prose, needle_task, prose_task

LIMITS = Limits(context=2048, longest=512)


@pytest.fixture(scope="module")
def lab() -> tuple[Any, Any]:
    return lab_model()


def questions(tokenizer: Any) -> list[tuple[Any, list[int], list[int]]]:
    """Contexts of different lengths, the longest past a sealed block; two choices of one token share a context."""
    long = " ".join(carried_prose(1, 12))
    pairs = [(long, " I went to the woods"), (long[:150], " because I wished"), ("A", " bee"), ("A", " fly")]
    encoded = [(tokenizer(c).input_ids, tokenizer(e, add_special_tokens=False).input_ids) for c, e in pairs]
    # and one continuation of several chunks behind a single token, as rolling perplexity brings
    encoded.append((encoded[0][0][:1], encoded[0][0][1:180]))
    return [(None, context, continuation) for context, continuation in encoded]


def scores(lm: Any, requests: Any) -> torch.Tensor:
    return torch.tensor([score for score, _ in lm._loglikelihood_tokens(requests, disable_tqdm=True)])


def test_it_is_registered_in_the_harness() -> None:
    assert get_model("turbo-hf") is TurboLM


def test_log_likelihoods_read_the_compressed_cache_and_are_stock_without_it(lab: tuple[Any, Any]) -> None:
    model, tokenizer = lab
    requests = questions(tokenizer)
    stock = scores(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2), requests)
    lm = TurboLM(model, preset="int8", tokenizer=tokenizer, batch_size=2)
    assert lm.handle is not None
    ours = scores(lm, requests)
    assert lm.handle.memory().total > 0
    # each differs, by a rounding of keys and values and no more
    assert bool((ours != stock).all())
    torch.testing.assert_close(ours, stock, rtol=0.02, atol=0.1)
    lm.close()
    assert torch.equal(scores(lm, requests), stock)


def test_scores_are_those_of_a_pass_by_pass_reading(lab: tuple[Any, Any]) -> None:
    model, tokenizer = lab
    (request,) = questions(tokenizer)[:1]
    _, context, continuation = request
    lm = TurboLM(model, preset="turbo4", tokenizer=tokenizer, batch_size=1)
    assert lm.handle is not None
    cache = lm.handle.new_cache()
    with torch.inference_mode():
        model(torch.tensor([context[:-1]]), past_key_values=cache)
        logits = model(torch.tensor([[context[-1], *continuation[:-1]]]), past_key_values=cache).logits[0]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(continuation)[:, None]).sum()
    torch.testing.assert_close(scores(lm, [request])[0], expected)
    lm.close()


def test_scores_do_not_depend_on_the_batch(lab: tuple[Any, Any]) -> None:
    model, tokenizer = lab
    requests = questions(tokenizer)
    found = []
    for size in (1, 8):
        lm = TurboLM(model, preset="turbo2", tokenizer=tokenizer, batch_size=size)
        found.append(scores(lm, requests))
        lm.close()
    torch.testing.assert_close(*found)


def test_a_smaller_chunk_reads_more_of_the_text_compressed(lab: tuple[Any, Any]) -> None:
    model, tokenizer = lab
    rolling = questions(tokenizer)[-1:]
    stock = scores(HFLM(pretrained=model, tokenizer=tokenizer), rolling)
    off = []
    for chunk in (32, 4096):
        with_cache = TurboLM(model, preset="turbo2", attention="fp16", chunk=chunk, tokenizer=tokenizer)
        off.append(float((scores(with_cache, rolling) - stock).abs()))
        with_cache.close()
    # one chunk of everything has no past to read: it would be a measurement of nothing
    assert off[1] < 1e-2 < off[0]


def test_prompts_are_encoded_and_padded_as_in_the_harness(lab: tuple[Any, Any]) -> None:
    model, tokenizer = lab
    plain = HFLM(pretrained=model, tokenizer=tokenizer)
    lm = TurboLM(model, preset="fp16", tokenizer=tokenizer)
    texts = [*carried_prose(3, 4), "A", f"{tokenizer.bos_token}A"]
    for text in texts:
        assert lm.tok_encode(text) == plain.tok_encode(text)
        assert lm.tok_encode(text, add_special_tokens=False) == plain.tok_encode(text, add_special_tokens=False)
    ways: list[dict[str, Any]] = [{}, {"left_truncate_len": 20}, {"padding_side": "right"}]
    for given in ways:
        ours, theirs = (one.tok_batch_encode(texts[:4], **given) for one in (lm, plain))
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


def test_batches_hold_so_many_tokens_and_replies_do_not_depend_on_them(lab: tuple[Any, Any]) -> None:
    model, tokenizer = lab
    prompts_of = carried_prose(5, 3) + carried_prose(3, 6)
    ways = [{"until": [], "max_gen_toks": 3 + at % 2, "do_sample": False} for at in range(len(prompts_of))]
    requests = [Instance("generate_until", {}, pair, at) for at, pair in enumerate(zip(prompts_of, ways, strict=True))]
    found: dict[int | None, list[str]] = {}
    for budget in (None, 1, 900):
        taken: list[Batch] = []
        lm = TurboLM(
            model, preset="fp16", tokenizer=tokenizer, batch_size=3, batch_tokens=budget, on_batch=taken.append
        )
        found[budget] = lm.generate_until(requests, disable_tqdm=True)
        assert sum(batch.rows for batch in taken) == len(requests)
        assert lm.batch_size == 3
        if budget == 1:
            assert {batch.rows for batch in taken} == {1}
        elif budget:
            assert 1 < max(batch.rows for batch in taken) <= 3
            assert all(batch.rows == 1 or batch.kv_tokens <= 900 + 4 * batch.rows for batch in taken)
    assert found[None] == found[1] == found[900]


def test_too_long_a_context_loses_its_left_end_as_in_the_harness() -> None:
    model = tiny_llama()
    _, tokenizer = lab_model()
    ids = prompts(1, 90)[0].tolist()
    request = [(None, ids[:80], ids[80:])]
    plain = HFLM(pretrained=model, tokenizer=tokenizer, max_length=40)
    lm = TurboLM(model, preset="int8", tokenizer=tokenizer, max_length=40)
    ours = scores(lm, request)
    lm.close()
    torch.testing.assert_close(ours, scores(plain, request), rtol=0.05, atol=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"preset": "turbo5"}, "unknown method turbo5"), ({"chunk": 0}, "chunk must be at least 1 token; got 0")],
    ids=["preset", "chunk"],
)
def test_the_adapter_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TurboLM("no/such-model", **given)


def test_methods_have_one_name_each(lab: tuple[Any, Any]) -> None:
    model, _ = lab
    assert method_named(BASELINE).config is None
    config = method_named("turbo4/fp16").config
    assert config is not None
    assert (config.bits, config.attention) == (4, "fp16")
    for name in ("turbo5", "turbo4/int3", "turbo4/", "fp16/fp16"):
        with pytest.raises(ValueError, match=f"unknown method {name}; methods are fp16, fp16-eager, int8, turbo4"):
            method_named(name)
    before = model.config._attn_implementation
    for name in (EAGER, BASELINE, "int8"):
        with applied(model, method_named(name)) as handle:
            assert (handle is not None) == (name == "int8")
        assert model.config._attn_implementation == before


@pytest.fixture(scope="module")
def run(lab: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Spec], dict[str, Outcome]]:
    """A small suite on the carried model: needles and perplexity, the baseline twice and one preset."""
    model, tokenizer = lab
    quiet()
    folder = tmp_path_factory.mktemp("run")
    specs = [needle_task(tokenizer, [200, 300], [0.0, 1.0], [0]), prose_task("prose", carried_prose(1, 8))]
    tasks, notes = load_tasks(specs, Prompts(tokenizer), LIMITS)
    assert not notes
    outcomes = {
        label: run_method(label, method, model, Prompts(tokenizer), tasks, folder, batch=4, limits=LIMITS)
        for label, method in ((BASELINE, BASELINE), (AGAIN, BASELINE), ("turbo4", "turbo4"))
    }
    return folder, specs, outcomes


def test_a_run_keeps_samples_results_and_sizes(run: tuple[Path, list[Spec], dict[str, Outcome]]) -> None:
    folder, _, outcomes = run
    for label, outcome in outcomes.items():
        own = folder / label.replace(" ", "-")
        kept = [json.loads(line) for line in (own / "samples_needle.jsonl").read_text().splitlines()]
        assert kept == outcome.samples["needle"]
        assert len(kept) == 4
        # prompts are kept once, and known to be the same
        assert all(("prompt" in sample["doc"]) == (label == BASELINE) for sample in kept)
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
    assert noise(found) == "Noise floor: 0 of 4 items differ between two baseline runs."


def test_tables_and_pictures(run: tuple[Path, list[Spec], dict[str, Outcome]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    _, specs, outcomes = run
    found = report(specs, outcomes)
    versions = {"lm_eval": "a", "transformers": "b", "torch": "c"}
    about = {"model": "m", "model_fingerprint": "f", "dtype": "float32", "device": "cpu", "suite": "s", "batch": 4}
    about |= {"seed": 1, "limit": 3, "versions": versions}
    text = markdown(Report("a title", stamps(about), tables(found), ["a note"], {}, []))
    assert "LIMITED to 3 items a task" in text
    assert "- a note" in text
    assert "LIMITED" not in " ".join(stamps({**about, "limit": None}))
    for title, headings, rows in tables(found):
        assert title in text
        assert all(len(row) == len(headings) for row in rows)
    base, ours = (needle_cells(outcomes[label].samples["needle"]) for label in (BASELINE, "turbo4"))
    assert set(base) == {(length, depth) for length in (200, 300) for depth in (0.0, 1.0)}
    assert {(cell["length"], cell["depth"]): cell["share"] for cell in found["needles"]["turbo4"]["cells"]} == ours
    assert found["needles"]["turbo4"]["mean"] == sum(ours.values()) / 4
    (length, depth), share = worst(ours)
    assert found["needles"]["turbo4"]["worst"] == {"length": length, "depth": depth, "share": share}
    assert f"| turbo4 | {sum(ours.values()) / 4:.3f} | {share:.2f} | {length} | {depth:.0%} |" in text
    assert worst({(1, 0.5): 0.5, (2, 0.0): 0.0, (2, 1.0): 0.0}) == ((2, 0.0), 0.0)
    needle_map(base, ours, "turbo4", tmp_path / "needle.png")
    assert accuracy_plot(found, "title", tmp_path / "accuracy.png")
    assert memory_plot(found, "title", tmp_path / "memory.png")
    assert not memory_plot({**found, "memory": {BASELINE: []}}, "title", tmp_path / "none.png")
    assert not accuracy_plot({**found, "means": []}, "title", tmp_path / "none.png")
    for name in ("needle", "accuracy", "memory"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_killed_run_goes_on_where_it_was(
    lab: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = lab
    specs = [needle_task(tokenizer, [150], [0.0, 0.5, 1.0], [0])]
    tasks, _ = load_tasks(specs, Prompts(tokenizer), LIMITS)
    asked: list[int] = []
    original = TurboLM._model_generate

    def dies(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TurboLM, "_model_generate", dies)

    def go() -> Outcome:
        return run_method("int8", "int8", model, Prompts(tokenizer), tasks, tmp_path, batch=1, limits=LIMITS)

    with pytest.raises(KeyboardInterrupt):
        go()
    assert model.config._attn_implementation == "eager"
    assert not (tmp_path / "int8" / "results.json").exists()
    outcome = go()
    # two answered, one lost; only that one is asked again
    assert len(asked) == 4
    assert sum(batch.rows for batch in outcome.batches) == 3
    again = go()
    assert len(asked) == 4
    assert again == outcome


def test_another_run_is_not_merged(lab: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = lab
    tasks, _ = load_tasks([needle_task(tokenizer, [150], [0.5], [0])], Prompts(tokenizer), LIMITS)
    about = identity(model, tokenizer, tasks, {"suite": "smoke", "limit": None})
    open_run(tmp_path, about)
    meta = open_run(tmp_path, about)
    assert len(meta["commands"]) == 2
    assert json.loads((tmp_path / META).read_text())["identity"] == about
    older = {**about, "versions": {**about["versions"], "torch": "1.0"}, "limit": 3}
    with pytest.raises(
        ValueError, match=r"limit was None, now 3; versions.torch was .*, now 1.0. Results of different"
    ):
        open_run(tmp_path, older)


def test_fingerprints_tell_models_and_items_apart(lab: tuple[Any, Any]) -> None:
    model, tokenizer = lab
    one, other = tiny_llama(), tiny_llama()
    assert fingerprint(one) == fingerprint(other)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.01)
    assert fingerprint(one) != fingerprint(other)
    digests = []
    for seed in (0, 1):
        tasks, _ = load_tasks([needle_task(tokenizer, [150], [0.5], [seed])], Prompts(tokenizer), LIMITS)
        digests.append(identity(model, tokenizer, tasks, {})["tasks"])
    assert digests[0] != digests[1]


def test_a_task_that_does_not_fit_is_skipped_and_told(lab: tuple[Any, Any]) -> None:
    _, tokenizer = lab
    specs = [needle_task(tokenizer, [400], [0.5], [0]), prose_task("prose", carried_prose(1, 40))]
    tasks, notes = load_tasks(specs, Prompts(tokenizer), Limits(context=300, longest=300))
    # text is read in windows, so that it always fits
    assert list(tasks) == ["prose"]
    assert len(notes) == 1
    assert notes[0].startswith("needle: skipped; it takes ")
    with pytest.raises(ValueError, match=r"no task of this suite is left to run. needle: skipped"):
        load_tasks(specs[:1], Prompts(tokenizer), Limits(context=300, longest=300))


def test_means_leave_out_what_the_baseline_cannot_do() -> None:
    def outcome(*tasks: list[int]) -> Outcome:
        samples = {
            f"t{i}": [
                {"doc_id": n, "doc": {"length": 100 << n}, "filter": "none", "right": right}
                for n, right in enumerate(own)
            ]
            for i, own in enumerate(tasks)
        }
        return Outcome({"results": {}}, samples, [Batch(4, 8, 2.0, 100, 10)])

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
    assert found["pairs"] == []
    # y answers as the baseline does, in as many bytes as x
    same = {label: outcome(good, bad) for label in (BASELINE, AGAIN, "y")}
    both = report(specs, {**same, "x": outcome([1, 1, 0, 0, 1], bad)})
    assert both["pairs"] == [{"base": "y", **found["differences"][0]}]
    titled = {title: rows for title, _, rows in tables(both)}
    cells = ["y", "x", f"-10.00 ± {100 * (0.7 / 5) ** 0.5 / 2:.2f}", "t0", "-20.00"]
    assert titled["points of accuracy of the second against the first, as above"] == [cells]
    smaller = replace(outcome(good, bad), batches=[Batch(4, 8, 2.0, 98, 10)])
    other = report(specs, {BASELINE: outcome(good, bad), "y": outcome(good, bad), "x": smaller})
    assert other["pairs"] == [], "two percent fewer bytes"
    # one item has no error, nor has a mean that it is part of
    single = report(specs[:1], {BASELINE: outcome([1]), "x": outcome([0])})
    assert single["means"][0]["methods"]["x"]["stderr"] is single["differences"][0]["stderr"] is None
    titled = {title: rows for title, _, rows in tables(single)}
    assert titled["points of accuracy against fp16 ± standard error of the pairs"][0][1] == "-100.00"
    assert found["memory"]["x"] == [{"tokens": 2.5, "bytes": 25.0}]
    assert found["serving"]["x"] == {
        "simulated": False,
        "prompts": 4,
        "kv_bytes_per_token": 10,
        "compression": 1.0,
        "tokens_per_s": 4.0,
    }


def test_the_command_runs_a_suite_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")

    def command(*more: str, code: int = 0, methods: str = "turbo4") -> Any:
        words = ["eval", str(LAB_MODEL), "--methods", methods, "--limit", "1", "--longest", "512", "--device", "cpu"]
        result = CliRunner().invoke(app, [*words, "--out", str(tmp_path), *more])
        assert result.exit_code == code, result.output
        return result

    result = command("--json")
    found = json.loads(result.stdout.strip().splitlines()[-1])
    assert "LIMITED to 1 items a task: a smoke test, not a result." in result.stdout
    assert list(found["serving"]) == [BASELINE, AGAIN, "turbo4"]
    assert found["serving"]["turbo4"]["compression"] > 1.5
    names = {path.name for path in tmp_path.iterdir()}
    assert {
        "report.html",
        "report.md",
        "report.json",
        META,
        "accuracy.png",
        "memory.png",
        "needle-turbo4.png",
        "turbo4",
        "fp16-again",
    } <= names
    assert json.loads((tmp_path / "report.json").read_text())["accuracy"] == found["accuracy"]
    whole = (tmp_path / "report.html").read_text()
    assert whole.count("data:image/png;base64,") == 3
    assert whole.count("<table>") == whole.count("</table>") == 6
    # everything that the page shows is inside it
    assert "http" not in whole

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("everything was answered before")

    monkeypatch.setattr(TurboLM, "_model_generate", never)
    again = json.loads(command("--json").stdout.strip().splitlines()[-1])
    assert again["accuracy"] == found["accuracy"]
    stopped = command(methods="turbo4,turbo4+low_heads=0.25", code=1)
    assert isinstance(stopped.exception, AssertionError)
    partial = json.loads((tmp_path / "report.json").read_text())
    assert partial["notes"][0] == "UNFINISHED: turbo4+low_heads=0.25 still to run; the same command goes on."
    assert any("this model has 2 KV heads: turbo4, turbo4+low_heads=0.25." in note for note in partial["notes"])
    assert partial["accuracy"] == found["accuracy"]
    assert "UNFINISHED" in (tmp_path / "report.md").read_text()
    refused = command("--batch", "2", code=1)
    assert "batch was 8, now 2" in " ".join(refused.output.split())


def test_sdpa_is_without_plans_inside_and_as_it_was_after() -> None:
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with without_plans():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()
