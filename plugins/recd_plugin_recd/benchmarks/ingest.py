"""What is read of a table and how often: columns one by one, together, and in another order.

Requests and bytes are counted where they are served: by a file system on this machine, and by an
S3-compatible store on loopback that adds a set time to each answer.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from recd_plugin_recd.benchmarks.ingest_parts.jobs import (
    NUM_FEATURES,
    NUM_JOBS,
    Job,
    draw_jobs,
    num_rows,
    write_tables,
)
from recd_plugins.api.reading import Piece
from recd_plugins.api.tables import Condition, ParquetTable, ReadOptions, Storage
from recd_plugins.testing.benchmark import Detail, Figure, Findings, Size
from recd_plugins.testing.counted_files import CountedFiles, register
from recd_plugins.testing.counted_requests import Request, num_bytes, of_columns
from recd_plugins.testing.counted_store import Store, counted_store

SUMMARY = "bytes read beyond need and requests sent: columns together against one by one"
TITLE = "All jobs over the whole table; local files"

_HOLES = (0, 8 << 10, 64 << 10, 256 << 10, 1 << 20)
_LATENCY = 0.01
_TURNS: dict[Size, int] = {"tiny": 1, "small": 3, "reference": 3}
_BUCKET = "tables"
_FILTER = Condition(column="hour", op=">=", value=21)


@dataclass(frozen=True)
class Side:
    """A way to read: the order of columns in files, and which are read together."""

    order: str
    options: ReadOptions

    @property
    def name(self) -> str:
        """Such as ``popularity_64KiB``."""
        if not self.options.pre_buffer:
            return f"{self.order}_per_column"
        return f"{self.order}_{self.options.hole_size_limit >> 10}KiB"


@dataclass(frozen=True)
class Count:
    """Counts of all jobs: requests for columns, bytes of them, and bytes that the columns have."""

    requests: int
    read: int
    needed: int

    @property
    def over_read(self) -> float:
        """Bytes that nobody asked for, over those that somebody did."""
        return self.read / self.needed - 1


SIDES = {
    side.name: side
    for order in ("schema", "popularity")
    for side in (
        Side(order, ReadOptions(pre_buffer=False)),
        *(Side(order, ReadOptions(hole_size_limit=hole)) for hole in _HOLES),
    )
}
_PER_COLUMN = "schema_per_column"


def workload(size: Size) -> str:
    """The input in words."""
    return (
        f"PAPERCAL clustered, {num_rows(size)} rows in 4 files, row groups of at most "
        f"{num_rows(size) // 16}, lists, zstd-3; "
        f"{NUM_JOBS} jobs that read label, 13 dense and {NUM_FEATURES} of 40 sparse features, "
        "popular ones most; S3: moto on loopback in a process of its own, 10 ms before an answer"
    )


def run(size: Size) -> Findings:
    """Measure. Requests and bytes do not vary; times are of sides in turns."""
    register()
    jobs = draw_jobs()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tables = write_tables(folder, num_rows(size), jobs)
        counts = {side.name: _count_local(tables, side, jobs) for side in SIDES.values()}
        figures = _ratios(counts)
        figures += _filtered(tables["schema"], jobs[0])
        figures.append(_over_fragments(tables["schema"], jobs[0], _TURNS[size]))
        with _credentials(), counted_store(_LATENCY) as store:
            store.upload(folder, _BUCKET)
            figures += _in_store(store, tables, jobs[0], _TURNS[size])
        return Findings(figures, [_detail(counts)], [])


def plot(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Requests and bytes that nobody asked for, by the limit of holes."""
    from recd_plugin_recd.benchmarks.ingest_parts.plots import draw

    return draw(result, folder)


def _count_local(tables: Mapping[str, Path], side: Side, jobs: Sequence[Job]) -> Count:
    path = tables[side.order]
    return _count(path, jobs, _requests_of(f"counted://{path}", side.options, jobs, _sizes(path)))


def _requests_of(
    url: str, options: ReadOptions, jobs: Sequence[Job], sizes: dict[str, int]
) -> list[Request]:
    found = []
    for job in jobs:
        table = ParquetTable(url, options=options)
        CountedFiles.taken()
        _read(table, job.columns)
        found += of_columns(CountedFiles.taken(), sizes)
    return found


