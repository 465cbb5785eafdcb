"""Data classes for rows and their source files, columns, tables and object stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from recd_plugins.interfaces.tasks import Task


@dataclass(frozen=True)
class FeatureSchema:
    """Names of a dataset's columns by role: sparse features, dense features and label.

    Attributes:
        sparse: names of columns with ids, either list<int64>, or int64 for one id per row.
        dense: names of columns with numbers.
        label: name of the label column, whose values are 0 or 1; with ``tasks``, of the first one.
        tasks: tasks of multi-task training, each with a label column of its name. Empty for one
            label of 0 and 1.
    """

    sparse: tuple[str, ...]
    dense: tuple[str, ...]
    label: str
    tasks: tuple[Task, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of all label columns."""
        return tuple(task.name for task in self.tasks) or (self.label,)


def table_name(feature: str) -> str:
    """Return the built-in model's table name of a feature, ``t_<feature>``."""
    return f"t_{feature}"


@dataclass(frozen=True)
class SessionKeys:
    """Names of the session and time columns that ``Dataset.scan`` yields.

    ``Dataset.session_reader`` yields the session column. If there is a request column, both yield
    it too.
    """

    session: str
    timestamp: str
    request: str | None = None

    @property
    def group(self) -> str:
        """The request column, or else the session column. Metrics group rows by it."""
        return self.request or self.session

    @property
    def groups(self) -> frozenset[str]:
        """The columns that ``Dataset.session_reader`` adds to the rows of ``reader``."""
        return frozenset(filter(None, (self.session, self.request)))


@dataclass(frozen=True)
class Origin:
    """File and row numbers that ``num_rows`` rows come from, starting at ``first_row``.

    Attributes:
        rows: ascending 0-based row numbers in the file, int64 ``[num_rows]``; None if the rows are
            adjacent.
        named: for cache files, a function that returns the location of a row in the source data.
    """

    path: str
    first_row: int
    num_rows: int
    rows: pa.Array | None = None
    named: Callable[[str, int], str] | None = field(default=None, compare=False)

    def row(self, number: int) -> int:
        """Return the 0-based row number in the file of the row with index ``number``."""
        return self.first_row + number if self.rows is None else int(self.rows[number].as_py())

    def slice(self, start: int, length: int) -> Origin:
        """Return the origin of rows ``start`` to ``start + length``."""
        rows = None if self.rows is None else self.rows.slice(start, length)
        return replace(self, first_row=self.row(start), num_rows=length, rows=rows)


@dataclass(frozen=True)
class Rows:
    """Arrow record batch of training rows.

    Attributes:
        data: the record batch.
        origins: files and row numbers of the rows, in order, for error messages.
    """

    data: pa.RecordBatch
    origins: tuple[Origin, ...]

    def __len__(self) -> int:
        return int(self.data.num_rows)

    def origin_of(self, row: int) -> tuple[str, int]:
        """Return the file that a row comes from, and its 0-based row number in the file."""
        origin, number = self._origin(row)
        return origin.path, origin.row(number)

    def place_of(self, row: int) -> str:
        """Format the file and row number that a row comes from, for error messages."""
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
    """Name, features and size of an embedding table.

    Attributes:
        name: name of the table in TorchRec.
        features: features that look up the table.
        num_embeddings: number of rows.
        embedding_dim: number of scalars per row.
        pooled: True in an EmbeddingBagCollection, False in an EmbeddingCollection.
    """

    name: str
    features: tuple[str, ...]
    num_embeddings: int
    embedding_dim: int
    pooled: bool


class Storage(BaseModel):
    """Connection options of an object store. Credentials come from the environment.

    ``s3://`` uses AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (with AWS_SESSION_TOKEN),
    AWS_PROFILE and ``~/.aws``, or the machine's role. ``gs://`` uses application default
    credentials.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: str | None = Field(
        default=None,
        pattern=r"^(https?://)?[^/@\s]+/?$",
        description="URL of an S3-compatible server, such as http://host:9000. null uses the "
        "cloud provider's server.",
    )
    region: str | None = Field(default=None, description="Region of the bucket.")
    anonymous: bool = Field(default=False, description="Access public data without credentials.")
    connect_timeout: PositiveFloat = Field(
        default=5, description="Timeout for connecting, in seconds."
    )
    request_timeout: PositiveFloat = Field(
        default=30, description="Timeout of a request, in seconds."
    )
    attempts: PositiveInt = Field(default=3, description="Maximum number of attempts per request.")
