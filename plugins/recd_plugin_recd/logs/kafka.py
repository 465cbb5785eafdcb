"""Exchanges rows with Kafka topics, one message per row.

The key of a message is the session id as text, so Kafka stores a session in one partition. The
value is an Arrow IPC stream with one row, so any Arrow library can read it. Messages of a topic may
have different columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa

from recd_plugin_recd.logs.log import ParquetFile
from recd_plugins.api import DataError, folders, imports

_SECONDS = 30.0


class _Topic:
    """A Kafka topic, and the last error reported by the Kafka client library."""

    def __init__(self, servers: str, topic: str) -> None:
        self.client = imports.optional_library("confluent_kafka", "kafka", "Kafka")
        self.servers, self.topic = servers, topic
        self.last_error: Any = None

    def options(self, more: dict[str, str]) -> dict[str, Any]:
        return {
            "bootstrap.servers": self.servers,
            "client.id": "recd",
            "log_level": 2,  # Errors are raised; logging would repeat them.
            "error_cb": lambda error: setattr(self, "last_error", error),
            **more,
        }

    def failed(self, error: object) -> DataError:
        last = f" (last error: {_text(self.last_error)})" if self.last_error else ""
        return DataError(f"Kafka {self.servers}, topic {self.topic}: {_text(error)}{last}")


def _text(error: Any) -> str:
    if isinstance(error, Exception) and error.args:
        error = error.args[0]
    return str(error.str()) if hasattr(error, "str") else str(error)


class KafkaProducer:
    """Sends rows to a Kafka topic, with the session id as the key of each message.

    Retries do not duplicate rows. Keys are mapped to partitions as in Kafka's Java client.

    Args:
        servers: bootstrap servers, ``HOST:PORT,...``.
        topic: name of the topic.
        session: column of the session id.
        config: additional librdkafka options.
    """

    def __init__(self, servers: str, topic: str, session: str, config: dict[str, str]) -> None:
        self._place = _Topic(servers, topic)
        self._session = session
        self._failure: object = None
        self.delivered = 0
        defaults = {
            "enable.idempotence": "true",
            "compression.type": "zstd",
            "partitioner": "murmur2_random",
            # A larger batch compresses better: it contains more rows of a session.
            "linger.ms": "200",
        }
        client = self._place.client
        try:
            self._producer = client.Producer(self._place.options({**defaults, **config}))
        except client.KafkaException as error:
            raise self._place.failed(error) from error

    def write(self, batch: pa.RecordBatch) -> None:
        """Send rows. They are only delivered for certain after ``flush``."""
        batch = batch.replace_schema_metadata(None)
        for number, session in enumerate(batch.column(self._session).to_pylist()):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch.slice(number, 1))
            key = session if isinstance(session, bytes) else str(session).encode()
            self._send(key, sink.getvalue().to_pybytes())
        self._poll(0)

    def flush(self) -> None:
        """Wait until all rows are delivered. Raises DataError if a row could not be delivered."""
        left = 1
        while left:
            before = self.delivered
            left = self._producer.flush(_SECONDS)
            self._poll(0)
            if left and self.delivered == before:
                raise self._place.failed(
                    f"the servers did not answer for {_SECONDS:.0f} s, so {left} rows were not sent"
                )

    def _send(self, key: bytes, value: bytes) -> None:
        while True:
            try:
                self._producer.produce(
                    self._place.topic, value=value, key=key, on_delivery=self._on_delivery
                )
                return
            except BufferError:
                self._poll(0.1)
            except self._place.client.KafkaException as error:
                raise self._place.failed(error) from error

    def _on_delivery(self, error: Any, _message: object) -> None:
        self.delivered += error is None
        self._failure = self._failure or error

    def _poll(self, seconds: float) -> None:
        self._producer.poll(seconds)
        last = self._place.last_error
        failure = self._failure or (last if last is not None and last.fatal() else None)
        if failure is not None:
            raise self._place.failed(
                f"sending failed after {self.delivered} rows were delivered: {_text(failure)}"
            )


class KafkaConsumer:
    """Writes the available messages of a Kafka topic to Parquet files, each row exactly once.

    A file contains the rows of one Kafka partition between two offsets. Its name is
    ``TOPIC.PARTITION.FIRST-LAST.parquet``. The last offset is committed to Kafka when the file is
    complete. If the process is killed before the commit, the next run continues after the last row
    of the file.

    Args:
        servers: bootstrap servers, ``HOST:PORT,...``.
        topic: name of the topic.
        group: consumer group that stores the offsets.
        folder: folder of the Parquet files.
        rows_per_file: maximum number of rows in a file.
        config: additional librdkafka options.
    """

    def __init__(
        self,
        servers: str,
        topic: str,
        group: str,
        folder: Path,
        *,
        rows_per_file: int = 65_536,
        config: dict[str, str] | None = None,
    ) -> None:
        self._place = _Topic(servers, topic)
        self._topic, self._folder = topic, folder
        self._rows_per_file = rows_per_file
        self._options = {
            # A fetch that waits for more rows would delay the next partition.
            "fetch.wait.max.ms": 10,
            **self._place.options(config or {}),
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
        }

    def run(self, progress: Callable[[int], None]) -> list[Path]:
        """Write all new rows to Parquet files, and return the files.

        ``progress`` is called with the number of rows of each new file.
        """
        client = self._place.client
        with ExitStack() as opened:
            opened.enter_context(folders.locked_folder(self._folder))
            for scratch in self._folder.glob(".*.partial"):  # left by a killed run
                scratch.unlink()
            try:
                consumer = client.Consumer(self._options)
                opened.callback(consumer.close)
                topic = consumer.list_topics(self._topic, timeout=_SECONDS).topics[self._topic]
                if topic.error is not None:
                    raise self._place.failed(topic.error)
                written = written_until(self._folder, self._topic)
                return [
                    path
                    for number in sorted(topic.partitions)
                    for path in self._copy(consumer, number, written.get(number, 0), progress)
                ]
            except client.KafkaException as error:
                raise self._place.failed(error) from error

    def _copy(
        self, consumer: Any, number: int, in_folder: int, progress: Callable[[int], None]
    ) -> Iterator[Path]:
        """Write the new rows of a partition. Yields the files. New columns start a new file."""
        start, end = self._range(consumer, number, in_folder)
        rows = self._rows(consumer, number, start, end)
        following = next(rows, None)
        while following is not None:
            (last, row), count = following, 0
            schema = row.schema
            path = self._folder / f"{self._topic}.{number:05d}.{last:019d}"
            with ParquetFile(path, schema) as file:
                while following is not None:
                    offset, row = following
                    if count == self._rows_per_file or row.schema != schema:
                        break
                    file.write(row)
                    last, count = offset, count + 1
                    following = next(rows, None)
                file.path = path.with_name(f"{path.name}-{last:019d}.parquet")
                file.close({"topic": self._topic, "partition": number, "last": last})
            progress(count)
            done = self._place.client.TopicPartition(self._topic, number, last + 1)
            consumer.commit(offsets=[done], asynchronous=False)
            yield file.path

    def _range(self, consumer: Any, number: int, in_folder: int) -> tuple[int, int]:
        """Return the offset of the first row to read, and the offset after the last row."""
        asked = self._place.client.TopicPartition(self._topic, number)
        (committed,) = consumer.committed([asked], timeout=_SECONDS)
        low, high = consumer.get_watermark_offsets(asked, timeout=_SECONDS)
        start = max(committed.offset, in_folder)
        read_before = max(in_folder, committed.offset + 1) > 0
        if start > high or (read_before and start < low):
            raise self._place.failed(
                f"partition {number} has offsets {low} to {high}, but was read up to {start}, so "
                "rows were deleted or the topic was created again. Use another --group and another "
                "FOLDER."
            )
        return max(start, low), high

    def _rows(
        self, consumer: Any, number: int, start: int, end: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        client = self._place.client
        if start >= end:
            return
        consumer.assign([client.TopicPartition(self._topic, number, start)])
        while True:
            message = consumer.poll(_SECONDS)
            if message is None:
                raise self._place.failed(f"the servers did not answer for {_SECONDS:.0f} s")
            error = message.error()
            if error is not None and error.code() == client.KafkaError._PARTITION_EOF:
                return
            if error is not None:
                raise self._place.failed(error)
            try:
                row = pa.ipc.open_stream(message.value() or b"").read_next_batch()
            except (pa.ArrowException, OSError, StopIteration) as error:
                where = f"partition {number}, offset {message.offset()}"
                raise self._place.failed(
                    f"{where}: the message is not a row from recd logs produce ({error}). Use "
                    "another topic"
                ) from error
            yield message.offset(), row
            if message.offset() + 1 >= end:
                return


def written_until(folder: Path, topic: str) -> dict[int, int]:
    """Return a dict from Kafka partition to next offset, based on the file names in ``folder``."""
    name = re.compile(rf"{re.escape(topic)}\.(\d{{5,}})\.\d{{19}}-(\d{{19}})\.parquet")
    matches = [match for path in folder.iterdir() if (match := name.fullmatch(path.name))]
    return {int(each[1]): int(each[2]) + 1 for each in sorted(matches, key=lambda each: each[0])}
