"""Tensor parallel over two ranks: their tokens are those of one process, and whatever one decides, both do."""

import copy
import json
from typing import Any

import pytest
import torch
from calibration_support import PROSE_FILE, SMALL
from models import lab_model, tiny_llama
from patching_support import tiny
from ranks_support import COUNT, both, seen_by_ranks
from two_ranks import CONFIGS, HEADS, answer

from turbo_hf import Calibration
from turbo_hf.calibration.run import calibrate


def models() -> dict[str, Any]:
    """Tiny models by name. Qwen2: of the second rank's heads alone, a key bias makes channels uneven."""
    made: dict[str, Any] = {"llama": tiny_llama(**HEADS)}
    made["three"] = tiny_llama(hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    made |= {name: tiny(name, **HEADS) for name in ("olmo2", "phi3", "qwen2", "gpt_neox")}
    bias = made["qwen2"].model.layers[0].self_attn.k_proj.bias
    with torch.no_grad():
        bias.zero_()
        bias[-3] = 1000.0
    return made


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu2)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What both ranks have seen, and what one process sees of the same models."""
    folder = tmp_path_factory.mktemp("ranks")
    whole = models()
    for name, model in whole.items():
        model.save_pretrained(folder / name)
    found = seen_by_ranks("two_ranks.py", folder, request.param)
    for model in whole.values():
        model.to(request.param, torch.float64 if request.param == "cpu" else torch.float32)
    return found, whole, folder


def alike(ranks: Any, seen: Any, expected: Any) -> bool:
    """Whether the ranks' tokens are those of one process. float32 sums of ranks round differently, and where a value
    lies between two codes, the cache then holds the other: on GPUs each row begins with the same tokens."""
    exact = next(iter(ranks[1].values())).dtype == torch.float64
    return bool(seen == expected if exact else [row[:4] for row in seen] == [row[:4] for row in expected])


def test_tokens_and_bytes_of_each_preset(ranks: Any) -> None:
    seen = both(ranks, "presets")
    for name, config in CONFIGS.items():
        tokens, _, memory = answer(ranks[1]["llama"], config)
        assert alike(ranks, seen[name]["tokens"], tokens), name
        # what is stored for each head is shared out evenly, with some bytes for each row
        assert seen[name]["bytes"]["codes"] * COUNT == memory.by_kind["codes"], name
        assert seen[name]["bytes"]["open"] * COUNT == memory.by_kind["open"], name
    assert "1 x 4 bit + 1 x 2 bit" in seen["turbo-mixed"]["report"]
    assert "tensor parallel over 2 ranks" in seen["turbo4"]["report"]


def test_the_check_of_a_patch(ranks: Any) -> None:
    tokens, refusal = both(ranks, "checked")
    assert tokens == both(ranks, "presets")["turbo4"]["tokens"]
    assert refusal.startswith("Unsupported: cuda_graphs=True: ")


@pytest.mark.parametrize("name", ["gpt_neox", "olmo2", "phi3", "qwen2"])
def test_families_and_their_plans(name: str, ranks: Any) -> None:
    first, second = (found["families"][name] for found in ranks[0])
    tokens, report, memory = answer(ranks[1][name], CONFIGS["turbo4"])
    assert first["tokens"] == second["tokens"]
    assert alike(ranks, first["tokens"], tokens)
    assert first["layers"] == second["layers"]
    assert first["notes"] == second["notes"]
    # the first rank speaks for all
    assert first["warned"] == [f"{note}" for note in first["notes"]]
    assert not second["warned"]
    gathered = name in ("olmo2", "phi3")
    assert first["bytes"]["codes"] * (1 if gathered else COUNT) == memory.by_kind["codes"]
    assert any("all KV heads of layers 0, 1" in note for note in first["notes"]) == gathered
    if name == "qwen2":
        assert first["layers"] == ["2 x 4 bit balanced", "2 x 4 bit"]
        assert [at.balanced for at in report.layers] == [True, False]


def test_ranks_that_differ_are_refused_in_the_same_words(ranks: Any) -> None:
    said = both(ranks, "refused")
    alike = "ValueError: the ranks of this tensor parallel model must all be patched alike; "
    assert said["configs"].startswith(f"{alike}config of rank 0: TurboConfig(bits=4")
    assert "of rank 1: TurboConfig(bits=8" in said["configs"]
    assert said["file"].startswith("FileNotFoundError: there is no config file ")
    assert said["strict"].startswith(f"{alike}strict of rank 0: warn; of rank 1: raise.")
    assert said["calibrations"].startswith(f"{alike}calibration of rank 0: ")
    assert said["missing"].startswith('ValueError: selector "saap" needs a calibration')
    assert said["heads"].startswith("Unsupported: layer 0 has 3 KV heads, which do not divide among 2 ranks")
    assert said["twice"].startswith("ValueError: This model is patched already")
    assert said["otherwise"].startswith("Unsupported: model.layers.0.self_attn.k_proj.weight is split among processes")


def test_no_rank_waits_for_ever(ranks: Any) -> None:
    first, second = (found["absent"] for found in ranks[0])
    expected = "ValueError: a rank of this tensor parallel model has not made this call in time, "
    assert first.startswith(expected if next(iter(ranks[1].values())).device.type == "cpu" else "")
    assert not second


def test_nan_on_one_rank_is_raised_by_both(ranks: Any) -> None:
    error, tokens = both(ranks, "nan")
    assert error.startswith("ValueError: layer 1: keys or values hold NaN or Inf")
    assert tokens == both(ranks, "presets")["turbo4"]["tokens"]


def test_copied_caches_and_own_ones(ranks: Any) -> None:
    one, own, copied = both(ranks, "copies")
    assert one == own == copied


def test_both_capture_their_steps_or_neither(ranks: Any) -> None:
    seen = both(ranks, "graphs")
    for case in ("captured", "auto", "compiled"):
        assert seen[case]["tokens"] == seen["eager"]
        assert sum(seen[case]["captures"])
    assert "whose sums are not compiled" in seen["compiled"]["steps"]
    # whoever was not at fault, too
    assert seen["failed"].startswith("Unsupported: cuda_graphs=True: this model's decode step cannot be captured")
    assert "out of something" in seen["failed"]
    assert seen["failed auto"] == seen["eager"]
    assert seen["hooked"] == [seen["eager"], 0]
    assert "lm_head has hooks, which a replay would not call" in seen["hooked and demanded"]
    assert seen["nan"].startswith("ValueError: layer 1: ")


def test_the_command_line_speaks_once(ranks: Any) -> None:
    (generated, bench, planned, learnt, doctor, *refused), silent = (found["commands"] for found in ranks[0])
    assert [code for code, *_ in silent] == [0] * 5 + [1] * 4, silent
    assert json.loads(generated[1].splitlines()[-1])["reply"]["new_tokens"] == 8
    rows = {row["method"]: row for row in json.loads(bench[1].splitlines()[-1])["rows"]}
    assert rows["SDPA"]["tokens_s"], rows["SDPA"]["note"]
    assert rows["turbo4"]["tokens_s"], rows["turbo4"]["note"]
    assert rows["static"]["note"].endswith("tensor parallel")
    assert planned[0] == 0
    assert "Written to" in learnt[1]
    assert json.loads(doctor[1].splitlines()[-1])["model"]["refusal"] is None
    for (_, _, said, _), words in zip(
        refused,
        (
            "error: demo runs in one process",
            "share no standard input",
            "error: bench decode runs in one process",
            "holds a calibration already",
        ),
        strict=True,
    ):
        assert words in said
    assert not any(said for _, said, *_ in silent)
    assert not any("error" in told for _, _, told, _ in silent)


def test_a_calibration_by_ranks_is_that_of_one_process(ranks: Any) -> None:
    assert both(ranks, "calibrated")[0].startswith("ValueError: out: ")
    found = Calibration.from_pretrained(ranks[2] / "learnt")
    # other tests share the model
    model, tokenizer = copy.deepcopy(lab_model()[0]), lab_model()[1]
    device = next(iter(ranks[1].values())).device
    exact = device.type == "cpu"
    whole = calibrate(model.to(device, torch.float64 if exact else None), tokenizer, PROSE_FILE, settings=SMALL)
    assert found.fingerprint == whole.fingerprint
    assert found.head_orders("priority") == whole.head_orders("priority")
    for ours, theirs in zip(found.layers, whole.layers, strict=True):
        # sums of ranks round differently, and a key between two centroids may then move
        assert ours.centroids is not None
        assert theirs.centroids is not None
        learnt = theirs.centroids.cpu().float()
        apart = (ours.centroids.float() - learnt).norm() / learnt.norm()
        assert apart < (1e-3 if exact else 0.1)
