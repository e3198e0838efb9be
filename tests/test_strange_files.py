"""Files of a stranger, changed on purpose with sums that are right: each loads as it was, or a sentence refuses it.

One place of a file is changed at a time: values of other types and sizes, entries that are missing or new, tensors of
other shapes, types and numbers, files that are cut, too long, or no files at all.
"""

import copy
import dataclasses
import functools
import json
import math
import os
import random
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration_support import lab
from models import lab_model, prompts
from saved_support import Make, by_bucket, family, llama, windows, written

from turbo_hf import Calibration, TurboCache
from turbo_hf.cache import saved_files
from turbo_hf.calibration.artifacts import FILE, KIND
from turbo_hf.config.options import read_mapping
from turbo_hf.eval.answers import Answers
from turbo_hf.models.versions import CACHE
from turbo_hf.ops.maths import checksum

FREE = (torch.uint8, torch.bool)
"""Types of which every number is one that a cache may hold."""
TIMES = 150
"""Changed files of each kind."""
STRANGE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**62, 2**80, 0.5, math.nan, math.inf, -1e308, "", "x", "F32", "I8"),
    *([], [0], [[]], {}, {"map": []}, {"map": [[[], 0]]}, {"tensor": "tokens"}, {"dtype": "F16"}, {"device": 3}),
]


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all places in a tree."""
    parts: Any = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [at, *(path for key, each in parts for path in places(each, (*at, key)))] if parts else [at]


def changed(tree: Any, drawn: random.Random) -> Any:
    """A copy with one place changed."""
    tree = copy.deepcopy(tree)
    *path, last = drawn.choice([at for at in places(tree) if at])
    node = tree
    for key in path:
        node = node[key]
    match drawn.randrange(6):
        case 0:
            del node[last]
        case 1 if isinstance(node, list):
            node.append(node[last])
        case 2 if type(node[last]) is int:
            node[last] += drawn.choice((-1, 1, 64, -64))
        case _:
            node[last] = drawn.choice(STRANGE)
    return tree


def tampered(x: torch.Tensor, drawn: random.Random) -> torch.Tensor:
    """Another tensor: of another shape, type, or with a number that is none of its own."""
    match drawn.randrange(5):
        case 0 if x.dim() and x.numel():
            return x.narrow(n := drawn.randrange(x.dim()), 0, x.shape[n] - 1).contiguous()
        case 1:
            return torch.cat((x, x), drawn.randrange(x.dim())) if x.dim() else x[None]
        case 2:
            return x.to(drawn.choice([torch.float64, torch.int16, torch.uint8, torch.bool, torch.float16]))
        case 3:
            return x.reshape(-1) if drawn.random() < 0.5 else x[None]
    last = {torch.bool: True, torch.uint8: 255}.get(x.dtype, -128 if x.dtype == torch.int8 else -7)
    return torch.full_like(x, math.nan if x.is_floating_point() else last)


def sums(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """The entry "sums" of a saved cache."""
    return {name: int(checksum(x)) for name, x in tensors.items()}


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """No more than 1 GB beyond what there is: files here are small. More ends in an error of another kind."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def read_or_refused(read: Callable[[], Any], what: Any) -> Any:
    """What is read; None: an error refuses it in a sentence. Any other error is the test's."""
    try:
        return read()
    except (ValueError, OSError) as error:
        said = str(error)
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    assert 40 < len(said) < 3000, (what, said)
    assert "Error:" not in said, (what, said)
    return None


KINDS = [llama(low_bits=2, low_heads=0.5), windows, by_bucket, family("lfm2"), family("deepseek_v3")]


NAMES = ["llama", "windows", "by_bucket", "states", "latent"]


def saved(make: Make, folder: Path) -> tuple[Any, TurboCache, dict[str, Any], dict[str, torch.Tensor]]:
    """A model, a cache of it, and what its file holds."""
    model, cache = make()
    ids = prompts(2, 150) % 63 + 1
    with torch.no_grad():
        model(ids, **{CACHE: cache})
    cache.save_pretrained(folder, input_ids=ids)
    facts, tensors = saved_files.read(folder, saved_files.CACHE, str(folder))
    whole = {name: each for name, each in facts.items() if name != "sha256"}
    return model, cache, whole, {name: x.clone() for name, x in tensors.items()}


@pytest.mark.parametrize("make", KINDS, ids=NAMES)
def test_a_saved_cache_of_a_stranger(make: Make, tmp_path: Path) -> None:
    model, cache, whole, own = saved(make, tmp_path)
    drawn, step = random.Random(3), torch.ones(2, 1, dtype=torch.long)

    def after(held: Any) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(step, **{CACHE: held}).logits
        return logits

    right, taken = after(cache), 0
    for _ in range(TIMES):
        facts, tensors = whole, dict(own)
        if drawn.random() < 0.7:
            part = drawn.choice(["held", "held", "held", "held", "sums", "all"])
            facts = changed(whole, drawn) if part == "all" else {**whole, part: changed(whole[part], drawn)}
        else:
            name = drawn.choice(sorted(own))
            tensors[name] = tampered(own[name], drawn)
            facts = {**whole, "sums": sums(tensors)}
        written(tmp_path, saved_files.CACHE, facts, tensors)
        what = [pair for pair in zip(whole.items(), facts.items(), strict=False) if pair[0] != pair[1]]
        loaded = read_or_refused(lambda: TurboCache.from_pretrained(tmp_path, model), what)
        if loaded is not None:
            got = read_or_refused(functools.partial(after, loaded), what)
            # numbers that are other numbers of their kind are another cache, as none can tell
            assert got is None or facts["sums"] != whole["sums"] or torch.equal(got, right), what
            taken += 1
    assert taken < TIMES / 3


