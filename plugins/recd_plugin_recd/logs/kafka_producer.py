"""Rows into a Kafka topic."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from recd_plugin_recd.logs import kafka
from recd_plugin_recd.logs.data_errors import RowError
from recd_plugin_recd.logs.samples import SampleCodec
from recd_plugins.api import DataError

_SECONDS = 30.0


class KafkaProducer:
    """Sends rows of ``schema`` to ``topic``, keyed by the column ``session``.

    Batches are compressed with zstd, retries add no duplicates (an idempotent producer), and a
    session goes to the partition to which Java clients would send it.

    Args:
        config: more configuration of librdkafka, such as credentials or ``batch.size``.

    Raises:
        SetupError: confluent-kafka is not installed.
        DataError: no such column, or a column that has no row-wise form.
    """

    def __init__(
        self, servers: str, topic: str, schema: pa.Schema, session: str, config: dict[str, str]
    ) -> None:
        client = kafka.confluent_kafka()
        if session not in schema.names:
            raise DataError(f"no column {session!r} for the session")
        self._topic = topic
        self._place = kafka.KafkaTopic(servers, topic)
        self._session = session
        self._schema = schema.remove_metadata()
        self._codec = SampleCodec(self._schema)
        self._headers = {kafka.SCHEMA_HEADER: kafka.pack_schema(schema)}
        self._failure: object = None
        self.delivered = 0
        defaults = {
            "enable.idempotence": "true",
            "compression.type": "zstd",
            "partitioner": "murmur2_random",
            # More rows in a batch are more rows of a session to compress together.
            "linger.ms": "200",
        }
        try:
            self._producer = client.Producer(self._place.options({**defaults, **config}))
        except client.KafkaException as error:
            raise self._place.failed(error) from error

    def write(self, batch: pa.RecordBatch) -> None:
        """Send rows. They are delivered when ``flush`` has returned.

        Raises:
            DataError: a null session, a value that has no row-wise form, or rows sent earlier were
                not delivered.
        """
        client = kafka.confluent_kafka()
        sessions = batch.column(self._session)
        if sessions.null_count:
            row = int(sessions.is_null().to_numpy(zero_copy_only=False).argmax())
            raise RowError(row, "the session is null; every row needs one")
        rows, offsets = self._codec.encode(batch)
        data = rows.tobytes()
        for number, session in enumerate(sessions.to_pylist()):
            while True:
                try:
                    self._producer.produce(
                        self._topic,
                        value=data[offsets[number] : offsets[number + 1]],
                        key=session if isinstance(session, bytes) else str(session).encode(),
                        headers=self._headers,
                        on_delivery=self._on_delivery,
                    )
                    break
                except BufferError:
                    self._producer.poll(0.1)
                    self._check()
                except client.KafkaException as error:
                    raise self._place.failed(error) from error
        self._producer.poll(0)
        self._check()

    def flush(self) -> None:
        """Wait until every row is delivered.

        Raises:
            DataError: a row was refused, or the servers do not answer.
        """
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

    def _on_delivery(self, error: Any, _message: object) -> None:
        if error is None:
            self.delivered += 1
        else:
            self._failure = self._failure or error

    def _check(self) -> None:
        failure = self._failure or self._place.fatal
        if failure is not None:
            raise self._place.failed(failure, f"; {self.delivered} rows were delivered")
