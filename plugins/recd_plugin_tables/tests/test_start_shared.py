"""Columns with the ids of another one: they are ids, too, and numbered as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from recd_plugin_tables.sources import open_source
from recd_plugin_tables.start.guess import Wanted, guess
from recd_plugin_tables.start.survey import survey
from recd_plugin_tables.tests.helpers import write
from recd_plugins import load_registry
from recd_plugins.cli import main

ROWS = 400


@pytest.mark.parametrize("as_text", [False, True], ids=["lists", "texts"])
def test_lists_of_the_ids_of_another_column_are_numbered_as_it(
    tmp_path: Path, as_text: bool
) -> None:
    hotels = [f"h{row * 7 % 40}" for row in range(ROWS)]
    before = [[hotels[row - 1], hotels[row - 9], f"x{row % 3}"] for row in range(ROWS)]
    columns = {
        "hotel": hotels,
        "before": ["|".join(each) for each in before] if as_text else before,
        "tags": [["a", "b", f"c{row % 3}"] for row in range(ROWS)],
        "user": [row % 9 for row in range(ROWS)],
        "click": [row % 2 for row in range(ROWS)],
    }
    path = write(tmp_path / "t.parquet", columns)
    done = CliRunner().invoke(main, ["init", str(path), str(tmp_path / "my.yaml")])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "my.yaml").read_text(encoding="utf-8")
    document = YAML(typ="safe").load(text)
    alike = [each for each in document["preprocessing"] if each.get("options", {}).get("shared")]
    assert [each["features"] for each in alike] == [["hotel", "before"]]
    # 43 ids, a quarter more, and 8.
    tables = document["model"]["tables"]
    for table in ("t_hotel", "t_before"):
        assert tables[table]["num_embeddings"] == alike[0]["options"]["rows"] == 62
    load_registry(tmp_path / "my.yaml")


@pytest.mark.parametrize("gaps", [True, False])
def test_whole_numbers_that_a_list_has_too_are_ids(tmp_path: Path, gaps: bool) -> None:
    """Without gaps those of two columns would be equal by chance, as ages and numbers of them."""
    films = [100 + (1 + 6 * gaps) * (row * 7 % 60) for row in range(600)]
    columns = {
        "film": films,
        "seen": [[films[row - 1], films[row - 9]] for row in range(600)],
        "price": [each + 1000 * (row % 2) for row, each in enumerate(films)],
        "user": [row % 9 for row in range(600)],
        "click": [row % 2 for row in range(600)],
    }
    path = write(tmp_path / "t.parquet", columns)
    found = {each.name: each.roles for each in guess(survey(open_source(path)), Wanted()).columns}
    assert found["film"] == (("id",) if gaps else ("number",))
    assert found["price"] == ("number",)
    assert CliRunner().invoke(main, ["init", str(path), str(tmp_path / "my.yaml")]).exit_code == 0
    document = YAML(typ="safe").load((tmp_path / "my.yaml").read_text(encoding="utf-8"))
    alike = [each for each in document["preprocessing"] if each.get("options", {}).get("shared")]
    assert [each["features"] for each in alike] == [["film", "seen"]] * gaps
