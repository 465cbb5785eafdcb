"""Imports: none in a circle or of private modules, no plugin named, nothing changed or said."""

from __future__ import annotations

import ast
import gc
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest
from tests.installed import framework_imports

import recd_plugins
from recd_plugins import api, testing
from recd_plugins.config.manager import PluginManager
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
    modules = {}
    for path, folder in files:
        name = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = path.read_text()
    assert len(modules) > 200
    with without_collections():  # of garbage, which take most of the time
        graph = {name: set(imported(name, code, modules)) for name, code in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imported by the one behind it: {', '.join(error.args[1])}")


STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


def imported(name: str, code: str, modules: dict[str, str]) -> Iterator[str]:
    nodes: list[ast.AST] = [ast.parse(code)]
    for node in nodes:
        nodes += [each for each in ast.iter_child_nodes(node) if isinstance(each, STATEMENTS)]
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            of = node.module or ""
            dotted = [f"{of}.{alias.name}" for alias in node.names]
            found = [each if each in modules else of for each in dotted]
        else:
            continue
        yield from (each for each in found if each in modules and each != name)


FILES = {
    folder.name: sorted(folder.rglob("*.py"))
    for folder in (*ROOT.glob("plugins/*"), *ROOT.glob("examples/*"))
}
PUBLIC = re.compile(
    rf"recd_plugins(\.(api|serving|testing)\b.*|\.({'|'.join(recd_plugins.__all__)}))?|recd_plugin_\w+\.api"
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


@pytest.mark.parametrize("module", ["recd_plugins", api.__name__, *TESTING])
def test_public_docstrings_name_what_is_public(module: str) -> None:
    found = dict(_docstrings(import_module(module)))
    private = {
        place: named
        for place, text in found.items()
        for named in re.findall(r"recd_plugins\.[\w.]+\w|:\w+:`[^`]+`", text)
        if not PUBLIC.fullmatch(named)
    }
    assert not private


CODE = """
import importlib, sys
import torch, torchrec, fbgemm_gpu
import torchrec.distributed.embedding, torchrec.distributed.embeddingbag
import torchrec.distributed.train_pipeline, torchrec.distributed.planner
import torch.distributed, torch.nn.parallel
import fbgemm_gpu.split_table_batched_embeddings_ops_training

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "torchrec", "fbgemm_gpu") or module is None:
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                for of_class, each in list(vars(value).items()):
                    found[name, key, of_class] = each
    return found

before = attributes()
import recd_plugins
for name in recd_plugins.__all__:
    getattr(recd_plugins, name)
after = attributes()
caches = {"__abstractmethods__", "_abc_impl", "__warningregistry__", "__annotations__"}
changed = [
    place
    for place, value in before.items()
    if place[-1] not in caches and after.get(place, value) is not value
]
print(changed)
"""


def test_importing_patches_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


PLUGINS = PluginManager().plugins
# Of packages: a name of recd-plugins itself has no dot.
NAMES = sorted({name for found in PLUGINS.values() for name in found if "." in name})


@pytest.mark.parametrize("file", sorted(ROOT.glob("src/**/*.py")), ids=lambda file: file.name)
def test_no_plugin_is_named(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"\brecd_plugin_\w+", text)
    # Of a module that is imported, as torchrec.x, more follows.
    named = "|".join(map(re.escape, NAMES))
    assert not re.findall(rf"(?<![\w.])(?:{named})(?![\w.(])", text)


SCRIPT = """
import logging
import warnings
from torch.distributed._shard._utils import DEPRECATE_MSG
from recd_plugins.runtime.imports import silence_upstream
silence_upstream()
logging.warning("Sharding spec not found for bags.t")
logging.warning("something else")
warnings.warn(DEPRECATE_MSG, FutureWarning)
warnings.warn("no ShardedTensor", FutureWarning)
renamed = "`torch.distributed.all_gather_into_tensor` is deprecated. Please use `another`"
warnings.warn_explicit(renamed, FutureWarning, "f", 1, module="torch.distributed.c10d_logger")
warnings.warn_explicit("`mine` is deprecated", FutureWarning, "mine.py", 1, module="mine")
"""


def test_tables_and_their_checkpoints_bring_no_warning() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == (
        "WARNING:root:something else\n<string>:10: FutureWarning: no ShardedTensor\n"
        "mine.py:1: FutureWarning: `mine` is deprecated\n"
    )
