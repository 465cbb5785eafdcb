"""Files of scores: what a format cannot say is refused, or null."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from recd_plugin_runs.score_file import score_file
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


@pytest.mark.parametrize(
    ("kind", "who", "column"),
    [
        ("csv", "csv does", pa.array([b"\xff"])),
        ("csv", "csv does", pa.array(["a"], pa.string_view())),
        ("jsonl", "Python does", pa.array([2**31 - 1], pa.date32())),
        ("jsonl", "Python does", pa.array([2**62], pa.timestamp("us"))),
        ("jsonl", "Python does", pa.array([0], pa.timestamp("us", "Nowhere/Land"))),
    ],
)
def test_what_a_format_does_not_take_is_told(
    tmp_path: Path, kind: str, who: str, column: pa.Array
) -> None:
    batch = pa.RecordBatch.from_pydict({"b": column})
    with (
        pytest.raises(
            RecdError, match=rf"s.{kind}: a column has values that {who} not take .*parq"
        ),
        score_file(tmp_path / f"s.{kind}", kind, batch.schema) as writer,
    ):
        writer.write(batch)
    assert not list(tmp_path.iterdir())
