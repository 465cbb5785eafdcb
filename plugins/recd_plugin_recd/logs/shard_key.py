"""Which shard a row goes to."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recd_plugin_recd.logs.data_errors import ColumnError, RowError

Shards = NDArray[np.int64]


def session_shards(sessions: Any, num_shards: int) -> Shards:
    """The shard of each session id, int64 ``[rows]``: the same on every machine, for ever.

    ``hash mod num_shards``, where the hash of a whole number is splitmix64 of its 64 bits, and that
    of a string the first 8 bytes of its BLAKE2b-64, little-endian.

    Raises:
        RowError: an id is null.
        ColumnError: ids are neither whole numbers nor strings.
    """
    if sessions.null_count:
        row = int(sessions.is_null().to_numpy(zero_copy_only=False).argmax())
        raise RowError(row, "the session is null; every row needs one")
    if pa.types.is_dictionary(sessions.type):
        sessions = sessions.dictionary_decode()
    kind = sessions.type
    if pa.types.is_integer(kind):
        numbers = sessions.to_numpy(zero_copy_only=False)
        bits = numbers.astype(np.uint64 if kind == pa.uint64() else np.int64).view(np.uint64)
        hashes = _splitmix64(bits)
    elif any(
        is_kind(kind)
        for is_kind in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_binary,
            pa.types.is_large_binary,
        )
    ):
        encoded = sessions.dictionary_encode()
        known = np.array([_hash_of(value.as_py()) for value in encoded.dictionary], np.uint64)
        hashes = known[encoded.indices.to_numpy()] if len(known) else np.empty(0, np.uint64)
    else:
        raise ColumnError(f"session ids are of type {kind}; expected whole numbers or strings")
    return (hashes % np.uint64(num_shards)).astype(np.int64)


def _splitmix64(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _hash_of(value: str | bytes) -> int:
    data = value.encode() if isinstance(value, str) else value
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
