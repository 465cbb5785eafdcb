"""``recd analyze`` of odd, damaged and large tables, and of registries."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from recd_plugin_recd.analyze import samples
from recd_plugin_recd.analyze.study import study
from recd_plugin_recd.source import open_source
from recd_plugin_recd.tests.analyze.analyze_cases import analyze, run, write
from recd_plugins.data.list_dict import list_dict_field, to_list_dict


@pytest.mark.parametrize("layout", ["list", "list_dict"])
def test_nulls_are_errors_or_become_empty(tmp_path, layout):
    path = tmp_path / "t.parquet"
    lists = pa.array([[1, 2], [1, 2], None, [3]] * 25, pa.list_(pa.int64()))
    sessions = [i // 4 for i in range(100)]
    expected = analyze(write(path, sessions, x=lists.fill_null([]))).features
    fields = [("session_id", pa.int64()), ("ts", pa.int64())]
    fields.append(("x", lists.type))
    if layout == "list_dict":
        fields[-1] = list_dict_field("x").with_nullable(True)
        values = to_list_dict(lists.fill_null([]))
        lists = pc.if_else(lists.is_valid(), values, pa.scalar(None, values.type))
    columns = [pa.array(sessions), pa.array(range(100)), lists]
    pq.write_table(pa.Table.from_arrays(columns, schema=pa.schema(fields)), path)
    result = run(path)
    assert result.exit_code == 1
    assert "t.parquet: row 2 (from 0), column 'x': the list is null" in result.output
    assert "--nulls empty" in result.output
    report = study(open_source(path), batch_size=2048, sample_megabytes=10, nulls="empty")
    assert report.features == expected
    assert run(path, "--nulls", "empty").exit_code == 0


def test_the_batch_size_is_that_of_the_registry(tmp_path):
    path = tmp_path / "t.parquet"
    columns = {"session_id": [i // 10 for i in range(500)], "ts": range(500)}
    pq.write_table(pa.table({**columns, "label": [0] * 500, "x": [[1]] * 500}), path)
    registry = tmp_path / "registry.yaml"
    registry.write_text(
        "version: 1\nconverter: {use: recd.kjt}\ntraining: {batch_size: 50}\n"
        f"dataset: {{use: recd.session_parquet, options: {{path: {path}}}}}\n"
    )
    for arguments, size, says in (
        ([registry], 50, "A batch of 50 (training.batch_size of the registry) has"),
        ([registry, "--batch-size", 100], 100, "A batch of 100 (as --batch-size says) has"),
        ([path], 500, "A batch of 4,096 (--batch-size sets another size) has"),
    ):
        assert says in run(*arguments).output
        report = json.loads(run(*arguments, "--json", "-").stdout)
        assert report["batches"]["rows"] // report["batches"]["batches"] == size


def test_movielens_through_a_registry(movielens, tmp_path):
    """At every event another history: exact deduplication finds little, partial most."""
    registry = tmp_path / "registry.yaml"
    options = f"{{path: {movielens}, refresh: {{per: event}}}}"
    registry.write_text(
        f"version: 1\ndataset: {{use: recd.interactions, options: {options}}}\n"
        "converter: {use: recd.kjt}\n"
    )
    report = analyze(registry, batch_size=1024)
    assert report.clustered
    seen = next(each for each in report.features if each.name == "history_seen")
    assert seen.exact < 0.01
    assert seen.partial > 0.9
    assert seen.measured_as_is < 1.05
    assert seen.partial_factor > 10
    assert seen.form == "partial"
    assert report.storage.stored is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no column session_id; name it with --session; the columns are visit, ts, x"),
        (["--session", "vist"], "no column vist; did you mean visit? name it with --session"),
        (["--session", "visit", "--timestamp", "t"], "name it with --timestamp"),
    ],
)
def test_a_missing_column_is_an_error_that_names_those_there(tmp_path, arguments, message):
    pq.write_table(pa.table({"visit": [1], "ts": [1], "x": [[1]]}), tmp_path / "t.parquet")
    result = run(tmp_path / "t.parquet", *arguments)
    assert result.exit_code == 1
    assert "t.parquet" in result.output
    assert message in result.output


def broken(path: Path) -> Path:
    return write(path, [1] * 500, x=[[i] for i in range(500)])


def test_works_without_torch(tmp_path):
    path = write(tmp_path / "t.parquet", [1] * 50, x=[[1]] * 50)
    code = (
        "import sys\nfrom recd_plugins.cli import main\n"
        f"main(['analyze', {str(path)!r}, '--html', {str(tmp_path / 'r.html')!r}], "
        "standalone_mode=False)\n"
        "assert not {'torch', 'torchrec', 'fbgemm_gpu'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_memory_does_not_grow_with_the_table(tmp_path, monkeypatch):
    """Ten times the rows and sessions with room for few: as much is held."""
    few = partial(samples.SessionCounts, max_sessions=1000)
    monkeypatch.setattr(samples, "_MAX_WAITING", 10_000)
    monkeypatch.setattr("recd_plugin_recd.analyze.study.SessionCounts", few)
    peaks = []
    for rows in (100_000, 1_000_000):
        sessions = np.random.default_rng(0).integers(0, rows // 3, rows)
        lists = pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32), sessions // 7)
        path = write(tmp_path / f"{rows}.parquet", sessions, group_rows=20_000, x=lists)
        source = open_source(path)
        del sessions, lists
        arrow_before, arrow = pa.total_allocated_bytes(), 0

        def progress(_rows: int) -> None:
            nonlocal arrow
            arrow = max(arrow, pa.total_allocated_bytes())

        tracemalloc.start()
        report = study(source, batch_size=1024, sample_megabytes=2, progress=progress)
        peaks.append((arrow - arrow_before, tracemalloc.get_traced_memory()[1]))
        tracemalloc.stop()
        assert report.sessions.sessions == pytest.approx(0.95 * rows / 3, rel=0.15)
        assert report.sessions.counted <= 1000
    (arrow_small, python_small), (arrow_large, python_large) = peaks
    assert arrow_large < 2 * arrow_small
    assert python_large < 2 * python_small
