"""Which rows are of one session, for metrics that look at sessions."""

from __future__ import annotations

from hashlib import blake2b

import pyarrow as pa
import torch
from torch import Tensor

from recd_plugins.errors import DataError
from recd_plugins.interfaces import Dataset, DatasetWrapper, PluginOptions, Rows
from recd_plugins.interfaces.dataset import WithSessions
from recd_plugins.registry.entries import Entry


def with_sessions(dataset: Dataset) -> tuple[Entry[DatasetWrapper], ...]:
    """What wraps a dataset so that its rows say their sessions; nothing where it knows none."""
    if dataset.session_keys() is None or type(dataset).session_reader is Dataset.session_reader:
        return ()
    return (Entry(WithSessions(PluginOptions()), (), "dataset", 0),)


def session_column(dataset: Dataset) -> str | None:
    """The column of the session, of a dataset wrapped by ``with_sessions``."""
    keys = dataset.session_keys() if isinstance(dataset, WithSessions) else None
    return None if keys is None else keys.session


def session_ids(rows: Rows, column: str) -> Tensor:
    """A number by session, int64 ``[len(rows)]``, the same in every process.

    Integers as they are, 64 bits of a hash of anything else.

    Raises:
        DataError: a row has no session.
    """
    sessions = rows.data.column(column)
    if sessions.null_count:
        place = rows.place_of(sessions.is_valid().index(False).as_py())
        raise DataError(f"{place} has no {column}; leave such rows out, or name them")
    if pa.types.is_integer(sessions.type):
        return torch.from_numpy(sessions.cast(pa.int64(), safe=False).to_numpy().copy())
    if not pa.types.is_dictionary(sessions.type):
        sessions = sessions.dictionary_encode()
    hashed = torch.tensor([_hash(value) for value in sessions.dictionary.to_pylist()])
    return hashed[torch.from_numpy(sessions.indices.cast(pa.int64()).to_numpy().copy())]


def _hash(value: object) -> int:
    content = value if isinstance(value, bytes) else str(value).encode()
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little", signed=True)
