"""Kafka topics: one message per row, keyed by its session.

The key is the session id as text, so that Kafka keeps a session in one partition. The value is an
Arrow IPC stream of one row, so any Arrow library reads it and columns may change within a topic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from recd_plugin_recd.logs.parquet_file import ParquetFile
from recd_plugins.api import DataError, locked_folder, optional_library

_SECONDS = 30.0


class _Topic:
    """A topic on servers, and the last error of the client."""

    def __init__(self, servers: str, topic: str) -> None:
        self.client = optional_library("confluent_kafka", "kafka", "Kafka")
        self.servers, self.topic = servers, topic
        self.fatal: object = None
        self._last: object = None

    def options(self, more: dict[str, str]) -> dict[str, Any]:
        """Return configuration of any client; ``more`` wins."""
        return {
            "bootstrap.servers": self.servers,
            "client.id": "recd",
            "log_level": 2,  # errors are raised; the log would repeat them
            "error_cb": self._on_error,
            **more,
        }

    def failed(self, error: object, note: str = "") -> DataError:
        """Return an error for the user."""
        last = f" (last: {_text(self._last)})" if self._last and self._last is not error else ""
        return DataError(f"Kafka {self.servers}, topic {self.topic}: {_text(error)}{last}{note}")

    def _on_error(self, error: Any) -> None:
        self._last = error
        if error.fatal():
            self.fatal = error


def _text(error: Any) -> str:
    if isinstance(error, Exception) and error.args:
        error = error.args[0]
    return str(error.str()) if hasattr(error, "str") else str(error)


class KafkaProducer:
    """Sends rows to ``topic``, keyed by the column ``session``.

    The producer is idempotent, so retries add no duplicates. Batches are compressed with zstd, and
    a session goes to the partition to which Java clients would send it.

    Args:
        config: more configuration of librdkafka, such as credentials or ``batch.size``.
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
            # A larger batch has more rows of a session to compress together.
            "linger.ms": "200",
        }
        client = self._place.client
        try:
            self._producer = client.Producer(self._place.options({**defaults, **config}))
        except client.KafkaException as error:
            raise self._place.failed(error) from error

    def write(self, batch: pa.RecordBatch) -> None:
        """Send rows. They are delivered when ``flush`` has returned."""
        batch = batch.replace_schema_metadata(None)
        for number, session in enumerate(batch.column(self._session).to_pylist()):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch.slice(number, 1))
            key = session if isinstance(session, bytes) else str(session).encode()
            self._send(key, sink.getvalue().to_pybytes())
        self._producer.poll(0)
        self._check()

    def flush(self) -> None:
        """Wait until every row is delivered."""
        while True:
            before = self.delivered
            left = self._producer.flush(_SECONDS)
            self._check()
            if not left:
                return
            if self.delivered == before:
                raise self._place.failed(
                    f"no answer for {_SECONDS:.0f} s, {left} rows are not delivered"
                )

    def _send(self, key: bytes, value: bytes) -> None:
        while True:
            try:
                self._producer.produce(
                    self._place.topic, value=value, key=key, on_delivery=self._on_delivery
                )
                return
            except BufferError:
                self._producer.poll(0.1)
                self._check()
            except self._place.client.KafkaException as error:
                raise self._place.failed(error) from error

    def _on_delivery(self, error: Any, _message: object) -> None:
        if error is None:
            self.delivered += 1
        else:
            self._failure = self._failure or error

    def _check(self) -> None:
        failure = self._failure or self._place.fatal
        if failure is not None:
            raise self._place.failed(failure, f"; {self.delivered} rows were delivered")


