"""Histories that an import builds hold earlier rows of the session and no others."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from recd_plugin_tables import importer, spill
from recd_plugin_tables.tests.helpers import by_row, rows_of, table, write
from recd_plugin_tables.values import text_id
from recd_plugins.runtime.errors import DataError

USES = {"user": "session", "item": "id", "when": {"as": "time", "unit": "s"}}


def log(rows: int = 200) -> dict[str, list]:
    draw = np.random.default_rng(0)
    return {
        "user": draw.integers(0, 20, rows).tolist(),
        "item": [f"i{item}" for item in draw.integers(0, 50, rows)],
        "when": (1_700_000_000 + draw.integers(0, 60, rows)).tolist(),
    }


def expected(given: dict[str, list], last: int, ties: str) -> list[list[int]]:
    found = []
    for row, (user, when) in enumerate(zip(given["user"], given["when"], strict=True)):
        before = [
            (given["when"][other], other)
            for other in range(len(given["user"]))
            if given["user"][other] == user
            and (
                given["when"][other] < when
                or (ties == "stored" and given["when"][other] == when and other < row)
            )
        ]
        found.append([text_id(given["item"][other]) for _, other in sorted(before)][-last:])
    return found


@pytest.mark.parametrize("ties", ["apart", "stored"])
@pytest.mark.parametrize("order", ["session", "stored"])
def test_a_history_holds_earlier_rows_of_the_session(tmp_path, monkeypatch, order, ties):
    monkeypatch.setattr(spill, "_ROWS", 7)
    monkeypatch.setattr(importer, "MEMORY", 1000)
    given = log()
    path = write(tmp_path / "log.parquet", given)
    histories = {"before": {"of": "item", "last": 3, "ties": ties}}
    options = {"columns": USES, "implicit": True, "histories": histories, "order": order}
    whole = table(path, **options)
    assert whole.schema().sparse == ("item", "before")
    assert by_row(whole)["before"] == expected(given, 3, ties)
    # Rows of the test may have rows of training in their histories; a table to score has its own.
    parted = table(path, **options, split={"by": "time", "test": 0.3})
    found = {}
    for split in ("train", "test"):
        rows = by_row(parted, split)
        found |= zip(rows["_row"], rows["before"], strict=True)
    assert [found[row] for row in range(200)] == expected(given, 3, ties)
    assert by_row(parted.to_score(str(path)))["before"] == expected(given, 3, ties)
    if order == "stored":
        assert rows_of(whole)["_row"] == list(range(200))


def test_candidates_of_one_row_are_in_no_history_of_each_other(tmp_path):
    given = {"user": [1, 1], "item": [[1, 2, 3], [4, 5]], "when": [10, 11]}
    options = {"columns": USES, "implicit": True, "explode": ["item"]}
    histories = {"before": {"of": "item", "ties": "stored"}}
    data = table(write(tmp_path / "baskets.parquet", given), histories=histories, **options)
    assert by_row(data)["before"] == [[]] * 3 + [[1, 2, 3]] * 2


def test_a_table_to_score_needs_the_columns_of_histories(tmp_path):
    given = log()
    options = {"columns": USES, "implicit": True, "histories": {"before": {"of": "item"}}}
    trained = table(write(tmp_path / "log.parquet", given), **options)
    empty = {name: pa.array(values)[:0] for name, values in given.items()}
    scored = trained.to_score(str(write(tmp_path / "empty.parquet", empty)))
    scored.prepare()
    assert sum(len(rows) for rows in scored.scan()) == 0
    del given["when"]
    new = write(tmp_path / "new.parquet", given)
    with pytest.raises(DataError, match="no column 'when'"):
        trained.to_score(str(new)).prepare()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"implicit": False}, "implicit: true"),
        ({"histories": {"before": {"of": "user"}}}, "not a column with role 'id'"),
        ({"split": {"by": "row"}}, "would contain test rows"),
        ({"columns": {**USES, "user": "key"}}, "a session or request column"),
    ],
)
def test_options_that_would_leak_or_mean_nothing_are_refused(tmp_path, changes, said):
    options = {"columns": USES, "implicit": True, "histories": {"before": {"of": "item"}}}
    with pytest.raises(ValidationError, match=said):
        table(tmp_path / "log.parquet", **{**options, **changes})
