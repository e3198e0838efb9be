"""Models whose steps read the tokens that an indexer names (DSA): what `generate` does on them, patched, is what it
does unpatched; their index keys grow, go and come back with the latents."""

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from choices import flat_config
from families_support import INDEXED, INDEXERS
from families_support import build as build_case
from families_table import half_cache
from graphs_support import answer, ragged
from models import left_padded, prompts
from tiny_families import build
from tiny_multimodal import build_multimodal
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import turbo_hf
from turbo_hf import TurboCache, TurboConfig, Unsupported
from turbo_hf.cache.index_keys import GRAIN, SIZE_BYTES, IndexKeys
from turbo_hf.graphs import replayable_steps as steps
from turbo_hf.graphs.step_runner import StepRunner
from turbo_hf.layout import Scoring
from turbo_hf.models.model_layers import INDEXED_TYPES
from turbo_hf.models.versions import CACHE
from turbo_hf.ops.latent.named import named_latents, reference_named_decode
from turbo_hf.ops.store.quantize import dequantize

pytestmark = pytest.mark.skipif(not INDEXERS, reason="this Transformers names no tokens to attention functions")

MODELS = Path(transformers.__file__).parent / "models"
newest = pytest.mark.skipif(CACHE != "cache", reason="older versions have fewer classes")
EXACT = TurboConfig(bits=16)
NEW = 12
MULTIMODAL = [name for name in ("mistral_large4", "hy_v4_vl") if name in CONFIG_MAPPING]
CLASSES = ["deepseek_v32", "glm_moe_dsa", "shared indices", "axk2", "hy_v4"]
CLASSES += [*["dots3_note_text"] * ("dots3_note_text" in CONFIG_MAPPING), *MULTIMODAL]
"""Every class of Transformers that hands `indices` to its attention function, and GLM's with layers that share them."""


@functools.cache
def model_of(name: str = "deepseek_v32") -> Any:
    """Of 4 layers, which read 16 tokens."""
    if name in MULTIMODAL:
        return build_multimodal(name)
    return build("glm_moe_dsa", name) if name == "shared indices" else build(name)


def batch() -> dict[str, Any]:
    """Ragged left-padded prompts, longer and shorter than a block, and than what an indexer names."""
    return left_padded([row[:n] % 71 + 1 for row, n in zip(prompts(3, 90), (90, 70, 13), strict=True)])


def generated(model: Any, given: dict[str, Any], **options: Any) -> torch.Tensor:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    out: torch.Tensor = model.generate(**given, **options)
    return out


@newest
def test_every_class_is_here_or_hands_no_indices() -> None:
    assert {model_of(name).config.get_text_config().model_type for name in CLASSES} == set(INDEXED_TYPES)
    sources = {path.parent.name: path.read_text() for path in MODELS.glob("*/modeling_*.py")}
    indexed = {name for name, source in sources.items() if ".update_indexer(" in source}
    assert {name for name in indexed if " indices=" in sources[name]} == {
        x.removesuffix("_text") for x in INDEXED_TYPES
    }
    assert {name for name in indexed if " indices=" not in sources[name]} == {"glm5_next", "qwen4_exp"}


@newest
def test_a_class_that_masks_what_is_not_named_is_refused() -> None:
    model = build_multimodal("glm5_next")
    for strict in ("raise", "warn"):
        with pytest.raises(Unsupported, match=r"its indexer \(DSA\) masks tokens instead of naming them"):
            turbo_hf.patch(model, strict=strict)


@pytest.mark.parametrize("name", CLASSES)
def test_tokens_are_those_of_the_unpatched_model(name: str) -> None:
    model, given = model_of(name), batch()
    with turbo_hf.patch(model, EXACT) as handle:
        got = generated(model, given)
        layers = [at.index for at in handle.report().layers if at.groups]
        # a call without a cache is the unpatched model's, but for what is done to padding
        no_cache = generated(model, given, use_cache=False, max_new_tokens=3)
    # from float16 pages an indexer may choose others among near scores, which change much
    with half_cache(layers):
        assert torch.equal(got, generated(model, given))
    assert torch.equal(no_cache, generated(model, given, use_cache=False, max_new_tokens=3))
    assert len(layers) == (2 if name == "dots3_note_text" else 4)


