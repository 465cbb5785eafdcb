"""Algorithm 1: from a trace its ids in the order of first use and its LRU stack distances."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recd_plugin_dlrm.trace import kernels
from recd_plugin_dlrm.trace.generator import LruStack, TableTrace, grown
from recd_plugin_dlrm.trace.kernels import FINE, NO_NUMBER, OTHER_COLUMNS, parse_ids
from recd_plugins.api import DataError, check_regular, did_you_mean, new_file, parse_json, shortened

if TYPE_CHECKING:
    from recd_plugins.api import FeatureLookups, RunConfig


# Accesses between two looks at whether there is room for new ids.
_PIECE = 1 << 16


class StackDistances:
    """Profiles a trace piece by piece, in O(log m) an access for m distinct ids.

    Holds about 100 bytes a distinct id, whatever the length of the trace.

    Attributes:
        accesses: seen so far.
    """

    def __init__(self) -> None:
        self.accesses = 0
        self._stack = LruStack()
        self._keys = np.zeros(2 * _PIECE, np.int64)
        self._codes = np.full(2 * _PIECE, -1, np.int32)
        self._unique = np.zeros(_PIECE, np.int64)
        self._num_ids = 0
        self._counts = np.zeros(_PIECE + 1, np.int64)

    def add(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The distances of the next accesses.

        Args:
            ids: int64 ``[n]``.

        Returns:
            int64 ``[n]``: 0 for an id that is new, else its depth in the LRU stack, from 1.
        """
        out = np.empty(len(ids), np.int64)
        for first in range(0, len(ids), _PIECE):
            self._add(ids[first : first + _PIECE], out[first : first + _PIECE])
        self.accesses += len(ids)
        return out

    def trace(self, feature: str, rows: int | None = None) -> TableTrace:
        """What was seen so far.

        Args:
            feature: whose ids these are.
            rows: of data that had them; as many as accesses without it.
        """
        distances = np.flatnonzero(self._counts)
        return TableTrace(
            feature=feature,
            ids=self._unique[: self._num_ids].copy(),
            distances=distances,
            counts=self._counts[distances],
            rows=self.accesses if rows is None else rows,
        )

    def _add(self, ids: NDArray[np.int64], out: NDArray[np.int64]) -> None:
        most = self._num_ids + len(ids)
        if 2 * most > len(self._keys):
            self._grow_table(most)
        if most > len(self._unique):
            self._unique = grown(self._unique, most)
        codes = np.empty(len(ids), np.int32)
        self._num_ids = kernels.code_ids(
            ids, self._keys, self._codes, self._unique, self._num_ids, codes
        )
        if self._num_ids >= len(self._counts):
            self._counts = grown(self._counts, self._num_ids + 1)
        stack, done = self._stack, 0
        stack.know(self._num_ids)
        while done < len(codes):
            stack.make_room()
            done += kernels.stack_distances(
                codes[done:],
                out[done:],
                self._counts,
                stack.tree,
                stack.at,
                stack.last,
                stack.state,
            )

    def _grow_table(self, num_ids: int) -> None:
        size = 1 << (2 * num_ids).bit_length()
        self._keys, self._codes = np.zeros(size, np.int64), np.full(size, -1, np.int32)
        kernels.insert_ids(self._unique, self._num_ids, self._keys, self._codes)


def profile_ids(ids: NDArray[np.int64], feature: str = "id") -> TableTrace:
    """The profile of a whole trace, int64 ``[n]``."""
    distances = StackDistances()
    distances.add(np.ascontiguousarray(ids, np.int64))
    return distances.trace(feature)


_BYTES = 1 << 23
_SHOWN = 40


