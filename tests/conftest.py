"""Fixtures and settings of all tests: devices, seeds, no network, poisoned memory."""

import gc
import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from quick_interpreter import quicken

# before anything imports huggingface_hub: no test may need the network
os.environ["HF_HUB_OFFLINE"] = "1"
# before anything imports inductor, whose compiler otherwise now and then finds headers that another process replaces
os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"


def _marked() -> str:
    """What follows -m."""
    return " ".join(expression for flag, expression in zip(sys.argv, sys.argv[1:], strict=False) if flag == "-m")


def _is_wanted(mark: str, expression: str) -> bool:
    """Whether a mark expression names a mark, and not what has it not."""
    return mark in re.sub(r"\bnot\s+\w+", "", expression)


# before torch looks for a GPU: a run is on it or without it, and without it kernels run in Triton's interpreter; the
# processes of a run have what the first has chosen
if "PYTEST_XDIST_WORKER" not in os.environ and not _is_wanted("gpu", _marked()):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# before anything imports triton
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    with suppress(ImportError):
        quicken()

LONGEST = ("test_ranks.py", "test_families_table.py", "test_compiled_models.py")
"""Files with tests and fixtures of ten seconds and more: they begin a run, so that no process waits for one at its end,
and a fixture that its tests share is made by one process."""

settings.register_profile(
    "turbo",
    deadline=None,
    derandomize=True,
    max_examples=30,
    # the fixtures that tests of this project share set a state and hold none, so examples may share them
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("turbo")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where a checkpoint lies that the repository does not carry."""
    usual = "~/.cache/turbo_hf/smollm2-135m"
    parser.addoption("--real", default=usual, help=f"folder of SmolLM2-135M-Instruct for -m real; default: {usual}")


def pytest_sessionfinish() -> None:
    """Libraries tell of what is left when Python ends."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if item.get_closest_marker("gpu2") and torch.cuda.device_count() < 2:
        pytest.skip("no two CUDA devices")
    folder = Path(item.config.getoption("--real")).expanduser()
    if item.get_closest_marker("real") and not folder.is_dir():
        pytest.skip(f"no folder {folder}; bash examples/real_model.sh makes one, --real=FOLDER names another")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files come first. With `-m gpu`, all tests of a `device` run, on the GPU.

    The reference is the same torch code there, and what kernels are compared with: tests with further parameters go
    through it on the CPU alone.
    """
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if not _is_wanted("gpu", config.option.markexpr):
        return

    def wanted(item: pytest.Item) -> bool:
        given: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        return not (
            "device" in getattr(item, "fixturenames", ()) and given.get("backend") == "reference" and len(given) > 1
        )

    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = filter(wanted, items)
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """What lives on from other files, and what is imported, is not looked through in each collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def device() -> torch.device:
    """Where ops run: on the GPU in a run with `-m gpu`, else on the CPU, kernels in Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each implementation; kernels run on CUDA, and elsewhere in Triton's interpreter."""
    return str(request.param)


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers whichever tests run."""
    torch.manual_seed(0)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill what `torch.empty` returns: NaN in floats, the largest value in integers. A read of it then shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture(scope="session")
def indexed() -> Any:
    """The `Calibration` of the carried model, with a small index."""
    from calibration_support import SMALL, lab  # noqa: PLC0415 - what it imports may come only after the lines above

    return lab(settings=SMALL)


@pytest.fixture(scope="module")
def llama() -> Any:
    """A tiny Llama without a patch, in float64: summed in another order, no number comes near another code."""
    from models import tiny_llama  # noqa: PLC0415 - as above

    return tiny_llama(attn_implementation="sdpa").double()


@pytest.fixture
def runners(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`watch_runners` of continuous batching in its tests, of `generate` elsewhere."""
    kind = "serving_support" if "serving" in request.path.name else "graphs_support"
    return importlib.import_module(kind).watch_runners(monkeypatch)


# --- continuous batching; `serving_support` needs transformers 5.19 ---------------------------------------------------


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`serving_support.record_passes`."""
    from serving_support import record_passes  # noqa: PLC0415

    return record_passes(monkeypatch)


@pytest.fixture
def asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serving_support.make_asynchronous`."""
    from serving_support import make_asynchronous  # noqa: PLC0415

    make_asynchronous(monkeypatch)
