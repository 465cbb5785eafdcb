"""Kafka, in the shape of librdkafka's own mock cluster."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.commands import recd, refusal

from recd_plugin_recd.logs.kafka import KafkaConsumer, KafkaProducer, written_until
from recd_plugin_recd.tests.logs.tables import by_row, rows
from recd_plugin_streaming.tests.cluster import PARTITIONS, Cluster, kafka
from recd_plugins.runtime.errors import DataError


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    cluster = Cluster()
    yield cluster.servers
    del cluster


@pytest.fixture
def topic(request) -> str:
    return "".join(letter if letter.isalnum() else "." for letter in request.node.name)


def produce(servers: str, topic: str, *batches: pa.RecordBatch, **config: str) -> None:
    producer = KafkaProducer(servers, topic, "session_id", config)
    for batch in batches:
        producer.write(batch)
    producer.flush()
    assert producer.delivered == sum(batch.num_rows for batch in batches)


def consume(servers: str, topic: str, folder, **options) -> list:
    return KafkaConsumer(servers, topic, "group", folder, **options).run(lambda _rows: None)


def committed(servers: str, topic: str) -> list[int]:
    client = kafka.Consumer({"bootstrap.servers": servers, "group.id": "group", "log_level": 0})
    asked = [kafka.TopicPartition(topic, number) for number in range(PARTITIONS)]
    offsets = [each.offset for each in client.committed(asked, timeout=10)]
    client.close()
    return offsets


def read(folder) -> pa.Table:
    return by_row(pq.read_table(folder).to_batches())


def test_rows_come_back_once_sessions_in_one_partition(servers, topic, tmp_path):
    produce(servers, topic, rows(300).slice(0, 120), rows(300).slice(120))
    files = consume(servers, topic, tmp_path / "t", rows_per_file=50)
    assert len(files) > PARTITIONS
    assert read(tmp_path / "t").equals(by_row([rows(300)]))
    partition_of = {}
    for file in files:
        table = pq.read_table(file)
        assert table.num_rows <= 50
        for session in table["session_id"].to_pylist():
            partition = file.name.split(".")[-3]
            assert partition_of.setdefault(session, partition) == partition
    assert len(set(partition_of.values())) > 1
    ends = written_until(tmp_path / "t", topic)
    assert committed(servers, topic) == [ends.get(number, -1001) for number in range(PARTITIONS)]


@pytest.mark.parametrize("moment", ["before the file", "before the commit"])
def test_a_run_that_is_killed_loses_and_repeats_nothing(
    servers, topic, tmp_path, monkeypatch, moment
):
    produce(servers, topic, rows(200))
    with monkeypatch.context() as patch:
        if moment == "before the commit":

            class Killed(kafka.Consumer):  # type: ignore[name-defined]
                def commit(self, *args, **kwargs):
                    sys.exit(9)

            patch.setattr(kafka, "Consumer", Killed)
        else:
            patch.setattr("os.replace", lambda *_: sys.exit(9))
        with pytest.raises(SystemExit):
            consume(servers, topic, tmp_path / "t", rows_per_file=20)
    assert len(list((tmp_path / "t").glob("*.parquet"))) == (moment == "before the commit")
    assert committed(servers, topic) == [-1001] * PARTITIONS
    # Other files than the first run's would show a row twice.
    consume(servers, topic, tmp_path / "t", rows_per_file=33)
    assert read(tmp_path / "t").equals(by_row([rows(200)]))


def test_columns_that_change_begin_another_file(servers, topic, tmp_path):
    produce(servers, topic, rows(40))
    produce(servers, topic, rows(40).drop_columns("score"))
    columns = Counter[tuple[str, ...]]()
    for file in consume(servers, topic, tmp_path / "t"):
        columns[tuple(pq.read_schema(file).names)] += pq.read_metadata(file).num_rows
    names = ("session_id", "row", "score", "items")
    assert columns == {names: 40, tuple(name for name in names if name != "score"): 40}


def test_a_foreign_message_is_named(servers, topic, tmp_path):
    produce(servers, topic, rows(20))
    producer = kafka.Producer({"bootstrap.servers": servers, "log_level": 0})
    producer.produce(topic, value=b"{}", partition=1)
    producer.flush(10)
    with pytest.raises(DataError, match=r"partition 1, offset \d+: the message is not a row"):
        consume(servers, topic, tmp_path / "t")
    assert all(pq.read_metadata(file) for file in (tmp_path / "t").glob("*.parquet"))


def test_rows_that_were_deleted_before_they_were_read(servers, topic, tmp_path):
    large = pa.record_batch({"session_id": [7] * 20, "data": [b"x" * 400_000] * 20})
    produce(servers, topic, large.slice(0, 1))
    consume(servers, topic, tmp_path / "t")
    config = {"compression.type": "none", "linger.ms": "0", "batch.num.messages": "1"}
    produce(servers, topic, large, **config)
    with pytest.raises(DataError, match="but was read up to 1, so rows were deleted"):
        consume(servers, topic, tmp_path / "t")


def test_the_commands(servers, topic, cwd):
    pq.write_table(pa.table(rows(60)), "rows.parquet")
    place = ["--servers", servers, "--topic", topic]
    sent = recd("logs", "produce", "rows.parquet", *place, "--config", "linger.ms=5")
    assert f"{topic}: 60 rows delivered" in sent
    consume = ["logs", "consume", "t", *place, "--group", "g"]
    assert "t: 60 rows in " in recd(*consume)
    assert read("t").num_rows == 60
    wrong = refusal(*consume, "--config", "linger", code=2)
    assert "'linger' does not have the form KEY=VALUE" in wrong


def test_servers_that_do_not_answer(monkeypatch, tmp_path):
    monkeypatch.setattr("recd_plugin_recd.logs.kafka._SECONDS", 0.5)
    with pytest.raises(DataError, match=r"Kafka 127\.0\.0\.1:1, topic t: .*etadata"):
        consume("127.0.0.1:1", "t", tmp_path / "t")
    said = r"did not answer .* 5 rows were not sent \(last error: .*refused"
    with pytest.raises(DataError, match=said):
        produce("127.0.0.1:1", "t", rows(5))
