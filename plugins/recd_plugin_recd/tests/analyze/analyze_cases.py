"""Tables that ``recd analyze`` is tried on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner

from recd_plugin_recd.analyze.study import study
from recd_plugin_recd.source import open_source
from recd_plugins.cli import main


def analyze(path: Path, *, batch_size: int = 2048, sample_megabytes: int = 1000, **keys: Any):
    source = open_source(path, **keys)
    return study(source, batch_size=batch_size, sample_megabytes=sample_megabytes)


def run(*arguments: object):
    # Without a width, which workers of a test run have in their environment.
    return CliRunner(env={"COLUMNS": None}).invoke(main, ["analyze", *map(str, arguments)])


def write(path: Path, sessions, group_rows: int = 50, **lists: Any) -> Path:
    columns = {name: pa.array(column, pa.list_(pa.int64())) for name, column in lists.items()}
    rows = len(sessions)
    table = pa.table({"session_id": sessions, "ts": np.arange(rows), **columns})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group_rows)
    return path
