"""The command line, as a user types it: its help, which must not wait for torch; config files; `generate`;
and models in GGUF files."""

import errno
import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import typer
import typer.main
from calibration_support import lab
from choices import EVERY_PRESET, flat_config
from cli_support import check_refused, last_json, output_of, run
from models import LAB_MODEL
from transformers import AutoModelForCausalLM, AutoTokenizer

from turbo_hf import PRESETS, TurboConfig
from turbo_hf.calibration.widths import Widths
from turbo_hf.cli.main import LATER, app, load_command
from turbo_hf.layout import FIRST

LAB = str(LAB_MODEL)


def test_demo_prints_a_table_and_the_same_numbers_as_json() -> None:
    result = run("demo", "--prompts", "3", "--longest", "300", "--method", "turbo4", "--device", "cpu", "--json")
    rows = last_json(result)["rows"]
    assert [row["method"] for row in rows] == ["baseline", "turbo4"]
    for row in rows:
        assert f"{row['needle_right']}/{row['needle_total']}" in result.stdout
        assert f"{row['compression']:.2f} x" in result.stdout
    assert "One of the prompts" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "--method", "turbo5"], "one of the presets int8, turbo4, turbo-k4v3, saap, calibrated; got 'turbo5'"),
        (["demo", "--model", "no/such-folder"], "cannot load 'no/such-folder'"),
        (["demo", "--device", "nowhere"], "on nowhere"),
        (["demo", "--longest", "20"], "has no room for the question"),
        (["doctor", LAB, "--device", "meta"], "--device meta holds no weights"),
        (["eval", LAB, "--methods", ""], "--methods names none; methods are fp16, int8"),
        (["eval", LAB, "--methods", "fp16,turbo5"], "unknown method turbo5; methods are fp16, int8"),
        (["eval", LAB, "--suite", "all"], "unknown suite all; suites are smoke, core"),
        (["eval", LAB, "--data", "no/such-folder"], "expected the data folder at no/such-folder; there is none"),
        (["plan", "no/such-folder"], "cannot read a config from 'no/such-folder'"),
        (["plan", "./no/such-folder"], "there is no folder './no/such-folder', and no repository"),
        (["plan", LAB, "--gpu-memory", "much"], "expected an amount of memory like 80GB"),
        (["plan", LAB, "--context", "long"], "expected a number of tokens like 4096 or 4k; got 'long'"),
        (["generate", LAB, "hi", "--temperature", "-1"], "must be 0 (greedy) or a number above; got -1.0"),
        (["generate", LAB, "hi", "--temperature", "nan"], "a number above; got nan."),
        (["generate", LAB, "hi", "--preset", "saap"], 'selector "saap" needs a calibration'),
        (["generate", LAB, "hi", "--calibration", "./nowhere"], "no calibration in './nowhere': there is no such"),
        (["generate", LAB, "hi", "--preset", "int8", "--calibration", "x"], "int8 takes nothing from a calibration"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_1(words: list[str], message: str) -> None:
    if words[0] == "eval":
        pytest.importorskip("lm_eval", reason='lm-eval is not installed: pip install -e ".[eval]"')
    check_refused(message, *words)


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
    # each row's first and recent tokens stay open, in 2 * (64 + 4) bytes
    assert rows["turbo4"]["cache_bytes"] == pytest.approx(2 * (4096 * 72 + (FIRST + 64) * (136 - 72)) * 12)
    assert rows["turbo4"]["longest_context"] > 3.5 * rows["fp16"]["longest_context"]
    assert report["weight_bytes"] == sum(p.nbytes for p in AutoModelForCausalLM.from_pretrained(LAB).parameters())


def test_doctor_on_the_carried_model() -> None:
    result = run("doctor", LAB, "--device", "cpu", "--json")
    report = last_json(result)
    # the package's version may lack the build's suffix
    assert torch.__version__.startswith(report["machine"]["versions"]["torch"])
    assert set(report["model"]["checks"]) == set(EVERY_PRESET) - {"saap"}
    assert report["model"]["refusal"] is None
    assert ": 2 x 4 bit" in result.stdout, "the default preset"
    moved = [report["model"]["checks"][name]["kl"] for name in ("int8", "turbo4", "turbo2")]
    assert moved == sorted(moved)
    assert "Llama" in result.stdout


# --- help ----------------------------------------------------------------------------------------------------------

HEAVY = ("torch", "transformers", "triton", "datasets", "lm_eval", "matplotlib", "turbo_hf.cache.turbo_cache")
SCRIPT = f"""
import sys
from turbo_hf.cli.main import app
sys.argv = ["turbo-hf", *sys.argv[1:]]
try:
    app()
finally:
    print("imported", sorted(set({HEAVY!r}) & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], [], *([name, "--help"] for name in ("generate", "serve", "demo", "plan", "doctor"))],
    ids=" ".join,
)
def test_help_is_there_at_once(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("imported []\n"), done.stdout + done.stderr
    assert done.returncode == (2 if not words else 0)


def test_a_name_that_is_no_command_is_told_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, "generat"], capture_output=True, text=True, check=False)
    assert "imported []" in done.stdout
    assert "No such command 'generat'" in " ".join(done.stderr.split())


@pytest.mark.parametrize("name", LATER)
def test_commands_that_are_imported_later_are_as_the_help_says(name: str) -> None:
    command: Any = load_command(name)
    first, _, _ = str(command.help).partition("\n\n")
    assert " ".join(first.split()) == LATER[name].help
    assert f" {name} [OPTIONS]" in run(name, "--help").output


def test_the_help_lists_every_command() -> None:
    group: Any = typer.main.get_command(app)
    listed = group.list_commands(group.make_context("turbo-hf", [], resilient_parsing=True))
    assert listed == ["doctor", "plan", "demo", "generate", "serve", "calibrate", "fidelity", "eval", "bench"]
    assert set(group.commands) | set(LATER) == set(listed)
    printed = run("--help").output
    places = [printed.index(f" {name} ") for name in listed]
    assert places == sorted(places)


@pytest.mark.parametrize("words", [["demo"], ["generate"], ["calibrate"], ["eval"], ["bench", "generate"]])
def test_no_option_is_listed_with_its_contrary(words: list[str]) -> None:
    assert "--no-" not in run(*words, "--help").output


def test_eval_lists_methods_and_suites_with_what_they_are() -> None:
    told = output_of("eval", "--list")
    for text in ("kivi4", "reasoning", "decode-heavy, short prompts"):
        assert text in told
    assert "decode-heavy" not in output_of("eval", "--help")


# --- config files, wherever a preset can be named ------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("demo", "--method"),
        ("eval", LAB, "--methods"),
        ("bench", "generate", "--tiny", "--preset"),
        ("generate", LAB, "hello", "--preset"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_files_that_are_wrong_get_one_sentence(words: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason='lm-eval is not installed: pip install -e ".[eval]"')
    path = tmp_path / "mine.json"
    check_refused(f"error: there is no config file {path}.", *words, str(path))
    path.write_text('{"bit": 4}')
    check_refused(f"error: the config file {path}: TurboConfig has no option bit; options are", *words, str(path))


PROMPT = "The special magic number is 4281. The number is"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise AssertionError(f"a connection was tried: {args}")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)


# --- `turbo-hf generate` ---------------------------------------------------------------------------------------------


def generated(*words: str, **how: Any) -> Any:
    return run("generate", *words, "--device", "cpu", **how)


def test_a_reader_that_has_had_enough_ends_it_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Mock(side_effect=BrokenPipeError(errno.EPIPE, "Broken pipe"))
    monkeypatch.setattr("turbo_hf.cli.generate._continue", broken)
    result = generated(LAB, PROMPT, code=1)
    assert "pipe" not in result.output
    assert "error" not in result.output.lower()


@pytest.mark.usefixtures("no_network")
def test_a_prompt_is_continued(tmp_path: Path) -> None:
    result = generated(LAB, PROMPT, "--max-new-tokens", "8", "--json")
    text, line = result.stdout.splitlines()
    facts = json.loads(line)
    reply = facts["reply"]
    assert text == reply["text"]
    assert "4281" in text
    assert facts["config"] == TurboConfig().to_dict()
    assert facts["memory"]["tokens"] == reply["prompt_tokens"] + reply["new_tokens"] - 1
    # the text alone is on standard output
    assert generated(LAB, PROMPT, "--max-new-tokens", "8").stdout == f"{text}\n"
    assert generated(LAB, "-", "--max-new-tokens", "8", typed=f"{PROMPT}\n").stdout == f"{text}\n"
    mine = tmp_path / "mine.json"
    mine.write_text('{"preset": "int8", "expert": {"block_size": 32}}')
    made = generated(LAB, PROMPT, "--config", str(mine), "--max-new-tokens", "2", "--json")
    assert last_json(made)["config"] == flat_config(bits=8, block_size=32).to_dict()
    widths = Widths(((4, 4), (8, 8), (3, 3), (4, 2), (4, 4), (8, 8)), 5.0, 0.002, 640)
    replace(lab(), widths=widths).save_pretrained(tmp_path)
    made = generated(LAB, PROMPT, "--calibration", str(tmp_path), "--max-new-tokens", "2", "--json")
    assert last_json(made)["config"]["layer_bits"] == [4, 8, 3, [4, 2], 4, 8]


def test_a_seed_repeats_what_is_sampled() -> None:
    words = (LAB, "The grass is", "--max-new-tokens", "9", "--temperature", "1.5")
    one, same, other = (generated(*words, "--seed", seed).stdout for seed in ("1", "1", "2"))
    assert one == same != other
    greedy, nearly = (generated(*words[:4], "--temperature", least).stdout for least in ("0", "1e-40"))
    assert nearly == greedy
    assert greedy == generated(*words[:4]).stdout, "the generation config of this model says greedy"


@pytest.mark.parametrize(
    "asked",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"num_beams": 3},
        {"num_return_sequences": 2, "num_beams": 2},
        {"stop_strings": ["no such words"]},
    ],
    ids=str,
)
def test_one_reply_whatever_the_checkpoint_asks_for(tmp_path: Path, asked: dict[str, Any]) -> None:
    for file in LAB_MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    own = tmp_path / "generation_config.json"
    options = json.loads(own.read_text())
    own.unlink()
    own.write_text(json.dumps(options | asked))
    text, line = generated(str(tmp_path), PROMPT, "--max-new-tokens", "8", "--json").stdout.splitlines()
    reply = json.loads(line)["reply"]
    assert text.strip() == "4281."
    # each token is stored once, and the newest has not been read yet
    assert json.loads(line)["memory"]["tokens"] == reply["prompt_tokens"] + reply["new_tokens"] - 1


@pytest.mark.parametrize(("words", "typed"), [(["-"], b"caf\xe9"), (["caf\udce9"], "")], ids=["input", "argument"])
def test_bytes_that_are_no_text_are_told(words: list[str], typed: str | bytes) -> None:
    told = " ".join(generated(LAB, *words, code=1, typed=typed).output.split())
    assert "error: the prompt is not UTF-8 text. Convert it first." in told


def test_a_full_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr("turbo_hf.cli.generate._continue", full)
    told = " ".join(generated(LAB, "hi", code=1).output.split())
    assert "error: the memory of cpu is full. Take a shorter prompt or fewer bits." in told


# --- GGUF files ------------------------------------------------------------------------------------------------------


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
