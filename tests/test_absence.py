"""Any built-in plugins may be missing: what does not use them works as before."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from importlib.metadata import distribution
from itertools import combinations, count
from math import comb
from pathlib import Path

import click
import pytest
from tests.covering import by_night
from tests.docs.pages import blocks, page
from tests.installed import install_wheel

from recd_plugins.api import PlanMode
from recd_plugins.cli import PluginCommands
from recd_plugins.config.manager import PluginManager

ROOT = Path(__file__).parents[1]
PLUGINS = [path.parent.name for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))]

#: Imports what plugins depend on, once, and is forked for each folder that it reads a line about.
SERVER = """
import contextlib, gc, importlib, json, os, sys, traceback

gc.disable()
for name in json.loads(sys.argv[1]):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
assert not [name for name in sys.modules if name.startswith("recd")]
gc.freeze()
for line in sys.stdin:
    task = json.loads(line)
    if not (process := os.fork()):
        file = os.open(task["output"], os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(task["folder"])
        os.environ.update(task["environment"])
        sys.path.insert(0, task["site"])
        try:
            exec(task["program"], {"__name__": "__main__", **task["names"]})
            code = 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""
#: Imports all that is installed, and runs the command.
PROGRAM = """
import importlib, pkgutil, sys
from pathlib import Path
from click.testing import CliRunner

from recd_plugins.cli import main

assert Path(sys.modules["recd_plugins"].__file__).is_relative_to(site)

def recd(*arguments):
    done = CliRunner().invoke(main, ["--plugins-dir", plugins, *arguments])
    assert done.exit_code == 0, (arguments, done.output, done.exception)
    return done.output

for arguments in ("plugins", "doctor", "schema", "plan --help", "--help"):
    print(recd(*arguments.split()))
for found in pkgutil.walk_packages([site], onerror=print):
    if found.name.startswith("recd_plugin") and not found.name.endswith(".__main__"):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:  # of an extra that is not installed
            assert not error.name.startswith("recd"), (found.name, error)
losses = recd("run", registry, "--steps", "3")
assert "loss" in losses, losses
"""

#: Entries of a file, of every plugin; those of the absent one are left out.
DATASETS = {
    "recd_plugin_dlrm": "{use: dlrm.random, options: {rows: 64, "
    "sparse: {seq_0_0: 90, item_0: 9, item_1: 9}}}",
    "recd_plugin_recd": "{use: recd.session_parquet, options: {path: FOLDER/table, generate: "
    "{rows: 64}, sparse: [seq_0_0, item_0, item_1]}}",
}
CONVERTERS = {
    "recd_plugin_recd": "{use: recd.ikjt, options: {groups: [[seq_0_0]]}}",
    "": "{use: acme.named, options: {features: [seq_0_0]}}",
}
HASH = '{use: recd.sigrid_hash, features: ["*"], options: {buckets: 2000}}'
ENTRIES = (
    ("recd_plugin_recd", "preprocessing", HASH),
    ("recd_plugin_recd", "pooling", "{use: recd.mean, features: [seq_0_0]}"),
    ("recd_plugin_flexshard", "sharding", "{use: flexshard.two_tier, tables: [t_seq_0_0]}"),
    ("recd_plugin_torchrec", "sharding", "{use: torchrec.table_wise, tables: [t_item_0]}"),
    ("recd_plugin_tuning", "sharding", "{use: auto}"),  # of t_item_1
    ("recd_plugin_scars", "cache", "{use: scars.cache, tables: [t_item_0], options: {share: 0.1}}"),
)
REST = """version: 1
dataset: {dataset}
converter: {converter}
{entries}
model: {{embedding_dim: 4, num_embeddings: 2000, bottom_mlp: [4], top_mlp: [4]}}
training: {{batch_size: 16, ranks: 1, evaluate: false}}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of the framework and of every plugin."""
    site = tmp_path_factory.mktemp("site")
    for source in (ROOT, *(ROOT / "plugins" / name for name in PLUGINS)):
        install_wheel(source, site)
    for folder in ("src", "plugins"):
        for compiled in (ROOT / folder).rglob("__pycache__/*.*"):
            _copy_compiled(compiled.relative_to(ROOT / folder), ROOT / folder, site)
    return site


def _copy_compiled(compiled: Path, here: Path, site: Path) -> None:
    """What is compiled here, by Python and by numba: it is known by the time of its file."""
    module = compiled.parents[1] / f"{compiled.name.partition('.')[0]}.py"
    if (site / module).is_file():
        shutil.copystat(here / module, site / module)
        (site / compiled).parent.mkdir(exist_ok=True)
        shutil.copy(here / compiled, site / compiled)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """``SERVER``, with what is in this environment but the packages of this repository."""
    dependencies = tmp_path_factory.mktemp("dependencies") / "site"
    link(Path(str(distribution("torch").locate_file(""))), dependencies, but=("recd", "_recd"))
    used = ["torch", "torchrec.distributed.model_parallel", "torchrec.metrics.auc", "numba",
            "pyarrow.parquet", "pandas", "matplotlib.figure", "rich.console"]  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-S", "-P", "-c", SERVER, json.dumps(used)],
        env={**environment(), "PYTHONPATH": str(dependencies)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


def absences() -> list[tuple[str, ...]]:
    """What is absent together: by night each plugin alone.

    By day several, so that of any two one is absent while the other is there: each is absent in two
    of the runs, no two in the same two. Those that bring datasets are never absent together.
    """
    if by_night():
        return [(name,) for name in PLUGINS]
    runs = next(number for number in count(4) if comb(number, 2) >= len(PLUGINS))
    first, *others, last = combinations(range(runs), 2)
    in_order = sorted(PLUGINS, key=lambda name: name not in DATASETS)
    in_two = dict(zip(in_order, (first, last, *others), strict=False))
    return [tuple(name for name in PLUGINS if run in in_two[name]) for run in range(runs)]


@pytest.mark.parametrize("absent", absences(), ids="-".join)
def test_all_else_works_without(
    absent: tuple[str, ...], installed: Path, server: subprocess.Popen[str], tmp_path: Path
) -> None:
    # By links, so that what is compiled once is there for all tests.
    site = tmp_path / "site"
    link(installed, site, but=absent)
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "acme.py").write_text(
        blocks(page("plugins/converter.md"), "python")[0], encoding="utf-8"
    )
    registry = tmp_path / "registry.yaml"
    registry.write_text(written(absent, tmp_path), encoding="utf-8")
    names = {"site": site, "plugins": tmp_path / "plugins", "registry": registry}
    task = {
        "program": PROGRAM,
        "names": {name: str(path) for name, path in names.items()},
        "site": str(site),
        "environment": environment(),
        "folder": str(tmp_path),
        "output": str(tmp_path / "output"),
    }
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps(task), file=server.stdin, flush=True)
    code = server.stdout.readline()
    output = (tmp_path / "output").read_text(encoding="utf-8")
    assert code == "0\n", output
    assert "cannot be used" not in output
    for missing in absent:
        assert not [name for name in names_of(missing) if re.search(name, output, re.M)]
    for other in set(PLUGINS) - set(absent):
        assert not [name for name in names_of(other) if not re.search(name, output, re.M)]


