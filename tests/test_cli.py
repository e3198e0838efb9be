"""The command line, as a user types it."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from choices import EVERY_PRESET
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from turbo_hf import PRESETS
from turbo_hf.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
LAB = str(ROOT / "examples" / "lab-llama-4m")


def run(*words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result


def last_json(result: Any) -> Any:
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_demo_prints_a_table_and_the_same_numbers_as_json() -> None:
    result = run("demo", "--prompts", "3", "--longest", "300", "--method", "turbo4", "--device", "cpu", "--json")
    rows = last_json(result)["rows"]
    assert [row["method"] for row in rows] == ["baseline", "turbo4"]
    assert set(rows[0]) == {
        "method",
        "needle_right",
        "needle_total",
        "tokens_equal_pct",
        "kv_bytes_per_token",
        "compression",
        "tokens_per_s",
    }
    for row in rows:
        assert f"{row['needle_right']}/{row['needle_total']}" in result.stdout
        assert f"{row['compression']:.2f} x" in result.stdout
    assert "One of the prompts" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "--method", "turbo5"], "unknown method turbo5; presets are int8, turbo4, turbo-k4v3, saap"),
        (["demo", "--model", "no/such-folder"], "cannot load 'no/such-folder'"),
        (["demo", "--device", "nowhere"], "cannot load .* on nowhere"),
        (["demo", "--shortest", "20"], "has no room for the question"),
        (["demo", "--shortest", "300", "--longest", "200"], "--shortest 300 is above --longest 200"),
        (["demo", "--longest", "30"], "has no room for the question"),
        (["doctor", LAB, "--device", "meta"], "--device meta holds no weights"),
        (["eval", LAB, "--methods", ""], "--methods names none; methods are fp16, fp16-eager, int8"),
        (["eval", LAB, "--methods", "fp16,turbo5"], "unknown method turbo5; methods are fp16, fp16-eager, int8"),
        (
            ["eval", LAB, "--suite", "all"],
            "unknown suite all; suites are smoke, core, reasoning, long, ruler, answers",
        ),
        (["eval", LAB, "--data", "no/such-folder"], "expected the data folder at no/such-folder; there is none"),
        (["eval", "no/such-folder"], "cannot load 'no/such-folder'"),
        (["plan", "no/such-folder"], "cannot read a config from 'no/such-folder'"),
        (["plan", "./no/such-folder"], "there is no folder './no/such-folder', and no repository"),
        (["doctor", "/no/such-folder"], "there is no folder '/no/such-folder', and no repository"),
        (["plan", LAB, "--gpu-memory", "much"], "expected an amount of memory like 80GB"),
        (["plan", LAB, "--context", "long"], "expected a number of tokens like 4096 or 4k; got 'long'"),
    ],
    ids=[
        "method",
        "model",
        "device",
        "short",
        "above",
        "longest",
        "meta",
        "no-method",
        "eval-method",
        "eval-suite",
        "eval-data",
        "eval-model",
        "config",
        "plan-folder",
        "doctor-folder",
        "memory",
        "context",
    ],
)
def test_mistakes_get_one_sentence_and_exit_1(words: list[str], message: str) -> None:
    if words[0] == "eval":
        pytest.importorskip("lm_eval", reason='lm-eval is not installed: pip install -e ".[eval]"')
    result = run(*words, code=1)
    assert "Traceback" not in result.output
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(" ".join(result.output.split()))


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == f"turbo_hf {version('turbo_hf')}\n"


def test_plan_prints_what_fits() -> None:
    result = run("plan", LAB, "--context", "4k", "--batch", "2", "--gpu-memory", "1GB", "--json")
    report = last_json(result)
    rows = {row["method"]: row for row in report["rows"]}
    assert set(rows) == {"fp16", *PRESETS}
    assert rows["fp16"]["bytes_per_token"] == 3072
    # 4 bit, d = 64: (2 * 64 * 64 / 2 + 4 * 64 + 2 * 2 * 64) / 64 bytes a token, 2 heads, 6 layers
    assert rows["turbo4"]["bytes_per_token"] == pytest.approx(72 * 12)
    assert rows["turbo4"]["cache_bytes"] == pytest.approx(2 * 4096 * 72 * 12)
    assert rows["turbo4"]["longest_context"] > 3.5 * rows["fp16"]["longest_context"]
    assert report["weight_bytes"] == sum(p.nbytes for p in AutoModelForCausalLM.from_pretrained(LAB).parameters())


def test_doctor_on_the_carried_model() -> None:
    result = run("doctor", LAB, "--device", "cpu", "--json")
    report = last_json(result)
    # the package's version may lack the build's suffix
    assert torch.__version__.startswith(report["machine"]["versions"]["torch"])
    assert set(report["model"]["checks"]) == set(EVERY_PRESET) - {"saap"}
    assert report["model"]["refusal"] is None
    errors = [report["model"]["checks"][name]["error"] for name in ("int8", "turbo4", "turbo2")]
    assert errors == sorted(errors)
    assert "Llama" in result.stdout


def test_doctor_explains_a_refusal(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "llama",
        num_hidden_layers=1,
        hidden_size=48,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=24,
        vocab_size=3072,
        intermediate_size=32,
    )
    # its tokens are random: it asks for no tokenizer
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    result = run("doctor", str(tmp_path), "--device", "cpu", code=1)
    assert "head dim 24 is no multiple of 16" in " ".join(result.stdout.split())
