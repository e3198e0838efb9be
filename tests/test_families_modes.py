"""Families of models: what INT8 and bfloat16 cost, which is what they cost the model itself."""

import torch
from all_pairs import in_turn
from budgets import SLACK
from families_support import CASES, LENGTHS, NEW, Case, alone, build, exact, families, logits, padded, renamed
from models import prompts
from torch import Tensor

import turbo_hf
from turbo_hf import TurboConfig


def relative(x: Tensor, y: Tensor) -> float:
    """|x - y| / |y|."""
    return float((x - y).norm() / y.norm())


# prompts of latent attention are not rounded
@in_turn(case=[case for case in CASES if case.id != "deepseek_v3"], bits=[8, 4, 2])
def test_turbo_mode_adds_no_more_than_int8_does(case: Case, bits: int) -> None:
    """Q and P in INT8 cost what K and V in INT8 cost, which attention mode "fp16" at 8 bit measures."""
    model, batch = build(case.model_type, **case.options), padded()
    mask, tail = batch["attention_mask"], prompts(len(LENGTHS), NEW, 1)
    longer = torch.nn.functional.pad(mask, (0, NEW), value=1)
    whole = logits(model, torch.cat((batch["input_ids"], tail), 1), longer)

    def errors(config: TurboConfig) -> tuple[float, float]:
        with turbo_hf.patch(model, config) as handle:
            cache = handle.new_cache()
            prompt = logits(model, **renamed(batch), cache=cache)[mask.bool()]
            decoded = logits(model, tail, longer, cache)
        return relative(prompt, whole[:, :-NEW][mask.bool()]), relative(decoded, whole[:, -NEW:])

    (_, int8), (_, stored) = errors(exact(8)), errors(exact(bits))
    prompt, decoded = errors(TurboConfig(bits=bits, attention="turbo", block_size=32))
    # and it is not the exact mode under another name
    assert int8 / SLACK < prompt < SLACK * int8
    assert decoded < SLACK * (int8**2 + stored**2) ** 0.5


@families
def test_bfloat16_costs_what_it_costs_the_model(case: Case) -> None:
    model, batch = build(case.model_type, **case.options), padded()
    real = batch["attention_mask"].bool()
    want = alone(model, batch)
    model.bfloat16()
    eager = logits(model, **renamed(batch))[real]
    with turbo_hf.patch(model, exact(8)) as handle:
        ours = logits(model, **renamed(batch), cache=handle.new_cache())[real]
    assert ours.dtype == torch.bfloat16
    assert relative(ours.double(), want) < SLACK * relative(eager.double(), want)
