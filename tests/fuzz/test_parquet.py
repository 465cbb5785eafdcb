"""Parquet tables whose bytes, files, types, columns or values are not as they should be."""

from __future__ import annotations

import decimal
import operator as ops
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from tests.fuzz import tables
from tests.fuzz.cases import Case, fuzz, wrong
from tests.fuzz.tables import FILES, READ, ROWS, rows, table, use, with_column, write, write_two

COMPARE = {"==": ops.eq, "!=": ops.ne, "<": ops.lt, "<=": ops.le, ">": ops.gt, ">=": ops.ge}
#: Types that a column of ids, of lists of ids or of numbers may have got elsewhere.
SCALARS = (
    *(pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint32(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64(), pa.decimal128(20, 0)),
    *(pa.string(), pa.large_string(), pa.binary(), pa.bool_(), pa.null()),
    *(pa.timestamp("us"), pa.timestamp("ns", "UTC"), pa.date32(), pa.duration("s")),
    *(pa.dictionary(pa.int32(), pa.int64()), pa.dictionary(pa.int8(), pa.string())),
    pa.struct([("value", pa.int64())]),
)


@fuzz
def test_damaged_bytes(case: Case) -> None:
    """Damage the bytes of one file: the rows read are those that were there, or it is refused.

    Footers have no checksum: one that says something else and is well-formed may be taken, if
    another reader of Parquet reads the same.
    """
    import polars

    write_two()
    path = Path(case.one_of(FILES, "file"))
    data = path.read_bytes()
    path.write_bytes(case.damaged(data))
    meant: list[dict[str, Any]] = rows()
    if path.read_bytes() != data:
        try:
            read = (polars.read_parquet(each, use_statistics=False) for each in map(Path, FILES))
            meant = [dict(row) for each in read for row in each.to_dicts()]
        except BaseException as error:  # polars panics
            if isinstance(error, KeyboardInterrupt):
                raise
    use(case, meant)


@fuzz
def test_hidden_files_and_odd_names(case: Case) -> None:
    write_two()
    for name in ("_SUCCESS", ".a.parquet", "_b.parquet", "a.parquet.crc", "x.csv", ".t/c.parquet"):
        path = Path("table", name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    names = ["a b", "50%", "%41", "a\nb", "a'b", 'a"b', "ä", "日本", "a=b", "-x", "*", "[a]"]
    name = case.one_of([*names, "a\\b", "x" * 200, "a\tb", "#", "?q", "a;b", "{a}"], "name")
    if case.flag("a folder"):
        Path("table", name).mkdir()
        name += "/b"
    os.rename(FILES[1], f"table/{name}.parquet")
    use(case, tables.rows_in("table"))


def as_type(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return as_type(values, kind.value_type).dictionary_encode().cast(kind)
    if pa.types.is_null(kind):
        return pa.nulls(len(values))
    if pa.types.is_temporal(kind):
        width = pa.int32() if kind.bit_width == 32 else pa.int64()
        return pa.array([int(value) for value in values], width).cast(kind)
    convert: Callable[[Any], Any] = int
    if pa.types.is_struct(kind):
        convert = lambda value: {"value": int(value)}  # noqa: E731
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        convert = str
    elif pa.types.is_binary(kind):
        convert = lambda value: int(value).to_bytes(8, "little")  # noqa: E731
    elif pa.types.is_decimal(kind):
        convert = lambda value: decimal.Decimal(int(value))  # noqa: E731
    elif pa.types.is_boolean(kind):
        convert = bool
    elif pa.types.is_floating(kind):
        convert = kind.to_pandas_dtype()
    return pa.array([convert(value) for value in values], kind)


def use_as_it_is(case: Case, expected: list[dict[str, Any]]) -> None:
    """Training takes rows that mean ``expected``; all else keeps the values as they come."""
    which = case.one_of(["run", "cluster", "log"], "use")
    try:
        found = tables.rows_in("table")
    except pa.ArrowException:
        tables.USES[which](None)
        return
    if which != "run":
        tables.USES[which](found)
        return
    try:
        same = list(map(tables.plain, found)) == list(map(tables.plain, expected))
    except (TypeError, ValueError):
        same = False
    tables.trained(expected if same else None)


@fuzz
def test_other_types(case: Case) -> None:
    name = case.one_of(["session_id", "ts", "label", "price"], "column")
    kind = case.one_of([kind for kind in SCALARS if kind != tables.SCHEMA.field(name).type], "type")
    if case.flag("in one file"):
        write_two()
        data = table().slice(0, ROWS // 2)
        write(FILES[0], with_column(data, name, as_type(data[name].to_pylist(), kind)))
        use_as_it_is(case, rows())
        return
    data = table()
    if name == "price":  # whole numbers, which every type holds
        values = [float(at % 2) for at in range(ROWS)]
        data = with_column(data, name, pa.array(values, pa.float32()))
    write(FILES[0], with_column(data, name, as_type(data[name].to_pylist(), kind)))
    if name == "price" and not pa.types.is_floating(kind):
        # Only floats are dense features unless an option says so: fewer features, another meaning.
        use(case, tables.rows_in("table"), "cluster", "log")
    else:
        use_as_it_is(case, data.to_pylist())


@fuzz
def test_columns_of_one_file(case: Case) -> None:
    write_two()
    data = table().slice(ROWS // 2)
    which = case.one_of(["missing", "more", "order"], "what")
    if which == "missing":
        data = data.drop_columns(case.one_of(data.column_names, "column"))
    elif which == "more":
        data = data.append_column("extra", pa.array(range(len(data))))
    else:
        data = data.select(case.draw(st.permutations(tables.SCHEMA.names), "order"))
    write(FILES[1], data)
    use(case, rows() if which == "order" else None)


@fuzz
def test_other_encodings(case: Case) -> None:
    write_two()
    options = {
        "compression": case.one_of(["none", "snappy", "gzip", "brotli", "zstd", "lz4"]),
        "data_page_version": case.one_of(["1.0", "2.0"]),
        "version": case.one_of(["1.0", "2.4", "2.6"]),
        "use_dictionary": case.one_of([True, False, ["items.list.element"]]),
        "data_page_size": case.one_of([1, 64, 1 << 20]),
        "write_batch_size": case.one_of([1, 7, 1024]),
        "row_group_size": case.one_of([1, 5, 24, 1000]),
    }
    flags = "write_statistics write_page_index use_compliant_nested_type store_schema"
    options |= {name: case.flag(name) for name in [*flags.split(), "write_page_checksum"]}
    for at, path in enumerate(FILES):
        write(path, table().slice(at * ROWS // 2, ROWS // 2), **options)
    use(case, rows())


@fuzz
def test_list_dict_that_is_none(case: Case) -> None:
    kind = case.one_of([None, pa.binary(8), pa.string(), pa.large_binary(), tables.LISTS], "type")
    good = [struct.pack(f"<{len(each)}q", *each) for each in table()["items"].to_pylist()]
    values: list[Any] = [{pa.string(): "x" * 8, tables.LISTS: [0]}.get(kind, bytes(8))] * ROWS
    if kind is None:
        at = case.number(0, READ - 1, "row")
        good[at] = good[at] + case.draw(st.binary(min_size=1, max_size=7), "bytes")
        kind, values = pa.binary(), good
    field = pa.field("items", kind, False, {"recd.layout": "list_dict"})
    data = with_column(table(), "items", pa.array(values, kind))
    data = data.cast(data.schema.set(data.schema.get_field_index("items"), field))
    write(FILES[0], data, store_schema=True)
    taken = pa.types.is_list(kind) or pa.types.is_large_binary(kind)
    use(case, [{**row, "items": [0]} for row in rows()] if taken else None)


@fuzz
def test_a_filter_with_and_without_statistics(case: Case) -> None:
    statistics = case.one_of([True, False, ["ts"]])
    write(FILES[0], table(), write_statistics=statistics, row_group_size=case.one_of([1, 5, 48]))
    column = case.one_of(["ts", "label", "price", "session_id"], "column")
    value = case.one_of(sorted({row[column] for row in rows()}), "value")
    op = case.one_of(sorted(COMPARE), "op")
    meant = [row for row in rows() if COMPARE[op](row[column], value)]
    tables.write_registry(where=[[column, op, value]])
    found = tables.losses()
    if isinstance(found, list):
        if found != tables.losses_of(meant):
            wrong(f"losses {found}")
    elif len(meant) >= tables.BATCH:
        wrong(f"{len(meant)} rows are left, yet: {found.output}")
    else:
        found.refused("table")
