"""What is relied on of torch and confluent-kafka that has no public form."""

from __future__ import annotations

from recd_plugins.api.distributed import Internal

INTERNALS = (
    Internal("torch", ("_C",), "timing of poolings on CUDA"),
    Internal("torch._C", ("_autograd",), "timing of poolings on CUDA"),
    Internal("torch", ("_check",), "export of attention poolings"),
    Internal("confluent_kafka:KafkaError", ("_PARTITION_EOF",), "reading a topic to its end"),
)
