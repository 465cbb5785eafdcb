"""``recd analyze``: what it finds in tables whose duplication is known, and what it refuses."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from ruamel.yaml import YAML

from recd_plugin_recd import papercal
from recd_plugin_recd.analyze.terminal import show
from recd_plugin_recd.papercal_table import TableOptions, write_table
from recd_plugin_recd.tests.analyze.analyze_cases import analyze, run, write
from recd_plugins.config.manager import PluginManager
from recd_plugins.data.list_dict import list_dict_field, to_list_dict
from recd_plugins.interfaces.values.statistics import dedupe_factor

ROWS = 1 << 13


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Path:
    """The same PAPERCAL rows, clustered and interleaved."""
    folder = tmp_path_factory.mktemp("papercal")
    for layout in ("clustered", "interleaved"):
        options = TableOptions(rows=ROWS, layout=layout, files=2, row_group_rows=1024)
        write_table(folder / layout, options)
    return folder


@pytest.fixture(scope="module")
def clustered(tables):
    return analyze(tables / "clustered")


@pytest.fixture(scope="module")
def interleaved(tables):
    return analyze(tables / "interleaved")


def test_a_clustered_table_has_the_duplication_of_the_paper(clustered):
    assert clustered.clustered
    assert clustered.rows == ROWS
    assert clustered.sessions.samples_per_session == pytest.approx(16.5, rel=0.1)
    assert clustered.batches.samples_per_session == pytest.approx(16.5, rel=0.1)
    assert clustered.exact == pytest.approx(0.815, abs=0.02)
    assert clustered.partial == pytest.approx(0.897, abs=0.02)
    assert clustered.factor_as_is == clustered.factor_by_session == pytest.approx(5.4, rel=0.1)
    assert clustered.partial_factor == pytest.approx(9.7, rel=0.1)
    assert clustered.sample.errors == {}
    for each in clustered.features:
        keep = next(one.keep for one in papercal.FEATURES if one.name == each.name)
        assert each.stays == pytest.approx(keep, abs=0.03)
        assert each.form == ("exact" if each.name.startswith("item") else "partial")
        if each.form == "partial":
            assert each.measured_as_is == pytest.approx(each.predicted_as_is, rel=0.1)


def test_an_interleaved_table_is_told_what_clustering_gives(interleaved, clustered):
    """All of it is sampled here: the very rows of the clustered table."""
    assert not interleaved.clustered
    assert interleaved.sample.whole
    assert interleaved.sessions.histogram == clustered.sessions.histogram
    assert interleaved.batches.samples_per_session < 8
    assert interleaved.factor_as_is < 0.8 * interleaved.factor_by_session
    assert interleaved.factor_by_session == pytest.approx(clustered.factor_as_is, rel=0.02)
    for name in ("exact", "partial", "exact_rows", "partial_factor"):
        assert getattr(interleaved, name) == pytest.approx(getattr(clustered, name), rel=1e-9)
    for mine, theirs in zip(interleaved.features, clustered.features, strict=True):
        assert (mine.stays, mine.partial_factor) == (theirs.stays, theirs.partial_factor)
        expected = dedupe_factor(interleaved.batches.samples_per_session, mine.stays)
        assert mine.predicted_as_is == expected
        if mine.form == "partial":
            assert mine.measured_as_is == pytest.approx(expected, rel=0.1)


def test_a_small_sample_is_right_within_its_error(tables, clustered):
    """A tenth of the sessions, from which the standard errors follow."""
    report = analyze(tables / "interleaved", sample_megabytes=15)
    assert not report.sample.whole
    assert report.sample.rows < ROWS / 4
    for name in ("exact", "partial", "partial_factor"):
        error = report.sample.errors[name]
        assert 0 < error < 0.15 * getattr(clustered, name)
        assert abs(getattr(report, name) - getattr(clustered, name)) < 4 * error


def test_groups_are_the_features_that_change_together(clustered):
    groups = [group.features for group in clustered.groups if len(group.features) > 1]
    assert groups == [tuple(f"seq_{g}_{i}" for i in range(3)) for g in range(3)]
    for group in clustered.groups:
        alone = [each for each in clustered.features if each.name in group.features]
        worst = min(each.measured_by_session for each in alone)
        assert group.dedupe_factor >= 0.9 * worst


def test_storage_was_measured(interleaved, tables):
    storage = interleaved.storage
    size = sum(file.stat().st_size for file in (tables / "interleaved").iterdir())
    assert 0.9 * size < storage.stored * ROWS < size
    # Larger row groups than those of the table find more repeats.
    assert 0.6 * storage.stored < storage.as_read < storage.stored
    assert storage.by_session < 0.5 * storage.as_read
    assert storage.by_session_dict < storage.by_session
    assert storage.rows_by_session == ROWS
    assert 4096 <= storage.rows_as_read <= 8192 + 2048


def test_the_converter_section_is_what_the_plugins_take(clustered, tmp_path):
    report = analyze(
        write(tmp_path / "t.parquet", [i // 10 for i in range(200)],
              same=[[i // 10] * 3 for i in range(200)], too=[[i // 10, 1] for i in range(200)],
              moves=[list(range(i, i + 20)) for i in range(200)], new=[[i] for i in range(200)])
    )  # fmt: skip
    assert [each.form for each in report.features] == ["exact", "exact", "partial", "plain"]
    section = YAML(typ="safe").load(report.converter)["converter"]
    assert section == {
        "use": "recd.partial_ikjt",
        "options": {"features": ["moves"], "groups": [["same", "too"]]},
    }
    for text in (report.converter, clustered.converter):
        entry = YAML(typ="safe").load(text)["converter"]
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
    assert (report.partitions, report.sessions.sessions) == (2, 2)
    assert report.clustered
    assert report.sessions.samples_per_session == 10
    assert report.features[0].stays == 1


def test_list_dict_tables_give_the_same(tmp_path):
    lists = pa.array([[i // 4, 5] for i in range(300)], pa.list_(pa.int64()))
    sessions = [i // 12 for i in range(300)]
    expected = analyze(write(tmp_path / "list.parquet", sessions, x=lists))
    fields = [("session_id", pa.int64()), ("ts", pa.int64()), list_dict_field("x")]
    columns = [pa.array(sessions), pa.array(range(300)), to_list_dict(lists)]
    table = pa.Table.from_arrays(columns, schema=pa.schema(fields))
    pq.write_table(table, tmp_path / "dict.parquet", row_group_size=50)
    assert analyze(tmp_path / "dict.parquet").features == expected.features


def test_strings_as_sessions_and_times_of_any_kind(tmp_path):
    table = pa.table(
        {
            "visit": [f"visit-{i % 5}" for i in range(100)],
            "at": pa.array(range(100, 0, -1), pa.timestamp("ms")),
            "x": pa.array([[i % 5] for i in range(100)]),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    report = analyze(tmp_path / "t.parquet", session="visit", timestamp="at")
    assert report.sessions.sessions == 5
    assert report.features[0].stays == 1


def test_a_torn_session_is_named_with_file_and_row(tmp_path):
    write(tmp_path / "t" / "a.parquet", [1] * 60 + [2] * 40, x=[[1]] * 100)
    write(tmp_path / "t" / "b.parquet", [3] * 70 + [2] * 10, x=[[1]] * 80)
    where = f"{tmp_path / 't' / 'b.parquet'}: row 70 (from 0)"
    result = run(tmp_path / "t")
    assert result.exit_code == 0
    assert analyze(tmp_path / "t").first_break == where
    result = run(tmp_path / "t", "--expect-clustered")
    assert result.exit_code == 1
    assert f"{where}: a session goes on here after rows of other sessions" in result.output


def test_json_to_the_terminal_is_all_there_is(tmp_path):
    path = write(tmp_path / "t.parquet", [1] * 50, x=[[1]] * 50)
    result = run(path, "--json", "-", "--batch-size", 10)
    value = json.loads(result.stdout)
    assert (value["rows"], value["sessions"]["count"], value["batches"]["batches"]) == (50, 1, 5)
    assert value["clustered"] is True
    assert value["features"][0]["measured_as_is"] == 10
    assert value["features"][0]["partial_factor"] == 50
    assert run(path, "--json", tmp_path / "r.json", "--batch-size", 10).exit_code == 0
    assert json.loads((tmp_path / "r.json").read_text()) == value


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_the_page_stands_alone(tables, tmp_path):
    path = tmp_path / "report.html"
    result = run(tables / "interleaved", "--html", path, "--sample-mb", 20)
    assert result.exit_code == 0, result.output
    text = path.read_text()
    page = Page(text)
    assert page.tags.count("svg") == 4
    assert page.tags.count("table") == 4
    assert "script" not in page.tags
    assert all(link.startswith("#") for link in page.links)
    assert "@import" not in text
    assert "url(http" not in text
    assert all(name in text for name in ("seq_0_0", "usr_22", "item_7", "recd.partial_ikjt"))


@pytest.mark.parametrize("order", ["clustered", "interleaved"])
def test_a_terminal_of_80_characters_shows_every_name_and_figure(request, order):
    text = StringIO()
    show(Console(file=text, width=80), request.getfixturevalue(order))
    lines = text.getvalue().splitlines()
    names = [
        line.split()[0] for line in lines if line.endswith((" partial ", " exact ", " plain "))
    ]
    assert names == [feature.name for feature in papercal.FEATURES]
    assert not any("…" in line for line in lines)


def test_a_sample_that_is_too_small_advises_nothing(tables, tmp_path):
    page = tmp_path / "r.html"
    table = tables / "interleaved"
    output = run(table, "--sample-mb", 1, "--html", page).output
    assert "What pays is not told, as the sample is too small: into --sample-mb 1 go" in output
    assert "Raise --sample-mb" in output
    for text in (output, page.read_text()):
        assert "recd.kjt" not in text
        assert "repeats enough" not in text
    report = analyze(table, sample_megabytes=1)
    assert report.sample.sessions < 32
    assert (report.converter, report.groups) == (None, ())
    assert {each.form for each in report.features} == {None}


def test_few_sessions_are_enough_where_they_are_all(tmp_path):
    path = write(tmp_path / "t.parquet", [1] * 50, x=[[1]] * 50)
    assert analyze(path, sample_megabytes=1).features[0].form == "exact"
