"""Options of dataset ``dlrm.criteo``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from recd_plugins.api import PluginOptions


class CriteoOptions(PluginOptions):
    """What ``dlrm.criteo`` reads, and how."""

    path: Path = Field(
        description="The file train.txt, or a folder with day_0, day_1... or train: TSV, "
        "plain, .gz or .zst, .parquet, or npy in threes."
    )
    evaluate: Literal["test", "validation", "last_day", "nothing"] = Field(
        default="test",
        description="What the test split is: the second half of the last day, its first half, "
        "the whole day, or nothing; then all days are trained on.",
    )
    parts: int = Field(
        default=7, ge=2, description="Days that one file holds, which count as equally long."
    )
    dense: Literal["log1p", "stored"] | None = Field(
        default=None,
        description="log1p makes log(x + 1) of numbers, and 0 of negative ones; stored leaves "
        "them; null is log1p for whole numbers and stored for floats.",
    )
    categorical: Literal["hashed", "dictionary", "raw"] = Field(
        default="hashed",
        description="How ids become rows of tables: modulo, by a dictionary of the training "
        "days, or not at all.",
    )
    buckets: PositiveInt | dict[str, PositiveInt] = Field(
        default=100_000, description="Of hashed: rows of every table, or by name or pattern."
    )
    threshold: PositiveInt = Field(
        default=3, description="Of dictionary: ids that occur less often share row 1."
    )
    max_ids: int | None = Field(
        default=None, ge=2, description="Of dictionary: rows of a table at most."
    )
    bad_lines: Literal["error", "skip"] = Field(
        default="error", description="What a line of TSV is that is none of Criteo's."
    )
    max_bad_lines: NonNegativeInt = Field(
        default=100, description="Of skip: one bad line more, in all files, is an error."
    )
    cache: Path | None = Field(
        default=None,
        description="Folder for row counts and dictionaries; null takes .recd-criteo beside "
        "the data.",
    )
    npy_sparse: str = Field(
        default="sparse",
        pattern=r"^sparse\w*$",
        description="The end of the names of npy files with ids.",
    )
    shuffle: bool = Field(
        default=False, description="Read units of rows in another order in each epoch."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the shuffle.")
    prefetch: NonNegativeInt = Field(
        default=4, description="Batches read ahead in a thread; 0 reads in the trainer's own."
    )
