"""Passes of continuous batching: captured, packed, and on a GPU."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from budgets import check, float_budget, largest
from choices import flat_config
from graphs_support import Again
from models import prompts, tiny_llama, tiny_mistral
from op_calls import ops_like
from oracle import attend

import turbo_hf
from turbo_hf import TurboConfig

transformers = pytest.importorskip("transformers", minversion="5.19")

from serving_support import (  # noqa: E402
    AFTER,
    EXACT,
    LENGTHS,
    MODELS,
    ONE_WIDER,
    PREFIXED,
    PRESETS,
    WINDOW,
    Stream,
    check_captured_prompts,
    check_near,
    check_same,
    check_under_pressure,
    cut_at_prefixes,
    in_static_batches,
    lab_latent,
    one_by_one,
    options,
    requests,
    tiny_deepseek,
)
from transformers.generation.configuration_utils import GenerationConfig  # noqa: E402

from turbo_hf.attention.latent import expanded_attention  # noqa: E402
from turbo_hf.attention.prompt import packed_attention, prompt_attention  # noqa: E402
from turbo_hf.cache.rows import NewQKV  # noqa: E402
from turbo_hf.layout import FIRST, Scoring  # noqa: E402
from turbo_hf.serving import manager, rows, runner, storage  # noqa: E402
from turbo_hf.serving.paged_cache import TurboAllocator, TurboPagedCache  # noqa: E402


@pytest.mark.parametrize(("preset", "kind"), [("turbo4", "llama"), ("turbo-mixed", "llama"), ("int8", "sliding")])
def test_captured_steps_give_the_same_tokens(
    preset: str, kind: str, passes: Any, runners: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of several lengths come and go, so that rows without a request lie among the others."""
    monkeypatch.setattr(runner, "GRAPHS", 2)
    model, inputs = MODELS[kind](), requests((5, 70, 131, 64, 1, 90, 30, 3))
    with turbo_hf.patch(model, preset) as handle:
        outputs: dict[str, Any] = {}
        config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
        with model.continuous_batching_context_manager(config, continuous_batching_config=options(40)) as manager:
            names = [
                manager.add_request(ids, max_new_tokens=(50, 8, 40, 8, 32, 8, 24, 8)[n]) for n, ids in enumerate(inputs)
            ]
            while len(outputs) < len(names):
                output = manager.get_result()
                outputs[output.request_id] = output
        check_same(model, handle, inputs, {name: outputs[name] for name in names}, passes)
    (made,) = runners
    assert made.graphs.captures > 2, "several numbers of rows"
    assert sum(map(made.graphs.captured, made.graphs.kinds)) <= 2
    assert made.graphs.device.replayed > made.graphs.device.warmed


