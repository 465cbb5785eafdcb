"""The examples of docs/sparse.md, and of all but datasets of the page on recd.*."""

from __future__ import annotations

import pytest
from ruamel.yaml import YAML
from tests.docs.pages import blocks, page, plugin_page

from recd_plugins.config.manager import PluginManager

OF_RECD = sorted(PluginManager().plugins["preprocessing"])
POOLINGS = sorted(PluginManager().plugins["pooling"])


def section(heading: str) -> str:
    sections = plugin_page("recd").split("\n## ")
    (text,) = (text for text in sections if text.startswith(f"{heading}\n"))
    return text


def test_python_of_sparse_md_runs_as_one_program():
    code = blocks(page("sparse.md"), "python")
    assert len(code) == 5
    exec(compile("\n".join(code), "docs/sparse.md", "exec"), {})


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("converter", "recd.kjt"),
        ("converter", "recd.ikjt"),
        ("converter", "recd.partial_ikjt"),
        *(("preprocessing", name) for name in OF_RECD if name.startswith("recd.")),
        *(("pooling", name) for name in POOLINGS if name.startswith("recd.")),
    ],
)
def test_recd_md_shows_valid_options_and_runs(kind, name):
    text = section(f"{kind.capitalize()} {name}")
    (example,) = blocks(text, "yaml")
    entry = YAML(typ="safe").load(example)[kind]
    entry = entry[0] if isinstance(entry, list) else entry
    assert entry["use"] == name
    options = PluginManager().plugins[kind][name].cls.Options
    options.model_validate(entry.get("options", {}))
    assert all(f"`{option}`" in text for option in options.model_fields)
    for code in blocks(text, "python"):
        exec(compile(code, "plugins/recd_plugin_recd/docs/README.md", "exec"), {})
