"""`decode`: any plan of the launch gives the same, and launches that are replayed keep their workspace."""

from typing import Any

import pytest
import torch
from budgets import check_same, largest
from choices import TWO_MODES
from op_calls import decode
from stores import make_store, tokens

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("mode", TWO_MODES)
@pytest.mark.parametrize("sms", [1, 3, 132])
def test_a_plan_for_any_gpu_gives_the_same(
    sms: int, mode: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A plan made for another GPU covers every tile once, and so differs in the order of float32 sums alone."""
    pytest.importorskip("triton")
    from turbo_hf.ops import gpu  # noqa: PLC0415 - needs Triton
    from turbo_hf.ops.decode import launch as launch_decode  # noqa: PLC0415 - needs Triton

    k, v = tokens(2, 2, 230, 64, device=device), tokens(2, 2, 230, 64, device=device)
    store, q = make_store(k, v, [230, 90], groups=((4, 1), (2, 1)), block=32), tokens(2, 4, 1, 64, device=device)
    own = decode(q, store, scaling=0.125, mode=mode, backend="triton")
    launch_decode._workspace.cache_clear()
    monkeypatch.setattr(gpu, "sms", lambda device: sms)
    check_same(decode(q, store, scaling=0.125, mode=mode, backend="triton"), own, largest(v))
    launch_decode._workspace.cache_clear()


def test_launches_that_are_replayed_keep_their_workspace(device: torch.device) -> None:
    pytest.importorskip("triton")
    from turbo_hf.ops.decode import launch as launch_decode  # noqa: PLC0415 - needs Triton

    k, v = tokens(2, 1, 400, 64, device=device), tokens(2, 1, 400, 64, device=device)
    plans: dict[Any, Any] = {}
    store, q = make_store(k, v, [400, 90], block=32)._replace(plans=plans), tokens(2, 4, 1, 64, device=device)
    want = decode(q, store, scaling=0.125, backend="triton")
    (made,) = plans.values()
    # others have come between, and theirs is the one that is remembered
    launch_decode._workspace.cache_clear()
    got = decode(q, store, scaling=0.125, backend="triton")
    assert torch.equal(got.out, want.out)
    assert list(plans.values()) == [made]
    assert launch_decode._workspace.cache_info().currsize == 0


def test_a_steady_plan_follows_its_rows_in_place(device: torch.device) -> None:
    """Also for rows without a token, and when one row is much longer than the rest."""
    pytest.importorskip("triton")
    from turbo_hf.ops.decode.stream_k import SteadyPlans  # noqa: PLC0415 - as above

    plans = SteadyPlans()
    address, k, v = set(), tokens(3, 2, 700, 64, device=device), tokens(3, 2, 700, 64, device=device)
    for lengths in ([40, 64, 3], [90, 41, 0], [700, 42, 0]):
        store, q = make_store(k, v, lengths, block=32), tokens(3, 4, 1, 64, device=device)
        starts = torch.tensor([int(n == 0) for n in lengths], device=device)
        want = decode(q, store, scaling=0.125, starts=starts, backend="triton")
        for plan in plans.values():
            plan.update(store.sealed.tolist())
        got = decode(q, store._replace(plans=plans), scaling=0.125, starts=starts, backend="triton")
        check_same(got, want, largest(v))
        (made,) = plans.values()
        address.add(made.words.data_ptr())
    assert len(address) == 1
