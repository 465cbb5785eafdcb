"""``recd analyze``: what it finds in tables whose duplication is known, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from functools import partial
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from rich.console import Console
from ruamel.yaml import YAML

from recd_plugin_recd import papercal
from recd_plugin_recd.analyze import session_counts
from recd_plugin_recd.analyze.study import study
from recd_plugin_recd.analyze.terminal import show
from recd_plugin_recd.papercal_table import TableOptions, write_table
from recd_plugin_recd.source import open_source
from recd_plugins.cli import main
from recd_plugins.data.list_dict import list_dict_field, to_list_dict
from recd_plugins.manager import PluginManager
from recd_plugins.values.statistics import dedupe_factor

ROWS = 1 << 13


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Path:
    """The same PAPERCAL rows, clustered and interleaved."""
    folder = tmp_path_factory.mktemp("papercal")
    for layout in ("clustered", "interleaved"):
        options = TableOptions(rows=ROWS, layout=layout, files=2, row_group_rows=1024)
        write_table(folder / layout, options)
    return folder


def analyze(path: Path, *, batch_size: int = 2048, sample_megabytes: int = 1000, **keys: Any):
    source = open_source(path, **keys)
    return study(source, batch_size=batch_size, sample_megabytes=sample_megabytes)


@pytest.fixture(scope="module")
def clustered(tables):
    return analyze(tables / "clustered")


@pytest.fixture(scope="module")
def interleaved(tables):
    return analyze(tables / "interleaved")


def run(*arguments: object):
    return CliRunner().invoke(main, ["analyze", *map(str, arguments)])


def write(path: Path, sessions, group_rows: int = 50, **lists: Any) -> Path:
    columns = {name: pa.array(column, pa.list_(pa.int64())) for name, column in lists.items()}
    rows = len(sessions)
    table = pa.table({"session_id": sessions, "ts": np.arange(rows), **columns})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group_rows)
    return path


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


def test_storage_of_names_with_dots(tmp_path):
    lists: dict[str, Any] = {"user.seen.list": [[1, 2]] * 50, "user": [[3]] * 50}
    path = write(tmp_path / "t.parquet", [1] * 50, **lists)
    row_group = pq.read_metadata(path).row_group(0)
    sizes = [row_group.column(index).total_compressed_size for index in range(4)]
    assert analyze(path).storage.stored == sum(sizes[2:]) / 50


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


def test_expect_clustered_is_content_with_a_clustered_table(tmp_path):
    path = write(tmp_path / "t.parquet", [1] * 60 + [2] * 40, x=[[1]] * 100)
    assert run(path, "--expect-clustered").exit_code == 0


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


def test_a_pipe_cuts_and_folds_nothing(tmp_path):
    name = "a_feature_" * 30
    features: dict = {name: [[1]] * 50}
    path = write(tmp_path / "t.parquet", [1] * 50, **features)
    (line,) = (line for line in run(path).stdout.splitlines() if line.endswith(" exact "))
    assert line.split()[0] == name


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


@pytest.mark.parametrize("layout", ["list", "list_dict"])
def test_nulls_are_errors_or_become_empty(tmp_path, layout):
    path = tmp_path / "t.parquet"
    lists = pa.array([[1, 2], [1, 2], None, [3]] * 25, pa.list_(pa.int64()))
    sessions = [i // 4 for i in range(100)]
    expected = analyze(write(path, sessions, x=lists.fill_null([]))).features
    fields = [("session_id", pa.int64()), ("ts", pa.int64())]
    fields.append(("x", lists.type))
    if layout == "list_dict":
        fields[-1] = list_dict_field("x").with_nullable(True)
        values = to_list_dict(lists.fill_null([]))
        lists = pc.if_else(lists.is_valid(), values, pa.scalar(None, values.type))
    columns = [pa.array(sessions), pa.array(range(100)), lists]
    pq.write_table(pa.Table.from_arrays(columns, schema=pa.schema(fields)), path)
    result = run(path)
    assert result.exit_code == 1
    assert "t.parquet: row 2 (from 0), column 'x': the list is null" in result.output
    assert "--nulls empty" in result.output
    report = study(open_source(path), batch_size=2048, sample_megabytes=10, nulls="empty")
    assert report.features == expected
    assert run(path, "--nulls", "empty").exit_code == 0


def test_the_batch_size_is_that_of_the_registry(tmp_path):
    path = tmp_path / "t.parquet"
    columns = {"session_id": [i // 10 for i in range(500)], "ts": range(500)}
    pq.write_table(pa.table({**columns, "label": [0] * 500, "x": [[1]] * 500}), path)
    registry = tmp_path / "registry.yaml"
    registry.write_text(
        "version: 1\nconverter: {use: recd.kjt}\ntraining: {batch_size: 50}\n"
        f"dataset: {{use: recd.session_parquet, options: {{path: {path}}}}}\n"
    )
    for arguments, size, says in (
        ([registry], 50, "A batch of 50 (training.batch_size of the registry) has"),
        ([registry, "--batch-size", 100], 100, "A batch of 100 (as --batch-size says) has"),
        ([path], 500, "A batch of 4,096 (--batch-size sets another size) has"),
    ):
        assert says in run(*arguments).output
        report = json.loads(run(*arguments, "--json", "-").stdout)
        assert report["batches"]["rows"] // report["batches"]["batches"] == size


def test_a_time_that_is_the_session(tmp_path):
    path = write(tmp_path / "t.parquet", [1] * 50, ids=[[1]] * 50)
    result = run(path, "--session", "ts", "--timestamp", "ts")
    assert result.exit_code == 0, result.output


def test_names_that_look_like_markup_or_formulas(tmp_path):
    lists: dict[str, Any] = {"<b>[red]$x$": [[1]] * 50}
    path = write(tmp_path / "t.parquet", [1] * 50, **lists)
    result = run(path, "--html", tmp_path / "r.html")
    assert result.exit_code == 0, result.output
    assert "<b>[red]$x$" in result.output
    assert "<b>[red]" not in (tmp_path / "r.html").read_text()


def test_movielens_through_a_registry(movielens, tmp_path):
    """At every event another history: exact deduplication finds little, partial most."""
    registry = tmp_path / "registry.yaml"
    options = f"{{path: {movielens}, refresh: {{per: event}}}}"
    registry.write_text(
        f"version: 1\ndataset: {{use: recd.interactions, options: {options}}}\n"
        "converter: {use: recd.kjt}\n"
    )
    report = analyze(registry, batch_size=1024)
    assert report.clustered
    seen = next(each for each in report.features if each.name == "history_seen")
    assert seen.exact < 0.01
    assert seen.partial > 0.9
    assert seen.measured_as_is < 1.05
    assert seen.partial_factor > 10
    assert seen.form == "partial"
    assert report.storage.stored is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no column session_id; name it with --session; the columns are visit, ts, x"),
        (["--session", "vist"], "no column vist; did you mean visit? name it with --session"),
        (["--session", "visit", "--timestamp", "t"], "name it with --timestamp"),
    ],
)
def test_a_missing_column_is_an_error_that_names_those_there(tmp_path, arguments, message):
    pq.write_table(pa.table({"visit": [1], "ts": [1], "x": [[1]]}), tmp_path / "t.parquet")
    result = run(tmp_path / "t.parquet", *arguments)
    assert result.exit_code == 1
    assert "t.parquet" in result.output
    assert message in result.output


def broken(path: Path) -> Path:
    return write(path, [1] * 500, x=[[i] for i in range(500)])


def test_damaged_files_are_errors_that_name_them(tmp_path):
    (tmp_path / "text.parquet").write_text("hello")
    result = run(tmp_path / "text.parquet")
    assert result.exit_code == 1
    assert "text.parquet: no readable Parquet file" in result.output
    cut = broken(tmp_path / "cut.parquet")
    cut.write_bytes(cut.read_bytes()[:-10])
    assert "cut.parquet: no readable Parquet file" in run(cut).output
    flipped = broken(tmp_path / "flipped.parquet")
    content = bytearray(flipped.read_bytes())
    content[4:60] = b"\xff" * 56
    flipped.write_bytes(content)
    result = run(flipped)
    assert result.exit_code == 1
    assert "flipped.parquet: row group 0 cannot be read" in result.output


def test_other_errors_of_users(tmp_path):
    assert "no such file or folder" in run(tmp_path / "none").output
    empty = write(tmp_path / "empty.parquet", pa.array([], pa.int64()), x=[])
    assert "the table has no rows" in run(empty).output
    bare = write(tmp_path / "bare.parquet", [1])
    assert "no column of lists of integers" in run(bare).output
    null = write(tmp_path / "null.parquet", [1, None], x=[[1], [1]])
    assert "null.parquet: row 1 (from 0), column 'session_id'" in run(null).output
    real = tmp_path / "real.parquet"
    pq.write_table(pa.table({"session_id": [0.5], "ts": [1], "x": [[1]]}), real)
    assert "real.parquet: column session_id is double" in run(real).output
    registry = tmp_path / "registry.yaml"
    registry.write_text("version: 1\n")
    assert "registry.yaml" in run(registry).output
    assert "leave out --session" in run(registry, "--session", "s").output


def test_works_without_torch(tmp_path):
    path = write(tmp_path / "t.parquet", [1] * 50, x=[[1]] * 50)
    code = (
        "import sys\nfrom recd_plugins.cli import main\n"
        f"main(['analyze', {str(path)!r}, '--html', {str(tmp_path / 'r.html')!r}], "
        "standalone_mode=False)\n"
        "assert not {'torch', 'torchrec', 'fbgemm_gpu'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_memory_does_not_grow_with_the_table(tmp_path, monkeypatch):
    """Ten times the rows and sessions with room for few: as much is held."""
    few = partial(session_counts.SessionCounts, max_sessions=1000)
    monkeypatch.setattr(session_counts, "_MAX_WAITING", 10_000)
    monkeypatch.setattr("recd_plugin_recd.analyze.study.SessionCounts", few)
    peaks = []
    for rows in (100_000, 1_000_000):
        sessions = np.random.default_rng(0).integers(0, rows // 3, rows)
        lists = pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32), sessions // 7)
        path = write(tmp_path / f"{rows}.parquet", sessions, group_rows=20_000, x=lists)
        source = open_source(path)
        del sessions, lists
        arrow_before, arrow = pa.total_allocated_bytes(), 0

        def progress(_rows: int) -> None:
            nonlocal arrow
            arrow = max(arrow, pa.total_allocated_bytes())

        tracemalloc.start()
        report = study(source, batch_size=1024, sample_megabytes=2, progress=progress)
        peaks.append((arrow - arrow_before, tracemalloc.get_traced_memory()[1]))
        tracemalloc.stop()
        assert report.sessions.sessions == pytest.approx(0.95 * rows / 3, rel=0.15)
        assert report.sessions.counted <= 1000
    (arrow_small, python_small), (arrow_large, python_large) = peaks
    assert arrow_large < 2 * arrow_small
    assert python_large < 2 * python_small
