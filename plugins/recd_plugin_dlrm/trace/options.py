"""Options of dataset ``dlrm.trace``."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, PositiveInt

from recd_plugin_dlrm.random_rows import DrawnRowOptions


class TraceOptions(DrawnRowOptions):
    """What ``dlrm.trace`` reads, and how."""

    profile: Path = Field(description="What recd trace profile made of the original traces.")
    path: Path = Field(
        description="The Parquet file of the rows; drawn before training where it is missing."
    )
    tables: list[str] | None = Field(
        default=None,
        description="Names or patterns of tables of the profile; null takes all of them.",
    )
    num_indices_per_lookup: PositiveInt | None = Field(
        default=None,
        le=100_000,
        description="Ids in a list; null takes the mean of each original, rounded, at least 1.",
    )
    min_new: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Raise the share of new ids to this at least; null as far as LRU hit rates "
        "need it; 0 leaves it as it was.",
    )
