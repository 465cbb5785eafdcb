from __future__ import annotations

import json

import pytest
from tests import installed
from tests.commands import invoke as recd
from tests.installed import Site

from recd_plugins import RunConfig, load_registry
from recd_plugins.config.built_in_kinds import KINDS
from recd_plugins.runtime.errors import PluginError, RegistryError

KIND = """
from abc import abstractmethod
from recd_plugins.api import Kind, Plugin, PluginOptions, hookimpl

class Audit(Plugin):
    kind = "audit"
    @abstractmethod
    def look(self, name): ...

@hookimpl
def register_kinds():
    return [Kind(name="audit", interface=Audit, section="audits", claims="by table",
                 description="Who looks at tables.")]
"""

PLUGIN = '''
from recd_plugins.api import PluginOptions, hookimpl
from module_of_acme import Audit

class Count(Audit):
    """Count what is looked up."""
    name = "{name}.count"
    class Options(PluginOptions):
        every: int = 1
    def look(self, name): ...

@hookimpl
def register_plugins():
    return [Count]
'''

HEAD = """version: 1
dataset: {use: recd.session_parquet, options: {path: table}}
converter: {use: recd.kjt}
"""


site = installed.site


def load(site: Site, text: str) -> RunConfig:
    return load_registry(site.registry(HEAD + text))


def refused(site: Site, text: str) -> str:
    with pytest.raises((PluginError, RegistryError)) as caught:
        load(site, text)
    return str(caught.value)


AUDITS = """audits:
  - {use: other.count, tables: [t_user, t_item], options: {every: 3}}
  - {use: other.count, tables: ["t_h*"]}
  - {use: other.count, tables: [t_item], enabled: false}
"""


def test_a_section_of_a_third_party(site: Site) -> None:
    site.install("other", PLUGIN.format(name="other"))  # whose kind another package brings
    site.install("acme", KIND)
    registry = load(site, AUDITS)
    first, second = registry.entries("audit")
    assert (first.field, first.line, first.plugin.options.every) == ("audits[0]", 5, 3)
    assert (second.field, second.patterns) == ("audits[1]", ("t_h*",))
    tables = ["t_user", "t_item", "t_history", "t_other"]
    claims = {"t_user": first, "t_item": first, "t_history": second}
    assert registry.claim("audit", tables) == claims
    with pytest.raises(RegistryError, match=r"yaml:5 audits\[0\].tables: 't_user' matches no t"):
        registry.claim("audit", ["t_item", "t_h"])
    assert recd("validate", site.registry(HEAD + AUDITS)).stdout.endswith(": 4 entries, ok\n")
    with pytest.raises(KeyError, match="audits"):
        registry.entries("audits")


@pytest.mark.parametrize(
    ("claims", "entry", "seen"),
    [
        ("list", "[{use: other.count}, {use: other.count, enabled: false}]", [()]),
        ("optional one", "{use: other.count}", [()]),
        ("by feature", "[{use: other.count, features: [user]}]", [("user",)]),
        ("several by feature", "[{use: other.count, features: [user, item]}]", [("user", "item")]),
    ],
)
def test_what_stands_in_a_section(site: Site, claims: str, entry: str, seen: list) -> None:
    site.install("acme", KIND.replace("by table", claims))
    site.install("other", PLUGIN.format(name="other"))
    registry = load(site, f"audits: {entry}\n")
    assert [each.patterns for each in registry.entries("audit")] == seen
    if claims in ("list", "optional one"):
        with pytest.raises(TypeError, match="of kind 'audit' have no feature or table patterns"):
            registry.claim("audit", ["user"])
    else:
        found = registry.claim("audit", ["user", "item"])["user"]
        assert isinstance(found, tuple) == (claims == "several by feature")
    assert "yaml:4 audits" in refused(site, "audits: {tables: [a]}\n")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (f"{KIND}\nraise ValueError(5)", "entry point 'acme"),
        (KIND.replace("return [", "return 1 / 0, ["), "register_kinds failed: ZeroDivisionError"),
    ],
    ids=["module", "hook"],
)
def test_the_package_of_a_section_is_broken(site: Site, broken: str, reason: str) -> None:
    site.install("acme", broken)
    said = refused(site, "audits: []\n")
    assert "registry.yaml:4 audits: unknown key. Use one of these: 'version', 'dataset'" in said
    listed = " ".join(recd("plugins").stderr.split())
    assert f"acme cannot be used: acme-plugins 1.0: {reason}" in listed
    load(site, "preprocessing: []\n")


def test_a_plugin_without_a_kind_is_refused(site: Site) -> None:
    site.install("acme", KIND)
    text = PLUGIN.replace("from module_of", "from recd_plugins.api import Plugin\nfrom module_of")
    site.install("other", text.format(name="other").replace("(Audit)", "(Plugin)"))
    assert "has kind = None, which no installed package registers" in refused(site, AUDITS)


def test_kinds_and_plugins_of_files(site: Site) -> None:
    folder = site.folder / "plugins"
    (folder / "package").mkdir(parents=True)
    plugin = PLUGIN.format(name="mine").replace("from module_of_acme import Audit", "")
    (folder / "package" / "__init__.py").write_text(KIND + plugin)
    registry = site.registry(HEAD + "audits: [{use: mine.count, tables: [a]}]\n")
    assert len(load_registry(registry, plugins_dir=folder).entries("audit")) == 1


def test_the_lists_and_the_schema_have_them(site: Site) -> None:
    site.install("acme", KIND)
    site.install("other", PLUGIN.format(name="other"))
    (found,) = json.loads(recd("plugins", "--kind", "audit", "--json").stdout)
    assert found["name"] == "other.count"
    assert found["from"] == "other-plugins 1.0"
    said = recd("plugins", "--kind", "audits").stderr
    assert "is not a plugin kind. Use one of: 'dataset', 'converter'" in said
    kind = json.loads(recd("plugins", "--kinds", "--json").stdout)[-1]
    told = {"kind": "audit", "section": "audits", "claims": "by table"}
    assert kind == told | {"from": "acme-plugins 1.0", "description": "Who looks at tables."}
    assert "audit (acme-plugins 1.0): Who looks at tables." in recd("plugins", "--kinds").stdout
    schema = json.loads(recd("schema").stdout)
    assert list(schema["properties"])[-3:] == ["audits", "model", "training"]
    assert schema["properties"]["audits"]["description"] == "Who looks at tables."
    entry = schema["$defs"]["audit_entry"]
    assert entry["properties"]["use"]["enum"] == ["other.count"]
    assert entry["required"] == ["use", "tables"]
    assert schema["$defs"]["audit.other.count"]["properties"]["every"]["type"] == "integer"


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_every_kind_has_an_interface_of_its_name(kind) -> None:
    assert kind.interface.kind == kind.name
