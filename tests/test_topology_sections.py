"""Sections of topology files that packages have: read, wrong, in conflict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.installed import Site, on_path

from recd_plugins.cli import main
from recd_plugins.config.manager import PluginManager
from recd_plugins.planning.topologies import read_topology

SECTION = """
from pydantic import BaseModel
from recd_plugins.api import hookimpl

class Links(BaseModel):
    rate: float

@hookimpl
def register_topology_sections():
    return {"links": Links}
"""

TOPOLOGY = """
device: cpu
ranks_per_node: 4
ddr_bytes: 1000000
ddr_bandwidth: 4.0e+9
intra_node_bandwidth: 2.0e+9
inter_node_bandwidth: 1.0e+9
flops: 1.0e+9
links: {rate: 2.0}
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with on_path(tmp_path, monkeypatch):
        yield Site(tmp_path)


def sections(site: Site) -> dict[str, str]:
    """The modules of those that a topology has."""
    path = site.folder / "here.yaml"
    path.write_text(TOPOLOGY, encoding="utf-8")
    return {name: type(of).__module__ for name, of in read_topology(path).sections.items()}


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (
            "{'links': Links}",
            "section links of topology files is another package's; rename it",
        ),
    ],
)
def test_a_wrong_one_is_refused_and_stops_no_other(site: Site, returned: str, reason: str) -> None:
    site.install("a", SECTION)
    site.install("b", SECTION.replace('{"links": Links}', returned))
    assert sections(site) == {"links": "module_of_a"}
    manager = PluginManager()
    manager.register_topology_sections()
    (broken,) = manager.broken
    assert broken.name == "b"
    assert broken.reason.startswith("b-plugins 1.0: ")
    assert reason in broken.reason
    said = CliRunner().invoke(main, ["plugins"]).stderr
    assert f"b cannot be used: {broken.reason}" in said