@pytest.mark.parametrize(
    ("preset", "kind", "ahead"),
    [
        ("turbo4", "llama", True),
        ("int8", "sliding", False),
        ("turbo-mixed", "llama", False),
        ("turbo4", "latent", True),
        (EXACT, "latent", False),
    ],
)
def test_captured_passes_with_prompts_give_the_same_tokens(
    preset: Any, kind: str, ahead: bool, passes: Any, runners: Any, request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without a stored prefix, beside requests that decode."""
    if ahead:
        request.getfixturevalue("asynchronous")
    monkeypatch.setattr(runner, "LEAST", 16)
    model = MODELS[kind]()
    with turbo_hf.patch(model, preset) as handle:
        cb = options(40, max_batch_tokens=300, use_async_batching=ahead)
        outputs, layouts = one_by_one(model, PREFIXED, passes, cb)
        for prompt, (name, output) in zip(PREFIXED, outputs.items(), strict=True):
            got = in_static_batches(model, handle, prompt, passes[name])
            assert len(output.generated_tokens) == AFTER
            assert output.generated_tokens == got[:AFTER], name
    shapes = [(key[0] > 0, key[2], key[5]) for key in layouts if key[2]]
    assert (True, 1, 1) in shapes, "a prompt with a stored prefix, beside steps"
    assert (True, 1, 0) in shapes
    assert runners[0].graphs.captures > 2


@pytest.mark.parametrize(
    ("blocks", "lengths", "ends"),
    [
        pytest.param(40, LENGTHS, [0, 20, 40], id="ends"),
        pytest.param(3, (130, 140, 150), [-1], id="again"),
        # with the token that nobody sees it fills the pool
        pytest.param(4, (FIRST + 4 * 64 + 64 + 63 - 70,), [-1], id="full"),
    ],
)
@pytest.mark.usefixtures("asynchronous", "runners")
def test_batches_prepared_ahead_give_the_same_tokens(
    blocks: int, lengths: tuple[int, ...], ends: list[int], passes: Any
) -> None:
    """A request that ends has begun another pass; in a small pool requests start again while a pass of theirs runs."""
    model, inputs = MODELS["llama"](), requests(lengths)
    with turbo_hf.patch(model, "turbo-mixed") as handle:
        config = GenerationConfig(do_sample=False, eos_token_id=ends, max_new_tokens=70)
        outputs = model.generate_batch(
            inputs, config, continuous_batching_config=options(blocks, use_async_batching=True)
        )
        for prompt, (name, output) in zip(inputs, outputs.items(), strict=True):
            assert output.error is None, output.error
            got = output.generated_tokens
            assert len(got) == 70 or got[-1] in ends
            assert got == in_static_batches(model, handle, prompt, passes[name])[: len(got)], name
        again = any(sum(past == 0 for past, _ in edges) > 1 for edges in passes.values())
        assert again == (len(lengths) == 3)


@pytest.mark.usefixtures("asynchronous")
def test_inputs_are_sent_once_their_memory_is_cleared(runners: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, waited = tiny_llama().double(), list[Any]()
    monkeypatch.setattr(Stream, "wait_stream", lambda self, other: waited.append(self), raising=False)
    with turbo_hf.patch(model):
        model.generate_batch(
            requests((20,)), max_new_tokens=2, continuous_batching_config=options(use_async_batching=True)
        )
    assert runners[0].inputs_and_outputs.h2d_stream in waited


@pytest.mark.usefixtures("asynchronous")
def test_one_capture_serves_both_sets_of_inputs(runners: Any) -> None:
    model, inputs = tiny_llama().double(), requests((20, 30))
    with turbo_hf.patch(model):
        model.generate_batch(inputs, max_new_tokens=12, continuous_batching_config=options(use_async_batching=True))
    (made,) = runners
    assert made.inputs_and_outputs.io_pairs
    assert made.graphs.captures == 1
    assert made.graphs.device.replayed >= 9


def test_rows_have_few_sizes() -> None:
    allocator: Any = SimpleNamespace(slots=1000, slot_of={})
    sizes = []
    for used in (1, 2, 3, 60, 65, 128, 129, 161, 250, 257, 999):
        allocator.slot_of = {"highest": used - 1}
        sizes.append(TurboAllocator.rows(allocator))
    assert sizes == [2, 2, 4, 64, 128, 128, 160, 192, 256, 320, 1000]
    for used, size in ((2, 2), (3, 8), (9, 32), (33, 128), (129, 160)):
        allocator.slot_of = {"highest": used - 1}
        assert TurboAllocator.rows(allocator, prompts=True) == size


def test_steps_that_cannot_be_captured_are_launched(passes: Any, runners: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "CudaDevice", lambda device: Again(fails="no graph"))
    model, inputs = tiny_llama().double(), requests((70, 20))
    with turbo_hf.patch(model) as handle:
        with pytest.warns(UserWarning, match="cannot be captured and are launched: no graph"):
            outputs = model.generate_batch(inputs, max_new_tokens=12, continuous_batching_config=options())
        check_same(model, handle, inputs, outputs, passes)


def test_a_hook_that_comes_among_captured_passes_misses_none(runners: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, called, devices = tiny_llama().double(), list[int](), list[Any]()
    before = runner.TurboModelRunner.compute_batch

    def compute(self: Any, *args: Any) -> None:
        if self.replayed is not None and not devices:
            devices.extend((self.graphs.device, self.graphs.device.replayed))
            model.lm_head.register_forward_hook(lambda *args: called.append(1))
        before(self, *args)

    monkeypatch.setattr(runner.TurboModelRunner, "compute_batch", compute)
    with turbo_hf.patch(model):
        outputs = model.generate_batch(requests((20, 30)), max_new_tokens=12, continuous_batching_config=options())
    assert [len(x.generated_tokens) for x in outputs.values()] == [12, 12]
    assert runners[0].graphs.captures
    assert len(called) > 5
    # in place of a GPU, whose replays call no hook
    assert devices[0].replayed == devices[1]


def test_prompts_that_cannot_be_captured_leave_steps_alone(
    passes: Any, runners: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LEAST", 16)
    before = Again.capture

    def capture(self: Any, step: Any) -> Any:
        if runners[0].cache.now.prompts:
            # as with TurboConfig(cuda_graphs=True), which is about steps
            runners[0].graphs._demanded = True
            raise RuntimeError("no graph")
        return before(self, step)

    monkeypatch.setattr(Again, "capture", capture)
    inputs = [[*requests((128,))[0], *range(n, n + 20)] for n in range(5)]
    model = tiny_llama()
    with turbo_hf.patch(model), pytest.warns(UserWarning, match="passes with prompts of .* cannot be captured"):
        one_by_one(model, inputs, passes, options(max_batch_tokens=300))
    assert runners[0].graphs.captures > 0


def test_a_short_rest_of_a_prompt_fills_a_block(passes: Any) -> None:
    model, inputs = tiny_llama().double(), requests((70, 128))
    with turbo_hf.patch(model, "turbo-mixed") as handle:
        config = options(max_batch_tokens=60)
        outputs = model.generate_batch(inputs, max_new_tokens=8, continuous_batching_config=config)
        assert any(past < 64 < past + new and new <= 16 for edges in passes.values() for past, new in edges)
        check_same(model, handle, inputs, outputs, passes)


def test_prompts_over_long_pasts_are_not_captured_together() -> None:
    """Each past is unpacked for the pass: no more than in passes that are launched."""
    stored = SimpleNamespace(shape=SimpleNamespace(block=64, together=rows.TOGETHER))
    cache = SimpleNamespace(storage=stored, allocator=SimpleNamespace(rows=lambda prompts: 4), max_batch_tokens=8192)
    made: Any = SimpleNamespace(cache=cache, graphs=SimpleNamespace(off=False), _prompts=True)

    def key(past: int, count: int) -> Any:
        each = [rows.Row(str(n), past, 0, 100, 100 * n, n, [0] * (past // 64 + 2)) for n in range(count)]
        return runner.TurboModelRunner._key(made, each)

    assert key(32_000, 2) == (0, 0, 2, 128, 512, 1)
    assert key(33_000, 2) is None
    assert key(33_000, 1) is not None


@pytest.mark.parametrize(("preset", "kind"), [("turbo-mixed", "llama"), ("turbo4", "sliding")])
def test_short_prompts_are_computed_together(
    preset: str, kind: str, passes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, begin = MODELS[kind](), requests((40, 150, 33, 170, 160, 214, 50))
    # the second time with a past, as far as their prefixes are found
    inputs = [*begin, *([*prompt, *range(7, 30 + n)] for n, prompt in enumerate(begin))]
    sizes: list[tuple[int, bool]] = []
    before = rows.Prompts.fill

    def note(self: Any, each: Any, shape: rows.Shape) -> None:
        sizes.append((len(each), self.past))
        before(self, each, shape)

    monkeypatch.setattr(rows.Prompts, "fill", note)
    with turbo_hf.patch(model, preset) as handle:
        config = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1)
        cb = options(60, max_batch_tokens=1024)
        manager = model.init_continuous_batching(config, continuous_batching_config=cb)
        outputs: dict[str, Any] = {}
        for turn in (inputs[:7], inputs[7:]):
            names = [manager.add_request(prompt) for prompt in turn]
            if not manager.is_running():
                manager.start()
            found = [manager.get_result() for _ in names]
            outputs |= {output.request_id: output for output in found}
        cut_at_prefixes(passes)
        check_same(model, handle, inputs, dict(sorted(outputs.items(), key=lambda x: int(x[0][4:]))), passes)
    assert max(size for size, past in sizes if not past) > 2
    assert max(size for size, past in sizes if past) >= 2


def apart(config: Any, qkv: Any, edges: torch.Tensor, longest: int, window: Any, scoring: Any) -> torch.Tensor | None:
    """As `packed_attention`, prompt by prompt."""
    if window is not None and longest > window:
        return None
    parts = [NewQKV(*(x[:, :, a:b] for x in qkv)) for a, b in pairwise(edges.tolist())]
    assert max(part.query.shape[2] for part in parts) == longest
    if qkv[0].shape[-1] != qkv[2].shape[-1]:
        return torch.cat([expanded_attention(None, part, None, None, scoring) for part in parts], 2)
    return torch.cat(
        [
            prompt_attention(config, ops_like(part.query, config.expert.backend), part, None, None, window, scoring)
            for part in parts
        ],
        2,
    )


@pytest.mark.parametrize(("kind", "found"), [("llama", True), ("sliding", False), ("latent", True)])
def test_prompts_are_packed(kind: str, found: bool, passes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """First prompts of all lengths in one launch, beside a chunk and requests that decode."""
    model, inputs = MODELS[kind](), requests((5, 70, 131, 64, 1, 90, 30, 200, 3))
    packed: list[int] = []

    def note(config: Any, qkv: Any, edges: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        out = apart(config, qkv, edges, *rest)
        packed.extend([len(edges) - 1] * (out is not None))
        return out

    monkeypatch.setattr(storage, "packed_attention", note)
    with turbo_hf.patch(model, "turbo4") as handle:
        config = options(60, max_batch_tokens=300)
        outputs = model.generate_batch(inputs, max_new_tokens=8, continuous_batching_config=config)
        check_same(model, handle, inputs, outputs, passes)
    assert bool(packed) == found


@pytest.mark.gpu
def test_on_a_gpu_packed_prompts_of_latents_are_as_apart() -> None:
    edges = torch.tensor([0, 5, 300, 301, 600], device="cuda", dtype=torch.int32)
    q, k, v = (torch.randn(1, 600, 4, dim, device="cuda").bfloat16().transpose(1, 2) for dim in (192, 192, 128))
    given = NewQKV(q, k, v), edges, 299, None, Scoring(0.07)
    out, want = packed_attention(TurboConfig(), *given), apart(TurboConfig(), *given)
    assert out is not None
    torch.testing.assert_close(out, want, rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_on_a_gpu_packed_prompts_are_as_apart() -> None:
    edges = torch.tensor([0, 5, 300, 301, 600], device="cuda", dtype=torch.int32)
    # as a model has them: tokens first
    q, k, v = (torch.randn(1, 600, heads, 64, device="cuda").bfloat16().transpose(1, 2) for heads in (8, 2, 2))
    rest = edges, 299, None, Scoring(0.125)
    assert packed_attention(TurboConfig(), NewQKV(q.float(), k.float(), v.float()), *rest) is None
    out = packed_attention(TurboConfig(), NewQKV(q, k, v), *rest)
    assert out is not None
    for a, b in pairwise(edges.tolist()):
        part = [x[0, :, a:b] for x in (q, k, v)]
        want, eager = (attend(*part, scaling=0.125, dtype=at)[0] for at in (torch.float64, torch.bfloat16))
        check("out", out[0, :, a:b], want, float_budget(want, eager, largest(v), torch.bfloat16))


@pytest.mark.parametrize("kind", ["llama", "latent"])
def test_kernels_give_the_same_tokens(kind: str, runners: Any) -> None:
    model = tiny_llama() if kind == "llama" else tiny_deepseek(num_hidden_layers=2)
    inputs, tokens = requests((5, 142 if kind == "llama" else 62)), {}
    widths: dict[str, Any] = {"low_bits": 2, "low_heads": 0.5} if kind == "llama" else {"int8_layers": (1,)}
    for backend in ("reference", "triton"):
        with turbo_hf.patch(model, flat_config(bits=4, **widths, backend=backend)):
            outputs = model.generate_batch(inputs, max_new_tokens=4, continuous_batching_config=options())
            tokens[backend] = [output.generated_tokens for output in outputs.values()]
        assert (runners[-1].graphs.captures > 0) == (backend == "triton")
    assert tokens["triton"] == tokens["reference"]


def wide(kind: str) -> Any:
    """A model on the GPU whose heads have 64 channels. Latents have DeepSeek's own sizes, for which Hopper has kernels,
    in float16, whose rounding is an eighth of bfloat16's: `check_near` then tells it from a wrong token."""
    if kind == "latent":
        sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
        return tiny_deepseek(initializer_range=0.05, hidden_size=256, **sizes).half().cuda()
    shape = {"hidden_size": 256, "head_dim": 64}
    return (tiny_llama(**shape) if kind == "llama" else tiny_mistral(WINDOW, **shape)).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [True, False])
