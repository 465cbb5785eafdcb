"""Options of ``scars.cache``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator

from recd_plugins.api import AccessOptions, text_utils

Count = Annotated[StrictInt, Field(gt=0)]


class FileStorage(BaseModel):
    """Backing store in temporary files, for tables larger than memory."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: Path = Field(
        description="Folder of the temporary files, which are deleted after the run."
    )


class CacheOptions(AccessOptions):
    """Size, policy and backing store of the caches."""

    policy: Literal["static", "lfu", "lru"] = Field(
        default="static",
        description=(
            "Which rows stay in fast memory: the most read rows of the profile "
            "(static), the most used (lfu) or the last used rows (lru)."
        ),
    )
    rows: Annotated[StrictInt, Field(ge=0)] | None = Field(
        default=None, description="Number of cached rows per table."
    )
    share: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Cached rows as a share of each table's rows."
    )
    bytes: str | Count | None = Field(
        default=None,
        description=(
            "Fast memory for the cached rows of all tables of the entry, over all "
            "ranks, such as 256MB. Tables with more frequently read rows get more. "
            "Without rows, share and bytes, rows are cached while that saves time."
        ),
    )
    storage: Literal["host"] | FileStorage = Field(
        default="host",
        description="Backing store of all rows: host memory, or temporary files: {file: FOLDER}.",
    )
    lookahead: bool = Field(
        default=True,
        description=(
            "Fetch the rows of the next batch during the current one. Results do not change."
        ),
    )

    @property
    def folder(self) -> Path | None:
        """Return the folder of the files, or None for host memory."""
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
                f"{' and '.join(given)} all set the cache size. Keep one of these options, or "
                "remove all of them for automatic sizes"
            )
        return self
