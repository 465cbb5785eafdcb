from pathlib import Path

import pytest

from recd_plugins import load_registry
from recd_plugins.config import hookspecs
from recd_plugins.config.manager import PluginManager, installed_plugin
from recd_plugins.interfaces import PluginOptions
from recd_plugins.runtime.errors import PluginError

PLUGIN = '''
from recd_plugins.config.hookspecs import hookimpl
from recd_plugins.interfaces import Plugin, Preprocessing

class Keep(Preprocessing):
    """Leave ids as they are."""
    name = "{name}"
    def transform(self, values, offsets):
        return values, offsets

@hookimpl
def register_preprocessing():
    return [Keep]
'''


def write(folder: Path, file: str, text: str) -> None:
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(text)


def refused(folder: Path) -> str:
    with pytest.raises(PluginError) as caught:
        _ = PluginManager(folder).plugins
    return str(caught.value)


def test_installed_plugins_say_which_distribution_brought_them():
    origins = PluginManager().origins
    assert origins
    assert all(origin.startswith("recd-plugin-") for origin in origins)


def test_an_installed_plugin_is_made_without_a_registry():
    name = next(iter(PluginManager().plugins["sharding"]))
    plugin = installed_plugin("sharding", name)
    assert plugin.name == name
    assert isinstance(plugin.options, PluginOptions)
    with pytest.raises(PluginError, match=r"no installed package has a sharding plugin named 'acm"):
        installed_plugin("sharding", "acme.rows")


def test_files_and_packages_of_a_folder(tmp_path):
    write(tmp_path, "one.py", PLUGIN.format(name="acme.one"))
    write(tmp_path, "two/__init__.py", "from .hooks import *")
    write(tmp_path, "two/hooks.py", PLUGIN.format(name="acme.two"))
    write(tmp_path, "_left_out.py", "raise RuntimeError")
    write(tmp_path, "notes.txt", "no plugin")
    found = PluginManager(tmp_path).plugins["preprocessing"]
    assert found["acme.one"].origin == str(tmp_path / "one.py")
    assert found["acme.two"].origin == str(tmp_path / "two" / "__init__.py")
    assert PluginManager(tmp_path).plugins["preprocessing"]["acme.one"].cls is found["acme.one"].cls
    write(tmp_path, "three.py", PLUGIN.format(name="acme.one"))
    same = "plugins are named 'acme.one': class Keep of {}/one.py and class Keep of {}/three"
    assert same.format(tmp_path, tmp_path) in refused(tmp_path)


def test_a_broken_import_is_named_and_may_be_mended(tmp_path):
    write(tmp_path, "broken.py", "import no_such_module_anywhere")
    assert "broken.py" in (message := refused(tmp_path))
    assert "no_such_module_anywhere" in message
    write(tmp_path, "broken.py", PLUGIN.format(name="acme.mended"))
    assert "acme.mended" in PluginManager(tmp_path).plugins["preprocessing"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("return [Keep]", "return [object]"), "object has kind = None"),
        (("return [Keep]", "return [1 / 0]"), "register_preprocessing failed: ZeroDivisionError"),
        (("(Preprocessing):", "(Plugin):"), "Keep has kind = None"),
        (("def register_preprocessing", "def register_preprocesing"), "register_preprocesing"),
        (("register_preprocessing()", "register_preprocessing(wrong)"), "wrong"),
        (("@hookimpl\n", ""), "implements no hook"),
        (("(Preprocessing)", "(Preprocessing"), "SyntaxError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_plugin_is_refused_with_its_file(tmp_path, change, expected):
    text = PLUGIN.format(name="acme.one")
    assert change[0] in text
    write(tmp_path, "one.py", text.replace(*change))
    message = refused(tmp_path)
    assert expected in message
    assert str(tmp_path / "one.py") in message
    assert "recd_plugins_dir" not in message, "a name that is in no file"


def test_what_hooks_and_plugins_print_is_none_either(tmp_path, capsys):
    text = PLUGIN.format(name="acme.one").replace("return [Keep]", 'print("hook"); return [Keep]')
    made = 'def __init__(self, options): print("made"); super().__init__(options)'
    write(tmp_path, "one.py", text.replace("    def transform", f"    {made}\n    def transform"))
    write(
        tmp_path,
        "registry.yaml",
        "version: 1\n"
        "dataset: {use: dlrm.random, options: {rows: 8, sparse: {a: 10}}}\n"
        "converter: {use: recd.kjt}\n"
        "preprocessing: [{use: acme.one, features: [a]}]\n",
    )
    load_registry(tmp_path / "registry.yaml", plugins_dir=tmp_path)
    assert tuple(capsys.readouterr()) == ("", "hook\nmade\n")


def hooks() -> list[str]:
    return [name for name, value in vars(hookspecs).items() if hasattr(value, "recd_plugins_spec")]


@pytest.mark.parametrize("hook", hooks())
def test_every_hook_is_documented(hook):
    root = Path(__file__).parents[1]
    assert (getattr(hookspecs, hook).__doc__ or "").strip()
    assert f"`{hook}" in (root / "docs/plugins/index.md").read_text()
