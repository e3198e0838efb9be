"""Methods of the evaluation by name; sparse ones in a paired run of the task sets, with what they read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calibration_support import SMALL, lab
from choices import flat_config
from cli_support import check_refused, output_of, run
from models import LAB_MODEL

from turbo_hf import SparseConfig, TurboConfig
from turbo_hf.eval.methods import method_named

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
        ("turbo4@saap:probes=x", "expected a number for probes; got 'x'"),
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


def test_a_preset_without_its_calibration_says_so() -> None:
    words = ["demo", "--method", "saap", "--prompts", "1", "--shortest", "100", "--longest", "120", "--device", "cpu"]
    check_refused('selector "saap" needs a calibration of this model', *words)
