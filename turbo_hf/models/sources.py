"""What the source of a model's classes says about the attention function that they call."""

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from types import FunctionType

NAMES = ("_attn_implementation", "attn_implementation")
TABLES = ("ALL_ATTENTION_FUNCTIONS", "ALL_MASK_ATTENTION_FUNCTIONS")
OTHERS = ("flash", "flex")
"""Parts of names that are neither "eager" nor "sdpa": a class that compares with them is right to get "no"."""


def functions_of(kind: type) -> Iterator[FunctionType]:
    """The methods of a model's class without its `__init__`, and the functions of its own modules that they call.

    Classes of torch and of Transformers itself, which all models share, are left out.
    """
    methods: dict[str, FunctionType] = {}
    for base in kind.__mro__:
        package = base.__module__.split(".")
        if package[0] in ("torch", "builtins") or (package[0] == "transformers" and package[1:2] != ["models"]):
            continue
        for name, value in vars(base).items():
            function = _unwrapped(getattr(value, "__func__", None) or getattr(value, "fget", None) or value)
            if function is not None and name != "__init__":
                methods.setdefault(name, function)
    waiting = list(methods.values())
    for function in waiting:
        yield function
        called = (_unwrapped(function.__globals__.get(name)) for name in function.__code__.co_names)
        waiting += {f for f in called if f is not None and f.__module__ == function.__module__ and f not in waiting}


def generates_by(kind: type) -> str | None:
    """The part of a model whose `generate` that of its class calls in the place of its own ("language_model")."""
    function = _unwrapped(getattr(kind, "generate", None))
    tree = None if function is None else tree_of(function)
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)] if tree else []
    if any(call.startswith("super(") and call.endswith(").generate") for call in calls):
        return None
    parts = [call.split(".")[1] for call in calls if re.fullmatch(r"self\.\w+\.generate", call)]
    return parts[0] if parts else None


def _unwrapped(value: object) -> FunctionType | None:
    function = inspect.unwrap(value) if callable(value) else None
    return function if isinstance(function, FunctionType) else None


@functools.cache
def tree_of(function: FunctionType) -> ast.FunctionDef | None:
    """The syntax tree of a function; None if there is no source to read."""
    try:
        # the source of a method is indented, its strings may not be
        tree = ast.parse("if True:\n" * _indented(function) + inspect.getsource(function))
    except (OSError, TypeError, SyntaxError):
        return None
    return next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)


def _indented(function: FunctionType) -> bool:
    return inspect.getsource(function)[:1].isspace()


@functools.cache
def question(function: FunctionType) -> str | None:
    """The line in which a function asks for the name of its attention, if "eager" or "sdpa" may be the answer.

    None if it only looks up what is registered under the name, or asks for flash or flex attention.
    """
    tree = tree_of(function)
    if tree is None:
        return None
    allowed: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get_interface":
            allowed.update(ast.walk(node))
        elif isinstance(node, ast.Subscript) and _names_table(node.value):
            allowed.update(ast.walk(node.slice))
        elif isinstance(node, ast.Compare) and all(map(_is_other, node.comparators)):
            allowed.update(ast.walk(node.left))
        elif isinstance(node, ast.If) and all(_only_looks_up(part) for part in (*node.body, *node.orelse)):
            allowed.update(ast.walk(node.test))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            allowed.add(node)
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.value if isinstance(node, ast.Constant) else None
        if isinstance(node, ast.expr) and name in NAMES and node not in allowed:
            return inspect.getsource(function).splitlines()[node.lineno - 1 - _indented(function)].strip().rstrip(":")
    return None


def _names_table(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Name) and part.id in TABLES for part in ast.walk(node))


def _is_other(node: ast.AST) -> bool:
    """Whether a name that is asked for is one of `OTHERS`."""
    return isinstance(node, ast.Constant) and any(other in str(node.value) for other in OTHERS)


def _only_looks_up(node: ast.stmt) -> bool:
    """Whether a statement does no more than look up an attention function, or log something."""
    if isinstance(node, ast.If):
        return all(_only_looks_up(part) for part in (*node.body, *node.orelse))
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return node.value is not None and _names_table(node.value)
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("logger.")


def hands_indices(kind: type) -> bool:
    """Whether an attention class of Transformers hands the `indices` of the tokens that it reads to other attention
    functions than "eager" and "sdpa", which get them as a mask."""
    function = _unwrapped(getattr(kind, "forward", None))
    tree = None if function is None or not function.__module__.startswith("transformers.models.") else tree_of(function)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)] if tree else []
    return any(keyword.arg == "indices" for node in calls for keyword in node.keywords)


@functools.cache
def hands_on_mask(function: FunctionType) -> bool:
    """Whether the `forward` of an attention class passes its mask unchanged to the attention function, and does nothing
    else with it."""
    tree = tree_of(function)
    if tree is None:
        return False
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
    lookups = [node for node in assigned if node.value is not None and _names_table(node.value)]
    interfaces = {ast.unparse(x) for node in lookups for x in getattr(node, "targets", [getattr(node, "target", None)])}
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (ast.unparse(node.func) in interfaces or _names_table(node.func))
        if not (isinstance(node.func, ast.Attribute) and node.func.attr == "get_interface")
    ]
    given = [[*node.args[4:5], *(k.value for k in node.keywords if k.arg == "attention_mask")] for node in calls]
    names = {x.id for masks in given for x in masks if isinstance(x, ast.Name)}
    if len(names) != 1 or any(len(masks) != 1 for masks in given):
        return False
    (mask,) = names
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == mask]
    arguments = (*tree.args.args, *tree.args.kwonlyargs)
    return len(uses) == len(given) and mask in {argument.arg for argument in arguments}
