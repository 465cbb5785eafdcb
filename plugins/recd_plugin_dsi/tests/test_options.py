"""Options, without Ray."""

import importlib.util

import pytest
from pydantic import ValidationError

from recd_plugin_dsi.options import RayOptions, check_ray
from recd_plugins.runtime.errors import SetupError


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
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SetupError, match=r'pip install "recd-plugins\[ray\]"'):
        check_ray()