def read_text(path: Path, columns: Sequence[str]) -> Iterator[NDArray[np.int64]]:
    """The ids of a text file, piece by piece.

    Args:
        path: the file; gzip where it ends in .gz.
        columns: names of the numbers of a line; without any, lines mean nothing.

    Returns:
        int64 ``[n, columns]`` each, ``[n, 1]`` without columns.

    Raises:
        DataError: the file cannot be read, is damaged or has no numbers; something in it is no
            number, or a line has other columns.
    """
    any_ids = False
    lines = 0
    try:
        check_regular(path)
        with _open(path) as file:
            for text in _pieces(file, by_line=bool(columns)):
                ids = _parse(path, text, lines, columns)
                lines += text.count(b"\n")
                if len(ids):
                    any_ids = True
                    yield ids
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except EOFError as error:
        raise DataError(
            f"{path}: the gzip file is truncated, it ends after line {lines:,}; fetch it again"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: no gzip file, or a damaged one: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not any_ids:
        raise DataError(f"{path}: there are no ids in it")


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _pieces(file: BinaryIO, *, by_line: bool) -> Iterator[bytes]:
    """The text in pieces that end where a number ends, or a line."""
    waiting = b""
    while more := file.read(_BYTES):
        text = waiting + more
        ends = (b"\n",) if by_line else (b"\n", b" ", b"\t", b"\r")
        cut = max(text.rfind(end) for end in ends) + 1
        if cut:
            yield text[:cut]
        waiting = text[cut:]
    if waiting:
        yield waiting


def _parse(path: Path, text: bytes, lines: int, columns: Sequence[str]) -> NDArray[np.int64]:
    out = np.empty((len(text) + 1) // 2, np.int64)
    num, wrong, place = parse_ids(np.frombuffer(text, np.uint8), len(columns), out)
    if wrong == FINE:
        return out[:num].reshape(-1, max(1, len(columns)))
    line_number = lines + text.count(b"\n", 0, place) + 1
    where = f"{path}: line {line_number:,}"
    if wrong == OTHER_COLUMNS:
        line = text[text.rfind(b"\n", 0, place) + 1 : place + 1]
        raise DataError(
            f"{where} has {len(line.split())} numbers, and --columns names {len(columns)}: "
            f"{', '.join(columns)}"
        )
    word = re.split(rb"\s", text[place : place + _SHOWN], maxsplit=1)[0]
    value = word.decode(errors="replace")
    if wrong == NO_NUMBER:
        raise DataError(
            f"{where}: {value!r} is no id; a trace has whole numbers with white space between them"
        )
    raise DataError(f"{where}: {value} does not fit into 64 bits; hash such ids before")


@dataclass(frozen=True, eq=False)
class TraceRows:
    """Adjacent rows of the data.

    Attributes:
        ids: int64 ``[n]`` by feature, in the order of lookups.
        rows: how many they are.
    """

    ids: Mapping[str, NDArray[np.int64]]
    rows: int


def text_pieces(
    path: Path, columns: Sequence[str], features: Sequence[str], rows: int | None
) -> Iterator[TraceRows]:
    """The pieces of a text file, of which a row is a number of each column.

    Args:
        path: see ``read_text``, as for ``columns``.
        features: the columns to take; without columns, what the ids are called.
        rows: read the first so many; None: all.
    """
    places = {name: columns.index(name) if columns else 0 for name in features}
    left = rows
    for numbers in read_text(path, columns):
        taken = numbers[:left]
        if left is not None:
            left -= len(taken)
        ids = {name: np.ascontiguousarray(taken[:, place]) for name, place in places.items()}
        yield TraceRows(ids, len(taken))
        if left == 0:
            return


def registry_pieces(
    registry: RunConfig, features: Sequence[str], rows: int | None
) -> Iterator[TraceRows]:
    """The pieces of the training split of a registry's dataset, as preprocessing leaves them.

    Raises:
        DataError: the data is missing or wrong.
        PluginError: a plugin failed.
    """
    from recd_plugins.api import RegistryLookups, training_rows

    lookups = RegistryLookups(registry)
    for batch in training_rows(registry, rows):
        found = lookups.of(batch, features)
        yield TraceRows({name: _in_order(found[name]) for name in features}, len(batch))


def choose(tables: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The tables that patterns match, or all.

    Raises:
        DataError: a pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(table, pattern) for table in tables):
            near = did_you_mean(pattern, list(tables)) or f"; the tables: {shortened(list(tables))}"
            raise DataError(f"--tables {pattern} matches no table{near}")
    if not patterns:
        return list(tables)
    return [table for table in tables if any(fnmatchcase(table, p) for p in patterns)]


def _in_order(lookups: FeatureLookups) -> NDArray[np.int64]:
    """The ids of every row, those of lists that several rows share once for each of them."""
    if lookups.inverse is None:
        return lookups.ids
    starts = lookups.offsets[:-1][lookups.inverse].astype(np.int64)
    lengths = np.diff(lookups.offsets)[lookups.inverse].astype(np.int64)
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    return lookups.ids[np.repeat(starts, lengths) + within]


@dataclass(frozen=True, eq=False)
class TraceProfile:
    """What is known of the traces of tables.

    Attributes:
        tables: by name.
        source: what was profiled, in words.
        path: the file that it was read from.
    """

    tables: Mapping[str, TableTrace]
    source: str
    path: Path | None = None


def profile_pieces(
    pieces: Iterable[TraceRows],
    features: Sequence[str],
    source: str,
    progress: Callable[[int], None] = lambda _rows: None,
) -> TraceProfile:
    """Profile the traces of ``features``; each has a table of its own.

    Args:
        pieces: of the data, in order.
        source: what they are of, in words.
        progress: told after each piece how many rows it had.

    Raises:
        DataError: a feature has no ids at all.
    """
    found = {name: StackDistances() for name in features}
    rows = 0
    for piece in pieces:
        for name, distances in found.items():
            distances.add(piece.ids[name])
        rows += piece.rows
        progress(piece.rows)
    for name, distances in found.items():
        if not distances.accesses:
            raise DataError(
                f"{source}: feature {name} has no ids in {rows:,} rows; leave it out with --tables"
            )
    traces = [distances.trace(name, rows) for name, distances in found.items()]
    return TraceProfile({trace.table: trace for trace in traces}, source)


_KEY = b"recd_plugin_dlrm.trace_profile"
_VERSION = 1
_LISTS = ("ids", "distances", "counts")
_NUMBERS = pa.large_list(pa.field("element", pa.int64(), nullable=False))
_SCHEMA = pa.schema(
    [
        pa.field("feature", pa.string(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        *(pa.field(name, _NUMBERS, nullable=False) for name in _LISTS),
    ]
)
_MAKE = "make one with recd trace profile SOURCE -o FILE"


def write_profile(profile: TraceProfile, path: Path) -> None:
    """Write a profile, whole or not at all.

    Raises:
        RecdError: the place cannot be written.
    """
    head = json.dumps({"version": _VERSION, "source": profile.source})
    schema = _SCHEMA.with_metadata({_KEY: head})
    with (
        new_file(path) as temporary,
        pq.ParquetWriter(
            temporary,
            schema,
            compression="zstd",
            use_dictionary=False,
            write_page_checksum=True,
        ) as writer,
    ):
        for trace in profile.tables.values():
            lists = [_list(getattr(trace, name)) for name in _LISTS]
            columns = [pa.array([trace.feature]), pa.array([trace.rows], pa.int64()), *lists]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


def read_profile(path: Path) -> TraceProfile:
    """Read a profile and check all of it.

    Raises:
        DataError: the file is missing, damaged, of another version or no profile.
    """
    try:
        check_regular(path)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            head = _head(path, file)
            groups = range(file.metadata.num_row_groups)
            traces = [_trace(path, file.read_row_group(group)) for group in groups]
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; {_MAKE}") from error
    except (pa.ArrowException, OSError) as error:
        # Arrow's own errors of damaged pages are OSErrors too.
        raise DataError(f"{path}: no Parquet file, or a damaged one: {error}") from error
    tables = {trace.table: trace for trace in traces}
    if not tables or len(tables) < len(traces):
        raise DataError(f"{path}: it has no tables, or one twice; {_MAKE}")
    return TraceProfile(tables, head["source"], path)


def _list(numbers: NDArray[np.int64]) -> pa.Array:
    return pa.LargeListArray.from_arrays(np.array([0, len(numbers)]), numbers).cast(_NUMBERS)


def _head(path: Path, file: pq.ParquetFile) -> dict[str, Any]:
    text = (file.schema_arrow.metadata or {}).get(_KEY)
    if text is None:
        raise DataError(
            f"{path}: no trace profile, but some other Parquet file (its columns: "
            f"{', '.join(file.schema_arrow.names)}); {_MAKE}"
        )
    try:
        head = parse_json(text)
        version, source = head["version"], head["source"]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: its metadata is damaged ({error}); {_MAKE}") from error
    if version != _VERSION:
        raise DataError(
            f"{path}: a trace profile of version {version}; this recd reads version {_VERSION}, so "
            "profile the trace anew"
        )
    if not file.schema_arrow.equals(_SCHEMA) or not isinstance(source, str):
        raise DataError(f"{path}: its columns or metadata are none of a trace profile; {_MAKE}")
    return {"source": source}


def _trace(path: Path, table: pa.Table) -> TableTrace:
    if table.num_rows != 1:
        raise DataError(f"{path}: a row group has {table.num_rows} rows, not one; {_MAKE}")
    row = table.combine_chunks().to_batches()[0]
    ids, distances, counts = (row[name].flatten().to_numpy() for name in _LISTS)
    trace = TableTrace(row["feature"][0].as_py(), ids, distances, counts, row["rows"][0].as_py())
    wrong = _fault(trace)
    if wrong:
        raise DataError(f"{path}: table {trace.table}: {wrong}; {_MAKE}")
    return trace


def _fault(trace: TableTrace) -> str | None:
    """What no profile says of a table, where this one does."""
    ids, distances, counts = trace.ids, trace.distances, trace.counts
    if len(distances) != len(counts) or not len(distances) or distances[0] != 0:
        return "distances and counts do not fit each other"
    if (np.diff(distances) <= 0).any() or distances[-1] > len(ids):
        return f"distances do not rise from 0 to at most its {len(ids):,} ids"
    if (counts < 1).any() or counts[0] != len(ids):
        return (
            f"counts are below 1, or {counts[0]:,} accesses are new and there are {len(ids):,} ids"
        )
    if len(np.unique(ids)) < len(ids):
        return "an id stands in it twice"
    if trace.rows < 1:
        return f"it has {trace.rows} rows"
    return None
