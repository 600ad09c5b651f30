"""torch's private names: in one place, asked for when it is imported, and told by name if missing."""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import re
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from paths import ROOT

from torchard.functional.torch_internals.accessors import required

PACKAGE = "torchard.functional.torch_internals"
INSIDE = sorted((ROOT / "functional" / "torch_internals").rglob("*.py"))
ROOMS = ("functional", "sharding", "kernels", "src", "examples", "benchmarks")
OUTSIDE = [p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py")) if p not in INSIDE]

# Of torch's objects; a class of ours may have such a name, of its own object.
OF_TORCH = {
    *("_schema", "_op", "_opname", "_overloadname", "_qualified_op_name", "_overloadpacket"),
    *("_version", "_base", "_is_view", "_cdata", "_backward_hooks", "_grad_fn"),
    *("_modules", "_parameters", "_buffers", "_forward_hooks", "_state_dict_hooks"),
    *("_get_backend", "_timeout", "_set_default_timeout", "_saved_tensors", "_sequence_nr"),
    *("_c10d_functional", "_C"),
}
# Python's own that are public in all but name.
OF_PYTHON = {"_replace", "_fields", "_asdict", "_make", "_getframe", "_exit"}
# Operators have names of their own, and are looked up by `operators.py`.
OPERATORS = {"aten", "prims", "c10d"}
BY_STRING = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"}


def is_private(name: str) -> bool:
    ours = name.endswith("__") or name.startswith("_torchard_")
    return name.startswith("_") and bool(name.strip("_")) and not ours


def is_of_torch(module: str | None) -> bool:
    return (module or "").split(".")[0] in ("torch", "functorch")


def chain(node: ast.AST) -> list[str]:
    """``a.b.c`` as its names; of anything else in front of the dots, only what follows."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [*([node.id] if isinstance(node, ast.Name) else [""]), *reversed(names)]


def strings(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


def members(tree: ast.AST) -> Iterator[str]:
    """The names that a file's own classes have."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield inner.name
                elif isinstance(inner, ast.AnnAssign):
                    yield chain(inner.target)[0]
                elif isinstance(inner, ast.Assign):
                    yield from (chain(target)[0] for target in inner.targets)
                    if chain(inner.targets[0])[0] == "__slots__":
                        yield from strings(inner.value)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if chain(node)[0] == "self":
                yield node.attr
        elif isinstance(node, ast.Call) and chain(node.func) == ["object", "__setattr__"]:
            yield from strings(node.args[1])


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def ours() -> set[str]:
    return {name for path in OUTSIDE for name in members(tree_of(path))}


def is_foreign(name: str) -> bool:
    """Whether an attribute is private, and neither of a class of ours nor Python's own."""
    return is_private(name) and (name in OF_TORCH or name not in ours() | OF_PYTHON)


def imported(node: ast.AST) -> Iterator[str]:
    """What an import takes from torch, in full."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if is_of_torch(alias.name))
    elif isinstance(node, ast.ImportFrom) and is_of_torch(node.module):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def private_names(tree: ast.AST) -> Iterator[str]:
    """Each private name of torch's that a file uses, and its line."""
    own = set(members(tree))
    for node in ast.walk(tree):
        found: list[str] = [full for full in imported(node) if any(map(is_private, full.split(".")))]
        if isinstance(node, ast.Attribute):
            of = chain(node)[0]
            mine = of in OPERATORS or (of == "self" and node.attr in own)
            found += [node.attr] if is_foreign(node.attr) and not mine else []
        elif isinstance(node, ast.Call) and chain(node.func)[-1] in BY_STRING:
            found += [text for arg in node.args for text in strings(arg) if is_foreign(text)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            dotted = re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", node.value)
            found += [node.value] if node.value in OF_TORCH or dotted else []
        for name in found:
            yield f"{getattr(node, 'lineno', 0)}: {name}"


def test_only_one_place_uses_private_names_of_torchs() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{name}" for path in OUTSIDE for name in private_names(tree_of(path))
    ]
    assert not found, (
        "give it a name in functional/torch_internals, with the reason and what is done on a version of "
        "torch that lacks it:\n" + "\n".join(found)
    )


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._ops import OpOverload",
        "from torch.utils import _pytree as pytree",
        "def f():\n    from torch.fx._symbolic_trace import is_fx_tracing",
        "torch._C._len_torch_function_stack()",
        "dist.distributed_c10d._get_default_store()",
        "op._schema.arguments",
        "y = f(x)[0]._version",
        "getattr(target, '_schema', None)",
        "attrgetter('_version')",
        "part.module._buffers['x'] = 1",
        "node._rename('x')",
        "names = ('_modules',)",
        "importlib.import_module('torch._inductor.config')",
    ],
)
def test_a_private_name_is_seen(code: str) -> None:
    assert list(private_names(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "torch.compiler.reset()",
        "aten._softmax.default",
        "self.state.__dict__",
        "record._replace(name='x')",
        "value._torchard_weak = True",
        "from torchard.functional.torch_internals import schema",
        "sys._getframe(1)",
    ],
)
def test_a_public_name_is_not_taken_for_one(code: str) -> None:
    assert not list(private_names(ast.parse(code)))


