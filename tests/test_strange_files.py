"""Files of a stranger, changed on purpose with sums that are right: each loads as it was, or a sentence refuses it.

One place of a file is changed at a time: values of other types and sizes, entries that are missing or new, tensors of
other shapes, types and numbers, files that are cut, too long, or no files at all.
"""

import copy
import dataclasses
import functools
import hashlib
import json
import math
import os
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from all_pairs import in_one_test
from calibration_support import lab
from graphs_support import an_index
from models import lab_model, prompts, tiny_llama, tiny_mistral
from safetensors.torch import load, save
from sparse_cache_support import sparse
from tiny_families import build

import turbo_hf
from turbo_hf import Calibration, TurboCache, TurboConfig
from turbo_hf.cache import saved_files
from turbo_hf.calibration.artifacts import FACTS, TENSORS
from turbo_hf.config.file import read_mapping
from turbo_hf.config.whole_files import facts_hash
from turbo_hf.eval.answers import Answers
from turbo_hf.eval.run_identity import META, open_run
from turbo_hf.models.versions import CACHE

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


def llama() -> Any:
    model = tiny_llama().requires_grad_(False)
    return model, turbo_hf.patch(model, TurboConfig(bits=4, low_bits=2, low_heads=0.5, block_size=32)).new_cache()


def windows() -> Any:
    model = tiny_mistral(24).requires_grad_(False)
    model.model.layers[1].self_attn.is_cross_attention = True
    return model, turbo_hf.patch(model, TurboConfig(bits=16, attention="fp16"), strict="fallback").new_cache()


def by_bucket() -> Any:
    model = tiny_llama().requires_grad_(False)
    config = sparse("kmeans", probes=2, window_tokens=8, dense_layers=())
    return model, turbo_hf.patch(model, config, calibration=an_index(model, buckets=8)).new_cache()


def states() -> Any:
    model = build("lfm2").requires_grad_(False)
    return model, turbo_hf.patch(model, "turbo4").new_cache()


def latent() -> Any:
    model = build("deepseek_v3").requires_grad_(False)
    return model, turbo_hf.patch(model, "turbo4").new_cache()