def test_on_a_gpu_the_first_pass_waits_for_what_clears_its_inputs(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, before = wide("llama"), requests((5, 70)), TurboPagedCache.__init__

    def slow(*given: Any, **options: Any) -> None:
        before(*given, **options)
        # the current stream is half a second behind when Transformers clears the inputs there
        torch.cuda._sleep(10**9)

    with turbo_hf.patch(model):
        tokens = []
        for init in (before, slow):
            monkeypatch.setattr(TurboPagedCache, "__init__", init)
            config = options(100, max_batch_tokens=512, use_async_batching=ahead)
            outputs = model.generate_batch(inputs, max_new_tokens=8, continuous_batching_config=config)
            tokens.append([output.generated_tokens for output in outputs.values()])
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("preset", "kind"),
    [
        *((preset, "llama") for preset in (*PRESETS, ONE_WIDER)),
        *((preset, "sliding") for preset in ("turbo-mixed", "int8", "turbo4")),
        *((preset, "latent") for preset in (EXACT, "int8", "turbo4")),
    ],
)
def test_on_a_gpu_tokens_are_those_of_static_batches(preset: Any, kind: str, passes: Any, runners: Any) -> None:
    check_under_pressure(wide(kind), preset, passes, runners)


@pytest.mark.gpu
def test_on_a_gpu_latents_of_several_widths(passes: Any) -> None:
    model, inputs = lab_latent().half().cuda(), requests((*LENGTHS, 300, 17))
    with turbo_hf.patch(model, "turbo4") as handle:
        outputs = model.generate_batch(inputs, max_new_tokens=40, continuous_batching_config=options(60))
        check_near(model, handle, inputs, outputs, passes)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "latent"])
