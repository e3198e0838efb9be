"""Continuous batching on compressed pages: the tokens of static batches, and what becomes of requests."""

import random
import threading
from typing import Any

import pytest
import torch
from choices import flat_config
from models import prompts, tiny_llama
from tiny_families import build, mistral4

import turbo_hf
from turbo_hf import TurboConfig, Unsupported

transformers = pytest.importorskip("transformers", minversion="5.19")

from serving_support import (  # noqa: E402
    BY_DEPTH,
    EXACT,
    MODELS,
    ONE_WIDER,
    PRESETS,
    check_same,
    cut_at_prefixes,
    in_static_batches,
    lab_latent,
    options,
    requests,
)
from transformers.generation.configuration_utils import GenerationConfig  # noqa: E402

from turbo_hf.layout import FIRST, page_bytes  # noqa: E402
from turbo_hf.serving import runner  # noqa: E402


@pytest.mark.parametrize(
    ("preset", "kind"),
    [
        *((preset, "llama") for preset in (*PRESETS, ONE_WIDER, BY_DEPTH)),
        ("turbo-mixed", "sliding"),
        ("turbo-mixed", "uneven"),
        *((preset, "latent") for preset in (EXACT, "int8", "turbo4")),
        (EXACT, "latent of V2"),
        ("turbo4", "lab"),
    ],
)
def test_tokens_are_those_of_static_batches(preset: Any, kind: str, passes: Any) -> None:
    model, inputs = MODELS[kind](), requests()
    with turbo_hf.patch(model, preset) as handle:
        assert "continuous batching: yes" in str(handle.report())
        outputs = model.generate_batch(inputs, max_new_tokens=12, continuous_batching_config=options())
        assert any(len(edges) > 12 for edges in passes.values()), "some prompt was cut"
        assert any(past and new > 16 for edges in passes.values() for past, new in edges), "some chunk has a past"
        check_same(model, handle, inputs, outputs, passes)
        assert "prompt tokens" in handle.report().serving
    if kind == "lab":
        assert {at.storage for at in handle.report().layers} == {"latent 4 bit", "latent 8 bit"}


@pytest.mark.parametrize(("recent", "block"), [(0, 64), (128, 64), (96, 32)])
def test_other_numbers_of_recent_tokens(recent: int, block: int, passes: Any) -> None:
    model, inputs = MODELS["llama"](), requests((5, 300, 150))
    with turbo_hf.patch(model, flat_config(recent_tokens=recent, block_size=block)) as handle:
        outputs = model.generate_batch(inputs, max_new_tokens=30, continuous_batching_config=options(40))
        check_same(model, handle, inputs, outputs, passes)


@pytest.mark.parametrize("family", ["axk1", "glm4_moe_lite", "longcat_flash", "minicpm3", "mistral4", "youtu"])
def test_other_families_with_latents(family: str, passes: Any) -> None:
    model: Any = mistral4() if family == "mistral4" else build(family)
    model.double()
    inputs = [[token % 97 + 1 for token in prompt] for prompt in requests((5, 131))]
    with turbo_hf.patch(model, EXACT) as handle:
        outputs = model.generate_batch(inputs, max_new_tokens=6, continuous_batching_config=options())
        check_same(model, handle, inputs, outputs, passes)


