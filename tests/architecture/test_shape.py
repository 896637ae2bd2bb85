"""The shapes that keep the code readable and its borders real."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import REPO

SOURCES = sorted((REPO / "src" / "octavo").rglob("*.py"))
TESTS = sorted((REPO / "tests").rglob("test_*.py"))
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
PURE_MODULES = ("octavo.core", "octavo.kvcache", "octavo.scheduler")
HEAVY = ("numpy", "torch", "jax", "tokenizers", "fastapi", "asyncio", "socket")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            yield node


def name_of(path: Path) -> str:
    return str(path.relative_to(REPO))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_fit_in_a_sitting(path: Path) -> None:
    """Turns red when a file grows past what a reader holds."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_fit_on_a_screen(path: Path) -> None:
    """Turns red when a function grows past a screen."""
    long = [f.name for f in functions(path) if length_of(f) > MAX_FUNCTION_LINES]
    assert not long


def length_of(function: Function) -> int:
    """Lines from the first statement on: a command's options are a table, not a program."""
    return function.end_lineno - function.body[0].lineno + 1


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_module_state(path: Path) -> None:
    """Turns red when a module keeps state that changes: a bare list, dict or set, or ``global``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    mutable = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    found = [
        ast.unparse(node)[:80]
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, mutable)
        and not is_constant(node)
    ]
    found += [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Global)]
    assert not found


def is_constant(node: ast.Assign | ast.AnnAssign) -> bool:
    if isinstance(node, ast.AnnAssign):
        return "Final" in ast.unparse(node.annotation)
    return ast.unparse(node.targets[0]) == "__all__"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_public_things_say_what_they_are(path: Path) -> None:
    """Turns red when a module, a public class or a public function has no docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    missing = [] if ast.get_docstring(tree) else ["the module"]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            missing += [] if ast.get_docstring(node) else [node.name]
            methods = [n for n in node.body if isinstance(n, Function)]
        elif isinstance(node, Function):
            methods = [node]
        else:
            continue
        missing += [m.name for m in methods if m.name[0] != "_" and not is_documented(m)]
    assert not missing


def is_documented(function: Function) -> bool:
    if ast.unparse(function.body) == "...":  # part of a protocol, whose docstring says what it is
        return True
    overloads = {"override", "overload"}
    return bool(ast.get_docstring(function)) or any(
        ast.unparse(decorator).split(".")[-1] in overloads for decorator in function.decorator_list
    )


@pytest.mark.parametrize("path", TESTS, ids=name_of)
def test_tests_say_what_they_prove(path: Path) -> None:
    """Turns red when a test has no sentence about the fault it would catch."""
    silent = [
        f.name for f in functions(path) if f.name.startswith("test_") and not ast.get_docstring(f)
    ]
    assert not silent


@pytest.mark.parametrize("package", PURE_MODULES)
def test_pure_tower_loads_nothing_heavy(package: str) -> None:
    """Turns red when the logical cache or the scheduler pulls in tensors or a network."""
    folder = REPO / "src" / Path(*package.split("."))
    modules = [package] + [f"{package}.{path.stem}" for path in folder.glob("[a-z]*.py")]
    code = (
        f"import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []


def test_importing_octavo_loads_nothing() -> None:
    """Turns red when ``import octavo`` costs more than its own file."""
    code = "import sys, octavo; print(*[n for n in sys.modules if n.startswith('octavo.')])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []


def test_packages_are_no_barrels() -> None:
    """Turns red when a package's ``__init__`` imports, so that one module drags in all."""
    barrels = [
        name_of(path)
        for path in SOURCES
        if path.name == "__init__.py"
        and path.parent.name != "octavo"
        and len(ast.parse(path.read_text(encoding="utf-8")).body) > 1
    ]
    assert not barrels
