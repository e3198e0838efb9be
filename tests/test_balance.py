"""The balance of key channels: found in a model's weights where a key bias makes channels uneven, and kept by all that
reads the keys."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload  # type: ignore[import-untyped] # it has no types
from choices import flat_config
from models import prompts
from oracle import oracle
from patching_support import SMALL, biased, generate
from tiny_families import build
from torch import Tensor
from transformers import DynamicCache

import turbo_hf
from turbo_hf import TurboCache, TurboConfig
from turbo_hf.attention.prompt import prompt_attention
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.rows import NewColumns, NewQKV
from turbo_hf.layout import Scoring
from turbo_hf.models.versions import CACHE
from turbo_hf.patches import balance
from turbo_hf.patches.balance import PROBES, key_bias, parents, rotary_shares
from turbo_hf.patching.meta_model import meta_model, patch_report
from turbo_hf.sparse.undo_rotary import rotate

HEADS, DIM = 2, 16


def of_weights(model: Any, index: int) -> Tensor:
    """The balance of a layer, as it is defined."""
    layer = model.model.layers[index]
    weight = layer.self_attn.k_proj.weight.double() * layer.input_layernorm.weight.double()
    square = layer.self_attn.k_proj.bias.double().square() + weight.square().sum(-1)
    low, high = square.view(HEADS, 2, DIM // 2).unbind(1)
    size = ((low + high) / 2).sqrt().repeat(1, 2).sqrt()
    even: Tensor = size / size.mean(-1, keepdim=True)
    return even.float()


class Packed(torch.nn.Module):
    """A linear layer whose weights are INT8 codes, as quantized checkpoints have them."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.in_features, self.bias = linear.in_features, linear.bias
        self.scale = linear.weight.detach().abs().max() / 127
        self.weight = torch.nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight * self.scale, self.bias)


@pytest.mark.parametrize("kind", ["plain", "bfloat16", "packed", "unsized", "offloaded"])
def test_uneven_channels_are_balanced_by_their_weights(kind: str) -> None:
    model = biased()
    if kind == "bfloat16":
        model.bfloat16()
    want, attention = of_weights(model, 0), model.model.layers[0].self_attn
    if kind in ("packed", "unsized"):
        attention.k_proj = Packed(attention.k_proj)
        if kind == "unsized":
            # as EETQ's
            del attention.k_proj.in_features
    elif kind == "offloaded":
        cpu_offload(model, torch.device("cpu"))
        assert attention.k_proj.bias.is_meta
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = turbo_hf.patch(model, SMALL)
    assert [at.balanced for at in handle.report().layers] == [True, False]
    assert [at.groups for at in handle.report().layers] == [((4, 2),)] * 2
    assert "layer 0: 2 x 4 bit, keys balanced\n" in str(handle.report())
    first, second = handle.new_cache().turbo_layers()
    assert second.balance is None
    assert first.balance is not None
    exact = kind in ("plain", "bfloat16")
    # of the fourth root of a variance that is measured on so many numbers
    error = 1e-6 if exact else 3 * (2 / PROBES) ** 0.5 / 4
    torch.testing.assert_close(first.balance, want, rtol=error, atol=0)


def test_layers_that_have_no_balance() -> None:
    model = biased()
    for config in (TurboConfig(bits=16), TurboConfig(dense_layers=(0,))):
        with turbo_hf.patch(model, config) as handle:
            assert not any(at.balanced for at in handle.report().layers)
            assert all(layer.balance is None for layer in handle.new_cache().turbo_layers())
    # a layer at 8 bit has one
    with turbo_hf.patch(model, TurboConfig(int8_layers=(0,))) as handle:
        assert [at.storage for at in handle.report().layers] == ["8 bit", "2 x 4 bit"]
        assert [at.balanced for at in handle.report().layers] == [True, False]
    # nobody has looked at a model for this one
    assert all(layer.balance is None for layer in TurboCache(model.config, SMALL).turbo_layers())
    assert not any(at.balanced for at in patch_report(meta_model(model.config), SMALL).layers)
    attention = model.model.layers[0].self_attn
    attention.k_norm = torch.nn.Identity()
    assert key_bias(attention, parents(model)) is None
    del attention.k_norm
    attention.k_proj.bias = None
    assert key_bias(attention, parents(model)) is None


