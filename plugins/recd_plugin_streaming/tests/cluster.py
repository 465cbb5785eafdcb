"""A Kafka cluster for tests: librdkafka's own mock cluster, in this process."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

kafka = pytest.importorskip("confluent_kafka", reason="needs the extra kafka")

#: The mock cluster makes topics with this number of partitions when they are written to.
PARTITIONS = 4


class Cluster:
    """Writes JSON messages to topics of the cluster at ``servers``."""

    def __init__(self) -> None:
        self._producer = kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
        (broker,) = self._producer.list_topics(timeout=10).brokers.values()
        self.servers = f"{broker.host}:{broker.port}"

    def write(self, topic: str, values: Iterable[Any], partition: int = 0) -> None:
        for value in values:
            encoded = value if isinstance(value, bytes) else json.dumps(value).encode()
            self._producer.produce(topic, value=encoded, partition=partition)
        assert self._producer.flush(10) == 0
