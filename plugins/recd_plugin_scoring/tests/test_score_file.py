"""Files of scores: what a format cannot say is refused, or null."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from recd_plugin_scoring.score_file import score_file
from recd_plugins.errors import RecdError


def test_lines_are_json_whatever_the_numbers(tmp_path: Path) -> None:
    numbers = [float("nan"), float("inf"), 0.5]
    batch = pa.RecordBatch.from_pydict({"w": numbers, "many": [[each] for each in numbers]})
    with score_file(tmp_path / "s.jsonl", "jsonl", batch.schema) as writer:
        writer.write(batch)
    lines = (tmp_path / "s.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [row["w"] for row in found] == [None, None, 0.5]
    assert [row["many"] for row in found] == [[None], [None], [0.5]]


@pytest.mark.parametrize(
    "column", [pa.array([b"a"]), pa.array([[b"a"]]), pa.array([b"a"]).dictionary_encode()]
)
def test_bytes_are_no_json(tmp_path: Path, column: pa.Array) -> None:
    schema = pa.schema([("row", pa.int64()), ("b", column.type)])
    with (
        pytest.raises(RecdError, match="JSON has no bytes, which b is"),
        score_file(tmp_path / "s.jsonl", "jsonl", schema),
    ):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("column", [pa.array([b"\xff"]), pa.array(["a"], pa.string_view())])
def test_what_csv_does_not_take_is_told(tmp_path: Path, column: pa.Array) -> None:
    batch = pa.RecordBatch.from_pydict({"b": column})
    with (
        pytest.raises(RecdError, match=r"s.csv: a column has values that csv does not take .*parq"),
        score_file(tmp_path / "s.csv", "csv", batch.schema) as writer,
    ):
        writer.write(batch)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "column",
    [
        pa.array([2**31 - 1], pa.date32()),
        pa.array([2**62], pa.timestamp("us")),
        pa.array([0], pa.timestamp("us", "Nowhere/Land")),
    ],
)
def test_a_time_that_python_has_not_is_told(tmp_path: Path, column: pa.Array) -> None:
    batch = pa.RecordBatch.from_pydict({"until": column})
    with (
        pytest.raises(RecdError, match=r"s.jsonl: a column has values that Python .*parquet"),
        score_file(tmp_path / "s.jsonl", "jsonl", batch.schema) as writer,
    ):
        writer.write(batch)
    assert not list(tmp_path.iterdir())
