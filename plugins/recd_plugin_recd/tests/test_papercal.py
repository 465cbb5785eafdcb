"""``recd generate``: its tables have the statistics that the project's goals are set on."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.commands import invoke, recd
from tests.small_disk import small_disk

from recd_plugin_recd import papercal
from recd_plugin_recd.papercal import TableColumns, shape_of
from recd_plugin_recd.papercal_table import (
    Layout,
    TableOptions,
    provenance,
    provenance_of,
    write_table,
)
from recd_plugins.data.statistics import StatisticsAccumulator
from recd_plugins.interfaces import SessionKeys
from recd_plugins.runtime.errors import DataError


def keys_of(rows: int, layout: Layout, seed: int = 0) -> papercal.RowKeys:
    return papercal.RowKeys.concat(list(papercal.row_keys(rows, seed, layout)))


def test_sessions_have_the_mean_and_the_tail_of_the_paper():
    _, lengths = np.unique(keys_of(1 << 20, "clustered").sessions, return_counts=True)
    assert lengths.mean() == pytest.approx(16.5, rel=0.03)
    assert lengths.max() > 1000


@pytest.mark.parametrize("layout", ["clustered", "interleaved", "stream"])
def test_a_row_is_the_same_whatever_the_chunks(layout):
    whole = papercal.make_rows(keys_of(600, layout, 5))
    chunks = papercal.chunks(papercal.row_keys(600, 5, layout), 127)
    parts = [papercal.make_rows(chunk) for chunk in chunks]
    assert [len(part) for part in parts] == [127, 127, 127, 127, 92]
    assert pa.Table.from_batches(parts).combine_chunks() == pa.table(whole)


def named(shape: TableColumns, prefix: str):
    return [feature for feature in shape.features if feature.name.startswith(prefix)]


def test_papercal_is_what_it_was():
    """Rows that version 1 made before there were other shapes."""
    rows = papercal.make_rows(keys_of(200, "clustered"))
    digest = hashlib.sha256()
    for column in rows.columns:
        lists = isinstance(column, pa.ListArray)
        for array in (column.offsets, column.values) if lists else (column,):
            digest.update(np.ascontiguousarray(array).tobytes())
    expected = "bcdee4cb014725cdaaee22c3d761d14b3be91e5d2eaece18c82e14998865b322"
    assert (papercal.VERSION, digest.hexdigest()) == (1, expected)
    made = {"version": 1, "rows": 5, "seed": 0, "layout": "clustered"}
    assert provenance_of(TableOptions(rows=5)) == {**made, "row_group_rows": 2048, "files": 1}


@pytest.mark.parametrize(
    ("name", "groups"), [("rm1", [4, 3, 3, 3, 3]), ("rm2", [6]), ("rm3", [11])]
)
def test_a_model_has_the_groups_of_the_paper_at_any_scale(name, groups):
    for scale in (1.0, 0.01):
        shape = shape_of(name, scale)
        sequences = named(shape, "seq_")
        assert list(Counter(feature.clock for feature in sequences).values()) == groups
        users, items = named(shape, "usr_"), named(shape, "item_")
        assert len(users) + len(items) == 100
        assert len({feature.clock for feature in (*sequences, *users)}) == len(groups) + 92
        assert shape.keep.shape == (len(groups) + 92 + 1,)
        assert len(shape.schema) == 3 + 64 + len(shape.features)


def test_a_model_repeats_as_papercal_does():
    shape = shape_of("rm3", 0.05)
    accumulator = StatisticsAccumulator(shape.schema, SessionKeys("session_id", "ts"))
    for keys in papercal.chunks(papercal.row_keys(1 << 15, 0, "clustered"), 1 << 12):
        accumulator.add(papercal.make_rows(keys, shape))
    found = accumulator.result()
    assert found.total.dedupe_factor == pytest.approx(5.4, rel=0.05)
    for feature in shape.features:
        assert found.features[feature.name].stays == pytest.approx(feature.keep, abs=0.02)
    for item in named(shape, "item_"):
        assert found.features[item.name].dedupe_factor < 1.1


def read(folder: Path):
    return pq.read_table(folder).combine_chunks()


def test_writes_a_table_and_says_how_it_was_made(tmp_path):
    given = {"rows": 500, "seed": 3, "layout": "interleaved", "row_group_rows": 128, "files": 2}
    given |= {"shape": "rm3", "scale": 0.1}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    assert "500 rows" in recd("generate", tmp_path / "t", *options)
    files = sorted((tmp_path / "t").iterdir())
    stored = [pq.ParquetFile(file).metadata for file in files]
    groups = [each.row_group(i).num_rows for each in stored for i in range(each.num_row_groups)]
    assert [file.name for file in files] == ["part-00000.parquet", "part-00001.parquet"]
    assert groups == [128, 128, 128, 116]
    assert provenance(tmp_path / "t") == {"version": papercal.VERSION, **given}
    assert read(tmp_path / "t").schema.equals(shape_of("rm3", 0.1).schema)
    refused = invoke("generate", tmp_path / "u", "--rows", 40, "--scale", 0.1)
    assert "--scale applies only to --shape rm1" in refused.output


def test_force_replaces_a_generated_table_and_nothing_else(tmp_path):
    recd("generate", tmp_path / "t", "--rows", 50)
    assert "exists already" in invoke("generate", tmp_path / "t", "--rows", 60).output
    assert read(tmp_path / "t").num_rows == 50
    recd("generate", tmp_path / "t", "--rows", 60, "--force")
    assert read(tmp_path / "t").num_rows == 60
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    (tmp_path / "t" / "part-00000.parquet").rename(tmp_path / "t" / "thesis.tex")
    refused = invoke("generate", tmp_path / "t", "--rows", 50, "--force")
    assert "--force cannot replace" in refused.output
    assert (tmp_path / "t" / "thesis.tex").exists()


def test_memory_does_not_grow_with_the_table():
    """Rows by time: what waits to be sorted is what is in flight, at most a million rows."""
    longest = max(len(keys) for keys in papercal.row_keys(3_000_000, 0, "interleaved"))
    assert longest < 1_000_000


def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, "256k") as disk:
        with pytest.raises(DataError, match="No space left on device"):
            write_table(disk / "table", TableOptions(rows=20_000))
        assert list(disk.iterdir()) == []
