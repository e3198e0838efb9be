"""Configs as dicts, and as JSON and YAML files, wherever a preset can be named."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from choices import EVERY_PRESET, flat_config
from hypothesis import given
from hypothesis import strategies as st
from models import prompts, tiny_llama

import turbo_hf
from turbo_hf import SparseConfig, TurboCache, TurboConfig
from turbo_hf.config.turbo_config import BACKENDS, resolve_config, with_options
from turbo_hf.eval.methods import method_named

CONFIGS = [
    *EVERY_PRESET.values(),
    flat_config(bits=8, low_bits=4, low_heads=0.5, attention="native", cuda_graphs=True, compile=True),
    flat_config(sas=True, sas_threshold=-6.5, int8_layers=(3, 1), dense_layers=(0,), low_heads=1),
    TurboConfig(int8_layers=(), sparse=SparseConfig(probes=64, read_all_layers=(0, 2))),
    TurboConfig(sparse=SparseConfig(selector="window", window_tokens=511)),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_comes_back_from_json_and_yaml(config: TurboConfig) -> None:
    options = config.to_dict()
    assert set(options) == {field.name for field in fields(TurboConfig)}
    for text in (json.loads(json.dumps(options)), yaml.safe_load(yaml.safe_dump(options))):
        assert text == options
        assert TurboConfig.from_dict(text) == config
        assert hash(TurboConfig.from_dict(text)) == hash(config)
    if config.sparse is not None:
        assert SparseConfig.from_dict(config.sparse.to_dict()) == config.sparse


@given(
    layers=st.lists(st.integers(0, 99)),
    share=st.floats(0, 1),
    threshold=st.floats(-80, -1e-9),
    backend=st.sampled_from(BACKENDS),
)
def test_numbers_come_back_as_they_were(layers: list[int], share: float, threshold: float, backend: Any) -> None:
    config = flat_config(
        low_heads=share, sas=True, sas_threshold=threshold, backend=backend, dense_layers=tuple(layers)
    )
    assert TurboConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_options_of_a_preset() -> None:
    assert TurboConfig.from_dict({}) == TurboConfig()
    assert TurboConfig.from_dict({"preset": "turbo-mixed"}) == EVERY_PRESET["turbo-mixed"]
    assert TurboConfig.from_dict({"preset": "turbo-mixed", "expert": {"block_size": 32}}) == with_options(
        EVERY_PRESET["turbo-mixed"], block_size=32
    )
    assert TurboConfig.from_dict({"preset": "saap", "sparse": {"probes": 8}}).sparse == SparseConfig(probes=8)
    assert TurboConfig.from_dict({"preset": "saap", "sparse": None}).sparse is None
    assert TurboConfig.from_dict({"sparse": SparseConfig(probes=8)}).sparse == SparseConfig(probes=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bit": 4, "block": 32}, r"^TurboConfig has no option bit, block; options are preset, bits, .*sparse"),
        ({3: 4}, r"^TurboConfig has no option 3; options are preset, "),
        ({"sparse": {"preset": "saap"}}, r"^SparseConfig has no option preset"),
        ({"sparse": {"probe": 4}}, r"^SparseConfig has no option probe; options are selector, probes, sink_tokens, "),
        ({"expert": {"bits": 4}}, r"^Expert has no option bits; options are block_size, "),
        ({"expert": None}, r"^TurboConfig.expert must be an Expert; got None"),
        ({"preset": "turbo5"}, r"^unknown preset 'turbo5'; presets are int8, turbo4, .*saap, calibrated\.$"),
        ({"sparse": [1]}, r"^TurboConfig.sparse must be a SparseConfig or None; got \[1\]"),
        ({"dense_layers": ["0"]}, r"^TurboConfig.dense_layers must be a tuple of layer indices; got \('0',\)"),
        ([("bits", 4)], r"^TurboConfig is made from a dict of its options; got \[\('bits', 4\)\]"),
    ],
)
def test_other_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TurboConfig.from_dict(options)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mine.json", '{"preset": "turbo2", "dense_layers": [0], "cuda_graphs": false}'),
        ("mine.yaml", "preset: turbo2\ndense_layers: [0]\ncuda_graphs: false\n"),
        ("MINE.YML", "preset: turbo2\n"),
    ],
)
def test_files(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    want = TurboConfig(bits=2) if name == "MINE.YML" else TurboConfig(bits=2, dense_layers=(0,), cuda_graphs=False)
    assert resolve_config(path) == resolve_config(str(path)) == want
    # as an editor on Windows writes it
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert resolve_config(path) == want


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"bits": 4', r"the config file .*a\.json cannot be read: Expecting .* line 1 column 11"),
        ("a.json", b'{"bits": 4, "bits": 2}', r"a\.json cannot be read: it names bits twice"),
        ("a.yaml", b"bits: 4\nbits: 2\n", r"a\.yaml cannot be read: it names bits twice"),
        ("a.yaml", b"bits: [4\n", r"a\.yaml cannot be read: while parsing a flow sequence"),
        ("a.yaml", b"bits: 4\n---\nbits: 2\n", r"a\.yaml cannot be read: expected a single document"),
        ("a.yaml", b"!!python/object/apply:os.getcwd []", r"a\.yaml cannot be read: could not determine a constructor"),
        ("a.yaml", b"{[1, 2]: 3}", r"a\.yaml cannot be read: .*unhashable key"),
        ("a.yaml", b"", r"a\.yaml holds nothing; expected options of TurboConfig by name"),
        ("a.yaml", b"turbo4", r"a\.yaml holds a str; expected options"),
        ("a.json", b"\xff\xfe{\x00}\x00", r"a\.json cannot be read: 'utf-8' codec can't decode"),
        ("a.json", b"[" * 200_000, r"a\.json cannot be read: "),
        ("a.yaml", b"[" * 60_000, r"a\.yaml cannot be read: "),
        ("a.yaml", b"bits: 4\n" * 9000, "has 72,000 bytes; such a file has 65,536 at most"),
        ("a.yaml", b"a: &a [1]\nb: [" + b"*a, " * 17 + b"]", "it has an alias"),
        ("a.json", b'{"bit": 4}', r"the config file .*a\.json: TurboConfig has no option bit; options are"),
        ("a.yaml", b"expert: {low_heads: .nan}", r"a\.yaml: Expert.low_heads must be a share from 0 to 1; got nan"),
    ],
)
def test_files_that_are_wrong_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        resolve_config(tmp_path / name)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no config file .*none\.yaml"):
        resolve_config(tmp_path / "none.yaml")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(IsADirectoryError, match=r"expected a config file at .*; it is a folder"):
        resolve_config(tmp_path / "folder.json")
    with pytest.raises(ValueError, match=r"a config file is a \.json, \.yaml or \.yml file; got '.*mine\.toml'"):
        resolve_config(tmp_path / "mine.toml")


def test_a_model_is_patched_with_a_file_or_a_dict(tmp_path: Path) -> None:
    model, ids = tiny_llama(), prompts(1, 70)
    options = {"preset": "turbo2", "expert": {"block_size": 32}, "dense_layers": [1]}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(options))
    want = flat_config(bits=2, block_size=32, dense_layers=(1,))
    for config in (options, path, str(path)):
        with turbo_hf.patch(model, config) as handle:
            assert handle.report().config == want
            model.generate(ids, max_new_tokens=2, do_sample=False)
        assert TurboCache(model.config, config).turbo_config == want
    path.write_text('{"bit": 4}')
    with pytest.raises(ValueError, match=r"the config file .*mine\.json: TurboConfig has no option bit"):
        turbo_hf.patch(model, path)
    turbo_hf.patch(model).remove()


def test_methods_of_an_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("bits: 3\nsparse: {selector: window}\n")
    want = TurboConfig(bits=3, sparse=SparseConfig(selector="window"))
    assert method_named(str(path)).config == want
    sparse = SparseConfig(selector="window", window_tokens=31)
    assert method_named(f"{path}/native+block_size=32@window:window_tokens=31").config == with_options(
        want, attention="native", block_size=32, sparse=sparse
    )
    with pytest.raises(FileNotFoundError, match=r"there is no config file nowhere/none\.yaml"):
        method_named("nowhere/none.yaml/native")
    with pytest.raises(ValueError, match=r"unknown method .*/flash; methods are "):
        method_named(f"{path}/flash")
