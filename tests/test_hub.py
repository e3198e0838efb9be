"""`hub/`, the folder that is pushed to the Hub as a `custom_generate` repository, from a local path."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import lab_model
from transformers import dynamic_module_utils

import turbo_hf
from turbo_hf.models.versions import CACHE

HUB = Path(__file__).resolve().parents[1] / "hub"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`generate` of the lab model by that folder, and by itself without it."""
    # where Transformers copies it to
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    model, tokenizer = lab_model()
    inputs = tokenizer("The special magic number is 4281. The number is", return_tensors="pt")

    def generate(folder: Path | None = HUB, **options: Any) -> Any:
        by = {} if folder is None else {"custom_generate": str(folder), "trust_remote_code": True}
        options = {"max_new_tokens": 8, "return_dict_in_generate": True, "do_sample": False, **options}
        return model.generate(**inputs, **options, **by)

    return model, generate


def test_it_patches_generates_and_unpatches(call: Any) -> None:
    model, generate = call
    before, plain = dict(model.__dict__), generate(None)
    for preset in (None, "int8", {"bits": 8}):
        made = generate(preset=preset)
        assert isinstance(made[CACHE], turbo_hf.TurboCache)
        assert torch.equal(made.sequences, plain.sequences)
        assert dict(model.__dict__) == before
    with turbo_hf.patch(model, "int8"):
        assert torch.equal(generate(None).sequences, made.sequences)


def test_a_mistake_is_told_and_leaves_the_model_as_it_was(call: Any) -> None:
    model, generate = call
    before = dict(model.__dict__)
    with pytest.raises(ValueError, match="turbo5"):
        generate(preset="turbo5")
    with pytest.raises(ValueError, match="no_such_option"):
        generate(no_such_option=1)
    assert dict(model.__dict__) == before
    with turbo_hf.patch(model), pytest.raises(ValueError, match="patched"):
        generate()


def test_its_requirement_is_this_package() -> None:
    (needed,) = (HUB / "custom_generate" / "requirements.txt").read_text().split()
    assert needed == f"turbo_hf>={turbo_hf.__version__}"