@pytest.mark.parametrize(("preset", "kind"), [("turbo-mixed", "llama"), ("turbo4", "llama"), ("turbo4", "latent")])
@pytest.mark.usefixtures("asynchronous", "runners")
def test_requests_that_come_and_go_at_random(
    preset: str, kind: str, passes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled at any moment, in a pool that is too small: those that end have their own tokens, no slot is lost."""
    monkeypatch.setattr(runner, "LEAST", 16)
    model, draw = MODELS[kind](), random.Random(4)
    # no two alike, so that no prefix is found but a request's own
    inputs = requests(tuple(draw.sample(range(1, 151), 10)))
    new = [draw.randint(20, 80) for _ in inputs]
    names: dict[str, int] = {}
    outputs: dict[str, Any] = {}
    gone: set[str] = set()
    with turbo_hf.patch(model, preset) as handle:
        config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
        with model.continuous_batching_context_manager(
            config, continuous_batching_config=options(6, max_batch_tokens=200, use_async_batching=True)
        ) as manager:
            while len(names) < len(inputs) or {*names} - {*outputs} - gone:
                if len(names) < len(inputs):
                    n = len(names)
                    names[manager.add_request(inputs[n], max_new_tokens=new[n])] = n
                elif draw.random() < 0.05:
                    name = draw.choice(list(names))
                    gone.add(name)
                    manager.cancel_request(name)
                output = manager.get_result(timeout=0.004)
                assert manager.is_running()
                if output is not None:
                    outputs[output.request_id] = output
            allocator = manager.batch_processor.cache.allocator
        for name, output in outputs.items():
            assert output.error is None
            assert len(output.generated_tokens) == new[names[name]]
            got = in_static_batches(model, handle, inputs[names[name]], passes[name])
            assert output.generated_tokens == got[: len(output.generated_tokens)], name
    assert sorted(allocator.free_slots) == list(range(allocator.slots))


@pytest.mark.parametrize(("kind", "ahead"), [("llama", False), ("llama", True), ("latent", False)])
def test_several_sequences_of_a_prompt_are_alike(kind: str, ahead: bool, request: Any) -> None:
    if ahead:
        request.getfixturevalue("asynchronous")
    model = MODELS[kind]()
    # so cold that sampling takes the likeliest token
    config = GenerationConfig(
        num_return_sequences=3, max_new_tokens=40, do_sample=True, temperature=1e-5, eos_token_id=-1
    )
    for share in (True, False):
        with turbo_hf.patch(model, "turbo-mixed" if kind == "llama" else "turbo4"):
            outputs = model.generate_batch(
                requests((100, 30)),
                config,
                continuous_batching_config=options(allow_block_sharing=share, use_async_batching=ahead),
            )
            tokens = [output.generated_tokens for output in outputs.values()]
            assert len(tokens) == 6
            assert tokens[0] == tokens[1] == tokens[2]
            assert tokens[3] == tokens[4] == tokens[5]


def test_memory_counts_latents() -> None:
    model = lab_latent()
    with turbo_hf.patch(model, "turbo4") as handle:
        config = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1)
        with model.continuous_batching_context_manager(config, continuous_batching_config=options(8)) as manager:
            manager.add_request(requests((130,))[0])
            while not manager.get_result().is_finished():
                pass
            # the request has ended, and its two blocks are stored prefixes
            memory = handle.memory()
    wide = [page_bytes(64, 8 if at.kept_int8 else 4, 64, 32) for at in handle.report().layers]
    assert [layer["codes"] + layer["scales"] for layer in memory.layers] == [2 * n for n in wide]
    assert memory.full_precision == 128 * 6 * (64 + 32) * 4
    assert memory.compression == pytest.approx(memory.full_precision / (2 * sum(wide)))


def test_a_stored_prefix_is_found_and_changes_no_bit(passes: Any) -> None:
    model, system = tiny_llama().double(), prompts(1, FIRST + 130, seed=1)[0].tolist()
    # a request computes the newest 64 tokens itself
    inputs = [system + [n] * 64 for n in (5, 6, 7)]
    for preset in ("turbo4", "turbo-mixed"):
        passes.clear()
        with turbo_hf.patch(model, preset) as handle:
            config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1)
            with model.continuous_batching_context_manager(
                config, continuous_batching_config=options(max_batch_tokens=256)
            ) as manager:
                outputs = {}
                for prompt in inputs:
                    name = manager.add_request(prompt)
                    outputs[name] = next(manager.request_id_iter(name))
                allocator = manager.batch_processor.cache.allocator
            found = [edges[0][0] for edges in passes.values()]
            assert found == [0, FIRST + 128, FIRST + 128]
            assert "288 of 630 prompt tokens" in str(handle.report())
            cut_at_prefixes(passes)
            check_same(model, handle, inputs, outputs, passes)
            assert len(allocator.ledger.cached_blocks) + allocator.pool.count_free_blocks(0) <= allocator.num_blocks


def test_remove_ends_a_running_manager() -> None:
    model = tiny_llama()
    original = model.init_continuous_batching
    handle = turbo_hf.patch(model)
    manager = model.init_continuous_batching(continuous_batching_config=options())
    manager.start()
    manager.add_request(requests((70,))[0], max_new_tokens=1000, streaming=True)
    # it has begun
    manager.get_result()
    with pytest.raises(ValueError, match="a manager of continuous batching runs on this model"):
        model.init_continuous_batching()
    handle.remove()
    assert not manager.is_running()
    while not (result := manager.get_result()).is_finished():
        pass
    assert "before this request completed" in result.error
    assert model.init_continuous_batching == original
    assert not [thread for thread in threading.enumerate() if "_run_generation_loop" in thread.name]


def test_a_request_that_does_not_fit_fails_alone(passes: Any) -> None:
    model, inputs = tiny_llama().double(), requests((5, 600, 20))
    with turbo_hf.patch(model) as handle:
        outputs = model.generate_batch(inputs, max_new_tokens=24, continuous_batching_config=options(blocks=7))
        good, long, other = outputs.values()
        assert "a request of 600 tokens that may generate 24 more does not fit: the pool holds" in long.error
        assert good.generated_tokens == in_static_batches(model, handle, inputs[0], passes["req_0"])
        assert len(other.generated_tokens) == 24


def test_a_persistent_manager_ends_with_the_patch() -> None:
    model, inputs = tiny_llama(), requests((160, 20))
    handle = turbo_hf.patch(model)
    how: dict[str, Any] = {"max_new_tokens": 4, "persistent_manager": True, "continuous_batching_config": options()}
    first = model.generate_batch(inputs, **how)
    second = model.generate_batch(inputs, **how)
    assert [len(x.generated_tokens) for x in (*first.values(), *second.values())] == [4] * 4
    assert handle.report().serving.startswith("continuous batching: 80 of 360")
    handle.remove()
    assert not hasattr(model, "_cached_continuous_batching_manager")


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("llama", EXACT, "16-bit pages"),
        ("llama", TurboConfig(dense_layers=(0,)), r"16-bit pages beside others.*layer 1: 2 x 4 bit"),
        ("llama", TurboConfig(bits=16, int8_layers=(1,)), r"16-bit pages beside others.*layer 1: 8 bit"),
        ("llama", flat_config(sas=True), "SAS without a given sas_threshold"),
        ("kimi_linear", EXACT, "layer 0 is not compressed"),
        ("deepseek_v3", TurboConfig(bits=16, int8_layers=(1,)), r"16-bit pages beside others.*layer 1: latent 8 bit"),
    ],
)
def test_what_cannot_be_served_is_refused(family: str, config: TurboConfig, reason: str) -> None:
    model: Any = build(family)
    with turbo_hf.patch(model, config) as handle:
        assert "continuous batching: no" in str(handle.report())
        with pytest.raises(Unsupported, match=reason):
            model.generate_batch(requests())


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        ({"cpu_offload_space": 1.0}, "does not support cpu_offload_space"),
        ({"use_async_batching": True}, "does not support use_async_batching without a GPU"),
        ({"use_cuda_graph": True}, "use_cuda_graph=True: TurboConfig.cuda_graphs says whether .* Choose None or False"),
        ({"use_cuda_graph": (False, True)}, "use_cuda_graph=.*: TurboConfig.cuda_graphs says whether"),
    ],
)
def test_options_that_are_not_supported_are_refused(chosen: dict[str, Any], reason: str) -> None:
    model = tiny_llama()
    with turbo_hf.patch(model), pytest.raises(Unsupported, match=reason):
        model.init_continuous_batching(continuous_batching_config=options(**chosen))


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        ({"num_beams": 3}, "does not know num_beams. Leave it out"),
        ({"stop_strings": ["x"]}, "does not know stop_strings. Leave it out"),
        ({"no_repeat_ngram_size": 2}, r"newest token of each request alone, with which NoRepeatNGram\w+ fails"),
    ],
)
def test_generation_that_cannot_be_served_is_refused(chosen: dict[str, Any], reason: str) -> None:
    model = tiny_llama()
    generation = GenerationConfig(max_new_tokens=4, eos_token_id=-1, **chosen)
    with turbo_hf.patch(model), pytest.raises(Unsupported, match=reason):
        model.init_continuous_batching(generation, continuous_batching_config=options())


def test_graphs_that_must_be_are_refused_where_they_cannot_be() -> None:
    model = tiny_llama()
    with turbo_hf.patch(model, TurboConfig(cuda_graphs=True)), pytest.raises(Unsupported, match="the model is on cpu"):
        model.init_continuous_batching()


def test_no_patch_while_a_manager_runs() -> None:
    model = tiny_llama(attn_implementation="sdpa")
    running = model.continuous_batching_context_manager(continuous_batching_config=options())
    with running, pytest.raises(ValueError, match="runs on this model, or is kept on it"):
        turbo_hf.patch(model)


def test_nan_ends_the_manager_and_says_why() -> None:
    model = tiny_llama()
    torch.nn.init.constant_(model.model.layers[1].self_attn.k_proj.weight, torch.nan)
    with turbo_hf.patch(model):
        (output,) = model.generate_batch(
            requests((9,)), max_new_tokens=4, continuous_batching_config=options()
        ).values()
        assert "layer 1: keys or values hold NaN or Inf" in output.error
