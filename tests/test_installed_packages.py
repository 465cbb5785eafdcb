"""Installed packages of plugins: loaded by their names; broken ones stop only what needs them."""

from __future__ import annotations

import json
import re
import sys

import pytest
from tests import forked, installed
from tests.commands import invoke as recd
from tests.installed import Site

from recd_plugins import RunConfig, api, interfaces, load_registry
from recd_plugins.api import API_VERSION
from recd_plugins.config.manager import PluginManager
from recd_plugins.runtime.errors import PluginError, RegistryError

PLUGIN = '''
from recd_plugins.api import Preprocessing, hookimpl

class Keep(Preprocessing):
    """Leave ids as they are."""
    name = "{name}.keep"
    def transform(self, values, offsets):
        return values, offsets

@hookimpl
def register_preprocessing():
    return [Keep]

@hookimpl
def register_commands(cli):
    import click
    cli.add_command(click.Command("{name}-hello", callback=lambda: print("hello")))
'''

REGISTRY = """version: 1
dataset: {{use: recd.session_parquet, options: {{path: table}}}}
converter: {{use: recd.kjt}}
preprocessing:
  - {{use: {use}, features: [user]}}
"""


site = installed.site


def install(site: Site, name: str, text: str = PLUGIN) -> None:
    site.install(name, text.format(name=name))


def load(site: Site, use: str) -> RunConfig:
    return load_registry(site.registry(REGISTRY.format(use=use)))


def refused(site: Site, use: str) -> str:
    with pytest.raises((PluginError, RegistryError)) as caught:
        load(site, use)
    return str(caught.value)


def test_only_packages_are_imported_that_the_file_names(site: Site) -> None:
    install(site, "acme")
    install(site, "other")
    load(site, "acme.keep")
    assert "module_of_acme" in sys.modules
    assert "module_of_other" not in sys.modules


BROKEN = [
    ("import no_such_module", "failed to load: ModuleNotFoundError: No module named 'no_such_modu"),
    (f"REQUIRES_API = {API_VERSION + 1}\n{PLUGIN}", f"needs version {API_VERSION + 1} of recd"),
    (PLUGIN.replace("register_pre", "register_per"), "unknown hook 'register_perprocessing'"),
]


@pytest.mark.parametrize(("text", "reason"), BROKEN, ids=[reason for _, reason in BROKEN])
def test_what_is_broken_stops_only_what_needs_it(site: Site, text: str, reason: str) -> None:
    install(site, "acme", text)
    install(site, "sound")
    assert load(site, "sound.keep").preprocessing[0].plugin.name == "sound.keep"
    said = refused(site, "acme.keep")
    assert reason in said
    assert "acme-plugins 1.0" in said
    assert re.match(r"\S*registry\.yaml:\d+ preprocessing\[0\]\.use: ", said.splitlines()[-1])

    listed = recd("plugins", "--json")
    assert listed.exit_code == 0
    assert "sound.keep" in {each["name"] for each in json.loads(listed.stdout)}
    assert "Plugin package acme cannot be used: acme-plugins 1.0" in listed.stderr
    assert reason in " ".join(listed.stderr.split())
    checks = {each["name"]: each for each in json.loads(recd("doctor", "--json").stdout)}
    check = checks["plugins"]
    assert check["status"] == "failed"
    assert reason in check["detail"]
    hello = recd("sound-hello")
    assert (hello.exit_code, hello.stdout) == (0, "hello\n")


@pytest.mark.parametrize("name", ["acme", "acme-plugins"])
def test_a_package_is_left_out(site: Site, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(site, "acme", "import no_such_module")
    install(site, "sound")
    assert "cannot be used" in recd("plugins").stderr
    done = recd("--without", name, "plugins")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "cannot be used" in recd("plugins").stderr, "it is for that command alone"
    monkeypatch.setenv("RECD_WITHOUT", f"{name}, sound")
    assert "sound.keep" not in PluginManager().plugins["preprocessing"]
    assert "no preprocessing plugin is named 'sound.keep" in refused(site, "sound.keep")


def test_the_api_and_plugins_import_neither_torch_nor_numba() -> None:
    """``recd validate`` runs on machines without them."""
    code, heavy = "import recd_plugins.api", ("torch", "fbgemm_gpu")
    assert not seen(code, *heavy, "numba")
    code += "\nfrom recd_plugins.config.manager import PluginManager; PluginManager().plugins"
    assert not seen(code, *heavy)


def seen(code: str, *heavy: str) -> list[str]:
    found = forked.imported_anew(code, "recd_plugin", *heavy)
    assert "recd_plugins.api" in found
    return [name for name in found if name.startswith(heavy)]


def test_every_interface_is_in_the_api() -> None:
    classes = {value for value in vars(interfaces).values() if isinstance(value, type)}
    exported = {getattr(api, name) for name in api.__all__}
    choosing = {value for value in vars(api.choosing).values() if isinstance(value, type)}
    assert classes <= exported | choosing