def written(absent: Collection[str], folder: Path) -> str:
    """A registry file with an entry of every plugin but those that are ``absent``."""

    def first_of(entries: dict[str, str]) -> str:
        return next(text for plugin, text in entries.items() if plugin not in absent)

    here = [(section, entry) for plugin, section, entry in ENTRIES if plugin not in absent]
    if "recd_plugin_recd" in absent:  # whose poolings make sequences of features
        here = [(section, entry) for section, entry in here if "flexshard" not in entry]
    sections = {section: [entry for of, entry in here if of == section] for section, _ in here}
    return REST.format(
        dataset=first_of(DATASETS).replace("FOLDER", str(folder)),
        converter=first_of(CONVERTERS),
        entries="\n".join(f"{name}: [{', '.join(found)}]" for name, found in sections.items()),
    )


def link(source: Path, folder: Path, but: tuple[str, ...]) -> None:
    """All that is in a folder but names that start so."""
    folder.mkdir()
    for entry in source.iterdir():
        if not entry.name.startswith(but):
            (folder / entry.name).symlink_to(entry)


def environment() -> dict[str, str]:
    """One in which all plugins count, and whose process is the only rank."""
    # Port 0 is any that is free when it is taken: one chosen here may be another's by then.
    rank = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
    return {
        **{name: value for name, value in os.environ.items() if name != "RECD_ONLY"},
        **{name: str(value) for name, value in rank.items()},
        "MASTER_ADDR": "127.0.0.1",
        "COLUMNS": "200",
        # Kernels are compiled anew for this folder, and run once.
        "NUMBA_OPT": "1",
    }


def names_of(package: str) -> list[str]:
    """What only a package brings, as the commands show it: patterns of text."""
    manager, commands = PluginManager(), PluginCommands()
    manager.register_commands(commands)
    plugins = {name for by_name in manager.plugins.values() for name in by_name}
    modes = list[type[PlanMode]]()
    manager.hand("register_plans", lambda mode, _: modes.append(mode))
    of_package = package.removeprefix("recd_plugin_") + "."
    return [
        *(rf"\b{re.escape(name)}\b" for name in plugins if name.startswith(of_package)),
        *(rf"^  {name} " for name, each in commands.commands.items() if is_of(each, package)),
        *(rf"{mode.flag}\b" for mode in modes if mode.__module__.startswith(package)),
    ]


def is_of(command: click.Command, package: str) -> bool:
    while isinstance(command, click.Group):
        command = next(iter(command.commands.values()))
    return command.callback is not None and command.callback.__module__.startswith(package)
