"""Options of ``scars.cache``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator

from recd_plugins.api import AccessOptions, text_utils

Count = Annotated[StrictInt, Field(gt=0)]


class FileStorage(BaseModel):
    """Option ``storage``: keep all rows in temporary files, for tables larger than memory."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: Path = Field(
        description="Folder of the temporary files, which are deleted after the run."
    )


class CacheOptions(AccessOptions):
    """Size, eviction policy and backing store of the caches."""

    policy: Literal["static", "lfu", "lru"] | None = Field(
        default=None,
        description=(
            "Rows to cache. static: the most read rows of the access profile. lfu: the most "
            "frequently used rows so far. lru: the most recently used rows. null: lru on CUDA "
            "with storage: host, otherwise static."
        ),
    )
    rows: Annotated[StrictInt, Field(ge=0)] | None = Field(
        default=None, description="Number of cached rows per table."
    )
    share: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Fraction of each table's rows to cache."
    )
    bytes: str | Count | None = Field(
        default=None,
        description=(
            "Total size of the caches of all tables in this entry, over all ranks, such as "
            "256MB. Tables with more frequently read rows get more. Without rows, share and "
            "bytes, the size is chosen automatically."
        ),
    )
    storage: Literal["host"] | FileStorage = Field(
        default="host",
        description="Where to store all rows: host (host memory), or {file: FOLDER} (files).",
    )
    lookahead: bool = Field(
        default=True,
        description=("Fetch the next batch's rows during the current step. Results do not change."),
    )

    @property
    def folder(self) -> Path | None:
        """Return the folder of the temporary files, or None if host memory stores all rows."""
        return self.storage.file if isinstance(self.storage, FileStorage) else None

    @field_validator("bytes")
    @classmethod
    def _bytes_are_known(cls, value: str | int | None) -> str | int | None:
        if value is not None:
            text_utils.read_bytes(value)
        return value

    @model_validator(mode="after")
    def _one_size(self) -> CacheOptions:
        given = [name for name in ("rows", "share", "bytes") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                f"options {' and '.join(map(repr, given))} all set the cache size. Keep one of "
                "these options, or remove all of them for automatic sizes"
            )
        return self
