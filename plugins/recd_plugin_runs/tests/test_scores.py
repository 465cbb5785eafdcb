"""Files of scores, and columns that ``--keep`` carries."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugin_runs.kept_columns import KeptColumns
from recd_plugin_runs.predict import PredictJob, _Output, score_file
from recd_plugins.api import parquet_writer
from recd_plugins.runtime.errors import DataError


def test_a_dataset_that_makes_several_rows_of_one_has_none_kept(tmp_path: Path) -> None:
    table = tmp_path / "new.parquet"
    pq.write_table(pa.table({"a": ["x", "y"]}), table)
    job = PredictJob(tmp_path / "r.yaml", output=tmp_path / "s.csv", kind="csv")
    for rows, kept in (([0, 1], True), ([0, 0], False), ([1, 1], False)):
        keys = [pa.RecordBatch.from_pydict({"_row": [row]}) for row in rows]
        output = _Output(job, {"_row": "row"}, KeptColumns(str(table), ["a"], 2))
        if kept:
            with output:
                output.write(keys, np.zeros(2))
            assert job.output.read_text().splitlines()[1:] == ['0,"x",0', '1,"y",0']
            job.output.unlink()
            continue
        with pytest.raises(DataError, match=r"do not match the scored rows"), output:
            output.write(keys, np.zeros(2))
        assert [each.name for each in tmp_path.iterdir()] == ["new.parquet"]


def test_lists_that_a_table_has_in_a_dictionary_are_lists(tmp_path: Path) -> None:
    lists = pa.array([[1, 2], [1, 2], [], [3]], pa.list_(pa.int64()))
    path, schema = tmp_path / "t.parquet", pa.schema([("a", lists.type)])
    with parquet_writer.TableWriter(path, schema, keys=None, layout={"a": "list_dict"}) as writer:
        writer.write(pa.record_batch([lists], schema=schema))
    kept = KeptColumns(str(path), ["a"], 2)
    found = [kept.take(np.arange(start, start + 2))["a"].to_pylist() for start in (0, 2)]
    assert found == [[[1, 2], [1, 2]], [[], [3]]]


def test_lines_are_json_whatever_the_numbers(tmp_path: Path) -> None:
    numbers = [float("nan"), float("inf"), 0.5]
    batch = pa.RecordBatch.from_pydict({"w": numbers, "many": [[each] for each in numbers]})
    with score_file(tmp_path / "s.jsonl", "jsonl", batch.schema) as writer:
        writer.write_batch(batch)
    lines = (tmp_path / "s.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [row["w"] for row in found] == [None, None, 0.5]
    assert [row["many"] for row in found] == [[None], [None], [0.5]]
