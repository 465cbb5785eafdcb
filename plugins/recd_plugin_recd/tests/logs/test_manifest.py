"""What is whole by its checksums and still not what was written: all of it is named."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import zstandard
from click.testing import CliRunner

from recd_plugin_recd.logs import shard_format
from recd_plugin_recd.logs.consumer import Consumer
from recd_plugin_recd.logs.manifest import read_manifest
from recd_plugin_recd.logs.shard_format import BLOCK_HEADER_SIZE, BlockHeader
from recd_plugin_recd.logs.shard_reader import ShardReader
from recd_plugin_recd.tests.logs.tables import by_row, killed, rows, unexpected, write
from recd_plugins.cli import main
from recd_plugins.errors import DataError

ROWS = rows(300)


def promised(log):
    """The records that the manifest says are there, of all shards."""
    shards = read_manifest(log)
    assert shards is not None
    return sum(shard.records for shard in shards.values())


@pytest.fixture
def log(tmp_path) -> Path:
    """Three shards of some blocks."""
    write(tmp_path / "log", ROWS, num_shards=3, block_size=1000)
    return tmp_path / "log"


def shard(log: Path, number: int) -> Path:
    return log / f"shard-{number:05d}-of-00003.recdlog"


def edges(path: Path) -> list[int]:
    """Where blocks end."""
    with ShardReader(path, unexpected) as reader:
        return [block.end.offset for block in reader.blocks()]


def records(path: Path) -> int:
    with ShardReader(path, unexpected) as reader:
        return sum(block.rows.num_rows for block in reader.blocks())


def read(log: Path) -> tuple[list[str], list[int]]:
    """What is said to be wrong, without the folder, and the rows that come out."""
    found: list[str] = []
    consumer = Consumer(log, None, lambda damage: found.append(str(damage)))
    numbers = [n for each in consumer for n in each.rows.column("row").to_pylist()]
    return [each.replace(f"{log}/", "") for each in found], numbers


def check_told(log: Path, *said: str) -> None:
    """``read`` and ``stat`` tell it and fail, and no row comes out twice."""
    found, numbers = read(log)
    assert len(set(numbers)) == len(numbers)
    for command in (["read", log, log.parent / "back.parquet", "--force"], ["stat", log]):
        result = CliRunner().invoke(main, ["logs", *map(str, command)])
        assert result.exit_code == 1, result.output
        for each in said:
            assert any(each in line for line in found), found
            assert each in result.stderr
    assert pq.read_metadata(log.parent / "back.parquet").num_rows == len(numbers)


def test_what_is_whole_is_not_told(log):
    assert read(log) == ([], read(log)[1])
    assert sorted(read(log)[1]) == list(range(300))
    result = CliRunner().invoke(main, ["logs", "stat", str(log)])
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_copy_of_another_shard(log):
    shutil.copy(shard(log, 0), shard(log, 1))
    check_told(log, "shard-00001-of-00003.recdlog: byte 0: by its header this is "
               "shard-00000-of-00003.recdlog; another shard was put in the place")  # fmt: skip


def test_a_copy_of_another_shard_without_a_manifest(log):
    (log / "manifest.json").unlink()
    shutil.copy(shard(log, 0), shard(log, 1))
    check_told(log, "by its header this is shard-00000-of-00003.recdlog")


def test_a_shard_cut_at_the_edge_of_a_block(log):
    path = shard(log, 2)
    size, before = path.stat().st_size, records(path)
    path.write_bytes(path.read_bytes()[: edges(path)[-3]])
    lost, now = before - records(path), path.stat().st_size
    assert lost > 1
    check_told(log, f"shard-00002-of-00003.recdlog: byte {now}: it was cut: {now} bytes, where "
               f"manifest.json says {size}; {lost} records lost")  # fmt: skip


def test_a_shard_of_another_log(log, tmp_path):
    write(tmp_path / "other", rows(300, seed=1), num_shards=3, block_size=1000)
    lost = records(shard(log, 1))
    shutil.copy(shard(tmp_path / "other", 1), shard(log, 1))
    check_told(log, f"another log's shard stands in its place (manifest.json has another sync); "
               f"{lost} records lost")  # fmt: skip


def test_a_shard_that_is_missing_and_one_too_many(log):
    lost = records(shard(log, 0))
    shard(log, 0).rename(log / "shard-00000-of-00009.recdlog")
    check_told(
        log,
        f"shard-00000-of-00003.recdlog: the shard is missing; {lost} records lost",
        "shard-00000-of-00009.recdlog: byte 0: by its header this is shard-00000-of-00003",
    )
    (log / "shard-00000-of-00009.recdlog").rename(log / "shard-old.recdlog")
    check_told(log, "shard-old.recdlog: manifest.json knows no such shard; it is left out")


def test_blocks_in_another_order_or_exchanged(log):
    path = shard(log, 0)
    data, ends = path.read_bytes(), edges(path)
    path.write_bytes(data[: ends[0]] + data[ends[-2] :] + data[ends[0] :])
    check_told(log, "its blocks are not those that were written (manifest.json has another digest)")


def test_one_shard_alone_is_compared_too(log, tmp_path):
    path = shard(log, 1)
    path.write_bytes(path.read_bytes()[: edges(path)[0]])
    assert "it was cut" in read(path)[0][0]


def test_a_log_without_a_manifest_is_read_with_a_warning(log, tmp_path, caplog):
    (log / "manifest.json").unlink()
    for command in (["read", log, tmp_path / "back.parquet"], ["stat", log]):
        result = CliRunner().invoke(main, ["logs", *map(str, command)])
        assert result.exit_code == 0, result.output
        assert f"{log}: the log has no manifest.json, as it was written by" in caplog.text
        caplog.clear()
    assert pq.read_metadata(tmp_path / "back.parquet").num_rows == 300
    write(log, rows(30, seed=1), num_shards=3)
    assert promised(log) == 330


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version": 2, "shards": {}}', '{"version": 1, "shards": {"a": {"log": 1}}}',
     '{"version": 1, "shards": {"a": {"log": "", "bytes": true, "records": 1, "digest": "zz"}}}'],
)  # fmt: skip
def test_a_manifest_that_is_none(log, text):
    (log / "manifest.json").write_text(text)
    check_told(log, "manifest.json: no manifest of a log: ")
    assert len(read(log)[1]) == 300
    with pytest.raises(DataError, match=r"no manifest of a log.*; remove it, and the next"):
        write(log, rows(1), num_shards=3)


def test_blocks_that_a_killed_writer_left_are_read_and_promised_by_the_next(log):
    more = rows(200, seed=1)
    with killed(log):
        write(log, more, num_shards=3, block_size=1000)
    assert read(log)[0] == []
    assert len(read(log)[1]) == 500
    before = promised(log)
    write(log, rows(7, seed=2), num_shards=3)
    after = promised(log)
    assert (before, after, read(log)[0]) == (300, 507, [])
    path = shard(log, 1)
    path.write_bytes(path.read_bytes()[: edges(path)[-1] - 1])
    assert "it was cut" in read(log)[0][0]


def bytes_of_a_lost_header(path: Path) -> bytes:
    return path.read_bytes()[: edges(path)[-2]] + bytes(2000)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda log: shard(log, 1).unlink(), "the shard is missing"),
        (lambda log: shard(log, 1).write_bytes(b""), "the shard was cut to 0 bytes"),
        (
            lambda log: shard(log, 1).write_bytes(shard(log, 1).read_bytes()[:-1]),
            "the shard was cut to",
        ),
        (
            lambda log: shard(log, 1).write_bytes(bytes_of_a_lost_header(shard(log, 1))),
            "the shard is damaged at its end",
        ),
    ],
)
def test_what_was_lost_is_not_forgotten_by_writing_on(log, damage, said):
    damage(log)
    files = sorted(log.iterdir())
    with pytest.raises(
        DataError, match=rf"shard-00001-of-00003.recdlog: {said}.* promises \d+ rec"
    ):
        write(log, rows(1), num_shards=3)
    assert sorted(log.iterdir()) == files
    if said != "the shard is damaged at its end":
        assert "shard-00001-of-00003.recdlog" in " ".join(read(log)[0])


def test_a_shard_exchanged_before_writing_on(log, tmp_path):
    write(tmp_path / "other", rows(600, seed=1), num_shards=3, block_size=1000)
    shutil.copy(shard(tmp_path / "other", 1), shard(log, 1))
    with pytest.raises(DataError, match="the shard is another log's"):
        write(log, rows(1), num_shards=3)


def bombed(path: Path, plain: bytes, raw_size: int, *, announced: bool = True) -> None:
    """Put a frame of ``plain`` in the place of the last block, with the right checksums."""
    last = edges(path)[-2]
    with ShardReader(path, unexpected) as reader:
        sync = reader.header.sync
        header = BlockHeader.parse(path.read_bytes()[last:], sync)
    frame = zstandard.ZstdCompressor(write_content_size=announced).compress(plain)
    header = BlockHeader(
        header.first_record, header.num_records, raw_size, len(frame), zlib.crc32(frame)
    )
    path.write_bytes(path.read_bytes()[:last] + header.to_bytes(sync) + frame)


@pytest.mark.parametrize(
    ("size", "raw_size", "announced", "said"),
    [
        (50_000_000, 1000, True, "zstd frame announces 50000000 bytes, where its header says 1000"),
        (50_000_000, 1000, False, "zstd frame announces no size, where its header says 1000"),
        (1000, 50_000_000, True, "announces 1000 bytes, where its header says 50000000"),
        (1000, 3_300_000_000, True, "3300000000 bytes before compression; 1610612736 are the most"),
    ],
)
def test_a_frame_that_is_a_bomb(log, size, raw_size, announced, said):
    (log / "manifest.json").unlink()
    bombed(shard(log, 0), bytes(size), raw_size, announced=announced)
    with shard(log, 0).open("rb") as file:
        assert len(file.read()) < 40_000
    check_told(log, said)


def test_a_frame_that_is_larger_than_it_announces(log):
    """The size in its header is changed, from 4 bytes to 4 others."""
    path = shard(log, 0)
    plain = bytes(70_000)
    bombed(path, plain, len(plain))
    data, last = path.read_bytes(), edges_of_headers(path)[-1]
    frame = data[last + BLOCK_HEADER_SIZE :]
    changed = frame.replace((70_000).to_bytes(4, "little"), (69_000).to_bytes(4, "little"), 1)
    assert changed != frame
    with ShardReader(path, lambda _: None) as reader:
        sync, old = reader.header.sync, BlockHeader.parse(data[last:], reader.header.sync)
    header = BlockHeader(old.first_record, 9, 69_000, len(changed), zlib.crc32(changed))
    path.write_bytes(data[:last] + header.to_bytes(sync) + changed)
    with pytest.raises(
        DataError, match=r"byte \d+: the block was written wrongly: the block cannot"
    ):
        read(path)


def edges_of_headers(path: Path) -> list[int]:
    with ShardReader(path, lambda _: None) as reader:
        return [position.offset for position, _, _ in reader.payloads()]


@pytest.mark.parametrize(
    "change",
    [{"record": "samples"}, {"shard": "0"}, {"shard": -1}, {"num_shards": 1 << 40}, {"key": None},
     {"sync": "zz"}, {"sync": "00"}, {"schema": "AAAA"}, {"session": "nobody"}, {"schema": 5}],
    ids=str,
)  # fmt: skip
def test_a_header_with_the_right_checksum_and_the_wrong_content(log, change):
    change_header(shard(log, 0), change)
    check_told(log, "shard-00000-of-00003.recdlog: byte 0: no header of a log shard that is whole")


def test_a_header_that_is_not_as_those_of_the_other_shards(log):
    change_header(shard(log, 0), {"record": "batch"})
    check_told(log, "shard-00000-of-00003.recdlog: byte 0: its header says batch, ")


def change_header(path: Path, change: dict[str, object]) -> None:
    """Another content of both copies, with its checksum, and the blocks as they were."""
    size = int.from_bytes(path.read_bytes()[8:12], "little")
    text = json.dumps({**json.loads(path.read_bytes()[16 : 16 + size]), **change}).encode()
    prefix = len(text).to_bytes(4, "little")
    crc = zlib.crc32(prefix + text).to_bytes(4, "little")
    blocks = path.read_bytes()[2 * (16 + size) :]
    path.write_bytes(2 * (shard_format.MAGIC + prefix + crc + text) + blocks)


def test_a_batch_that_is_no_valid_arrow(tmp_path):
    """Its offsets reach beyond its items."""
    write(tmp_path / "log", ROWS.slice(0, 20), num_shards=1, record="batch")
    path = tmp_path / "log" / "shard-00000-of-00001.recdlog"
    offset = edges_of_headers(path)[0]
    with ShardReader(path, unexpected) as reader:
        ((_, header, payload),) = reader.payloads()
        sync = reader.header.sync
    plain = zstandard.decompress(payload)
    lists = by_row([ROWS.slice(0, 20)])["items"]
    total = sum(map(len, lists.to_pylist())).to_bytes(4, "little")
    place = plain.rfind(total)
    changed = plain[:place] + (10**9).to_bytes(4, "little") + plain[place + 4 :]
    frame = zstandard.compress(changed)
    new = BlockHeader(0, header.num_records, len(changed), len(frame), zlib.crc32(frame))
    path.write_bytes(path.read_bytes()[:offset] + new.to_bytes(sync) + frame)
    with pytest.raises(DataError, match="the block is no Arrow record batch"):
        read(tmp_path / "log")


def test_a_shard_that_is_missing_with_the_manifest_is_not_begun_anew(log):
    (log / "manifest.json").unlink()
    shard(log, 1).unlink()
    with pytest.raises(DataError, match=r"shard-00001-of-00003.*is missing, and so is manifest"):
        write(log, rows(1), num_shards=3)
    assert not shard(log, 1).exists()


def test_a_copy_of_another_shard_is_named_by_who_writes_on(log):
    shard(log, 1).write_bytes(shard(log, 0).read_bytes())
    (log / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"by its header this is shard-00000-of-00003"):
        write(log, rows(1), num_shards=3)
