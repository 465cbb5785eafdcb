"""docs/registry.md: its example is valid, and its tables are those of the code."""

import json
import re
from pathlib import Path

import pytest

from recd_plugins import load_registry
from recd_plugins.config import CheckpointSpec, ModelSpec, TrainingSpec
from recd_plugins.config.built_in_kinds import KINDS
from recd_plugins.config.schema import registry_spec
from recd_plugins.runtime.errors import RegistryError

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "registry.md").read_text()


def row(model: type, name: str) -> str:
    field = model.model_fields[name]
    default = field.get_default()
    shown = "{}" if isinstance(default, CheckpointSpec) else json.dumps(default)
    return f"| `{name}` | `{shown}` | {field.description} |"


@pytest.mark.parametrize(
    ("model", "name"),
    [(m, n) for m in (ModelSpec, TrainingSpec, CheckpointSpec) for n in m.model_fields],
)
def test_every_field_has_its_row(model, name):
    assert row(model, name) in PAGE.splitlines()


@pytest.mark.parametrize("section", registry_spec(KINDS).model_fields)
def test_every_section_has_its_row(section):
    assert f"| `{section}` |" in PAGE


@pytest.fixture
def example(tmp_path, monkeypatch) -> Path:
    """The page's registry file, ``registry.yaml`` in the current directory."""
    monkeypatch.chdir(tmp_path)
    path = Path("registry.yaml")
    path.write_text(re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)[0])
    return path


def test_the_example_is_valid(example):
    assert len(load_registry(example).sharding) == 1


def test_its_errors_are_as_shown(example):
    example.write_text(example.read_text().replace("buckets:", "bukets:"))
    with pytest.raises(RegistryError) as caught:
        load_registry(example)
    shown = re.findall(r"^registry\.yaml:.*$", PAGE, flags=re.MULTILINE)
    assert shown
    assert set(shown) <= set(str(caught.value).splitlines())


def test_the_errors_on_the_page_of_validate_are_as_shown(example):
    text = example.read_text().replace("recd.interactions", "recd.interaction")
    example.write_text(text.replace("batch_size: 512", "batch_size: 0"))
    with pytest.raises(RegistryError) as caught:
        load_registry(example)
    page = (DOCS / "commands" / "validate.md").read_text()
    shown = re.findall(r"^registry\.yaml:\d.*$", page, flags=re.MULTILINE)
    assert shown == str(caught.value).splitlines()
