"""Widths by a model's own measure: the choice, the file, the patch that takes it, and the command."""

import copy
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calibration_support import HEADS, MIXED, TEXTS, lab
from cli_support import check_refused, last_json, run
from models import LAB_MODEL, lab_model, prompts, tiny_llama, tiny_mistral
from saved_support import written
from tiny_families import build

import turbo_hf
from turbo_hf import Calibration, TurboCache, TurboConfig
from turbo_hf.cache.saved_files import read
from turbo_hf.calibration.artifacts import KIND, LayerCalibration
from turbo_hf.calibration.run import calibrate
from turbo_hf.calibration.widths import Widths, choices
from turbo_hf.eval.widths import Measured, Part, calibrate_widths, choose, measure_widths
from turbo_hf.layout import BITS, page_bytes
from turbo_hf.models.versions import CACHE
from turbo_hf.patching.divergence import divergences

PAIRS = ((8, 2), (4, 4), (3, 3), (2, 4), (4, 3), (8, 8))
"""Of the lab model's six layers."""
WIDTHS = Widths(PAIRS, 4.5, 0.002, 640, 0.003)


def with_widths(widths: Widths | None = WIDTHS) -> Calibration:
    return replace(lab(), widths=widths)


# --- the choice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_no_other_choice_costs_less(seed: int) -> None:
    drawn = random.Random(seed)
    costs = [{bits: drawn.random() * 4.0**-bits for bits in BITS} for _ in range(4)]
    sizes = [{bits: drawn.choice((1, 2)) * bits * 8 for bits in BITS} for _ in range(4)]
    every = [
        (sum(size[b] for size, b in zip(sizes, bits, strict=True)), sum(c[b] for c, b in zip(costs, bits, strict=True)))
        for bits in itertools.product(BITS, repeat=4)
    ]
    found = choices(costs, sizes)
    for size, cost, bits in found:
        assert size == sum(own[b] for own, b in zip(sizes, bits, strict=True))
        assert cost == pytest.approx(sum(own[b] for own, b in zip(costs, bits, strict=True)))
    for room in {size for size, _ in every}:
        best = min(cost for size, cost in every if size <= room)
        assert max((each for each in found if each.size <= room), key=lambda each: each.size).cost == pytest.approx(
            best
        )
    assert [each.size for each in found] == sorted({each.size for each in found})


