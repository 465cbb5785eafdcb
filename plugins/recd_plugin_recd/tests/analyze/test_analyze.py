"""``recd analyze``: what it finds in tables whose duplication is known, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML
from tests.commands import invoke, recd

from recd_plugin_recd import papercal
from recd_plugin_recd.analyze import study as study_module
from recd_plugin_recd.analyze.study import SessionCounts, SessionSample, study
from recd_plugin_recd.papercal_table import TableOptions, write_table
from recd_plugin_recd.sessions import open_source
from recd_plugins.config.manager import PluginManager
from recd_plugins.interfaces.data_profile import dedupe_factor

ROWS = 1 << 13


def analyze(path: Path, *, sample_megabytes: int = 1000, **options: Any):
    source = open_source(path)
    return study(source, batch_size=2048, sample_megabytes=sample_megabytes, **options)


def run(*arguments: object):
    # Without a width, which workers of a test run have in their environment.
    return invoke("analyze", *arguments, env={"COLUMNS": None})


def write(path: Path, sessions, **lists: Any) -> Path:
    columns = {name: pa.array(column, pa.list_(pa.int64())) for name, column in lists.items()}
    table = pa.table({"session_id": sessions, "ts": np.arange(len(sessions)), **columns})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=50)
    return path


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("papercal")
    for layout in ("clustered", "interleaved"):
        options = TableOptions(rows=ROWS, layout=layout, files=2, row_group_rows=1024)
        write_table(folder / layout, options)
    return folder


@pytest.fixture(scope="module")
def clustered(tables):
    return analyze(tables / "clustered")


def test_a_clustered_table_has_the_duplication_of_the_paper(clustered):
    assert clustered.sample is None
    assert clustered.rows == ROWS
    assert clustered.sessions.samples_per_session == pytest.approx(16.5, rel=0.1)
    assert clustered.samples_per_batch_session == pytest.approx(16.5, rel=0.1)
    assert clustered.exact == pytest.approx(0.815, abs=0.02)
    assert clustered.partial == pytest.approx(0.897, abs=0.02)
    assert clustered.factor_as_is == clustered.factor_by_session == pytest.approx(5.4, rel=0.1)
    assert clustered.partial_factor == pytest.approx(9.7, rel=0.1)
    for each in clustered.features:
        keep = next(one.keep for one in papercal.FEATURES if one.name == each.name)
        assert each.stays == pytest.approx(keep, abs=0.03)
        assert each.form == ("exact" if each.name.startswith("item") else "partial")
        expected = dedupe_factor(clustered.sessions.samples_per_session, each.stays)
        if each.form == "partial":
            assert each.factor_as_is == pytest.approx(expected, rel=0.1)


def test_an_interleaved_table_is_told_what_clustering_gives(tables, clustered):
    interleaved = analyze(tables / "interleaved")
    assert interleaved.sample.rows == ROWS
    assert interleaved.sessions.torn > 0.5
    assert interleaved.samples_per_batch_session < 8
    assert interleaved.factor_as_is < 0.8 * interleaved.factor_by_session
    assert interleaved.factor_by_session == pytest.approx(clustered.factor_as_is, rel=0.02)
    for name in ("exact", "partial", "partial_factor"):
        assert getattr(interleaved, name) == pytest.approx(getattr(clustered, name), rel=1e-9)
    for mine, theirs in zip(interleaved.features, clustered.features, strict=True):
        assert (mine.stays, mine.partial_factor) == (theirs.stays, theirs.partial_factor)
        expected = dedupe_factor(interleaved.samples_per_batch_session, mine.stays)
        if mine.form == "partial":
            assert mine.factor_as_is == pytest.approx(expected, rel=0.1)


def test_the_converter_section_is_what_the_plugins_take(clustered, tmp_path):
    report = analyze(
        write(tmp_path / "t.parquet", [i // 10 for i in range(200)],
              same=[[i // 10] * 3 for i in range(200)], new=[[i] for i in range(200)],
              moves=[list(range(i, i + 20)) for i in range(200)])
    )  # fmt: skip
    assert [each.form for each in report.features] == ["exact", "plain", "partial"]
    section = YAML(typ="safe").load(report.converter)["converter"]
    options = {"groups": "auto", "features": ["moves"]}
    assert section == {"use": "recd.partial_ikjt", "options": options}
    entry = YAML(typ="safe").load(clustered.converter)["converter"]
    cls = PluginManager().plugins["converter"][entry["use"]].cls
    cls.Options.model_validate(entry["options"])


def test_nothing_to_deduplicate(tmp_path):
    path = write(tmp_path / "t.parquet", range(100), x=[[i] for i in range(100)])
    report = analyze(path)
    assert YAML(typ="safe").load(report.converter) == {"converter": {"use": "recd.kjt"}}
    assert "No feature repeats enough" in run(path).output


def test_sessions_of_partitions_are_counted_apart(tmp_path):
    """One session in two hours: two sessions of ten samples, and no torn one."""
    for hour in ("00", "01"):
        write(tmp_path / "t" / f"dt=2024-01-01/hour={hour}" / "a.parquet", [7] * 10, x=[[1]] * 10)
    report = analyze(tmp_path / "t")
    assert (report.partitions, report.sessions.count) == (2, 2)
    assert report.sample is None
    assert report.sessions.samples_per_session == 10
    assert report.features[0].stays == 1


def test_json_to_the_terminal_is_all_there_is(tmp_path):
    path = write(tmp_path / "t.parquet", [1] * 50, x=[[1]] * 50)
    result = run(path, "--json", "-", "--batch-size", 10)
    value = json.loads(result.stdout)
    assert (value["rows"], value["sessions"]["count"], value["batch_size"]) == (50, 1, 10)
    assert value["sample"] is None
    assert value["features"][0]["factor_as_is"] == 10
    assert value["features"][0]["partial_factor"] == 50
    assert run(path, "--json", tmp_path / "r.json", "--batch-size", 10).exit_code == 0
    assert json.loads((tmp_path / "r.json").read_text()) == value


def test_the_page_stands_alone(tables, tmp_path):
    path = tmp_path / "report.html"
    recd("analyze", tables / "interleaved", "--html", path, "--sample-mb", 20)
    text = path.read_text()
    assert not re.search(r"<script|@import|url\(http|(src|href)=\"[^#]", text)
    assert all(name in text for name in ("seq_0_0", "usr_22", "item_7", "recd.partial_ikjt"))


def test_a_sample_that_is_too_small_advises_nothing(tables, tmp_path):
    page = tmp_path / "r.html"
    table = tables / "interleaved"
    output = run(table, "--sample-mb", 1, "--html", page).output
    assert "The sample is too small for a recommendation" in output
    for text in (output, page.read_text()):
        assert "recd.kjt" not in text
        assert "repeats enough" not in text
    report = analyze(table, sample_megabytes=1)
    assert report.sample.sessions < 32
    assert report.converter is None
    assert {each.form for each in report.features} == {None}


def test_nulls_are_errors_or_become_empty(tmp_path):
    path = tmp_path / "t.parquet"
    lists = pa.array([[1, 2], [1, 2], None, [3]] * 25, pa.list_(pa.int64()))
    sessions = [i // 4 for i in range(100)]
    expected = analyze(write(path, sessions, x=lists.fill_null([]))).features
    write(path, sessions, x=lists)
    result = run(path)
    assert result.exit_code == 1
    assert "t.parquet: row 2 (from 0), column 'x': the list is null" in result.output
    assert analyze(path, nulls="empty").features == expected


def test_the_batch_size_is_that_of_the_registry(tmp_path):
    path, registry = tmp_path / "t.parquet", tmp_path / "registry.yaml"
    columns = {"session_id": [i // 10 for i in range(500)], "ts": range(500)}
    pq.write_table(pa.table({**columns, "label": [0] * 500, "x": [[1]] * 500}), path)
    registry.write_text(
        "version: 1\nconverter: {use: recd.kjt}\ntraining: {batch_size: 50}\n"
        f"dataset: {{use: recd.session_parquet, options: {{path: {path}}}}}\n"
    )
    larger = [registry, "--batch-size", 100]
    for arguments, size in (([registry], 50), (larger, 100), ([path], 4096)):
        report = json.loads(run(*arguments, "--json", "-").stdout)
        assert report["batch_size"] == size


@given(
    st.lists(st.sampled_from([0, 5, 7, 2**64 - 1]), min_size=1, max_size=30),
    st.lists(st.integers(0, 30), max_size=3),
    st.booleans(),
)
def test_counts_sessions_and_those_that_are_torn(sessions, cuts, merged_often):
    counts = SessionCounts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_module, "_MAX_RUNS", 0 if merged_often else 100)
        for part in np.split(np.asarray(sessions, np.uint64), sorted(cuts)):
            counts.add(part)
        counts.end_partition()
    found = counts.result()
    rows = {session: sessions.count(session) for session in sessions}
    runs = [row for row, each in enumerate(sessions) if not row or each != sessions[row - 1]]
    torn = {sessions[row] for row in runs if sessions[row] in sessions[:row]}
    assert found.count == len(rows)
    assert found.samples_per_session == pytest.approx(len(sessions) / len(rows))
    assert found.longest == max(rows.values())
    assert found.torn == pytest.approx(len(torn) / len(rows))


@pytest.mark.parametrize(("size", "max_bytes"), [(7, 10**9), (5000, 10**9), (100, 40_000)])
def test_sessions_are_held_whole_by_session_and_time(size, max_bytes):
    draw = np.random.default_rng(0)
    session, times = draw.integers(0, 300, 5000), draw.integers(0, 100, 5000)
    hashes = draw.integers(0, 1 << 64, 300, np.uint64)[session]
    batch = pa.record_batch({"session": session, "ts": times, "row": np.arange(5000)})
    held = SessionSample(max_bytes)
    for start in range(0, 5000, size):
        held.add(batch.slice(start, size), hashes[start : start + size])
    found, rows = held.by_session("ts")
    places = rows["row"].to_numpy()
    assert (found == hashes[places]).all()
    order = list(zip(found, rows["ts"].to_numpy(), places, strict=True))
    assert order == sorted(order), "by session, time and place"
    assert set(places) == set(np.flatnonzero(np.isin(hashes, found))), "whole sessions"
    assert len(places) == 5000 if max_bytes > 10**6 else 300 < len(places) <= max_bytes / 24
