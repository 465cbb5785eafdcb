"""A table as jobs of Spark leave it, in partitions and types of its own, from init to scores."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from recd_plugin_tables.tests.test_whole_way import recd
from recd_plugin_tables.tests.writers import spark_session

ROWS = 240
COLUMNS = (
    "event long, visitor string, at timestamp, price decimal(12, 2), vip boolean, born date, "
    "viewed array<long>, geo struct<country: string, lat: float>, "
    "shown array<struct<item: long, clicked: boolean>>, attributes map<string, string>, dt date"
)


def requests() -> list[tuple[Any, ...]]:
    draw = np.random.default_rng(2)
    rows = []
    for i in range(ROWS):
        at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=18 * i)
        price = None if i % 9 == 0 else Decimal(int(draw.integers(100, 9999))) / 100
        viewed = None if i % 11 == 3 else [*draw.integers(0, 30, i % 5).tolist(), None][: i % 5 + 1]
        geo = None if i % 17 == 4 else (f"c{i % 4}", float(draw.random()))
        shown = [(int(n), bool(draw.random() < 0.3)) for n in draw.integers(0, 40, i % 3 + 2)]
        visitor = None if i % 50 == 7 else f"v-{i % 40}"
        born = date(1990, 1, 1 + i % 28)
        row = (5_000 + i, visitor, at, price, i % 2 == 0, born, viewed, geo, shown)
        rows.append((*row, {"a": "b"}, at.date()))
    return rows


def scores_of(path: str) -> dict[tuple[int, int], float]:
    found = pq.read_table(path).to_pylist()
    return {(row["event"], row["candidate"]): row["score"] for row in found}


def test_partitions_of_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with spark_session() as spark:
        frame = spark.createDataFrame(requests(), COLUMNS)
        for times in ("INT96", "TIMESTAMP_MICROS"):
            spark.conf.set("spark.sql.parquet.outputTimestampType", times)
            frame.write.partitionBy("dt").parquet(str(tmp_path / times))

    recd("init", "INT96", "my.yaml")
    options = YAML(typ="safe").load(Path("my.yaml"))["dataset"]["options"]
    leaves = {"geo.country", "geo.lat", "shown.item", "shown.clicked"}
    own = {"event", "visitor", "at", "price", "vip", "born", "viewed", "attributes", "dt"}
    assert options["columns"].keys() == own | leaves
    assert options["explode"] == ["shown"]
    assert options["columns"]["shown.clicked"] == "label"
    assert options["columns"]["dt"] == {"as": "id", "by": "weekday"}
    recd("run", "my.yaml")
    recd("evaluate", "my.yaml", "--json", "quality.json")
    assert json.loads(Path("quality.json").read_text())["test"]["num_samples"] > ROWS / 10

    recd("predict", "my.yaml", "INT96", "-o", "scores.parquet")
    scores = scores_of("scores.parquet")
    assert scores.keys() == {(5_000 + i, n) for i in range(ROWS) for n in range(i % 3 + 2)}
    assert all(0 < score < 1 for score in scores.values())
    recd("predict", "my.yaml", "TIMESTAMP_MICROS", "-o", "others.parquet")
    assert scores_of("others.parquet") == scores
    recd("predict", "my.yaml", "INT96/dt=2026-01-02", "-o", "day.parquet")
    day = {key: score for key, score in scores.items() if 5_080 <= key[0] < 5_160}
    assert scores_of("day.parquet") == day
