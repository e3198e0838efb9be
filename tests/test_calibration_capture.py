"""Calibration: what is captured of a model's attention, the probe before it, and the priorities of heads made of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from calibration_support import HEADS, SMALL, TEXTS
from families_support import Case, build, families
from models import lab_model, prompts, tiny_llama
from torch import Tensor

import turbo_hf
from turbo_hf.calibration import run
from turbo_hf.calibration.capture import Seen, capturing, probe, run_window
from turbo_hf.calibration.heads import HeadPriorities, head_order
from turbo_hf.calibration.run import calibrate, make_plan
from turbo_hf.calibration.texts import token_windows
from turbo_hf.config.turbo_config import HEAD_METRICS
from turbo_hf.models.model_layers import LATENT_TYPES
from turbo_hf.ops.store.quantize import head_scores
from turbo_hf.sparse.undo_rotary import undo_rotary


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
        got = undo_rotary(call.source.module, call.key, call.rotary)
        torch.testing.assert_close(got, true[index].view(1, 63, 2, 16).transpose(1, 2))


@families
def test_every_family_passes_the_probe(case: Case) -> None:
    if case.model_type in LATENT_TYPES:
        pytest.skip("latent attention has nothing to calibrate, and is refused")
    found = probe(build(case.model_type, **case.options))
    assert sorted(found) == [i for i in range(len(found) + len(case.dense)) if i not in case.dense]
    learned = case.model_type == "gpt_bigcode"
    assert {at.why_no_keys for at in found.values()} == {"it has no rotary embedding" if learned else None}


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
    monkeypatch.setattr("turbo_hf.sparse.undo_rotary.rotate", lambda module, x, cos, sin: x)
    for at in probe(tiny_llama()).values():
        assert "the inverse of its rotary embedding fails the probe (relative error" in str(at.why_no_keys)


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


def test_priorities_are_the_mean_over_blocks() -> None:
    k, v = torch.randn(1, 3, 214, 16), torch.randn(1, 3, 214, 16)
    got = HeadPriorities()
    # the second window has one block more
    for at in (slice(64), slice(64, 214)):
        got.add(k[:, :, at], v[:, :, at])
    for metric in HEAD_METRICS:
        blocks = [head_scores(k[:, :, i : i + 64], v[:, :, i : i + 64], metric)[0] for i in (0, 64, 128)]
        torch.testing.assert_close(got.scores()[metric], torch.stack(blocks).mean(0))
    assert head_order(torch.tensor([1.0, 3.0, 1.0, 2.0])) == (1, 3, 0, 2)


@pytest.mark.parametrize(
    ("layer", "projection", "name", "bad"),
    [
        (0, "q_proj", "queries", torch.nan),
        (1, "q_proj", "queries", torch.inf),
        (1, "k_proj", "keys", torch.nan),
        (0, "k_proj", "keys", torch.inf),
        (1, "v_proj", "values", torch.nan),
        (0, "v_proj", "values", torch.inf),
    ],
)
def test_nan_activations_are_refused(layer: int, projection: str, name: str, bad: float) -> None:
    model = tiny_llama()
    getattr(model.model.layers[layer].self_attn, projection).weight.data[0, 0] = bad
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
