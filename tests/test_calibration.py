"""Calibration: what is captured, and runs from the texts to the result."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload  # type: ignore[import-untyped] # it has no types
from calibration_support import HEADS, NARROW, PROSE, SMALL, TEXTS, lab, same
from families_support import FAMILY_CASES, Case, build
from models import LAB_MODEL, lab_model, prompts, tiny_llama, tiny_mistral
from torch import Tensor
from transformers import AutoTokenizer, BloomConfig, BloomForCausalLM, T5Config, T5Model

import turbo_hf
from turbo_hf import Calibration, TurboConfig
from turbo_hf.calibration import run
from turbo_hf.calibration.artifacts import FACTS
from turbo_hf.calibration.capture import Seen, capturing, probe, run_window
from turbo_hf.calibration.checkpoint import tokenizer_hash
from turbo_hf.calibration.heads import HeadPriorities, head_order
from turbo_hf.calibration.quality import WAYS
from turbo_hf.calibration.query_model import (
    stored_units,
    train,
)
from turbo_hf.calibration.run import calibrate, estimate, make_plan
from turbo_hf.calibration.settings import resolve_settings
from turbo_hf.calibration.texts import token_windows
from turbo_hf.calibration.unfinished import PART
from turbo_hf.config import HEAD_METRICS
from turbo_hf.ops.quantize import head_scores
from turbo_hf.rotary import unrotate


def test_a_pass_ends_behind_the_last_layer_that_it_is_for() -> None:
    model, tokenizer = lab_model()
    ran: list[int] = []
    hooks = [
        layer.mlp.register_forward_hook(lambda *args, index=index: ran.append(index))
        for index, layer in enumerate(model.model.layers)
    ]
    try:
        found = calibrate(model, tokenizer, TEXTS, settings=replace(SMALL, steps=1, windows=2, layers_at_once=4))
    finally:
        for hook in hooks:
            hook.remove()
    assert [layer.centroids is not None for layer in found.layers] == [True] * 6
    # two passes of the probe; two windows for layers 0 to 3, and for 4 and 5
    assert ran == [*range(6)] * 2 + [*range(3)] * 2 + [*range(5)] * 2


# --- capture -----------------------------------------------------------------------------------------------------


def before_rotation(model: Any, ids: Tensor) -> tuple[dict[int, Seen], dict[int, Tensor]]:
    """What attention saw, and what each `k_proj` put out."""
    seen: dict[int, Seen] = {}
    true: dict[int, Tensor] = {}
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda m, a, out, i=i: true.update({i: out}))
        for i, layer in enumerate(model.model.layers)
    ]
    with capturing(model, lambda call: seen.update({call.source.index: call})):
        run_window(model, ids)
    for hook in hooks:
        hook.remove()
    return seen, true


@pytest.mark.parametrize(
    "rope",
    [
        pytest.param({"rope_type": "default", "rope_theta": 1e4}, id="default"),
        pytest.param({"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, id="linear"),
        pytest.param(
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}, id="yarn"
        ),
    ],
)
def test_inverse_rotation_gives_what_the_projection_gave(rope: dict[str, Any]) -> None:
    model = tiny_llama(rope_parameters=rope)
    seen, true = before_rotation(model, prompts(1, 63))
    for index, call in seen.items():
        assert call.rotary is not None
        got = unrotate(call.source.module, call.key, call.rotary)
        torch.testing.assert_close(got, true[index].view(1, 63, 2, 16).transpose(1, 2))


@pytest.mark.parametrize("case", FAMILY_CASES, ids=lambda case: case.model_type)
def test_every_family_passes_the_probe(case: Case) -> None:
    found = probe(build(case.model_type, **case.options))
    assert sorted(found) == [i for i in range(len(found) + len(case.dense)) if i not in case.dense]
    assert {at.obstacle for at in found.values()} == {None}


@pytest.mark.parametrize(
    ("case", "without"),
    [(Case("smollm3", {"no_rope_layers": [1, 1, 0]}), [2]), (Case("gpt2", {"n_layer": 3, "n_head": 4}), [0, 1, 2])],
    ids=["smollm3", "gpt2"],
)
def test_layers_without_rotary_embedding_are_told_and_get_no_index(case: Case, without: list[int]) -> None:
    plan = make_plan(build(case.model_type, **case.options), SMALL)
    assert plan.notes == dict.fromkeys(without, "no index: it has no rotary embedding")
    assert [group.layers for group in plan.groups if not group.indexed] == [tuple(without)]


def test_a_wrong_inverse_fails_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turbo_hf.rotary._rotate", lambda module, x, cos, sin: x)
    for at in probe(tiny_llama()).values():
        assert "the inverse of its rotary embedding fails the probe (relative error" in str(at.obstacle)


def test_capture_changes_nothing_and_is_undone() -> None:
    model = tiny_llama()
    ids = prompts(1, 40)
    before = model(ids).logits
    hidden = []
    with capturing(model, lambda call: hidden.append(call.query)):
        run_window(model, ids)
    with pytest.raises(RuntimeError, match="stop"), capturing(model, lambda call: None):
        raise RuntimeError("stop")
    assert len(hidden) == 2
    assert torch.equal(model(ids).logits, before)
    assert model.config._attn_implementation == "eager"
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_patched_model_is_refused() -> None:
    model = tiny_llama()
    with turbo_hf.patch(model), pytest.raises(ValueError, match=r"patched\. Call remove\(\) on its handle"):
        make_plan(model, SMALL)


# --- head priorities ---------------------------------------------------------------------------------------------


def test_priorities_are_the_mean_over_blocks() -> None:
    k, v = torch.randn(1, 3, 150, 16), torch.randn(1, 3, 150, 16)
    got = HeadPriorities()
    got.add(k, v)
    for metric in HEAD_METRICS:
        blocks = [head_scores(k[:, :, i : i + 64], v[:, :, i : i + 64], metric)[0] for i in (0, 64)]
        torch.testing.assert_close(got.scores()[metric], torch.stack(blocks).mean(0))
    assert head_order(torch.tensor([1.0, 3.0, 1.0, 2.0])) == (1, 3, 0, 2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(("part", "name"), [("q_proj", "queries"), ("k_proj", "keys"), ("v_proj", "values")])
@pytest.mark.parametrize("layer", [0, 1])
def test_nan_activations_are_refused(layer: int, part: str, name: str, bad: float) -> None:
    model = tiny_llama()
    getattr(model.model.layers[layer].self_attn, part).weight.data[0, 0] = bad
    _, tokenizer = lab_model()
    model.resize_token_embeddings(len(tokenizer))
    for settings in (HEADS, SMALL):
        with pytest.raises(ValueError, match=rf"layer {layer}: {name} hold NaN or Inf"):
            calibrate(model, tokenizer, TEXTS, settings=settings)


def test_nan_that_only_the_texts_bring_is_refused() -> None:
    model = tiny_llama()
    _, tokenizer = lab_model()
    model.resize_token_embeddings(len(tokenizer))
    plan = make_plan(model, HEADS)
    windows = token_windows(TEXTS, tokenizer, HEADS.window, HEADS.windows)
    model.get_input_embeddings().weight.data[windows[0, 5]] = torch.nan
    with pytest.raises(ValueError, match="layer 0: queries hold NaN or Inf"):
        run._calibrate_group(model, plan.groups[0], plan, windows, lambda work: None)


# --- the run -----------------------------------------------------------------------------------------------------


def test_a_run_makes_all_of_it_and_the_same_for_a_seed(indexed: Calibration) -> None:
    for layer in indexed.layers:
        assert set(layer.scores) == set(HEAD_METRICS)
        assert layer.centroids is not None
        assert layer.centroids.shape == (2, 16, 64)
        assert {name: tuple(x.shape) for name, x in layer.classifier.items()} == {
            "weight_1": (2, 64, 32),
            "bias_1": (2, 32),
            "weight_2": (2, 32, 16),
            "bias_2": (2, 16),
        }
        assert set(layer.quality["recall"]) == set(WAYS)
    assert same(indexed, lab(settings=SMALL))
    assert not same(indexed, lab(settings=replace(SMALL, seed=1)))


def test_an_offloaded_model_gives_the_same(indexed: Calibration) -> None:
    model, tokenizer = lab_model()
    model = copy.deepcopy(model)
    cpu_offload(model, "cpu")
    assert same(calibrate(model, tokenizer, TEXTS, settings=SMALL), indexed)


def test_a_classifier_that_float16_cannot_hold_leaves_its_layer_without_an_index(
    monkeypatch: pytest.MonkeyPatch, indexed: Calibration
) -> None:
    def wide(*args: Any) -> Any:
        classifier, loss = train(*args)
        bias = classifier["bias_1"].clone()
        bias[:2] = 1e6
        return classifier | {"bias_1": bias}, loss

    monkeypatch.setattr(run, "train", wide)
    first, *others = lab(settings=SMALL).layers
    assert first.note == run.HARDLY_VARY
    assert first.centroids is None
    assert first.scores
    assert others[0].centroids is not None


def test_sliding_layers_get_priorities_alone() -> None:
    _, tokenizer = lab_model()
    model = tiny_mistral(64)
    model.resize_token_embeddings(len(tokenizer))
    found = calibrate(model, tokenizer, TEXTS, settings=SMALL)
    assert [(bool(at.scores), at.centroids, at.note) for at in found.layers] == [
        (True, None, "no index: it has a sliding window")
    ] * 2


@pytest.mark.parametrize("stop", [0.1, 0.9])
def test_an_interrupted_run_goes_on(stop: float, tmp_path: Path, indexed: Calibration) -> None:
    done = 0.0
    captured: list[float] = []

    def interrupt(word: str, share: float) -> None:
        nonlocal done
        done += share
        if done > stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab(settings=SMALL, out=tmp_path, progress=interrupt)
    assert not (tmp_path / FACTS).exists()
    kept = len(list((tmp_path / PART).glob("group-*"))) if stop > 0.5 else 0
    assert kept == (1 if stop > 0.5 else 0)
    found = lab(settings=SMALL, out=tmp_path, resume=True, progress=lambda word, share: captured.append(share))
    assert sum(captured) == pytest.approx(1.0)
    assert same(found, indexed)
    assert same(Calibration.from_pretrained(tmp_path), indexed)
    assert not (tmp_path / PART).exists()


def test_resume_refuses_another_run(tmp_path: Path, indexed: Calibration) -> None:
    indexed.save_pretrained(tmp_path / PART / "group-0")
    others: list[dict[str, Any]] = [{"seed": 3}, {"architecture": "residual"}, {"long_range": True}]
    for other in others:
        with pytest.raises(ValueError, match="had other settings, texts or another model"):
            lab(settings=replace(SMALL, **other), out=tmp_path, resume=True)
    with pytest.raises(ValueError, match="resume needs out"):
        lab(resume=True)


def test_a_calibration_is_replaced_only_where_told(tmp_path: Path) -> None:
    first = lab(out=tmp_path)
    for resume in (False, True):
        with pytest.raises(ValueError, match="holds a calibration already"):
            lab(settings=replace(HEADS, seed=1), out=tmp_path, resume=resume)
    assert same(Calibration.from_pretrained(tmp_path), first)
    found = lab(settings=replace(HEADS, seed=1), out=tmp_path, overwrite=True)
    assert Calibration.from_pretrained(tmp_path).settings == found.settings != first.settings


def index_bytes(found: Calibration) -> int:
    return sum(x.nbytes for at in found.layers for n, x in at.tensors().items() if "scores" not in n)


def test_another_classifier_of_another_run(indexed: Calibration) -> None:
    model, _ = lab_model()
    settings = replace(SMALL, architecture="residual", long_range=True)
    found = lab(settings=settings)
    assert estimate(model, make_plan(model, settings))["file_bytes"] == index_bytes(found)
    for own, other in zip(found.layers, indexed.layers, strict=True):
        assert own.centroids is not None
        assert other.centroids is not None
        assert torch.equal(own.centroids, other.centroids)
        assert own.classifier["bias_1"].shape[1] == stored_units(settings, 64, 16) != SMALL.hidden
        assert own.quality["recall"]["k-means"] == other.quality["recall"]["k-means"]
        assert own.quality["recall"]["classifier"] != other.quality["recall"]["classifier"]
    sparse = TurboConfig(sparse=turbo_hf.SparseConfig(probes=4, window_tokens=31), block_size=32)
    with turbo_hf.patch(model, sparse, calibration=found) as handle:
        model.generate(prompts(1, 200), max_new_tokens=3, do_sample=False)
        assert handle.report().selectivity[0].share_beyond > 0


def test_estimate_counts_what_is_stored(indexed: Calibration) -> None:
    model, _ = lab_model()
    needs = estimate(model, make_plan(model, SMALL))
    assert all(x > 0 for x in needs.values())
    assert needs["file_bytes"] == index_bytes(indexed)
    samples = 2 * (SMALL.window + 2 * SMALL.queries) * 64 * model.dtype.itemsize * 4 * 2 * SMALL.windows
    assert needs["host_bytes"] == samples


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 100, "local": 90}, "too short for the long-range filter: with local=90 and far=16 they need 184"),
        ({"window": 63}, "Settings.window must be a whole number of at least 64; got 63"),
        ({"windows": 1}, "Settings.windows must be a whole number of at least 2; got 1"),
        ({"clusters": 32769}, "Settings.clusters must be at most 32768; got 32769"),
        ({"seed": 1 << 32}, "Settings.seed must be at most 4294967295; got 4294967296"),
        ({"clusters": 1}, "Settings.clusters must be a whole number of at least 2; got 1"),
        ({"seed": -1}, "Settings.seed must be a whole number of at least 0; got -1"),
        ({"learning_rate": 2.0}, "Settings.learning_rate must be a number between 0 and 1; got 2.0"),
        ({"index": 1}, "Settings.index must be True or False; got 1"),
        ({"long_range": 1}, "Settings.long_range must be True or False; got 1"),
        ({"architecture": "deep"}, "Settings.architecture must be 'mlp' or 'residual'; got 'deep'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **settings)


def test_bad_input() -> None:
    model, tokenizer = lab_model()
    with pytest.raises(ValueError, match="one of the presets fast, full; got 'slow'"):
        resolve_settings("slow")
    assert resolve_settings("fast", 6000).window == 6000
    with pytest.raises(ValueError, match="longer than the 100 positions"):
        resolve_settings(SMALL, 100)
    with pytest.raises(TypeError, match=r"must be a transformers.PreTrainedModel; got str"):
        calibrate("model", tokenizer, TEXTS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="too few for two windows of 256"):
        calibrate(model, tokenizer, ["A short text."], settings=HEADS)
    with pytest.raises(ValueError, match="no file or folder 'nowhere'"):
        calibrate(model, tokenizer, "nowhere", settings=HEADS)
    begun: list[float] = []
    for own, told in (({"clusters": 4000}, "too few for 4000 clusters"), (NARROW, "hidden must be at least 15 for")):
        with pytest.raises(ValueError, match=told):
            lab(settings=replace(SMALL, **own), progress=lambda _, share: begun.append(share))
    assert not begun, "told before the first pass"
    with pytest.raises(ValueError, match="it belongs to another model"):
        calibrate(tiny_llama(), tokenizer, TEXTS, settings=HEADS)
    with pytest.raises(ValueError, match=r"no layer of LlamaForCausalLM can be calibrated: .*24"):
        make_plan(build("llama", head_dim=24), SMALL)
    with pytest.raises(
        ValueError, match=r"in training mode, in which dropout changes what it sees. Call model.eval\(\)"
    ):
        make_plan(tiny_llama().train(), SMALL)
    small: dict[str, Any] = {"vocab_size": 100, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ValueError, match="T5Model is an encoder-decoder; only decoder-only models can be calibrated"):
        make_plan(T5Model(T5Config(**small)).eval(), SMALL)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=100, hidden_size=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(ValueError, match="no layer of BloomForCausalLM can be calibrated: its attention class"):
        make_plan(bloom, SMALL)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (None, "texts must be a .txt or .jsonl file, a folder .* strings; got NoneType"),
        (3, "texts must be .*; got int"),
        ([1], "texts must hold strings; number 0 is int"),
        ([PROSE[:200], Path("book.txt")], "texts must hold strings; number 1 is Posix"),
        (PROSE, r"a string names a .txt or .jsonl file.*characters. Pass a text as \[text\]"),
        ("two\nlines", r"this one has 9 characters. Pass a text as \[text\]"),
        (
            [str(LAB_MODEL.parents[1] / "eval" / "haystack.txt")],
            "number 0, .*haystack.txt', names a file. Strings are te",
        ),
        ({"a": PROSE}, "texts must be .*; got dict"),
        (b"text", "texts must be .*; got bytes"),
        ("", r"this one has 0 characters. Pass a text as \[text\]"),
        ("x" * 300, "there is no file or folder 'xxx"),
        (__file__, "test_calibration.py' is no .txt or .jsonl file. Rename it if it is plain text"),
    ],
    ids=range(12),
)
def test_texts_that_are_none(texts: Any, message: str) -> None:
    model, tokenizer = lab_model()
    with pytest.raises(ValueError, match=message):
        calibrate(model, tokenizer, texts, settings=HEADS)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    model, tokenizer = lab_model()
    tokenizer.save_pretrained(tmp_path)
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = made["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    other = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the tokenizer is not the model's own: it has token .* as"):
        calibrate(model, other, TEXTS, settings=HEADS)
    with pytest.raises(ValueError, match="tokenizer must be the model's own, as of AutoTokenizer; got NoneType"):
        calibrate(model, None, TEXTS, settings=HEADS)
    more = copy.deepcopy(tokenizer)
    more.add_special_tokens({"pad_token": "<mine>"})
    found = calibrate(model, more, TEXTS, settings=HEADS)
    assert found.fingerprint == lab().fingerprint
    elsewhere = replace(found, fingerprint={**found.fingerprint, "tokenizer": tokenizer_hash(other)})
    with pytest.raises(ValueError, match="it was made for a model with tokenizer"):
        turbo_hf.patch(model, "turbo-mixed", calibration=elsewhere)
    with turbo_hf.patch(model, "turbo-mixed", calibration=found):
        pass


def test_a_tokenizer_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = lab_model()
    found = lab()
    monkeypatch.setattr(model.config, "_name_or_path", str(tmp_path))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text("{")
    with pytest.warns(UserWarning, match="cannot be read, so that none is compared with it"):
        turbo_hf.patch(model, "turbo-mixed", calibration=found).remove()


def test_out_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    begun: list[float] = []
    with pytest.raises(ValueError, match=r"out must be a folder, or the name of a new one; .* is a file"):
        lab(out=tmp_path / "file", progress=lambda _, share: begun.append(share))
    assert not begun


def test_no_more_of_a_file_is_read_than_is_wanted(tmp_path: Path) -> None:
    _, tokenizer = lab_model()
    lines = [json.dumps({"text": PROSE})] * 20
    (tmp_path / "long.jsonl").write_text("\n".join([*lines, "no JSON"]))
    assert token_windows(tmp_path, tokenizer, 128, 4).shape == (4, 128)


def test_short_texts_of_any_length_are_texts() -> None:
    _, tokenizer = lab_model()
    rows = [".", "tests", PROSE[:300].replace("\n", " "), PROSE[300:4000].replace("\n", " ")]
    assert token_windows(rows * 3, tokenizer, 128, 6).shape == (6, 128)


def test_windows_of_texts(tmp_path: Path) -> None:
    _, tokenizer = lab_model()
    (tmp_path / "a.txt").write_text(PROSE)
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": PROSE[k::1]}) for k in (100, 200)))
    windows = token_windows(tmp_path, tokenizer, 128, 6)
    assert windows.shape == (6, 128)
    start = tokenizer(PROSE[:2000])["input_ids"][:128]
    assert windows[0].tolist() == start
    (tmp_path / "b.jsonl").write_text('{"words": 1}')
    with pytest.raises(ValueError, match='no JSON object with a "text"'):
        token_windows(tmp_path, tokenizer, 128, 6)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no .txt or .jsonl file"):
        token_windows(tmp_path / "empty", tokenizer, 128, 6)
