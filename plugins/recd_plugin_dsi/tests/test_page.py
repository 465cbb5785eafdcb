"""plugins/recd_plugin_dsi/docs/README.md names what there is, and its registry is one."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import blocks, plugin_page

from recd_plugin_dsi.ray_ingestion import RayOptions
from recd_plugins import load_registry

PAGE = plugin_page("dsi")


def test_the_page_names_every_option_with_its_default() -> None:
    bounds = {"readers", "min_readers", "max_readers"}  # said in words
    for name, field in RayOptions.model_fields.items():
        (row,) = re.findall(rf"^\|[^|]*`{name}`[^|]*\|([^|]*)\|", PAGE, flags=re.MULTILINE)
        if name not in bounds:
            default = "null" if field.default is None else str(field.default)
            assert row.strip().strip("`").removesuffix(".0") == default.removesuffix(".0"), name


def test_the_registry_of_the_page_is_one(tmp_path: Path) -> None:
    (registry,) = blocks(PAGE, "yaml")
    path = tmp_path / "registry.yaml"
    path.write_text(registry, encoding="utf-8")
    loaded = load_registry(path)
    assert loaded.ingestion is not None
    assert (
        loaded.ingestion.plugin.options.model_dump()
        == RayOptions(readers=2, cpus_per_reader=0.5, memory="64MB").model_dump()
    )
