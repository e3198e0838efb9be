"""Continuous batching on compressed pages: the tokens of static batches, and what becomes of requests."""

import random
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
from all_pairs import in_one_test
from graphs_support import Again
from models import prompts, tiny_llama, tiny_mistral

import turbo_hf
from turbo_hf import TurboConfig, Unsupported

transformers = pytest.importorskip("transformers", minversion="5.19")

from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig  # noqa: E402
from transformers.generation.continuous_batching import input_outputs  # noqa: E402
from transformers.generation.continuous_batching.requests import RequestState  # noqa: E402

from turbo_hf.patching import continuous_batching  # noqa: E402
from turbo_hf.serving import manager as manager_of  # noqa: E402
from turbo_hf.serving import rows, runner  # noqa: E402
from turbo_hf.serving.paged_cache import TurboPagedCache  # noqa: E402

WINDOW = 24
LENGTHS = (5, 70, 131, 64, 1, 90)
PRESETS = ("int8", "turbo4", "turbo-mixed", "turbo2", "turbo-k4v2")
MODELS = {
    "llama": lambda: tiny_llama().double(),
    "sliding": lambda: tiny_mistral(WINDOW).double(),
}
NEAR = 0.02
"""On a GPU: how far, in standard deviations of its logits, a token may be from the likeliest one of static batches."""


def requests(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """One prompt of each length."""
    return [prompts(1, length, seed=length)[0].tolist() for length in lengths]


def options(blocks: int = 24, **others: Any) -> ContinuousBatchingConfig:
    """A pool of `blocks` blocks of 64 tokens, and passes of at most 96 tokens unless another number is given."""
    return ContinuousBatchingConfig(**{"num_blocks": blocks, "page_size": 64, "max_batch_tokens": 96, **others})


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, int]]]:
    """Of each request: (tokens held, tokens brought) of each pass whose tokens it got.

    Where it starts again with a stored prefix, the passes that have computed that stand there a second time.
    """
    seen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    prompts_of: dict[str, int] = {}
    before, again = TurboPagedCache.note, RequestState.create_equivalent_initial_request

    def start_again(state: Any) -> Any:
        prompts_of[state.request_id] = len(state.initial_tokens) + len(state.generated_tokens)
        return again(state)

    def record(self: Any, request_id: str, past: int, new: int) -> None:
        edges = seen[request_id]
        if edges and past < sum(edges[-1]):
            # a pass that was prepared before it had to start again gave a token that nobody got
            while sum(edges[-1]) >= prompts_of[request_id]:
                edges.pop()
            first = max(n for n, (held, _) in enumerate(edges) if n == 0 or held == 0)
            edges += [(held, min(brought, past - held)) for held, brought in edges[first:] if held < past]
        edges.append((past, new))
        before(self, request_id, past, new)

    monkeypatch.setattr(TurboPagedCache, "note", record)
    monkeypatch.setattr(RequestState, "create_equivalent_initial_request", start_again)
    return seen


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[runner.TurboModelRunner]:
    """The runners of all managers to come. Without a GPU, what they capture runs again."""
    made: list[runner.TurboModelRunner] = []
    before, device_of = runner.TurboModelRunner.__init__, runner.capture_device

    def note(self: Any, *args: Any, **options: Any) -> None:
        made.append(self)
        before(self, *args, **options)

    monkeypatch.setattr(runner.TurboModelRunner, "__init__", note)
    monkeypatch.setattr(runner, "capture_device", lambda device: device_of(device) or Again())
    if not torch.cuda.is_available():
        monkeypatch.setattr(continuous_batching, "why_no_replay_of", lambda *args: None)
    return made