def _count(path: Path, jobs: Sequence[Job], requests: Sequence[Request]) -> Count:
    return Count(len(requests), num_bytes(requests), sum(job.needed(path) for job in jobs))


def _read(table: ParquetTable, columns: Sequence[str]) -> int:
    schema = pa.schema([table.schema.field(name) for name in columns])
    pieces = (Piece(unit, 0, unit.num_rows) for unit in table.units)
    return sum(len(rows) for rows in table.read(pieces, schema))


def _sizes(path: Path, above: Path = Path("/"), before: str = "/") -> dict[str, int]:
    return {
        before + file.relative_to(above).as_posix(): file.stat().st_size
        for file in path.glob("*.parquet")
    }


def _ratios(counts: Mapping[str, Count]) -> list[Figure]:
    base = counts[_PER_COLUMN]
    figures = [
        Figure.of(
            "requests_per_column_over_popularity_64KiB",
            [base.requests / counts["popularity_64KiB"].requests],
            unit="ratio",
            better="higher",
            goal=10,
        )
    ]
    for name in (
        "schema_8KiB",
        "schema_64KiB",
        "schema_256KiB",
        "popularity_8KiB",
        "popularity_256KiB",
    ):
        ratio = base.requests / counts[name].requests
        figures.append(
            Figure.of(f"requests_per_column_over_{name}", [ratio], unit="ratio", better="higher")
        )
    for name in (
        "schema_8KiB",
        "schema_64KiB",
        "schema_256KiB",
        "popularity_8KiB",
        "popularity_64KiB",
        "popularity_256KiB",
    ):
        figures.append(
            Figure.of(f"over_read_{name}", [counts[name].over_read], unit="ratio", better="lower")
        )
    # Each request but the first of its row group may follow from one hole fewer.
    bound = [
        (count.read - count.needed) / (limit * (base.requests - count.requests))
        for name, count in counts.items()
        if (limit := SIDES[name].options.hole_size_limit) and SIDES[name].options.pre_buffer
    ]
    return [
        *figures,
        Figure.of("over_read_over_its_bound", [max(bound)], unit="ratio", better="lower", goal=1),
    ]


def _filtered(path: Path, job: Job) -> list[Figure]:
    """A filter that statistics decide for most row groups: rows left and bytes read for them."""
    sizes, read, rows = _sizes(path), {}, {}
    with tempfile.TemporaryDirectory() as cache, _environment({"XDG_CACHE_HOME": cache}):
        for name, where in {"all": [], "some": [_FILTER]}.items():
            table = ParquetTable(
                f"counted://{path}", where=where, options=ReadOptions(hole_size_limit=0)
            )
            CountedFiles.taken()
            rows[name] = _read(table, job.columns)
            read[name] = num_bytes(of_columns(CountedFiles.taken(), sizes))
    return [
        Figure.of(
            "rows_kept_by_filter", [rows["some"] / rows["all"]], unit="ratio", better="lower"
        ),
        Figure.of(
            "bytes_with_filter_over_without",
            [read["some"] / read["all"]],
            unit="ratio",
            better="lower",
        ),
    ]


def _over_fragments(path: Path, job: Job, turns: int) -> Figure:
    """Processor time of dataset fragments, pyarrow's other way to set limits, over ours."""
    options = ReadOptions()
    limits = pa.CacheOptions(
        hole_size_limit=options.hole_size_limit, range_size_limit=options.range_size_limit
    )
    form = ds.ParquetFileFormat(
        default_fragment_scan_options=ds.ParquetFragmentScanOptions(
            cache_options=limits, page_checksum_verification=True
        )
    )

    def fragments() -> int:
        # One scan a file that reads nothing ahead: faster than one a row group, on its requests.
        scans = (
            form.make_fragment(str(file), pafs.LocalFileSystem()).to_batches(
                columns=list(job.columns),
                batch_size=2048,
                batch_readahead=0,
                fragment_readahead=0,
                use_threads=False,
            )
            for file in sorted(path.glob("*.parquet"))
        )
        return sum(batch.num_rows for batches in scans for batch in batches)

    def ours() -> int:
        return _read(ParquetTable(path, options=options), job.columns)

    # Of all threads of the process: fragments decode in others.
    pairs = [
        tuple(_timed(read, path, time.process_time) for read in (fragments, ours))
        for _ in range(turns + 1)
    ]
    return Figure.of(
        "fragments_seconds_over_ours",
        [theirs / mine for theirs, mine in pairs[1:]],
        unit="ratio",
        better="higher",
    )


