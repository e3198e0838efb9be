"""Evaluation: the adapter that lm-evaluation-harness talks to, and the methods that it is patched with, by name; sparse
ones in a paired run of the task sets, with what they read."""

from typing import Any

import pytest
import torch
from models import lab_model, prompts, tiny_llama

pytest.importorskip("lm_eval", reason='lm-eval is not installed: pip install -e ".[eval]"')
pytest.importorskip("datasets", reason='datasets is not installed: pip install -e ".[eval]"')

import json
import runpy
import tomllib
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from calibration_support import SMALL, lab
from choices import flat_config
from cli_support import check_refused, output_of, run
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from models import LAB_MODEL

from turbo_hf import SparseConfig, TurboConfig
from turbo_hf.eval.answers import Batch
from turbo_hf.eval.methods import method_named, without_plans
from turbo_hf.eval.model import TurboLM
from turbo_hf.eval.tasks import carried_prose
from turbo_hf.models.versions import CACHE


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
    project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["lm_eval.models"].items()
    assert EntryPoint(name=name, value=value, group="lm_eval.models").load() is get_model(name)


def test_the_harness_s_command_line_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.json").write_text('{"text": "The special magic number is 4281. The number is"}')
    task = {
        "task": "needle", "dataset_path": "json", "dataset_kwargs": {"data_files": str(tmp_path / "data.json")},
        "test_split": "train", "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": " 4281.",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}, "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    (tmp_path / "needle.yaml").write_text(json.dumps(task))
    given = f"--model turbo-hf --model_args pretrained={LAB_MODEL},preset=turbo4 --tasks needle --device cpu"
    paths = f"--include_path {tmp_path} --output_path {tmp_path / 'out'}"
    monkeypatch.setattr("sys.argv", ["lm_eval", "run", *given.split(), *paths.split()])
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    runpy.run_module("turbo_hf.eval.lm_eval", run_name="__main__")
    (found,) = (tmp_path / "out").rglob("results*.json")
    assert json.loads(found.read_text())["results"]["needle"]["exact_match,none"] == 1


def test_log_likelihoods_read_the_compressed_cache_and_are_stock_without_it() -> None:
    model, tokenizer = lab_model()
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


def test_scores_are_those_of_a_pass_by_pass_reading() -> None:
    model, tokenizer = lab_model()
    (request,) = questions(tokenizer)[:1]
    _, context, continuation = request
    lm = TurboLM(model, preset="turbo4", tokenizer=tokenizer, batch_size=1)
    assert lm.handle is not None
    cache = lm.handle.new_cache()
    with torch.inference_mode():
        model(torch.tensor([context[:-1]]), **{CACHE: cache})
        logits = model(torch.tensor([[context[-1], *continuation[:-1]]]), **{CACHE: cache}).logits[0]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(continuation)[:, None]).sum()
    torch.testing.assert_close(scores(lm, [request])[0], expected)
    lm.close()


def test_scores_do_not_depend_on_the_batch() -> None:
    model, tokenizer = lab_model()
    requests = questions(tokenizer)
    found = []
    for size in (1, 8):
        lm = TurboLM(model, preset="turbo2", tokenizer=tokenizer, batch_size=size)
        found.append(scores(lm, requests))
        lm.close()
    torch.testing.assert_close(*found)


def test_a_smaller_chunk_reads_more_of_the_text_compressed() -> None:
    model, tokenizer = lab_model()
    rolling = questions(tokenizer)[-1:]
    stock = scores(HFLM(pretrained=model, tokenizer=tokenizer), rolling)
    off = []
    for chunk in (32, 4096):
        with_cache = TurboLM(model, preset="turbo2/native", chunk=chunk, tokenizer=tokenizer)
        off.append(float((scores(with_cache, rolling) - stock).abs()))
        with_cache.close()
    # one chunk of everything has no past to read: it would be a measurement of nothing
    assert off[1] < 1e-2 < off[0]


def test_batches_hold_so_many_tokens_and_replies_do_not_depend_on_them() -> None:
    model, tokenizer = lab_model()
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


def test_the_adapter_refuses() -> None:
    with pytest.raises(ValueError, match="chunk must be at least 1 token; got 0"):
        TurboLM("no/such-model", chunk=0)


def test_sdpa_is_without_plans_inside_and_as_it_was_after() -> None:
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with without_plans():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


# --- methods by name, and sparse ones in a paired run ----------------------------------------------------------------


