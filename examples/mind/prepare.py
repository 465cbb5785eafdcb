"""Converts behaviors.tsv of the MIND news data set to Parquet, one row per impression.

python prepare.py behaviors.tsv requests.parquet
"""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    {
        "impression_id": pa.int64(),
        "user_id": pa.string(),
        "time": pa.timestamp("s"),
        "history": pa.list_(pa.string()),
        "shown": pa.list_(pa.struct({"news_id": pa.string(), "click": pa.int8()})),
    }
)
ROWS = 20_000


def main(source: Path, target: Path) -> None:
    """Write one row per impression, with the shown news articles as a list of structs."""
    with source.open(encoding="utf-8") as lines, pq.ParquetWriter(target, SCHEMA) as writer:
        rows = []
        for number, line in enumerate(lines, 1):
            rows.append(_row(line, f"{source}, line {number}"))
            if len(rows) == ROWS:
                writer.write_batch(pa.RecordBatch.from_pylist(rows, SCHEMA))
                rows = []
        writer.write_batch(pa.RecordBatch.from_pylist(rows, SCHEMA))


def _row(line: str, where: str) -> dict[str, object]:
    try:
        impression, user, time, history, shown = line.rstrip("\n").split("\t")
        # The test set has no click labels: N123 instead of N123-1.
        pairs = [each.partition("-") for each in shown.split()]
        return {
            "impression_id": int(impression),
            "user_id": user,
            "time": datetime.strptime(time, "%m/%d/%Y %I:%M:%S %p"),
            "history": history.split(),
            "shown": [
                {"news_id": news, "click": int(click) if click else None}
                for news, _, click in pairs
            ],
        }
    except ValueError as error:
        raise SystemExit(f"{where}: not in the format of MIND's behaviors.tsv ({error})") from error


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
