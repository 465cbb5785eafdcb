from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugin_recd.logs.log import Consumer, LogSettings, LogWriter
from recd_plugin_recd.sessions import session_shards
from recd_plugin_recd.tests.logs.tables import SCHEMA, by_row, read, rows, write
from recd_plugins.runtime.errors import DataError, RecdError


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet"))


@pytest.mark.parametrize("sort", [True, False])
def test_rows_come_back(tmp_path, sort):
    first, rest = rows(900).slice(0, 400), rows(900).slice(400)
    write(tmp_path, first, rest, num_shards=3, sort=sort, block_size=2000)
    batches, damage = read(tmp_path)
    assert not damage
    assert by_row(batches).equals(by_row([rows(900)]))
    assert all(batch.nbytes < 4000 for batch in batches)
    for path in segments(tmp_path):
        shard = int(path.name.split("-")[1])
        numbers = session_shards(pq.read_table(path)["session_id"].combine_chunks(), 3)
        assert set(numbers.tolist()) == {shard}


def test_a_block_has_the_rows_of_a_session_together_in_their_order(tmp_path):
    write(tmp_path, rows(300), num_shards=1)
    ((batch,), _) = read(tmp_path)
    sessions, numbers = batch["session_id"].to_numpy(), batch["row"].to_numpy()
    assert (np.diff(sessions) >= 0).all()
    assert (np.diff(numbers)[np.diff(sessions) == 0] > 0).all()


def test_the_shard_of_a_session_stays_for_ever():
    assert session_shards(pa.array([0, 1, -1, 2**40]), 1000).tolist() == [535, 465, 936, 641]
    assert session_shards(pa.array(["", "a", "session"]), 1000).tolist() == [792, 423, 575]


def test_flushed_rows_appear_together_and_survive_a_failure(tmp_path):
    with pytest.raises(ZeroDivisionError):  # noqa: PT012, SIM117
        with LogWriter(tmp_path, SCHEMA, LogSettings(num_shards=4, block_size=500)) as log:
            log.write(rows(200))
            with pytest.raises(DataError, match="is not a log"):
                read(tmp_path)
            log.flush()
            log.write(rows(100, 1))
            raise ZeroDivisionError
    batches, damage = read(tmp_path)
    assert by_row(batches).equals(by_row([rows(200)]))
    assert not damage
    assert not list(tmp_path.glob(".*"))


def test_files_of_a_killed_writer_are_left_out_and_removed(tmp_path):
    write(tmp_path, rows(50), num_shards=2)
    for name in ("shard-00000-000001.parquet", ".shard-00001-000001.parquet.partial"):
        shutil.copyfile(segments(tmp_path)[0], tmp_path / name)
    assert by_row(read(tmp_path)[0]).equals(by_row([rows(50)]))
    write(tmp_path, rows(80).slice(50), num_shards=2)
    assert by_row(read(tmp_path)[0])["row"].to_pylist() == list(range(80))
    assert not list(tmp_path.glob(".*"))


def test_a_log_has_one_writer_and_stays_as_it_was_begun(tmp_path):
    write(tmp_path, rows(20), num_shards=2)
    settings, refused = LogSettings(num_shards=2), pytest.raises(RecdError, match="is writing to")
    with LogWriter(tmp_path, SCHEMA, settings), refused:
        LogWriter(tmp_path, SCHEMA, settings)
    with pytest.raises(DataError, match="has num_shards 2, but 3 was requested"):
        write(tmp_path, rows(20), num_shards=3)
    with pytest.raises(DataError, match="other columns than the log"):
        write(tmp_path, rows(20).drop_columns("score"), num_shards=2)


def test_offsets_go_on_in_the_middle_of_a_segment(tmp_path):
    log, offsets = tmp_path / "log", tmp_path / "offsets.json"
    write(log, rows(300), num_shards=2, block_size=1000)
    consumer = Consumer(log, offsets, print)
    begun = [next(each) for each in [iter(consumer)] for _ in range(3)]
    consumer.commit()
    write(log, rows(400).slice(300), num_shards=2, block_size=1000)
    rest, damage = read(log, offsets)
    assert not damage
    assert by_row([*begun, *rest])["row"].to_pylist() == list(range(400))
    assert read(log, offsets) == ([], [])


@pytest.mark.parametrize("content", ["", "{}", '{"log": "a", "blocks": [0, 0]}', "another's"])
def test_offsets_that_are_none(tmp_path, content):
    for name in ("log", "other"):
        write(tmp_path / name, rows(10), num_shards=2)
    read(tmp_path / "other", tmp_path / "offsets.json")
    if content != "another's":
        (tmp_path / "offsets.json").write_text(content)
    with pytest.raises(DataError, match="no valid offsets for"):
        Consumer(tmp_path / "log", tmp_path / "offsets.json", print)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def flip_in_a_block(path: Path) -> None:
    column = pq.read_metadata(path).row_group(1).column(2)
    flip(path, column.data_page_offset + column.total_compressed_size - 3)


DAMAGES = {
    "a bit of a block": (flip_in_a_block, "cannot be read"),
    "a bit of a footer": (lambda path: flip(path, -30), "differs from the file that is listed"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "the file differs"),
    "missing": (lambda path: path.unlink(), "the file is missing"),
    "of another shard": (lambda p: shutil.copyfile(segments(p.parent)[1], p), "the file differs"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_told_and_all_else_comes_out(tmp_path, kind):
    log, offsets = tmp_path / "log", tmp_path / "offsets.json"
    write(log, rows(300), num_shards=2, block_size=1000)
    path = segments(log)[0]
    of_segment = pq.read_table(path)["row"].to_pylist()
    of_block = pq.ParquetFile(path).read_row_group(1)["row"].to_pylist()
    change, message = DAMAGES[kind]
    change(path)
    batches, (damage,) = read(log, offsets)
    lost = of_block if damage.block == 1 else of_segment
    assert (damage.block is None) == (kind != "a bit of a block")
    assert message in str(damage)
    assert damage.segment == path
    assert damage.rows_lost == len(lost)
    assert by_row(batches)["row"].to_pylist() == sorted(set(range(300)) - set(lost))
    assert read(log, offsets) == ([], [])  # offsets move on past damage