@pytest.mark.parametrize("make", KINDS, ids=NAMES)
def test_numbers_that_no_saved_cache_holds(make: Make, tmp_path: Path) -> None:
    model, _, whole, own = saved(make, tmp_path)
    held = json.loads(json.dumps(whole["held"]).replace('["recording", false]', '["recording", true]', 1))
    written(tmp_path, saved_files.CACHE, {**whole, "held": held}, own)
    with pytest.raises(ValueError, match=r"state\.recording is True, and should be False"):
        TurboCache.from_pretrained(tmp_path, model)
    # steps and zero points of pages may be any
    free = re.compile(r"tokens|.*pages\.\d\.2")
    checked = {name: x for name, x in own.items() if not (free.fullmatch(name) or x.dtype in FREE)}
    worst = {torch.int8: -128, torch.int16: -7, torch.int64: 999}
    cases = [(name, torch.full_like(x, worst.get(x.dtype, math.nan))) for name, x in checked.items()]
    # a head named twice, a table that leaves out pages
    cases += [(name, torch.zeros_like(x)) for name, x in checked.items() if x.dtype == torch.int64]
    for name, x in [*cases, ("stray", torch.zeros(2))]:
        if not torch.equal(x, own.get(name, torch.ones(2))):
            tensors = {**own, name: x}
            written(tmp_path, saved_files.CACHE, {**whole, "sums": sums(tensors)}, tensors)
            with pytest.raises(ValueError, match="is damaged"):
                TurboCache.from_pretrained(tmp_path, model)


def test_a_calibration_of_a_stranger(tmp_path: Path) -> None:
    found, drawn = lab(), random.Random(1)
    layer = found.layers[0]
    heads, dim = len(layer.scores["entropy"]), 64
    index: dict[str, Any] = {"centroids": torch.rand(heads, 8, dim), "rotated_centroids": torch.rand(heads, 8, dim)}
    sizes = {"weight_1": (dim, 4), "bias_1": (4,), "weight_2": (4, 8), "bias_2": (8,)}
    index["classifier"] = {name: torch.rand(heads, *size) for name, size in sizes.items()}
    whole = dataclasses.replace(found, layers=(dataclasses.replace(layer, **index), *found.layers[1:]))
    whole.save_pretrained(tmp_path)
    facts, mapped = saved_files.read(tmp_path, KIND, "")
    own, right = {name: x.clone() for name, x in mapped.items()}, Calibration.from_pretrained(tmp_path)
    for _ in range(2 * TIMES):
        said, there = facts, own
        if drawn.random() < 0.6:
            said = changed({name: each for name, each in facts.items() if name != "sha256"}, drawn)
        else:
            name = drawn.choice(sorted(own))
            there = {**own, name: tampered(own[name], drawn)}
            said = {**facts, "sums": sums(there)}
        written(tmp_path, KIND, said, there)
        if drawn.random() < 0.2:
            content = (tmp_path / FILE).read_bytes()
            (tmp_path / FILE).write_bytes(content[: drawn.randrange(len(content))] + b"x" * drawn.randrange(3))
        read = read_or_refused(lambda: Calibration.from_pretrained(tmp_path), (said, len(there)))
        if read is not None:
            assert read.mismatch(lab_model()[0]) is None or read.fingerprint != right.fingerprint
            assert {each: read.head_orders(each) for each in ("priority", "entropy")}


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    model, cache = llama()()
    with torch.no_grad():
        model(prompts(1, 40), **{CACHE: cache})
    cache.save_pretrained(tmp_path)
    lab().save_pretrained(tmp_path)
    ends = {
        saved_files.CACHE.file: lambda: TurboCache.from_pretrained(tmp_path, model),
        FILE: lambda: Calibration.from_pretrained(tmp_path),
        "answers.jsonl": lambda: Answers(tmp_path / "answers.jsonl", {}),
        "c.json": lambda: read_mapping(tmp_path / "c.json"),
    }
    for name, read in ends.items():
        path, kept = tmp_path / name, tmp_path / "kept"
        if path.exists():
            path.rename(kept)
        for make in (os.mkfifo, functools.partial(os.symlink, "/dev/zero"), os.mkdir):
            make(path)
            with pytest.raises((ValueError, OSError), match=name):
                read()
            (os.rmdir if path.is_dir() else os.unlink)(path)
        if kept.exists():
            kept.rename(path)
    path = tmp_path / saved_files.CACHE.file
    content = path.read_bytes()
    for shape in ([2**63, 0], [2**62, 0], [1] * 3000, [2**62, 2**62], [-1]):
        head = json.dumps({"x": {"dtype": "U8", "shape": shape, "data_offsets": [0, int(0 not in shape)]}}).encode()
        path.write_bytes(len(head).to_bytes(8, "little") + head + b"x" * (0 not in shape))
        with pytest.raises(ValueError, match=r"is damaged: .* cannot be read"):
            TurboCache.from_pretrained(tmp_path, model)
    for begin in (1 << 40, 1 << 25, 1 << 63):
        path.write_bytes(begin.to_bytes(8, "little") + content[8:])
        with pytest.raises(ValueError, match="16,777,216 are read"):
            TurboCache.from_pretrained(tmp_path, model)
