"""A Kafka topic as Parquet files, each row in one file once.

A file holds the rows of one partition between two offsets, which its name says:
``TOPIC.PARTITION.FIRST-LAST.parquet``. It is put in place whole, and only then its end is committed
to Kafka. Where a run is killed between the two, the next one sees in the folder what is there and
goes on behind it: the folder is what counts, and Kafka's committed offsets follow.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recd_plugin_recd.logs import kafka
from recd_plugin_recd.logs.parquet_file import ParquetFile
from recd_plugin_recd.logs.samples import SampleCodec
from recd_plugins.api import DataError

_SECONDS = 30.0
# Messages decoded at once.
_CHUNK = 512


class KafkaConsumer:
    """Writes what is in partitions of ``topic`` to ``folder``, up to their ends at the start.

    Partitions are read one after the other. One consumer at a time writes to a folder; consumers
    that share a topic are given partitions, and a folder each.

    Args:
        group: under whose name offsets are committed.
        partitions: all of the topic's if empty.
        rows_per_file: most rows of a file.
        config: more configuration of librdkafka.

    Raises:
        SetupError: confluent-kafka is not installed.
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
        self._client = kafka.confluent_kafka()
        self._place = kafka.KafkaTopic(servers, topic)
        self._topic = topic
        self._folder = folder
        self._partitions = tuple(partitions)
        self._rows_per_file = rows_per_file
        self._codecs: dict[bytes, SampleCodec] = {}
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
        """Write what is new; ``progress`` gets rows. Returns the files written.

        Raises:
            DataError: no such topic or partition, no answer, a message that is no row, rows that
                were deleted before they were read, a folder that is in use.
        """
        with _locked(self._folder):
            try:
                consumer = self._client.Consumer(self._options)
            except self._client.KafkaException as error:
                raise self._place.failed(error) from error
            try:
                in_folder = written_until(self._folder, self._topic)
                return [
                    path
                    for number in self._numbers(consumer)
                    for path in self._copy(consumer, number, in_folder.get(number, 0), progress)
                ]
            except self._client.KafkaException as error:
                raise self._place.failed(error) from error
            finally:
                consumer.close()

    def _numbers(self, consumer: Any) -> tuple[int, ...]:
        """Which partitions to read."""
        known = consumer.list_topics(self._topic, timeout=_SECONDS).topics[self._topic]
        if known.error is not None:
            raise self._place.failed(known.error)
        for number in self._partitions:
            if number not in known.partitions:
                raise self._place.failed(
                    f"no partition {number}; there are {len(known.partitions)}"
                )
        return self._partitions or tuple(sorted(known.partitions))

    def _copy(
        self, consumer: Any, number: int, in_folder: int, progress: Callable[[int], None]
    ) -> Iterator[Path]:
        """Write what is new in a partition."""
        start, end = self._range(consumer, number, in_folder)
        messages = self._messages(consumer, number, start, end)
        message = next(messages, None)
        while message is not None:
            path, message = self._write_file(message, messages, progress)
            last = int(path.stem.rpartition("-")[2])
            written = self._client.TopicPartition(self._topic, number, last + 1)
            consumer.commit(offsets=[written], asynchronous=False)
            yield path

    def _range(self, consumer: Any, number: int, in_folder: int) -> tuple[int, int]:
        """The offsets to read: from where the folder or Kafka says, to the partition's end."""
        asked = self._client.TopicPartition(self._topic, number)
        (committed,) = consumer.committed([asked], timeout=_SECONDS)
        low, high = consumer.get_watermark_offsets(asked, timeout=_SECONDS)
        start = max(committed.offset, in_folder)
        if start > high:
            raise self._place.failed(
                f"partition {number} ends at offset {high}, but {start} offsets were read before: "
                "the topic was made anew; use another group and another folder",
            )
        was_read = in_folder > 0 or committed.offset >= 0
        if was_read and start < low:
            raise self._place.failed(
                f"partition {number} begins at offset {low} and was read up to {start}: what was "
                "between has been deleted; to go on, use another group and another folder",
            )
        return max(start, low), high

    def _messages(self, consumer: Any, number: int, start: int, end: int) -> Iterator[Any]:
        if start >= end:
            return
        consumer.assign([self._client.TopicPartition(self._topic, number, start)])
        while True:
            message = consumer.poll(_SECONDS)
            if message is None:
                raise self._place.failed(f"no answer for {_SECONDS:.0f} s")
            error = message.error()
            if error is not None and error.code() == self._client.KafkaError._PARTITION_EOF:
                return
            if error is not None:
                raise self._place.failed(error)
            yield message
            if message.offset() + 1 >= end:
                return

    def _write_file(
        self, message: Any, messages: Iterator[Any], progress: Callable[[int], None]
    ) -> tuple[Path, Any]:
        """One file that begins with ``message``; returns it and the first message behind it."""
        packed, number, first = self._schema_of(message), message.partition(), message.offset()
        waiting = []
        start = self._folder / f"{self._topic}.{number:05d}.{first:019d}"
        with ParquetFile(start, self._codecs[packed].schema) as file:
            while message is not None and self._schema_of(message) == packed:
                waiting.append(message)
                if len(waiting) == _CHUNK or file.num_rows + len(waiting) == self._rows_per_file:
                    file.write(self._decode(packed, waiting))
                    progress(len(waiting))
                    waiting.clear()
                last, message = message.offset(), next(messages, None)
                if file.num_rows == self._rows_per_file:
                    break
            if waiting:
                file.write(self._decode(packed, waiting))
                progress(len(waiting))
            file.path = start.with_name(f"{start.name}-{last:019d}.parquet")
            file.close({"topic": self._topic, "partition": number, "first": first, "last": last})
        return file.path, message

    def _schema_of(self, message: Any) -> bytes:
        """The header that says the columns.

        Raises:
            DataError: it is missing or wrong, or the message has no value.
        """
        packed = dict(message.headers() or []).get(kafka.SCHEMA_HEADER)
        try:
            if packed is None or message.value() is None:
                raise ValueError(f"no header {kafka.SCHEMA_HEADER}, or no value")
            if packed not in self._codecs:
                self._codecs[packed] = SampleCodec(kafka.unpack_schema(packed))
        except (ValueError, DataError) as error:
            where = f"partition {message.partition()}, offset {message.offset()}"
            raise self._place.failed(f"{where}: no row of recd: {error}") from error
        return packed

    def _decode(self, packed: bytes, messages: Sequence[Any]) -> pa.RecordBatch:
        values = [message.value() for message in messages]
        offsets = np.zeros(len(values) + 1, np.int64)
        np.cumsum([len(value) for value in values], out=offsets[1:])
        try:
            return self._codecs[packed].decode(np.frombuffer(b"".join(values), np.uint8), offsets)
        except DataError as error:
            where = f"partition {messages[0].partition()}, from offset {messages[0].offset()} on"
            raise self._place.failed(f"{where}: {error}") from error


def written_until(folder: Path, topic: str) -> dict[int, int]:
    """The offset behind the last one that a file of ``folder`` has, by partition.

    Raises:
        DataError: two files have the same offsets.
    """
    name = re.compile(rf"{re.escape(topic)}\.(\d{{5,}})\.(\d{{19}})-(\d{{19}})\.parquet")
    found = []
    for path in folder.glob("*.parquet"):
        if match := name.fullmatch(path.name):
            found.append((int(match[1]), int(match[2]), int(match[3]), path))
    ends: dict[int, int] = {}
    for number, first, last, path in sorted(found):
        if first < ends.get(number, 0):
            raise DataError(f"{path}: another file has rows of it too; remove one of them")
        ends[number] = last + 1
    return ends


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Be the only consumer that writes to ``folder``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".recd-consume.lock").open("wb")
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror})") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{folder}: another consumer is writing to this folder") from error
        except OSError as error:
            raise DataError(f"{folder}: cannot be locked ({error.strerror})") from error
        # What a killed run left of a file that it did not complete.
        for scratch in folder.glob(".*.partial"):
            with suppress(OSError):
                scratch.unlink()
        yield
