"""Captured steps whose layers `TurboConfig(compile=True)` compiles: the same tokens, few compilations.

Without a GPU the backends "eager" and "aot_eager" trace as inductor would; inductor itself is tried once.
"""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from choices import flat_config
from graphs_support import NEW, Again, an_index, answer, answer_and_report, ragged
from models import SHAPE, prompts, tiny_llama
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import turbo_hf
from turbo_hf import SparseConfig, TurboCache, TurboConfig
from turbo_hf.attention.step_operator import compiled_attention
from turbo_hf.attention.turbo_attention import compressed
from turbo_hf.config.turbo_config import with_options
from turbo_hf.errors import Unsupported
from turbo_hf.graphs import compiled_layers
from turbo_hf.graphs.compiled_layers import regions_of
from turbo_hf.graphs.step_runner import StepRunner
from turbo_hf.models.versions import CACHE
from turbo_hf.patching import generate_methods as generation

PLAIN = flat_config(block_size=32)
COMPILED = replace(PLAIN, compile=True)
FEW = {"max_new_tokens": 6}
VISITS: dict[str, Any] = {"probes": 3, "window_tokens": 12, "read_all_layers": (0,)}
WINDOWED = {"sliding_window": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {}, "gpt_bigcode": {"n_positions": 128}, "granite": {},
    "llama": {}, "qwen2": {}, "qwen3": {}, "mistral": WINDOWED, "gemma2": WINDOWED, "gemma3_text": WINDOWED,
    "phi3": {}, "olmo2": {}, "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch, runners: list[StepRunner]) -> Iterator[None]:
    """Without inductor; what one test has compiled is not another's."""
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def held(code: Any) -> list[Any]:
    """What torch has compiled for a code."""
    return list(torch._dynamo.eval_frame._debug_get_cache_entry_list(code))


def family(name: str) -> Any:
    torch.manual_seed(0)
    shape = {**SHAPE, "tie_word_embeddings": False, "attn_implementation": None}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**shape, **FAMILIES[name]})).eval()


