"""Requests of continuous batching, what its passes hold, and the tokens of static batches."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from choices import flat_config
from graphs_support import Again
from models import LAB_MODEL, VOCABULARY, prompts, tiny_llama, tiny_mistral
from patching_support import biased
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import input_outputs
from transformers.generation.continuous_batching.requests import RequestState

import turbo_hf
from turbo_hf import TurboConfig
from turbo_hf.models.versions import CACHE
from turbo_hf.patching import continuous_batching
from turbo_hf.serving import manager as manager_of
from turbo_hf.serving import runner
from turbo_hf.serving.paged_cache import TurboPagedCache


def tiny_deepseek(version: int = 3, **changes: Any) -> Any:
    """A random model of DeepSeek V2 or V3 with a latent of 32 channels and a rotary part of 16."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
        "q_lora_rank": None if version == 2 else 16, "qk_nope_head_dim": 16, "v_head_dim": 24,
        "first_k_dense_replace": 9, "initializer_range": 0.2, "max_position_embeddings": 1024, "eos_token_id": None,
        "pad_token_id": None,
    }  # fmt: skip
    kind: Any = {2: DeepseekV2Config, 3: DeepseekV3Config}[version]
    return AutoModelForCausalLM.from_config(kind(**(sizes | changes))).eval()


def lab_latent() -> Any:
    """The trained model, of whose six layers one has its latents in 8 bit beside five in 4."""
    return AutoModelForCausalLM.from_pretrained(LAB_MODEL.parent / "lab-deepseek-3m", dtype=torch.float32).eval()


WINDOW = 24
LENGTHS = (5, 70, 200, 64, 1, 150)
PRESETS = ("int8", "turbo4", "turbo-mixed", "turbo2", "turbo-k4v2")
MODELS = {
    "llama": lambda: tiny_llama().double(),
    "sliding": lambda: tiny_mistral(WINDOW).double(),
    "latent": lambda: tiny_deepseek().double(),
    "latent of V2": lambda: tiny_deepseek(2).double(),
    "lab": lambda: lab_latent().double(),
    "uneven": lambda: biased().double(),
}
ONE_WIDER = flat_config(bits=4, low_bits=2, low_heads=0.5, int8_layers=(1,))
"""Layers whose pages differ in size: of one all heads are in 8 bit."""
BY_DEPTH = TurboConfig(layer_bits=(2, (8, 4)))
EXACT = TurboConfig(bits=16)
NEAR = 0.02
"""On a GPU: how far, in standard deviations of its logits, a token may be from the likeliest one of static batches."""


