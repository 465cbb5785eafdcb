"""Wrappers of a dataset: ``dataset.wrap`` in registry files."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from tests import commands
from tests.registry.conftest import Load, Problems

from recd_plugins.api import prepared_data
from recd_plugins.interfaces import DatasetWrapper
from recd_plugins.runtime.errors import SetupError

FILE = """\
version: 1
dataset:
  use: acme.data
  wrap:
{wrap}
  options: {{path: clicks}}
converter: {{use: acme.plain}}
"""
FIRST = "    - {use: acme.outer, options: {word: a}}\n"
SECOND = "    - {use: acme.outer, options: {word: b, times: 2}}\n"


def test_each_stands_around_those_before_it(load: Load) -> None:
    registry = load(FILE.format(wrap=FIRST + SECOND))
    assert [entry.field for entry in registry.wrappers] == ["dataset.wrap[0]", "dataset.wrap[1]"]
    assert [entry.line for entry in registry.wrappers] == [5, 6]
    wrapped = prepared_data.wrapped_dataset(registry)
    reader = wrapped.reader(rank=0, world_size=1, batch_size=1, split="train")
    assert str(reader) == "bb(a(reader))"
    assert isinstance(wrapped, DatasetWrapper)
    assert wrapped.schema() == registry.dataset.schema()
    plain = registry.dataset.reader(rank=0, world_size=1, batch_size=1, split="train")
    assert str(plain) == "reader", "the dataset itself is as it was"


def test_one_that_is_not_enabled_is_left_out_and_checked(load: Load, problems: Problems) -> None:
    off = FILE.format(wrap=FIRST.replace("}}", "}, enabled: false}"))
    assert prepared_data.wrapped_dataset(load(off)).name == "acme.data"
    found = problems(off.replace("word", "wrod"))
    assert any(each.startswith("r.yaml:5 dataset.wrap[0].options.wrod: ") for each in found)


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        (
            "    - {use: acme.data}",
            "r.yaml:5 dataset.wrap[0].use: 'acme.data' is a dataset plugin. Move "
            "this entry to the section dataset:",
        ),
        (
            "    - {use: acme.outre}",
            "r.yaml:5 dataset.wrap[0].use: no wrapper plugin is named 'acme.outre'. Did you mean "
            "'acme.outer'?",
        ),
        (
            FIRST + "    - {use: acme.outer, options: {word: a, tims: 2}}",
            "r.yaml:6 dataset.wrap[1].options.tims: unknown option of 'acme.outer'. Did you mean "
            "'times'?",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_line(problems: Problems, wrap: str, expected: str) -> None:
    assert expected in problems(FILE.format(wrap=wrap))


def test_what_is_asked_before_there_is_a_model(load: Load) -> None:
    wrapped = prepared_data.wrapped_dataset(load(FILE.format(wrap=FIRST)))
    assert isinstance(wrapped, DatasetWrapper)
    with pytest.raises(SetupError, match=r"prepare\(\) has not run"):
        _ = wrapped.lookups.parts


def test_commands_show_wrappers(load: Load, plugins_dir: Path) -> None:
    path = load(FILE.format(wrap=FIRST)).path
    recd = partial(commands.recd, "--plugins-dir", plugins_dir)
    assert "3 entries, ok" in recd("validate", path)
    assert "dataset, wrapper" in recd("plugins", "--kind", "dataset")
    kinds = {plugin["name"]: plugin["wrapper"] for plugin in json.loads(recd("plugins", "--json"))}
    assert (kinds["acme.outer"], kinds["acme.data"]) == (True, False)
    entries = json.loads(recd("schema"))["$defs"]
    assert "acme.outer" in entries["wrapper_entry"]["properties"]["use"]["enum"]
    assert "acme.outer" not in entries["dataset_entry"]["properties"]["use"]["enum"]
    wrap = entries["dataset_entry"]["properties"]["wrap"]
    assert wrap["items"] == {"$ref": "#/$defs/wrapper_entry"}
    assert "times" in entries["wrapper.acme.outer"]["properties"]
