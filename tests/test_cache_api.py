"""A `TurboCache` beside a `DynamicCache`: every public name of it works as there, or is refused in a sentence."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from choices import flat_config
from models import left_padded, prompts, tiny_llama, tiny_mistral
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

import turbo_hf
from turbo_hf import TurboCache, Unsupported
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.models.versions import CACHE as NAMED

K, V = torch.randn(2, 2, 2, 3, 16, generator=torch.Generator().manual_seed(0))
SAME, REFUSED, OWN = "as a DynamicCache does", "refused", "something of its own"

# what users and Transformers call of a cache of two layers and two rows that holds 40 columns, and of its layers
CALLS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("activate_past_recording", "offload", "prefetch", "reset"), ()),
    **dict.fromkeys(("get_max_length", "get_max_cache_shape", "get_query_offset", "get_seq_length"), ()),
    "batch_repeat_interleave": (2,),
    "batch_select_indices": ([1],),
    "crop": (-2,),
    "early_initialization": (2, 2, 16, torch.float32, torch.device("cpu")),
    "get_mask_sizes": (3,),
    "reorder_cache": (torch.tensor([1, 0]),),
    "update": (K, V),
}
OF_ONE_LAYER: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("get_conv_state", "get_recurrent_state", "has_previous_state", "is_recording_past"), (0,)),
    **dict.fromkeys(("offload", "prefetch"), (0,)),
    **dict.fromkeys(("update_conv_state", "update_indexer", "update_recurrent_state"), (K, 0)),
    "get_mask_sizes": (3, 1),
    "update": (K, V, 0),
}
NOT_SAME = {
    **dict.fromkeys(("get_conv_state", "get_recurrent_state", "has_previous_state", "offload", "prefetch"), REFUSED),
    **dict.fromkeys(("update_conv_state", "update_indexer", "update_recurrent_state", "max_cache_len"), REFUSED),
    # of 5.17, a DynamicCache keeps as many zeros after a reset
    **dict.fromkeys(("is_recording_past", "reset", "cumulative_length", "sliding_window"), OWN),
}
OF_CACHES = """
    activate_past_recording batch_repeat_interleave batch_select_indices batch_size crop early_initialization
    get_conv_state get_mask_sizes get_max_length get_query_offset get_recurrent_state get_seq_length
    has_previous_state is_compileable is_croppable is_dummy is_initialized is_linear is_recording_past is_sliding
    layer_class_to_replicate layers offload offloading prefetch reorder_cache reset update update_conv_state
    update_indexer update_recurrent_state get_max_cache_shape max_batch_size max_cache_len
"""
OF_LAYERS = """
    activate_past_recording batch_repeat_interleave batch_select_indices crop cumulative_length device dtype
    get_mask_sizes get_max_length get_seq_length is_compileable is_croppable is_initialized is_sliding keys
    lazy_initialization offload prefetch record_past reorder_cache reset sliding_window supports_early_init update
    values get_max_cache_shape
"""


def used(thing: Any, name: str) -> Any:
    """What a name gives, called if it is a method: a tensor's shape, how many layers."""
    # a TurboLayer has names of its own for these
    name = {"cumulative_length": "seen", "sliding_window": "window"}.get(name, name) if hasattr(thing, "seen") else name
    calls = CALLS | OF_ONE_LAYER if isinstance(thing, Cache) else CALLS
    given = getattr(thing, name)(*calls[name]) if name in calls else getattr(thing, name)
    given = given[0] if name == "update" else given
    return given.shape if isinstance(given, torch.Tensor) else len(given) if name == "layers" else given


def fill(cache: Any, tokens: int = 40) -> Any:
    """The cache, with so many columns of two rows in two layers."""
    k, v = torch.randn(2, 2, 2, tokens, 16, generator=torch.Generator().manual_seed(1))
    for layer in range(2):
        cache.update(k, v, layer)
    return cache


def pair(window: int | None) -> tuple[Any, Any]:
    """A filled cache of each kind."""
    config = tiny_mistral(window).config
    return fill(TurboCache(config, flat_config(bits=8, block_size=32))), fill(DynamicCache(config=config))


def public(*things: Any) -> list[str]:
    """Names that do not begin with an underscore."""
    return sorted({name for thing in things for name in dir(thing) if not name.startswith("_")})


@pytest.mark.parametrize("name", public(Cache, DynamicCache(config=tiny_llama().config)))
def test_each_name_of_a_dynamic_cache(name: str) -> None:
    assert name in OF_CACHES.split(), f"this Transformers has a new name, Cache.{name}: decide what a TurboCache does"
    for window in (None, 24):
        turbo, stock = pair(window)
        if name == "crop" and window:
            # both forget
            for cache in (turbo, stock):
                cache.activate_past_recording()
                fill(cache, 5)
        check(name, turbo, stock, f"{name}|layer|TurboCache")


