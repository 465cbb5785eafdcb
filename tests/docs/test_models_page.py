"""docs/models.md: its registry section is valid, and its counts are those of its snippet."""

from __future__ import annotations

import re

import pytest
from ruamel.yaml import YAML
from tests.docs.pages import blocks, page

from recd_plugins.config import ModelSpec

PAGE = page("models.md")


def test_the_section_is_valid() -> None:
    (text,) = blocks(PAGE, "yaml")
    spec = ModelSpec.model_validate(YAML(typ="safe").load(text)["model"])
    assert (spec.architecture, spec.cross_layers) == ("dcn", 6)


def test_counts_are_those_of_the_snippet(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = blocks(PAGE, "python")
    exec(snippet, {})
    printed = capsys.readouterr().out.splitlines()
    found = [[int(number) for number in line.split()] for line in printed[1::2]]
    section = PAGE.partition("\n## rm1")[0]
    shown = [
        [int(cell.replace(",", "")) for cell in re.findall(r"[\d,]+", line)]
        for name in ("tables", "bottom MLP", "interaction", "top MLP")
        for line in re.findall(rf"^\| {name} \|([ \d,|]+)\|$", section, flags=re.MULTILINE)
    ]
    # The page has a thousand times as many rows.
    shown[0] = [count // 1000 for count in shown[0]]
    assert shown == [list(column) for column in zip(*found, strict=True)]
