"""What producer and consumer of Kafka topics share.

A message is one row: its key is the session id (a whole number in decimal digits, a string as
UTF-8), so that Kafka keeps a session in one partition; its value is the row as ``SampleCodec``
writes it; its header ``recd.schema`` is the columns, an Arrow schema compressed with zstd.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pyarrow as pa

from recd_plugin_recd.logs.compression import decompressed
from recd_plugins.api import DataError, optional_library

#: Header of every message.
SCHEMA_HEADER = "recd.schema"

_LONGEST_SCHEMA = 1 << 24


def confluent_kafka() -> ModuleType:
    """The client library.

    Raises:
        SetupError: it is not installed.
    """
    client: ModuleType = optional_library("confluent_kafka", "kafka", "Kafka")
    return client


class KafkaTopic:
    """Servers and topic, and what they last complained of.

    Attributes:
        fatal: an error after which the client cannot go on.
    """

    def __init__(self, servers: str, topic: str) -> None:
        self.servers, self.topic = servers, topic
        self.fatal: object = None
        self._last: object = None

    def options(self, more: dict[str, str]) -> dict[str, Any]:
        """Configuration that any client has; ``more`` is the user's and wins."""
        return {
            "bootstrap.servers": self.servers,
            "client.id": "recd",
            # Errors are raised; in the log they would come many times a second.
            "log_level": 2,
            "error_cb": self._on_error,
            **more,
        }

    def failed(self, error: object, note: str = "") -> DataError:
        """What Kafka said, as an error for the user."""
        last = f" (last: {_text(self._last)})" if self._last and self._last is not error else ""
        return DataError(f"Kafka {self.servers}, topic {self.topic}: {_text(error)}{last}{note}")

    def _on_error(self, error: Any) -> None:
        self._last = error
        if error.fatal():
            self.fatal = error


def _text(error: Any) -> str:
    """An error of the client library in words."""
    if isinstance(error, Exception) and error.args:
        error = error.args[0]
    return str(error.str()) if hasattr(error, "str") else str(error)


def pack_schema(schema: pa.Schema) -> bytes:
    """The value of ``SCHEMA_HEADER``."""
    import zstandard

    return zstandard.compress(schema.remove_metadata().serialize().to_pybytes())


def unpack_schema(data: bytes) -> pa.Schema:
    """The columns that ``pack_schema`` packed.

    Raises:
        ValueError: these are other bytes.
    """
    import zstandard

    try:
        size = zstandard.get_frame_parameters(data).content_size
        if size > _LONGEST_SCHEMA:
            raise DataError(f"{size} bytes; {_LONGEST_SCHEMA} are the most")
        return pa.ipc.read_schema(pa.py_buffer(decompressed(data, size)))
    except (zstandard.ZstdError, DataError, pa.ArrowException, OSError) as error:
        raise ValueError(f"no schema: {error}") from error
