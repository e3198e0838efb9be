"""Next-token distributions against 16 bit: the figures, the verdicts, what reads a text through a cache; and what
`turbo-hf fidelity` prints and writes."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from choices import flat_config
from cli_support import check_refused, last_json, run
from models import LAB_MODEL, lab_model, tiny_llama
from tiny_families import build
from transformers import AutoTokenizer, DynamicCache, ProcessorMixin

import turbo_hf
from turbo_hf.attention.turbo_attention import NAME
from turbo_hf.config.turbo_config import SparseConfig, TurboConfig
from turbo_hf.eval import fidelity as fidelity_rows
from turbo_hf.eval import fidelity_command
from turbo_hf.eval.fidelity import (
    AGAIN,
    EAGER,
    PAGES,
    Case,
    Fidelity,
    grid,
    layer_map,
    measure,
    named,
    suggestion,
    unsteady,
)
from turbo_hf.eval.methods import Method
from turbo_hf.eval.plots import _kl as shown
from turbo_hf.eval.plots import draw
from turbo_hf.models.versions import CACHE
from turbo_hf.patching.divergence import (
    BOUNDS,
    EVALUATE,
    LIKE,
    NEVER,
    SMALL,
    Divergence,
    Positions,
    Reading,
    compare_positions,
    log_probabilities,
    log_probabilities_after,
    summarize,
    verdict,
)
from turbo_hf.patching.doctor import diagnose


def numbers(texts: int = 3, tokens: int = 40, vocabulary: int = 17) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of a reference and of a method near it [texts, tokens, vocabulary], and the right tokens."""
    seeded = torch.Generator().manual_seed(0)
    base = torch.randn(texts, tokens, vocabulary, generator=seeded)
    own = base + 0.3 * torch.randn(base.shape, generator=seeded)
    right = torch.randint(vocabulary, (texts, tokens), generator=seeded)
    return base.log_softmax(-1), own.log_softmax(-1), right


def test_figures_are_those_of_an_independent_computation() -> None:
    base, own, right = numbers()
    texts = [
        compare_positions(got, reference, Reading(torch.cat((torch.zeros(6), ids))[None].long(), (5, len(ids))))
        for got, reference, ids in zip(own, base, right, strict=True)
    ]
    found = summarize(texts)
    p, q, at = base.double().exp().numpy(), own.double().exp().numpy(), right.numpy()[..., None]
    kl = (p * np.log(p / q)).sum(-1)
    moved = (np.take_along_axis(q, at, -1) - np.take_along_axis(p, at, -1))[..., 0]
    own_nll, base_nll = (-np.log(np.take_along_axis(x, at, -1))[..., 0] for x in (q, p))
    ratio = math.exp(own_nll.mean() - base_nll.mean())

    def error(x: np.ndarray) -> float:
        return float(x.mean(1).std(ddof=1) / math.sqrt(len(x)))

    want = {
        "kl": kl.mean(), "kl_error": error(kl),
        **dict(zip(("kl_median", "kl_99", "kl_999"), np.quantile(kl, [0.5, 0.99, 0.999]), strict=True)),
        "kl_max": kl.max(), "moved_rms": math.sqrt((moved**2).mean()), "moved_99": np.quantile(abs(moved), 0.99),
        "same_top": (p.argmax(-1) == q.argmax(-1)).mean(), "perplexity": math.exp(own_nll.mean()), "ratio": ratio,
        "ratio_error": ratio * error(own_nll - base_nll), "positions": kl.size, "texts": len(kl),
    }  # fmt: skip
    assert set(want) == set(Divergence.__slots__)
    for name, figure in want.items():
        # float32 log-probabilities of about 3
        assert getattr(found, name) == pytest.approx(figure, rel=1e-3, abs=1e-6), name


def test_one_text_has_no_error_and_equal_ones_no_distance() -> None:
    base, _, right = numbers(texts=1)
    reading = Reading(torch.cat((torch.zeros(3), right[0]))[None].long(), (2, right.shape[1]))
    found = summarize([compare_positions(base[0], base[0], reading)])
    assert (found.kl, found.moved_rms, found.same_top, found.ratio) == (0, 0, 1, 1)
    assert math.isnan(found.kl_error)


