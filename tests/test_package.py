"""The shape of the package: its public names, its layers, its size, and what an installation holds."""

import ast
import functools
import logging
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import turbo_hf
from turbo_hf.errors import logger

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = {
    "PRESETS", "Calibration", "Chat", "Expert", "Handle", "SparseConfig", "TurboCache", "TurboConfig", "Unsupported",
    "calibrate", "patch",
}  # fmt: skip

LAYERS = [
    {"turbo_hf._version", "turbo_hf.errors", "turbo_hf.layout", "turbo_hf.ranks"},
    {"turbo_hf.config", "turbo_hf.models"},
    {"turbo_hf.ops"},
    {"turbo_hf.ops.store"},
    {"turbo_hf.ops.latent"},
    {"turbo_hf.ops.prefill"},
    {"turbo_hf.ops.decode"},
    {"turbo_hf.ops.sparse"},
    {"turbo_hf.ops.layer_ops"},
    {"turbo_hf.sparse", "turbo_hf.patches"},
    {"turbo_hf.cache"},
    {"turbo_hf.attention"},
    {"turbo_hf.graphs"},
    {"turbo_hf.calibration"},
    {"turbo_hf.serving"},
    {"turbo_hf.patching"},
    {"turbo_hf.chat", "turbo_hf.console"},
    {"turbo_hf.eval"},
    {"turbo_hf.cli"},
]
"""Who may import whom: a folder or module imports from its own layer and the earlier ones."""


CONTRACTS = (
    "store/contract", "store/quantize", "prefill/contract", "decode/contract", "latent/contract", "sparse/contract",
)  # fmt: skip
"""The ops that others call; the modules beside them launch them."""

MOVES = ("exchange_open", "select_rows")
"""Ops that compute nothing, and have no source."""


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by name."""
    found = {}
    for folder, prefix in ((ROOT / "turbo_hf", "turbo_hf"), (ROOT / "patches", ""), (ROOT / "eval", "")):
        base = prefix or f"turbo_hf.{folder.name}"
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            if prefix and parts[0] in ("patches", "eval"):
                continue
            name = ".".join((base, *(p for p in parts if p != "__init__")))
            found[name] = path
    return found


def rank(name: str) -> int:
    """The layer of a module, or of its innermost folder that has one; the package and its entry point are on top."""
    levels = {named: level for level, names in enumerate(LAYERS) for named in names}
    parts = name.split(".")
    for count in range(len(parts), 1, -1):
        if (level := levels.get(".".join(parts[:count]))) is not None:
            return level
    assert name in ("turbo_hf", "turbo_hf.__main__"), f"{name} has no place in LAYERS"
    return len(LAYERS)


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """The syntax of a file."""
    return list(ast.walk(ast.parse(path.read_text())))


def all_imports(path: Path) -> set[str]:
    """Modules that a file imports."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def imports(path: Path) -> set[str]:
    """Modules of turbo_hf that a file imports, at any place and for types alone too."""
    there, found = modules(), set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in there else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] == "turbo_hf"}


def test_public_names() -> None:
    assert set(turbo_hf.__all__) == PUBLIC
    assert all(hasattr(turbo_hf, name) for name in PUBLIC)


def test_imports_point_down() -> None:
    there = modules()
    upward = [
        f"{name} imports {target}, of a later layer"
        for name in sorted(there)
        for target in sorted(imports(there[name]))
        if rank(target) > rank(name)
    ]
    assert not upward


def test_no_module_imports_itself_through_others() -> None:
    targets = {name: imports(path) for name, path in modules().items() if name != "turbo_hf"}
    # what imports nothing that is left is in no circle
    while free := {name for name, into in targets.items() if not into & targets.keys() - {name}}:
        targets = {name: into for name, into in targets.items() if name not in free}
    assert not targets


def test_size() -> None:
    """Files of at most 600 lines, functions of at most 120; a kernel is as long as it must be."""
    too_long = []
    for name, path in sorted(modules().items()):
        source = path.read_text()
        if len(source.splitlines()) > 600:
            too_long.append(name)
        if path.stem.startswith("kernel"):
            continue
        functions = [node for node in nodes(path) if isinstance(node, ast.FunctionDef)]
        too_long += [f"{name}.{node.name}" for node in functions if (node.end_lineno or 0) - node.lineno >= 120]
    assert not too_long


def test_reference_imports_torch_and_layout_only() -> None:
    files = list((ROOT / "turbo_hf" / "ops").rglob("reference*.py"))
    assert len(files) >= 6
    for path in [*files, ROOT / "turbo_hf" / "ops" / "maths.py"]:
        allowed = {"torch", "math", "typing", "collections", "functools"}
        for target in all_imports(path):
            ours = target in ("turbo_hf.layout", "turbo_hf.ops.maths") or target.rpartition(".")[2].startswith(
                "reference"
            )
            assert ours or target.split(".")[0] in allowed, f"{path.name} imports {target}"


