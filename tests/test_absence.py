"""Without any one of the built-in plugins, everything that does not use it works as before."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import click
import pytest
from tests.docs.pages import blocks, page
from tests.installed import install_wheel

from recd_plugins.api import plan_modes
from recd_plugins.config.manager import PluginManager

ROOT = Path(__file__).parents[1]
PLUGINS = [path.parent.name for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))]

#: Imports all modules of the installed packages, and runs commands.
PROGRAM = """
import importlib, pkgutil, sys
from click.testing import CliRunner

site, plugins, registry = sys.argv[1:]
from recd_plugins.cli import main

assert sys.modules["recd_plugins"].__file__.startswith(site)

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
        except ModuleNotFoundError as error:  # an extra that is not installed
            assert not error.name.startswith("recd"), (found.name, error)
losses = recd("run", registry, "--steps", "3")
assert "loss" in losses, losses
"""

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
#: Entries of a registry file by plugin and section.
ENTRIES = (
    ("recd_plugin_recd", "preprocessing", HASH),
    ("recd_plugin_recd", "pooling", "{use: recd.mean, features: [seq_0_0]}"),
    ("recd_plugin_flexshard", "sharding", "{use: flexshard.two_tier, tables: [t_seq_0_0]}"),
    ("recd_plugin_torchrec", "sharding", "{use: torchrec.table_wise, tables: [t_item_0]}"),
    ("recd_plugin_tuning", "sharding", "{use: auto}"),  # t_item_1
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
    site = tmp_path_factory.mktemp("installed")
    for source in (ROOT, *(ROOT / "plugins" / name for name in PLUGINS)):
        install_wheel(source, site)
    return site


@pytest.mark.parametrize("absent", PLUGINS)
def test_all_else_works_without(absent: str, installed: Path, tmp_path: Path) -> None:
    site, plugins, registry = (tmp_path / name for name in ("site", "plugins", "registry.yaml"))
    shutil.copytree(installed, site, ignore=shutil.ignore_patterns(f"{absent}*"))
    plugins.mkdir()
    (code,) = blocks(page("plugins/converter.md"), 'python title="plugins/acme_named.py"')
    (plugins / "acme.py").write_text(code)
    registry.write_text(registry_without(absent, tmp_path))
    # One rank of torchrun; the editable distributions are hidden by those of ``site``.
    environment = {name: value for name, value in os.environ.items() if name != "RECD_ONLY"} | {
        "PYTHONPATH": f"{site}{os.pathsep}{sysconfig.get_path('purelib')}",
        "RECD_WITHOUT": absent.replace("_", "-"),
        "NUMBA_OPT": "1",
        "COLUMNS": "200",
        **dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
        "MASTER_ADDR": "127.0.0.1",
    }
    # Without site there are no .pth files, which would bring the checkout.
    command: list[str | Path] = [sys.executable, "-S", "-P", "-c", PROGRAM, site, plugins, registry]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "cannot be used" not in output
    assert not [name for name in names_of(absent) if re.search(name, output, re.M)]
    for other in set(PLUGINS) - {absent}:
        assert not [name for name in names_of(other) if not re.search(name, output, re.M)]


def registry_without(absent: str, folder: Path) -> str:
    dataset, converter = (
        next(text for plugin, text in entries.items() if plugin != absent)
        for entries in (DATASETS, CONVERTERS)
    )
    sections: dict[str, list[str]] = {}
    for plugin, section, entry in ENTRIES:
        # Without poolings of recd there are no sequences, which flexshard's entry needs.
        if plugin != absent and not (absent == "recd_plugin_recd" and "flexshard" in entry):
            sections.setdefault(section, []).append(entry)
    return REST.format(
        dataset=dataset.replace("FOLDER", str(folder)),
        converter=converter,
        entries="\n".join(f"{name}: [{', '.join(found)}]" for name, found in sections.items()),
    )


def names_of(package: str) -> list[str]:
    """Return patterns of the names in outputs that only a package brings."""
    manager, commands = PluginManager(), click.Group()
    manager.items("register_commands", cli=commands)
    plugins = {name for by_name in manager.plugins.values() for name in by_name}
    modes: list[type[plan_modes.PlanMode]] = manager.items("register_plans")
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
