from __future__ import annotations

import json
import math
import re
import tempfile
from datetime import UTC, date, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugins.data.parquet import ParquetTable
from recd_plugins.data.row_filter import Condition, RowFilter
from recd_plugins.runtime.errors import DataError

NUMBERS = {
    "==": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}


def condition(*given: Any) -> Condition:
    return Condition.model_validate(list(given))


def reference(condition: Condition, values: list[Any]) -> list[bool]:
    if condition.op == "is null":
        return [value is None for value in values]
    if condition.op == "is not null":
        return [value is not None for value in values]
    if condition.op == "in":
        return [value is not None and value in condition.value for value in values]
    holds = NUMBERS[condition.op]
    return [value is not None and bool(holds(value, condition.value)) for value in values]


@st.composite
def columns(draw: st.DrawFn) -> dict[str, list[Any]]:
    """Rows whose integers and floats stay near each other for a while, with nulls and NaN."""
    num_rows = draw(st.integers(4, 60))
    few = st.one_of(st.none(), st.integers(-2, 3))
    runs = draw(st.lists(few, min_size=num_rows, max_size=num_rows))
    width = draw(st.sampled_from([1, 5, 20]))
    floats = st.one_of(st.none(), st.sampled_from([-1.0, -0.0, 0.0, 0.5, 2.0, math.nan, math.inf]))
    return {
        "whole": [runs[row // width] for row in range(num_rows)],
        "part": draw(st.lists(floats, min_size=num_rows, max_size=num_rows)),
        "text": [None if run is None else "abcdef"[run + 2] for run in runs],
    }


WHOLE, PART, TEXT = st.integers(-3, 4), st.sampled_from([-1.0, 0.0, 0.25, 2.0]), st.text("abcz")


@st.composite
def conditions(draw: st.DrawFn) -> Condition:
    column, values = draw(st.sampled_from([("whole", WHOLE), ("part", PART), ("text", TEXT)]))
    op = draw(st.sampled_from([*NUMBERS, "in", "is null", "is not null"]))
    if op == "in":
        return condition(column, op, draw(st.lists(values, max_size=3)))
    return condition(column, op) if op.startswith("is") else condition(column, op, draw(values))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=columns(),
    wanted=st.lists(conditions(), min_size=1, max_size=3),
    group_rows=st.integers(1, 20),
    batch_size=st.integers(1, 4),
    world_size=st.integers(1, 3),
    stop=st.integers(0, 5),
)
def test_any_filter_reads_what_numpy_takes(data, wanted, group_rows, batch_size, world_size, stop):
    num_rows = len(data["whole"])
    stored = pa.table(
        {
            "whole": pa.array(data["whole"], pa.int16()),
            "part": pa.array(data["part"], pa.float32()),
            "text": pa.array(data["text"], pa.string()),
            "row": pa.array(range(num_rows), pa.float64()),
            "ids": pa.array([[row] for row in range(num_rows)], pa.list_(pa.int64())),
            **{name: pa.array([0] * num_rows) for name in ("session_id", "ts", "label")},
        }
    )
    masks = [reference(each, data[each.column]) for each in wanted]
    expected = [row for row in range(num_rows) if all(mask[row] for mask in masks)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.parquet"
        pq.write_table(stored, path, row_group_size=group_rows)
        given = {"path": path, "dense": ["row"], "sparse": ["ids"], "prefetch": 0}
        given["where"] = [each.model_dump() for each in wanted]
        dataset = SessionParquet(SessionParquet.Options.model_validate(given))

        def reader(rank):
            given = {"world_size": world_size, "batch_size": batch_size, "split": "train"}
            return dataset.reader(rank=rank, **given)

        share = len(expected) // (world_size * batch_size) * batch_size
        if share == 0:
            why = f"{len(expected)} rows, too few" if expected else "has no rows. Check"
            with pytest.raises(DataError, match=why):
                reader(0)
            return
        for rank in range(world_size):
            batches = list(reader(rank))
            mine = expected[rank * share : (rank + 1) * share]
            found = [int(row) for rows in batches for row in rows.data["row"].to_pylist()]
            assert found == mine
            # Errors name rows of the file.
            origins = [rows.origin_of(row) for rows in batches for row in range(len(rows))]
            assert origins == [(str(path), row) for row in mine]
            stopped = reader(rank)
            taken = list(islice(stopped, min(stop, len(stopped))))
            state = json.loads(json.dumps(stopped.state_dict()))
            again = reader(rank)
            again.load_state_dict(state)
            rest = [int(row) for rows in again for row in rows.data["row"].to_pylist()]
            assert rest == mine[len(taken) * batch_size :]


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        (("day", ">", "2024-01-01"), [1, 2]),
        (("day", "==", date(2024, 1, 2)), [1]),
        (("time", ">=", "2024-01-02T12:00:00"), [2]),
        (("time", "<=", date(2024, 1, 2)), [0, 1]),
        (("zoned", "==", datetime(2024, 1, 2, tzinfo=UTC)), [1]),
        (("flag", "==", True), [0, 2]),
        (("small", "==", 0.1), [0]),
        (("word", "in", ["a", "c"]), [0, 2]),
        (("big", "==", 2**63 + 5), [2]),
        (("exact", "==", "1970-01-01T00:00:00.000000007"), [1]),
        (("signed", "in", [0.0]), [0, 1]),
        (("ids", "is null"), [1]),
    ],
)
def test_values_are_of_the_type_of_the_column(tmp_path, wanted, kept):
    days = [datetime(2024, 1, 1), datetime(2024, 1, 2), datetime(2024, 1, 3)]
    stored = pa.table(
        {
            "day": pa.array([day.date() for day in days]),
            "time": pa.array(days, pa.timestamp("us")),
            "zoned": pa.array(days, pa.timestamp("us", "Europe/Berlin")),
            "flag": [True, False, True],
            "small": pa.array([0.1, 0.2, 0.7], pa.float32()),
            "word": pa.array(["a", "b", "c"]).dictionary_encode(),
            "big": pa.array([0, 1, 2**63 + 5], pa.uint64()),
            "exact": pa.array([6, 7, 8], pa.timestamp("ns")),
            "signed": [0.0, -0.0, 1.0],
            "ids": [[1], None, []],
            "row": [0, 1, 2],
        }
    )
    pq.write_table(stored, tmp_path / "t.parquet", row_group_size=1)
    table = ParquetTable(tmp_path / "t.parquet", where=[condition(*wanted)])
    assert [unit.group for unit in table.units] == kept


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["hours", ">=", 3], "option 'where' uses 'hours', which is neither a column"),
        (["hour", ">=", "three"], "condition hour >= 'three' of .* column 'hour' of type int8: "),
        (["hour", ">=", 3.5], "condition hour >= 3.5 of .* column 'hour' of type int8: "),
        (["hour", "<", 1000], "condition hour < 1000 of .* column 'hour' of type int8: "),
        (["hour", "==", True], "condition hour == True of"),
        (["price", "<", math.nan], "condition price < nan of"),
        (["seen", "==", 3], "column 'seen' of type list<"),
    ],
)
def test_what_cannot_be_compared_is_named(folder, wanted, message):
    with pytest.raises(DataError, match=message):
        ParquetTable(folder, where=[condition(*wanted)])


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.date32(), datetime(2024, 1, 1, 12)),
        (pa.timestamp("us"), datetime(2024, 1, 1, tzinfo=UTC)),
        (pa.timestamp("us", "UTC"), datetime(2024, 1, 1)),
        (pa.timestamp("us", "UTC"), "2024-01-01T12:00:00"),
    ],
)
def test_values_that_would_be_compared_as_others_are_refused(kind, value):
    with pytest.raises(DataError, match=f"column .x. of type {re.escape(str(kind))}"):
        RowFilter([condition("x", "<", value)], pa.schema([("x", kind)]), "t")


@pytest.mark.parametrize(
    "wanted",
    [["hour"], ["hour", "=", 3], ["hour", "==", None], ["hour", "in", 3], ["hour", "is null", 3]],
)
def test_what_is_no_condition_is_refused(wanted):
    with pytest.raises(ValidationError):
        Condition.model_validate(wanted)


def test_keys_of_hive_partitions_choose_files_unopened(folder, tmp_path):
    (tmp_path / "t").mkdir()
    for name in ("day=01", "day=02"):
        (tmp_path / "t" / name).symlink_to(folder / name)
    for value in ("02", 2):
        table = ParquetTable(folder, where=[condition("day", "==", value)])
        assert [path.parent.name for path in table.files] == ["day=02"]
    for column, op, message in (
        ("day", ">", "none of 2 files is in a partition that meets option 'where'"),
        ("month", "==", r"neither a column nor a partition key. Use one of these: .*day"),
    ):
        with pytest.raises(DataError, match=message):
            ParquetTable(folder, where=[condition(column, op, 2)])
