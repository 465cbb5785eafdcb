"""Datasets that grow while a run trains on them: Kafka topics, and folders of Parquet files."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugin_streaming.files import Files
from recd_plugin_streaming.kafka import Kafka
from recd_plugins.api import Plugin, hookimpl

REQUIRES_API = 5


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    return [Kafka, Files]
