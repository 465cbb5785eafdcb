"""Packages of plugins, installed into a folder on the path."""

from __future__ import annotations

import ast
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from tests import forked

from recd_plugins.runtime.plugin_modules import _packages_in


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name: str, text: str) -> None:
        module = f"module_of_{name}"
        (self.folder / f"{module}.py").write_text(text, encoding="utf-8")
        about = self.folder / f"{name}_plugins-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}-plugins\nVersion: 1.0\n", encoding="utf-8"
        )
        (about / "entry_points.txt").write_text(
            f"[recd_plugins]\n{name} = {module}\n", encoding="utf-8"
        )
        _packages_in.cache_clear()

    def registry(self, text: str) -> Path:
        path = self.folder / "registry.yaml"
        path.write_text(text, encoding="utf-8")
        return path


@contextmanager
def on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Find packages in a folder, and forget their modules afterwards."""
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv("RECD_ONLY")
    yield
    for name in [name for name in sys.modules if name.startswith("module_of_")]:
        del sys.modules[name]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with on_path(tmp_path, monkeypatch):
        yield Site(tmp_path)


def pip_installed(package: Path, folder: Path) -> dict[str, str]:
    """Return an environment with a package installed as a wheel in ``folder``."""
    source = folder / "source"
    shutil.copytree(package, source, ignore=shutil.ignore_patterns("__pycache__"))
    target = folder / "site-packages"
    install_wheel(source, target)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    del environment["RECD_ONLY"]
    return environment


def install_wheel(source: Path, folder: Path) -> None:
    """Install a package as pip does, without its interpreters."""
    with tempfile.TemporaryDirectory() as wheels:
        for wheel in WheelBuilder(str(source)).build(directory=wheels, versions=["standard"]):
            zipfile.ZipFile(wheel).extractall(folder)


def python(environment: dict[str, str], *arguments: object) -> str:
    done = forked.run([sys.executable, *map(str, arguments)], env=environment, check=True)
    return done.stdout


def recd(environment: dict[str, str], *arguments: object) -> str:
    return python(environment, "-c", "from recd_plugins.cli import main; main()", *arguments)


def framework_imports(module: Path, package: str) -> set[str]:
    """Return imported modules of recd-plugins, its names, and modules of other plugins."""
    names = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None, "imports are absolute"
            parts = {each.name for each in node.names} if node.module == "recd_plugins" else {""}
            names |= {f"{node.module}.{part}".rstrip(".") for part in parts}
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
    own = {name for name in names if name.partition(".")[0] == package}
    return {name for name in names - own if name.startswith("recd")}