def written(folder: Path, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write a saved cache with right sums, whatever it holds."""
    for left in folder.iterdir():
        left.unlink()
    digest = facts_hash(facts, "sha256")
    head = saved_files._head([[n, saved_files.NAMES[x.dtype], list(x.shape)] for n, x in tensors.items()])
    content = head + b"".join(bytes(saved_files._bytes(x)) for x in tensors.values())
    (folder / saved_files.TENSORS.format(digest[:16])).write_bytes(content)
    (folder / saved_files.FACTS).write_text(json.dumps({**facts, "sha256": digest}))


def listed(tensors: dict[str, torch.Tensor]) -> list[Any]:
    """The entry "tensors" of a saved cache."""
    sums = saved_files.checksums(tensors.values())
    kinds = [[n, saved_files.NAMES[x.dtype], list(x.shape)] for n, x in tensors.items()]
    return [[*kind, total] for kind, total in zip(kinds, sums, strict=True)]


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


@pytest.mark.parametrize("make", [llama, windows, by_bucket, states, latent])
def test_a_saved_cache_of_a_stranger(make: Callable[[], Any], tmp_path: Path) -> None:
    model, cache = make()
    drawn, ids, step = random.Random(make.__name__), prompts(2, 150) % 63 + 1, torch.ones(2, 1, dtype=torch.long)

    def after(held: Any) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(step, **{CACHE: held}).logits
        return logits

    with torch.no_grad():
        model(ids, **{CACHE: cache})
    cache.save_pretrained(tmp_path, input_ids=ids)
    right, found = after(copy.deepcopy(cache)), saved_files.read(tmp_path)
    own = {n: torch.empty(s, dtype=saved_files.TYPES[k]) for n, k, s, _ in found.facts["tensors"]}
    with found.file:
        found.fill(own)
    whole = {name: each for name, each in found.facts.items() if name != "sha256"}
    taken = 0
    for _ in range(TIMES):
        facts, tensors = whole, dict(own)
        if drawn.random() < 0.7:
            part = drawn.choice(["held", "held", "held", "held", "tensors", "all"])
            facts = changed(whole, drawn) if part == "all" else {**whole, part: changed(whole[part], drawn)}
        else:
            name = drawn.choice(sorted(own))
            tensors[name] = tampered(own[name], drawn)
            facts = {**whole, "tensors": listed(tensors)}
        written(tmp_path, facts, tensors)
        what = [pair for pair in zip(whole.items(), facts.items(), strict=False) if pair[0] != pair[1]]
        loaded = read_or_refused(lambda: TurboCache.from_pretrained(tmp_path, model), what)
        if loaded is not None:
            got = read_or_refused(functools.partial(after, loaded), what)
            # numbers that are other numbers of their kind are another cache, as none can tell
            assert got is None or facts["tensors"] != whole["tensors"] or torch.equal(got, right), what
            taken += 1
    assert taken < TIMES / 3


def test_a_calibration_of_a_stranger(tmp_path: Path) -> None:
    found, drawn = lab(), random.Random(1)
    layer = found.layers[0]
    heads, dim = len(layer.scores["entropy"]), 64
    index: dict[str, Any] = {"centroids": torch.rand(heads, 8, dim), "rotated_centroids": torch.rand(heads, 8, dim)}
    sizes = {"weight_1": (dim, 4), "bias_1": (4,), "weight_2": (4, 8), "bias_2": (8,)}
    index["classifier"] = {name: torch.rand(heads, *size) for name, size in sizes.items()}
    whole = dataclasses.replace(found, layers=(dataclasses.replace(layer, **index), *found.layers[1:]))
    whole.save_pretrained(tmp_path)
    facts, content = json.loads((tmp_path / FACTS).read_bytes()), (tmp_path / TENSORS).read_bytes()
    own, right = load(content), Calibration.from_pretrained(tmp_path)
    for _ in range(2 * TIMES):
        said, there = facts, content
        if drawn.random() < 0.6:
            said = changed({name: each for name, each in facts.items() if "sha256" not in name}, drawn)
        elif drawn.random() < 0.7:
            name = drawn.choice(sorted(own))
            there = save({**own, name: tampered(own[name], drawn)})
        else:
            there = content[: drawn.randrange(len(content))] + b"x" * drawn.randrange(3)
        said = {**said, "sha256": hashlib.sha256(there).hexdigest()}
        (tmp_path / FACTS).write_text(json.dumps({**said, "facts_sha256": facts_hash(said, "facts_sha256")}))
        (tmp_path / TENSORS).write_bytes(there)
        read = read_or_refused(lambda: Calibration.from_pretrained(tmp_path), (said, len(there)))
        if read is not None:
            assert read.mismatch(lab_model()[0]) is None or read.fingerprint != right.fingerprint
            assert {each: read.head_orders(each) for each in ("priority", "entropy")}
            read.card()


def test_results_of_a_stranger(tmp_path: Path) -> None:
    drawn, what = random.Random(2), {"model": "m", "versions": {"torch": "2"}, "calibrations": {"a": "b"}}
    whole = {"identity": what, "commands": [{"argv": ["x"]}], "commit": None}
    for _ in range(TIMES):
        meta = changed(whole, drawn)
        (tmp_path / META).write_text(json.dumps(meta))
        read_or_refused(lambda: open_run(tmp_path, what), meta)
    for n, answer in enumerate([*STRANGE, [1, 2], [0.5, 3], [math.nan, True], 10**400]):
        Answers(tmp_path / f"{n}.jsonl")["key"] = answer
        read = read_or_refused(functools.partial(Answers, tmp_path / f"{n}.jsonl"), answer)
        if read is not None:
            assert isinstance(read["key"], str) or math.inf > read["key"] >= -math.inf


@in_one_test("content", [b"[" * 60_000, b"bits: 4\n" * 9000, b"a: &a [1]\n" + b"b: [" + b"*a, " * 17 + b"]", b"\xff"])
def test_a_config_file_of_a_stranger(content: bytes, tmp_path: Path) -> None:
    for name in ("c.json", "c.yaml"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=r"c\.(json|yaml)"):
            read_mapping(tmp_path / name)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    model, cache = llama()
    with torch.no_grad():
        model(prompts(1, 40), **{CACHE: cache})
    cache.save_pretrained(tmp_path)
    lab().save_pretrained(tmp_path)
    ends = {
        saved_files.FACTS: lambda: TurboCache.from_pretrained(tmp_path, model),
        next(tmp_path.glob("turbo_cache.*.safetensors")).name: lambda: TurboCache.from_pretrained(tmp_path, model),
        FACTS: lambda: Calibration.from_pretrained(tmp_path),
        TENSORS: lambda: Calibration.from_pretrained(tmp_path),
        META: lambda: open_run(tmp_path, {}),
        "answers.jsonl": lambda: Answers(tmp_path / "answers.jsonl"),
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
    with (tmp_path / saved_files.FACTS).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="such a file has 16,777,216 at most"):
        TurboCache.from_pretrained(tmp_path, model)