# -- what the package asks for -----------------------------------------------------------------------


def at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """What a file evaluates when it is imported."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        yield node
        inside = isinstance(node, (ast.FunctionDef, ast.Lambda))
        todo += [] if inside else list(ast.iter_child_nodes(node))


def guards(node: ast.AST) -> bool:
    """Whether it asks for a name by its string."""
    return isinstance(node, ast.Call) and chain(node.func)[-1] in {"require", "getattr", "hasattr"}


def asked_for(tree: ast.Module) -> set[str]:
    """Names whose absence is noticed: at import, or where something else is done without them."""
    found = {node.attr for node in at_import(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if guards(node):
            found.update(strings(node))
    return found


def private_modules(tree: ast.Module) -> set[str]:
    """What is imported of torch's private modules, by the names it is given."""
    return {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and is_of_torch(node.module)
        for alias in node.names
        if is_private(alias.name) or "._" in str(node.module)
    }


@pytest.mark.parametrize("path", INSIDE, ids=lambda path: path.stem)
def test_what_a_function_of_the_package_uses_is_asked_for_at_import(path: Path) -> None:
    tree = tree_of(path)
    asked = {"_C"}.union(*(asked_for(tree_of(other)) for other in INSIDE))  # imported together
    modules = private_modules(tree)
    lacking = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *names = chain(node)
            private = is_private(node.attr) or root in modules or "_C" in names[:-1]
            if private and root not in (*OPERATORS, "self", "cls") and node.attr not in OF_PYTHON:
                lacking |= {node.attr} - asked - ours()
    assert not lacking


def test_what_a_function_imports_is_needed() -> None:
    """Or the user would see an ImportError of Python's, in the middle of a call."""
    for path in INSIDE:
        tree = tree_of(path)
        within = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.With) and ast.unparse(node.items[0].context_expr) == "needed()"
            for inner in ast.walk(node)
        }
        early = {id(node) for node in at_import(tree)}
        late = [n for n in ast.walk(tree) if any(imported(n)) and id(n) not in early | within]
        assert not late, f"{path}: {list(map(ast.unparse, late))}"


def required_names() -> Iterator[str]:
    for path in INSIDE:
        for node in at_import(tree_of(path)):
            if isinstance(node, ast.Call) and chain(node.func) == ["require"]:
                yield from (text for arg in node.args[1:] for text in strings(arg))


def imported_names() -> Iterator[str]:
    """Those that are no modules: Python would just import a module again."""
    for path in INSIDE:
        for node in at_import(tree_of(path)):
            for full in imported(node):
                module, _, name = full.rpartition(".")
                value = getattr(sys.modules.get(module), name, None)
                function = isinstance(node, ast.ImportFrom) and not isinstance(value, types.ModuleType)
                if function and any(map(is_private, full.split("."))):
                    yield full


@pytest.fixture
def imported_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package is imported again by who asks for it, and is what it was afterwards."""

    def of_package() -> list[str]:
        return [m for m in sys.modules if m.startswith(PACKAGE) and m != required.__name__]

    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    before = {name: sys.modules.pop(name) for name in of_package()}
    yield
    for name in of_package():
        del sys.modules[name]
    sys.modules.update(before)


def says_what_is_missing(name: str) -> None:
    with pytest.raises(ImportError) as caught:
        importlib.import_module(PACKAGE)
    said = str(caught.value)
    assert re.search(rf"\b{re.escape(name)}\b", said)
    assert said.startswith(
        f"torchard needs torch {required.RANGE}; torch {torch.__version__} lacks an internal that it "
        "uses ("
    )
    assert said.endswith("). Install a version in that range.")


@pytest.mark.usefixtures("imported_anew")
@pytest.mark.parametrize("name", sorted(set(required_names())))
def test_a_version_without_an_attribute_is_told_at_import(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        required,
        "hasattr",
        lambda owner, asked: asked != name and builtins.hasattr(owner, asked),
        raising=False,
    )
    says_what_is_missing(name)


@pytest.mark.usefixtures("imported_anew")
@pytest.mark.parametrize("full", sorted(set(imported_names())))
def test_a_version_without_a_function_is_told_at_import(
    full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(full)
    says_what_is_missing(full.rpartition(".")[2])


def test_a_compiler_without_a_function_is_told_when_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.backends import registry

    from torchard import jit

    monkeypatch.delattr(registry, "lookup_backend")
    with pytest.raises(ImportError, match=r"needs torch .* lacks an internal .*lookup_backend"):
        jit(torch.sin)(torch.ones(2))
