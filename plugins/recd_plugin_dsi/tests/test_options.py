"""Options and versions, without Ray."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from recd_plugin_dsi.cluster import join
from recd_plugin_dsi.options import OLDEST, TOO_NEW, RayOptions, check_ray
from recd_plugins.runtime.errors import SetupError

PACKAGE = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_readers": 3, "max_readers": 2}, "min_readers is 3, more than max_readers, 2"),
        ({"min_readers": 3}, "min_readers needs max_readers"),
        ({"readers": 2, "max_readers": 4}, "readers is a fixed number"),
        ({"cpus": 4, "address": "auto"}, "cpus is for a cluster that the run starts"),
        ({"memory": "lots"}, "'lots' is no number of bytes"),
        ({"stall_target": 1.5}, "less than 1"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValidationError, match=message):
        RayOptions.model_validate(options)


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ({}, (2, 2)),
        ({"readers": 5}, (5, 5)),
        ({"max_readers": 4}, (1, 4)),
        ({"min_readers": 2, "max_readers": 4}, (2, 4)),
    ],
)
def test_bounds(options, bounds):
    assert RayOptions.model_validate(options).bounds == bounds


def test_ray_is_missing(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SetupError, match=r'pip install "recd-plugins\[ray\]"'):
        check_ray()


@pytest.mark.parametrize("version", ["2.44.1", "2.61.0", "3.0.0.dev0"])
def test_ray_is_another(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(SetupError, match=rf"needs Ray 2\.60 or newer, below 2\.61, and {version}"):
        check_ray()


def test_the_extra_installs_what_is_needed():
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    oldest, too_new = (".".join(map(str, version)) for version in (OLDEST, TOO_NEW))
    assert project["optional-dependencies"]["ray"] == [f"ray[data]>={oldest},<{too_new}"]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
        ("somewhere", "not HOST:PORT, nor auto"),
    ],
)
def test_nothing_is_at_the_address(address, message):
    with pytest.raises(SetupError, match=message):
        join(RayOptions(address=address), 1)
