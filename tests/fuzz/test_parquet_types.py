"""Parquet tables of other types, columns and orders."""

from __future__ import annotations

import decimal
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from tests.fuzz import tables
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Outcome
from tests.fuzz.tables import ROWS, rows, table, use, write, write_two

KINDS = Kinds("parquet types")
FILES = ("table/a.parquet", "table/b.parquet")

#: Types that a column of ids, of lists of ids or of numbers may have got elsewhere.
SCALARS = (
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.uint8(),
    pa.uint32(),
    pa.uint64(),
    pa.float16(),
    pa.float32(),
    pa.float64(),
    pa.decimal128(20, 0),
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.bool_(),
    pa.timestamp("us"),
    pa.timestamp("ns", "UTC"),
    pa.date32(),
    pa.duration("s"),
    pa.dictionary(pa.int32(), pa.int64()),
    pa.dictionary(pa.int8(), pa.string()),
    pa.struct([("value", pa.int64())]),
    pa.null(),
)


def converted(values: list[Any], kind: pa.DataType) -> pa.Array:
    """The numbers in another type, as a program that meant well would write them."""
    if pa.types.is_dictionary(kind):
        return converted(values, kind.value_type).dictionary_encode().cast(kind)
    if pa.types.is_null(kind):
        return pa.nulls(len(values))
    if pa.types.is_struct(kind):
        return pa.array([{"value": int(value)} for value in values], kind)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pa.array([str(value) for value in values], kind)
    if pa.types.is_binary(kind):
        return pa.array([int(value).to_bytes(8, "little") for value in values], kind)
    if pa.types.is_decimal(kind):
        return pa.array([decimal.Decimal(int(value)) for value in values], kind)
    if pa.types.is_boolean(kind):
        return pa.array([bool(value) for value in values], kind)
    if pa.types.is_temporal(kind):
        width = pa.int32() if kind.bit_width == 32 else pa.int64()
        return pa.array([int(value) for value in values], width).cast(kind)
    return pa.array([kind.to_pandas_dtype()(value) for value in values], kind)


def lists_of(lists: list[list[int]], case: Case) -> pa.Array:
    """Lists of ids in another type of lists, items, or both."""
    item = case.one_of([kind for kind in SCALARS if not pa.types.is_nested(kind)], "items")
    flat = converted([value for each in lists for value in each], item)
    offsets = [0]
    for each in lists:
        offsets.append(offsets[-1] + len(each))
    which = case.one_of(["list", "large", "fixed", "struct", "nested", "map"], "lists")
    if which == "large":
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), flat)
    if which == "fixed":
        padded = converted([[*each, 0, 0, 0][at] for each in lists for at in range(3)], item)
        return pa.FixedSizeListArray.from_arrays(padded, 3)
    plain = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat)
    if which == "struct":
        return pa.StructArray.from_arrays([plain], ["ids"])
    if which == "nested":
        return pa.ListArray.from_arrays(pa.array(range(len(lists) + 1), pa.int32()), plain)
    if which == "map":
        keys = pa.array([str(at) for at in range(len(flat))])
        return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), keys, flat)
    return plain


def with_column(data: pa.Table, name: str, column: Any) -> pa.Table:
    return data.set_column(data.column_names.index(name), name, column)


def use_as_it_is(case: Case, expected: list[dict[str, Any]]) -> Outcome:
    """Training takes what means ``expected``; all else keeps the values as they come."""
    which = case.one_of(["run", "cluster", "log"], "use")
    try:
        found = tables.rows_in("table")
    except pa.ArrowException:
        return tables.USES[which](None)
    if which != "run":
        return tables.USES[which](found)
    try:
        meant = [tables.plain(row) for row in found]
    except (TypeError, ValueError):
        meant = []
    return tables.run(expected if meant == [tables.plain(row) for row in expected] else None)


