"""Rows of data, their columns and origins; tables and stores, as plugins are told of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator


@dataclass(frozen=True)
class FeatureSchema:
    """Which columns are what.

    Attributes:
        sparse: columns of type list<int64> (or int64, one id a row), in the order of features.
        dense: columns of numbers, in order.
        label: the column of the label, 0 or 1.

    Raises:
        TypeError: a name stands where names are expected.
        ValueError: two features have one name.
    """

    sparse: tuple[str, ...]
    dense: tuple[str, ...]
    label: str

    def __post_init__(self) -> None:
        for what, names in (("sparse", self.sparse), ("dense", self.dense)):
            if isinstance(names, str):
                raise TypeError(f"{what} of FeatureSchema is {names!r}; expected a tuple of names")
        for name, times in Counter([*self.sparse, *self.dense]).items():
            if times > 1:
                raise ValueError(f"FeatureSchema has {times} features {name!r}")


@dataclass(frozen=True)
class SessionKeys:
    """Which columns of ``Dataset.scan`` say to which session a row belongs, and when it was."""

    session: str
    timestamp: str


@dataclass(frozen=True)
class Origin:
    """Where ``num_rows`` rows came from: a file and the 0-based row of the first.

    Attributes:
        rows: int64 ``[num_rows]``, ascending: their 0-based rows in the file, where a filter left
            out some between them; None where they are adjacent.
        named: says where a row of the file stands in what a user knows, as ``clicks.csv: row 7
            (from 0)``, where the file was made of that; None says file and row.
    """

    path: str
    first_row: int
    num_rows: int
    rows: pa.Array | None = None
    named: Callable[[str, int], str] | None = field(default=None, compare=False)

    def row(self, number: int) -> int:
        """The 0-based row in the file of one of these rows."""
        return self.first_row + number if self.rows is None else int(self.rows[number].as_py())

    def slice(self, start: int, length: int) -> Origin:
        """Where ``length`` of these rows from ``start`` on came from."""
        rows = None if self.rows is None else self.rows.slice(start, length)
        return replace(self, first_row=self.row(start), num_rows=length, rows=rows)


@dataclass(frozen=True)
class Rows:
    """A record batch of training rows and where each came from, so that errors can say it.

    Attributes:
        data: the rows.
        origins: where they came from, in their order.
        groups: how many of them belong to which group, where a wrapper of the dataset sorts rows
            into groups; ``recd run`` counts them.
    """

    data: pa.RecordBatch
    origins: tuple[Origin, ...]
    groups: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.data.num_rows)

    def origin_of(self, row: int) -> tuple[str, int]:
        """File and 0-based row in that file of ``row`` in this batch."""
        origin, number = self._origin(row)
        return origin.path, origin.row(number)

    def place_of(self, row: int) -> str:
        """The same in words, of what the user knows where files were made of that."""
        origin, number = self._origin(row)
        path, row_in_file = origin.path, origin.row(number)
        if origin.named is not None:
            return origin.named(path, row_in_file)
        return f"{path}: row {row_in_file} (from 0)"

    def _origin(self, row: int) -> tuple[Origin, int]:
        for origin in self.origins:
            if row < origin.num_rows:
                return origin, row
            row -= origin.num_rows
        raise IndexError(row)


@dataclass(frozen=True)
class Table:
    """An embedding table of the model.

    Attributes:
        name: TorchRec's table name.
        features: the features that look it up.
        num_embeddings: rows.
        embedding_dim: scalars a row.
        pooled: True in an EmbeddingBagCollection, False in an EmbeddingCollection.
    """

    name: str
    features: tuple[str, ...]
    num_embeddings: int
    embedding_dim: int
    pooled: bool


class Storage(BaseModel):
    """How an object store is reached. Who asks is for the environment to say, never for a file.

    Credentials of ``s3://`` are those of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (with
    AWS_SESSION_TOKEN), of AWS_PROFILE and ``~/.aws``, or of the machine's role; those of ``gs://``
    Google's application default credentials.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: str | None = Field(
        default=None,
        description="URL of an S3-compatible server, as http://host:9000; null is the provider's.",
    )
    region: str | None = Field(default=None, description="Region of the bucket.")
    anonymous: bool = Field(default=False, description="Send no credentials, for public data.")
    connect_timeout: PositiveFloat = Field(default=5, description="Seconds to reach the server.")
    request_timeout: PositiveFloat = Field(default=30, description="Seconds to wait for an answer.")
    attempts: PositiveInt = Field(default=3, description="Times that a request is sent at most.")

    @field_validator("endpoint")
    @classmethod
    def _is_a_server(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
        if "@" in endpoint:
            raise ValueError("holds a user or a password; credentials come from the environment")
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/"):
            raise ValueError("is no server; write http://host:port")
        return f"{parts.scheme}://{parts.netloc}"
