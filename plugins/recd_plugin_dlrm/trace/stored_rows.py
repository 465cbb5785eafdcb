"""The rows of ``dlrm.trace``: drawn once, in the order of their traces, into a Parquet file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pv
import pyarrow.parquet as pq

from recd_plugin_dlrm.random_rows import FeatureLists, check_features, make_rows, units_of
from recd_plugin_dlrm.trace.dataset import TraceOptions
from recd_plugin_dlrm.trace.generator import TableTrace, TraceGenerator, generator_of
from recd_plugin_dlrm.trace.profile import choose, read_profile
from recd_plugins.api import (
    DataError,
    FileKind,
    check_regular,
    new_file,
    parse_json,
    table_kind,
    text_kind,
)

if TYPE_CHECKING:
    from recd_plugins.api import Split


_KEY = b"recd_plugin_dlrm.trace_rows"
# Raised when the same options would give other rows.
_VERSION = 1


class StoredRows:
    """The file that options of ``dlrm.trace`` name.

    Args:
        options: of the dataset.
        name: of the dataset, for messages.

    Raises:
        DataError: the profile is missing, is none, or lacks a table.
    """

    def __init__(self, options: TraceOptions, name: str) -> None:
        self._options = options
        self._name = name
        profile = read_profile(options.profile)
        try:
            chosen = choose(list(profile.tables), options.tables or ())
        except DataError as error:
            raise DataError(f"{options.profile}: {error}") from error
        self._traces = [profile.tables[table] for table in chosen]
        check_features(options, tuple(trace.feature for trace in self._traces))

    def make_or_check(self) -> None:
        """Draw the file where it is missing; see that a file which is there is this one.

        Raises:
            DataError: the file was drawn with other options or from another profile.
            RecdError: it cannot be written.
        """
        path, wanted = self._options.path, self._provenance()
        if path.exists():
            differing = _differences(provenance(path), wanted)
            if differing:
                raise DataError(
                    f"{path} was drawn otherwise: {'; '.join(differing)}. Remove it, or name "
                    "another path"
                )
            return
        from recd_plugins.api import progress_bars

        with progress_bars() as add_bar:
            rows = self._options.rows + self._options.test_rows
            self._write(wanted, add_bar(f"drawing {path.name}", rows))

    def _write(self, made: dict[str, Any], progress: Callable[[int], None]) -> None:
        options = self._options
        splits: list[Split] = ["train", "test"] if options.test_rows else ["train"]
        units = [unit for split in splits for unit in units_of(options, split, self._name)]
        generators = [
            generator_of(
                trace,
                (options.rows + options.test_rows) * self._length(trace),
                options.seed,
                options.min_new,
            )
            for trace in self._traces
        ]
        writer: pq.ParquetWriter | None = None
        with new_file(options.path) as temporary:
            try:
                for unit in units:
                    lists = {
                        generator.profile.feature: self._lists(generator, unit.num_rows)
                        for generator in generators
                    }
                    rows = make_rows(options, unit.first_row, unit.num_rows, lists)
                    rows = rows.replace_schema_metadata({_KEY: json.dumps(made)})
                    if writer is None:
                        writer = pq.ParquetWriter(
                            temporary, rows.schema, compression="zstd", use_dictionary=False
                        )
                    writer.write_batch(rows, row_group_size=unit.num_rows)
                    progress(unit.num_rows)
            finally:
                if writer is not None:
                    writer.close()

    def _lists(self, generator: TraceGenerator, rows: int) -> FeatureLists:
        length = self._length(generator.profile)
        offsets = np.arange(0, rows * length + 1, length, dtype=np.int32)
        return FeatureLists(offsets, generator.draw(rows * length))

    def _length(self, trace: TableTrace) -> int:
        return self._options.num_indices_per_lookup or max(1, round(trace.accesses / trace.rows))

    def _provenance(self) -> dict[str, Any]:
        """What fixes the rows to the last bit, JSON values."""
        content = hashlib.sha256()
        for trace in self._traces:
            content.update(f"{trace.feature} {trace.rows}".encode())
            for array in (trace.ids, trace.distances, trace.counts):
                content.update(np.ascontiguousarray(array).tobytes())
        drawn = self._options.model_dump(mode="json", exclude={"profile", "path", "prefetch"})
        return {"version": _VERSION, "traces": content.hexdigest()[:16], **drawn}


def provenance(path: Path) -> dict[str, Any]:
    """How a file was drawn.

    Raises:
        DataError: it is no Parquet file, or was not drawn here.
    """
    try:
        check_regular(path)
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: no readable Parquet file: {error}") from error
    if _KEY not in metadata:
        raise DataError(f"{path} was not drawn by dlrm.trace; name another path")
    try:
        found = parse_json(metadata[_KEY])
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise DataError(f"{path}: its metadata is damaged; remove it, or name another path")
    return found


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [
        f"{key} was {found.get(key)!r} and is {wanted.get(key)!r}"
        for key in sorted(found.keys() | wanted.keys())
        if found.get(key) != wanted.get(key)
    ]


#: Key of the Parquet metadata under which a trace says how it was drawn, as JSON.
PROVENANCE = b"recd_plugin_dlrm.trace"
# Rows drawn, and of a Parquet row group.
_ROWS = 1 << 18


def write_trace(
    path: Path,
    generators: Sequence[TraceGenerator],
    accesses: int,
    provenance: Mapping[str, Any],
    progress: Callable[[int], None] = lambda _rows: None,
) -> None:
    """Draw and write traces of ``accesses`` ids each, whole or not at all; holds 262,144 rows.

    Args:
        path: Parquet where it ends in .parquet: a column of int64 for each feature. Else text: in
            a line an id of each, a space between them; gzip where it ends in .gz.
        generators: one a table.
        accesses: of each.
        provenance: JSON values for the metadata of Parquet.
        progress: told after each piece how many rows it had.

    Raises:
        RecdError: the place cannot be written, or a trace cannot be so long.
    """
    fields = [pa.field(each.profile.feature, pa.int64(), nullable=False) for each in generators]
    schema = pa.schema(fields, metadata={PROVENANCE: json.dumps(dict(provenance))})
    with new_file(path) as temporary, ExitStack() as stack:
        writer = _open(stack, path, temporary, schema)
        for first in range(0, accesses, _ROWS):
            size = min(_ROWS, accesses - first)
            columns = [pa.array(each.draw(size)) for each in generators]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
            progress(size)


def trace_kind(path: Path) -> FileKind:
    """Return the kind of file that ``write_trace`` writes there."""
    if path.suffix == ".parquet":
        return table_kind("trace", key=PROVENANCE)
    return text_kind("trace", rb"\A(\x1f\x8b|[-\d \n]+\Z)")


def _open(
    stack: ExitStack, path: Path, temporary: Path, schema: pa.Schema
) -> pq.ParquetWriter | pv.CSVWriter:
    if path.suffix == ".parquet":
        return stack.enter_context(
            pq.ParquetWriter(temporary, schema, compression="zstd", use_dictionary=False)
        )
    compression = "gzip" if path.suffix == ".gz" else None
    sink = stack.enter_context(pa.output_stream(str(temporary), compression=compression))
    options = pv.WriteOptions(include_header=False, delimiter=" ")
    return stack.enter_context(pv.CSVWriter(sink, schema, write_options=options))