def half(case: Case) -> tuple[str, pa.Table]:
    """One of the two files and its rows."""
    write_two()
    at = case.number(0, 1, "file")
    return FILES[at], table().slice(at * ROWS // 2, ROWS // 2)


@KINDS.add
def one_file_has_another_type(case: Case) -> Outcome:
    path, data = half(case)
    name = case.one_of(["session_id", "ts", "label", "price"], "column")
    kind = case.one_of([kind for kind in SCALARS if kind != data.schema.field(name).type], "type")
    write(path, with_column(data, name, converted(data[name].to_pylist(), kind)))
    return use_as_it_is(case, rows())


@KINDS.add
def every_file_has_another_type(case: Case) -> Outcome:
    name = case.one_of(["session_id", "ts", "label", "price"], "column")
    data = table()
    kind = case.one_of([kind for kind in SCALARS if kind != data.schema.field(name).type], "type")
    if name == "price":  # whole numbers, which every type holds
        values = [float(at % 2) for at in range(ROWS)]
        data = with_column(data, name, pa.array(values, pa.float32()))
    write(FILES[0], with_column(data, name, converted(data[name].to_pylist(), kind)))
    if name == "price" and not pa.types.is_floating(kind):
        # Only floats are dense features unless an option says so: fewer features, another meaning.
        return use(case, tables.rows_in("table"), "cluster", "log")
    return use_as_it_is(case, data.to_pylist())


@KINDS.add
def lists_of_another_type_in_one_file(case: Case) -> Outcome:
    path, data = half(case)
    write(path, with_column(data, "items", lists_of(data["items"].to_pylist(), case)))
    return use_as_it_is(case, rows())


@KINDS.add
def lists_of_another_type(case: Case) -> Outcome:
    lists = lists_of(table()["items"].to_pylist(), case)
    write(FILES[0], with_column(table(), "items", lists))
    is_list = pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type)
    if is_list and pa.types.is_integer(lists.type.value_type):
        return use(case, rows())
    # No feature then, so only what keeps the column as it is can be held to it.
    done = tables.recd("cluster", "table", "clustered")
    if not done.ok:
        return done.refused("table", "items")
    if tables.counted(tables.rows_in("clustered")) != tables.counted(tables.rows_in("table")):
        tables.wrong("rows differ")
    return Outcome.RIGHT


@KINDS.add
def a_column_is_missing_in_one_file(case: Case) -> Outcome:
    path, data = half(case)
    write(path, data.drop_columns(case.one_of(data.column_names, "column")))
    return use(case, None)


@KINDS.add
def a_column_more_in_one_file(case: Case) -> Outcome:
    path, data = half(case)
    write(path, data.append_column("extra", pa.array(range(len(data)))))
    return use(case, None)


