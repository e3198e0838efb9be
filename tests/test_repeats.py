"""Launches of steps that are repeated with other addresses: the same results as when each is made anew."""

import copy
import ctypes
from typing import Any

import pytest
import torch
from choices import flat_config
from models import prompts, tiny_llama, tiny_mistral

import turbo_hf
from turbo_hf import TurboConfig
from turbo_hf.cache.storage import LayerStorage
from turbo_hf.models.versions import CACHE
from turbo_hf.ops.kernel_launch import addressed


def _at(like: torch.Tensor, address: int) -> torch.Tensor:
    """The tensor at an address, of the type and strides of another one."""
    count = sum((n - 1) * stride for n, stride in zip(like.shape, like.stride(), strict=True)) + 1
    held = (ctypes.c_char * (count * like.itemsize)).from_address(address)
    return torch.frombuffer(held, dtype=like.dtype).as_strided(like.shape, like.stride())


def _tensors(like: Any, given: Any) -> Any:
    """`given` with tensors in place of addresses, where `like` has tensors."""
    if isinstance(like, torch.Tensor):
        return _at(like, given) if like.numel() else like
    if isinstance(like, tuple):
        parts = [_tensors(*pair) for pair in zip(like, given, strict=True)]
        return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)
    return given


class Again:
    """A launch in the interpreter that is repeated as `Launch` is: from addresses alone."""

    count = 0

    def __init__(self, kernel: Any, grid: Any, args: Any, options: Any):
        self.made, self.args = (kernel, grid, args, options), addressed(args, [])

    def again(self, *first: Any) -> None:
        kernel, grid, args, options = self.made
        kernel[grid](*_tensors(args, (*first, *self.args[len(first) :])), **options)
        Again.count += 1


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where launches are kept."""
    if torch.cuda.is_available():
        return
    Again.count = 0

    def launch(kernel: Any, x: torch.Tensor, grid: Any, *args: Any, **options: Any) -> Again:
        kernel[grid](*args, **options)
        return Again(kernel, grid, args, options)

    for name in ("store", "decode"):
        monkeypatch.setattr(f"turbo_hf.ops.{name}.launch.launch", launch)


TRITON: dict[str, Any] = {"backend": "triton", "cuda_graphs": False, "attention": "native"}
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("options", "window", "padding", "dtype"),
    [
        ({**TRITON, "bits": 4}, None, [0], F32),
        ({**TRITON, "bits": 4, "low_heads": 0.5}, None, [0, 5], F32),
        ({**TRITON, "bits": 8}, 3, [0], F32),
        # its threshold falls with each token
        ({**TRITON, "bits": 4, "sas": True}, None, [0], F32),
    ],
)
def test_repeated_steps_are_those_made_anew(
    options: dict[str, Any], window: int | None, padding: list[int], dtype: torch.dtype, repeated: None,
    monkeypatch: pytest.MonkeyPatch, device: torch.device,
) -> None:  # fmt: skip
    """The same bits, over sealed blocks, room that grows, and blocks that leave a window; a copy goes on by itself."""
    falls = "turbo_hf.attention.turbo_attention.sas_threshold"
    monkeypatch.setattr(falls, lambda config, tokens: -3 - tokens / 64 if config.expert.sas else None)
    model = (tiny_llama() if window is None else tiny_mistral(window)).to(device, dtype)
    first, last = 30, 36
    ids = prompts(len(padding), last).to(device)
    mask = torch.stack([(torch.arange(last, device=device) >= count).long() for count in padding])
    seen: list[list[torch.Tensor]] = []
    made: list[int] = []
    with turbo_hf.patch(model, flat_config(block_size=32, **options)) as handle, torch.no_grad():
        for kept in (True, False):
            if not kept:
                monkeypatch.setattr(LayerStorage, "to_repeat", lambda self, key: (self.kv_store(), None))
            cache = handle.new_cache()
            caches, logits = [cache], [model(ids[:, :first], attention_mask=mask[:, :first], **{CACHE: cache}).logits]
            for step in range(first, last):
                part = {"input_ids": ids[:, step : step + 1], "attention_mask": mask[:, : step + 1]}
                # what is kept in one mode is used in the other
                with torch.inference_mode(step % 3 == 0):
                    logits += [model(**part, **{CACHE: each}).logits for each in caches]
                if step == first + 2:
                    caches.append(copy.deepcopy(cache))
            seen.append(logits)
            made.append(Again.count)
    assert all(map(torch.equal, *seen))
    assert made[0] == made[1]
    if device.type != "cuda":
        assert made[0] > 10


def test_a_copy_keeps_no_addresses() -> None:
    layer = turbo_hf.cache.layer.TurboLayer(TurboConfig())
    layer._repeats.known["key"] = {"append": ctypes.c_char()}
    assert not copy.deepcopy(layer)._repeats.known
