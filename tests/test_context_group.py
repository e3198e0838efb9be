"""One context over two ranks: their tokens are those of one process, each stores half of them, and both do the same."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from context_ranks import Asked
from models import tiny_llama
from op_calls import ops_like
from prefill_support import inputs, random_past
from ranks_support import COUNT, both, seen_by_ranks
from stores import make_store
from torch import Tensor
from transformers.distributed.configuration_utils import DistributedConfig
from two_ranks import CONFIGS, HEADS, answer

from turbo_hf.layout import Rounding, Scoring
from turbo_hf.parallel.context import ContextRanks

SAME = "ValueError: the ranks of a context group must make the same calls over the same tokens, and "


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu2)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What both ranks have seen; and what one process is asked, which sees the same without a group."""
    folder = tmp_path_factory.mktemp("context")
    return seen_by_ranks("context_ranks.py", folder, request.param), Asked(None, None, request.param)


def alike(ranks: Any, seen: Any, expected: Any) -> bool:
    """Whether the ranks' tokens are those of one process; on GPUs, in float32, the first ones of each row."""
    exact = ranks[1].dtype == torch.float64
    return bool(seen == expected if exact else [row[:6] for row in seen] == [row[:6] for row in expected])


def of_cpu(ranks: Any) -> None:
    """The rest is asked for on CPUs alone."""
    if "refused" not in ranks[0][0]:
        pytest.skip("ranks on GPUs are asked a part of what ranks on CPUs are")


def test_tokens_of_ragged_prompts_whole_and_in_chunks(ranks: Any) -> None:
    seen, report = both(ranks, "presets")
    expected, alone = ranks[1].presets()
    assert not alone
    assert report == "one context over 2 ranks: block i of a row is on rank i modulo 2"
    for name in seen:
        for got, truth in zip(seen[name][:-1], expected[name][:-1], strict=True):
            assert alike(ranks, got, truth), name
        if name in ("int8", "16 bit"):
            answers = [text.partition(".")[0] for text in seen[name][-1]]
            assert answers == [" 2765429", " 1999998", " 1234567"], name


def test_each_rank_holds_half(ranks: Any) -> None:
    whole, _, compression = ranks[1].memory()
    for own, count, each in (found["memory"] for found in ranks[0]):
        assert own["codes"] < whole["codes"] * 0.52
        assert own["open"] == whole["open"]
        assert count == COUNT
        # of what it holds
        assert each == pytest.approx(compression, rel=0.05)
    assert sum(found["memory"][0]["codes"] for found in ranks[0]) == pytest.approx(whole["codes"], rel=0.05)


def test_turns_crops_and_rows_go_on_alike(ranks: Any) -> None:
    pairs = [(torch.tensor(x), torch.tensor(y)) for x, y in zip(both(ranks, "logits"), ranks[1].logits(), strict=True)]
    off = [float((got - truth).abs().max() / truth.abs().max()) for got, truth in pairs]
    # float32 of the log-sum-exps, and where a value lies between two codes, the cache then holds the other
    assert max(off) < (2e-2 if ranks[1].dtype == torch.float64 else 5e-2), off
    if ranks[1].dtype == torch.float64:
        assert sum(x < 1e-5 for x in off) >= len(off) - 4, off


def test_beams_and_drafts(ranks: Any) -> None:
    of_cpu(ranks)
    for got, truth in zip(both(ranks, "beams_and_drafts"), ranks[1].beams_and_drafts(), strict=True):
        assert alike(ranks, got, truth)


def test_captured_steps_are_those_that_are_launched(ranks: Any) -> None:
    seen = both(ranks, "graphs")
    assert seen["failed"] == [row[:8] for row in seen["greedy"][0]]
    assert seen.pop("sampled").startswith(f"{SAME}input_ids is not the same")
    del seen["failed"]
    for kind, (launched, captured, steps, captures) in seen.items():
        assert captured == launched, kind
        assert steps.startswith("decode steps: CUDA graphs")
        # of beams and drafts, pages were reserved once
        assert sum(captures) > (kind == "greedy"), kind