@KINDS.add
def columns_in_another_order(case: Case) -> Outcome:
    """Features stand in the order of the first file."""
    write_two()
    order = case.draw(st.permutations(tables.SCHEMA.names), "order")
    write(FILES[1], table().slice(ROWS // 2).select(order))
    return use(case, rows())


@KINDS.add
def a_column_in_another_case(case: Case) -> Outcome:
    name = case.one_of(["session_id", "ts", "label"], "column")
    write(FILES[0], table().rename_columns({name: name.title()}))
    needed = {"label": ["run"], "ts": ["run", "cluster"], "session_id": ["run", "cluster", "log"]}
    return use(case, None, *needed[name])


@KINDS.add
def labels_that_are_none(case: Case) -> Outcome:
    value, kind = case.one_of(
        [
            (2, pa.int8()),
            (-1, pa.int64()),
            (0.5, pa.float32()),
            (float("nan"), pa.float64()),
            (float("inf"), pa.float32()),
            (1e-40, pa.float64()),
            (1 + 1e-12, pa.float64()),
            (None, pa.int8()),
            (256, pa.int16()),
            (1 << 32, pa.int64()),
            ((1 << 53) + 1, pa.int64()),
        ],
        "label",
    )
    labels: list[Any] = table()["label"].to_pylist()
    at = case.number(0, BATCHED - 1, "row")
    labels[at] = value
    write(FILES[0], with_column(table(), "label", pa.array(labels, kind)))
    return use(case, None, "run")


BATCHED = tables.STEPS * tables.BATCH


@KINDS.add
def nulls(case: Case) -> Outcome:
    name = case.one_of(tables.SCHEMA.names, "column")
    values = table()[name].to_pylist()
    for at in case.draw(st.sets(st.integers(0, BATCHED - 1), min_size=1, max_size=5), "rows"):
        values[at] = None
    data = with_column(table(), name, pa.array(values, tables.SCHEMA.field(name).type))
    write(FILES[0], data)
    if name in ("session_id", "ts"):
        return use(case, None, "cluster")
    return use(case, None, *(["run"] if name in ("label", "price") else ["run", "cluster"]))


@KINDS.add
def nulls_in_lists(case: Case) -> Outcome:
    name = case.one_of(["user", "items"], "column")
    lists = table()[name].to_pylist()
    at = case.number(0, BATCHED - 1, "row")
    lists[at] = [*lists[at], None, 1]
    write(FILES[0], with_column(table(), name, pa.array(lists, tables.LISTS)))
    return use(case, None, "run", "cluster", "convert")


@KINDS.add
def infinite_or_huge_doubles(case: Case) -> Outcome:
    value = case.one_of([1e39, -1e39, 1.7e308, float("inf"), float("-inf")], "value")
    prices = table()["price"].to_pylist()
    prices[case.number(0, BATCHED - 1, "row")] = value
    write(FILES[0], with_column(table(), "price", pa.array(prices, pa.float64())))
    return use(case, None, "run")


@KINDS.add
def odd_column_names(case: Case) -> Outcome:
    """A feature by another name is the same feature, for what keeps columns as they come."""
    name = case.one_of(
        [
            "",
            " ",
            "a.b",
            "a b",
            "a/b",
            "*",
            "[x]",
            "ä",
            "a\nb",
            "a'b",
            'a"b',
            "x" * 300,
            "t_items",
            "label ",
            "forward",
            "weight",
            "0",
            "a:b",
            "__class__",
            "training",
            "user.list.element",
            "\x1b[31m",
        ],
        "name",
    )
    where = case.one_of(["items", "price"], "column")
    data = table().rename_columns({where: name})
    write(FILES[0], data)
    which = case.one_of(["run", "cluster", "log", "profile"], "use")
    if which == "run":
        Path("registry.yaml").write_text(tables.registry(), encoding="utf-8")
        found = tables.losses()
        # Names with a dot are refused as features of the model, whatever the table.
        named = name if "." in name else "table"
        return Outcome.RIGHT if isinstance(found, list) else found.refused(named)
    if which == "profile":
        Path("registry.yaml").write_text(tables.registry(buckets=None), encoding="utf-8")
        done = tables.recd("profile", "registry", "registry.yaml", "-o", "profile.parquet")
        return Outcome.RIGHT if done.ok else done.refused("table")
    commands = {
        "cluster": [("cluster", "table", "new")],
        "log": [("logs", "write", "table", "log"), ("logs", "read", "log", "new.parquet")],
    }
    for command in commands[which]:
        done = tables.recd(*command)
        if not done.ok:
            return done.refused("table")
    new = "new" if which == "cluster" else "new.parquet"
    if tables.counted(tables.rows_in(new)) != tables.counted(data.to_pylist()):
        tables.wrong(f"{done}: rows differ")
    return Outcome.RIGHT


@KINDS.add
def other_encodings(case: Case) -> Outcome:
    """Whatever writes Parquet: codecs, pages, versions."""
    write_two()
    options = {
        "compression": case.one_of(["none", "snappy", "gzip", "brotli", "zstd", "lz4"]),
        "data_page_version": case.one_of(["1.0", "2.0"]),
        "version": case.one_of(["1.0", "2.4", "2.6"]),
        "use_dictionary": case.one_of([True, False, ["items.list.element"]]),
        "data_page_size": case.one_of([1, 64, 1 << 20]),
        "write_batch_size": case.one_of([1, 7, 1024]),
        "row_group_size": case.one_of([1, 5, 24, 1000]),
        "write_statistics": case.one_of([True, False]),
        "write_page_index": case.one_of([True, False]),
        "use_compliant_nested_type": case.one_of([True, False]),
        "store_schema": case.one_of([True, False]),
        "write_page_checksum": case.one_of([True, False]),
    }
    for at, path in enumerate(FILES):
        write(path, table().slice(at * ROWS // 2, ROWS // 2), **options)
    return use(case, rows())


@KINDS.add
def list_dict_of_broken_bytes(case: Case) -> Outcome:
    lists = [struct.pack(f"<{len(each)}q", *each) for each in table()["items"].to_pylist()]
    at = case.number(0, BATCHED - 1, "row")
    lists[at] = lists[at] + case.draw(st.binary(min_size=1, max_size=7), "bytes")
    field = pa.field("items", pa.binary(), False, {"recd.layout": "list_dict"})
    data = with_column(table(), "items", pa.array(lists, pa.binary()))
    data = data.cast(data.schema.set(data.schema.get_field_index("items"), field))
    write(FILES[0], data, store_schema=True)
    return use(case, None)


@KINDS.add
def binaries_that_are_called_list_dict(case: Case) -> Outcome:
    kind = case.one_of([pa.binary(8), pa.string(), pa.large_binary(), pa.int64(), tables.LISTS])
    values: Any = {
        pa.binary(8): [bytes(8)] * ROWS,
        pa.string(): ["x" * 8] * ROWS,
        pa.large_binary(): [bytes(8)] * ROWS,
        pa.int64(): [0] * ROWS,
        tables.LISTS: [[0]] * ROWS,
    }[kind]
    field = pa.field("items", kind, False, {"recd.layout": "list_dict"})
    data = with_column(table(), "items", pa.array(values, kind))
    data = data.cast(data.schema.set(data.schema.get_field_index("items"), field))
    write(FILES[0], data, store_schema=True)
    if pa.types.is_list(kind) or pa.types.is_large_binary(kind):
        return use(case, [{**row, "items": [0]} for row in rows()])
    return use(case, None)


test_parquet_types = KINDS.test()
