"""Imports of tables: made once, whole or not at all, and used again while they hold."""

from __future__ import annotations

import os
import time

import pyarrow.parquet as pq
import pytest

from recd_plugin_tables.tests.helpers import COLUMNS, clicks, table
from recd_plugins.runtime.errors import DataError


def test_an_import_is_used_again_until_table_or_options_change(path, capfd):
    def imports() -> int:
        return len(list((path.parent / "imports").iterdir()))

    table(path).prepare()
    assert "60 rows: 60 for training" in capfd.readouterr().err
    table(path, prefetch=0).prepare()
    assert capfd.readouterr().err == ""
    assert imports() == 1
    table(path, order="stored").prepare()
    assert imports() == 2
    first = table(path)
    first.prepare()
    os.utime(path, ns=(time.time_ns(), time.time_ns() + 10**9))
    again = table(path)
    again.prepare()
    assert imports() == 3
    assert again.identity() == first.identity(), "the rows are what they were"
    pq.write_table(clicks(61), path)
    other = table(path)
    other.prepare()
    assert other.identity() != first.identity()


def test_a_broken_import_leaves_nothing(path):
    with pytest.raises(
        DataError, match=r"clicks.parquet: row 0 \(from 0\), column 'price': the va"
    ):
        table(path, columns={**COLUMNS, "price": "number"}).prepare()
    assert not list((path.parent / "imports").iterdir())
