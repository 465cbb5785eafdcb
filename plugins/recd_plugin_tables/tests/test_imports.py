"""Imports of tables: made once, whole or not at all, and used again while they hold."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pyarrow.parquet as pq
import pytest

from recd_plugin_tables import imported
from recd_plugin_tables.imports import make
from recd_plugin_tables.tests.helpers import COLUMNS, clicks, table
from recd_plugins.errors import DataError


def test_two_that_begin_at_once_make_it_once(path, monkeypatch):
    written, said, waits = [], [], threading.Event()
    write = make.Importer._write

    def slowly(*args: Any) -> Any:
        written.append(args)
        assert waits.wait(10)
        return write(*args)

    def show(line: str, **_: Any) -> None:
        said.append(line)
        waits.set()

    monkeypatch.setattr(make.Importer, "_write", slowly)
    monkeypatch.setattr(imported, "print", show, raising=False)
    # rich has one set of bars a process.
    no_bar = nullcontext(lambda *_: lambda _: None)
    monkeypatch.setattr("recd_plugins.api.progress_bars", lambda: no_bar)
    places = [table(path)._place for _ in range(2)]
    for place in places:
        assert place.find() is None
    with ThreadPoolExecutor() as threads:
        first, second = threads.map(lambda place: place.make(), places)
    assert len(written) == 1
    assert said == [f"{path}: another process imports it, which this one waits for"]
    assert (first.folder, first.note.rows) == (second.folder, second.note.rows)


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


def test_notes_of_imports_are_json(path):
    table(path).prepare()
    (note,) = (path.parent / "imports").glob("*/import.json")
    assert json.loads(note.read_text())["value"]["filled"] == {"price": 12}