# --- the same tokens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, runners: list[StepRunner], device: torch.device) -> None:
    model = family(name).to(device)
    want = answer(model, PLAIN, **ragged([40]), **FEW)
    got, report = answer_and_report(model, COMPILED, None, **ragged([40]), **FEW)
    assert torch.equal(got, want)
    assert "; layers compiled (" in report.steps
    assert [runner.captures for runner in runners] == [1, 1]
    assert compilations() == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_the_single_steps_of_drafts_are_compiled(runners: list[StepRunner], device: torch.device) -> None:
    model, drafter = (tiny_llama(num_hidden_layers=1).to(device) for _ in range(2))
    drafter.generation_config.update(num_assistant_tokens=4, assistant_confidence_threshold=0.0)
    found = []
    for config in (PLAIN, COMPILED):
        with turbo_hf.patch(drafter, config) as handle:
            found.append(answer(model, config, **ragged([40]), assistant_model=drafter))
            steps = handle.report().steps
    assert torch.equal(*found)
    assert "; layers compiled (" in steps
    assert all(runner.captures for runner in runners)
    # the passes over drafts are captured as they are
    assert compilations() == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_padded_batch_that_seals_blocks(
    backend: str, runners: list[StepRunner], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(compiled_layers, "BACKEND", backend)
    model = tiny_llama(num_hidden_layers=1).to(device)
    want = answer(model, PLAIN, **ragged())
    same = answer(model, COMPILED, **ragged()) == want
    # inductor sums in another order, and a tie may fall otherwise
    assert same.float().mean() > 0.9 if backend == "inductor" else same.all()
    assert compilations() == 1
    assert all(runner.captures for runner in runners)


@pytest.mark.parametrize(
    ("config", "call"),
    [
        ({"bits": 16}, {}),
        ({"sas": True}, {}),
        ({"low_heads": 0.5}, {}),
        ({"sparse": SparseConfig(selector="saap", **VISITS)}, {}),
        ({"sparse": SparseConfig(selector="kmeans", **VISITS)}, {}),
        # within the model's call
        ({}, {"num_beams": 3}),
    ],
)
def test_what_is_compiled_besides(
    config: dict[str, Any], call: dict[str, Any], runners: list[StepRunner], device: torch.device
) -> None:
    model = tiny_llama().to(device)
    index = an_index(model) if "sparse" in config else None
    want, one = answer_and_report(model, with_options(PLAIN, **config), index, **ragged([56, 25]), **call)
    got, other = answer_and_report(model, with_options(COMPILED, **config), index, **ragged([56, 25]), **call)
    assert torch.equal(got, want)
    assert other.selectivity == one.selectivity
    assert "; layers compiled (" in other.steps
    assert compilations() == 1
    assert runners[-1].captures


# --- how often it is compiled --------------------------------------------------------------------------------------


def test_compiled_once_for_all_steps_and_caches() -> None:
    model = tiny_llama()
    with turbo_hf.patch(model, COMPILED):
        counts = []
        for lengths in ([40], [60], [40, 9], [33], [9, 7, 6, 5, 4], [40, 7]):
            model.generate(**ragged(lengths), max_new_tokens=5, do_sample=False)
            counts.append(compilations())
        with torch.inference_mode():
            model.generate(**ragged([40]), max_new_tokens=5, do_sample=False)
    # each batch size
    assert counts == [1, 1, 2, 2, 3, 3]
    assert compilations() == 4


@pytest.mark.parametrize("asked", [True, "tuned"])
def test_tiles_are_tuned_where_that_is_asked(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[Any] = []

    def compile_(function: Any, **given: Any) -> Any:
        options.append(given["options"])
        return function

    model = tiny_llama(num_hidden_layers=1)
    monkeypatch.setattr(compiled_layers, "BACKEND", "inductor")
    monkeypatch.setattr(torch, "compile", compile_)
    with turbo_hf.patch(model, TurboConfig(compile=asked)) as handle:
        model.generate(**ragged([40]), max_new_tokens=3, do_sample=False)
        assert handle._compiled is not None
        assert copy.deepcopy(handle._compiled).asked is asked
    assert [given.get("coordinate_descent_tuning", False) for given in options] == [asked == "tuned"]


def test_two_models_and_two_patches_are_compiled_apart() -> None:
    model = tiny_llama(num_hidden_layers=1)
    for count in (1, 2):
        with turbo_hf.patch(model, COMPILED) as handle:
            model.generate(**ragged([40]), max_new_tokens=5, do_sample=False)
            assert compilations() == count
            assert handle._compiled is not None
            ((_, code),) = handle._compiled._functions.values()
            assert held(code)
        assert not held(code)


# --- what is not compiled ------------------------------------------------------------------------------------------


def breaks(norm: Any) -> Callable[[Tensor], Tensor]:
    forward = type(norm).forward
    return lambda x: forward(norm, x) * (1 if bool(x.sum() > -1e9) else 2)


@pytest.mark.parametrize(("asked", "said"), [(True, "compile=True: "), ("tuned", "compile='tuned': ")])
def test_a_model_that_cannot_be_compiled(asked: Any, said: str, runners: list[StepRunner]) -> None:
    model = tiny_llama()
    norm = model.model.layers[1].input_layernorm
    norm.forward = breaks(norm)
    want, before = answer(model, PLAIN, **ragged()), dict(vars(model))
    with turbo_hf.patch(model, replace(COMPILED, compile=asked)) as handle:
        with pytest.warns(UserWarning, match=f"{said}layers are not compiled: "):
            got = model.generate(**ragged(), max_new_tokens=NEW, do_sample=False)
        assert torch.equal(got, want)
        # said once, tried once
        assert torch.equal(model.generate(**ragged(), max_new_tokens=NEW, do_sample=False), want)
        assert "; layers not compiled (" in handle.report().steps
    assert vars(model) == before
    assert all(runner.captures for runner in runners)


def test_a_step_whose_capture_fails_is_captured_as_it_is(
    monkeypatch: pytest.MonkeyPatch, runners: list[StepRunner], device: torch.device
) -> None:
    model = tiny_llama().to(device)
    want = answer(model, PLAIN, **ragged())

    class Fails(Again):
        def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
            if not self.captured:
                self.captured += 1
                raise RuntimeError("an operation is not permitted")
            return super().capture(step)

    monkeypatch.setattr(generation, "cuda_device", Fails)
    with pytest.warns(UserWarning, match="cannot be captured in a CUDA graph: an operation is not permitted"):
        got, report = answer_and_report(model, COMPILED, None, **ragged())
    assert torch.equal(got, want)
    assert "layers not compiled (it cannot be captured" in report.steps
    assert runners[-1].captures


def test_a_hook_of_the_user_is_called_in_every_step() -> None:
    model = tiny_llama()
    called: list[int] = []
    with turbo_hf.patch(model, COMPILED) as handle:
        hook = model.model.layers[0].mlp.register_forward_hook(lambda *args: called.append(1))
        with pytest.warns(UserWarning, match=r"not compiled: model.layers.0.mlp has hooks"):
            model.generate(prompts(1, 40), max_new_tokens=10, do_sample=False)
        hook.remove()
        assert len(called) == 10
        assert "layers not compiled (model.layers.0.mlp has hooks" in handle.report().steps
        model.generate(prompts(1, 40), max_new_tokens=10, do_sample=False)
        assert "layers compiled (" in handle.report().steps
    assert len(called) == 10


def test_steps_that_are_not_captured_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"compile=True compiles .* and cuda_graphs=False captures none"):
        replace(COMPILED, cuda_graphs=False)
    model, ids = tiny_llama(num_hidden_layers=1), prompts(1, 40)
    want = answer(model, PLAIN, input_ids=ids, **FEW)
    monkeypatch.undo()
    with turbo_hf.patch(model, COMPILED) as handle:
        with pytest.warns(UserWarning, match="compile=True: layers are not compiled: the model is on cpu"):
            assert torch.equal(model.generate(ids, do_sample=False, **FEW), want)
        assert "; layers not compiled (the model is on cpu)" in handle.report().steps
    assert not compilations()


def test_uncompressed_layers() -> None:
    model = tiny_llama()
    model.model.layers[1].self_attn.is_cross_attention = True
    with pytest.warns(UserWarning, match="compile=True: layer 1 is dense"):
        handle = turbo_hf.patch(model, COMPILED, strict="warn")
    with handle:
        assert "layer 1 is dense, so that layers are not compiled" in str(handle.report())
        model.generate(prompts(1, 40), max_new_tokens=4, do_sample=False)
    assert not compilations()


def test_a_cache_that_was_read_dequantized_is_not_compiled_over() -> None:
    model, ids = tiny_llama(), prompts(1, 40)
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    with turbo_hf.patch(model, COMPILED, strict="warn") as handle, torch.no_grad():
        cache = handle.new_cache()
        with pytest.warns(UserWarning, match="the attention mask"):
            model(ids, attention_mask=mask, **{CACHE: cache}, use_cache=True)
        assert cache.decompressed
        model.generate(torch.cat((ids, ids[:, :1]), 1), **{CACHE: cache}, max_new_tokens=4, do_sample=False)
    assert not compilations()


def test_a_mask_or_keyword_of_their_own_ends_the_attempt() -> None:
    q, k = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 1, 16)
    module: Any = None
    for more in ({"attention_mask": torch.ones(1, 1)}, {"position_bias": k}, {"is_causal": False}):
        options: dict[str, Any] = {"attention_mask": None, **more}
        with pytest.raises(Unsupported, match="a mask or a keyword"):
            compiled_attention(module, q, k, k, **options)
    with pytest.raises(RuntimeError, match="outside of a compiled layer"):
        compiled_attention(module, q, k, k, None)


