"""The dataset plugin ``streaming.kafka``, which trains on the messages of a Kafka topic."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import AwareDatetime, Field, NonNegativeInt, model_validator

from recd_plugin_streaming.columns import Columns, StreamOptions
from recd_plugin_streaming.dead_letters import DeadLetters
from recd_plugin_streaming.decode import Parse, avro_parser, decode, parse_arrow, parse_json
from recd_plugin_streaming.options import Stream, say
from recd_plugin_streaming.ranges import Left, Positions, Ranges, contains, cut, joined, size
from recd_plugin_streaming.source import Chunk, Source
from recd_plugin_streaming.topic import Topic
from recd_plugins.api import DataError


class Kafka(Stream):
    """Reads each message of a Kafka topic once. Checkpoints store the offsets."""

    name = "streaming.kafka"
    free_options = frozenset(
        {"servers", "config", "start", "end", "max_bad_messages", "dead_letters", "lost"}
        | {"format", "avro_schema", "avro_schema_id"}
    )

    class Options(StreamOptions):
        """Options of the topic, its messages and windows."""

        servers: str = Field(description="Bootstrap servers, HOST:PORT,...")
        topic: str = Field(description="Name of the topic.")
        start: Literal["earliest", "latest"] | AwareDatetime = Field(
            default="earliest",
            description="Where a new run starts: earliest, latest, or a time such as "
            "2026-01-31T12:00:00Z.",
        )
        end: Literal["never", "latest"] = Field(
            default="never",
            description="never: train until a signal. latest: train the messages that exist at the "
            "start.",
        )
        format: Literal["json", "arrow", "avro"] = Field(
            default="json",
            description="json: one object. arrow: an IPC stream with one row, as from recd logs "
            "produce. avro: one record.",
        )
        avro_schema: Path | None = Field(
            default=None, description="For avro: file with the schema, *.avsc."
        )
        avro_schema_id: int | None = Field(
            default=None,
            description="For avro from a schema registry: id of the schema. Messages with other "
            "ids are bad.",
        )
        max_bad_messages: NonNegativeInt = Field(
            default=100,
            description="Maximum bad messages per rank. One more ends the run.",
        )
        dead_letters: Path | None = Field(
            default=None,
            description="Folder for bad messages and the reasons, in TOPIC.PARTITION.jsonl.",
        )
        lost: Literal["refuse", "skip"] = Field(
            default="refuse",
            description="If messages were deleted before they were trained. refuse: end with an "
            "error. skip: continue at the oldest message.",
        )
        config: dict[str, str] = Field(
            default={}, description="More options of librdkafka, such as security.protocol."
        )

        @model_validator(mode="after")
        def _has_a_schema(self) -> Self:
            if (self.format == "avro") != (self.avro_schema is not None):
                raise ValueError(
                    "format: avro needs avro_schema, and no other format does. Set both"
                )
            return self

        def parser(self) -> Parse:
            """Return the function that parses messages."""
            if self.avro_schema is not None:
                return avro_parser(self.avro_schema, self.avro_schema_id)
            return parse_json if self.format == "json" else parse_arrow

    options: Options

    def prepare(self) -> None:
        self._partitions()

    def _existing(self) -> Iterator[KafkaSource]:
        """Yield a source of each partition. They do not count bad messages."""
        options = self.options.model_copy(update={"start": "earliest", "end": "latest"})
        partitions = self._partitions()
        for partition in partitions:
            yield KafkaSource(options, self._columns, None, partition, len(partitions))

    def _partitions(self) -> list[int]:
        options = self.options
        with closing(Topic(options.servers, options.topic, options.config)) as topic:
            return topic.partitions()

    def _source(self, rank: int, world_size: int) -> KafkaSource:
        options = self.options
        dead = DeadLetters(options.dead_letters, options.max_bad_messages, options.topic)
        return KafkaSource(options, self._columns, dead, rank, world_size)


class KafkaSource(Source):
    """Reads the partitions of one rank. Partition p belongs to rank p modulo the world size."""

    def __init__(
        self,
        options: Kafka.Options,
        columns: Columns,
        dead: DeadLetters | None,
        rank: int,
        world_size: int,
    ) -> None:
        super().__init__(rank, world_size)
        self._options, self._columns, self._dead = options, columns, dead
        self._parse = options.parser()
        self._topic = Topic(options.servers, options.topic, options.config)
        self._wanted: dict[int, Ranges] = {}
        self._stops: dict[int, int] = {}
        self._next: dict[int, int] = {}
        self._highs: dict[str, int] = {}
        self.what = self._topic.what

    def start(self, positions: Positions | None) -> Mapping[str, Left]:
        partitions = self._topic.partitions()
        if len(partitions) < self.world_size:
            raise DataError(
                f"{self.what}: the topic has {len(partitions)} partitions, too few for "
                f"{self.world_size} ranks. Add partitions, or reduce training.ranks"
            )
        found: dict[str, Left] = {}
        for partition in filter(self._is_mine, partitions):
            low, high = self._topic.watermarks(partition)
            if positions is None:
                left = Left((), ((self._first(partition, low, high), None),))
            else:  # a partition that was added later is read from its first message
                left = positions.get(str(partition), Left((), ((low, None),)))
                left = self._not_deleted(partition, left, low, high)
            found[str(partition)] = left
            self._wanted[partition] = (*left.window, *left.after)
            self._highs[str(partition)] = high
            if self._options.end == "latest":
                self._stops[partition] = high
        self._next = {partition: wanted[0][0] for partition, wanted in self._wanted.items()}
        self._topic.assign(self._next)
        return found

    def _is_mine(self, partition: int) -> bool:
        return partition % self.world_size == self.rank

    def _first(self, partition: int, low: int, high: int) -> int:
        start = self._options.start
        if isinstance(start, str):
            return low if start == "earliest" else high
        return self._topic.offset_at(partition, int(start.timestamp() * 1000), high)

    def _not_deleted(self, partition: int, left: Left, low: int, high: int) -> Left:
        """Return ``left`` without deleted messages, given the partition's watermarks.

        Raises:
            DataError: with ``lost: refuse``, messages were deleted; or the topic was created again.
        """
        where = f"{self.what}, partition {partition}"
        ((after, _),) = left.after
        if after > high:
            raise DataError(
                f"{where}: the checkpoint is at offset {after}, but the topic ends at {high}, so "
                "the topic was created again. Start a new run"
            )
        wanted = ((start, min(stop or low, low)) for start, stop in (*left.window, *left.after))
        deleted = joined(tuple(wanted))
        if not deleted:
            return left
        lost = ", ".join(f"{start} to {(stop or low) - 1}" for start, stop in deleted)
        said = (
            f"{where}: the messages with offsets {lost} were deleted before they were trained, "
            f"because the oldest message is now {low}"
        )
        if self._options.lost == "refuse":
            raise DataError(
                f"{said}. Raise the topic's retention. To continue without these messages, set the "
                "option lost: skip"
            )
        say(f"{said}. The run continues without them")
        return Left(cut(left.window, low), cut(left.after, low))

    def chunks(self) -> Iterator[Chunk | None]:
        topic = self._topic
        ended = {p for p, stop in self._stops.items() if self._next[p] >= stop}
        codes = topic.client.KafkaError
        fatal = codes.TOPIC_AUTHORIZATION_FAILED, codes.UNKNOWN_TOPIC_OR_PART
        while not self._stops or len(ended) < len(self._stops):
            by_partition: dict[int, list[Any]] = {}
            for message in topic.messages():
                error, partition = message.error(), message.partition()
                if error is None:
                    by_partition.setdefault(partition, []).append(message)
                elif error.code() == codes._PARTITION_EOF:
                    ended.add(partition)
                elif error.code() == codes._AUTO_OFFSET_RESET:
                    self._skip_deleted(partition)
                elif error.code() in fatal:
                    raise topic.failed(error.str())
            for partition, messages in by_partition.items():
                stop = self._stops.get(partition, math.inf)
                if existing := [each for each in messages if each.offset() < stop]:
                    yield self._chunk(partition, existing)
                if messages[-1].offset() + 1 >= stop:
                    ended.add(partition)
            if not by_partition:
                yield None
            for partition in self._wanted:
                _, high = topic.watermarks(partition, cached=True)
                name = str(partition)
                self._highs[name] = max(high, self._highs[name], self._next[partition])

    def _skip_deleted(self, partition: int) -> None:
        """Move to the oldest message, or raise DataError, if the next message was deleted."""
        left = Left((), ((self._next[partition], None),))
        left = self._not_deleted(partition, left, *self._topic.watermarks(partition))
        self._topic.seek(partition, left.after[0][0])

    def _chunk(self, partition: int, messages: Sequence[Any]) -> Chunk:
        offsets = np.array([message.offset() for message in messages], np.int64)
        until = self._next[partition] = int(offsets[-1]) + 1
        inside = contains(self._wanted[partition], offsets)
        wanted = [each for each, is_wanted in zip(messages, inside, strict=True) if is_wanted]
        offsets = offsets[inside]
        values = [message.value() for message in wanted]
        rows, places, bad = decode(values, self._columns, self._parse)
        if self._dead is not None:
            for place in sorted(bad):
                offset = int(offsets[place])
                self._dead.add(str(partition), offset, values[place], bad[place])
        return Chunk(str(partition), rows, offsets[places], until, ((until, None),))

    def lag(self, positions: Positions, done: Container[str]) -> int:  # noqa: ARG002
        return sum(
            size(left.window) + max(0, self._highs.get(name, 0) - left.after[0][0])
            for name, left in positions.items()
        )

    def close(self) -> None:
        self._topic.close()

    def position_of(self, states: Sequence[Positions]) -> Positions:
        return {
            name: left
            for state in states
            for name, left in state.items()
            if self._is_mine(int(name))
        }

    def place_of(self, partition: str, offset: int) -> str:
        return f"{self.what}: partition {partition}, offset {offset}"
