"""Imports: none in a circle, and no garbage collected on the way."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from recd_plugins.runtime.imports import without_collections

ROOT = Path(__file__).parent.parent


def test_collections_are_back_after_imports() -> None:
    with suppress(ImportError), without_collections():
        with without_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_no_modules_import_one_another() -> None:
    """At run time, in functions and for types: the contract of layers looks at folders alone."""
    files = [
        (path, folder) for folder in ("src", "plugins") for path in (ROOT / folder).rglob("*.py")
    ]
    modules = {name_of(path.relative_to(ROOT / folder)): path.read_text() for path, folder in files}
    assert len(modules) > 200
    check_no_circles(modules)


def check_no_circles(modules: dict[str, str]) -> None:
    graph = {name: set(imported(name, code, modules)) for name, code in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imported by the one behind it: {', '.join(error.args[1])}")


def imported(name: str, code: str, modules: dict[str, str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            of = node.module or ""
            dotted = [f"{of}.{alias.name}" for alias in node.names]
            found = [each if each in modules else of for each in dotted]
        else:
            continue
        yield from (each for each in found if each in modules and each != name)


def name_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")
