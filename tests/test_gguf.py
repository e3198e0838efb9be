"""GGUF files: every command that loads a model takes one by `--gguf-file`, and says in a sentence what it cannot do."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from cli_support import check_refused, last_json, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from turbo_hf.cli.main import LATER, app, load_command

NAME = "tiny.gguf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that holds only a GGUF file of a random Llama."""
    made = tmp_path_factory.mktemp("gguf")
    write(made / NAME, "llama")
    return str(made)


def write(path: Path, architecture: str) -> None:
    """A GGUF file of a Llama of two layers, whose text is of letters."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, architecture)
    for add, value in (("context_length", 512), ("embedding_length", 64), ("block_count", 2), ("head_count", 4),
                       ("feed_forward_length", 64), ("head_count_kv", 2), ("layer_norm_rms_eps", 1e-5),
                       ("rope_freq_base", 1e4), ("vocab_size", 64)):  # fmt: skip
        getattr(writer, f"add_{add}")(value)
    words = ["<s>", "</s>", *map(chr, range(97, 123)), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*words, *(f"<{n}>" for n in range(64 - len(words)))])
    writer.add_token_merges(["a b"])
    writer.add_token_types([3, 3, *[1] * 62])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    random = np.random.default_rng(0)
    shapes = {"token_embd": (64, 64), "output_norm": (64,)}
    for n in range(2):
        shapes |= {f"blk.{n}.{name}": (64, 64) for name in ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
        shapes |= {f"blk.{n}.{name}": (32, 64) for name in ("attn_k", "attn_v")}
        shapes |= {f"blk.{n}.{name}": (64,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else 0.2 * random.standard_normal(shape)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def commands(found: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Each command below `found`, by its whole name."""
    if hasattr(found, "list_commands"):
        for inner in found.list_commands(None):
            command = load_command(inner) if inner in LATER else found.get_command(None, inner)
            yield from commands(command, f"{name} {inner}")
    else:
        yield name, found


def test_every_command_that_loads_a_model_takes_a_gguf_file() -> None:
    options = {name: {p.name for p in command.params} for name, command in commands(typer.main.get_command(app), "")}
    loads = {name for name, own in options.items() if {"model", "device"} <= own} | {" plan"}
    assert len(loads) >= 7
    assert {name for name, own in options.items() if "gguf_file" in own} == loads


def test_generate_answers_as_the_model_that_transformers_loads(folder: str, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=NAME)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=NAME)
    ids = tokenizer("abcd", return_tensors="pt").input_ids
    want = tokenizer.decode(model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :])
    exact = tmp_path / "exact.json"
    exact.write_text(json.dumps({"bits": 16, "attention": "native"}))
    options = ("--gguf-file", NAME, "--config", str(exact), "--max-new-tokens", "6", "--json")
    facts = last_json(run("generate", folder, "abcd", *options))
    assert facts["dtype"] == "torch.float32"
    assert facts["reply"]["text"] == want.removesuffix("</s>")


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_plan_and_doctor_read_it(command: str, folder: str) -> None:
    facts = last_json(run(command, folder, "--gguf-file", NAME, "--json"))
    if command == "doctor":
        assert facts["model"]["refusal"] is None
        assert facts["model"]["checks"]["turbo4"]["positions"]
    else:
        # dequantized to float32
        assert facts["rows"][0]["method"] == "fp32"
        assert "dequantizes the weights of a GGUF file" in facts["weight_note"]


@pytest.mark.parametrize("command", ["plan", "doctor", "generate"])
def test_a_gguf_file_that_is_not_named_is_told(command: str, folder: str) -> None:
    words = ["hello"] if command == "generate" else []
    for place in (folder, f"{folder}/{NAME}"):
        check_refused(f"{NAME} is a GGUF file: pass its folder, and name it by --gguf-file", command, place, *words)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("other.gguf", "there is no file 'other.gguf' in the folder"),
        ("damaged.gguf", "damaged.gguf'"),
        ("unknown.gguf", "architecture mystery is not supported"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "generate"])
def test_a_file_that_is_none_ends_in_a_sentence(command: str, file: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF, but no more of it")
    write(tmp_path / "unknown.gguf", "mystery")
    words = ["hello"] if command == "generate" else []
    check_refused(message, command, str(tmp_path), *words, "--gguf-file", file)


def test_without_its_package_or_a_model_it_says_so(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_refused("--gguf-file is of a model", "doctor", "--gguf-file", NAME)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_refused("pip install gguf", "plan", folder, "--gguf-file", NAME)
