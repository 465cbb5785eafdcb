"""Plugins and examples import only public modules of the framework."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest
from tests.installed import framework_imports

import recd_plugins
from recd_plugins import api, testing

ROOT = Path(__file__).parents[1]
FILES = {
    folder.name: sorted(folder.rglob("*.py"))
    for folder in (*ROOT.glob("plugins/*"), *ROOT.glob("examples/*"))
}
PUBLIC = re.compile(
    rf"recd_plugins(\.(api|testing)\b.*|\.({'|'.join(recd_plugins.__all__)}))?|recd_plugin_\w+\.api"
)


@pytest.mark.parametrize("folder", [name for name, files in FILES.items() if files])
def test_it_imports_public_modules_alone(folder: str) -> None:
    found = {}
    for path in FILES[folder]:
        inside = path.relative_to(ROOT).parts
        if "tests" in inside:
            continue
        package = inside[1] if inside[0] == "plugins" else inside[2]
        private = {n for n in framework_imports(path, package) if not PUBLIC.fullmatch(n)}
        if private:
            found["/".join(inside)] = private
    assert not found


def _docstrings(module: ModuleType) -> Iterator[tuple[str, str]]:
    for name in module.__all__:
        listed = getattr(module, name)
        if not getattr(listed, "__module__", "").startswith("recd_plugins"):
            continue
        yield name, inspect.getdoc(listed) or ""
        for method, value in vars(listed).items() if inspect.isclass(listed) else ():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if not method.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{method}", inspect.getdoc(function) or ""


TESTING = [f"{testing.__name__}.{m.name}" for m in iter_modules(testing.__path__)]
API = [
    "recd_plugins",
    api.__name__,
    *TESTING,
]


@pytest.mark.parametrize("module", API)
def test_public_docstrings_name_what_is_public(module: str) -> None:
    found = dict(_docstrings(import_module(module)))
    private = {
        place: named
        for place, text in found.items()
        for named in re.findall(r"recd_plugins\.[\w.]+\w|:\w+:`[^`]+`", text)
        if not PUBLIC.fullmatch(named)
    }
    assert not private