def test_without_a_known_rotary_embedding_8_bit_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "rotate", None)
    model = biased()
    with pytest.warns(UserWarning, match=r"layer 0: its key bias alone makes an INT8 step of \d+\.\d ") as caught:
        handle = turbo_hf.patch(model, SMALL)
    assert [record.filename for record in caught] == [__file__]
    assert [at.storage for at in handle.report().layers] == ["8 bit", "2 x 4 bit"]
    assert handle.report().layers[0].reason == "key bias"
    assert not any(at.balanced for at in handle.report().layers)
    assert [layer.config.bits for layer in handle.new_cache().turbo_layers()] == [8, 4]
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for config in (TurboConfig(bits=8), TurboConfig(int8_layers=()), TurboConfig(int8_layers=(1,))):
            turbo_hf.patch(model, config).remove()


@pytest.mark.parametrize(
    ("family", "turning"),
    [("qwen2", 16), ("cohere", 16), ("glm", 8), ("phi", 8), ("stablelm", 4), ("gpt_oss", 16), ("opt", 0)],
)
def test_shares_are_those_of_all_angles(family: str, turning: int) -> None:
    model: Any = build(family)
    (module,) = [x for x in model.modules() if getattr(x, "layer_idx", None) == 0 and hasattr(x, "k_proj")]
    shares: Any = rotary_shares(module, parents(model))
    assert int((shares.diagonal() == 0.5).sum()) == turning
    if not turning:
        assert torch.equal(shares, torch.eye(DIM, dtype=torch.float64))
        return
    # far apart, so that even the slowest channels have turned many times
    place = torch.randint(0, 1 << 22, (1, 4096), generator=torch.Generator().manual_seed(0))
    cos, sin = model.model.rotary_emb(torch.zeros(1), place)
    size = getattr(module, "rotary_ndims", DIM)
    x = torch.randn(DIM)
    turned = rotate(module, x[:size].expand(1, 1, 4096, size), cos, sin)[0, 0]
    # yarn scales cos and sin
    turned = turned / (cos.square() + sin.square()).mean().sqrt()
    found = torch.cat((turned, x[size:].expand(4096, -1)), 1).double().square().mean(0)
    torch.testing.assert_close(found, x.double().square() @ shares, rtol=0.1, atol=0.02)


