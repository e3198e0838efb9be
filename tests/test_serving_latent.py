"""Continuous batching over latents (MLA): the tokens of static batches."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from all_pairs import in_one_test
from models import LAB_MODEL
from tiny_families import build, mistral4

import turbo_hf
from turbo_hf import TurboConfig, Unsupported

transformers = pytest.importorskip("transformers", minversion="5.19")

from serving_support import (  # noqa: E402
    AFTER,
    LENGTHS,
    PREFIXED,
    cancel_one_and_add_another,
    check_captured_prompts,
    check_near,
    check_same,
    check_under_pressure,
    in_static_batches,
    one_by_one,
    options,
    requests,
    tiny_deepseek,
)
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.generation.configuration_utils import GenerationConfig  # noqa: E402

from turbo_hf.attention.latent import expanded_attention  # noqa: E402
from turbo_hf.attention.prompt import packed_attention  # noqa: E402
from turbo_hf.cache.new_columns import NewQKV  # noqa: E402
from turbo_hf.layout import Scoring, page_bytes  # noqa: E402
from turbo_hf.serving import runner, storage  # noqa: E402

EXACT = TurboConfig(bits=16)
WIDTHS: dict[str, str | TurboConfig] = {"16": EXACT, "int8": "int8", "turbo4": "turbo4"}


def lab(dtype: torch.dtype = torch.float64) -> Any:
    """The trained model, of whose six layers one has its latents in 8 bit beside five in 4."""
    return AutoModelForCausalLM.from_pretrained(LAB_MODEL.parent / "lab-deepseek-3m", dtype=dtype).eval()


MODELS = {"v2": lambda: tiny_deepseek(2).double(), "v3": lambda: tiny_deepseek(3).double(), "lab": lab}


@pytest.mark.parametrize(
    ("kind", "width"), [("v3", "16"), ("v3", "int8"), ("v3", "turbo4"), ("v2", "16"), ("lab", "turbo4")]
)
def test_tokens_are_those_of_static_batches(kind: str, width: str, passes: Any) -> None:
    model, inputs = MODELS[kind](), requests()
    with turbo_hf.patch(model, WIDTHS[width]) as handle:
        assert "continuous batching: yes" in str(handle.report())
        outputs = model.generate_batch(inputs, max_new_tokens=12, continuous_batching_config=options())
        assert any(len(edges) > 12 for edges in passes.values()), "some prompt was cut"
        assert any(past and new > 16 for edges in passes.values() for past, new in edges), "some chunk has a past"
        check_same(model, handle, inputs, outputs, passes)
        assert "prompt tokens" in handle.report().serving
    if kind == "lab":
        assert {at.storage for at in handle.report().layers} == {"latent 4 bit", "latent 8 bit"}


@pytest.mark.parametrize("family", ["axk1", "glm4_moe_lite", "longcat_flash", "minicpm3", "mistral4", "youtu"])
def test_other_families(family: str, passes: Any) -> None:
    model: Any = mistral4() if family == "mistral4" else build(family)
    model.double()
    inputs = [[token % 97 + 1 for token in prompt] for prompt in requests((5, 131))]
    with turbo_hf.patch(model, EXACT) as handle:
        outputs = model.generate_batch(inputs, max_new_tokens=6, continuous_batching_config=options())
        check_same(model, handle, inputs, outputs, passes)


def test_a_small_pool_starts_requests_again(passes: Any) -> None:
    model, inputs = tiny_deepseek().double(), requests((70, 80, 90))
    with turbo_hf.patch(model, "turbo4") as handle:
        outputs = model.generate_batch(inputs, max_new_tokens=70, continuous_batching_config=options(blocks=4))
        assert any(sum(past == 0 for past, _ in edges) > 1 for edges in passes.values()), "the pool was not too small"
        check_same(model, handle, inputs, outputs, passes)


@pytest.mark.parametrize(("width", "ahead"), [("turbo4", True), ("16", False)])
def test_captured_passes_and_stored_prefixes_give_the_same_tokens(
    width: str, ahead: bool, passes: Any, runners: Any, request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ahead:
        request.getfixturevalue("asynchronous")
    monkeypatch.setattr(runner, "LEAST", 16)
    model = tiny_deepseek().double()
    with turbo_hf.patch(model, WIDTHS[width]) as handle:
        cb = options(40, max_batch_tokens=300, use_async_batching=ahead)
        outputs, layouts = one_by_one(model, PREFIXED, passes, cb)
        for prompt, (name, output) in zip(PREFIXED, outputs.items(), strict=True):
            assert output.generated_tokens == in_static_batches(model, handle, prompt, passes[name])[:AFTER], name
    shapes = [(key[0] > 0, key[2], key[5]) for key in layouts if key[2]]
    assert (True, 1, 1) in shapes, "a prompt with a stored prefix, beside steps"
    assert (True, 1, 0) in shapes
    assert runners[0].captures > 2


def test_several_sequences_cancelling_and_late_requests() -> None:
    model = tiny_deepseek().double()
    # so cold that sampling takes the likeliest token
    config = GenerationConfig(
        num_return_sequences=3, max_new_tokens=40, do_sample=True, temperature=1e-5, eos_token_id=-1
    )
    handle = turbo_hf.patch(model, "turbo4")
    for share in (True, False):
        outputs = model.generate_batch(
            requests((100, 30)), config, continuous_batching_config=options(allow_block_sharing=share)
        )
        tokens = [output.generated_tokens for output in outputs.values()]
        assert tokens[0] == tokens[1] == tokens[2]
        assert tokens[3] == tokens[4] == tokens[5]
    greedy = GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=-1)
    cancel_one_and_add_another(model, handle, greedy)
    handle.remove()
    assert not any("expand_kv" in vars(module) for module in model.modules())


def test_memory_counts_latents() -> None:
    model = lab(torch.float32)
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


def apart(config: Any, qkv: Any, edges: torch.Tensor, longest: int, window: Any, scoring: Any) -> torch.Tensor:
    """As `packed_attention`, prompt by prompt."""
    parts = [NewQKV(*(x[:, :, a:b] for x in qkv)) for a, b in pairwise(edges.tolist())]
    return torch.cat([expanded_attention(None, part, None, None, scoring) for part in parts], 2)


def test_prompts_are_packed(passes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tiny_deepseek().double(), requests((5, 70, 131, 64, 1, 90, 30, 200, 3))
    monkeypatch.setattr(storage, "packed_attention", apart)
    with turbo_hf.patch(model, "turbo4") as handle:
        config = options(60, max_batch_tokens=300)
        outputs = model.generate_batch(inputs, max_new_tokens=8, continuous_batching_config=config)
        check_same(model, handle, inputs, outputs, passes)


def test_kernels_give_the_same_tokens(runners: Any) -> None:
    model, inputs = tiny_deepseek(num_hidden_layers=2), requests((5, 62))
    tokens = {}
    for backend in ("reference", "triton"):
        with turbo_hf.patch(model, TurboConfig(bits=4, int8_layers=(1,), backend=backend)):
            outputs = model.generate_batch(inputs, max_new_tokens=4, continuous_batching_config=options())
            tokens[backend] = [output.generated_tokens for output in outputs.values()]
        assert (runners[-1].captures > 0) == (backend == "triton")
    assert tokens["triton"] == tokens["reference"]


@in_one_test(
    ("family", "config", "reason"),
    [
        ("kimi_linear", EXACT, "layer 0 is not compressed"),
        ("deepseek_v3", TurboConfig(bits=16, int8_layers=(1,)), r"16-bit pages beside others.*layer 1: latent 8 bit"),
    ],
)
def test_what_cannot_be_served_is_refused(family: str, config: TurboConfig, reason: str) -> None:
    model: Any = build(family)
    with turbo_hf.patch(model, config), pytest.raises(Unsupported, match=reason):
        model.generate_batch(requests())


def test_widths_without_kernels_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_deepseek()
    with turbo_hf.patch(model, "turbo2"):
        monkeypatch.setattr(type(model), "device", torch.device("cuda", 0))
        with pytest.raises(Unsupported, match="not been checked on a GPU at 2 bit with latents"):
            model.generate_batch(requests())


def on_gpu() -> Any:
    """Latents of DeepSeek's own sizes, for which Hopper has kernels of its own. In float16, whose rounding is an eighth
    of bfloat16's: `check_near` then tells it from a wrong token."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "hidden_size": 256}
    return tiny_deepseek(initializer_range=0.05, **sizes).half().cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
