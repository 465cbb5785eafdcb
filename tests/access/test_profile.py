from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from recd_plugins.interfaces.access import AccessProfile, TableAccess
from recd_plugins.runtime.errors import DataError

_KEY = b"recd_plugins.access_profile"


def table_access(name: str = "t", **changes: Any) -> TableAccess:
    arguments: dict[str, Any] = {
        "samples": 10,
        "rows": np.array([5, 3, 9, 1]),
        "accesses": np.array([2.0, 7.0, 2.0, 0.0]),
    }
    return TableAccess.from_counts(name, ("a", "b"), 100, **{**arguments, **changes})


def saved(path: Path) -> Path:
    tables = {"t": table_access(), "u": table_access("u", total=15.0, error=1.0)}
    tables["v"] = table_access("v").of_unique_rows(64, 33)
    AccessProfile(tables, "x").save(path / "p.parquet")
    return path / "p.parquet"


def test_the_most_read_rows_come_first_and_of_equal_ones_the_smaller() -> None:
    access = table_access()
    assert access.rows.tolist() == [3, 5, 9, 1]
    assert access.accesses.tolist() == [7.0, 2.0, 2.0, 0.0]
    assert access.length == pytest.approx(1.1)
    assert access.probabilities().tolist() == [0.7, 0.2, 0.2, 0.0]
    assert [access.covered(rows) for rows in (1, 3, 100)] == [7 / 11, 1.0, 1.0]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = saved(tmp_path)
    loaded = AccessProfile.load(str(path))
    assert (loaded.source, loaded.path) == ("x", path)
    assert list(loaded.tables) == ["t", "u", "v"]
    for table in loaded.tables.values():
        assert (table.features, table.num_embeddings, table.samples) == (("a", "b"), 100, 10)
        np.testing.assert_array_equal(table.rows, [3, 5, 9, 1])
        np.testing.assert_array_equal(table.accesses, [7, 2, 2, 0])
    assert (loaded.tables["u"].total, loaded.tables["u"].error) == (15.0, 1.0)
    assert kinds(path) == [(1.0, None), (1.0, None), (3.0, 64)]
    edit(path, without_unique)  # as written by earlier versions
    assert kinds(path) == [(1.0, None)] * 3


def kinds(path: Path) -> list[tuple[float, int | None]]:
    return [(t.dedupe_factor, t.batch_size) for t in AccessProfile.load(path).tables.values()]


def test_counts_of_unique_rows_are_merged_with_their_like_only() -> None:
    all_rows, counted = table_access(), table_access().of_unique_rows(64, 33)
    assert (counted.dedupe_factor, counted.batch_size) == (3.0, 64)
    assert counted.length == pytest.approx(3.3)
    assert counted.probabilities() == pytest.approx([2.1, 0.6, 0.6, 0.0])
    # 11 and 4 were counted, of 33 and 4.
    other = table_access(rows=np.array([9]), accesses=np.array([4.0]), samples=5)
    both = counted.merge(other.of_unique_rows(64, 4))
    assert (both.rows.tolist(), both.accesses.tolist()) == ([3, 9, 5, 1], [7.0, 6.0, 2.0, 0.0])
    assert (both.samples, both.total, both.batch_size) == (15, 15.0, 64)
    assert both.dedupe_factor == pytest.approx(37 / 15)
    assert both.length == pytest.approx(37 / 15)
    with pytest.raises(DataError, match="one profile counts all rows, but the other counts"):
        all_rows.merge(counted)
    with pytest.raises(DataError, match=r"batches of 64, but the other .* of 1,024"):
        counted.merge(all_rows.of_unique_rows(1024, 33))


def test_covering() -> None:
    profile = AccessProfile({"t_items": table_access("t_items")}, "rows of r.yaml")
    assert profile.covering("t_items", 100) is profile.tables["t_items"]
    with pytest.raises(DataError, match="does not contain table 't_item', only: 't_items'"):
        profile.covering("t_item", 100)
    with pytest.raises(DataError, match="has 100 rows for table 't_items', but the model has 101"):
        profile.covering("t_items", 101)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    lines = pq.read_table(path)
    head = json.loads(lines.schema.metadata[_KEY])
    change(head)
    pq.write_table(lines.replace_schema_metadata({_KEY: json.dumps(head)} if head else {}), path)


def without_unique(head: dict[str, Any]) -> None:
    for table in head["tables"]:
        del table["dedupe_factor"], table["batch_size"]


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8:60] = bytes(52)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("break_file", "message"),
    [
        (Path.unlink, "no such file. Create it with recd profile registry"),
        (damage, "p.parquet: "),
        (lambda path: path.write_text("table,row\n"), "profile is damaged or not Parquet"),
        (lambda path: edit(path, lambda head: head.update(version=2)), "not an access profile of"),
    ],
)
def test_a_broken_file_is_refused(
    tmp_path: Path, break_file: Callable[[Path], None], message: str
) -> None:
    path = saved(tmp_path)
    break_file(path)
    with pytest.raises(DataError, match=message) as caught:
        AccessProfile.load(path)
    assert str(path) in str(caught.value)
