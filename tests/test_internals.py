"""Private names of torch, TorchRec and FBGEMM that this project uses exist in their sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from recd_plugins.runtime.imports import without_collections

ROOT = Path(__file__).parents[1]
FOLDERS = [
    ROOT / "src/recd_plugins",
    *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml")),
]
_BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
#: Packages and modules of the standard library whose private names are used.
_OTHERS = ("torch", "torchrec", "fbgemm_gpu", "fsspec", "multiprocessing", "os", "sys", "typing")
#: Names in compiled code and in optional packages.
_KAFKA = ("_PARTITION_EOF", "_ALL_BROKERS_DOWN", "_AUTO_OFFSET_RESET")
_NOT_IN_SOURCES = frozenset({*_KAFKA, "_internal_kv_del", "_internal_kv_put", "_internal"})


def missing(folder: Path) -> list[str]:
    """Return the private names that neither this package nor a package in ``_OTHERS`` has."""
    with without_collections():  # of garbage, which take most of the time
        files = {
            path: [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
            for path in sorted(folder.rglob("*.py"))
            if "tests" not in path.relative_to(folder).parts
        }
    own = {name for nodes in files.values() for name in _defined(nodes)}
    known = own | _private_names() | _NOT_IN_SOURCES
    return [
        f"{path.relative_to(folder.parent)}:{line}: no installed package has {name}"
        for path, nodes in files.items()
        for name, line in _used(nodes)
        if re.match(r"_[a-zA-Z]", name) and name not in known
    ]


@cache
def _private_names() -> frozenset[str]:
    found = set[bytes]()
    for package in _OTHERS:
        spec = find_spec(package)
        assert spec is not None, package
        folders = [Path(each) for each in spec.submodule_search_locations or ()]
        sources = [path for folder in folders for path in folder.rglob("*.py*")]
        for path in sources or [Path(str(spec.origin))]:
            if path.suffix in (".py", ".pyi"):
                found.update(re.findall(rb"\b_\w+", path.read_bytes()))
    return frozenset(name.decode() for name in found)


def _defined(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.alias(asname=str(name)):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _used(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    for node in nodes:
        match node:
            case ast.Attribute(attr=name):
                yield name, node.lineno
            case ast.ImportFrom(module=module, names=names):
                if not (module or "").startswith("recd_plugin"):
                    for each in [*(module or "").split("."), *(alias.name for alias in names)]:
                        yield each, node.lineno
            case ast.Call(func=ast.Name(id=function), args=[_, *rest]) if function in _BY_NAME:
                for given in rest:
                    if isinstance(given, ast.Constant) and isinstance(given.value, str):
                        yield given.value, node.lineno
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="vars")), slice=ast.Constant(value=str(name))
            ):
                yield name, node.lineno


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_installed_versions_have_them(folder: Path) -> None:
    assert missing(folder) == []


SOURCE = """
from torch._C import _autograd, _gone
from torch import nn

class Ours(nn.Module):
    _mine = 1

    def forward(self, kernel):
        self._kept = kernel._local_rows, kernel._kept, getattr(kernel, "_gone_rows", None)
        self._own_method(super()._gone_bootstrap)
        return vars(nn)["_gone_jit"]

    def _own_method(self): ...
"""


def test_what_the_scan_sees(tmp_path: Path) -> None:
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme/plugin.py").write_text(SOURCE, encoding="utf-8")
    gone = {2: "_gone", 9: "_gone_rows", 10: "_gone_bootstrap", 11: "_gone_jit"}
    assert set(missing(tmp_path / "acme")) == {
        f"acme/plugin.py:{line}: no installed package has {name}" for line, name in gone.items()
    }