def test_impossible_tokens_add_nothing() -> None:
    base = torch.tensor([[0.0, -math.inf], [math.log(0.5), math.log(0.5)]])
    got = torch.tensor([[math.log(0.9), math.log(0.1)], [0.0, -math.inf]])
    found = compare_positions(got, base, Reading(torch.tensor([[0, 0, 0, 0]]), (1, 2)))
    assert found.kl[0] == pytest.approx(-math.log(0.9))
    assert found.kl[1] == math.inf


@pytest.mark.parametrize(
    ("kl", "noise", "words"),
    [
        (0.003, 0.0, LIKE), (0.0031, 0.0, SMALL), (0.0031, 0.002, LIKE), (0.011, 0.0, EVALUATE),
        (0.009, 0.0051, SMALL), (0.11, 0.0, NEVER), (math.nan, 0.0, NEVER), (math.nan, math.nan, NEVER),
        (math.inf, 0.0, NEVER),
    ],
)  # fmt: skip
def test_verdicts(kl: float, noise: float, words: str) -> None:
    assert verdict(kl, noise) == words


def test_a_text_is_read_by_passes() -> None:
    model, ids = tiny_llama(), torch.randint(90, (1, 40))
    with torch.no_grad():
        want = model(ids[:, :-1]).logits[0, 20:].float().log_softmax(-1)
    for passes in ((20, 19), (20, *[1] * 19), (20, 16, 3)):
        got = log_probabilities(model, Reading(ids, passes), DynamicCache(config=model.config))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_methods_are_read_through_their_caches() -> None:
    model, _ = lab_model()
    windows = torch.randint(400, (2, 200 + 32 + 1), generator=torch.Generator().manual_seed(0))
    cases = [Case(200, "steps"), Case(200, "chunk"), Case(64, "answer")]
    rows = measure(model, windows, cases, named(["int8", "turbo2", "kivi4"]), tail=32)
    by: dict[Any, Any] = {(row.method, row.case.path): row for row in rows}
    assert len(by) == len(rows) == 18
    for path in ("steps", "chunk"):
        again, pages, int8, turbo2 = (by[name, path].figures for name in (AGAIN, PAGES, "int8", "turbo2"))
        assert again.kl < 1e-6
        eager = by[EAGER, path]
        assert (eager.figures.kl < 1e-6, eager.verdict) == (True, "noise")
        assert pages.kl < int8.kl < turbo2.kl
        assert (int8.positions, int8.texts) == (64, 2)
        assert by[AGAIN, path].verdict == "noise"
        sizes = [by[name, path].bytes_per_token or 0 for name in (AGAIN, "int8", "turbo2")]
        assert sizes == sorted(sizes, reverse=True)


def test_the_eager_row_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, windows, seen = tiny_llama(), torch.randint(90, (1, 60)), []
    model.set_attn_implementation("sdpa")

    def noted(model: Any, *rest: Any) -> torch.Tensor:
        seen.append(model.config._attn_implementation)
        return log_probabilities_after(model, *rest)

    monkeypatch.setattr(fidelity_rows, "log_probabilities_after", noted)
    measure(model, windows, [Case(40, "steps")], named(["int8"]), tail=16)
    assert seen == ["sdpa", "sdpa", "eager", NAME, NAME]
    assert model.config._attn_implementation == "sdpa"
    monkeypatch.setattr(fidelity_rows, "EAGER_TOKENS", 30)
    by = {row.method: row for row in measure(model, windows, [Case(40, "steps")], [], tail=16)}
    assert by[EAGER].verdict == "eager attention keeps all scores: not read above 30 tokens"


def test_what_a_method_cannot_read_takes_nothing_from_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def short_passes(model: Any, reading: Reading, cache: Any) -> torch.Tensor:
        if isinstance(cache, turbo_hf.TurboCache) and reading.passes[1] > 16:
            raise ValueError("too many tokens")
        return log_probabilities_after(model, reading, cache)

    monkeypatch.setattr(fidelity_rows, "log_probabilities_after", short_passes)
    advanced: list[str] = []
    cases = [Case(40, "steps"), Case(40, "chunk")]
    windows = torch.randint(90, (2, 80))
    rows = measure(tiny_llama(), windows, cases, named(["int8"]), tail=32, noise=False, advance=advanced.append)
    assert [(row.case.path, row.figures is None) for row in rows] == [("steps", False), ("chunk", True)]
    assert (rows[0].figures and rows[0].figures.texts, rows[1].verdict) == (2, "ValueError: too many tokens")
    assert advanced == ["int8", "int8"]