CHOSEN = SparseConfig(probes=16, read_all_layers=(0, 2))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("saap", TurboConfig(sparse=SparseConfig())),
        ("turbo4@window", TurboConfig(sparse=SparseConfig(selector="window"))),
        ("int8/native@saap:probes=16:read_all_layers=0+2", TurboConfig(bits=8, attention="native", sparse=CHOSEN)),
        ("turbo4+block_size=32@saap:probes=64", flat_config(block_size=32, sparse=SparseConfig(probes=64))),
        ("turbo4+sas=True+sas_threshold=-8+low_heads=0.25", flat_config(sas=True, sas_threshold=-8, low_heads=0.25)),
        ("turbo4@window:read_all_layers=", TurboConfig(sparse=SparseConfig(selector="window", read_all_layers=()))),
    ],
)
def test_names_of_methods(name: str, config: TurboConfig) -> None:
    assert method_named(name).config == config


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (name, f"unknown method {name}; methods are fp16")
            for name in ("kivi5", "turbo4/int3", "turbo4/", "fp16/native")
        ),
        ("turbo5@saap", "unknown method turbo5@saap; methods are fp16"),
        ("kivi4+bits=2", "unknown method"),
        ("turbo4+blocks=32", "unknown choice 'blocks=32' in method turbo4.blocks=32; write FIELD=VALUE of bits"),
        ("turbo4+sas", "unknown choice 'sas' in method"),
        ("turbo4+bits=5", "TurboConfig.bits must be one of 16, 8, 4, 3, 2; got 5"),
        ("turbo4@best", "SparseConfig.selector must be one of 'saap', .*; got 'best'"),
        ("turbo4@saap:probe=3", "expected choices like probes=16, of .*; got 'probe=3'"),
        ("turbo4@saap:probes=x", "SparseConfig.probes must be a whole number of at least 1; got 'x'"),
        ("turbo4@saap+block_size=32", "SparseConfig.selector must be one of .*; got 'saap.block_size=32'"),
        ("kivi4@saap", "unknown method kivi4@saap"),
        ("1", r"Several layers behind @ are written read_all_layers=0\+1"),
        ("turbo4@saap:probes=0", "SparseConfig.probes must be a whole number of at least 1; got 0"),
    ],
)
def test_wrong_names_get_one_sentence(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method_named(name)


def test_a_paired_run_tells_what_was_read(tmp_path: Path) -> None:
    lab(settings=SMALL).save_pretrained(tmp_path / "index")
    methods = ["turbo4", "turbo4@saap:probes=4:window_tokens=63", "turbo4@window:window_tokens=63"]
    words = ["eval", str(LAB_MODEL), "--out", str(tmp_path / "out"), "--limit", "2"]
    words += ["--shortest", "500", "--longest", "600", "--task", "needle", "--device", "cpu"]
    words += [word for method in methods for word in ("--methods", method)]
    check_refused('selector "saap" needs a calibration of this model', *words)
    # the folder may begin with methods that take no calibration: one is compared with that of the same method alone
    assert "fp16 (1 of" in run(*words[:-4]).output
    words += ["--calibration", str(tmp_path / "index")]
    run(*words)

    def calibrated(method: str) -> Any:
        first = (tmp_path / "out" / method / "answers.jsonl").read_text("utf-8").splitlines()[0]
        return json.loads(first)["identity"]["calibration"]

    index = calibrated(methods[1])
    assert index is not None
    assert [calibrated(method) for method in ("fp16", "turbo4", methods[2])] == [None] * 3
    run(*words)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [(row["task"], row["items"]) for row in report["accuracy"]] == [("needle", 2)]
    assert list(report["reading"]) == methods[1:]
    sparse, window = (report["reading"][method] for method in methods[1:])
    assert window["share_beyond"] == 0
    assert 1 > sparse["share"] > window["share"] > 0
    assert "of those not always read" in (tmp_path / "out" / "report.md").read_text()
    # answers under one calibration are not merged with those under another
    other = lab(settings=replace(SMALL, seed=1))
    other.save_pretrained(tmp_path / "index")
    again = output_of(*words, code=1)
    assert f"calibration was {index!r}, now " in again
    assert "fp16 (1 of" not in again, "refused before the first method runs"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "maid"], "no task maid here; smoke has needle, prose."),
        (["--calibration", "nowhere"], "none of these methods takes anything from"),
        (["--calibration", "nowhere", "--methods", "saap"], "no calibration in 'n"),
        (["--shortest", "900", "--longest", "800"], "--shortest 900 is above the longest prompt, 800."),
    ],
)
def test_wrong_choices_of_a_run_get_one_sentence(words: list[str], message: str, tmp_path: Path) -> None:
    check_refused(message, "eval", str(LAB_MODEL), *words, "--out", str(tmp_path / "out"), "--device", "cpu")
