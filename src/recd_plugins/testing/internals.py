"""A scan of a package's source for names of other packages that have no public form.

A package that relies on such names lists them (``recd_plugins.api.Internal``, hook
``register_internals``), so that ``recd doctor`` says which of them the installed versions lack. Its
test is::

    def test_internals() -> None:
        assert not problems(Path(acme.__file__).parent, acme.internals.INTERNALS)
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from recd_plugins.interfaces.values.internal import Internal, has_name

__all__ = ["problems"]

_BY_NAME = ("getattr", "hasattr", "setattr", "delattr", "require_attributes")
#: Documented, for all that they begin with an underscore.
_PUBLIC = frozenset({"_exit", "_current_frames", "_replace", "_fields", "_asdict", "_make"})


def problems(
    folder: Path, internals: Iterable[Internal], ours: Iterable[str] = ("recd_plugin",)
) -> list[str]:
    """Private names of others that are used and not listed, and listed ones that are not used.

    Read are attributes, imports, and strings that ``getattr`` and the like are called with. A name
    with one leading underscore is ours where the file defines it, unless the class that has it is
    derived from another's that has it, too.

    Args:
        folder: of the package, with ``__init__.py``; its ``tests`` are left out.
        internals: what the package lists.
        ours: how the names of packages begin that are no others'.

    Returns:
        A line each, those of the source with file and line.
    """
    own = (folder.name, *ours)
    files = [
        _File(path, f"{path.relative_to(folder.parent)}", own)
        for path in sorted(folder.rglob("*.py"))
        if "tests" not in path.relative_to(folder).parts
    ]
    listed = {name: internal for internal in internals for name in internal.names}
    unlisted = [
        f"{where}: {name} is another package's and not listed"
        for file in files
        for name, where in file.uses()
        if name not in listed
    ]
    mentioned = set().union(*(file.mentioned() for file in files))
    unused = [
        f"{internal.of} {name} is listed and not used"
        for name, internal in listed.items()
        if name not in mentioned
    ]
    return unlisted + unused


def _is_private(name: str) -> bool:
    return (
        name.startswith("_")
        and not name.startswith("__")
        and name != "_"
        and name not in _PUBLIC
        and name.isidentifier()
    )


class _File:
    """One file of source."""

    def __init__(self, path: Path, name: str, own: tuple[str, ...]) -> None:
        self._tree = ast.parse(path.read_text(encoding="utf-8"))
        self._name = name
        self._own = own
        self._classes = {n.name: n for n in ast.walk(self._tree) if isinstance(n, ast.ClassDef)}
        self._imports = dict(self._imported())
        self._defined = set(self._definitions(self._tree))

    def mentioned(self) -> set[str]:
        """Every attribute and imported name, and every whole string, which may name one."""
        is_list = self._name.endswith("internals.py")
        names: set[str] = set()
        for node in ast.walk(self._tree):
            match node:
                case ast.Attribute(attr=name) | ast.FunctionDef(name=name):
                    names.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    names.add(name)
                case ast.Constant(value=str(name)) if not is_list:
                    names.add(name)
                case ast.ImportFrom(module=module):
                    names.update((module or "").split("."), (each.name for each in node.names))
        return names

    def uses(self) -> Iterator[tuple[str, str]]:
        """Private names of others, with file and line."""
        for name, line in self._uses(self._tree, None):
            yield name, f"{self._name}:{line}"

    def _uses(self, node: ast.AST, inside: ast.ClassDef | None) -> Iterator[tuple[str, int]]:
        match node:
            case ast.Attribute(value=value, attr=name) if _is_private(name):
                if self._is_others(name, value, inside):
                    yield name, node.lineno
            case ast.ImportFrom(module=str(module)) if not self._is_ours(module):
                for name in [*module.split("."), *(each.name for each in node.names)]:
                    if _is_private(name):
                        yield name, node.lineno
            case ast.Import():
                for name in (part for each in node.names for part in each.name.split(".")):
                    if _is_private(name):
                        yield name, node.lineno
            case ast.Call(func=ast.Name(id=function)) if function in _BY_NAME:
                of, *names = [*node.args, ast.Constant(None)]
                for each in names:
                    if isinstance(each, ast.Constant) and isinstance(each.value, str):
                        name = each.value
                        if _is_private(name) and self._is_others(name, of, inside):
                            yield name, node.lineno
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="vars"), args=[of]),
                slice=ast.Constant(value=str(name)),
            ) if _is_private(name):
                if self._is_others(name, of, inside):
                    yield name, node.lineno
            case ast.ClassDef():
                inside = node
                for name in self._definitions_of(node):
                    if self._base_has(node, name):
                        yield name, node.lineno
        for child in ast.iter_child_nodes(node):
            yield from self._uses(child, inside)

    def _is_others(self, name: str, of: ast.expr, inside: ast.ClassDef | None) -> bool:
        if isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super":
            of = ast.Name("self")
        if isinstance(of, ast.Name) and of.id in ("self", "cls") and inside is not None:
            return self._base_has(inside, name)
        if isinstance(of, ast.Name) and of.id in self._imports:
            return not self._is_ours(self._imports[of.id][0])
        return name not in self._defined

    def _base_has(self, cls: ast.ClassDef, name: str) -> bool:
        """Whether another package's base of a class has the name."""
        for base in cls.bases:
            while isinstance(base, ast.Subscript):
                base = base.value
            text = ast.unparse(base)
            if text in self._classes and self._classes[text] is not cls:
                if self._base_has(self._classes[text], name):
                    return True
                continue
            for each in getattr(self._resolve(text), "__mro__", ()):
                if not self._is_ours(each.__module__) and has_name(each, name):
                    return True
        return False

    def _resolve(self, text: str) -> Any:
        first, *rest = text.split(".")
        if first not in self._imports:
            return None
        module, name = self._imports[first]
        found: Any = import_module(module)
        for part in [*([name] if name else []), *rest]:
            found = getattr(found, part, None)
        return found

    def _is_ours(self, module: str) -> bool:
        return module.startswith(self._own)

    def _imported(self) -> Iterator[tuple[str, tuple[str, str]]]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom):
                for each in node.names:
                    yield each.asname or each.name, (node.module or "", each.name)
            elif isinstance(node, ast.Import):
                for each in node.names:
                    name = each.asname or each.name.partition(".")[0]
                    yield name, (each.name if each.asname else name, "")

    def _definitions(self, tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    yield name
                case ast.Name(id=name, ctx=ast.Store()):
                    yield name
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    yield name

    def _definitions_of(self, cls: ast.ClassDef) -> Iterator[str]:
        """Private names in the body of a class: methods and class attributes."""
        for node in cls.body:
            match node:
                case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    found = [name]
                case ast.Assign(targets=targets):
                    found = [each.id for each in targets if isinstance(each, ast.Name)]
                case _:
                    continue
            yield from filter(_is_private, found)