def test_no_rank_waits_for_ever(ranks: Any) -> None:
    of_cpu(ranks)
    first, second = (found["groups"] for found in ranks[0])
    assert first["other"] == second["other"]
    assert first["other"].startswith("ValueError: the ranks of this context group must all call patch with the same gr")
    assert first["absent"].startswith("ValueError: rank 1 has not called patch with group ")
    assert first["alone"].startswith("ValueError: a rank of this context group has not made this call in time, ")


def test_layers_with_windows_stay_whole(ranks: Any) -> None:
    of_cpu(ranks)
    (tokens, first), (others, second) = (found["windows"] for found in ranks[0])
    expected, whole = ranks[1].windows()
    assert tokens == others
    assert alike(ranks, tokens, expected)
    assert first[0] == second[0] == whole[0]
    assert first[1]["codes"] + second[1]["codes"] == whole[1]["codes"]


def test_pairs_that_share_a_model_share_a_context(tmp_path: Path) -> None:
    if "dp_replicate_size" not in inspect.signature(DistributedConfig).parameters:
        pytest.skip("this version of Transformers splits a model among all processes")
    model = tiny_llama(**HEADS)
    model.save_pretrained(tmp_path / "llama")
    seen = seen_by_ranks("grid_ranks.py", tmp_path, "cpu", 4)
    for name, (tokens, said, *_, processes) in seen[0]["answers"].items():
        expected, _, memory = answer(model.double(), CONFIGS[name])
        assert [found["answers"][name][0] for found in seen] == [tokens] * 4
        assert tokens == expected
        assert said.startswith("one context over 2 ranks")
        assert "; tensor parallel over 2 ranks" in said
        assert sum(found["answers"][name][3]["codes"] for found in seen) == memory.by_kind["codes"]
        assert processes == 4
    same, _, weights = seen[0]["refused"]
    # two ranks that wait for two others
    for rank, found in enumerate(seen[:2]):
        assert found["refused"][1].startswith(f"ValueError: rank {rank + 2} has not called patch with group ")
    assert not seen[2]["refused"][1]
    assert all(found["refused"][2] == weights for found in seen)
    assert same.startswith("ValueError: context_group: its ranks [0, 1] share the heads of this model")
    assert weights.startswith("ValueError: the ranks of this context group must all be patched alike; weights of")


@pytest.mark.parametrize("before", [(4, 4), (2, 0)])
def test_three_ranks_share_out_blocks(before: tuple[int, int]) -> None:
    opened, whole = [7 * 32 + 5, 4 * 32], [7, 4]
    k, v = torch.randn(2, 2, 1, 300, 16).unbind(0)
    store = make_store(k, v, opened, block=32, sealed=[0, 0])
    held: dict[tuple[int, int], Tensor] = {}
    for rank in range(3):
        context = ContextRanks(rank, 3)
        assert [n for n in range(9) if context.holds(n)] == list(range(9))[rank::3]
        assert [context.own(n) for n in range(9)] == [len(range(n)[rank::3]) for n in range(9)]
        own, most = context.own_blocks(store, before, whole)
        for row, tokens in enumerate(own.open_len.tolist()):
            assert tokens <= most * 32
            # blocks of the row by their number
            blocks = [n for n in range(before[row], before[row] + whole[row]) if context.holds(n)]
            assert tokens == len(blocks) * 32
            for place, block in enumerate(blocks):
                here, there = slice(place * 32, place * 32 + 32), (block - before[row]) * 32
                assert torch.equal(own.k_open[row, :, here], store.k_open[row, :, there : there + 32])
                assert torch.equal(own.v_open[row, ..., here], store.v_open[row, ..., there : there + 32])
                assert torch.equal(own.v_scale[row, :, here], store.v_scale[row, :, there : there + 32])
                held[row, block] = own.k_scale[row, :, here]
    assert len(held) == sum(whole)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("mode", ["turbo", "native"])
