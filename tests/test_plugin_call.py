"""Errors of plugins name the plugin and its line, also if a wrapper calls it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from recd_plugins import load_registry
from recd_plugins.api import prepared_data
from recd_plugins.cli import main
from recd_plugins.cli.exits import fault_message

FAULTY = '''
from recd_plugins.api import *

class Bad(DatasetWrapper):
    """Fails where it is told to."""
    name = "bad.wrapper"
    class Options(PluginOptions):
        at: str
    def fail(self, method):
        if method == self.options.at: {}[method]
    def prepare(self): self.fail("prepare"); super().prepare()
    def reader(self, **given):
        self.fail("reader")
        return self.inner.reader(**given)
    def session_reader(self, **given):
        self.fail("session_reader")
        return self.inner.session_reader(**given)

class Around(DatasetWrapper):
    """Changes nothing."""
    name = "bad.around"
    def reader(self, **given): return self.inner.reader(**given)

@hookimpl
def register_datasets(): return [Bad, Around]
'''
FILE = """\
version: 1
dataset:
  use: dlrm.random
  options: {rows: 64, sparse: {user: 10}, dense: 1}
  wrap:
    - {use: bad.wrapper, options: {at: METHOD}}
    - {use: bad.around}
converter: {use: recd.kjt}
model: {embedding_dim: 4}
training: {batch_size: 8, steps: 2}
"""
ARGUMENTS = {"rank": 0, "world_size": 1, "batch_size": 8, "split": "train"}


@pytest.fixture
def folder(cwd: Path) -> Path:
    (cwd / "plugins").mkdir()
    (cwd / "plugins" / "bad.py").write_text(FAULTY)
    return cwd


def failing_at(folder: Path, method: str) -> Path:
    (folder / "r.yaml").write_text(FILE.replace("METHOD", method))
    return folder / "r.yaml"


@pytest.mark.parametrize("method", ["prepare", "reader", "session_reader"])
def test_a_method_of_a_dataset_in_a_wrapper(folder: Path, method: str) -> None:
    registry = load_registry(failing_at(folder, method), plugins_dir=folder / "plugins")
    dataset = prepared_data.wrapped_dataset(registry)
    called = dataset if method != "session_reader" else dataset.inner
    failed = rf"plugin 'bad\.wrapper' failed in {method} \(.*bad\.py:\d+"
    with pytest.raises(KeyError, match=rf"r\.yaml:6 dataset\.wrap\[0\]: {failed}"):
        getattr(called, method)(**({} if method == "prepare" else ARGUMENTS))


def test_recd_run_shows_it_as_the_plugins(folder: Path) -> None:
    path = failing_at(folder, "reader")
    result = CliRunner().invoke(main, ["--plugins-dir", "plugins", "run", str(path)])
    assert isinstance(result.exception, KeyError)
    message = fault_message(result.exception)
    assert re.search(r"'bad\.wrapper' failed in reader \(.*bad\.py:\d+\): KeyError: ", message)
    assert "internal error" not in message