@pytest.mark.parametrize("name", public(CacheLayerMixin, *(layer for w in (None, 24) for layer in pair(w)[1].layers)))
def test_each_name_of_its_layers(name: str) -> None:
    assert name in OF_LAYERS.split(), f"this Transformers has a new name of layers, {name}: decide what TurboLayer does"
    for window in (None, 24) if name != "lazy_initialization" else ():
        turbo, stock = (cache.layers[1] for cache in pair(window))
        if name == "crop" and window:
            for layer in (turbo, stock):
                layer.activate_past_recording()
                layer.update(K, V)
        check(name, turbo, stock, "TurboCache")


def check(name: str, turbo: Any, stock: Any, said: str) -> None:
    """Use both, and compare what they give, and the columns and keys that they have afterwards."""
    how = NOT_SAME.get(name, SAME if hasattr(stock, name) else OWN)
    if how == REFUSED:
        with pytest.raises((ValueError, AttributeError), match=said) as refused:
            used(turbo, name)
        assert len(str(refused.value)) > 40
        assert isinstance(refused.value, ValueError) or "max_cache_len" in str(refused.value)
    elif how == OWN:
        used(turbo, name)
    else:
        assert used(turbo, name) == used(stock, name)
        assert turbo.get_seq_length() == stock.get_seq_length()
        for got, want in zip(getattr(turbo, "layers", [turbo]), getattr(stock, "layers", [stock]), strict=True):
            if want.keys is None or not want.get_seq_length():
                assert got.keys is None
            else:
                assert got.keys.shape[:2] == want.keys.shape[:2]
                width = min(got.keys.shape[2], want.keys.shape[2])
                # 8 bits
                assert torch.allclose(got.keys[:, :, -width:], want.keys[:, :, -width:], atol=0.1)


# --- keys and values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 24], ids=["full", "window"])
def test_keys_and_values_can_be_read_as_from_a_dynamic_cache(window: int | None) -> None:
    turbo, stock = pair(window)
    for got, want in zip(turbo, stock, strict=True):
        assert [x.shape for x in got[:2]] == [x.shape for x in want[:2]]
        assert all(torch.allclose(x, y, atol=0.1) for x, y in zip(got[:2], want[:2], strict=True))
        assert got[2] == want[2]
    assert turbo.layers[0].keys.dtype == K.dtype
    assert repr(turbo) == repr(stock).replace(type(stock).__name__, "TurboCache", 1).replace(
        type(stock.layers[0]).__name__, "TurboLayer"
    )


def test_padding_reads_as_zeros() -> None:
    model, batch = tiny_llama(), left_padded([prompts(1, n, seed=n)[0] for n in (40, 9)])
    with turbo_hf.patch(model) as handle, torch.no_grad():
        cache: Any = handle.new_cache()
        assert (cache.layers[0].keys, cache.layers[0].values) == (None, None)
        model(**batch, **{NAMED: cache})
    for layer in cache.layers:
        for shown in (layer.keys, layer.values):
            assert shown.shape == (2, 2, 40, 16)
            assert not shown[1, :, :31].any()
            assert shown[1, :, 31:].abs().amax(-1).min() > 0


def test_keys_and_values_cannot_be_written() -> None:
    turbo, _ = pair(None)
    layer: Any = turbo.layers[0]
    before = layer.keys.clone()
    for name in ("keys", "values"):
        with pytest.raises(Unsupported, match=r"layer 0: keys and values of a TurboCache .* cannot be set"):
            setattr(layer, name, before)
    assert torch.equal(layer.keys, before)


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda shown: shown.zero_(),
    "by index": lambda shown: shown.__setitem__((slice(None), slice(None), slice(4, 9)), 0),
    "a view": lambda shown: shown[0].mT.mul_(2),
    "one of several views": lambda shown: shown.unbind(2)[3].fill_(1.0),
    "the same memory": lambda shown: shown.detach().contiguous().float().add_(1.0),
    "data": lambda shown: shown.data.zero_(),
    "out": lambda shown: torch.mul(torch.ones_like(shown), 2, out=shown),
    "a list": lambda shown: torch._foreach_mul_([shown], 2),
    "other data": lambda shown: setattr(shown, "data", torch.zeros_like(shown)),
}


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", WRITES)
def test_writes_to_keys_and_values_are_refused(how: str, mode: Callable[[], Any]) -> None:
    layer: Any = pair(None)[0].layers[0]
    before = layer.keys.clone()
    with mode():
        for name in ("keys", "values"):
            with pytest.raises(Unsupported, match=r"would not reach the cache\. Write to a clone\(\)"):
                WRITES[how](getattr(layer, name))
        assert torch.equal(layer.keys, before)


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_what_keys_make_is_an_ordinary_tensor(mode: Callable[[], Any]) -> None:
    layer: Any = pair(None)[0].layers[0]
    with mode():
        keys = layer.keys
        for made in (keys * 2, keys.clone(), torch.cat((keys, keys)), copy.deepcopy(keys), keys.double()):
            assert type(made) is torch.Tensor
            made.zero_()
        torch.zeros_like(keys).copy_(keys[:, :, 1:2])
        assert keys[0].tolist() == keys.numpy()[0].tolist()
        assert keys.any()


