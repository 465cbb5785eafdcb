"""From a table that another library wrote to its scores, by four commands and no edit."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import rmtree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML
from tests import forked
from tests.commands import recd
from tests.covering import by_night

from recd_plugin_tables.tests import writers

ROWS = 320
# By day; the others are imported, value by value, by other tests.
TODAY = "Polars NDJSON"


def clicks() -> pa.Table:
    draw = np.random.default_rng(2)
    price = [None if i % 9 == 0 else float(x) for i, x in enumerate(draw.gamma(2, 20, ROWS))]
    return pa.table(
        {
            "event": np.arange(ROWS) + 5_000,
            "visitor": [None if i % 50 == 7 else f"v-{i % 40}" for i in range(ROWS)],
            "tags": [[f"t{i % 3}", f"t{i % 7}"][: i % 3] for i in range(ROWS)],
            "viewed": [[int(j) for j in draw.integers(0, 30, i % 5 + 6)] for i in range(ROWS)],
            "price": price,
            "at": 1_700_000_000 + np.arange(ROWS) * 60,
            "click": (draw.random(ROWS) < 0.3).astype(np.int64),
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", writers.WRITERS)
def test_a_table_of(name: str, cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != TODAY and not by_night():
        pytest.skip("by night; its import is tested by day")
    table = clicks()
    monkeypatch.setattr(writers, "TABLE", table)
    place = writers.WRITERS[name](cwd)

    recd("init", place, "my.yaml")
    columns = YAML(typ="safe").load(Path("my.yaml"))["dataset"]["options"]["columns"]
    assert columns.keys() == set(table.column_names)
    recd("run", "my.yaml")
    recd("evaluate", "my.yaml", "--json", "quality.json")
    assert json.loads(Path("quality.json").read_text())["test"]["num_samples"] == ROWS // 10
    # A table of its own, as the next day's, in place of what the run kept for the test split.
    apart = ["dataset.options.split=null", f"dataset.options.test_path={place}"]
    recd("evaluate", "my.yaml", *apart, "--json", "next.json")
    assert json.loads(Path("next.json").read_text())["test"]["num_samples"] == ROWS
    recd("predict", "my.yaml", place, "-o", "scores.parquet")

    scores = pq.read_table("scores.parquet")
    assert scores["row"].to_pylist() == list(range(ROWS))
    assert scores["event"].to_pylist() == table["event"].to_pylist()
    assert all(0 < score < 1 for score in scores["score"].to_pylist())

    unknown = table.set_column(1, "visitor", [[f"new-{i % 5}" for i in range(ROWS)]])
    pq.write_table(unknown, "unknown.parquet")
    # A process of its own: ranks write to its stderr.
    predict = [forked.RECD, "predict", "my.yaml", "unknown.parquet", "-o", "unknown_scores.parquet"]
    said = forked.run(predict, check=True).stderr
    assert "out-of-vocabulary ids per feature, scored as unknown ids: 'visitor' 5\n" in said

    # On another machine, which has the registry and the checkpoint alone.
    new = Path("new") / Path(place).name
    new.parent.mkdir()
    Path(place).rename(new)
    rmtree(".recd")
    said = recd("predict", "my.yaml", new, "-o", "again.parquet")
    assert "The training data cannot be read" in said
    assert pq.read_table("again.parquet").equals(scores)
    recd("export", "my.yaml", "-o", "exported")
