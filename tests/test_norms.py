"""RMSNorm in one launch, in place of the modules of Transformers."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from models import prompts, tiny_llama
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

import turbo_hf
from turbo_hf.config.turbo_config import Expert, TurboConfig
from turbo_hf.ops.kernel_norm import launch_rms_norm
from turbo_hf.patching.norms import FORMS, Form, FusedNorm, fits, form_of, fused_norms, restore_norms

KINDS: dict[Any, Form | None] = {
    LlamaRMSNorm: FORMS[0],
    Olmo2RMSNorm: FORMS[1],
    Gemma4RMSNorm: FORMS[1],
    Gemma3RMSNorm: FORMS[2],
    # which also takes a gate
    Qwen3NextRMSNormGated: None,
}


def norm_of(kind: Any, dim: int = 96, **options: Any) -> Any:
    """A module of this class, its weight random."""
    module = kind(dim, eps=1e-5, **options)
    for weight in module.parameters():
        torch.nn.init.normal_(weight.data)
    return module


def fuse(*modules: Any) -> None:
    """As `patch` does."""
    for module, kind in fused_norms(modules):
        module.__class__ = kind


@pytest.fixture
def serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel computes also without a GPU, in Triton's interpreter, and with gradients on."""
    monkeypatch.setattr("turbo_hf.patching.norms._served", fits)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_module_computes_is_found(kind: Any) -> None:
    assert form_of(norm_of(kind)) == KINDS[kind]
    # all of one number, as in a model that has not been trained
    assert form_of(kind(96, eps=1e-6)) == KINDS[kind]


def test_another_formula_is_none_of_ours() -> None:
    class CenteredRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))

    class OtherEpsilonRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            self.variance_epsilon, eps = 2 * self.variance_epsilon, self.variance_epsilon
            try:
                return super().forward(hidden_states)
            finally:
                self.variance_epsilon = eps

    class ClampedRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states.clamp(-1e4, 1e4))

    for kind in (CenteredRMSNorm, OtherEpsilonRMSNorm, ClampedRMSNorm):
        assert form_of(norm_of(kind)) is None, kind


