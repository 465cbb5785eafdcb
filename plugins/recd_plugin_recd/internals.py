"""What is relied on of torch and confluent-kafka that has no public form."""

from __future__ import annotations

from recd_plugins.api import Internal

INTERNALS = (
    Internal("torch", ("_check",), "export of attention poolings"),
    Internal("confluent_kafka:KafkaError", ("_PARTITION_EOF",), "reading a topic to its end"),
)
