"""The first commands of README.md run as they are printed, on a table as they describe it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests import forked

README = Path(__file__).parents[3] / "README.md"


@pytest.mark.slow
def test_the_first_commands_run(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    columns = {
        "user": draw.integers(0, 40, 600),
        "item": [f"i{item}" for item in draw.integers(0, 90, 600)],
        "at": pa.array(1_700_000_000 + np.arange(600) * 60).cast(pa.timestamp("s")),
        # Without --label these would be two that it could be.
        "click": draw.integers(0, 2, 600),
        "like": draw.integers(0, 2, 600),
    }
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    new = {name: values[:50] for name, values in columns.items() if name != "click"}
    pq.write_table(pa.table(new), tmp_path / "new.parquet")
    first = README.read_text(encoding="utf-8").split("\n## ")[0].split("| against stock")[0]
    commands = re.findall(r"^    recd (.*?) *#.*$", first, flags=re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        forked.run([forked.RECD, *shlex.split(command)], cwd=tmp_path, check=True)
    assert pq.read_table(tmp_path / "scores.parquet").num_rows == 50
