"""Writing logs, and going on after a crash."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from tests import forked

from recd_plugin_recd.logs.compression import Compression
from recd_plugin_recd.logs.log_writer import LogSettings, LogWriter
from recd_plugin_recd.logs.shard_reader import ShardReader
from recd_plugin_recd.tests.logs.tables import SCHEMA, by_row, killed, rows, unexpected, write
from recd_plugins.errors import DataError


def blocks(folder: Path, report=unexpected):
    """The blocks of each shard."""
    found = {}
    for path in sorted(folder.glob("*.recdlog")):
        with ShardReader(path, report) as reader:
            found[path.name] = list(reader.blocks())
    return found


def all_rows(folder: Path, report=unexpected) -> pa.Table:
    return by_row(block.rows for each in blocks(folder, report).values() for block in each)


@pytest.mark.parametrize("record", ["sample", "batch"])
@pytest.mark.parametrize("key", ["session", "message"])
@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("long_distance", [True, False])
def test_the_same_rows_come_back(tmp_path, record, key, sort, long_distance):
    write(
        tmp_path / "log",
        rows(500),
        num_shards=3,
        record=record,
        key=key,
        sort=sort,
        block_size=2000,
        compression=Compression(5, long_distance),
    )
    assert all_rows(tmp_path / "log").equals(by_row([rows(500)]))


def test_sessions_stay_together_in_order(tmp_path):
    write(tmp_path / "log", rows(500), num_shards=4, block_size=3000)
    shard_of: dict[int, str] = {}
    for name, found in blocks(tmp_path / "log").items():
        assert len(found) > 1
        for block in found:
            sessions, numbers = (block.rows.column(i).to_pylist() for i in (0, 1))
            assert list(zip(sessions, numbers, strict=True)) == sorted(
                zip(sessions, numbers, strict=True)
            )
            assert all(shard_of.setdefault(session, name) == name for session in sessions)


def test_without_sorting_rows_stay_as_they_came(tmp_path):
    write(tmp_path / "log", rows(300), num_shards=1, block_size=2000, sort=False)
    (found,) = blocks(tmp_path / "log").values()
    numbers = [number for block in found for number in block.rows.column(1).to_pylist()]
    assert numbers == list(range(300))


def test_a_block_ends_with_the_row_that_fills_it(tmp_path):
    # 21 bytes of head and 4 of length, and the list's.
    batch = rows(200)
    write(tmp_path / "log", batch.slice(0, 90), batch.slice(90), num_shards=1, block_size=1000,
          sort=False)  # fmt: skip
    (found,) = blocks(tmp_path / "log").values()
    for block in found[:-1]:
        last = 25 + 8 * len(block.rows.column(3)[-1])
        assert block.header.raw_size >= 1000 > block.header.raw_size - last


def test_records_are_numbered_over_runs(tmp_path):
    write(tmp_path / "log", rows(100), num_shards=1, block_size=900)
    write(tmp_path / "log", rows(100, seed=1), num_shards=1, block_size=900)
    (found,) = blocks(tmp_path / "log").values()
    assert [block.first_record for block in found] == [
        sum(block.header.num_records for block in found[:i]) for i in range(len(found))
    ]
    assert found[-1].header.end_record == 200


@pytest.mark.parametrize("left", [1, 30, 44, 45, 200])
def test_a_torn_tail_is_cut_off_and_reported(tmp_path, left):
    write(tmp_path / "log", rows(100), num_shards=1)
    (path,) = (tmp_path / "log").glob("*.recdlog")
    size = path.stat().st_size
    with killed(tmp_path / "log"):
        write(tmp_path / "log", rows(100, seed=1), num_shards=1)
    os.truncate(path, size + left)
    more = rows(50, seed=2)
    (damage,) = write(tmp_path / "log", more, num_shards=1)
    assert (damage.shard, damage.offset) == (path, size)
    assert f"{left} bytes that are no whole block were cut off" in str(damage)
    assert all_rows(tmp_path / "log").equals(by_row([rows(100), more]))


def test_a_header_that_was_cut_off_is_written_anew(tmp_path):
    write(tmp_path / "log", rows(10), num_shards=1)
    (path,) = (tmp_path / "log").glob("*.recdlog")
    for size in (0, 5, 300, 700):
        # A writer that was killed before it had made a manifest.
        (tmp_path / "log" / "manifest.json").unlink()
        os.truncate(path, size)
        damage = write(tmp_path / "log", rows(10), num_shards=1)
        assert len(damage) == (size > 0)
        assert all_rows(tmp_path / "log").equals(by_row([rows(10)]))


def test_a_damaged_block_at_the_end_keeps_its_numbers(tmp_path):
    """Who has read it before it was damaged must not take other records for it."""
    write(tmp_path / "log", rows(100), num_shards=1)
    (path,) = (tmp_path / "log").glob("*.recdlog")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert write(tmp_path / "log", rows(7), num_shards=1) == []
    damage = []
    (found,) = blocks(tmp_path / "log", damage.append).values()
    assert [block.first_record for block in found] == [100]
    assert [each.records_lost for each in damage] == [100]


def test_a_killed_writer_leaves_whole_blocks(tmp_path):
    program = (
        "import itertools, pathlib\n"
        "from recd_plugin_recd.tests.logs.tables import SCHEMA, rows\n"
        "from recd_plugin_recd.logs.log_writer import LogSettings, LogWriter\n"
        "log = LogWriter(pathlib.Path('log'), SCHEMA, LogSettings(num_shards=2, block_size=900),"
        " print)\n"
        "for number in itertools.count():\n"
        "    log.write(rows(100, seed=number))\n"
        "    if number == 3: print('flushed', log.flush(), flush=True)\n"
    )
    root = Path(__file__).parents[4]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    writer = forked.Program([sys.executable, "-c", program], cwd=tmp_path, env=environment)
    try:
        assert writer.first_line()
        with pytest.raises(DataError, match="another writer is appending to this shard"):
            write(tmp_path / "log", rows(1), num_shards=2)
    finally:
        writer.kill_all()
    write(tmp_path / "log", rows(1), num_shards=2)
    found = [block for each in blocks(tmp_path / "log").values() for block in each]
    assert sum(block.rows.num_rows for block in found) >= 401


def test_one_writer_a_shard(tmp_path):
    with (
        LogWriter(tmp_path / "log", SCHEMA, LogSettings(), print),
        pytest.raises(DataError, match=r"shard-00000-of-00016.recdlog: another writer"),
    ):
        LogWriter(tmp_path / "log", SCHEMA, LogSettings(), print)
    with LogWriter(tmp_path / "log", SCHEMA, LogSettings(), print):
        pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_shards": 3}, "the log has 2 shards, not 3"),
        ({"key": "message"}, "the log was begun with key session, not message"),
        ({"record": "batch"}, "the log was begun with record sample, not batch"),
        ({"session": "row"}, "the log was begun with session session_id, not row"),
        ({"session": "who"}, "no column 'who' for the session; the columns are session_id, row"),
    ],
)
def test_other_settings_are_refused(tmp_path, settings, message):
    write(tmp_path / "log", rows(10), num_shards=2)
    with pytest.raises(DataError, match=message):
        write(tmp_path / "log", rows(10), **{"num_shards": 2, **settings})
    assert all_rows(tmp_path / "log").equals(by_row([rows(10)]))


def test_other_columns_are_refused(tmp_path):
    write(tmp_path / "log", rows(10), num_shards=2)
    other = rows(10).drop_columns("score").append_column("extra", pa.array([0] * 10))
    with pytest.raises(DataError, match="the log has other columns: they differ in score, extra"):
        write(tmp_path / "log", other, num_shards=2)


def test_a_null_session_is_refused(tmp_path):
    batch = rows(3).set_column(0, SCHEMA.field(0), pa.array([1, None, 2]))
    with pytest.raises(DataError, match=r"row 1 .* the session is null"):
        write(tmp_path / "log", batch)


def test_too_many_files_are_said(tmp_path, monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    for more in (20, 21):
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, limits[1]))
        try:
            with pytest.raises(DataError, match=r"cannot be written \(Too many open files\)"):
                write(tmp_path / f"log{more}", rows(1), num_shards=100)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_full_disk_leaves_no_half_block(tmp_path):
    """A limit on the size of files stands for the disk."""
    program = (
        "import pathlib, resource\n"
        "from recd_plugin_recd.tests.logs.tables import rows, write\n"
        "write(pathlib.Path('log'), rows(100), num_shards=1)\n"
        "(path,) = pathlib.Path('log').glob('*.recdlog')\n"
        "size = path.stat().st_size\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))\n"
        "try:\n"
        "    write(pathlib.Path('log'), rows(100), num_shards=1)\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error, path.stat().st_size == size)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    done = forked.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)
    assert done.stdout.startswith("DataError log/shard-00000-of-00001.recdlog: cannot be written")
    assert done.stdout.endswith("True\n")
    assert all_rows(tmp_path / "log").equals(by_row([rows(100)]))
