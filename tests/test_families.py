"""Families of models: compressed attention against Hugging Face's own eager attention over the same dequantised cache.

In attention mode "fp16" the patched model must choose the same tokens, and miss the logits by rounding only.
"""

import copy
from typing import Any

import pytest
import torch
from all_pairs import in_turn
from budgets import check, float_budget, largest
from families_support import (
    CASES,
    EVERYTHING,
    FAMILY_CASES,
    FULL,
    GENERIC_CASES,
    LENGTHS,
    NEW,
    Case,
    alone,
    build,
    exact,
    generate,
    logits,
    padded,
    renamed,
    settle,
)
from models import prompts
from patching_support import changes, snapshot
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import turbo_hf
from turbo_hf import TurboCache
from turbo_hf.models.versions import CACHE
from turbo_hf.patches.families import FAMILIES, family_of

GENERIC = EVERYTHING[len(CASES) :]
"""Families without a row of their own in our table; `check_step` has the prompts of the others."""


@in_turn(case=EVERYTHING, bits=[8, 4])
def test_tokens_are_those_of_eager_attention_on_the_same_cache(case: Case, bits: int) -> None:
    model, config = build(case.model_type, **case.options), exact(bits)
    with turbo_hf.patch(model, config) as handle:
        stored = [layer.storage for layer in handle.report().layers]
    # up to Transformers 5.17 a cache has no place for the last layers of models that share keys
    dense = [i for i in case.dense if i < len(stored)]
    assert [i for i in range(len(stored)) if stored[i] == "dense"] == dense
    assert len(dense) < len(stored)
    batch, oracle = settle(model, config, dense)
    with turbo_hf.patch(model, config):
        assert torch.equal(generate(model, batch).sequences, oracle)


@pytest.mark.parametrize("case", GENERIC)
def test_prompt_logits_are_those_of_the_model(case: Case) -> None:
    model, batch = build(case.model_type, **case.options), padded()
    real = batch["attention_mask"].bool()
    want, eager = alone(model, batch), logits(model, **renamed(batch))[real]
    with turbo_hf.patch(model, exact(4)) as handle:
        ours = logits(model, **renamed(batch), cache=handle.new_cache())[real]
        without = logits(model, **renamed(batch))[real]
    budget = float_budget(want, eager, largest(want), torch.float32)
    check("with a cache", ours, want, budget)
    check("without a cache", without, want, budget)


@in_turn(case=CASES, bits=[4, 8])
def test_prompt_and_step_logits_are_those_of_eager_attention_on_the_same_cache(case: Case, bits: int) -> None:
    check_step(build(case.model_type, **case.options), padded(), bits)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@pytest.mark.parametrize(("first", "last"), [(60, 80), (40, 60)], ids=["right", "middle"])
def test_padding_in_other_places(name: str, first: int, last: int) -> None:
    """In full attention. A window counts tokens here, and columns in Transformers, where padding lies between them."""
    case = next(case for case in FAMILY_CASES if case.model_type == name)
    options = {**case.options, "layer_types": [FULL] * 3} if "layer_types" in case.options else case.options
    ids = prompts(3, 80)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][1, first:last] = 0
    check_step(build(name, **options), batch, 4)


def check_step(model: PreTrainedModel, batch: dict[str, Tensor], bits: int) -> None:
    """The prompt's logits are the model's own, and a step's are those of eager attention on a copy of the cache."""
    mask, token = batch["attention_mask"], prompts(len(LENGTHS), 1, 1)
    want, eager = alone(model, batch), logits(model, **renamed(batch))[mask.bool()]
    budget = float_budget(want, eager, largest(want), torch.float32)
    longer = torch.nn.functional.pad(mask, (0, 1), value=1)
    with turbo_hf.patch(model, exact(bits)) as handle:
        check("without a cache", logits(model, **renamed(batch))[mask.bool()], want, budget)
        cache = handle.new_cache()
        check("prompt", logits(model, **renamed(batch), cache=cache)[mask.bool()], want, budget)
        same = copy.deepcopy(cache)
        ours = logits(model, token, longer, cache)
    step = logits(model, token, longer, same)
    # a new key on the edge between two codes may fall on either side: such a row compares two different caches
    rows = [row for row in range(len(LENGTHS)) if same_codes(cache, same, row)]
    assert len(rows) >= 2
    check("step", ours[rows], step[rows].double(), budget)