def test_parts_of_the_keys_merge_to_the_whole(mode: str, backend: str, device: torch.device) -> None:
    q, k, v = inputs(2, 40, device)
    past, starts = random_past([150, 40], k), torch.tensor([3, 0], device=device)
    scoring, rounding = Scoring(0.1, softcap=20.0, sinks=torch.ones(q.shape[1], device=device)), Rounding(mode, 64)

    def attend(past: Any, scoring: Scoring, **options: Any) -> Any:
        return ops_like(q, backend).prefill(q, k, v, scoring, rounding, past=past, starts=starts, **options)

    def merge(part: Any, other: Any) -> Tensor:
        lse = torch.stack((part.lse, other.lse))
        out = torch.stack((part.out, other.out)) * lse.softmax(0).nan_to_num()[..., None].to(part.out.dtype)
        return out.sum(0)

    whole, own = attend(past, scoring), attend(None, scoring)
    behind = attend(past, scoring._replace(sinks=None), own=False)
    assert (merge(own, behind) - whole.out).abs().max() < 2e-3 * whole.out.abs().max()
    assert torch.allclose(torch.logaddexp(own.lse, behind.lse), whole.lse, atol=1e-4)
    empty = past._replace(sealed=past.sealed * 0, open_len=past.open_len * 0, sealed_host=None)
    assert bool((attend(empty, scoring._replace(sinks=None), own=False).lse == -torch.inf).all())
    assert not attend(empty, scoring._replace(sinks=None), own=False).out.any()


def test_what_is_refused_in_the_same_words(ranks: Any) -> None:
    of_cpu(ranks)
    said = both(ranks, "refused")
    assert not said.pop("checked")
    alike = "ValueError: the ranks of this context group must all be patched alike; "
    assert said.pop("configs").startswith(f"{alike}config of rank 0: TurboConfig(bits=4")
    assert said.pop("weights").startswith(f"{alike}weights of rank 0: ")
    assert said.pop("group").startswith("TypeError: context_group must be a process group of torch.distributed")
    assert said.pop("windows").startswith("Unsupported: context_group: every compressed layer has a sliding window")
    for words in said.values():
        assert words.startswith("Unsupported: context_group is not combined with ")
    member, outsider = (found["outside"] for found in ranks[0])
    # a group of one rank is none
    assert not member
    assert outsider.startswith("ValueError: context_group: this process is not in the group")


def test_passes_that_differ_end_in_the_same_words(ranks: Any) -> None:
    of_cpu(ranks)
    said = both(ranks, "differing")
    assert said["sampled"].startswith(f"{SAME}input_ids is not the same")
    assert len(said["alike"]) == 2
    assert said["tokens"].startswith(f"{SAME}input_ids is not the same")
    assert said["shape"].startswith(f"{SAME}the shape of input_ids is not the same")
    assert said["crop"].startswith(f"{SAME}the call is not the same")
    assert said["rows"].startswith(f"{SAME}what the caches hold is not the same")
    assert said["broken"].startswith("ValueError: an earlier crop() over this TurboCache broke off")
    for case in ("whole", "other patch"):
        assert said[case].startswith("ValueError: this TurboCache is not spread over the ranks"), case
    for case in ("keys", "mask", "no patch"):
        assert said[case].startswith("Unsupported: layer 0: keys and values of a cache that is spread"), case
    assert said["save"].startswith("Unsupported: a cache that ranks share is not saved")
    assert said["pickle"].startswith("Unsupported: a model or cache of a context group is not pickled")
    assert "one context over several ranks is not served" in said["serving"]


def test_a_pass_that_broke_off_is_refused_by_both(ranks: Any) -> None:
    of_cpu(ranks)
    error, again, (after, without), other = both(ranks, "broken_off")
    assert error.startswith("ValueError: layer 1: keys or values hold NaN or Inf")
    assert again.startswith("ValueError: ")
    assert torch.allclose(torch.tensor(after), torch.tensor(without), rtol=1e-4, atol=1e-4)
    assert other.startswith(f"{SAME}what the caches hold is not the same")
