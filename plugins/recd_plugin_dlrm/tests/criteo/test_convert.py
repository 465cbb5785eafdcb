"""``recd criteo convert``: what it writes, what it refuses, and what is left of a killed run."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests import forked
from tests.commands import recd, refusal

from recd_plugin_dlrm.criteo.convert import ConvertOptions, convert
from recd_plugin_dlrm.criteo.days import DENSE, SPARSE
from recd_plugin_dlrm.tests.criteo.criteo_cases import sample_rows, write_day
from recd_plugins.runtime.errors import DataError

#: Converts parts of 40 rows, and stops itself at the n-th of some events.
SCRIPT = """
import os, signal, sys
from pathlib import Path
from recd_plugin_dlrm.criteo import convert as module
from recd_plugin_dlrm.criteo.tsv import TsvStream
from recd_plugins.data.table_writer import TableWriter
from recd_plugins.runtime.folders import WorkFolder

event, count = sys.argv[1], int(sys.argv[2])
owners = {"read": TsvStream, "write": TableWriter, "close": TableWriter, 
          "write_note": module.file_utils, "publish": WorkFolder}

def killed(*arguments, **options):
    global count
    count -= 1
    if count == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*arguments, **options)

function = getattr(owners[event], event)
setattr(owners[event], event, killed)
module.UNIT_ROWS = 16
options = module.ConvertOptions(Path("src"), Path("dst"), part_rows=40, row_group_rows=16)
module.convert(options, force=True, say=print)
"""


def read(folder: Path) -> dict[str, pa.Table]:
    return {
        str(path.relative_to(folder)): pq.ParquetFile(path).read()
        for path in sorted(folder.rglob("*.parquet"))
    }


def write_source(folder: Path, file_format: str) -> None:
    for number, rows in enumerate((100, 80)):
        write_day(folder, f"day_{number}", file_format, sample_rows(rows, number))


@pytest.mark.parametrize(
    ("file_format", "event", "count", "kept"),
    [("tsv", "close", 3, 2), ("gz", "write_note", 4, 2), ("tsv", "publish", 1, 5)],
)
def test_a_killed_run_is_gone_on_from(tmp_path, file_format, event, count, kept):
    write_source(tmp_path / "src", file_format)
    whole = convert(ConvertOptions(tmp_path / "src", tmp_path / "whole"))
    assert whole.rows == 180
    (tmp_path / "dst").mkdir()
    old = pa.table({"old": [1]}).replace_schema_metadata({b"recd.criteo": b"1"})
    pq.write_table(old, tmp_path / "dst" / "old.parquet")

    killed = forked.run([sys.executable, "-c", SCRIPT, event, str(count)], cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path.name for path in (tmp_path / "dst").iterdir()] == ["old.parquet"]
    hidden = tmp_path / ".dst.recd-criteo"
    before = {path.stat().st_ino for path in hidden.rglob("part-*.parquet")}
    assert len(before) >= kept

    said: list[str] = []
    options = ConvertOptions(tmp_path / "src", tmp_path / "dst", part_rows=40, row_group_rows=16)
    again = convert(options, force=True, say=said.append)
    assert said == ["resuming an interrupted run"]
    assert again == replace(whole, part=5)
    found = read(tmp_path / "dst")
    assert [(name, len(table)) for name, table in found.items()] == [
        *((f"day_0/part-0000{part}.parquet", rows) for part, rows in enumerate((40, 40, 20))),
        *((f"day_1/part-0000{part}.parquet", 40) for part in range(2)),
    ]
    expected = pa.concat_tables(read(tmp_path / "whole").values())
    assert pa.concat_tables(found.values()).equals(expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "src", "whole"]
    assert [path.name for path in (tmp_path / "dst").rglob(".*")] == []
    after = {path.stat().st_ino for path in (tmp_path / "dst").rglob("*.parquet")}
    assert len(after & before) >= kept, "finished files are not written again"


def test_what_is_written(tmp_path):
    write_day(tmp_path, "train", "zst", sample_rows(100))
    convert(ConvertOptions(tmp_path / "train.zst", tmp_path / "new", row_group_rows=30))
    (path,) = (tmp_path / "new").rglob("*.parquet")
    assert path == tmp_path / "new" / "train" / "part-00000.parquet"
    file = pq.ParquetFile(path)
    groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
    assert [group.num_rows for group in groups] == [30, 30, 30, 10]
    assert {groups[0].column(column).compression for column in range(40)} == {"ZSTD"}
    raw = sample_rows(100)
    assert groups[0].column(0).statistics.max == raw.labels[:30].max()
    table = file.read()
    for names, columns in ((DENSE, raw.dense), (SPARSE, raw.sparse)):
        for name, values in zip(names, columns, strict=True):
            assert np.array_equal(table[name].to_numpy(), values)


@pytest.mark.parametrize(
    ("file_format", "message"),
    [
        ("npy", "the format is npy, but this command converts only TSV"),
        ("tsv", "day_0:51: the line is malformed"),
        ("truncated", "day_1.gz: the file is truncated"),
        ("none", "src: the file or folder does not exist"),
    ],
)
def test_a_source_that_is_refused(cwd, file_format, message):
    if file_format != "none":
        write_source(Path("src"), "gz" if file_format == "truncated" else file_format)
    if file_format == "truncated":
        os.truncate("src/day_1.gz", 3000)
    if file_format == "tsv":
        path = Path("src/day_0")
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([*lines[:50], b"bad\n", *lines[50:]]))
    refused(cwd, message)


def test_targets_that_are_left_alone(cwd):
    write_source(Path("src"), "gz")
    Path("dst").mkdir()
    Path("dst/mine").touch()
    refused(cwd, "dst: the folder already exists. Use another folder or --force.")
    refused(cwd, "dst: the folder contains 'mine'", "--force")
    Path("dst/mine").unlink()
    recd("criteo", "convert", "src", "dst/parquet", "--json", "done.json")
    figures = json.loads(Path("done.json").read_text())
    assert (figures["rows"], figures["files"]) == (180, 2)
    Path("dst/.recd-criteo").mkdir()
    Path("dst/.recd-criteo/dictionary-0.arrow").touch()
    convert(ConvertOptions(Path("src"), Path("dst")), force=True)
    assert sorted(path.name for path in Path("dst").iterdir()) == ["day_0", "day_1"]
    write_source(Path("dst"), "gz")
    refused(cwd, "delete the source dst/day_0.gz", "--force", source="dst/day_0.gz")


def refused(folder: Path, message: str, *options: str, source: str = "src") -> None:
    before = sorted(folder.rglob("*"))
    assert message in refusal("criteo", "convert", source, "dst", *options)
    assert sorted(folder.rglob("*")) == before


def test_a_file_that_grows_is_noticed(tmp_path):
    write_day(tmp_path, "day_0", "tsv", sample_rows(100))
    text = (tmp_path / "day_0").read_bytes()

    def grow(_rows: int) -> None:
        (tmp_path / "day_0").write_bytes(text + text[: text.index(b"\n") + 1])

    options = ConvertOptions(tmp_path / "day_0", tmp_path / "dst")
    with pytest.raises(DataError, match="day_0: the source changed"):
        convert(options, start=lambda *_: grow)