def _timed(read: Callable[[], int], path: Path, clock: Callable[[], float]) -> float:
    """Seconds of a read that has all rows of a table."""
    start = clock()
    rows = read()
    spent = clock() - start
    expected = sum(pq.read_metadata(file).num_rows for file in path.glob("*.parquet"))
    if rows != expected:
        raise RuntimeError(f"{path.name}: {rows} of {expected} rows were read")
    return spent


def _in_store(store: Store, tables: Mapping[str, Path], job: Job, turns: int) -> list[Figure]:
    storage = Storage(endpoint=store.endpoint, region="us-east-1")
    above = next(iter(tables.values())).parent
    same: list[bool] = []
    spent: dict[str, list[float]] = {}
    timed = {
        name: SIDES[name]
        for name in (_PER_COLUMN, "schema_8KiB", "popularity_64KiB", "popularity_256KiB")
    }
    for side in timed.values():
        url = f"s3://{_BUCKET}/{side.order}"
        sizes = _sizes(tables[side.order], above, f"{_BUCKET}/")
        table = ParquetTable(url, storage, options=side.options)
        store.taken()
        _read(table, job.columns)
        found = _count(tables[side.order], [job], of_columns(store.taken(), sizes))
        same.append(found == _count_local(tables, side, [job]))
    for _ in range(turns):
        for name, side in timed.items():
            table = ParquetTable(f"s3://{_BUCKET}/{side.order}", storage, options=side.options)
            read = partial(_read, table, job.columns)
            spent.setdefault(name, []).append(_timed(read, tables[side.order], time.perf_counter))
        spent.setdefault("pyarrow", []).append(_pyarrow(store, tables["schema"], job.columns))
    return [
        _equal(same),
        *(
            Figure.of(
                f"s3_rows_per_second_{name}_over_{base}",
                [one / other for one, other in zip(spent[reference], spent[name], strict=True)],
                unit="ratio",
                better="higher",
            )
            for base, reference in (("per_column", _PER_COLUMN), ("pyarrow", "pyarrow"))
            for name in timed
            if name != _PER_COLUMN
        ),
        Figure.of("s3_seconds_pyarrow", spent["pyarrow"], unit="s", better="lower"),
    ]


def _equal(same: Sequence[bool]) -> Figure:
    """Whether all are: the median of several would say so of most."""
    return Figure.of(
        "s3_counts_equal_local", [float(all(same))], unit="ratio", better="higher", goal=1
    )


def _pyarrow(store: Store, path: Path, columns: Sequence[str]) -> float:
    """pyarrow by itself, its own pre-buffering and as many threads as it likes."""
    scheme, _, host = store.endpoint.partition("://")
    files = pafs.S3FileSystem(scheme=scheme, endpoint_override=host, region="us-east-1")

    def read() -> int:
        rows = 0
        for file in sorted(path.glob("*.parquet")):
            with pq.ParquetFile(
                f"{_BUCKET}/{path.name}/{file.name}",
                filesystem=files,
                pre_buffer=True,
                page_checksum_verification=True,
            ) as opened:
                batches = opened.iter_batches(2048, columns=list(columns), use_threads=True)
                rows += sum(batch.num_rows for batch in batches)
        return rows

    return _timed(read, path, time.perf_counter)


def _detail(counts: Mapping[str, Count]) -> Detail:
    rows: list[list[str | float]] = []
    for name, side in SIDES.items():
        count = counts[name]
        hole = str(side.options.hole_size_limit) if side.options.pre_buffer else "per column"
        rows.append(
            [
                name,
                side.order,
                hole,
                float(count.requests),
                count.read / 1e6,
                count.needed / 1e6,
                100 * count.over_read,
            ]
        )
    headings = ["side", "order", "hole limit", "requests", "MB read", "MB needed", "over-read %"]
    return Detail(TITLE, headings, rows)


@contextmanager
def _credentials() -> Iterator[None]:
    """Some for the store, which takes any."""
    with _environment(
        {
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    ):
        yield


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
