"""A real checkpoint, SmolLM2-135M-Instruct, in float32: run by hand, `-m real [--real=FOLDER]`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sinks_support import moved_by
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import turbo_hf
from turbo_hf.eval.needle import prose

pytestmark = pytest.mark.real

TOKENS = 544


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> tuple[Any, list[Tensor]]:
    """The model, and four texts of [1, TOKENS]."""
    folder = Path(request.config.getoption("--real")).expanduser()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [prose(start, 60) for start in (0, 100, 200, 300)]
    return model.eval(), [tokenizer(text, return_tensors="pt").input_ids[:, :TOKENS] for text in texts]


def test_removed_it_has_the_bits_of_before(real: tuple[Any, list[Tensor]]) -> None:
    model, texts = real
    with torch.inference_mode():
        before = model(texts[0]).logits
        with turbo_hf.patch(model, "turbo4"):
            model.generate(texts[0], max_new_tokens=4, do_sample=False)
        assert torch.equal(model(texts[0]).logits, before)


def test_4_bit_loses_no_more_than_was_measured(real: tuple[Any, list[Tensor]]) -> None:
    """0.021 nats on 12 texts of 2k tokens; here on fewer, up to three standard errors."""
    model, texts = real
    lost = torch.cat([moved_by(model, ids, "turbo4") for ids in texts])
    assert lost.mean() < 0.021 + 3 * lost.std() / len(lost) ** 0.5


def test_pages_of_16_bit_give_the_unpatched_tokens(real: tuple[Any, list[Tensor]]) -> None:
    model, texts = real
    options: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False}
    expected = model.generate(texts[0], **options)
    with turbo_hf.patch(model, {"bits": 16}):
        assert torch.equal(model.generate(texts[0], **options), expected)
