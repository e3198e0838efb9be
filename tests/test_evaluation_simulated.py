"""Simulated caches against the published methods written out step by step, one row, head and group at a time."""

from typing import Any

import pytest
import torch
from models import lab_model, left_padded, prompts, tiny_llama, tiny_mistral

from turbo_hf.eval import published
from turbo_hf.eval.methods import cache_size, method_named
from turbo_hf.models.versions import CACHE

HEADS, DIM, GROUP = 2, 64, 32


def nearest(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Each value at the nearest of 2**bits evenly spaced levels between the least and the largest; 1D, float64."""
    levels = torch.linspace(0, 1, 2**bits, dtype=torch.float64) * (values.max() - values.min()) + values.min()
    return levels[(values[:, None] - levels).abs().argmin(-1)]


def test_rounding_takes_the_nearest_level() -> None:
    x = torch.randn(5, 40)
    for bits in (2, 3, 4):
        expected = torch.stack([nearest(row.double(), bits) for row in x])
        torch.testing.assert_close(published.rounded(x, bits, -1), expected.float())
    assert torch.equal(published.rounded(torch.full((1, 8), 3.5), 2, -1), torch.full((1, 8), 3.5))


def kivi_directly(x: torch.Tensor, bits: int, *, values: bool) -> torch.Tensor:
    """KIVI's algorithm 1 for one head's tokens [T, D], fed one after the other: what it holds at the end."""
    stored: list[torch.Tensor] = []
    residual: list[torch.Tensor] = []
    for token in x.double():
        residual.append(token)
        if values and len(residual) > 64:
            stored.append(torch.cat([nearest(part, bits) for part in residual.pop(0).split(GROUP)]))
        elif not values and len(residual) == GROUP:
            block = torch.stack(residual)
            stored += torch.stack([nearest(channel, bits) for channel in block.T], -1).unbind(0)
            residual = []
    return torch.stack([*stored, *residual]).float()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_kivi_is_its_algorithm(bits: int) -> None:
    lengths = [200, 131, 64, 40]
    keys, values = torch.randn(2, len(lengths), HEADS, 200, DIM).unbind(0)
    layer = published.CompressedLayer(published.Kivi(bits, bits, GROUP), [200 - n for n in lengths])
    read = layer.update(keys[:, :, :120], values[:, :, :120])
    # the prompt reads itself in full precision
    assert torch.equal(read[0], keys[:, :, :120])
    assert torch.equal(read[1], values[:, :, :120])
    for at in range(120, 200):
        read = layer.update(keys[:, :, at : at + 1], values[:, :, at : at + 1])
    for row, length in enumerate(lengths):
        for head in range(HEADS):
            for own, all_of, kind in ((read[0], keys, False), (read[1], values, True)):
                text = all_of[row, head, 200 - length :]
                torch.testing.assert_close(own[row, head, 200 - length :], kivi_directly(text, bits, values=kind))


def test_computed_bytes_are_those_of_a_count() -> None:
    # 4 bit of 192 keys and 136 values, 3 groups of keys a channel, one of values a token, the rest at 2 bytes
    per_head = (192 + 136) * DIM // 2 + 4 * (3 * DIM + 136) + 2 * (8 + 64) * DIM
    assert published.Kivi(4, 4).computed_bytes(200, HEADS, DIM, 2) == HEADS * per_head
    # 4 bit of 128 keys and 2 of 136 values, one group of keys a channel, one of values a token
    per_head = 128 * DIM // 2 + 136 * DIM // 4 + 4 * (DIM + 136) + 2 * (72 + 64) * DIM
    assert published.Kivi(4, 2, group=128).computed_bytes(200, HEADS, DIM, 2) == HEADS * per_head


def test_rows_do_not_depend_on_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    # two of one length, which are compressed one after the other
    rows = [prompts(1, n, seed=n)[0] for n in (130, 97, 30, 97)]
    monkeypatch.setattr(published, "AT_ONCE", 1)
    method = method_named("kivi2")
    assert method.make is not None

    def run(inputs: dict[str, Any]) -> tuple[torch.Tensor, published.SimulatedCache]:
        cache = method.make(model, inputs["attention_mask"])  # type: ignore[misc]
        out = model.generate(**inputs, **{CACHE: cache}, max_new_tokens=70, do_sample=False)
        return out[:, inputs["input_ids"].shape[1] :], cache

    together, cache = run(left_padded(rows))
    alone = [run(left_padded([row])) for row in rows]
    assert torch.equal(together, torch.cat([tokens for tokens, _ in alone]))
    assert cache.computed_bytes() == sum(own.computed_bytes() for _, own in alone)
    assert cache.tokens() == sum(len(row) + 69 for row in rows)


def test_simulations_refuse() -> None:
    with pytest.raises(ValueError, match=r"models whose layers all have full attention; got sliding_attention"):
        published.simulated_cache(tiny_mistral(32), published.Kivi(4, 4), torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"want rows that are padded at the left and nowhere else"):
        published.simulated_cache(tiny_llama(), published.Kivi(4, 4), torch.tensor([[1, 0, 1]]))


@pytest.mark.parametrize(("name", "package"), [("quanto4", "optimum.quanto"), ("hqq4", "hqq")])
def test_a_library_that_is_not_there_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: None)
    with pytest.raises(ValueError, match=f"{name} needs {package}, which is not installed: pip install"):
        method_named(name)


@pytest.mark.parametrize("name", ["quanto4", "quanto2", "hqq4", "hqq2"])
def test_quantized_caches_of_transformers(name: str) -> None:
    package = "optimum.quanto" if name.startswith("quanto") else "hqq"
    pytest.importorskip(package, reason=f"{package} is not installed")
    model, tokenizer = lab_model()
    inputs = tokenizer("One of the special magic numbers for quiet-river is: 4281734. " * 20, return_tensors="pt")
    make: Any = method_named(name).make
    made = model.generate(
        **inputs, **{CACHE: make(model, inputs.attention_mask)}, max_new_tokens=4, return_dict_in_generate=True
    )
    stored, tokens = cache_size(made[CACHE], 1)
    assert tokens == inputs.input_ids.shape[1] + 3
    dense = tokens * 6 * 2 * 64 * 2 * 4
    # codes, their scales and zero points, and the newest tokens
    assert int(name[-1]) / 32 < stored / dense < int(name[-1]) / 32 + 0.15