def test_linear_layers_have_none_to_iterate_over() -> None:
    from histories_support import subject  # noqa: PLC0415 - builds models

    cache = subject("qwen3_next", "int8").new_cache()
    with pytest.raises(Unsupported, match="layer 0: a LinearAttentionLayer has no keys and values to iterate over"):
        list(cache)


def test_a_cache_is_made_from_a_config() -> None:
    model: Any = tiny_llama()
    with pytest.raises(TypeError, match=r"must be a model's config \(model.config\); got LlamaForCausalLM"):
        TurboCache(model)


# --- rows ----------------------------------------------------------------------------------------------------------

CHOICES: list[Any] = [
    pytest.param((0, 2), [0, 2], id="tuple"),
    pytest.param([2, 0, 2], [2, 0, 2], id="list"),
    pytest.param([-1], [2], id="negative"),
    pytest.param(slice(1, None), [1, 2], id="slice"),
    pytest.param(np.array([2, 1]), [2, 1], id="numpy"),
    pytest.param(np.array([False, True, True]), [1, 2], id="numpy-mask"),
    pytest.param(torch.tensor([2, -3], dtype=torch.int32), [2, 0], id="int32"),
]
WRONG: list[Any] = [
    pytest.param([3], r"rows \[3\] do not exist: the cache holds 3 rows, 0 to 2", id="beyond"),
    pytest.param(torch.tensor([0, -4]), r"rows \[-4\] do not exist", id="before"),
    pytest.param([True, False], "a mask of 2 rows was given; the cache holds 3", id="short-mask"),
    pytest.param([], "no row was chosen", id="empty"),
    pytest.param([False] * 3, "no row was chosen", id="empty-mask"),
    pytest.param(1, "bool mask or a slice; got 1", id="number"),
    pytest.param([0.5], r"got \[0.5\]", id="floats"),
    pytest.param([True, 2, False], r"got \[True, 2, False\]", id="mask-and-numbers"),
    pytest.param("01", "got '01'", id="text"),
    pytest.param(None, "got None", id="none"),
    pytest.param(torch.tensor([[0]]), r"got torch.int64 \[1, 1\]", id="two-dimensional-tensor"),
    pytest.param(torch.ones(3, dtype=torch.uint8), r"got torch.uint8 \[3\]", id="bytes"),
]
REPEATS = [
    (repeats, "repeats must be a whole number of at least 1; got") for repeats in (0, -1, 1.5, True, None, "2", [1])
]


def three_rows(dense: tuple[int, ...]) -> Any:
    """A cache of three rows of different length."""
    model = tiny_llama()
    config = flat_config(bits=8, block_size=32)
    turbo_hf.patch(model, config)
    batch = left_padded([prompts(1, n, seed=n)[0] for n in (50, 9, 33)])
    cache = TurboCache(model.config, config, uncompressed_layers=dense)
    with torch.no_grad():
        model(**batch, **{NAMED: cache})
    return cache


def shown(cache: TurboCache) -> list[torch.Tensor]:
    """All that a cache holds."""
    return [x for layer in cache for x in layer[:2]]


@pytest.mark.parametrize("way", ["batch_select_indices", "reorder_cache"])
@pytest.mark.parametrize(("chosen", "rows"), CHOICES)
def test_rows_are_chosen_by(chosen: Any, rows: list[int], way: str) -> None:
    # all layers compressed, and one beside a dense one
    for dense in ((), (1,)):
        cache = three_rows(dense)
        before = shown(cache)
        getattr(cache, way)(chosen)
        assert all(torch.equal(got, want[rows]) for got, want in zip(shown(cache), before, strict=True))
        assert all(layer.rows == len(rows) for layer in cache.turbo_layers())


@pytest.mark.parametrize(("chosen", "said"), [*WRONG, *REPEATS])
def test_a_wrong_choice_changes_nothing(chosen: Any, said: str) -> None:
    cache = three_rows((0,))
    before = shown(cache)
    ways = ["batch_repeat_interleave"] if said.startswith("repeats") else ["batch_select_indices", "reorder_cache"]
    for thing, way in product((cache, cache.layers[1]), ways):
        with pytest.raises(ValueError, match=said):
            getattr(thing, way)(chosen)
    assert all(torch.equal(got, want) for got, want in zip(shown(cache), before, strict=True))


def test_an_empty_cache_has_no_rows_to_choose() -> None:
    cache: Any = TurboCache(tiny_llama().config, uncompressed_layers=(1,))
    cache.reorder_cache([7])
    cache.batch_select_indices(slice(0, 0))
    cache.batch_repeat_interleave(3)
    cache.crop(0)
    assert not any(layer.is_initialized for layer in cache.layers)
    assert isinstance(cache.layers[0], TurboLayer)
    assert isinstance(cache.layers[1], DynamicLayer)


@pytest.mark.parametrize("layer", [-1, 2])
def test_update_refuses_a_layer_that_there_is_not(layer: int) -> None:
    cache = TurboCache(tiny_llama().config)
    with pytest.raises(ValueError, match=rf"layer_idx {layer}: the cache has layers 0 to 1\."):
        cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), layer)