class Stream:
    """In place of a CUDA stream or event, where everything is done at once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Arguments are not read."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


@pytest.fixture
def asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: batches are prepared before the one ahead of them is looked at, as if it ran meanwhile."""
    monkeypatch.setattr(torch, "Event", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(input_outputs, "create_device_stream", Stream)
    monkeypatch.setattr(input_outputs.ContinuousBatchingAsyncIOs, "_supported_device_types", ("cpu",))
    monkeypatch.setattr(manager_of, "_check_options", lambda *args: None)


def in_static_batches(model: Any, handle: Any, prompt: list[int], edges: list[tuple[int, int]]) -> list[int]:
    """Greedy tokens of one prompt whose passes have these edges; the last one begins again where a pass begins at 0."""
    tokens = list(prompt)
    with torch.no_grad():
        for past, new in edges:
            if past == 0:
                cache = handle.new_cache()
            ids = torch.tensor([tokens[past : past + new]])
            place = torch.arange(past, past + new)[None]
            logits = model(ids, past_key_values=cache, position_ids=place).logits[0, -1]
            if past + new == len(tokens):
                tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def check_near(model: Any, handle: Any, inputs: list[list[int]], outputs: dict[str, Any], passes: Any) -> None:
    """As `check_same` on a GPU, where other batches round differently: each token is likeliest, or as good as that, in
    the pass that it comes from: a request that starts again brings its tokens as a prompt."""
    same = count = 0
    for prompt, (name, output) in zip(inputs, outputs.items(), strict=True):
        assert output.error is None, output.error
        tokens, known = [*prompt, *output.generated_tokens], len(prompt)
        for past, new in passes[name]:
            if past == 0:
                cache = handle.new_cache()
            ids = torch.tensor([tokens[past : past + new]], device=model.device)
            place = torch.arange(past, past + new, device=model.device)[None]
            with torch.no_grad():
                logits = model(ids, past_key_values=cache, position_ids=place).logits[0, -1].float()
            if known <= past + new < len(tokens):
                known = past + new + 1
                near = (logits.max() - logits[tokens[past + new]]) / logits.std()
                assert near <= NEAR, (name, past, new, float(near))
                same, count = same + int(logits.argmax() == tokens[past + new]), count + 1
    assert same >= 0.95 * count > 0, f"{same} of {count}"


def check_same(model: Any, handle: Any, inputs: list[list[int]], outputs: dict[str, Any], passes: Any) -> None:
    for prompt, (name, output) in zip(inputs, outputs.items(), strict=True):
        assert output.error is None
        assert output.generated_tokens == in_static_batches(model, handle, prompt, passes[name]), name


@pytest.mark.parametrize(("preset", "kind"), [*((preset, "llama") for preset in PRESETS), ("turbo-mixed", "sliding")])
def test_tokens_are_those_of_static_batches(preset: str, kind: str, passes: Any) -> None:
    model, inputs = MODELS[kind](), requests()
    with turbo_hf.patch(model, preset) as handle:
        outputs = model.generate_batch(inputs, max_new_tokens=24, continuous_batching_config=options())
        assert any(len(edges) > 24 for edges in passes.values()), "some prompt was cut"
        check_same(model, handle, inputs, outputs, passes)


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
    assert made.captures > 2, "several numbers of rows"
    assert sum(replay is not None for replay in made._replays.values()) <= 2
    assert made._device.replayed > made._device.warmed


def one_by_one(model: Any, inputs: list[list[int]], passes: Any, cb: Any) -> tuple[dict[str, Any], list[Any]]:
    """40 tokens of each prompt, which is sent when the one before it has its first token; and the runner's layouts.

    Of a prompt whose prefix is stored, `passes` gets that part as a pass of its own, as if it had been cut there.
    """
    outputs: dict[str, Any] = {}
    names: list[str] = []
    config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=40)
    with model.continuous_batching_context_manager(config, continuous_batching_config=cb) as manager:
        for prompt in inputs:
            names.append(manager.add_request(prompt, streaming=True))
            while names[-1] not in outputs:
                output = manager.get_result()
                outputs[output.request_id] = output
        while not all(output.is_finished() for output in outputs.values()):
            output = manager.get_result()
            outputs[output.request_id] = output
        layouts = list(manager.batch_processor.model_runner._layouts)
    for name, edges in passes.items():
        if edges[0][0]:
            passes[name] = [(0, edges[0][0]), *edges]
    return {name: outputs[name] for name in names}, layouts


