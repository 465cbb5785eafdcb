"""Test suite for plugins of all kinds."""

from __future__ import annotations

import functools
import inspect
import json
import pickle
import re
import subprocess
import sys

import pytest
from pydantic import ValidationError

from recd_plugins.interfaces import Plugin, PluginOptions

_IMPORT_WITHOUT_TORCH = """
import importlib.util, sys
sys.modules["torch"] = sys.modules["torchrec"] = sys.modules["fbgemm_gpu"] = None
name, file = sys.argv[1], sys.argv[2]
sys.path[:0] = sys.argv[3:]
if importlib.util.find_spec(name.partition(".")[0]):
    importlib.import_module(name)
else:
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
"""


def check_identity(plugin: Plugin) -> None:
    """Assert that a plugin and its pickled copy have the same ``identity``, made of JSON values."""
    identity = plugin.identity()
    assert json.loads(json.dumps(identity, allow_nan=False)) == identity, "JSON values only"
    assert pickle.loads(pickle.dumps(plugin)).identity() == identity


class PluginContract:
    """Base class of the test suites. Subclasses override the fixture ``plugin``."""

    @pytest.fixture
    def plugin(self) -> Plugin:
        """Return the plugin under test, with options for a small test."""
        pytest.fail("override the fixture `plugin` to return the plugin under test")

    def test_has_a_qualified_name_and_a_summary(self, plugin: Plugin) -> None:
        assert re.fullmatch(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*", plugin.name), "package.part"
        assert type(plugin).summary(), "the docstring's first line is what `recd plugins` shows"

    def test_options_are_immutable_and_refuse_unknown_names(self, plugin: Plugin) -> None:
        assert issubclass(type(plugin).Options, PluginOptions)
        assert isinstance(plugin.options, type(plugin).Options)
        values = plugin.options.model_dump()
        with pytest.raises(ValidationError, match="no_such_option"):
            type(plugin).Options.model_validate({**values, "no_such_option": 1})
        for name in values:
            with pytest.raises(ValidationError):
                setattr(plugin.options, name, values[name])

    def test_options_are_json(self, plugin: Plugin) -> None:
        options = plugin.options
        assert type(options).model_validate_json(options.model_dump_json()) == options

    def test_module_imports_without_torch(self, plugin: Plugin) -> None:
        """``recd validate`` runs without torch, so plugin modules import torch inside methods."""
        module = type(plugin).__module__
        errors = _errors_without_torch(module, inspect.getfile(type(plugin)))
        assert errors is None, f"{module} needs torch to be imported:\n{errors}"


@functools.cache
def _errors_without_torch(module: str, file: str) -> str | None:
    """Import a module in a process without torch. Return stderr if that fails, or None."""
    path = [entry for entry in sys.path if entry]
    command = [sys.executable, "-P", "-c", _IMPORT_WITHOUT_TORCH, module, file, *path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else None
