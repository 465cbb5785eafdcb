"""A table as several jobs read it, each some of its features: the popular ones most of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recd_plugin_recd.layout.popularity import read_popularity
from recd_plugin_recd.papercal import FEATURES, NUM_DENSE, SCHEMA, chunks, make_rows, row_keys
from recd_plugins.api import SessionKeys
from recd_plugins.api.columns import TableWriter
from recd_plugins.testing.benchmark import Size

NUM_FILES = 4
NUM_HOURS = 24
NUM_JOBS = 4
#: Features that a job reads, of the 40 of the table.
NUM_FEATURES = 10
_ROW_GROUPS = 4
_HOUR = pa.field("hour", pa.int8(), nullable=False)


def num_rows(size: Size) -> int:
    """Rows of a table, in 16 row groups."""
    return {"tiny": 512, "small": 16_384, "reference": 65_536}[size]


@dataclass(frozen=True)
class Job:
    """What one job reads: its columns, in the order of the schema."""

    columns: tuple[str, ...]

    def needed(self, folder: Path) -> int:
        """Bytes of its columns in the files of a table."""
        total = 0
        for file in sorted(folder.glob("*.parquet")):
            metadata = pq.read_metadata(file)
            for group in range(metadata.num_row_groups):
                row_group = metadata.row_group(group)
                chunks_of = (row_group.column(index) for index in range(row_group.num_columns))
                total += sum(
                    chunk.total_compressed_size
                    for chunk in chunks_of
                    if chunk.path_in_schema.partition(".")[0] in self.columns
                )
        return total


def draw_jobs() -> list[Job]:
    """Label, dense features and features drawn by their popularity, which falls as 1 / rank.

    Which features are popular has nothing to do with where the schema has them.
    """
    rng = np.random.default_rng(7)
    names = [feature.name for feature in FEATURES]
    ranked = rng.permutation(names)
    shares = 1 / np.arange(1, len(names) + 1) ** 1.5
    dense = [f"dense_{index}" for index in range(NUM_DENSE)]
    jobs = []
    for _ in range(NUM_JOBS):
        chosen = set(rng.choice(ranked, NUM_FEATURES, replace=False, p=shares / shares.sum()))
        jobs.append(Job(("label", *dense, *(name for name in names if name in chosen))))
    return jobs


def write_tables(folder: Path, rows: int, jobs: list[Job]) -> dict[str, Path]:
    """The same rows with columns as the schema has them, and by the popularity among ``jobs``."""
    counts = {
        feature.name: sum(feature.name in job.columns for job in jobs) for feature in FEATURES
    }
    note = folder / "popularity.json"
    note.write_text(json.dumps(counts), encoding="utf-8")
    popularity = read_popularity(note, list(counts))
    schema = SCHEMA.append(_HOUR)
    keys = chunks(row_keys(rows, seed=0, layout="clustered"), rows // NUM_FILES)
    tables = {"schema": folder / "schema", "popularity": folder / "popularity"}
    first_row = 0
    for number, block in enumerate(keys):
        data = make_rows(block)
        hours = np.arange(first_row, first_row + len(block)) * NUM_HOURS // rows
        batch = pa.record_batch([*data.columns, pa.array(hours, pa.int8())], schema=schema)
        first_row += len(block)
        for order, path in tables.items():
            with TableWriter(
                path / f"part-{number:05d}.parquet",
                schema,
                keys=SessionKeys("session_id", "ts"),
                row_group_rows=rows // NUM_FILES // _ROW_GROUPS,
                popularity=popularity if order == "popularity" else (),
            ) as writer:
                writer.write(batch)
    return tables
