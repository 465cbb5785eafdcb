"""Connection to a Kafka topic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from recd_plugin_streaming.options import say
from recd_plugins.api import DataError, imports

# Longest wait for an answer at the start.
SECONDS = 30.0
_MOST_MESSAGES = 4096


class Topic:
    """Consumer of a topic. Prints a line when no server answers, and when messages arrive again.

    Args:
        servers: bootstrap servers.
        topic: name of the topic.
        config: more options of librdkafka.
    """

    def __init__(self, servers: str, topic: str, config: Mapping[str, str]) -> None:
        self.client = imports.optional_library("confluent_kafka", "kafka", "streaming.kafka")
        self._topic = topic
        self.what = f"Kafka {servers}, topic {topic}"
        self._error = ""
        self._down = False
        options = {
            "fetch.wait.max.ms": "100",
            "client.id": "recd",
            "group.id": "recd",
            **config,
            "bootstrap.servers": servers,
            "log_level": 2,
            "error_cb": self._on_error,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
        }
        with self._told():
            self._consumer = self.client.Consumer(options)

    def partitions(self) -> list[int]:
        """Return the numbers of the topic's partitions."""
        with self._told():
            found = self._consumer.list_topics(self._topic, timeout=SECONDS).topics[self._topic]
        if found.error is not None:
            raise self.failed(f"{found.error.str()}. Create the topic, or correct its name")
        return sorted(found.partitions)

    def watermarks(self, partition: int, *, cached: bool = False) -> tuple[int, int]:
        """Return the offset of the oldest message, and the offset after the newest message.

        ``cached`` does not ask the servers, and returns -1001 for unknown offsets.
        """
        with self._told():
            low, high = self._consumer.get_watermark_offsets(
                self._place(partition), timeout=SECONDS, cached=cached
            )
        return low, high

    def offset_at(self, partition: int, milliseconds: int, end: int) -> int:
        """Return the offset of the first message since a Unix time, or ``end``."""
        place = self._place(partition, milliseconds)
        with self._told():
            (found,) = self._consumer.offsets_for_times([place], timeout=SECONDS)
        return found.offset if found.offset >= 0 else end

    def assign(self, offsets: Mapping[int, int]) -> None:
        self._consumer.assign([self._place(*each) for each in offsets.items()])

    def seek(self, partition: int, offset: int) -> None:
        self._consumer.seek(self._place(partition, offset))

    def messages(self) -> list[Any]:
        """Return new messages and errors, after a short wait."""
        with self._told():
            found: list[Any] = self._consumer.consume(_MOST_MESSAGES, timeout=0.1)
        if self._down and any(message.error() is None for message in found):
            self._down, self._error = False, ""
            say(f"{self.what}: the servers answer again")
        return found

    def failed(self, error: str) -> DataError:
        last = f" (last error: {self._error})" if self._error else ""
        return DataError(f"{self.what}: {error}{last}")

    def close(self) -> None:
        self._consumer.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except self.client.KafkaException as error:
            if hasattr(self, "_consumer"):
                self._consumer.poll(0.1)  # calls _on_error with the reason
            raise self.failed(error.args[0].str()) from error

    def _place(self, *place: int) -> Any:
        return self.client.TopicPartition(self._topic, *place)

    def _on_error(self, error: Any) -> None:
        self._error = error.str()
        if error.code() == self.client.KafkaError._ALL_BROKERS_DOWN and not self._down:
            self._down = True
            say(f"{self.what}: no server answers ({self._error}). The run waits for the servers")