def requests(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """One prompt of each length."""
    return [prompts(1, length, seed=length)[0].tolist() for length in lengths]


AFTER = 26
"""Tokens that each of `PREFIXED` is given."""
PREFIXED = [*requests((5, 70, 110, 45, 64, 40)), *([*requests((128,))[0], *range(n, 4 * n + 25)] for n in range(6))]
"""Prompts, some of which have a prefix of two blocks."""


def options(blocks: int = 24, **others: Any) -> ContinuousBatchingConfig:
    """A pool of `blocks` blocks of 64 tokens, and passes of at most 96 tokens unless another number is given."""
    return ContinuousBatchingConfig(**{"num_blocks": blocks, "page_size": 64, "max_batch_tokens": 96, **others})


def record_passes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, int]]]:
    """Of each request: (tokens held, tokens brought) of each pass whose tokens it got.

    Where it starts again with a stored prefix, the passes that have computed that stand there a second time, and then
    a pass without tokens.
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
            edges += [(past, 0)] * (past > 0)
        edges.append((past, new))
        before(self, request_id, past, new)

    monkeypatch.setattr(TurboPagedCache, "note", record)
    monkeypatch.setattr(RequestState, "create_equivalent_initial_request", start_again)
    return seen


def watch_runners(monkeypatch: pytest.MonkeyPatch) -> list[runner.TurboModelRunner]:
    """The runners of all managers to come. Without a GPU, what they capture runs again."""
    made: list[runner.TurboModelRunner] = []
    before = runner.TurboModelRunner.__init__

    def note(self: Any, *args: Any, **options: Any) -> None:
        made.append(self)
        before(self, *args, **options)

    monkeypatch.setattr(runner.TurboModelRunner, "__init__", note)
    if not torch.cuda.is_available():
        monkeypatch.setattr(manager_of, "CudaDevice", Again)
        monkeypatch.setattr(continuous_batching, "why_no_replay_of", lambda *args: None)
    return made


class Stream:
    """In place of a CUDA stream or event, where everything is done at once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Arguments are not read."""

    def query(self) -> bool:
        """Whether it is done."""
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def make_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: batches are prepared before the one ahead of them is looked at, as if it ran meanwhile."""
    monkeypatch.setattr(torch, "Event", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(input_outputs, "create_device_stream", Stream)
    monkeypatch.setattr(input_outputs.ContinuousBatchingAsyncIOs, "_supported_device_types", ("cpu",))
    monkeypatch.setattr(manager_of, "_check_options", lambda *args: None)


def seal_prefix(cache: Any) -> None:
    """What a stored prefix is to a request: its newest tokens are in pages, too."""
    for layer in cache.turbo_layers():
        before = layer.state
        layer.state = before._replace(recent=0)
        layer.commit()
        layer.state = layer.state._replace(recent=before.recent)


def cut_at_prefixes(passes: Any) -> None:
    """Requests that begin with a stored prefix get it as a pass of its own, as if they had been cut there."""
    for name, edges in passes.items():
        if edges[0][0]:
            passes[name] = [(0, edges[0][0]), (edges[0][0], 0), *edges]


def in_static_batches(model: Any, handle: Any, prompt: list[int], edges: list[tuple[int, int]]) -> list[int]:
    """Greedy tokens of one prompt whose passes have these edges; the last one begins again where a pass begins at 0."""
    tokens = list(prompt)
    with torch.no_grad():
        for past, new in edges:
            if past == 0:
                cache = handle.new_cache()
            if new == 0:
                seal_prefix(cache)
                continue
            ids = torch.tensor([tokens[past : past + new]])
            place = torch.arange(past, past + new)[None]
            logits = model(ids, **{CACHE: cache}, position_ids=place).logits[0, -1]
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
            if new == 0:
                seal_prefix(cache)
                continue
            ids = torch.tensor([tokens[past : past + new]], device=model.device)
            place = torch.arange(past, past + new, device=model.device)[None]
            with torch.no_grad():
                logits = model(ids, **{CACHE: cache}, position_ids=place).logits[0, -1].float()
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


def one_by_one(model: Any, inputs: list[list[int]], passes: Any, cb: Any) -> tuple[dict[str, Any], list[Any]]:
    """`AFTER` tokens of each prompt, sent when the one before it has its first token; and the runner's layouts.

    Of a prompt whose prefix is stored, `passes` gets that part as a pass of its own, as if it had been cut there.
    """
    outputs: dict[str, Any] = {}
    names: list[str] = []
    config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=AFTER)
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
    cut_at_prefixes(passes)
    return {name: outputs[name] for name in names}, layouts


def check_under_pressure(model: Any, config: Any, passes: Any, runners: Any) -> None:
    """On a GPU: tokens near those of static batches where some request starts again, in captured steps."""
    inputs = requests((*LENGTHS, 300, 17))
    with turbo_hf.patch(model, config) as handle:
        outputs = model.generate_batch(inputs, max_new_tokens=70, continuous_batching_config=options(blocks=12))
        check_near(model, handle, inputs, outputs, passes)
        assert handle.memory() is not None
    assert runners[0].graphs.captures > 0


def check_captured_prompts(model: Any, config: Any, passes: Any, runners: Any) -> None:
    """On a GPU: the same of captured passes that bring prompts over stored prefixes beside steps."""
    with turbo_hf.patch(model, config) as handle:
        outputs, layouts = one_by_one(model, PREFIXED, passes, options(100, max_batch_tokens=512))
        check_near(model, handle, PREFIXED, outputs, passes)
    assert any(key[2] and key[5] for key in layouts)
    assert runners[0].graphs.captures > 2
    assert runners[0]._prompts, "they can be captured"