def test_on_a_gpu_captured_steps_give_the_launched_tokens(kind: str, runners: Any) -> None:
    model, inputs, tokens = wide(kind), requests((5, 70, 131, 64, 90, 30, 3)), []
    for how in ({}, {"use_async_batching": False}, {"use_cuda_graph": False}):
        with turbo_hf.patch(model, "turbo4"):
            outputs = model.generate_batch(
                inputs, max_new_tokens=70, continuous_batching_config=options(100, max_batch_tokens=512, **how)
            )
            tokens.append([output.generated_tokens for output in outputs.values()])
        assert (runners[-1].graphs.captures > 0) == (how != {"use_cuda_graph": False})
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("preset", "kind"), [("turbo4", "llama"), ("int8", "llama"), ("turbo-mixed", "sliding"), ("turbo4", "latent")]
)
def test_on_a_gpu_captured_passes_with_prompts(preset: str, kind: str, passes: Any, runners: Any) -> None:
    check_captured_prompts(wide(kind), preset, passes, runners)


@pytest.mark.gpu
def test_on_a_gpu_prefixes_forks_late_and_cancelled_requests(passes: Any) -> None:
    model, system = wide("llama"), prompts(1, 130, seed=1)[0].tolist()
    handle = turbo_hf.patch(model, "turbo4")
    before = torch.cuda.memory_allocated()
    config = GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=-1)
    inputs, outputs = [system + [n] * 20 for n in (5, 6, 7)], {}
    with model.continuous_batching_context_manager(
        config, continuous_batching_config=options(200, max_batch_tokens=256)
    ) as manager:
        dropped = manager.add_request(requests((70,))[0], max_new_tokens=4000, streaming=True)
        assert len(manager.get_result().generated_tokens) == 1
        for prompt in inputs:
            name = manager.add_request(prompt)
            while (output := manager.get_result()).request_id != name:
                assert output.request_id == dropped
            outputs[name] = output
        manager.cancel_request(dropped)
        cache = manager.batch_processor.cache
        # pages are views of the pool: nothing lies beside it but the slots
        pool = cache.cache_tensor.untyped_storage()
        for pages in (pages for groups in cache.storage.paged for pages in groups):
            assert all(x.untyped_storage().data_ptr() == pool.data_ptr() for x in pages[1:])
        assert (
            torch.cuda.memory_allocated() - before < 1.2 * (pool.nbytes() + cache.storage.opened[0].nbytes * 3) + 2**26
        )
    # the newest block of a request is open
    assert [passes[name][0][0] for name in outputs] == [0, FIRST + 64, FIRST + 64]
    cut_at_prefixes(passes)
    check_near(model, handle, inputs, outputs, passes)
    several = GenerationConfig(
        num_return_sequences=3, max_new_tokens=70, do_sample=True, temperature=1e-5, eos_token_id=-1
    )
    twice = model.generate_batch(requests((100, 30)), several, continuous_batching_config=options(100))
    assert len({tuple(output.generated_tokens) for output in twice.values()}) <= 3
    handle.remove()