def uneven_tokens(tokens: int, heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [1, 2 heads, M, D], k and v [1, heads, M, D], of uneven channels, and the balance of the keys."""
    seeded = torch.Generator().manual_seed(0)
    size = (2 * torch.randn(heads, DIM, generator=seeded)).exp()
    k = torch.randn(1, heads, tokens, DIM, generator=seeded) * size[:, None]
    q = torch.randn(1, 2 * heads, tokens, DIM, generator=seeded) / size.repeat_interleave(2, 0)[:, None]
    v = torch.randn(1, heads, tokens, DIM, generator=seeded)
    return q, k, v, size.sqrt()


@pytest.mark.parametrize("bits", [8, 4, 16])
def test_attention_is_that_over_the_keys_that_the_cache_shows(bits: int) -> None:
    """In steps, and of a chunk over a past; the keys that it shows are near those that came."""
    q, k, v, own = uneven_tokens(150)
    config = flat_config(bits=bits, attention="native", backend="reference")
    layer, plain = TurboLayer(config, balance=own), TurboLayer(config)
    for each in (layer, plain):
        each.append(k[:, :, :100], v[:, :, :100], NewColumns(100))
        each.commit()
    held, scoring = layer.dequantized(100), Scoring(0.3)
    # channels count alike
    lost, before = ((x.dequantized(100)[0] - k[:, :, :100]) / own.square()[:, None] for x in (layer, plain))
    if bits == 16:
        assert layer.balance is None
        assert torch.equal(lost, before)
    else:
        assert lost.norm() < before.norm() / 2
    chunk = NewQKV(*(x[:, :, 100:140] for x in (q, k, v)))
    out = prompt_attention(config, layer.ops, chunk, layer.kv_store(), None, None, scoring, balance=layer.balance)
    keys, values = (torch.cat((old[0], new[0]), 1) for old, new in zip(held, chunk[1:], strict=True))
    torch.testing.assert_close(
        out.double(), oracle(chunk.query, [(keys, values)], scaling=0.3).out, rtol=1e-3, atol=1e-4
    )
    new = slice(100, 101)
    step: Any = layer.append(k[:, :, new], v[:, :, new], NewColumns(1), queries=q[:, :, new])
    found = layer.ops.decode(step, layer.kv_store(), scoring).out.double()
    keys, values = (x[0] for x in layer.dequantized(101))
    want = oracle(q[:, :, new], [(keys, values)], scaling=0.3).out
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)


def logits_over(model: Any, cache: Any, ids: Tensor, cuts: tuple[int, ...]) -> Tensor:
    """Logits of all passes but the first, in which the tokens come."""
    with torch.no_grad():
        parts = [model(part, **{CACHE: cache}).logits for part in ids.split(cuts, 1)]
    return torch.cat(parts[1:], 1).double()


def alone(**options: Any) -> TurboConfig:
    """A config in which little but the rounding of the first layer's keys is lost."""
    return flat_config(**{"value_bits": 8, "dense_layers": (1,), **options})


STEPS, CHUNKS = (100, *[1] * 20), (100, 40, 30)
WAYS = {
    "int8": (alone(bits=8), STEPS),
    "4bit": (alone(), STEPS),
    "heads": (alone(bits=8, low_bits=4, low_heads=0.5), STEPS),
    "chunks": (alone(attention="int8"), CHUNKS),
    "native": (alone(attention="native"), CHUNKS),
}


@pytest.mark.parametrize("way", WAYS)
def test_uneven_keys_are_read_near_16_bit(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, cuts = WAYS[way]
    model, ids = biased(), prompts(1, sum(cuts))
    want = logits_over(model, DynamicCache(config=model.config), ids, cuts)
    error = {}
    for bound in (balance.UNEVEN, torch.inf):
        monkeypatch.setattr("turbo_hf.patching.refusals.UNEVEN", bound)
        with turbo_hf.patch(model, config) as handle:
            error[bound] = float((logits_over(model, handle.new_cache(), ids, cuts) - want).norm() / want.norm())
    assert error[balance.UNEVEN] < error[torch.inf] / 3, error


def test_copies_have_the_balance() -> None:
    model = biased()
    ids = prompts(2, 80)
    with turbo_hf.patch(model, TurboConfig(bits=4)) as handle:
        want = generate(model, input_ids=ids)
        assert torch.equal(generate(copy.deepcopy(model), input_ids=ids), want)
        cache = handle.new_cache()
        generate(model, input_ids=ids, **{CACHE: cache})
        for same in (cache, copy.deepcopy(cache)):
            same.reset()
            assert torch.equal(generate(model, input_ids=ids, **{CACHE: same}), want)
        (layer, _) = cache.turbo_layers()
        assert layer.keys is not None


def test_a_saved_cache_fits_no_other_balance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = biased()
    with turbo_hf.patch(model, SMALL) as handle:
        cache, ids = handle.new_cache(), prompts(1, 40)
        model(ids, **{CACHE: cache})
        cache.save_pretrained(tmp_path)
        assert torch.equal(TurboCache.from_pretrained(tmp_path, model).layers[0].keys, cache.layers[0].keys)
    monkeypatch.setattr("turbo_hf.patching.refusals.UNEVEN", torch.inf)
    with turbo_hf.patch(model, SMALL), pytest.raises(ValueError, match=r"layers.0.balance is .* should be None"):
        TurboCache.from_pretrained(tmp_path, model)