def test_a_method_that_is_refused_is_a_row_with_the_reason() -> None:
    model = tiny_llama()
    refused = Method("refused", TurboConfig(bits=8, dense_layers=(99,)))
    rows = measure(model, torch.randint(90, (2, 60)), [Case(40, "steps")], [refused, *named(["int8"])], tail=16)
    by = {row.method: row for row in rows}
    assert by["refused"].figures is None
    assert "names layer 99" in by["refused"].verdict
    assert by["int8"].figures is not None
    assert set(by["refused"].to_dict()) == {"method", "tokens", "path", "verdict", "bytes_per_token"}


def test_a_prompt_that_a_method_does_not_round_is_no_verdict() -> None:
    names = ["int8", "turbo4", "turbo4@window:window_tokens=127"]
    rows = measure(tiny_llama(), torch.randint(90, (2, 65)), [Case(48, "steps")], named(names), tail=16, noise=False)
    assert [row.figures is None for row in rows] == [False, True, True]
    assert [row.verdict for row in rows[1:]] == [
        f"a prompt of 48 tokens shows nothing of it; from {begins} on it does" for begins in (144, 129)
    ]


def test_a_model_that_loses_its_state_excuses_no_cache() -> None:
    model = build("bamba")
    rows = measure(model, torch.randint(90, (2, 177)), [Case(144, "steps")], named(["turbo4"]), tail=32)
    by: dict[str, Any] = {row.method: row for row in rows}
    noise, turbo4 = by[AGAIN], by["turbo4"]
    assert 0.003 < turbo4.figures.kl < 2 * noise.figures.kl
    assert turbo4.verdict in (SMALL, EVALUATE, NEVER)
    assert "differs from itself" in str(unsteady(rows))
    assert unsteady([row for row in rows if row.method != AGAIN]) is None


def test_the_grid_and_the_map_are_what_they_say() -> None:
    assert [method.name for method in grid([8, 4])] == ["K8 V8", "K8 V4", "K4 V8", "K4 V4"]
    made = {method.name: method.config for method in layer_map([0, 1, 2], 4)}
    assert list(made) == [f"layer {n} {side}" for n in range(3) for side in ("keys", "values")]
    one: Any = made["layer 1 values"]
    assert (one.bits, one.value_bits, set(one.dense_layers)) == (8, 4, {0, 2})


def row(method: str, kl: float, size: float, path: str = "steps") -> Fidelity:
    """One with that KL."""
    figures = Divergence(kl, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 1, 1)
    return Fidelity(method, Case(1, path), figures, size, verdict(kl))


def test_the_suggestion_is_the_smallest_like_16_bit() -> None:
    rows = [row("int8", 0.001, 266), row("turbo4", 0.002, 140), row("turbo4", 0.02, 140, "chunk"), row("int8", 0, 266)]
    assert "here: int8, 266 bytes" in suggestion(rows)
    assert "No method is like 16 bit" in suggestion([row("turbo4", 0.02, 140)])
    assert suggestion([]) == "None of these methods is of a patched model."


def test_pictures_show_no_figure_that_is_not_finite(tmp_path: Path) -> None:
    rows = [row("K8 V8", math.nan, 1), row("K8 V4", math.inf, 1), row("K4 V8", 0.1, 1), row("K4 V4", 0.0, 1)]
    assert [str(shown(at)) for at in rows] == ["nan", "nan", "0.1", "1e-05"]
    assert [path.name for path in draw({"table": rows, "grid": rows}, "", tmp_path)] == [
        "fidelity-table.png",
        "fidelity-grid.png",
    ]


# --- in patch() and doctor -----------------------------------------------------------------------------------------


def test_positions_are_joined_over_texts() -> None:
    texts = [Positions(*(torch.full((n,), float(n)) for _ in range(5))) for n in (1, 3)]
    found = summarize(texts)
    assert (found.positions, found.texts, found.kl) == (4, 2, 2.5)


class Words:
    """A tokenizer of bytes, for models without one."""

    def __call__(self, text: str, **_: Any) -> Any:
        return type("Ids", (), {"input_ids": torch.tensor([[ord(c) % 90 for c in text]])})