@pytest.mark.parametrize("form", [*FORMS, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_is_as_near_as_plain_torch(form: Form | None, dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter cuts bfloat16 off")
    kind = Gemma4RMSNorm if form is None else next(kind for kind, at in KINDS.items() if at == form)
    module = norm_of(kind, **({} if form else {"with_scale": False})).to(device, dtype)
    if form is None:
        module._parameters.clear()
    form = form or FORMS[1]
    x = torch.randn(2, 5, 3, 2 * 96, device=device).to(dtype)
    for given in (x[..., :96].contiguous(), x[..., 32:128], x[..., ::2], x[:0, ..., :96], x.transpose(1, 2)[..., :96]):
        weight = module._parameters.get("weight")
        with torch.no_grad():
            want, got = module(given), launch_rms_norm(given, weight, 1e-5, *form)
            wide = given.double()
            exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
            exact = exact if weight is None else exact * (weight.double() + form.plus)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if got.numel():
            assert got.stride() == want.stride()
            missed, plain = ((at.double() - exact).abs().max().item() for at in (got, want))
            # what plain torch misses, and a rounding of the greatest number in the last place
            assert missed <= plain + torch.finfo(dtype).eps * exact.abs().max().item()
            if dtype != torch.float32:
                assert (got == want).float().mean() >= 0.99


def test_a_patch_fuses_them_and_remove_gives_them_back() -> None:
    model = tiny_llama()
    kinds = [type(module) for module in model.modules()]
    names, text = list(model.state_dict()), repr(model)
    before = model(prompts(1, 20)).logits
    handle = turbo_hf.patch(model)
    norms = [module for module in model.modules() if isinstance(module, FusedNorm)]
    assert {type(module).__name__ for module in norms} == {"LlamaRMSNorm"}
    assert len(norms) == 2 * len(model.model.layers) + 1
    assert (list(model.state_dict()), repr(model)) == (names, text)
    for copied in (copy.deepcopy(model.model.norm), pickle.loads(pickle.dumps(model.model.norm))):
        assert type(copied) is LlamaRMSNorm
        assert torch.equal(copied.weight, model.model.norm.weight)
    handle.remove()
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(model(prompts(1, 20)).logits, before)
    with turbo_hf.patch(model, TurboConfig(expert=Expert(backend="reference"))):
        assert not any(isinstance(module, FusedNorm) for module in model.modules())


def test_what_is_not_plain_stays_with_the_module() -> None:
    module, replaced = norm_of(LlamaRMSNorm), norm_of(LlamaRMSNorm)
    replaced.forward = lambda x: x
    fuse(module, replaced)
    assert [FusedNorm in type(each).__mro__ for each in (module, replaced)] == [True, False]
    x = torch.randn(3, 96, requires_grad=True)
    want = LlamaRMSNorm.forward(module, x)
    assert torch.equal(module(x), want)
    assert torch.equal(module(hidden_states=x), want)
    module(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(torch.compile(module, fullgraph=True, backend="eager")(x), want)
    restore_norms([(module, type(module))])
    assert type(module) is LlamaRMSNorm


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma3RMSNorm, Gemma4RMSNorm])
def test_a_fused_module_computes_what_it_did(kind: Any, serves: None, device: torch.device) -> None:
    module, bare, x = norm_of(kind).to(device), norm_of(Gemma4RMSNorm, with_scale=False), torch.randn(3, 96).to(device)
    want, plain = module(x), bare(x)
    fuse(module, bare)
    # as torch.nn.DataParallel has it: its weight is no parameter
    replica: Any = module._replicate_for_data_parallel()
    replica.weight = module.weight.detach()
    for got in (module(x), replica(x), module(hidden_states=x) if kind is LlamaRMSNorm else module(x)):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(bare(x), plain)


def test_weights_that_the_kernel_cannot_read_stay_with_the_module(serves: None, device: torch.device) -> None:
    module, x = norm_of(LlamaRMSNorm).to(device), torch.randn(3, 96, device=device)
    # one number for all channels, every second number, another dtype
    for weight in (torch.rand(1), torch.rand(1).expand(96), torch.rand(192)[::2], torch.rand(96).double()):
        module.weight = torch.nn.Parameter(weight.to(device))
        want = LlamaRMSNorm.forward(module, x)
        fuse(module)
        torch.testing.assert_close(module(x), want)
        restore_norms([(module, type(module))])
    assert not fits(x.double(), torch.ones(96, device=device).double())


def test_the_weight_of_a_parametrized_module_is_its_own(serves: None, device: torch.device) -> None:
    class Double(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    module, x = norm_of(LlamaRMSNorm).to(device), torch.randn(3, 96, device=device)
    want = 2 * module(x)
    norms = fused_norms([module])
    fuse(module)
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Double())
    torch.testing.assert_close(module(x), want)
    restore_norms(norms)
    torch.testing.assert_close(module(x), want)


def test_each_module_is_asked_for_its_formula() -> None:
    class FlaggedRMSNorm(LlamaRMSNorm):
        def __init__(self, dim: int, eps: float, plus: bool) -> None:
            super().__init__(dim, eps)
            self.plus = plus

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            wide = hidden_states.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return (wide * (self.plus + self.weight.float())).to(hidden_states.dtype)

    found = fused_norms([norm_of(FlaggedRMSNorm, plus=plus) for plus in (False, True)])
    assert [fused_norms([module])[0][1] for module, _ in found] == [kind for _, kind in found]
    assert found[0][1] is not found[1][1]


def test_other_channels_are_none_of_ours() -> None:
    class GroupsRMSNorm(Gemma4RMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states.unflatten(-1, (-1, 64))).flatten(-2)

    class SecondRMSNorm(Gemma4RMSNorm):
        def _norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states * torch.rsqrt(hidden_states.pow(2).mean(1, keepdim=True) + self.eps)

    class ScaledRMSNorm(Gemma4RMSNorm):
        def __init__(self, dim: int, **options: Any) -> None:
            super().__init__(dim, **options)
            self.scale = torch.ones(1)

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * self.scale.to(hidden_states.dtype)

    for kind in (GroupsRMSNorm, SecondRMSNorm, ScaledRMSNorm):
        assert form_of(norm_of(kind, with_scale=False)) is None, kind


def test_what_is_traced_stays_with_the_module(serves: None) -> None:
    module = norm_of(LlamaRMSNorm)
    fuse(module)
    x, other = torch.randn(2, 3, 96)
    traced = torch.jit.trace(module, (x,))
    torch.testing.assert_close(traced(other), LlamaRMSNorm.forward(module, other))
    assert inspect.signature(module.forward) == inspect.signature(LlamaRMSNorm(96).forward)


@pytest.mark.gpu
def test_on_a_gpu_a_patched_model_is_as_near_to_float32() -> None:
    exact = tiny_llama().to("cuda")
    model, ids = copy.deepcopy(exact).bfloat16(), prompts(2, 40).to("cuda")
    with torch.no_grad():
        want, before = exact(ids).logits, model(ids).logits
        with turbo_hf.patch(model):
            norm, x = model.model.norm, torch.randn(4, 7, 64, device="cuda", dtype=torch.bfloat16)
            same = (norm(x) == LlamaRMSNorm.forward(norm, x)).float().mean().item()
            after = model(ids, use_cache=False).logits
        assert torch.equal(model(ids).logits, before)
    assert same >= 0.99
    missed, plain = ((logits.float() - want).norm().item() for logits in (after, before))
    # two draws of the same noise
    assert missed < 1.5 * plain
