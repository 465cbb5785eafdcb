"""``recd init`` of columns of rarer types: what it writes, ``recd run`` takes."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from click.testing import CliRunner
from ruamel.yaml import YAML

from recd_plugin_tables.sources import open_source
from recd_plugin_tables.start.guess import Wanted, guess
from recd_plugin_tables.start.survey import survey
from recd_plugin_tables.tests.helpers import write
from recd_plugins import load_registry
from recd_plugins.cli import main

ROWS = 60


def uses_of(path: Path, file: Path) -> dict[str, Any]:
    """What it writes of each column, with which the table is imported."""
    done = CliRunner().invoke(main, ["init", str(path), str(file)])
    assert done.exit_code == 0, done.output
    options = YAML(typ="safe").load(file)["dataset"]["options"]
    load_registry(file, settings=[f"dataset.options.cache={file.parent}/imports"]).dataset.prepare()
    columns: dict[str, Any] = options["columns"]
    return columns


def rows(**columns: Any) -> dict[str, Any]:
    return {"user": [row % 7 for row in range(ROWS)], "click": [row % 2 for row in range(ROWS)]} | {
        name: of if isinstance(of, pa.Array) else [of(row) for row in range(ROWS)]
        for name, of in columns.items()
    }


def test_times_of_day_and_durations_are_numbers(tmp_path):
    seconds = [None if row % 10 == 0 else 3600 + row for row in range(ROWS)]
    columns = rows(
        opened=pa.array(seconds, pa.time32("s")),
        watched=pa.array(seconds, pa.duration("s")),
        laps=pa.array([[row, row + 1] for row in range(ROWS)], pa.list_(pa.duration("ms"))),
        never=pa.nulls(ROWS, pa.time64("us")),
    )
    uses = uses_of(write(tmp_path / "t.parquet", columns), tmp_path / "my.yaml")
    number = {"as": "number", "missing": 3630}
    assert (uses["opened"], uses["watched"], uses["laps"]) == (number, number, "numbers")
    assert uses["never"] == "unused"


def test_lists_of_numbers_are_all_of_one_length_or_empty(tmp_path):
    columns = rows(
        ragged=lambda row: [row + 0.5] * (row % 3 + 1),
        gaps=lambda row: [row + 0.5] * 2 * (row > 0),
        ids=lambda row: [float(row)] * (row % 3 + 1),
    )
    path = write(tmp_path / "t.parquet", columns)
    found = {each.name: each for each in guess(survey(open_source(path)), Wanted()).columns}
    assert found["ragged"].roles == ("unused",)
    assert found["ragged"].why == "lists of numbers of different lengths"
    assert found["gaps"].roles == ("numbers",)
    assert found["gaps"].why == "2 numbers a row"
    assert found["ids"].roles == ("ids",)


def test_large_floats_are_numbers(tmp_path):
    large = pa.array([row % 40 * 2.0**22 for row in range(ROWS)], pa.float32())
    exact = pa.array([row % 40 * 2.0**18 for row in range(ROWS)], pa.float32())
    path = write(tmp_path / "t.parquet", rows(large=large, exact=exact, large_id=large))
    found = {each.name: each.roles for each in guess(survey(open_source(path)), Wanted()).columns}
    # An id by its name is refused by the import, where a number would hide the mistake.
    assert found | {"large": ("number",), "exact": ("id",), "large_id": ("id",)} == found


def kinds() -> dict[str, pa.Array]:
    """Columns of one type each, of ``ROWS`` rows with nulls."""
    whole = [None if row % 9 == 4 else row % 13 for row in range(ROWS)]
    texts = [None if each is None else f"t{each}" for each in whole]
    lists = [None if each is None else [each, None, each + 1][: each % 4] for each in whole]
    spans = (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"), pa.date32())
    units = [make(unit) for make in (pa.timestamp, pa.duration) for unit in ("s", "ms", "us", "ns")]
    numbers = [getattr(pa, name)() for name in ("int8", "uint64", "float16", "float32", "float64")]
    decimals = (
        pa.decimal32(9, 2),
        pa.decimal64(18, 2),
        pa.decimal128(38, 4),
        pa.decimal256(76, 30),
    )
    found = {str(kind): pa.array(whole, kind) for kind in (*numbers, *spans, *units)}
    exact = [None if each is None else Decimal(each) for each in whole]
    found |= {str(kind): pa.array(exact, kind) for kind in decimals}
    found["zoned"] = pa.array(whole, pa.timestamp("us", "America/New_York"))
    strings = (pa.string(), pa.large_string(), pa.string_view())
    found |= {str(kind): pa.array(texts, kind) for kind in strings}
    binaries = (pa.binary(), pa.large_binary(), pa.binary_view())
    encoded = [None if text is None else text.encode() for text in texts]
    found |= {str(kind): pa.array(encoded, kind) for kind in binaries}
    found["fixed"] = pa.array([None if e is None else e.ljust(16) for e in encoded], pa.binary(16))
    found["uuid"] = pa.ExtensionArray.from_storage(pa.uuid(), found["fixed"])
    found["json"] = pa.ExtensionArray.from_storage(pa.json_(), found["string"])
    found["bool8"] = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 1] * 30, pa.int8()))
    flat = pa.array(np.arange(4.0 * ROWS) + 0.5)
    tensors = pa.FixedSizeListArray.from_arrays(flat, 4)
    kind = pa.fixed_shape_tensor(pa.float64(), (2, 2))
    found["tensor"] = pa.ExtensionArray.from_storage(kind, tensors)
    found["runs"] = pa.RunEndEncodedArray.from_arrays([20, 40, ROWS], ["a", None, "b"])
    for sort in (pa.list_, pa.large_list, pa.list_view, pa.large_list_view):
        found[f"{sort(pa.int64())}"] = pa.array(lists, sort(pa.int64()))
    found["few"] = pa.array(
        [None if each is None else [each, 3] for each in whole], pa.list_(pa.int64(), 2)
    )
    found["map"] = pa.array([[("a", row)] for row in range(ROWS)], pa.map_(pa.string(), pa.int64()))
    found["struct"] = pa.array([{"a": each} for each in texts])
    found["months"] = pa.array([(1, row, 0) for row in range(ROWS)], pa.month_day_nano_interval())
    for name in ("string", "string_view", "int8", "binary"):
        values = found[name].slice(5, 8)
        indices = pa.array([None if row % 9 == 4 else row % 8 for row in range(ROWS)], pa.uint8())
        found[f"categories of {name}"] = pa.DictionaryArray.from_arrays(indices, values)
    types = pa.array([row % 2 for row in range(ROWS)], pa.int8())
    found["union"] = pa.UnionArray.from_sparse(
        types, [pa.array(range(ROWS)), pa.array(range(ROWS))]
    )
    found["null"] = pa.nulls(ROWS)
    return found


def test_a_table_of_all_types_is_imported(tmp_path):
    names = {f"c{number}": name for number, name in enumerate(kinds())}
    columns = kinds()
    table = pa.table(rows(**{each: columns[name] for each, name in names.items()}))
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=23)
    uses = uses_of(tmp_path / "t.arrow", tmp_path / "my.yaml")
    unused = {names[each] for each, use in uses.items() if use == "unused"}
    assert unused == {"map", "months", "union", "null"}