def test_the_check_reads_sealed_blocks_beside_recent_tokens() -> None:
    model, _ = lab_model()
    with pytest.warns(UserWarning, match="2 bit is not like 16 bit on real checkpoints"):
        handle = turbo_hf.patch(
            model, flat_config(bits=2, block_size=128, recent_tokens=128), check=True, strict="warn"
        )
    with handle:
        found = str(handle.report())
    assert "self-check: KL " in found
    assert "of moby_dick.txt" in found
    kl = float(found.split("self-check: KL ")[1].split(maxsplit=1)[0])
    # all in 8 bit: 0.0001
    assert kl > 0.005


class Both(ProcessorMixin):  # type: ignore[misc, unused-ignore]
    """A processor."""

    def __init__(self) -> None:
        self.tokenizer = Words()


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [(None, "its own sampled text"), (Words(), "tokens of moby_dick.txt"), (Both(), "tokens of moby_dick.txt")],
)
def test_the_check_reads_a_text_with_the_tokenizer(tokenizer: Any, text: str) -> None:
    with turbo_hf.patch(tiny_llama(), "int8", check=True, tokenizer=tokenizer) as handle:
        assert text in handle.report().check


@pytest.mark.parametrize("options", [{"tokenizer": Words()}, {"tokenizer": "gpt2", "check": True}])
def test_a_tokenizer_that_is_not_used_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tokenizer is a tokenizer that check=True reads a text with; got a"):
        turbo_hf.patch(tiny_llama(), "int8", **options)


def test_the_check_says_what_it_did_not_read() -> None:
    sparse = TurboConfig(bits=8, sparse=SparseConfig(selector="window"))
    with turbo_hf.patch(tiny_llama(), sparse, check=True, strict="warn") as handle:
        assert "(what is sparse from 2049 tokens on was not read)" in handle.report().check


def test_the_check_refuses_the_tokenizer_of_another_model() -> None:
    class Wrong(Words):
        def __call__(self, text: str, **more: Any) -> Any:
            found = super().__call__(text, **more)
            found.input_ids[0, 0] = 10**6
            return found

    model = tiny_llama()
    with pytest.raises(turbo_hf.Unsupported, match="Pass the model's own tokenizer"):
        turbo_hf.patch(model, "int8", check=True, tokenizer=Wrong())
    turbo_hf.patch(model, "int8").remove()


@pytest.mark.parametrize(("bound", "strict"), [(0.0, "raise"), (0.0, "warn"), (1.0, "raise")])
def test_the_verdict_decides(monkeypatch: pytest.MonkeyPatch, bound: float, strict: Any) -> None:
    bounds = ((-1.0, LIKE), (-1.0, SMALL), (bound, EVALUATE))
    monkeypatch.setattr("turbo_hf.patching.divergence.BOUNDS", bounds)
    model = tiny_llama()
    if bound == 0 and strict == "raise":
        with pytest.raises(turbo_hf.Unsupported, match=r"self-check: KL .*: do not use\. The patch is off again"):
            turbo_hf.patch(model, "turbo4", check=True)
        turbo_hf.patch(model).remove()
        return
    words = NEVER if bound == 0 else EVALUATE
    with pytest.warns(UserWarning, match=rf"self-check: KL .*: {words}"):
        handle = turbo_hf.patch(model, "turbo4", check=True, strict=strict)
    with handle:
        assert words in handle.report().check
        assert any(words in text for text in handle.report().warnings)
        ids = torch.randint(90, (1, 8))
        assert torch.isfinite(model(ids, **{CACHE: handle.new_cache()}).logits).all()


def test_doctor_shows_its_table_where_the_default_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turbo_hf.patching.divergence.BOUNDS", ((-1.0, LIKE), (0.0, EVALUATE)))
    found = diagnose(tiny_llama())
    assert "do not use" in str(found.refusal)
    assert found.report is not None
    assert verdict(found.checks["int8"].kl) == NEVER


def test_doctor_patches_a_model_that_is_too_short_for_its_check() -> None:
    found = diagnose(tiny_llama(max_position_embeddings=70))
    assert found.refusal is None
    assert found.report is not None
    assert not found.checks
    assert any(text.startswith("self-check: this model has 70 positions") for text in found.unknown)


# --- `turbo-hf fidelity` ---------------------------------------------------------------------------------------------


LAB = str(LAB_MODEL)


def fidelity(*words: str) -> Any:
    """What it prints last, its JSON."""
    return last_json(run("fidelity", *words, "--device", "cpu", "--json"))


