"""docs/models.md: its registry section is valid, and its counts are those of its snippet."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from recd_plugins.registry import ModelSpec

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def test_the_section_is_valid() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    spec = ModelSpec.model_validate(YAML(typ="safe").load(text)["model"])
    assert (spec.architecture, spec.cross_layers) == ("dcn", 6)


def test_counts_are_those_of_the_snippet(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
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
