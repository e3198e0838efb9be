"""`turbo-hf doctor` without weights: what a config tells, and what it does not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from models import LAB_MODEL
from plan_support import SMALL
from transformers import AutoConfig, AutoModelForImageTextToText
from typer.testing import CliRunner

from turbo_hf.cli.main import app
from turbo_hf.console import load_model

NOT_COMPARED = "Logits were not compared: there are no weights here."


def doctor(name: str, code: int = 0) -> tuple[str, Any]:
    """What it prints, with single spaces, and its JSON (None: an error ended it)."""
    result = CliRunner().invoke(app, ["doctor", name, "--device", "cpu", "--json"])
    assert result.exit_code == code, result.output
    last = result.stdout.strip().splitlines()[-1]
    return " ".join(result.output.split()), json.loads(last) if last.startswith("{") else None


def test_a_config_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        said, found = doctor(name)
        assert "LlamaForCausalLM (Llama)" in said
        assert "layers 0, 1: 2 x 4 bit" in said
        assert NOT_COMPARED in said
        assert "self-check" not in said
        assert "without a GPU" not in said
        assert found["model"] == {"refusal": None, "checks": {}, "unknown": [NOT_COMPARED]}


def test_key_biases_are_unknown_where_the_rotary_embedding_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **SMALL}))
    said, found = doctor(str(tmp_path))
    assert "Keys have a bias" not in said
    monkeypatch.setattr("turbo_hf.patches.balance.rotate", None)
    said, found = doctor(str(tmp_path))
    assert "Keys have a bias, which only the weights tell" in said
    assert len(found["model"]["unknown"]) == 2


def test_layers_and_reasons(tmp_path: Path) -> None:
    fields = {**SMALL, "layer_types": ["linear_attention", "full_attention"], "num_experts": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_next", **fields}))
    said, _ = doctor(str(tmp_path))
    assert "layer 0: dense; " in said
    assert "layer 1: 2 x 4 bit" in said


def test_a_refusal_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    # would not load
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    said, found = doctor(str(tmp_path), code=1)
    assert "problem: t5 is an encoder-decoder; only decoder-only models are supported." in said
    assert found["model"]["checks"] == {}


def test_damaged_weights_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    said, found = doctor(str(tmp_path), code=1)
    assert "error: cannot load" in said
    assert len(said.split("error: ")[1]) < 700
    assert found is None


def test_a_checkpoint_of_the_hub_whose_weights_are_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repo, commit = tmp_path / "models--me--one", "1" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    shutil.copytree(LAB_MODEL, repo / "snapshots" / commit, ignore=shutil.ignore_patterns("*.safetensors"))
    said, found = doctor("me/one")
    assert NOT_COMPARED in said, "the index is here, the file that it names is not"
    assert found["model"]["refusal"] is None
    (repo / "snapshots" / commit / "model.safetensors.index.json").unlink()
    assert NOT_COMPARED in doctor("me/one")[0]
    (repo / "snapshots" / commit / "model.safetensors.index.json").write_text("{")
    assert "is no index of weights; download it again" in doctor("me/one", code=1)[0]


def test_models_are_loaded_by_the_class_of_their_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = {**SMALL, "model_type": "mistral"}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("mistral3", text_config=text, vision_config={**vision, "model_type": "pixtral"})
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "multimodal")
    assert type(load_model(str(tmp_path / "multimodal"), "cpu")).__name__ == "Mistral3ForConditionalGeneration"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(typer.Exit):
        load_model(str(tmp_path), "cpu")
    (said,) = (line for line in capsys.readouterr().err.splitlines() if "error" in line)
    assert said == "error: t5 is an encoder-decoder; only decoder-only models are supported."


def test_an_adapter_is_of_the_model_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(LAB_MODEL)}))
    result = CliRunner().invoke(app, ["plan", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    assert '"method": "fp16", "bytes_per_token": 3072' in result.output
