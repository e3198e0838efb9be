"""The page of families: a sample of its rows is made anew, and it has every family."""

import json
from pathlib import Path
from typing import Any

import families_table as table
import pytest
import transformers
from tiny_families import VARIANTS, families
from tiny_multimodal import MODELS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
SEEN = json.loads((ROOT / "eval" / "results" / "families.json").read_text())
SAMPLE = [
    ("llama", "dynamic rope"), ("gemma2", ""), ("gemma3n_text", "shared keys"), ("gpt_oss", ""), ("gpt_neox", ""),
    ("gpt_bigcode", "many KV heads"), ("bamba", ""), ("minimax_m3_vl_text", "sparse layers"),
    ("phimoe", "longrope in mid-answer"), ("qwen3_next", ""), ("bloom", ""), ("deepseek_v3", ""), ("mllama", ""),
    ("recurrent_gemma", ""),
]  # fmt: skip


def name_of(row: dict[str, Any]) -> str:
    """Family and variant, or the class of a multimodal row."""
    return ", ".join(filter(None, (row.get("family", row.get("model")), row.get("variant"))))


FAMILIES = {name_of(row): row for row in SEEN["families"]}
MULTIMODAL = {name_of(row): row for row in SEEN["multimodal"]}


def newest() -> bool:
    """Whether this is the version of Transformers that the page was made with."""
    return bool(transformers.__version__ == SEEN["transformers"])


@pytest.mark.parametrize(("family", "variant"), SAMPLE)
def test_rows_are_those_of_the_page(family: str, variant: str) -> None:
    if family not in families()[0]:
        pytest.skip(f"Transformers {transformers.__version__} has no {family}")
    row = table.examine(family, variant)
    assert row.outcome != table.WRONG, row.sentence
    if newest():
        assert table.record([row], {}, [])["families"] == [FAMILIES[row.name]]


@pytest.mark.parametrize(
    "family", ["gemma3", "gemma4", "instructblip", "qwen2_vl", "qwen3_omni_moe_thinker", "voxtral"]
)
def test_multimodal_rows_are_those_of_the_page(family: str) -> None:
    if family not in MODELS:
        pytest.skip(f"Transformers {transformers.__version__} has no {family}")
    row = table.examine_multimodal(family)
    assert row.outcome in (table.WORKS, table.REFUSED), row.sentence
    assert row.medium == ("audio" if family == "voxtral" else "image")
    assert ('With `strict="warn"` it works' in row.sentence) == (family in ("gemma3", "gemma4"))
    if newest():
        assert table.record([], {}, [row])["multimodal"] == [MULTIMODAL[row.model]]


def test_the_page_has_every_family_and_multimodal_class() -> None:
    if not newest():
        pytest.skip("the page was made with another version of Transformers")
    assert set(MODELS.values()) <= set(MULTIMODAL)
    names = set(families()[0])
    names |= {f"{family}, {variant}" for family in names_of(VARIANTS) for variant in VARIANTS[family]}
    assert set(FAMILIES) == names
    assert SEEN["left_out"] == families()[1]


def test_the_page_is_made_of_the_record() -> None:
    text = PAGE.read_text()
    assert text == table.page(SEEN)
    assert "## Wrong" not in text
    for row in (*SEEN["families"], *SEEN["multimodal"]):
        assert row["outcome"] == table.NOT_TRIED or f"`{row.get('family', row.get('model'))}`" in text


def names_of(found: dict[str, Any]) -> list[str]:
    """Those that this version of Transformers has."""
    return [family for family in found if family in families()[0]]