PREFIXED = [*requests((5, 70, 90, 30, 64, 40)), *([*requests((128,))[0], *range(n, 3 * n + 17)] for n in range(6))]


@pytest.mark.parametrize(
    ("preset", "kind", "ahead"),
    [("turbo4", "llama", True), ("int8", "sliding", False), ("turbo-mixed", "llama", False)],
)
def test_captured_passes_with_prompts_give_the_same_tokens(
    preset: str, kind: str, ahead: bool, passes: Any, runners: Any, request: Any, monkeypatch: pytest.MonkeyPatch
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
            assert len(output.generated_tokens) == 40
            assert output.generated_tokens == got[:40], name
    shapes = [(key[0] > 0, key[2], key[5]) for key in layouts if key[2]]
    assert (True, 1, 1) in shapes, "a prompt with a stored prefix, beside steps"
    # the first block of a prompt ranks its heads
    assert ((True, 1, 0) in shapes) == (preset != "turbo-mixed")


@pytest.mark.parametrize(
    ("blocks", "lengths", "ends"),
    [
        pytest.param(40, LENGTHS, [0, 20, 40], id="ends"),
        pytest.param(4, (70, 80, 90), [-1], id="again"),
        # with the token that nobody sees it fills the pool
        pytest.param(4, (4 * 64 + 63 - 70,), [-1], id="full"),
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


@pytest.mark.usefixtures("asynchronous", "runners")
def test_requests_that_come_and_go_at_random(passes: Any) -> None:
    """Cancelled at any moment, in a pool that is too small: those that end have their own tokens, no slot is lost."""
    model, draw = MODELS["llama"](), random.Random(4)
    # no two alike, so that no prefix is found but a request's own
    inputs = requests(tuple(draw.sample(range(1, 151), 12)))
    new = [draw.randint(20, 80) for _ in inputs]
    names: dict[str, int] = {}
    outputs: dict[str, Any] = {}
    gone: set[str] = set()
    with turbo_hf.patch(model, "turbo-mixed") as handle:
        config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
        with model.continuous_batching_context_manager(
            config, continuous_batching_config=options(6, use_async_batching=True)
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


def test_steps_that_cannot_be_captured_are_launched(passes: Any, runners: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "capture_device", lambda device: Again(fails="no graph"))
    model, inputs = tiny_llama().double(), requests((70, 20))
    with turbo_hf.patch(model) as handle:
        with pytest.warns(UserWarning, match="cannot be captured and are launched: no graph"):
            outputs = model.generate_batch(inputs, max_new_tokens=12, continuous_batching_config=options())
        check_same(model, handle, inputs, outputs, passes)


def test_a_short_rest_of_a_prompt_fills_a_block(passes: Any) -> None:
    model, inputs = tiny_llama().double(), requests((70, 128))
    with turbo_hf.patch(model, "turbo-mixed") as handle:
        config = options(max_batch_tokens=60)
        outputs = model.generate_batch(inputs, max_new_tokens=8, continuous_batching_config=config)
        assert any(past < 64 < past + new and new <= 16 for edges in passes.values() for past, new in edges)
        check_same(model, handle, inputs, outputs, passes)


@pytest.mark.parametrize(("preset", "kind"), [("turbo-mixed", "llama"), ("turbo4", "sliding")])
def test_short_prompts_are_computed_together(
    preset: str, kind: str, passes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, begin = MODELS[kind](), requests((40, 64, 33, 100, 70, 128, 50))
    # the second time with a past, as far as their prefixes are found
    inputs = [*begin, *([*prompt, *range(7, 30 + n)] for n, prompt in enumerate(begin))]
    sizes: list[tuple[int, bool]] = []
    before = rows.Prompts.fill

    def note(self: Any, each: Any) -> None:
        sizes.append((len(each), self.past))
        before(self, each)

    monkeypatch.setattr(rows.Prompts, "fill", note)
    with turbo_hf.patch(model, preset) as handle:
        config = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1)
        cb = options(60, max_batch_tokens=512)
        manager = model.init_continuous_batching(config, continuous_batching_config=cb)
        outputs: dict[str, Any] = {}
        for turn in (inputs[:7], inputs[7:]):
            names = [manager.add_request(prompt) for prompt in turn]
            if not manager.is_running():
                manager.start()
            found = [manager.get_result() for _ in names]
            outputs |= {output.request_id: output for output in found}
        for name, edges in passes.items():
            if edges[0][0]:
                passes[name] = [(0, edges[0][0]), *edges]
        check_same(model, handle, inputs, dict(sorted(outputs.items(), key=lambda x: int(x[0][4:]))), passes)
    assert max(size for size, past in sizes if not past) > 2
    assert max(size for size, past in sizes if past) >= 2


def test_kernels_give_the_same_tokens(runners: Any) -> None:
    model, inputs = tiny_llama(), requests((5, 110))
    tokens = {}
    for backend in ("reference", "triton"):
        with turbo_hf.patch(model, TurboConfig(bits=4, low_bits=2, low_heads=0.5, backend=backend)):
            outputs = model.generate_batch(inputs, max_new_tokens=4, continuous_batching_config=options())
            tokens[backend] = [output.generated_tokens for output in outputs.values()]
        assert runners[-1].captures == int(backend == "triton")
    assert tokens["triton"] == tokens["reference"]


def test_a_small_pool_starts_requests_again(passes: Any) -> None:
    model, inputs = tiny_llama().double(), requests((70, 80, 90))
    with turbo_hf.patch(model) as handle:
        config = options(blocks=4)
        outputs = model.generate_batch(inputs, max_new_tokens=70, continuous_batching_config=config)
        again = [name for name, edges in passes.items() if sum(past == 0 for past, _ in edges) > 1]
        assert again, "the pool was not too small"
        check_same(model, handle, inputs, outputs, passes)


@pytest.mark.parametrize("ahead", [False, True])
def test_several_sequences_of_a_prompt_are_alike(ahead: bool, request: Any) -> None:
    if ahead:
        request.getfixturevalue("asynchronous")
    model = tiny_llama().double()
    # so cold that sampling takes the likeliest token
    config = GenerationConfig(
        num_return_sequences=3, max_new_tokens=70, do_sample=True, temperature=1e-5, eos_token_id=-1
    )
    for share in (True, False):
        with turbo_hf.patch(model, "turbo-mixed"):
            outputs = model.generate_batch(
                requests((100, 30)),
                config,
                continuous_batching_config=options(allow_block_sharing=share, use_async_batching=ahead),
            )
            tokens = [output.generated_tokens for output in outputs.values()]
            assert len(tokens) == 6
            assert tokens[0] == tokens[1] == tokens[2]
            assert tokens[3] == tokens[4] == tokens[5]


def test_sampling_streaming_cancelling_and_late_requests() -> None:
    model = tiny_llama()
    sampling = GenerationConfig(max_new_tokens=40, do_sample=True, temperature=0.7, eos_token_id=-1)
    handle = turbo_hf.patch(model)
    with model.continuous_batching_context_manager(sampling, continuous_batching_config=options()) as manager:
        first = manager.add_request(requests((70,))[0], max_new_tokens=400, streaming=True)
        assert len(manager.get_result().generated_tokens) == 1
        late = manager.add_request(requests((33,))[0])
        manager.cancel_request(first)
        while (done := manager.get_result()).request_id != late:
            assert len(done.generated_tokens) < 400
        assert len(done.generated_tokens) == 40
        allocator = manager.batch_processor.cache.allocator
        assert handle.memory().tokens >= 0
    assert len(allocator.free_slots) == allocator.slots
    handle.remove()


def test_a_stored_prefix_is_found_and_changes_no_bit(passes: Any) -> None:
    model, system = tiny_llama().double(), prompts(1, 130, seed=1)[0].tolist()
    inputs = [system + [n] * 20 for n in (5, 6, 7)]
    for preset in ("turbo4", "turbo-mixed"):
        passes.clear()
        with turbo_hf.patch(model, preset) as handle:
            config = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=-1)
            with model.continuous_batching_context_manager(
                config, continuous_batching_config=options(max_batch_tokens=256)
            ) as manager:
                outputs = {}
                for prompt in inputs:
                    name = manager.add_request(prompt)
                    outputs[name] = next(manager.request_id_iter(name))
                allocator = manager.batch_processor.cache.allocator
            found = [edges[0][0] for edges in passes.values()]
            assert found == [0, 128, 128]
            assert "256 of 450 prompt tokens" in str(handle.report())
            for name, edges in list(passes.items())[1:]:
                # as if the prompt had been cut where the stored prefix ends
                passes[name] = [(0, 128), *edges]
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
        outputs = model.generate_batch(inputs, max_new_tokens=24, continuous_batching_config=options(blocks=8))
        good, long, other = outputs.values()
        assert "a request of 600 tokens that may generate 24 more does not fit: the pool holds" in long.error
        assert good.generated_tokens == in_static_batches(model, handle, inputs[0], passes["req_0"])
        assert len(other.generated_tokens) == 24


def test_a_persistent_manager_lives_on_and_is_removed_with_the_patch() -> None:
    model, inputs = tiny_llama(), requests((70, 20))
    handle = turbo_hf.patch(model)
    how: dict[str, Any] = {"max_new_tokens": 4, "persistent_manager": True, "continuous_batching_config": options()}
    first = model.generate_batch(inputs, **how)
    second = model.generate_batch(inputs, **how)
    assert [len(x.generated_tokens) for x in (*first.values(), *second.values())] == [4] * 4
    assert handle.report().serving.startswith("continuous batching: 64 of 180")
    handle.remove()
    assert not hasattr(model, "_cached_continuous_batching_manager")


@in_one_test(
    ("config", "reason"),
    [
        (TurboConfig(buffer_scale="universal"), "whose scale is that of a whole prompt"),
        (TurboConfig(bits=16), "16-bit pages"),
        (TurboConfig(dense_layers=(0,)), "layer 0 is not compressed"),
        (TurboConfig(int8_layers=(1,)), r"pages of several sizes.*layer 1: 8 bit"),
        (TurboConfig(sas=True), "SAS without a given sas_threshold"),
    ],
)
def test_what_cannot_be_served_is_refused(config: TurboConfig, reason: str) -> None:
    model = tiny_llama()
    with turbo_hf.patch(model, config) as handle:
        assert "continuous batching: no" in str(handle.report())
        with pytest.raises(Unsupported, match=reason):
            model.generate_batch(requests())


@in_one_test(
    ("chosen", "reason"),
    [
        ({"cpu_offload_space": 1.0}, "does not support cpu_offload_space"),
        ({"use_async_batching": True}, "does not support use_async_batching without a GPU"),
        ({"use_cuda_graph": True}, "use_cuda_graph=True: passes that hold prompts are not captured"),
        ({"use_cuda_graph": (False, True)}, "use_cuda_graph=.*: the model is on cpu. Choose None in"),
    ],
)
def test_options_that_are_not_supported_are_refused(chosen: dict[str, Any], reason: str) -> None:
    model = tiny_llama()
    with turbo_hf.patch(model), pytest.raises(Unsupported, match=reason):
        model.init_continuous_batching(continuous_batching_config=options(**chosen))


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


class Groups:
    """Every combination is as good as checked."""

    def __contains__(self, item: object) -> bool:
        return True


@pytest.fixture
def unrefused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what has not been checked on a GPU is served there."""
    monkeypatch.setattr(continuous_batching, "CHECKED_ON_GPUS", Groups())


@pytest.mark.parametrize(("preset", "kind"), [("turbo-k4v3", "llama"), ("int8", "sliding")])
def test_what_has_not_been_checked_on_a_gpu_is_refused_there(
    preset: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS[kind]()
    with turbo_hf.patch(model, preset):
        # moved since the patch
        monkeypatch.setattr(type(model), "device", torch.device("cuda", 0))
        with pytest.raises(Unsupported, match="have not been checked on a GPU at"):
            model.generate_batch(requests())


def wide(kind: str) -> Any:
    """A model on the GPU whose heads have 64 channels."""
    shape = {"hidden_size": 256, "head_dim": 64}
    return (tiny_llama(**shape) if kind == "llama" else tiny_mistral(WINDOW, **shape)).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize(("preset", "kind"), [*((preset, "llama") for preset in PRESETS), ("turbo-mixed", "sliding")])
@pytest.mark.usefixtures("unrefused")
def test_on_a_gpu_tokens_are_those_of_static_batches(preset: str, kind: str, passes: Any, runners: Any) -> None:
    model, inputs = wide(kind), requests((*LENGTHS, 300, 17))
    with turbo_hf.patch(model, preset) as handle:
        # pressure, so that some request starts again
        outputs = model.generate_batch(inputs, max_new_tokens=70, continuous_batching_config=options(blocks=12))
        check_near(model, handle, inputs, outputs, passes)
        assert handle.memory() is not None
    assert runners[0].captures > 0


@pytest.mark.gpu
def test_on_a_gpu_captured_steps_give_the_tokens_of_launched_ones(runners: Any) -> None:
    model, inputs, tokens = wide("llama"), requests((5, 70, 131, 64, 90, 30, 3)), []
    for how in ({}, {"use_async_batching": False}, {"use_cuda_graph": False}):
        with turbo_hf.patch(model, "turbo4"):
            outputs = model.generate_batch(
                inputs, max_new_tokens=70, continuous_batching_config=options(100, max_batch_tokens=512, **how)
            )
            tokens.append([output.generated_tokens for output in outputs.values()])
        assert (runners[-1].captures > 0) == (how != {"use_cuda_graph": False})
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.gpu
@pytest.mark.parametrize(("preset", "kind"), [("turbo4", "llama"), ("int8", "llama"), ("turbo-mixed", "sliding")])
def test_on_a_gpu_captured_passes_with_prompts(preset: str, kind: str, passes: Any, runners: Any) -> None:
    model = wide(kind)
    with turbo_hf.patch(model, preset) as handle:
        outputs, layouts = one_by_one(model, PREFIXED, passes, options(100, max_batch_tokens=512))
        check_near(model, handle, PREFIXED, outputs, passes)
    assert any(key[2] and key[5] for key in layouts)
    assert runners[0].captures > 2


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
        for pages in cache.storage.paged:
            assert all(x.untyped_storage().data_ptr() == pool.data_ptr() for x in pages[1:])
        assert torch.cuda.memory_allocated() - before < 1.2 * (pool.nbytes() + cache.storage.k_open.nbytes * 3) + 2**26
    assert [passes[name][0][0] for name in outputs] == [0, 128, 128]
    for name in list(outputs)[1:]:
        # as if the prompt had been cut where the stored prefix ends
        passes[name] = [(0, 128), *passes[name]]
    check_near(model, handle, inputs, outputs, passes)
    several = GenerationConfig(
        num_return_sequences=3, max_new_tokens=70, do_sample=True, temperature=1e-5, eos_token_id=-1
    )
    twice = model.generate_batch(requests((100, 30)), several, continuous_batching_config=options(100))
    assert len({tuple(output.generated_tokens) for output in twice.values()}) <= 3
    handle.remove()
