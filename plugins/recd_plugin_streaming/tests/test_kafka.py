"""``streaming.kafka`` against librdkafka's mock cluster: batches, positions and faults."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recd_plugin_recd.logs.kafka import KafkaProducer
from recd_plugin_streaming.kafka import Kafka
from recd_plugin_streaming.tests.cluster import PARTITIONS, Cluster, kafka
from recd_plugin_streaming.tests.streams import (
    COLUMNS,
    check_each_row_once,
    check_resumed,
    clicks,
    flat,
    read,
    reader,
)
from recd_plugin_streaming.topic import Topic
from recd_plugins.runtime.errors import DataError


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recd_plugin_streaming.topic._MOST_MESSAGES", 4)  # else they wait for more
        yield Cluster()


@pytest.fixture
def topic(request) -> str:
    return "".join(letter if letter.isalnum() else "." for letter in request.node.name)


def dataset(cluster: Cluster, topic: str, **options: Any) -> Kafka:
    values = {"servers": cluster.servers, "topic": topic, "columns": COLUMNS, "end": "latest"}
    return Kafka(Kafka.Options.model_validate(values | options))


@pytest.mark.parametrize("grouping", [{}, {"group_by": "session", "window_rows": 50}])
def test_a_resumed_reader_yields_the_other_batches(cluster, topic, grouping):
    cluster.write(topic, clicks(200))
    stream = dataset(cluster, topic, **grouping)
    states = check_resumed(stream)
    cluster.write(topic, clicks(8, first=200))  # a finished run continues with new messages
    assert sorted(read(reader(stream, state=states[-1]))[0][0]) == list(range(200, 208))


def test_a_group_is_in_one_batch(cluster, topic):
    cluster.write(topic, clicks(64, sessions=8))
    stream = dataset(cluster, topic, group_by="session", window_rows=64)
    for batch in read(reader(stream))[0]:
        assert len({n * 31 % 8 for n in batch}) == 1


@pytest.mark.parametrize("grouping", [{}, {"group_by": "session", "window_rows": 40}])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 4)])
def test_each_message_comes_once_if_the_ranks_change(cluster, topic, grouping, before, after):
    for partition in range(PARTITIONS):
        cluster.write(topic, clicks(60, first=60 * partition), partition)
    stream = dataset(cluster, topic, **grouping)
    check_each_row_once(stream, [3] * before, after, 60 * PARTITIONS, lambda: None)


def test_bad_messages_are_counted_and_kept(cluster, topic, tmp_path):
    bad = {
        b"": "is empty",
        b"[1]": "not a JSON object",
        b'{"id": 1': "not a JSON object",
        b'{"id": 1, "session": 2, "click": 1} {"id": 1, "session": 2, "click": 1}': "not one JSON",
        b'{"id": "7", "session": 2, "click": 1}': "Column(/id) changed from number to string",
        b'{"id": 1.5, "session": 2, "click": 1}': "1.5",
        b'{"session": 2, "click": 1}': "column 'id' is missing or null",
        b'{"id": 1, "session": 2, "click": 3}': "neither 0 nor 1",
        b"{\xff}": "Missing a name",
    }
    good = clicks(40)
    cluster.write(topic, [*good[:20], *bad, *good[20:]])
    stream = dataset(cluster, topic, dead_letters=tmp_path / "dead")
    for _ in range(2):  # another run does not write them again
        batches, _ = read(reader(stream))
        assert flat(batches) == list(range(40))
        lines = (tmp_path / "dead" / f"{topic}.0.jsonl").read_text().splitlines()
        assert [json.loads(line)["offset"] for line in lines] == list(range(20, 29))
    for line, (value, reason) in zip(map(json.loads, lines), bad.items(), strict=True):
        assert reason in line["reason"]
        assert line["value"] == value.decode(errors="surrogateescape")
    with pytest.raises(DataError, match=r"9 messages .* more than max_bad_messages \(8\)"):
        read(reader(dataset(cluster, topic, max_bad_messages=8)))


def test_arrow_messages_of_recd_logs(cluster, topic):
    rows = pa.RecordBatch.from_pylist(clicks(32))
    producer = KafkaProducer(cluster.servers, topic, "session", {})
    producer.write(rows)
    producer.flush()
    cluster.write(topic, [pa.BufferOutputStream().getvalue().to_pybytes() or b"?"])
    changed = rows.set_column(0, "id", pa.array(["x"] * 32))
    producer.write(changed.slice(0, 1))  # a type that changes
    producer.flush()
    stream = dataset(cluster, topic, format="arrow")
    assert len(flat(read(reader(stream))[0])) == 32
    with pytest.raises(DataError, match=r"expected int64|IPC stream"):
        read(reader(dataset(cluster, topic, format="arrow", max_bad_messages=1)))


@pytest.mark.parametrize("schema_id", [None, 7])
def test_avro_messages(cluster, topic, tmp_path, schema_id):
    avro = pytest.importorskip("fastavro", reason="needs the extra avro")
    fields = [{"name": name, "type": "long"} for name in ("id", "session", "click", "unused")]
    schema = {"type": "record", "name": "Click", "fields": fields}
    (tmp_path / "click.avsc").write_text(json.dumps(schema))

    def encoded(record: Any, number: int) -> bytes:
        stream = io.BytesIO(b"" if schema_id is None else b"\0" + number.to_bytes(4, "big"))
        stream.seek(0, 2)
        avro.schemaless_writer(stream, schema, record)
        return stream.getvalue()

    values = [encoded(click, 7) for click in clicks(32)]
    cluster.write(topic, [*values[:9], values[3] + b"?", values[3][:-2], *values[9:]])
    options = {"format": "avro", "avro_schema": tmp_path / "click.avsc", "max_bad_messages": 2}
    options["avro_schema_id"] = schema_id
    batches, _ = read(reader(dataset(cluster, topic, **options)))
    assert flat(batches) == list(range(32))
    if schema_id is not None:  # a schema that changes
        cluster.write(topic, [encoded(clicks(1)[0], 8)])
        with pytest.raises(DataError, match="schema id 8, expected 7"):
            read(reader(dataset(cluster, topic, **options)))
    with pytest.raises(ValueError, match="format: avro needs avro_schema"):
        dataset(cluster, topic, format="avro")


def test_deleted_messages_are_refused(cluster, topic, monkeypatch, capfd):
    cluster.write(topic, clicks(100))
    _, states = read(reader(dataset(cluster, topic)), most=5)
    monkeypatch.setattr(Topic, "watermarks", lambda _, p, **_cached: [(64, 100), (0, 0)][p > 0])
    deleted = r"partition 0: the messages with offsets 40 to 63 were del"
    with pytest.raises(DataError, match=deleted):
        read(reader(dataset(cluster, topic), state=states[-1]))
    rest, _ = read(reader(dataset(cluster, topic, lost="skip"), state=states[-1]))
    assert flat(rest) == list(range(64, 96))
    assert "offsets 40 to 63 were deleted" in capfd.readouterr().err
    monkeypatch.setattr(Topic, "watermarks", lambda _, p, **_cached: [(0, 10), (0, 0)][p > 0])
    with pytest.raises(DataError, match="the topic was created again"):
        read(reader(dataset(cluster, topic), state=states[-1]))


def test_where_a_new_run_starts(cluster, topic, monkeypatch):
    cluster.write(topic, clicks(16))
    made = reader(dataset(cluster, topic, start="latest", end="never"))
    while not made.state_dict()["ranks"][0]:  # until it has looked where the topic ends
        assert made.poll(0.1) is False
    cluster.write(topic, clicks(8, first=16))
    assert read(made, most=1)[0] == [list(range(16, 24))]

    class Consumer(kafka.Consumer):  # type: ignore[name-defined]
        """The mock cluster does not find offsets by time."""

        def offsets_for_times(self, places, timeout):
            (place,) = places
            is_there = place.partition == 0 and place.offset <= 1_800_000_000_000
            return [kafka.TopicPartition(place.topic, place.partition, 8 if is_there else -1)]

    monkeypatch.setattr(kafka, "Consumer", Consumer)
    assert read(reader(dataset(cluster, topic, start="2020-01-01T00:00:00Z")))[0][0][0] == 8
    assert read(reader(dataset(cluster, topic, start="2090-01-01T00:00:00Z")))[0] == []


def test_what_cannot_start(cluster, topic):
    with pytest.raises(DataError, match="Create the topic"):
        dataset(cluster, topic).prepare()
    cluster.write(topic, clicks(1))
    with pytest.raises(DataError, match="4 partitions, too few for 5 ranks"):
        read(reader(dataset(cluster, topic), 0, 5))
    with pytest.raises(DataError, match="without a test split"):
        dataset(cluster, topic).reader(rank=0, world_size=1, batch_size=1, split="test")
    with pytest.raises(ValueError, match="is no column with the role id, key or text"):
        dataset(cluster, topic, group_by="user")
    with pytest.raises(ValueError, match="0 columns have the role label"):
        dataset(cluster, topic, columns={"id": "id", "x": "number"})


def test_places_and_samples(cluster, topic):
    for partition in (1, 2):
        cluster.write(topic, clicks(12, first=12 * partition), partition)
    stream = dataset(cluster, topic)
    rows = next(iter(stream.sample(8)))
    assert rows.data.column("id").to_pylist() == list(range(12, 20))
    made = reader(stream)
    rows = next(iter(made))
    place = rows.place_of(3)
    made.close()
    number = rows.data.column("id")[3].as_py()
    assert f"partition {number // 12}, offset {number % 12}" in place
    assert np.asarray(rows.data.column("click")).dtype == np.float32


def test_servers_that_do_not_answer(monkeypatch):
    monkeypatch.setattr("recd_plugin_streaming.topic.SECONDS", 0.2)
    nowhere = {"servers": "127.0.0.1:1", "topic": "t", "columns": COLUMNS}
    with pytest.raises(DataError, match=r"Kafka 127.0.0.1:1, topic t: .*last error: .*refused"):
        Kafka(Kafka.Options.model_validate(nowhere)).prepare()