class KafkaConsumer:
    """Writes partitions of ``topic`` to Parquet files in ``folder``, up to their present ends.

    A file holds the rows of one partition between two offsets, which its name says:
    ``TOPIC.PARTITION.FIRST-LAST.parquet``. Its end is committed to Kafka once the file is in place.
    After a kill in between, the next run sees the file and goes on behind it, so each row is in one
    file once.

    Args:
        group: under whose name offsets are committed.
        partitions: all of the topic's if empty.
        rows_per_file: most rows of a file.
        config: more configuration of librdkafka.
    """

    def __init__(
        self,
        servers: str,
        topic: str,
        group: str,
        folder: Path,
        *,
        partitions: Sequence[int] = (),
        rows_per_file: int = 65_536,
        config: dict[str, str] | None = None,
    ) -> None:
        self._place = _Topic(servers, topic)
        self._topic, self._folder = topic, folder
        self._partitions = tuple(partitions)
        self._rows_per_file = rows_per_file
        self._options = {
            # A fetch that waits for more would hold up the next partition.
            "fetch.wait.max.ms": 10,
            **self._place.options(config or {}),
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
        }

    def run(self, progress: Callable[[int], None]) -> list[Path]:
        """Write what is new and return the new files; ``progress`` gets numbers of rows."""
        client = self._place.client
        with ExitStack() as opened:
            opened.enter_context(locked_folder(self._folder))
            for scratch in self._folder.glob(".*.partial"):  # of a killed run
                scratch.unlink()
            try:
                consumer = client.Consumer(self._options)
                opened.callback(consumer.close)
                written = written_until(self._folder, self._topic)
                return [
                    path
                    for number in self._numbers(consumer)
                    for path in self._copy(consumer, number, written.get(number, 0), progress)
                ]
            except client.KafkaException as error:
                raise self._place.failed(error) from error

    def _numbers(self, consumer: Any) -> tuple[int, ...]:
        """Return the partitions to read."""
        known = consumer.list_topics(self._topic, timeout=_SECONDS).topics[self._topic]
        if known.error is not None:
            raise self._place.failed(known.error)
        for number in self._partitions:
            if number not in known.partitions:
                count = len(known.partitions)
                raise self._place.failed(f"no partition {number}; there are {count}")
        return self._partitions or tuple(sorted(known.partitions))

    def _copy(
        self, consumer: Any, number: int, in_folder: int, progress: Callable[[int], None]
    ) -> Iterator[Path]:
        """Write what is new in a partition."""
        start, end = self._range(consumer, number, in_folder)
        rows = self._rows(consumer, number, start, end)
        for _, of_file in groupby(rows, _FileNumber(self._rows_per_file)):
            last, first_row = next(of_file)
            path = self._folder / f"{self._topic}.{number:05d}.{last:019d}"
            with ParquetFile(path, first_row.schema) as file:
                file.write(first_row)
                for offset, row in of_file:  # noqa: B031
                    file.write(row)
                    last = offset
                file.path = path.with_name(f"{path.name}-{last:019d}.parquet")
                file.close({"topic": self._topic, "partition": number, "last": last})
            progress(file.num_rows)
            done = self._place.client.TopicPartition(self._topic, number, last + 1)
            consumer.commit(offsets=[done], asynchronous=False)
            yield file.path

    def _range(self, consumer: Any, number: int, in_folder: int) -> tuple[int, int]:
        """Return the offsets to read, from what folder and Kafka say to the partition's end."""
        asked = self._place.client.TopicPartition(self._topic, number)
        (committed,) = consumer.committed([asked], timeout=_SECONDS)
        low, high = consumer.get_watermark_offsets(asked, timeout=_SECONDS)
        start = max(committed.offset, in_folder)
        advice = "use another group and another folder"
        if start > high:
            raise self._place.failed(
                f"partition {number} ends at offset {high}, but {start} offsets were read before: "
                f"the topic was made anew; {advice}"
            )
        if max(in_folder, committed.offset + 1) > 0 and start < low:
            raise self._place.failed(
                f"partition {number} begins at offset {low} and was read up to {start}: what was "
                f"between has been deleted; to go on, {advice}"
            )
        return max(start, low), high

    def _rows(
        self, consumer: Any, number: int, start: int, end: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield offsets and their rows."""
        client = self._place.client
        if start >= end:
            return
        consumer.assign([client.TopicPartition(self._topic, number, start)])
        while True:
            message = consumer.poll(_SECONDS)
            if message is None:
                raise self._place.failed(f"no answer for {_SECONDS:.0f} s")
            error = message.error()
            if error is not None and error.code() == client.KafkaError._PARTITION_EOF:
                return
            if error is not None:
                raise self._place.failed(error)
            try:
                row = pa.ipc.open_stream(message.value() or b"").read_next_batch()
                row.validate(full=True)
            except (pa.ArrowException, OSError, StopIteration) as error:
                where = f"partition {number}, offset {message.offset()}"
                raise self._place.failed(f"{where}: no row of recd: {error}") from error
            yield message.offset(), row
            if message.offset() + 1 >= end:
                return


class _FileNumber:
    """Numbers files: another one begins when one is full, or when columns change."""

    def __init__(self, rows_per_file: int) -> None:
        self._most, self._rows, self._file = rows_per_file, 0, 0
        self._schema: pa.Schema | None = None

    def __call__(self, row: tuple[int, pa.RecordBatch]) -> int:
        schema = row[1].schema
        if self._rows == self._most or schema != self._schema:
            self._rows, self._schema = 0, schema
            self._file += 1
        self._rows += 1
        return self._file


def written_until(folder: Path, topic: str) -> dict[int, int]:
    """Return the offset behind the last one in the files of ``folder``, by partition."""
    name = re.compile(rf"{re.escape(topic)}\.(\d{{5,}})\.(\d{{19}})-(\d{{19}})\.parquet")
    matches = [match for path in folder.iterdir() if (match := name.fullmatch(path.name))]
    ends: dict[int, int] = {}
    for number, first, last in sorted(tuple(map(int, match.groups())) for match in matches):
        if first < ends.get(number, 0):
            raise DataError(
                f"{folder}: another file has the rows of partition {number} from offset {first} "
                "on, too; remove one of them"
            )
        ends[number] = last + 1
    return ends