def test_layers_of_a_kind_that_is_not_known() -> None:
    model = tiny_llama()
    assert [region.path for region in regions_of(model)] == [["self_attn"]] * 2
    layer = model.model.layers[1]
    layer.self_attn, model.model.layers[0].other = torch.nn.Identity(), layer.self_attn
    with pytest.raises(Unsupported, match="several attention modules"):
        regions_of(model)


# --- what is left behind -------------------------------------------------------------------------------------------


def test_copies_compile_their_own() -> None:
    model, ids = tiny_llama(num_hidden_layers=1), prompts(1, 40)
    with turbo_hf.patch(model, COMPILED):
        want = model.generate(ids, max_new_tokens=5, do_sample=False)
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for count, twin in enumerate(twins, start=2):
        assert torch.equal(twin.generate(ids, max_new_tokens=5, do_sample=False), want)
        assert compilations() == count


def test_a_step_that_breaks_off_leaves_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_llama(), prompts(1, 40)
    with turbo_hf.patch(model, COMPILED) as handle:
        want = model.generate(ids, max_new_tokens=6, do_sample=False)
        cache = handle.new_cache()
        made = iter(range(7))
        attend = compressed

        def fails(*args: Any) -> Tensor:
            if next(made) == 3:
                raise KeyboardInterrupt
            return attend(*args)

        # in the second layer of the second step that is compiled
        monkeypatch.setattr(compiled_layers, "compressed", fails)
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, **{CACHE: cache}, max_new_tokens=6, do_sample=False)
        monkeypatch.setattr(compiled_layers, "compressed", attend)
        with pytest.raises(ValueError, match="broke off"):
            model(ids[:, :1], **{CACHE: cache})
        cache.reset()
        assert torch.equal(model.generate(ids, **{CACHE: cache}, max_new_tokens=6, do_sample=False), want)