MODES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 25},
    "sampled": {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
    "assisted": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("name", ["deepseek_v32", "shared indices"])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_other_ways_to_generate(mode: str, name: str) -> None:
    model, given = model_of(name), batch()
    if mode == "assisted":
        ids = batch()["input_ids"][:1, :40]
        given = {"input_ids": torch.cat((ids, ids), 1)}
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    torch.manual_seed(5)
    with half_cache(range(4)):
        want = generated(model, given, **MODES[mode])
    with turbo_hf.patch(model, EXACT):
        torch.manual_seed(5)
        assert torch.equal(generated(model, given, **MODES[mode]), want)


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("name", ["deepseek_v32", *MULTIMODAL[:1]])
def test_steps_equal_masked_ones_over_the_same_cache(name: str, bits: int) -> None:
    # the same cache on the unpatched model: Transformers expands what it dequantizes, and masks what is not named
    model, ids = model_of(name), prompts(2, 140) % 71 + 1
    with turbo_hf.patch(model, flat_config(bits=bits)) as handle, torch.no_grad():
        cache = handle.new_cache()
        model(ids[:, :130], **{CACHE: cache})
        other = copy.deepcopy(cache)
        other.model = None
        got = [model(ids[:, n : n + 1], **{CACHE: cache}).logits for n in range(130, 140)]
    with torch.no_grad():
        want = [model(ids[:, n : n + 1], **{CACHE: other}).logits for n in range(130, 140)]
    torch.testing.assert_close(torch.cat(got, 1), torch.cat(want, 1), rtol=2e-3, atol=2e-3)
    assert cache.get_seq_length() == other.get_seq_length() == 140


def test_rounding_changes_little() -> None:
    model, ids = model_of(), prompts(2, 160) % 71 + 1
    with torch.no_grad():
        want = model(ids).logits[:, 130:].log_softmax(-1)

    def lost(bits: int) -> float:
        with turbo_hf.patch(model, flat_config(bits=bits)) as handle, torch.no_grad():
            cache = handle.new_cache()
            model(ids[:, :130], **{CACHE: cache})
            own = [model(ids[:, n : n + 1], **{CACHE: cache}).logits for n in range(130, 160)]
        got = torch.cat(own, 1).log_softmax(-1)
        return float((want.exp() * (want - got)).sum(-1).mean())

    # random weights give scores that lie near each other: what is named changes with rounding, as in no trained model
    assert lost(16) < lost(8) < lost(2)
    assert lost(8) < 0.5


# --- reading what is named --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
def test_named_latents_are_those_of_the_cache(bits: int) -> None:
    with turbo_hf.patch(model_of(), flat_config(bits=bits)) as handle, torch.no_grad():
        cache, given = handle.new_cache(), batch()
        model_of()(**given, **{CACHE: cache})
        layer = cache.turbo_layers()[1]
        store, lengths = layer.kv_store(), layer.lengths()
        places = torch.stack([torch.randint(0, n, (40,)) for n in lengths])
        latent, rotary = named_latents(store, places)
        for own, whole in zip((latent, rotary), dequantize(store, torch.float32), strict=True):
            torch.testing.assert_close(own, whole[:, 0].take_along_dim(places[..., None], 1))
    assert lengths == [90, 70, 13]
    assert store.sealed.tolist() == [1, 1, 0]


def test_named_decode_is_the_softmax_over_what_is_seen() -> None:
    with turbo_hf.patch(model_of(), EXACT) as handle, torch.no_grad():
        cache = handle.new_cache()
        model_of()(prompts(2, 100) % 71 + 1, **{CACHE: cache})
        store = cache.turbo_layers()[0].kv_store()
    latent, rotary = (x[:, 0].double() for x in dequantize(store, torch.float32))
    q_latent, q_rotary, sinks = torch.randn(2, 4, 3, 16), torch.randn(2, 4, 3, 16), torch.randn(4)
    places = torch.stack([torch.randperm(100)[:20] for _ in range(6)]).view(2, 3, 20)
    seen = torch.rand(2, 3, 20) > 0.3
    seen[0, 1] = False
    got = reference_named_decode(q_latent, q_rotary, store, places, seen, Scoring(0.3, sinks=sinks))
    for row, query in [(r, q) for r in range(2) for q in range(3) if seen[r, q].any()]:
        at = places[row, query][seen[row, query]]
        q, keys = (torch.cat(x, -1) for x in ((q_latent[row, :, query], q_rotary[row, :, query]), (latent, rotary)))
        scores = 0.3 * q.double() @ keys[row, at].T
        weights = torch.cat((scores, sinks.double()[:, None]), -1).softmax(-1)[:, :-1]
        torch.testing.assert_close(got[row, :, query].double(), weights @ latent[row, at], rtol=1e-4, atol=1e-5)
    assert got.isfinite().all()


# --- index keys -------------------------------------------------------------------------------------------------------


def test_index_keys_take_a_byte_per_channel_and_grow_in_place() -> None:
    keys = IndexKeys(torch.empty(2, 0, 16 + SIZE_BYTES, dtype=torch.uint8))
    new = torch.randn(2, 70, 16)
    new[0, 0], new[0, 1] = 0, new[0, 1] * 1e6
    keys.put(new, 0)
    assert keys.kept.shape == (2, 2 * GRAIN, 16 + SIZE_BYTES)
    assert keys.channels == 16
    step = new.abs().amax(-1, keepdim=True) / 127
    assert ((keys.read(70) - new).abs() <= step * 0.501).all()
    assert not keys.read()[:, 70:].any()
    where = keys.kept.data_ptr()
    keys.put_at(new[:, :2], torch.tensor([70, 71]))
    assert keys.kept.data_ptr() == where
    keys.select_rows(torch.tensor([1, 1]))
    assert torch.equal(keys.kept[0], keys.kept[1])
    assert ((keys.read(72)[0, 70:] - new[1, :2]).abs() <= step[1, :2] * 0.501).all()


@pytest.mark.parametrize("config", [EXACT, "turbo4"])
def test_crops_copies_and_resets(config: Any) -> None:
    model, ids = model_of("shared indices"), prompts(2, 140) % 71 + 1
    with turbo_hf.patch(model, config) as handle, torch.no_grad():
        cache = handle.new_cache()
        model(ids[:, :100], **{CACHE: cache})
        kept = copy.deepcopy(cache)
        want = model(ids[:, 100:101], **{CACHE: cache}).logits
        # of open tokens
        cache.crop(-1)
        torch.testing.assert_close(model(ids[:, 100:101], **{CACHE: cache}).logits, want)
        model(ids[:, 101:110], **{CACHE: cache})
        cache.crop(-10)
        for again in (cache, kept):
            assert again.get_seq_length() == 100
            torch.testing.assert_close(model(ids[:, 100:101], **{CACHE: again}).logits, want)
        held = [layer.index_keys is not None for layer in cache.turbo_layers()]
        assert held == [True, False] * 2
        sizes = [layer.get("index", 0) for layer in cache.memory().layers]
        assert sizes[0] == 2 * 2 * GRAIN * (16 * 4 if config is EXACT else 16 + SIZE_BYTES)
        cache.reset()
        assert all(layer.index_keys is None for layer in cache.turbo_layers())
        model(ids[:1, :20], **{CACHE: cache})


def test_rows_go_with_the_others() -> None:
    model, ids = model_of(), prompts(2, 90) % 71 + 1
    with turbo_hf.patch(model, "turbo4") as handle, torch.no_grad():
        one, other = handle.new_cache(), handle.new_cache()
        model(ids, **{CACHE: one})
        model(ids[[1, 1, 0]], **{CACHE: other})
        one.batch_select_indices([1, 0])
        one.batch_repeat_interleave(2)
        one.reorder_cache(torch.tensor([0, 1, 2]))
        token = ids[:1, :1].expand(3, 1)
        torch.testing.assert_close(model(token, **{CACHE: one}).logits, model(token, **{CACHE: other}).logits)


def test_other_rows_are_refused() -> None:
    model, ids = model_of(), prompts(2, 20) % 71 + 1
    with turbo_hf.patch(model) as handle, torch.no_grad():
        cache = handle.new_cache()
        model(ids, **{CACHE: cache})
        with pytest.raises(ValueError, match="holds index keys of 2 rows and 16 channels; this pass brings 1 and 16"):
            model(ids[:1, :1], **{CACHE: cache})
        cache = TurboCache(transformers.LlamaConfig(num_hidden_layers=1))
        with pytest.raises(ValueError, match="layer 0 keeps no index keys"):
            cache.update_indexer(torch.ones(1, 1, 16), 0)


# --- captured steps ---------------------------------------------------------------------------------------------------

CALLS: dict[str, dict[str, Any]] = {
    "ragged": ragged([100, 33, 5]),
    "one": ragged([60]),
    "chunks": {**ragged([60, 9]), "prefill_chunk_size": 17},
    "beams": {**ragged([60, 40]), "num_beams": 3, "num_return_sequences": 2},
    "drafts": {"input_ids": prompts(1, 37).repeat(1, 3), "prompt_lookup_num_tokens": 6},
}


@functools.cache
def served(device: torch.device) -> Any:
    """Of sizes that have kernels on a GPU, where steps are captured; without experts, whose loops are not.

    With few heads an indexer gives several columns a score of 0, and which of them it names depends on their number.
    """
    sizes = {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "index_head_dim": 64, "index_n_heads": 32}
    sizes["first_k_dense_replace"] = 3
    model: Any = build_case("glm_moe_dsa", **{**INDEXED, **sizes}, indexer_types=["full", "shared", "full"])
    # a draft of the pad token would be taken for padding
    model.generation_config.pad_token_id = None
    return model.to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("bits", [4, 16])
def test_replayed_steps_give_the_same_tokens(
    call: str, bits: int, runners: list[StepRunner], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    # pages are reserved, and steps captured again, while it generates
    monkeypatch.setattr(steps, "AHEAD", 1)
    model, config = served(device), flat_config(bits=bits)
    given = {**CALLS[call], "max_new_tokens": 70}
    want = answer(model, replace(config, cuda_graphs=False), **given)
    assert not runners
    assert torch.equal(answer(model, config, **given), want)
    # a prompt in chunks asks for a runner of its own; beams over latents have none
    assert any(runner.captures for runner in runners) == (call != "beams")
