"""`TurboConfig`: what it takes, what it refuses and in which words, and its presets."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from choices import EVERY_PRESET, flat_config
from hypothesis import given
from hypothesis import strategies as st

from turbo_hf import PRESETS, Expert, SparseConfig, TurboConfig
from turbo_hf.config.turbo_config import ABLATIONS, at_8_bit, not_recommended, of_layer, resolve_config
from turbo_hf.layout import HeadGroups


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        pytest.param({"bits": 4.0}, r"bits must be one of 16, 8, 4, 3, 2; got 4.0", id="bits-float"),
        pytest.param({"value_bits": 16}, r"value_bits must be one of 8, 4, 3, 2, None; got 16", id="value_bits-16"),
        pytest.param({"bits": 16, "value_bits": 4}, r"value_bits goes with bits of .* leave one of them", id="16/4"),
        pytest.param({"bits": 16, "attention": "turbo"}, r'attention must be "auto" or "native" with bits=16', id="16"),
        pytest.param({"recent_tokens": 32}, r"must be None or a multiple of block_size \(64\)", id="recent"),
        *(
            pytest.param({"layer_bits": given}, r"layer_bits must be numbers of 8, 4, 3, 2, or pairs", id=str(given))
            for given in ((), 4, (16, 4), ((4, 5),), (True,), (4.0,), ((4, 2, 2),), np.array([4, 2]), (np.array([4]),))
        ),
        pytest.param({"layer_bits": (4,), "bits": 8}, r"layer_bits does not go with bits: .* bits out", id="depths-8"),
        pytest.param({"layer_bits": (4,), "value_bits": 2}, r"layer_bits does not go with value_bits", id="depths-v"),
        pytest.param({"layer_bits": (4,), "low_heads": 0.5}, r"layer_bits does not go with low_heads", id="depths-low"),
        pytest.param({"recent_tokens": 1088}, r"recent_tokens must be .* from 0 to 1024; got 1088", id="most-recent"),
        pytest.param({"recent_tokens": 64, "bits": 16}, r"recent_tokens does not go with bits=16", id="recent-16"),
        pytest.param(
            {"bits": 16, "low_heads": 0.5}, r"low_heads goes with bits of 8, 4, 3 or 2: .* 16; got .*=0.5", id="low-16"
        ),
        pytest.param({"recent_tokens": 64, "sparse": SparseConfig()}, "_tokens does not go with sparse", id="r-sp"),
        pytest.param({"cuda_graphs": 1}, r"cuda_graphs must be one of 'auto', True, False; got 1", id="graphs"),
        pytest.param({"low_heads": 1.5}, r"low_heads must be a share from 0 to 1; got 1.5", id="low_heads"),
        pytest.param({"low_heads": math.nan}, r"low_heads must be a share from 0 to 1; got nan", id="low_heads-nan"),
        pytest.param({"bits": 2, "low_heads": 0.5}, r"low_bits must be below bits \(2\) when .*; got 2", id="low"),
        pytest.param({"sas": True, "sas_threshold": 0}, r"from -80 to below 0 .*; got 0\.", id="threshold-0"),
        pytest.param({"sas": True, "sas_threshold": -81.0}, r"from -80 to below 0 .*; got -81.0", id="threshold-low"),
        pytest.param({"sas": True, "sas_threshold": math.nan}, r"from -80 to below 0 .*; got nan", id="threshold-nan"),
        pytest.param({"sas_threshold": -6.0}, r"sas_threshold has no effect without sas=True; got -6.0", id="no-sas"),
        pytest.param({"dense_layers": (-1,)}, r"dense_layers must be a tuple .*; got \(-1,\)", id="dense-negative"),
        pytest.param({"dense_layers": (True,)}, r"dense_layers must be a tuple .*; got \(True,\)", id="dense-bool"),
    ],
)
def test_refuses(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^(TurboConfig|Expert)\..*{message}"):
        flat_config(**choices)


@pytest.mark.parametrize("name", [*(each.name for each in dataclasses.fields(TurboConfig)), *Expert.names()])
def test_every_option_refuses_what_it_cannot_be(name: str) -> None:
    owner: Any = Expert if name in Expert.names() else TurboConfig
    for strange in (object(), "none of them", np.array([4])):
        with pytest.raises(ValueError, match=rf"^(TurboConfig|Expert)\.{name} (must be|has no effect)"):
            owner(**{name: strange})


def test_is_frozen_and_takes_keywords_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(TurboConfig(), "bits", 2)  # noqa: B010 - an assignment would not pass the type checker
    with pytest.raises(TypeError):
        TurboConfig(4)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"^TurboConfig has no option bit; options are bits, .*, expert\.$"):
        TurboConfig(bit=4)  # type: ignore[call-arg]


@given(
    heads=st.integers(1, 64),
    share=st.floats(0, 1),
    widths=st.sampled_from([(8, 4), (8, 3), (8, 2), (4, 3), (4, 2), (3, 2)]),
)
def test_head_groups_are_all_heads_widest_first(heads: int, share: float, widths: tuple[int, int]) -> None:
    groups = flat_config(bits=widths[0], low_bits=widths[1], low_heads=share).head_groups(heads)
    assert sum(n for _, n in groups) == heads
    assert all(n > 0 for _, n in groups)
    assert [bits for bits, _ in groups] == sorted({bits for bits, _ in groups}, reverse=True)
    low = dict(groups).get(widths[1], 0)
    assert low <= share * heads < low + 1


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        pytest.param("int8", ((8, 8),), id="int8"),
        pytest.param("turbo4", ((4, 8),), id="turbo4"),
        pytest.param("turbo-mixed", ((4, 4), (2, 4)), id="turbo-mixed"),
        pytest.param("turbo2", ((2, 8),), id="turbo2"),
        pytest.param("turbo-k4v3", (((4, 3), 8),), id="turbo-k4v3"),
        pytest.param("turbo-k4v2", (((4, 2), 8),), id="turbo-k4v2"),
    ],
)
def test_presets(name: str, groups: HeadGroups) -> None:
    config = resolve_config(name)
    assert config is EVERY_PRESET[name]
    assert config.head_groups(8) == groups


def test_values_have_bits_of_their_own() -> None:
    assert TurboConfig(value_bits=4).head_groups(8) == ((4, 8),)
    mixed = flat_config(bits=8, value_bits=3, low_bits=4, low_heads=0.5)
    assert mixed.head_groups(8) == (((8, 3), 4), ((4, 3), 4))
    # of low heads, the smaller of both
    assert dataclasses.replace(mixed, value_bits=8).head_groups(8) == ((8, 4), (4, 4))
    assert at_8_bit(mixed).head_groups(8) == ((8, 8),)
    assert TurboConfig.from_dict(mixed.to_dict()) == mixed


def test_layers_have_bits_of_their_own() -> None:
    config = TurboConfig.from_dict({"layer_bits": [8, 2, [8, 4]], "expert": {"block_size": 32}})
    assert config == flat_config(layer_bits=((8, 8), (2, 2), (8, 4)), block_size=32)
    assert TurboConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    each = [of_layer(config, index, 3) for index in range(3)]
    assert [own.head_groups(4) for own in each] == [((width, 4),) for width in (8, 2, (8, 4))]
    assert {own.expert.block_size for own in each} == {32}
    assert at_8_bit(config).head_groups(4) == ((8, 4),)
    assert of_layer(TurboConfig(), 0, 3) == TurboConfig()
    for layers in (2, 4):
        with pytest.raises(ValueError, match=rf"the bits of 3 layers, and the model has {layers}\. Name them for each"):
            of_layer(config, 0, layers)


@pytest.mark.parametrize(
    ("options", "recent"),
    [
        ({}, 64), ({"block_size": 32}, 32), ({"bits": 8, "value_bits": 3}, 64), ({"layer_bits": (8, 2)}, 64),
        ({"bits": 8, "low_heads": 0.5}, 64), ({"recent_tokens": 0}, 0), ({"bits": 8, "recent_tokens": 128}, 128),
        ({"bits": 8}, 0), ({"bits": 16}, 0), ({"sparse": SparseConfig()}, 0),
    ],
)  # fmt: skip
def test_a_block_of_recent_tokens_where_they_gain(options: dict[str, Any], recent: int) -> None:
    assert flat_config(**options).recent == recent
    assert at_8_bit(TurboConfig()).recent == of_layer(TurboConfig(layer_bits=(8, 2)), 0, 2).recent == 0


def test_every_preset_is_tested_and_the_default_is_turbo4() -> None:
    assert set(PRESETS) == {"int8", "turbo4", "turbo-k4v3", "saap"}
    assert set(ABLATIONS) == {"turbo-k4v2", "turbo-mixed", "turbo2"}
    assert PRESETS["turbo4"] == TurboConfig()


def test_2_bit_is_not_recommended_by_whatever_name() -> None:
    assert [not_recommended(config) for config in PRESETS.values()] == [None] * len(PRESETS)
    for config in (
        *ABLATIONS.values(),
        TurboConfig(bits=2, value_bits=4),
        TurboConfig(layer_bits=(4, 2)),
        TurboConfig.from_dict({"preset": "turbo2", "attention": "native", "cuda_graphs": False}),
    ):
        assert str(not_recommended(config)).startswith("2 bit is not like 16 bit on real checkpoints: ")
    for config in (
        TurboConfig(value_bits=3),
        flat_config(low_bits=3, low_heads=0.5),
        TurboConfig(layer_bits=(4, (4, 3))),
    ):
        assert not_recommended(config) is None


@pytest.mark.parametrize("value", [pytest.param("turbo5", id="name"), pytest.param(["turbo4"], id="list")])
def test_refuses_unknown_presets(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"one of the presets {', '.join(PRESETS)}, calibrated; got "):
        resolve_config(value)
