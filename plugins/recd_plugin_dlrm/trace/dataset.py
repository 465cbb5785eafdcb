"""Dataset ``dlrm.trace``: rows whose ids follow synthetic traces, stored in a Parquet file."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from pydantic import Field, PositiveInt

from recd_plugin_dlrm.random_rows import (
    UNIT_ROWS,
    DrawnRowOptions,
    FeatureLists,
    make_rows,
    schema_of,
    units_of,
)
from recd_plugin_dlrm.trace.generator import TableTrace, generator_of
from recd_plugin_dlrm.trace.profile import choose, read_profile
from recd_plugins.api import (
    DataError,
    Dataset,
    FeatureSchema,
    Reader,
    Split,
    file_utils,
    parquet,
    progress_bars,
    readers,
)

_KEY = b"recd_plugin_dlrm.trace_rows"
# Increase when the same options would generate other rows.
_VERSION = 1


class Trace(Dataset):
    """Dataset whose ids have the locality of profiled traces; other values are random."""

    name = "dlrm.trace"
    free_options = frozenset({"path", "profile", "prefetch"})

    class Options(DrawnRowOptions):
        profile: Path = Field(
            description="Profile of the original traces, written by recd trace profile."
        )
        path: Path = Field(
            description="Parquet file of the rows; generated before training if it is missing."
        )
        tables: list[str] | None = Field(
            default=None,
            description="Names or patterns of tables in the profile; null uses all.",
        )
        num_indices_per_lookup: PositiveInt | None = Field(
            default=None,
            le=100_000,
            description="Ids per list; null uses the rounded mean of each trace, at least 1.",
        )
        min_new: float | None = Field(
            default=None,
            ge=0,
            lt=1,
            description=(
                "Minimum share of new ids. null raises it as far as LRU hit rates need "
                "it; 0 keeps the original."
            ),
        )

    options: Options

    def prepare(self) -> None:
        """Generate the Parquet file, or check that an existing file has the same options."""
        options = self.options
        profile = read_profile(options.profile)
        tables = choose(list(profile.tables), options.tables or ())
        traces = [profile.tables[table] for table in tables]
        schema_of(options, tuple(trace.feature for trace in traces))
        wanted = self._provenance(traces)
        if not options.path.exists():
            self._draw(traces, wanted)
            return
        found = _provenance_of(options.path)
        differing = [
            f"option {key!r} was {found.get(key)!r} and is now {wanted.get(key)!r}"
            for key in sorted(found.keys() | wanted.keys())
            if found.get(key) != wanted.get(key)
        ]
        if differing:
            what = "; ".join(differing)
            raise DataError(
                f"{options.path}: the rows were generated with other options: {what}. Remove the "
                "file to generate it again."
            )

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
        if split not in self.splits():
            raise DataError(f"dataset {self.name!r} has no test split. Set option 'test_rows'.")
        table = self._table
        num_train = -(-self.options.rows // UNIT_ROWS)  # the row groups of the test split follow
        units = [each for each in table.units if (each.group < num_train) == (split == "train")]
        return readers.PlannedReader(
            readers.ReadPlan(tuple(units), batch_size),
            lambda pieces: table.read(pieces, table.schema),
            data={"split": split, "made": readers.digest(_provenance_of(self.options.path))},
            what=f"{self.options.path} ({split})",
            rank=rank,
            world_size=world_size,
            ahead=self.options.prefetch,
        )

    @cached_property
    def _table(self) -> parquet.ParquetTable:
        return parquet.ParquetTable(self.options.path)

    def _draw(self, traces: list[TableTrace], made: dict[str, Any]) -> None:
        options = self.options
        num_rows = options.rows + options.test_rows
        lengths = [
            options.num_indices_per_lookup or max(1, round(trace.accesses / trace.rows))
            for trace in traces
        ]
        generators = [
            generator_of(trace, num_rows * length, options.seed, options.min_new)
            for trace, length in zip(traces, lengths, strict=True)
        ]
        writer: pq.ParquetWriter | None = None
        with (
            progress_bars.row_progress(f"drawing {options.path.name}", num_rows) as progress,
            file_utils.new_file(options.path) as temporary,
            ExitStack() as stack,
        ):
            for unit in [unit for split in self.splits() for unit in units_of(options, split)]:
                lists = {}
                for generator, length in zip(generators, lengths, strict=True):
                    ids = generator.draw(unit.num_rows * length)
                    offsets = np.arange(0, len(ids) + 1, length, dtype=np.int32)
                    lists[generator.profile.feature] = FeatureLists(offsets, ids)
                rows = make_rows(options, unit.first_row, unit.num_rows, lists)
                rows = rows.replace_schema_metadata({_KEY: json.dumps(made)})
                writer = writer or stack.enter_context(
                    pq.ParquetWriter(
                        temporary, rows.schema, compression="zstd", use_dictionary=False
                    )
                )
                writer.write_batch(rows, row_group_size=unit.num_rows)
                progress(unit.num_rows)

    def _provenance(self, traces: list[TableTrace]) -> dict[str, Any]:
        """Return JSON values that determine the generated rows exactly."""
        content = hashlib.sha256()
        for trace in traces:
            content.update(f"{trace.feature} {trace.rows}".encode())
            for array in (trace.ids, trace.distances, trace.counts):
                content.update(np.ascontiguousarray(array).tobytes())
        drawn = self.options.model_dump(mode="json", exclude={"profile", "path", "prefetch"})
        return {"version": _VERSION, "traces": content.hexdigest()[:16], **drawn}


def _provenance_of(path: Path) -> dict[str, Any]:
    metadata = pq.read_schema(path).metadata or {}
    if _KEY not in metadata:
        raise DataError(
            f"{path}: the file was not generated by dataset 'dlrm.trace'. Set option 'path' to "
            "another file."
        )
    found: dict[str, Any] = json.loads(metadata[_KEY])
    return found
