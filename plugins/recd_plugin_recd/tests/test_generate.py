"""``recd generate`` and the table that it writes."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from tests.small_disk import small_disk

from recd_plugin_recd import papercal
from recd_plugin_recd.papercal_table import TableOptions, provenance, write_table
from recd_plugins.cli import main
from recd_plugins.runtime.errors import DataError


def run(*arguments: object):
    return CliRunner().invoke(main, ["generate", *map(str, arguments)])


def read(folder: Path):
    return pq.read_table(folder).combine_chunks()


def test_writes_a_table_and_says_how_it_was_made(tmp_path):
    result = run(
        tmp_path / "t", "--rows", 500, "--seed", 3, "--row-group-rows", 128, "--files", 2,
        "--layout", "interleaved",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "500 rows" in result.output
    files = sorted((tmp_path / "t").iterdir())
    groups = [
        pq.ParquetFile(file).metadata.row_group(i).num_rows
        for file in files
        for i in range(pq.ParquetFile(file).num_row_groups)
    ]
    assert [file.name for file in files] == ["part-00000.parquet", "part-00001.parquet"]
    assert groups == [128, 128, 128, 116]
    assert provenance(tmp_path / "t") == {
        "version": papercal.VERSION,
        "rows": 500,
        "seed": 3,
        "layout": "interleaved",
        "row_group_rows": 128,
        "files": 2,
    }
    assert read(tmp_path / "t").schema.equals(papercal.SCHEMA)


def test_files_and_row_groups_do_not_change_the_rows(tmp_path):
    write_table(tmp_path / "a", TableOptions(rows=300, row_group_rows=64, files=3))
    write_table(tmp_path / "b", TableOptions(rows=300, row_group_rows=300))
    assert read(tmp_path / "a").equals(read(tmp_path / "b"))


def test_force_replaces_a_generated_table_and_nothing_else(tmp_path):
    assert run(tmp_path / "t", "--rows", 50).exit_code == 0
    assert "exists already" in run(tmp_path / "t", "--rows", 60).output
    assert read(tmp_path / "t").num_rows == 50
    assert run(tmp_path / "t", "--rows", 60, "--force").exit_code == 0
    assert read(tmp_path / "t").num_rows == 60
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    (tmp_path / "t" / "part-00000.parquet").rename(tmp_path / "t" / "thesis.tex")
    assert "was not generated" in run(tmp_path / "t", "--rows", 50, "--force").output
    assert (tmp_path / "t" / "thesis.tex").exists()


def test_a_run_that_breaks_off_leaves_nothing(tmp_path, monkeypatch):
    rows_left = iter([papercal.make_rows])

    def fail_second(keys, shape):
        return next(rows_left)(keys, shape)

    monkeypatch.setattr(papercal, "make_rows", fail_second)
    with pytest.raises((StopIteration, RuntimeError)):
        write_table(tmp_path / "t", TableOptions(rows=300, row_group_rows=100))
    assert list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_the_table():
    """Rows by time: what waits to be sorted is what is in flight, at most a million rows."""
    longest = max(len(keys) for keys in papercal.row_keys(3_000_000, 0, "interleaved"))
    assert longest < 1_000_000


def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, "256k") as disk:
        with pytest.raises(DataError, match="No space left on device"):
            write_table(disk / "table", TableOptions(rows=20_000))
        assert list(disk.iterdir()) == []