def test_a_layer_whose_forward_is_replaced_later() -> None:
    """Then its own is called in every step, and stays."""
    model, ids = tiny_llama(), prompts(1, 40)
    layer, called = model.model.layers[1], list[int]()

    def forward(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return type(layer).forward(layer, *args, **kwargs)

    with turbo_hf.patch(model, COMPILED) as handle:
        want = model.generate(ids, max_new_tokens=6, do_sample=False)
        layer.forward = forward
        with pytest.warns(UserWarning, match="the forward method of a layer has been replaced"):
            assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), want)
        assert "layers not compiled (the forward method" in handle.report().steps
    assert len(called) == 6
    assert layer.forward is forward


def test_other_threads_and_the_model_keep_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread's steps call compiled layers, another one's pass stores its tokens in its own cache."""
    model, ids = tiny_llama(), prompts(1, 40)
    before = [dict(vars(module)) for module in model.modules()]
    lengths: list[int] = []

    def passes(handle: Any) -> None:
        cache = handle.new_cache()
        with torch.no_grad():
            model(ids, **{CACHE: cache})
        lengths.append(cache.get_seq_length())

    with turbo_hf.patch(model, COMPILED) as handle:
        want = model.generate(ids, max_new_tokens=6, do_sample=False)

        def attends(*args: Any) -> Tensor:
            if not lengths:
                other = threading.Thread(target=passes, args=(handle,))
                other.start()
                other.join()
            return compressed(*args)

        monkeypatch.setattr(compiled_layers, "compressed", attends)
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), want)
        assert not any("forward" in vars(layer) for layer in model.model.layers)
    assert lengths == [40]
    assert [dict(vars(module)) for module in model.modules()] == before


# --- on a GPU ------------------------------------------------------------------------------------------------------


def require_ties(
    model: Any, config: TurboConfig, want: torch.Tensor, got: torch.Tensor, padding: Sequence[int]
) -> None:
    """Where rows of `got` first differ from `want`, the two tokens are tied within what quantization itself costs.

    A sum in another order rounds some code the other way, which changes logits as quantization does. padding: columns
    of each row before its first token.
    """
    for row, (tokens, others, first) in enumerate(zip(want, got, padding, strict=True)):
        different = (tokens != others).nonzero()
        if not len(different):
            continue
        at = int(different[0])
        with torch.no_grad():
            plain = model(tokens[None, first:at]).logits[0, -1].float()
            with turbo_hf.patch(model, config) as handle:
                cache = handle.new_cache()
                model(tokens[None, first : at - 1], **{CACHE: cache})
                rounded = model(tokens[None, at - 1 : at], **{CACHE: cache}).logits[0, -1].float()
        gap = rounded[tokens[at]] - rounded[others[at]]
        assert abs(gap) <= 2 * (rounded - plain).abs().max(), f"row {row}, column {at}: no tie, {gap:.3g} apart"


def test_a_tie_is_told_from_another_answer() -> None:
    model, given = family("llama"), ragged([40, 9])
    want, padding = answer(model, PLAIN, **given, max_new_tokens=40), [0, 31]
    require_ties(model, PLAIN, want, want, padding)
    with torch.no_grad():
        worst = model(want[:1, :60]).logits[0, -1].argmin()
    wrong = want.clone()
    wrong[0, 60] = worst
    with pytest.raises(AssertionError, match="row 0, column 60: no tie"):
        require_ties(model, PLAIN, want, wrong, padding)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt_oss"])
def test_on_a_gpu_by_inductor(name: str, runners: list[StepRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "BACKEND", "inductor")
    model, given = family(name).cuda(), ragged()
    want = answer(model, PLAIN, max_new_tokens=300, **given)
    got, report = answer_and_report(model, COMPILED, None, max_new_tokens=300, **given)
    assert "; layers compiled (" in report.steps, report.steps
    require_ties(model, PLAIN, want, got, (given["attention_mask"] == 0).sum(1).tolist())
    assert 1 <= runners[-1].captures <= 8
    assert compilations() == 1


@pytest.mark.gpu
def test_on_a_gpu_steps_are_compiled_once(runners: list[StepRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "BACKEND", "inductor")
    model = tiny_llama(attn_implementation="sdpa").to("cuda", torch.bfloat16)
    ids = prompts(1, 40).cuda()
    with turbo_hf.patch(model, COMPILED) as handle:
        model.generate(ids, max_new_tokens=5, do_sample=False)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for tokens in (300, 40):
                cache = handle.new_cache()
                model.generate(ids, **{CACHE: cache}, max_new_tokens=tokens, do_sample=False)
                assert isinstance(cache, TurboCache)
                assert cache.get_seq_length() == 40 + tokens - 1
    assert compilations() == 1
    assert all(runner.captures for runner in runners)