def test_the_table_of_the_carried_model(tmp_path: Path) -> None:
    few = ("--lengths", "160", "--count", "2", "--tail", "17", "--generate", "16", "--grid", "--map")
    result = run("fidelity", LAB, *few, "--methods", "int8,turbo4,fp16", "--out", str(tmp_path), "--json")
    said, found = " ".join(result.output.split()), last_json(result)
    assert "lab-llama-4m, 2 texts, 160 tokens, chunk" in said
    assert found["suggestion"] in said
    cases = {(row["tokens"], row["path"]) for row in found["table"]}
    assert cases == {(160, "steps"), (160, "chunk")}
    assert [row["method"] for row in found["table"]][:4] == ["16 bit again", "16 bit, eager", "16-bit pages", "int8"]
    assert {row["path"] for row in found["answers"]} == {"answer"}
    assert len(found["grid"]) == 16
    assert len(found["map"]) == 2 * found["layers"] == 12
    assert all(row["verdict"] in {*(words for _, words in BOUNDS), NEVER, "noise"} for row in found["table"])
    written = {path.name for path in tmp_path.iterdir()}
    pictures = {f"fidelity-{part}.png" for part in ("table", "answers", "grid", "map")}
    assert written == {"fidelity.json", "report.md", "report.html", *pictures}
    assert json.loads((tmp_path / "fidelity.json").read_text()) == found
    assert "| 99.9 % |" in (tmp_path / "report.md").read_text()
    # a run of less leaves no picture of this one
    again = draw({"table": []}, "", tmp_path)
    assert not again
    assert not list(tmp_path.glob("*.png"))


def test_a_folder_that_cannot_be_written_is_told_first(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("turbo_hf.eval.fidelity_command.load", None)
        check_refused(
            f"cannot be made, or not be written: File exists: '{taken}'", "fidelity", LAB, "--out", str(taken)
        )


def test_texts_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    found = fidelity(LAB, "--texts", str(tmp_path), "--lengths", "64", "--tail", "17", "--methods", "int8")
    assert found["source"] == str(tmp_path)


def test_a_model_without_keys_and_values_is_refused_by_what_was_asked_for(tmp_path: Path) -> None:
    model = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=3072, hidden_size=16, num_hidden_layers=1)
    )
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(LAB_MODEL).save_pretrained(tmp_path)
    words = ("fidelity", str(tmp_path), "--lengths", "144", "--tail", "17", "--methods", "turbo4")
    check_refused("error: turbo4: Unsupported: no layer of MambaForCausalLM (mamba) can be compressed", *words)


def test_a_short_run_takes_what_is_given() -> None:
    found = fidelity(LAB, "--quick", "--lengths", "64", "--methods", "int8")
    assert {row["tokens"] for row in found["table"]} == {64}
    assert (found["texts"], found["tail"]) == (2, 64)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--methods", "fp16"), "error: --methods names none"),
        (("--lengths", "much"), "error: expected a number of tokens like 4096 or 4k; got 'much'"),
        (("--lengths", "1M"), "this model has positions for 32768. Pass shorter --lengths."),
        (("--texts", "nowhere"), "error: texts: there is no file or folder 'nowhere'"),
        (("--methods", "turbo4", "--lengths", "32"), "error: turbo4: a prompt of 32 tokens shows nothing of it"),
        (("--methods", "saap"), "error: saap: "),
    ],
)
def test_wrong_input_is_one_sentence(words: tuple[str, ...], message: str) -> None:
    check_refused(message, "fidelity", LAB, *words, "--device", "cpu")


def test_short_texts_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Too short.")
    message = "the texts are too short for two windows of 1153 tokens. Pass --texts with longer ones"
    check_refused(message, "fidelity", LAB, "--texts", str(tmp_path), "--device", "cpu")


def test_a_checkpoint_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    for file in LAB_MODEL.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).symlink_to(file)
    check_refused("its tokenizer", "fidelity", str(tmp_path), "--device", "cpu")


@pytest.mark.parametrize(("capability", "dtype"), [("AVX2", torch.float32), ("AVX512", torch.bfloat16)])
def test_a_cpu_without_16_bit_products_reads_in_float32(
    capability: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    model = tiny_llama().to(torch.bfloat16)
    model.is_quantized = True
    assert fidelity_command._widened(model).dtype == torch.bfloat16
    model.is_quantized = False
    assert fidelity_command._widened(model).dtype == dtype
    assert ("multiplies bfloat16 slowly" in capsys.readouterr().err) == (dtype == torch.float32)
