"""A scan of a package's source for private names of other packages."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from recd_plugins.runtime.versions import Internal

_BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
# Documented, although they begin with an underscore.
_PUBLIC = frozenset({"_exit", "_current_frames", "_replace", "_fields", "_asdict", "_make"})


def problems(folder: Path, internals: Iterable[Internal]) -> list[str]:
    """Return private names that are used and not listed, and listed names that are not used.

    A private name belongs to the package if a file of the package defines it.
    """
    files = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*.py"))
        if "tests" not in path.relative_to(folder).parts
    }
    own = {name for tree in files.values() for name in _defined(tree)}
    listed = {name: internal.of for internal in internals for name in internal.names}
    unlisted = [
        f"{path.relative_to(folder.parent)}:{line}: {name} is another package's and not listed"
        for path, tree in files.items()
        for name, line in _used(tree)
        if _is_private(name) and name not in own and name not in listed
    ]
    used = {
        name
        for path, tree in files.items()
        for name, _ in _used(tree, strings=not path.name.endswith("internals.py"))
    }
    return unlisted + [
        f"{of} {name} is listed and not used"
        for name, of in listed.items()
        if name not in used | own
    ]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _PUBLIC | {"_"}


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.alias(asname=str(name)):
                yield name


def _used(tree: ast.AST, *, strings: bool = False) -> Iterator[tuple[str, int]]:
    """Yield attributes, imported names and names given to ``getattr`` and the like, with lines.

    With ``strings`` every whole string counts, too.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                yield name, node.lineno
            case ast.ImportFrom(module=module, names=names):
                if not (module or "").startswith("recd_plugin"):
                    for each in [*(module or "").split("."), *(alias.name for alias in names)]:
                        yield each, node.lineno
            case ast.Import(names=names):
                for alias in names:
                    for each in alias.name.split("."):
                        yield each, node.lineno
            case ast.Call(func=ast.Name(id=function), args=[_, *rest]) if function in _BY_NAME:
                for given in rest:
                    if isinstance(given, ast.Constant) and isinstance(given.value, str):
                        yield given.value, node.lineno
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="vars")), slice=ast.Constant(value=str(name))
            ):
                yield name, node.lineno
            case ast.Constant(value=str(name)) if strings:
                yield name, node.lineno
