"""Rules of sparse prompts and of steps by means that a calibration chooses, and what a patch takes of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from calibration_support import HEADS, lab
from models import lab_model

import turbo_hf
from turbo_hf import Calibration, PromptSparsity, SparseConfig, TurboConfig
from turbo_hf.calibration import sparsity
from turbo_hf.calibration.sparsity import LEFTS, RULES, HeadRules
from turbo_hf.layout import AlwaysRead


@pytest.fixture(scope="module")
def found() -> Calibration:
    # all windows of a test are shorter than what steps usually read
    with mock.patch.object(sparsity, "_always", return_value=AlwaysRead(1, 128)):
        return lab(settings=replace(HEADS, window=1024, windows=2, sparsity=True))


def test_each_head_gets_the_rule_that_reads_least_within_the_bound() -> None:
    rules = HeadRules()
    count = len(RULES)
    read = torch.linspace(0.1, 0.9, count)[:, None].repeat(1, 3)
    dropped = torch.full((count, 3, 40), 0.04)
    # the second head drops too much by the first four rules, the third by all
    dropped[:4, 1, :4] = 0.5
    dropped[:, 2, :4] = 0.5
    # one query in forty may
    dropped[:, 0, 0] = 0.9
    rules.densities.append(read)
    rules.dropped.append(dropped)
    prompt = rules.found(1)["prompt"]
    assert prompt.shape == (1, 3, 2)
    assert torch.equal(prompt[0], torch.tensor([RULES[0], RULES[4], (1.0, 1.0)]))
    assert "left_by_head" not in rules.found(1)


def test_a_calibration_keeps_rules_and_a_patch_takes_them(found: Calibration, tmp_path: Path) -> None:
    model, _ = lab_model()
    found.save_pretrained(tmp_path)
    read = Calibration.from_pretrained(tmp_path)
    for layer, again in zip(found.layers, read.layers, strict=True):
        assert layer.prompt is not None
        assert layer.left_by_head is not None
        assert again.prompt is not None
        assert again.left_by_head is not None
        assert torch.equal(layer.prompt, again.prompt)
        assert torch.equal(layer.left_by_head, again.left_by_head)
        assert {tuple(x) for x in layer.prompt.flatten(0, 1).tolist()} <= {
            tuple(x) for x in torch.tensor([*RULES, (1.0, 1.0)]).tolist()
        }
        assert set(layer.left_by_head.tolist()) <= set(torch.tensor([*LEFTS, 0.0]).tolist())
        half = layer.of_heads(range(1)).prompt
        assert half is not None
        assert half.shape[0] == 1
    # all heads of layer 1 are to read everything
    prompt, left_by_head = read.layers[1].prompt, read.layers[1].left_by_head
    assert prompt is not None
    assert left_by_head is not None
    dense = replace(read.layers[1], prompt=torch.ones_like(prompt), left_by_head=torch.zeros_like(left_by_head))
    read = replace(read, layers=(read.layers[0], dense, *read.layers[2:]))
    config = TurboConfig(
        sparse_prompt=PromptSparsity(from_tokens=1024), sparse=SparseConfig(selector="means", window_tokens=128)
    )
    # shares of one's own are kept
    bare = PromptSparsity(mass=0.3, peak=1.0, from_tokens=512, sink_tokens=1, window_tokens=1, tail_tokens=100)
    ids = torch.randint(200, (1, 1100), generator=torch.Generator().manual_seed(0))
    for given, taken in (
        (config, True),
        (replace(config, sparse_prompt=bare), False),
    ):
        with turbo_hf.patch(model, given, calibration=read) as handle:
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
            report = handle.report()
            assert (report.sparse_prompts[1].density == 1) == taken
            assert ("; of 6 layers by calibration" in report.prompts) == taken
            share = {each.layer: each.share for each in report.selectivity}
            assert share[1] == 1
            assert "blocks of all but a calibrated share of the mass" in str(report)


@pytest.mark.parametrize(("name", "value"), [("prompt", 1.5), ("left_by_head", -0.1)])
def test_a_calibration_without_shares_is_refused(name: str, value: float, found: Calibration, tmp_path: Path) -> None:
    changed: dict[str, Any] = {name: torch.full_like(getattr(found.layers[0], name), value)}
    wrong = replace(found.layers[0], **changed)
    replace(found, layers=(wrong, *found.layers[1:])).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=rf"layers\.0\.{name} is float32 .* from {value} to {value}, and should be .* from"
    ):
        Calibration.from_pretrained(tmp_path)


def test_rules_of_other_query_heads_are_refused(found: Calibration, tmp_path: Path) -> None:
    prompt = found.layers[0].prompt
    assert prompt is not None
    wrong = replace(found.layers[0], prompt=prompt.repeat(1, 2, 1))
    replace(found, layers=(wrong, *found.layers[1:])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"layers\.0\.prompt is .*, and should be .* Calibrate again"):
        Calibration.from_pretrained(tmp_path)
