"""``recd cluster`` against the sorts of DuckDB and Polars, on the same table and cores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recd_plugin_recd.papercal_table import TableOptions, write_table
from recd_plugins.testing.benchmark import Figure, Size

SUMMARY = "time and memory of sorting PAPERCAL by session, over DuckDB's and Polars' own sort"

_THREADS = 2
_ROW_GROUP_ROWS = 4096
#: PAPERCAL in Arrow's memory: 12.9 KB a row.
_ROWS: dict[Size, int] = {"tiny": 8192, "small": 16_384, "reference": 155_648}
_RUNS: dict[Size, int] = {"tiny": 1, "small": 3, "reference": 5}
#: The default at reference, of which less than half of what the others take is used.
_OURS: dict[Size, str] = {"tiny": "900MB", "small": "900MB", "reference": "2GB"}
#: The more DuckDB has, the faster it is, up to about twice the table. With less than the least it
#: runs out of memory at times: DuckDB 2.0.1 did once with 2 GB, and not in six runs after that.
_DUCKDB: dict[Size, str] = {"tiny": "1GB", "small": "1GB", "reference": "4GB"}
_DUCKDB_LEAST: dict[Size, str] = {"tiny": "500MB", "small": "500MB", "reference": "2500MB"}

# What stands above the empty line is not timed.
_EMBEDDED = """
import recd_plugin_recd.cluster.job
from recd_plugin_recd.cluster.command import cluster

cluster.main([source, target, "--memory", memory, "--row-group-rows", str(rows)],
             standalone_mode=False)
"""
_DUCK = """
import duckdb

settings = {"threads": threads, "memory_limit": memory, "temp_directory": target + ".tmp",
            "preserve_insertion_order": False}
duckdb.connect(config=settings).execute(
    f"COPY (FROM read_parquet('{source}/*.parquet') ORDER BY session_id, ts) TO '{target}' "
    f"(FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 3, ROW_GROUP_SIZE {rows})"
)
"""
_POLARS = """
import os
os.environ["POLARS_MAX_THREADS"] = str(threads)
import polars

polars.scan_parquet(source + "/*.parquet").sort("session_id", "ts").sink_parquet(
    target, compression="zstd", compression_level=3, row_group_size=rows, engine="streaming"
)
"""
_CHILD = """
import json, os, sys, time
source, target, memory, rows, threads = json.loads(sys.argv[1])
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
{imports}
start = time.perf_counter()
{work}
seconds = time.perf_counter() - start
with open("/proc/self/status") as lines:
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
print(json.dumps([seconds, peak]))
"""


@dataclass(frozen=True)
class _Run:
    """Seconds, without those of imports, and the peak memory of the whole process in bytes."""

    seconds: float
    peak: int


def workload(size: Size) -> str:
    """The input in words."""
    return (
        f"PAPERCAL interleaved, {_ROWS[size]} rows, {_ROWS[size] * 12_900 / 1e9:.1f} GB in memory, "
        f"{_THREADS} threads, zstd-3, row groups of {_ROW_GROUP_ROWS} rows, a process for each run"
    )


def run(size: Size) -> list[Figure]:
    """Measure; engines take turns."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        write_table(source, TableOptions(rows=_ROWS[size], layout="interleaved", files=2))
        engines = {
            "recd": (_EMBEDDED, _OURS[size]),
            "duckdb": (_DUCK, _DUCKDB[size]),
            "duckdb_least": (_DUCK, _DUCKDB_LEAST[size]),
            "polars": (_POLARS, ""),
        }
        runs: dict[str, list[_Run]] = {name: [] for name in engines}
        warmups = int(size != "tiny")  # for compiled code and the page cache
        for turn in range(warmups + _RUNS[size]):
            for name, (body, memory) in engines.items():
                measured = _measure(body, source, Path(folder) / "target", memory)
                if turn >= warmups:
                    runs[name].append(measured)
    return [
        _throughput("throughput_over_duckdb", runs["duckdb"], runs["recd"], 1.0),
        _throughput("throughput_over_polars", runs["polars"], runs["recd"], 1.0),
        _peak("peak_memory_over_duckdb", runs["recd"], runs["duckdb"], 0.5),
        _throughput("throughput_over_duckdb_least", runs["duckdb_least"], runs["recd"], None),
        _peak("peak_memory_over_duckdb_least", runs["recd"], runs["duckdb_least"], None),
        _peak("peak_memory_over_polars", runs["recd"], runs["polars"], None),
        *(
            Figure.of(f"{name}_seconds", [one.seconds for one in each], unit="s", better="lower")
            for name, each in runs.items()
        ),
        Figure.of(
            "recd_peak_memory", [one.peak / 1e6 for one in runs["recd"]], unit="MB", better="lower"
        ),
    ]


def _measure(body: str, source: Path, target: Path, memory: str) -> _Run:
    imports, _, work = body.partition("\n\n")
    arguments = json.dumps([str(source), str(target), memory, _ROW_GROUP_ROWS, _THREADS])
    environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    expected = _num_rows(source)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _CHILD.format(imports=imports, work=work), arguments],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        if _num_rows(target) != expected:
            raise RuntimeError(f"{_num_rows(target)} of {expected} rows were written by {body}")
        if not _is_sorted(target):
            raise RuntimeError(f"rows are not by session and time, written by {body}")
    except subprocess.CalledProcessError as error:
        raise RuntimeError(error.stderr[-2000:]) from error
    finally:
        for left in target.parent.glob(target.name + "*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    seconds, peak = json.loads(done.stdout.splitlines()[-1])
    return _Run(seconds, peak)


def _num_rows(table: Path) -> int:
    return sum(pq.read_metadata(file).num_rows for file in _files(table))


def _is_sorted(table: Path) -> bool:
    keys = ["session_id", "ts"]
    rows = pa.concat_tables(pq.read_table(file, columns=keys) for file in _files(table))
    sessions, times = (rows[name].to_numpy() for name in keys)
    later = sessions[1:] > sessions[:-1]
    return bool((later | (sessions[1:] == sessions[:-1]) & (times[1:] >= times[:-1])).all())


def _files(table: Path) -> list[Path]:
    """A file, or the files of a folder."""
    return sorted(table.glob("*.parquet")) if table.is_dir() else [table]


def _throughput(figure: str, theirs: list[_Run], ours: list[_Run], goal: float | None) -> Figure:
    ratios = [their.seconds / our.seconds for their, our in zip(theirs, ours, strict=True)]
    return Figure.of(figure, ratios, unit="ratio", better="higher", goal=goal)


def _peak(figure: str, ours: list[_Run], theirs: list[_Run], goal: float | None) -> Figure:
    ratios = [our.peak / their.peak for our, their in zip(ours, theirs, strict=True)]
    return Figure.of(figure, ratios, unit="ratio", better="lower", goal=goal)
