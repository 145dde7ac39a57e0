"""Worked examples: those of every plain torch twin hold, and every operation and every launched kernel has one."""

import ast
import doctest
from importlib import import_module
from pathlib import Path

import pytest

from sonic_ep.kernels import backend

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
TWINS = sorted(KERNELS.rglob("reference.py"))


def name_of(path: Path) -> str:
    """Returns the module name of a file under kernels/."""
    return ".".join(("sonic_ep", *path.relative_to(ROOT).with_suffix("").parts))


def functions(path: Path) -> list[ast.FunctionDef]:
    """Returns all functions that a file defines."""
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)]


def operations() -> list[tuple[str, str]]:
    """Returns (module of the twin, name) of every operation that backend.py makes by `op`."""
    calls = [node for node in ast.walk(ast.parse((KERNELS / "backend.py").read_text())) if isinstance(node, ast.Call)]
    twins = [ast.unparse(call.args[0]).split(".")[-1] for call in calls if ast.unparse(call.func) == "op"]
    return [(getattr(backend, name).__module__, name) for name in twins]


def fast_launch_kernels() -> list[tuple[Path, ast.FunctionDef]]:
    """Returns every kernel under kernels/ that `fast_launch` decorates, with its file."""
    return [
        (path, function)
        for path in sorted(KERNELS.rglob("*.py"))
        for function in functions(path)
        if "fast_launch" in map(ast.unparse, function.decorator_list)
    ]


@pytest.mark.parametrize("path", TWINS, ids=name_of)
def test_examples_of_a_twin_hold(path: Path) -> None:
    assert doctest.testmod(import_module(name_of(path))).failed == 0


@pytest.mark.parametrize(("module", "name"), operations())
def test_an_operation_has_an_example(module: str, name: str) -> None:
    twin = getattr(import_module(module), name)
    assert any(found.examples for found in doctest.DocTestFinder().find(twin, name))


@pytest.mark.parametrize(
    ("path", "kernel"),
    [pytest.param(*found, id=f"{name_of(found[0])}.{found[1].name}") for found in fast_launch_kernels()],
)
def test_a_kernel_has_a_docstring_and_an_example(path: Path, kernel: ast.FunctionDef) -> None:
    of_kernel = ast.get_docstring(kernel)
    assert of_kernel, f"{path}:{kernel.lineno} {kernel.name}"
    # Two kernels that only work together have one example, at the head of their file.
    of_file = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert "Example" in of_kernel + of_file, f"{path}:{kernel.lineno} {kernel.name}"


@pytest.mark.parametrize(("file", "name"), [("row_gemm", "_HopperRows"), ("wgrad", "_PrefetchesIndices")])
def test_a_gemm_has_an_example(file: str, name: str) -> None:
    tree = ast.parse((KERNELS / "experts" / "sm90" / f"{file}.py").read_text(encoding="utf-8"))
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    assert "Example" in (ast.get_docstring(found) or "")


def test_operations_and_kernels_are_found() -> None:
    assert len(TWINS) >= 13
    assert len(operations()) >= 13
    assert len(fast_launch_kernels()) >= 25