def test_no_function_but_the_choice_takes_a_backend() -> None:
    for name, path in modules().items():
        if name.split(".")[1:2] in (["ops"], ["sparse"], ["cache"], ["attention"], ["graphs"], ["serving"]):
            taken = {arg.arg for node in nodes(path) if isinstance(node, ast.arguments) for arg in node.args}
            taken |= {arg.arg for node in nodes(path) if isinstance(node, ast.arguments) for arg in node.kwonlyargs}
            assert "backend" not in taken or name == "turbo_hf.ops.backend", name


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["eval"], *extras["serve"]]
    declared = {re.split(r"[^\w-]", line)[0].replace("-", "_").replace("PyYAML", "yaml") for line in wanted}
    imported = {target.split(".")[0] for path in modules().values() for target in all_imports(path)}
    assert imported - set(sys.stdlib_module_names) - {"turbo_hf"} <= declared


def test_ops_docstrings_say_shapes_errors_and_source() -> None:
    for path in (ROOT / "turbo_hf" / "ops" / f"{name}.py" for name in CONTRACTS):
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef) and not re.match("_|check_", node.name):
                words = ast.get_docstring(node) or ""
                for part in ("Args:", "Returns:", "Raises:", "[", *(() if node.name in MOVES else ("Source:",))):
                    assert part in words, f"{path.name}: {node.name} lacks {part}"


def test_no_environment_variable_changes_results() -> None:
    for name, path in modules().items():
        # but for which of torchrun's processes this one is
        assert "os.environ" not in path.read_text() or name == "turbo_hf.console", name


def test_import_needs_no_triton_and_registers_nothing() -> None:
    script = """
import sys
sys.modules["triton"] = None
sys.modules["lm_eval"] = None
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING as layers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
before = [dict(table) for table in (functions, masks, layers)]
import torch, turbo_hf, turbo_hf.patches.families, turbo_hf.eval.needle
assert all(getattr(turbo_hf, name) is not None for name in turbo_hf.__all__)
assert [dict(table) for table in (functions, masks, layers)] == before
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_eval_refuses_a_second_name() -> None:
    done = subprocess.run([sys.executable, "-c", "import eval"], check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "Import this package as turbo_hf.eval" in done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist, and with a wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    # without isolation: nothing is fetched
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    return folder


def test_the_wheel_holds_every_module(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = {name.replace(".", "/") for name in modules()}
    missing = {name for name in expected if not {f"{name}.py", f"{name}/__init__.py"} & inside}
    assert not missing
    assert {"turbo_hf/py.typed", "turbo_hf/eval/haystack.txt", "turbo_hf/texts/moby_dick.txt"} <= inside
    assert {name.split("/")[0] for name in inside} == {"turbo_hf", f"turbo_hf-{turbo_hf.__version__}.dist-info"}
    assert not any("lab-llama" in name or name.endswith((".json", ".png")) for name in inside)


def test_the_sdist_holds_what_is_said_about_the_package(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        inside = {name.partition("/")[2] for name in packed.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "eval/haystack.txt", "eval/README.md"} <= inside
    assert not any(name.startswith(("tests", "examples")) for name in inside)


def test_the_wheel_runs_alone(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words], check=False, cwd=tmp_path / "empty", capture_output=True, text=True,
            env={"PYTHONPATH": str(tmp_path / "site")},
        )  # fmt: skip

    assert run("-m", "turbo_hf", "--version").stdout == f"turbo_hf {turbo_hf.__version__}\n"
    code = "from turbo_hf import patch, patches; from turbo_hf.eval import needle"
    code = f"{code}; print(patches.__file__, needle.__file__, flush=True)"
    done = run("-c", f"{code}; from turbo_hf.cli.main import app; app(['demo'])")
    assert done.stdout.count(str(tmp_path / "site" / "turbo_hf")) == 2, done.stderr
    assert done.returncode == 1
    assert "the included model is not beside this installation; pass --model" in done.stderr


def test_the_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", turbo_hf.__version__)
    assert version("turbo_hf") == turbo_hf.__version__
    newest = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert newest == turbo_hf.__version__


def test_messages_go_to_the_packages_logger() -> None:
    handlers = logging.getLogger("turbo_hf").handlers
    assert [type(handler) for handler in handlers] == [logging.NullHandler]
    assert logger.name.startswith("turbo_hf.")


def test_a_name_that_is_not_there_is_told() -> None:
    with pytest.raises(AttributeError, match="module 'turbo_hf' has no attribute 'path'"):
        getattr(turbo_hf, "path")  # noqa: B009 - the type checker knows that it is not there
    assert set(turbo_hf.__all__) < set(dir(turbo_hf))


def test_the_sanitizer_runs_tests_that_exist() -> None:
    names = re.findall(r'^  "(test_.*)"$', (ROOT / "tests" / "sanitize.sh").read_text(), re.MULTILINE)
    assert len(names) > 30
    files = sorted({name.split("::")[0] for name in names})
    there: set[str] = set()

    class Names:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            there.update(item.nodeid.removeprefix("tests/") for item in session.items)

    collect = ["--collect-only", "-qq", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    pytest.main([*collect, *(str(ROOT / "tests" / file) for file in files)], plugins=[Names()])
    assert [name for name in names if name not in there] == []
