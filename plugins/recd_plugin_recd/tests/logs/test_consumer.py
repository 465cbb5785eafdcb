"""Consumers go on where they were."""

from __future__ import annotations

import os

import pytest

from recd_plugin_recd.logs.consumer import Consumer
from recd_plugin_recd.tests.logs.tables import by_row, killed, rows, unexpected, write
from recd_plugins.errors import DataError


def drain(consumer):
    return by_row(found.rows for found in consumer)


def test_a_consumer_reads_each_record_once(tmp_path):
    parts = [rows(200, seed=seed) for seed in range(3)]
    for part in parts:
        write(tmp_path / "log", part, num_shards=3, block_size=700)
        consumer = Consumer(tmp_path / "log", tmp_path / "offsets.json", unexpected)
        assert drain(consumer).equals(by_row([part]))
        consumer.commit()
    assert drain(Consumer(tmp_path / "log", tmp_path / "offsets.json", unexpected)).num_rows == 0
    assert drain(Consumer(tmp_path / "log", None, unexpected)).num_rows == 600


def test_a_consumer_that_stops_anywhere_goes_on_there(tmp_path):
    write(tmp_path / "log", rows(300), num_shards=3, block_size=500)
    found = []
    while True:
        consumer = Consumer(tmp_path / "log", tmp_path / "offsets.json", unexpected)
        taken = next(iter(consumer), None)
        if taken is None:
            break
        found.append(taken.rows)
        consumer.commit()
    assert len(found) > 9
    assert by_row(found).equals(by_row([rows(300)]))


def test_what_was_not_committed_comes_again(tmp_path):
    write(tmp_path / "log", rows(100), num_shards=2, block_size=500)
    consumer = Consumer(tmp_path / "log", tmp_path / "offsets.json", unexpected)
    first = next(iter(consumer))
    consumer.commit()
    drain(consumer)
    again = drain(Consumer(tmp_path / "log", tmp_path / "offsets.json", unexpected))
    assert again.num_rows == 100 - first.rows.num_rows


def test_a_consumer_starts_at_any_record(tmp_path):
    write(tmp_path / "log", rows(200), num_shards=1, block_size=500, sort=False)
    name = "shard-00000-of-00001.recdlog"
    for record in (0, 1, 57, 199, 200):
        consumer = Consumer(tmp_path / "log", None, unexpected)
        consumer.seek(name, record)
        found = list(consumer)
        numbers = [number for each in found for number in each.rows.column(1).to_pylist()]
        assert numbers == list(range(record, 200))
        assert not found or found[0].first_record == record


def test_a_record_is_found_behind_a_damaged_header(tmp_path):
    write(tmp_path / "log", rows(200), num_shards=1, block_size=500, sort=False)
    (path,) = (tmp_path / "log").glob("*.recdlog")
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.write_bytes(data)
    damage = []
    consumer = Consumer(tmp_path / "log", None, damage.append)
    consumer.seek(path.name, 150)
    assert by_row(found.rows for found in consumer).column("row").to_pylist() == [*range(150, 200)]
    assert [(each.offset, each.records_lost) for each in damage] == [(0, 0)]


def test_a_tail_that_is_being_written_is_read_when_it_is_whole(tmp_path):
    write(tmp_path / "log", rows(50), num_shards=1)
    (path,) = (tmp_path / "log").glob("*.recdlog")
    with killed(tmp_path / "log"):
        write(tmp_path / "log", rows(60, seed=1), num_shards=1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    damage = []
    consumer = Consumer(tmp_path / "log", tmp_path / "offsets.json", damage.append)
    assert drain(consumer).equals(by_row([rows(50)]))
    consumer.commit()
    assert [(each.cause, each.records_lost) for each in damage] == [("the block is cut off", 60)]
    path.write_bytes(whole)
    again = Consumer(tmp_path / "log", tmp_path / "offsets.json", unexpected)
    assert drain(again).equals(by_row([rows(60, seed=1)]))


def test_damage_in_a_header_costs_no_other_shard(tmp_path):
    write(tmp_path / "log", rows(200), num_shards=3)
    first, second, _ = sorted((tmp_path / "log").glob("*.recdlog"))
    first.write_bytes(b"\0" * first.stat().st_size)
    second.unlink()
    damage = []
    found = [each.shard for each in Consumer(tmp_path / "log", None, damage.append)]
    assert found == ["shard-00002-of-00003.recdlog"]
    assert [(each.shard, each.cause) for each in damage] == [
        (first, "no header of a log shard that is whole"),
        (second, "the shard is missing"),
    ]


def test_offsets_of_another_log_are_refused(tmp_path):
    write(tmp_path / "log", rows(50), num_shards=2)
    write(tmp_path / "other", rows(50), num_shards=2)
    consumer = Consumer(tmp_path / "log", tmp_path / "offsets.json", unexpected)
    drain(consumer)
    consumer.commit()
    with pytest.raises(DataError, match=r"offsets.json: offsets of another log"):
        Consumer(tmp_path / "other", tmp_path / "offsets.json", unexpected)
    os.truncate(tmp_path / "log" / "shard-00001-of-00002.recdlog", 1400)
    with pytest.raises(DataError, match="it has been cut"):
        Consumer(tmp_path / "log", tmp_path / "offsets.json", lambda _damage: None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"shards": {"a": {}}}',
        '{"shards": 3}',
        '{"shards": {"a": {"log": "b", "offset": -5, "record": 0}}}',
        '{"shards": {"a": {"log": "b", "offset": 5, "record": 1.5}}}',
        "\0\0",
    ],
)
def test_damaged_offsets_are_refused(tmp_path, text):
    write(tmp_path / "log", rows(50), num_shards=2)
    (tmp_path / "offsets.json").write_text(text)
    with pytest.raises(DataError, match=r"offsets.json: no offsets of a log"):
        Consumer(tmp_path / "log", tmp_path / "offsets.json", unexpected)


def test_places_without_a_log(tmp_path):
    with pytest.raises(DataError, match="nothing: no such file or folder"):
        Consumer(tmp_path / "nothing", None, unexpected)
    with pytest.raises(DataError, match=r"no log: there is no shard-\*"):
        Consumer(tmp_path, None, unexpected)
