"""Shapes of generated tables: what rm1, rm2 and rm3 have, and that PAPERCAL stays what it was."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from recd_plugin_recd import papercal
from recd_plugin_recd.papercal import TableColumns, shape_of
from recd_plugin_recd.papercal_table import TableOptions, provenance, provenance_of
from recd_plugins.cli import main
from recd_plugins.data.statistics import StatisticsAccumulator
from recd_plugins.interfaces import SessionKeys

MODELS = ("rm1", "rm2", "rm3")


def rows_of(
    shape: TableColumns, rows: int, layout: papercal.Layout = "clustered"
) -> pa.RecordBatch:
    keys = papercal.RowKeys.concat(list(papercal.row_keys(rows, 0, layout)))
    return papercal.make_rows(keys, shape)


def named(shape: TableColumns, prefix: str):
    return [feature for feature in shape.features if feature.name.startswith(prefix)]


def changes(rows: pa.RecordBatch, name: str) -> list[bool]:
    lists = rows.column(name).to_pylist()
    return [one != other for one, other in pairwise(lists)]


def test_papercal_is_what_it_was():
    """Rows that version 1 made before there were other shapes."""
    rows = rows_of(shape_of("papercal"), 200)
    digest = hashlib.sha256()
    for column in rows.columns:
        lists = isinstance(column, pa.ListArray)
        for array in (column.offsets, column.values) if lists else (column,):
            digest.update(np.ascontiguousarray(array).tobytes())
    assert (papercal.VERSION, digest.hexdigest()) == (
        1,
        "bcdee4cb014725cdaaee22c3d761d14b3be91e5d2eaece18c82e14998865b322",
    )
    assert provenance_of(TableOptions(rows=5)) == {
        "version": 1, "rows": 5, "seed": 0, "layout": "clustered", "row_group_rows": 2048,
        "files": 1,
    }  # fmt: skip


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


def test_features_of_a_group_change_together_and_users_one_by_one():
    rows = rows_of(shape_of("rm1", 0.05), 600)
    assert changes(rows, "seq_0_0") == changes(rows, "seq_0_3")
    alone = [changes(rows, name) for name in ("seq_0_0", "seq_4_2", "usr_0", "usr_1", "usr_91")]
    assert all(one != other for i, one in enumerate(alone) for other in alone[:i])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_repeats_as_papercal_does(name):
    shape = shape_of(name, 0.05)
    accumulator = StatisticsAccumulator(shape.schema, SessionKeys("session_id", "ts"))
    for keys in papercal.chunks(papercal.row_keys(1 << 15, 0, "clustered"), 1 << 12):
        accumulator.add(papercal.make_rows(keys, shape))
    found = accumulator.result()
    assert found.total.dedupe_factor == pytest.approx(5.4, rel=0.05)
    for feature in shape.features:
        assert found.features[feature.name].stays == pytest.approx(feature.keep, abs=0.02)
    for item in named(shape, "item_"):
        assert found.features[item.name].dedupe_factor < 1.1


def test_generate_takes_a_shape_and_its_scale(tmp_path):
    arguments = ["generate", str(tmp_path / "t"), "--rows", "40"]
    result = CliRunner().invoke(main, [*arguments, "--shape", "rm3", "--scale", "0.1"])
    assert result.exit_code == 0, result.output
    found = provenance(tmp_path / "t")
    assert found is not None
    assert (found["shape"], found["scale"]) == ("rm3", 0.1)
    refused = CliRunner().invoke(main, [*arguments, "--force", "--scale", "0.1"])
    assert refused.exit_code == 2
    assert "papercal has one size" in refused.output