def test_on_a_gpu_tokens_are_those_of_static_batches(width: str, passes: Any, runners: Any) -> None:
    check_under_pressure(on_gpu(), WIDTHS[width], passes, runners)


@pytest.mark.gpu
def test_on_a_gpu_latents_of_several_widths(passes: Any) -> None:
    model, inputs = lab(torch.float16).cuda(), requests((*LENGTHS, 300, 17))
    with turbo_hf.patch(model, "turbo4") as handle:
        outputs = model.generate_batch(inputs, max_new_tokens=40, continuous_batching_config=options(60))
        check_near(model, handle, inputs, outputs, passes)


@pytest.mark.gpu
def test_on_a_gpu_captured_passes_with_prompts(passes: Any, runners: Any) -> None:
    check_captured_prompts(on_gpu(), "turbo4", passes, runners)


@pytest.mark.gpu
def test_on_a_gpu_captured_steps_give_the_tokens_of_launched_ones(runners: Any) -> None:
    model, inputs, tokens = on_gpu(), requests((5, 70, 131, 64, 90, 30, 3)), []
    for how in ({}, {"use_cuda_graph": False}):
        with turbo_hf.patch(model, "turbo4"):
            outputs = model.generate_batch(
                inputs, max_new_tokens=70, continuous_batching_config=options(100, max_batch_tokens=512, **how)
            )
            tokens.append([output.generated_tokens for output in outputs.values()])
        assert (runners[-1].captures > 0) == (how == {})
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
def test_on_a_gpu_packed_prompts_are_as_apart() -> None:
    edges = torch.tensor([0, 5, 300, 301, 600], device="cuda", dtype=torch.int32)
    q, k, v = (torch.randn(1, 600, 4, dim, device="cuda").bfloat16().transpose(1, 2) for dim in (192, 192, 128))
    given = NewQKV(q, k, v), edges, 299, None, Scoring(0.07)
    out, want = packed_attention(TurboConfig(), *given), apart(TurboConfig(), *given)
    assert out is not None
    torch.testing.assert_close(out, want, rtol=0.02, atol=0.02)
