"""Whatever happens to the bytes of a shard: no wrong record, and at most a block is lost."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recd_plugin_recd.logs import shard_reader
from recd_plugin_recd.logs.damage import Damage
from recd_plugin_recd.logs.shard_reader import RecordBlock, ShardReader
from recd_plugin_recd.tests.logs.tables import by_row, rows, unexpected, write
from recd_plugins.errors import DataError

ROWS = rows(300)
EXPECTED = by_row([ROWS]).to_pylist()


@pytest.fixture(scope="module", params=["sample", "batch"])
def shard(request, tmp_path_factory) -> Path:
    """A shard of some blocks."""
    folder = tmp_path_factory.mktemp("log")
    write(folder, ROWS, num_shards=1, block_size=3000, record=request.param)
    return folder / "shard-00000-of-00001.recdlog"


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("broken") / "shard-00000-of-00001.recdlog"


def read(path: Path) -> tuple[list[RecordBlock], list[Damage]]:
    damage: list[Damage] = []
    with ShardReader(path, damage.append) as reader:
        return list(reader.blocks()), damage


def check(path: Path, most_lost: int) -> tuple[list[RecordBlock], list[Damage]]:
    """What is read is right, and what is not read is reported."""
    blocks, damage = read(path)
    found = [row for block in blocks for row in block.rows.to_pylist()]
    numbers = [row["row"] for row in found]
    assert len(set(numbers)) == len(numbers)
    assert all(row == EXPECTED[row["row"]] for row in found)
    lost = len(EXPECTED) - len(found)
    assert lost <= most_lost
    if lost:
        assert damage
    known = [each.records_lost or 0 for each in damage]
    assert sum(known) <= lost
    return blocks, damage


def check_cut(path: Path) -> tuple[list[RecordBlock], list[Damage]]:
    """As ``check``, of a file that does not say how much was behind its end."""
    blocks, damage = read(path)
    found = [row for block in blocks for row in block.rows.to_pylist()]
    assert all(row == EXPECTED[row["row"]] for row in found)
    return blocks, damage


def sizes(path: Path) -> tuple[int, list[int], list[int]]:
    """Where blocks start, each block's end, and its records."""
    with ShardReader(path, unexpected) as reader:
        blocks = list(reader.blocks())
        return (
            reader.start.offset,
            [block.end.offset for block in blocks],
            [block.header.num_records for block in blocks],
        )


def test_a_shard_has_some_blocks(shard):
    _, ends, records = sizes(shard)
    assert len(ends) > 4
    assert sum(records) == 300


def test_every_byte_flipped(shard, broken):
    data = shard.read_bytes()
    start, ends, records = sizes(shard)
    # Every byte of the first headers, and some of all others.
    places = [*range(0, start, 17), *range(start, start + 60), *range(start + 60, len(data), 29)]
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= 1 << (place % 8)
        broken.write_bytes(flipped)
        block = int(np.searchsorted(ends, place, "right"))
        _, damage = check(broken, 0 if place < start else records[block])
        assert len(damage) == 1, place
        assert damage[0].shard == broken
        assert damage[0].offset <= place
        if place >= start and block + 1 < len(ends):
            assert damage[0].resumes_at == ends[block]
        if place < start or block + 1 < len(ends):
            assert damage[0].records_lost == (0 if place < start else records[block])


def test_cut_at_every_length(shard, broken):
    data = shard.read_bytes()
    start, ends, _ = sizes(shard)
    lengths = [*range(0, start, 17), *range(start - 3, start + 60), *range(start, len(data), 19)]
    for length in lengths:
        broken.write_bytes(data[:length])
        if length < start // 2:
            with pytest.raises(DataError, match=r"recdlog: no header of a log shard"):
                read(broken)
            continue
        whole = sum(end <= length for end in ends)
        blocks, damage = check_cut(broken)
        assert len(blocks) == whole
        assert len(damage) == (0 if length in (start, *ends) else 1)
        if length > start + 44 and damage:
            assert damage[0].offset == ([start, *ends][whole])
            assert damage[0].resumes_at is None


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_blocks_that_are_not_touched_come_out(shard, broken, data):
    """Any part overwritten, removed or inserted, be it with a copy of a block."""
    good = shard.read_bytes()
    start, ends, _ = sizes(shard)
    first = data.draw(st.integers(0, len(good) - 1))
    length = data.draw(st.integers(0, 400))
    noise = data.draw(st.binary(max_size=200) | st.just(good[start : ends[0]]))
    broken.write_bytes(good[:first] + noise + good[first + length :])
    with suppress(DataError):
        found = {row["row"]: row for block in read(broken)[0] for row in block.rows.to_pylist()}
        assert all(row == EXPECTED[number] for number, row in found.items())
        for begin, block in zip([start, *ends], read(shard)[0], strict=False):
            if block.end.offset <= first or begin >= first + length:
                assert set(block.rows.column("row").to_pylist()) <= set(found)


def test_headers_of_two_blocks_damaged(shard, broken):
    start, ends, records = sizes(shard)
    data = bytearray(shard.read_bytes())
    data[start + 20] ^= 1
    data[ends[0] + 20] ^= 1
    broken.write_bytes(data)
    (damage,) = check(broken, records[0] + records[1])[1]
    assert (damage.records_lost, damage.resumes_at) == (records[0] + records[1], ends[1])


def test_the_next_block_is_found_wherever_the_scan_is_cut(shard, broken, monkeypatch):
    start, ends, records = sizes(shard)
    data = bytearray(shard.read_bytes())
    data[start] ^= 1
    broken.write_bytes(data)
    for size in range(17, 60):
        monkeypatch.setattr(shard_reader, "_SCAN_BYTES", size)
        (damage,) = check(broken, records[0])[1]
        assert damage.resumes_at == ends[0]


def test_a_block_that_was_taken_out_is_missed(shard, broken):
    start, ends, records = sizes(shard)
    data = shard.read_bytes()
    broken.write_bytes(data[:start] + data[ends[0] :])
    _, damage = check(broken, records[0])
    assert [(each.records_lost, each.offset) for each in damage] == [(records[0], start)]
    broken.write_bytes(data[: ends[1]] + data[ends[0] :])
    assert check(broken, 0)[1] == []


def test_damage_says_where_and_how_much(shard, broken):
    start, ends, records = sizes(shard)
    data = bytearray(shard.read_bytes())
    data[ends[0] - 1] ^= 4
    broken.write_bytes(data)
    (damage,) = read(broken)[1]
    assert str(damage) == (
        f"{broken}: byte {start}: the block's checksum is wrong; {records[0]} records lost, "
        f"reading goes on at byte {ends[0]}"
    )


def test_files_that_are_no_shards(tmp_path):
    (tmp_path / "x").write_bytes(b"PAR1" * 1000)
    with pytest.raises(DataError, match="x: no header of a log shard"):
        read(tmp_path / "x")
    with pytest.raises(DataError, match="y: cannot be read"):
        read(tmp_path / "y")
