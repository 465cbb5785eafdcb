"""Sections of topology files that packages have: read, wrong, in conflict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.installed import Site, on_path

from recd_plugins.cli import main
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


def test_of_two_packages_with_one_section_the_second_is_broken(site: Site) -> None:
    site.install("a", SECTION)
    site.install("b", SECTION)
    path = site.folder / "here.yaml"
    path.write_text(TOPOLOGY, encoding="utf-8")
    sections = read_topology(path).sections
    assert {name: type(of).__module__ for name, of in sections.items()} == {"links": "module_of_a"}
    said = CliRunner().invoke(main, ["plugins"]).stderr
    assert "b cannot be used: b-plugins 1.0: register_topology_sections: section links" in said