def same_codes(cache: TurboCache, other: TurboCache, row: int) -> bool:
    """Whether two caches hold the same newest token in a row."""
    for a, b in zip(cache.turbo_layers(), other.turbo_layers(), strict=True):
        at = a.state.open[row] - 1
        if not torch.equal(a.buffer.k[row, :, at], b.buffer.k[row, :, at]):
            return False
        if not torch.equal(a.buffer.v[row, :, :, at], b.buffer.v[row, :, :, at]):
            return False
    return True


@pytest.mark.parametrize("dropped", ["padding", "window"])
def test_oracle_notices_what_is_dropped(dropped: str) -> None:
    case = FAMILY_CASES[1]
    model, batch = build(case.model_type, **case.options), padded()
    real = batch["attention_mask"].bool()
    eager = logits(model, **renamed(batch))[real]
    want = alone(model, batch)
    budget = float_budget(want, eager, largest(want), torch.float32)
    if dropped == "window":
        model = build(case.model_type, **{**case.options, "sliding_window": None})
    else:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    with turbo_hf.patch(model, exact(8)) as handle:
        ours = logits(model, **renamed(batch), cache=handle.new_cache())[real]
    with pytest.raises(AssertionError, match="exceeds its budget"):
        check(dropped, ours, want, budget)
    assert largest(ours - want) > 1000 * budget


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt_oss", "gpt_neox", "gpt_bigcode"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_beams": 3}, id="beams"),
        pytest.param({"do_sample": True, "num_return_sequences": 2}, id="samples"),
        pytest.param({"prefill_chunk_size": 24}, id="chunks"),
    ],
)
def test_other_ways_to_generate(name: str, options: dict[str, Any]) -> None:
    case = next(case for case in FAMILY_CASES if case.model_type == name)
    model, batch, config = build(name, **case.options), padded(), exact(4)
    rows = options.get("num_beams", options.get("num_return_sequences", 1))
    mask = batch["attention_mask"].repeat_interleave(rows, 0)

    def run(**more: Any) -> Tensor:
        torch.manual_seed(0)
        given = {"max_new_tokens": NEW, "do_sample": False, **options, **more}
        return torch.as_tensor(model.generate(**batch, **given))  # type: ignore[operator]

    oracle = run(**{CACHE: TurboCache(model.config, config, attention_mask=mask)})
    with turbo_hf.patch(model, config):
        assert torch.equal(run(), oracle)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt_bigcode"])
def test_a_second_turn_and_the_way_back(name: str) -> None:
    """Unquantized, the second turn's tokens are the model's own; without the patch everything is as it was."""
    case = next(case for case in FAMILY_CASES if case.model_type == name)
    model, batch = build(name, **case.options), padded()
    before, plain = snapshot(model), logits(model, **renamed(batch))

    def turns(cache: Any) -> Tensor:
        first = generate(model, batch, **{CACHE: cache}).sequences
        ids = torch.cat((first, prompts(len(LENGTHS), 20, 7)), 1)
        mask = torch.nn.functional.pad(batch["attention_mask"], (0, ids.shape[1] - first.shape[1] + NEW), value=1)
        again = generate(model, {"input_ids": ids, "attention_mask": mask}, **{CACHE: cache}).sequences
        return torch.as_tensor(again)

    want = turns(DynamicCache(config=model.config))
    with turbo_hf.patch(model, exact(16)) as handle:
        assert torch.equal(turns(handle.new_cache()), want)
    assert not changes(before, snapshot(model))
    assert torch.equal(logits(model, **renamed(batch)), plain)


def test_every_family_of_the_table_is_tested_here() -> None:
    known = [kind for family in FAMILIES for kind in family.model_types]
    assert len(set(known)) == len(known)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    # Bailing's hybrid came after the oldest version
    assert set(known) - set(CONFIG_MAPPING.keys()) <= {"bailing_hybrid"}
    assert all(family.notes for family in FAMILIES)
    tested = {case.model_type for case in FAMILY_CASES}
    assert all(tested & set(family.model_types) for family in FAMILIES)
    assert all(family_of(kind) is not None for kind in tested)
    assert all(family_of(case.model_type) is None for case in GENERIC_CASES)