def measured(base: float = 0.001) -> Measured:
    """Two layers of two heads of 128 channels: keys of the second are worth bits, and nothing else is."""
    sizes = {bits: page_bytes(128, bits) for bits in BITS}
    costs = [{8: 0.0, 4: w / 50, 3: w / 10, 2: w} for w in (0.001, 0.0001, 0.1, 0.0001)]
    parts = [Part(n // 2, n % 2, own, sizes, 2 * 128 * 64, 2) for n, own in enumerate(costs)]
    return Measured(parts, base, 3, 100, 64)


@pytest.mark.parametrize(
    ("budget", "layers", "bits"),
    [
        ("76", ((2, 2), (2, 2), (8, 8)), 2.375),
        ("92", ((2, 2), (4, 2), (8, 8)), 2.875),
        ("2.9bits", ((2, 2), (4, 2), (8, 8)), 2.875),
        ("100", ((3, 2), (4, 2), (8, 8)), 3.125),
        ("3.65625 bit", ((3, 3), (4, 3), (8, 8)), 3.625),
        ("1000", ((8, 8), (8, 8), (8, 8)), 8.125),
    ],
)
def test_a_budget_is_spent_where_it_counts(budget: str, layers: Any, bits: float) -> None:
    found = choose(measured(), budget)
    assert (found.layers, found.bits_per_number) == (layers, bits)
    assert found.tokens == 100


def test_the_prediction_is_that_of_8_bit_and_all_that_is_lost() -> None:
    assert choose(measured(), "76").kl == pytest.approx(0.001 + 0.001 + 0.0001 + 0.1 + 0.0001)


def test_like_16_bit_takes_the_fewest_bytes() -> None:
    found = choose(measured(), "like 16 bit")
    assert found.kl <= 0.003 < choose(measured(), f"{found.bits_per_number - 0.01} bit").kl


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("75", "a budget of 75 is too small: 2 bit everywhere takes 76 bytes per token and KV head, 2.375 bits"),
        ("2 bit", "a budget of 2 bit is too small"),
        ("much", "a budget is bytes per token and KV head .* or \"like 16 bit\"; got 'much'"),
        ("-3", "a budget is bytes"),
        (104, "a budget is bytes per token .*; got 104"),
    ],
)
def test_a_budget_that_is_none_is_refused(budget: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(measured(), budget)


def test_what_no_widths_keep_is_told() -> None:
    with pytest.raises(ValueError, match=r'no widths below 8 bit .*"like 16 bit".*8 bit has 0\.0040'):
        choose(measured(base=0.004), "like 16 bit")


# --- what is measured -----------------------------------------------------------------------------------------------


TEXT, PROMPT = 288, 256


def text_of(rows: int) -> torch.Tensor:
    return torch.tensor(lab_model()[1](TEXTS[0])["input_ids"][: rows * TEXT]).view(rows, TEXT)


def test_each_part_costs_what_its_pages_lose() -> None:
    (model, _), ids = lab_model(), text_of(2)
    costs = measure_widths(model, ids, tail=TEXT - PROMPT, samples=128)
    assert [(part.layer, part.side) for part in costs.parts] == [(n, side) for n in range(6) for side in (0, 1)]
    assert {part.sizes[4] for part in costs.parts} == {2 * (64 * 32 + 2 * 64 + 2 * 64)}
    assert (costs.tokens, costs.layers) == (576, 6)

    def read(config: TurboConfig) -> torch.Tensor:
        cache = TurboCache(model.config, config)
        with torch.no_grad():
            model(ids[:, :PROMPT], **{CACHE: cache})
            found: torch.Tensor = model(ids[:, PROMPT:], **{CACHE: cache}).logits.log_softmax(-1)
            return found

    wanted = read(TurboConfig(bits=16))
    for side in (0, 1):
        own = costs.parts[side::2]
        # a range leaves out less at 3 bit than at 2: the part that costs least of all keys is better off at 2
        assert all(0 == part.costs[8] < part.costs[4] < min(part.costs[3], part.costs[2]) for part in own)
        assert all(part.costs[3] < part.costs[2] for part in own if part.costs[2] > 1e-6)
        # all keys, or all values: the sum is scaled to it. INT8 of the other side is left
        got = read(TurboConfig(bits=(2, 8)[side], value_bits=(8, 2)[side]))
        assert sum(part.costs[2] for part in own) == pytest.approx(divergences(got, wanted).mean().item(), rel=0.1)
        # one alone: 256 draws miss it by 9 % (a standard deviation), and the scale is that of all
        at = max(own, key=lambda part: part.costs[4])
        others = tuple(n for n in range(6) if n != at.layer)
        got = read(TurboConfig(bits=(4, 8)[side], value_bits=(8, 4)[side], dense_layers=others))
        assert at.costs[4] == pytest.approx(divergences(got, wanted).mean().item(), rel=0.5)


def test_the_model_stays_as_it_is_and_layers_at_8_bit_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = lab_model()
    monkeypatch.setattr(
        "turbo_hf.patching.refusals.disturbed_layers", lambda layers, config: {1} if config.bits < 8 else set()
    )
    found = measure_widths(model, text_of(1), tail=TEXT - PROMPT, samples=1)
    assert [part.layer for part in found.parts[::2]] == [0, 2, 3, 4, 5]
    assert choose(found, "40").layers[1] == (8, 8)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny_mistral(64), "layer 0: it has a sliding window, .* judge them with turbo-hf fidelity"),
        (lambda: build("qwen3_next"), "layer 0: it has a recurrent state"),
        (lambda: build("deepseek_v3"), "latent attention"),
    ],
)
def test_models_that_would_be_measured_wrongly_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_widths(make(), torch.ones(1, TEXT, dtype=torch.long), tail=TEXT - PROMPT, samples=1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")])
def test_the_callers_modes_change_nothing(mode: Callable[[], Any]) -> None:
    with mode():
        ids = torch.arange(TEXT, device="cpu")[None] * 7 % 1000
        found = measure_widths(lab_model()[0], ids, tail=TEXT - PROMPT, samples=1)
    assert any(part.costs[2] for part in found.parts)


def lab_parts() -> list[Part]:
    """As `measured`, of six layers."""
    return [part._replace(layer=2 * n + part.layer) for n in range(3) for part in measured().parts]


@pytest.mark.parametrize(("off", "rounds"), [(1, 1), (3, 2), (1e5, 0)])
def test_like_16_bit_holds_on_texts_held_out(off: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """off: how many times the prediction texts held out lose."""
    model, tokenizer = lab_model()
    monkeypatch.setattr("turbo_hf.eval.widths.measure_widths", lambda *_, **__: Measured(lab_parts(), 1e-4, 6, 100, 64))
    asked = []

    def read(*_: Any, calibration: Calibration, **__: Any) -> Any:
        assert calibration.widths is not None
        asked.append(calibration.widths.kl)
        return [SimpleNamespace(method="calibrated", figures=SimpleNamespace(kl=off * calibration.widths.kl))]

    monkeypatch.setattr("turbo_hf.eval.widths.measure", read)
    if not rounds:
        with pytest.raises(ValueError, match='no widths below 8 bit were found that are "like 16 bit"'):
            calibrate_widths(model, tokenizer, "like 16 bit", count=2, tokens=128)
        return
    found: Any = calibrate_widths(model, tokenizer, "like 16 bit", count=2, tokens=128)[0].widths
    assert found.held_out == pytest.approx(off * found.kl)
    assert found.held_out <= 0.003
    assert len(asked) == rounds


def test_texts_held_out_that_cannot_be_read_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = lab_model()
    monkeypatch.setattr("turbo_hf.eval.widths.measure_widths", lambda *_, **__: Measured(lab_parts(), 1e-4, 6, 100, 64))
    failed = SimpleNamespace(method="calibrated", figures=None, verdict="out of memory")
    monkeypatch.setattr("turbo_hf.eval.widths.measure", lambda *_, **__: [failed])
    with pytest.raises(ValueError, match="the texts held out could not be read: calibrated: out of memory"):
        calibrate_widths(model, tokenizer, "1000", count=2, tokens=128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": [[8, 5]] * 6}, r"widths\.layers\.0\.1 is 5, and should be"),
        ({"layers": [[8, 4]] * 5}, "it has widths of 5 layers, and 6 layers"),
        ({"kl": float("nan")}, "widths.kl is nan, and should be a number from 0 to 1e"),
        ({"held_out": float("inf")}, "widths.held_out is inf, and should be"),
        ({"bits_per_number": 17.0}, r"widths.bits_per_number is 17\.0"),
        ({"bits_per_number": -1.0}, r"widths.bits_per_number is -1\.0, and should be a number from 0 to 16"),
        ({"tokens": "many"}, r"widths\.tokens is 'many'"),
        ({"more": 1}, "widths has 'more'"),
    ],
)
def test_widths_that_are_none_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with_widths().save_pretrained(tmp_path)
    facts, tensors = read(tmp_path, KIND, "")
    facts["widths"] |= change
    written(tmp_path, KIND, facts, {name: x.clone() for name, x in tensors.items()})
    with pytest.raises(ValueError, match=f"is damaged: {message}"):
        Calibration.from_pretrained(tmp_path)


# --- the patch ------------------------------------------------------------------------------------------------------


def test_a_patch_takes_the_widths(tmp_path: Path) -> None:
    model = copy.deepcopy(lab_model()[0])
    with_widths().save_pretrained(tmp_path)
    ids = prompts(2, 200)
    with turbo_hf.patch(model, TurboConfig(layer_bits=PAIRS)) as handle:
        want = model.generate(ids, max_new_tokens=8, num_beams=2)
        same = handle.report().config
    for config in (None, "calibrated", TurboConfig(layer_bits="calibrated"), {"layer_bits": "calibrated"}):
        with turbo_hf.patch(model, config, calibration=tmp_path) as handle:
            assert handle.report().config == same
            assert [at.groups for at in handle.report().layers][:2] == [(((8, 2), 2),), ((4, 2),)]
            said = f"widths: by calibration over 640 tokens ({tmp_path}): 4.50 bits per number, predicted KL 0.0020"
            assert f"{said} nats to 16 bit, 0.0030 on texts held out" in str(handle.report())
            assert not handle.report().warnings
    with turbo_hf.patch(model, calibration=with_widths()) as handle:
        assert torch.equal(model.generate(ids, max_new_tokens=8, num_beams=2), want)
        cache = handle.new_cache()
        with torch.no_grad():
            model(ids, **{CACHE: cache})
        cache.save_pretrained(tmp_path / "cache")
        assert TurboCache.from_pretrained(tmp_path / "cache", model).get_seq_length() == cache.get_seq_length()


def test_widths_beside_the_checkpoint_are_taken_by_name(tmp_path: Path) -> None:
    model = copy.deepcopy(lab_model()[0])
    model.config._name_or_path = str(tmp_path)
    with pytest.raises(ValueError, match=r"needs a calibration of this model with widths, and there is none beside"):
        turbo_hf.patch(model, "calibrated")
    with_widths().save_pretrained(tmp_path)
    with turbo_hf.patch(model, "calibrated") as handle:
        assert handle.report().config.layer_bits == TurboConfig(layer_bits=PAIRS).layer_bits
    with turbo_hf.patch(model) as handle:
        assert handle.report().config == TurboConfig()
    with pytest.raises(ValueError, match=r"model with widths, and calibration=None was passed\. Make one"):
        turbo_hf.patch(model, "calibrated", calibration=None)


def test_widths_and_other_bits_exclude_each_other() -> None:
    model, _ = lab_model()
    for config in ("turbo4", TurboConfig(bits=8), TurboConfig(layer_bits=PAIRS)):
        with pytest.raises(ValueError, match=r"has widths of its own, and this config has others\. Leave out"):
            turbo_hf.patch(model, config, calibration=with_widths())
    with turbo_hf.patch(model, MIXED, calibration=with_widths()) as handle:
        assert handle.report().heads.endswith(
            "(this process); calibration: its widths are not used, for this config has others"
        )
    with pytest.raises(ValueError, match="layer_bits does not go with value_bits"):
        TurboConfig(layer_bits="calibrated", value_bits=3)
    with pytest.raises(ValueError, match="needs a calibration of this model with widths, and that of 'this process'"):
        turbo_hf.patch(model, "calibrated", calibration=lab())
    with turbo_hf.patch(model, calibration=lab()) as handle:
        assert handle.report().config == TurboConfig()
    with pytest.raises(ValueError, match="does not fit this model: it was made for a model with vocab_size 3072"):
        turbo_hf.patch(tiny_llama(), calibration=with_widths())


def test_widths_that_lose_much_are_told() -> None:
    for lossy in (replace(WIDTHS, kl=0.05), replace(WIDTHS, held_out=0.05)):
        with pytest.warns(UserWarning, match=r"not like 16 bit: 4\.50 bits per number, predicted .*0\.0500"):
            turbo_hf.patch(lab_model()[0], calibration=with_widths(lossy)).remove()


@pytest.mark.parametrize(
    ("others", "alike"),
    [
        ({"expert": {"block_size": 32}}, False),
        *(({name: x}, False) for name, x in (("dense_layers", [0]), ("int8_layers", [0]), ("recent_tokens", 64))),
        ({"sparse": {"selector": "window", "window_tokens": 100}}, False),
        ({"cuda_graphs": False, "expert": {"backend": "reference"}}, True),
    ],
)
def test_figures_are_those_of_the_options_that_were_measured(others: dict[str, Any], alike: bool) -> None:
    with turbo_hf.patch(lab_model()[0], {"preset": "calibrated", **others}, calibration=with_widths()) as handle:
        assert ("predicted KL" in handle.report().heads) is alike
        assert handle.report().heads.endswith("with other options than were measured") is not alike


def test_heads_are_not_said_to_be_ranked_by_a_calibration_that_ranks_none(tmp_path: Path) -> None:
    model = copy.deepcopy(lab_model()[0])
    bare = with_widths()
    bare = replace(bare, layers=tuple(LayerCalibration(n, {}) for n in range(len(bare.layers))))
    with pytest.raises(ValueError, match="low_heads needs a calibration that ranks heads; that of 'this process'"):
        turbo_hf.patch(model, MIXED, calibration=bare)
    bare.save_pretrained(tmp_path)
    model.config._name_or_path = str(tmp_path)
    with turbo_hf.patch(model, MIXED) as handle:
        assert handle.report().heads.endswith(f"(that of {str(tmp_path)!r} ranks no heads)")


def test_bits_of_another_number_of_layers_are_refused() -> None:
    for make in (turbo_hf.patch, lambda model, config: TurboCache(model.config, config)):
        with pytest.raises(ValueError, match="layer_bits has the bits of 2 layers, and the model has 6"):
            make(lab_model()[0], TurboConfig(layer_bits=(4, 2)))
    with pytest.raises(ValueError, match=r"needs a calibration\. Patch a model with it"):
        TurboCache(lab_model()[0].config, "calibrated")


# --- the command ----------------------------------------------------------------------------------------------------


CALIBRATE = ("calibrate", str(LAB_MODEL), "--device", "cpu")


def test_the_command_writes_widths(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    few = (*CALIBRATE, "--windows", "2", "--window", "256", "--out", out)
    facts = last_json(run(*few, "--budget", "50", "--json"))
    assert 3 < facts["bits_per_number"] <= 50 * 8 / 128
    assert set(facts["held_out"]) == {"int8", "calibrated"}
    found = Calibration.from_pretrained(out)
    assert found.widths is not None
    assert [list(pair) for pair in found.widths.layers] == facts["layers"]
    with turbo_hf.patch(lab_model()[0], calibration=out) as handle:
        assert "widths: by calibration" in handle.report().heads
    others = ("--lengths", "144", "--tail", "17", "--count", "2", "--methods", "turbo4,calibrated")
    rows = last_json(run("fidelity", *CALIBRATE[1:], "--json", "--calibration", out, *others))["table"]
    assert {row["method"] for row in rows if row["kl"] is not None} >= {"turbo4", "calibrated"}
    check_refused("Name another folder, or pass overwrite=True", *few, "--budget", "60")
    run(*few, "--budget", "60", "--overwrite")
    again: Any = Calibration.from_pretrained(out).widths
    assert again.bits_per_number > found.widths.bits_per_number


def test_widths_join_a_calibration_that_is_there(tmp_path: Path) -> None:
    model, tokenizer = lab_model()
    former = calibrate(model, tokenizer, TEXTS, settings=HEADS, out=tmp_path)
    found, _, rows = calibrate_widths(model, tokenizer, "50", count=2, tokens=256, out=tmp_path)
    assert [row.method for row in rows] == ["int8", "calibrated"]
    assert found.widths is not None
    kept = Calibration.from_pretrained(tmp_path)
    assert (kept.widths, kept.head_orders("priority")) == (found.widths, former.head_orders("priority"))
    again = calibrate(model, tokenizer, TEXTS, settings=HEADS, out=tmp_path, overwrite=True)
    assert again.widths == Calibration.from_pretrained(tmp_path).widths == found.widths
    replace(former, fingerprint={**former.fingerprint, "vocab_size": 5}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not fit this model: it was made for a model with vocab_size 5"):
        calibrate_widths(model, tokenizer, "50", count=2, tokens=256, out=tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "50", "--preset", "full", "--heads-only"], ": --preset, --heads-only"),
        (["--budget", "50", "--heads-only"], "--heads-only. Leave that out"),
        ([], "--texts names what to calibrate with"),
        (["--budget", "50", "--window", "100"], "tokens must be a multiple of 128, whole pages; got 100"),
        (["--budget", "50", "--windows", "0"], "windows must be a whole number of at least 2; got 0"),
        (["--budget", "30"], "a budget of 30 is too small: 2 bit everywhere takes"),
        (["--budget", "50", "--texts", "nowhere"], "no file or folder 'nowhere'"),
    ],
)
def test_mistakes_get_one_sentence(words: list[str], message: str, tmp_path: Path) -> None:
    check_refused(message, *CALIBRATE, "--out", str(tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()
