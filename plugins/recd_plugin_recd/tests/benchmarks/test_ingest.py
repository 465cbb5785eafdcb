"""The ingest benchmark counts what is served; popular columns that are neighbours save reads."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.benchmarks.tiny import tiny

from recd_plugin_recd.benchmarks import ingest
from recd_plugin_recd.benchmarks.ingest_parts import jobs
from recd_plugins.data.buffered_file import ReadOptions
from recd_plugins.testing.counted_files import register


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    register()
    return jobs.write_tables(tmp_path_factory.mktemp("tables"), 2048, jobs.draw_jobs())


def test_tables_have_the_same_rows_and_popular_features_are_neighbours(
    tables: dict[str, Path],
) -> None:
    schema, popularity = (pq.read_table(tables[order]) for order in ("schema", "popularity"))
    assert schema.select(popularity.column_names).equals(popularity)
    drawn = jobs.draw_jobs()
    counts = [sum(name in job.columns for job in drawn) for name in popularity.column_names[17:]]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == len(drawn)


def test_popular_features_take_fewer_requests_for_fewer_bytes(tables: dict[str, Path]) -> None:
    drawn = jobs.draw_jobs()
    alone = ingest._count_local(tables, ingest.SIDES["schema_per_column"], drawn)
    options = ReadOptions(hole_size_limit=2048)
    spread = ingest._count_local(tables, ingest.Side("schema", options), drawn)
    near = ingest._count_local(tables, ingest.Side("popularity", options), drawn)
    groups = sum(pq.read_metadata(file).num_row_groups for file in tables["schema"].iterdir())
    assert alone.requests == len(drawn) * 24 * groups
    assert alone.read == alone.needed
    assert near.requests < spread.requests < alone.requests
    assert near.over_read < spread.over_read
    for count in (spread, near):
        assert count.read - count.needed <= 2048 * (alone.requests - count.requests)


def test_it_measures_every_figure(tmp_path: Path) -> None:
    found = tiny("ingest")
    figures = {figure["figure"]: figure["value"] for figure in found["figures"]}
    assert figures["s3_counts_equal_local"] == 1
    assert 0.1 < figures["rows_kept_by_filter"] < 0.2
    assert 0 < figures["bytes_with_filter_over_without"] < 0.3
    assert figures["over_read_over_its_bound"] <= 1
    (path,) = ingest.plot(json.loads(json.dumps(found)), tmp_path)
    assert "requests for columns" in path.read_text()


def test_one_side_whose_counts_differ_is_seen() -> None:
    assert ingest._equal([True] * 4).value == 1
    assert ingest._equal([True, True, True, False]).value == 0


def test_a_read_that_lacks_rows_is_no_time(
    tables: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (job, *_) = jobs.draw_jobs()
    figure = ingest._over_fragments(tables["schema"], job, 1)
    assert figure.runs == 1
    monkeypatch.setattr(ingest, "_read", lambda *_: 2047)
    with pytest.raises(RuntimeError, match="schema: 2047 of 2048 rows were read"):
        ingest._over_fragments(tables["schema"], job, 1)
