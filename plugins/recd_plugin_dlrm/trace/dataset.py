"""Options of dataset ``dlrm.trace``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt

from recd_plugin_dlrm.random_rows import UNIT_ROWS, DrawnRowOptions, schema_of
from recd_plugins.api import (
    DataError,
    Dataset,
    FeatureSchema,
    ParquetTable,
    PlannedReader,
    Reader,
    ReadPlan,
    Split,
    Unit,
    digest,
)


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


class Trace(Dataset):
    """Rows whose ids have the locality of profiled traces; dense features and labels are drawn."""

    name = "dlrm.trace"
    free_options = frozenset({"path", "profile", "prefetch"})

    class Options(TraceOptions):
        pass

    options: Options

    def prepare(self) -> None:
        from recd_plugin_dlrm.trace.stored_rows import StoredRows

        StoredRows(self.options, self.name).make_or_check()

    def identity(self) -> dict[str, Any]:
        return {"rows": list(self._table.contents().values())}

    def schema(self) -> FeatureSchema:
        options = self.options
        drawn = {*schema_of(options, ()).dense, schema_of(options, ()).label}
        names = self._table.schema.names
        return schema_of(options, tuple(name for name in names if name not in drawn))

    def splits(self) -> tuple[Split, ...]:
        return ("train", "test") if self.options.test_rows else ("train",)

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        from recd_plugin_dlrm.trace.stored_rows import provenance

        table = self._table
        return PlannedReader(
            ReadPlan(tuple(self._units(split)), batch_size),
            lambda pieces: table.read(pieces, table.schema),
            data={"split": split, "made": digest(provenance(self.options.path))},
            what=f"{self.options.path} ({split})",
            rank=rank,
            world_size=world_size,
            ahead=self.options.prefetch,
        )

    @cached_property
    def _table(self) -> ParquetTable:
        if not self.options.path.exists():
            raise DataError(
                f"{self.options.path}: not drawn yet; Dataset.prepare, which recd run calls, does"
            )
        return ParquetTable(self.options.path)

    def _units(self, split: Split) -> Iterator[Unit]:
        """Row groups of the split: those of the test split stand behind all others."""
        if split == "test" and not self.options.test_rows:
            raise DataError(f"there is no test split: set option test_rows of {self.name}")
        num_train = -(-self.options.rows // UNIT_ROWS)
        for unit in self._table.units:
            if (unit.group < num_train) == (split == "train"):
                yield unit
