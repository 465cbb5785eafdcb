"""Parquet tables that others wrote, and damaged ones."""

from __future__ import annotations

import decimal
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from tests.fuzz import tables, thrift
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Outcome
from tests.fuzz.tables import ROWS, rows, table, use, write, write_two

KINDS = Kinds("parquet")
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
def empty_files(case: Case) -> Outcome:
    write_two()
    for name in case.draw(st.sets(st.sampled_from(["0", "aa", "c"]), min_size=1), "names"):
        write(f"table/{name}.parquet", table().slice(0, 0))
        if case.draw(st.booleans(), "no row group"):
            with pq.ParquetWriter(f"table/{name}.parquet", tables.SCHEMA, store_schema=False):
                pass
    return use(case, rows())


@KINDS.add
def empty_row_groups(case: Case) -> Outcome:
    with pq.ParquetWriter("table.parquet", tables.SCHEMA, store_schema=False) as writer:
        for at in range(0, ROWS, 12):
            if case.draw(st.booleans(), "empty"):
                writer.write_table(table().slice(0, 0))
            writer.write_table(table().slice(at, 12))
        writer.write_table(table().slice(0, 0))
    Path("table").mkdir()
    Path("table.parquet").rename(FILES[0])
    return use(case, rows())


@KINDS.add
def nothing_in_the_table(case: Case) -> Outcome:
    which = case.one_of(["rows", "files", "folder", "batch"], "nothing")
    if which == "rows":
        write(FILES[0], table().slice(0, 0))
        return use(case, None, "run")
    if which == "batch":
        write(FILES[0], table().slice(0, tables.BATCH - 1))
        return use(case, None, "run")
    if which == "files":
        Path("table").mkdir()
    return use(case, None)


@KINDS.add
def flipped_bits(case: Case) -> Outcome:
    return damaged(case, flip)


@KINDS.add
def truncated(case: Case) -> Outcome:
    return damaged(case, lambda case, data: data[: case.number(0, len(data) - 1, "bytes")])


@KINDS.add
def zeros_in_it(case: Case) -> Outcome:
    def zero(case: Case, data: bytes) -> bytes:
        at, count = case.number(0, len(data) - 1, "at"), case.number(1, 512, "bytes")
        count = min(count, len(data) - at)
        return data[:at] + bytes(count) + data[at + count :]

    return damaged(case, zero)


@KINDS.add
def stretches_swapped(case: Case) -> Outcome:
    def swap(case: Case, data: bytes) -> bytes:
        count = case.number(1, len(data) // 4, "bytes")
        one = case.number(0, len(data) - 2 * count, "one")
        two = case.number(one + count, len(data) - count, "two")
        between = data[one + count : two]
        return (
            data[:one]
            + data[two : two + count]
            + between
            + data[one : one + count]
            + data[two + count :]
        )

    return damaged(case, swap)


@KINDS.add
def bytes_inserted_or_removed(case: Case) -> Outcome:
    def shift(case: Case, data: bytes) -> bytes:
        at = case.number(0, len(data), "at")
        if case.draw(st.booleans(), "insert"):
            return data[:at] + case.draw(st.binary(min_size=1, max_size=9), "bytes") + data[at:]
        return data[:at] + data[at + case.number(1, 9, "bytes") :]

    return damaged(case, shift)


@KINDS.add
def magic_of_other_files(case: Case) -> Outcome:
    magic = case.one_of([b"PARE", b"PAR2", b"par1", b"\0\0\0\0", b"ARRO", b"Obj\x01"], "magic")
    ends = case.one_of(["front", "end", "both"], "where")

    def change(case: Case, data: bytes) -> bytes:
        head = data[:4] if ends == "end" else magic
        return head + data[4:-4] + (data[-4:] if ends == "front" else magic)

    return damaged(case, change)


@KINDS.add
def length_of_the_footer(case: Case) -> Outcome:
    def change(case: Case, data: bytes) -> bytes:
        length = case.draw(st.integers(0, (1 << 32) - 1) | st.integers(0, 3000), "length")
        return data[:-8] + struct.pack("<I", length) + data[-4:]

    return damaged(case, change)


@KINDS.add
def another_format(case: Case) -> Outcome:
    content = case.one_of(
        [
            b"a,b\n1,2\n",
            b"{}",
            b"",
            b"PAR1",
            b"PAR1PAR1",
            b"PAR1\0\0\0\0PAR1",
            b"\x1f\x8b" + bytes(99),
        ]
    )
    return damaged(case, lambda case, data: content)


def flip(case: Case, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(case.number(1, 3, "flips")):
        changed[case.number(0, len(data) - 1, "byte")] ^= 1 << case.number(0, 7, "bit")
    return bytes(changed)


def damaged(case: Case, damage: Callable[[Case, bytes], bytes]) -> Outcome:
    """Damage the bytes of one file: what is read then is what was there, or it is refused.

    Footers have no checksum: where one says something else that is well-formed, so be it, if
    another reader of Parquet reads the same.
    """
    write_two()
    path = Path(case.one_of(FILES, "file"))
    data = path.read_bytes()
    changed = damage(case, data)
    path.write_bytes(changed)
    return use(case, rows() if changed == data else _meant(rows()))


def _meant(expected: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What another reader finds where a footer was changed into another well-formed one."""
    import polars

    try:
        return [
            dict(row)
            for path in tables.files_of("table")
            for row in polars.read_parquet(path, use_statistics=False).to_dicts()
        ]
    except BaseException as error:  # polars panics
        if isinstance(error, KeyboardInterrupt):
            raise
        return expected


@KINDS.add
def numbers_of_the_footer(case: Case) -> Outcome:
    """Counts, places, sizes, types and codecs that are others."""

    def change(case: Case, data: bytes) -> bytes:
        length = struct.unpack("<I", data[-8:-4])[0]
        footer = thrift.read(data[-8 - length : -8])
        _, number = case.one_of(thrift.numbers(footer), "field")
        few = [
            0,
            1,
            -1,
            number.value + 1,
            number.value - 1,
            number.value * 2,
            1 << 31,
            (1 << 63) - 1,
        ]
        number.value = case.draw(st.sampled_from(few) | st.integers(-(1 << 31), 1 << 31), "value")
        changed = thrift.write(footer)
        return data[: -8 - length] + changed + struct.pack("<I", len(changed)) + b"PAR1"

    return damaged(case, change)


@KINDS.add
def a_footer_of_another_file(case: Case) -> Outcome:
    def change(case: Case, data: bytes) -> bytes:
        count, seed = case.number(1, ROWS, "rows"), case.number(0, 9, "seed")
        write("other.parquet", table(rows(count, seed)))
        other = Path("other.parquet").read_bytes()
        Path("other.parquet").unlink()
        return data[:-8][: -struct.unpack("<I", data[-8:-4])[0]] + _footer(other)

    return damaged(case, change)


def _footer(data: bytes) -> bytes:
    return data[-8 - struct.unpack("<I", data[-8:-4])[0] :]


@KINDS.add
def statistics_that_lie(case: Case) -> Outcome:
    """Minima, maxima and counts of nulls are for filters alone."""
    write_two()
    path = Path(case.one_of(FILES, "file"))
    data = path.read_bytes()
    footer = thrift.read(data[:-8][-struct.unpack("<I", data[-8:-4])[0] :])
    for group in footer[4].items:
        for column in group[1].items:
            statistics = column[3][12]
            statistics.fields = [
                (id, kind, _lie(case, value)) for id, kind, value in statistics.fields
            ]
    changed = thrift.write(footer)
    head = data[: -8 - struct.unpack("<I", data[-8:-4])[0]]
    path.write_bytes(head + changed + struct.pack("<I", len(changed)) + b"PAR1")
    return use(case, rows())


def _lie(case: Case, value: Any) -> Any:
    if isinstance(value, bytes):
        return case.draw(st.binary(min_size=len(value), max_size=len(value)), "bound")
    if isinstance(value, thrift.Number):
        return thrift.Number(value.kind, case.number(0, 99, "count"))
    return value


@KINDS.add
def hidden_files(case: Case) -> Outcome:
    write_two()
    names = [
        "_SUCCESS",
        "_metadata",
        ".a.parquet",
        "_b.parquet",
        "a.parquet.crc",
        "x.csv",
        ".tmp/c.parquet",
    ]
    for name in case.draw(st.sets(st.sampled_from(names), min_size=1), "names"):
        path = Path("table", name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(case.draw(st.binary(max_size=9), "content"))
    return use(case, rows())


@KINDS.add
def odd_names(case: Case) -> Outcome:
    write_two()
    name = case.one_of(
        [
            "a b",
            "50%",
            "%41",
            "a\nb",
            "a'b",
            'a"b',
            "ä",
            "日本",
            "a=b",
            "-x",
            "*",
            "[a]",
            "a\\b",
            "x" * 200,
            "a\tb",
            "#",
            "?q",
            "a;b",
            "{a}",
            "a.parquet",
        ],
        "name",
    )
    at = case.one_of(["file", "folder"], "of")
    if at == "file":
        os.rename(FILES[1], f"table/{name}.parquet")
    else:
        Path("table", name).mkdir()
        os.rename(FILES[1], f"table/{name}/b.parquet")
    return use(case, tables.rows_in("table"))


@KINDS.add
def the_same_file_twice(case: Case) -> Outcome:
    write_two()
    how: Callable[..., Any] = case.one_of([os.link, shutil.copyfile], "how")
    how(FILES[0], "table/c.parquet")
    return use(case, [*rows(), *rows()[: ROWS // 2]])


@KINDS.add
def symbolic_links(case: Case) -> Outcome:
    write_two()
    which = case.one_of(["file", "folder", "folder in it", "dangling", "loop", "itself"], "to")
    if which == "file":
        os.rename(FILES[1], "elsewhere")
        os.symlink("../elsewhere", FILES[1])
        return use(case, rows())
    if which == "folder":
        os.rename("table", "elsewhere")
        os.symlink("elsewhere", "table")
        return use(case, rows())
    if which == "folder in it":
        os.mkdir("elsewhere")
        os.rename(FILES[1], "elsewhere/b.parquet")
        os.symlink("../elsewhere", "table/day=2")
        return use(case, None)
    if which == "dangling":
        os.symlink("nowhere", "table/c.parquet")
        return use(case, None)
    if which == "loop":
        os.symlink(".", "table/loop")
        return use(case, None)
    os.symlink("c.parquet", "table/c.parquet")
    return use(case, None)


@KINDS.add
def no_regular_file(case: Case) -> Outcome:
    write_two()
    which = case.one_of(["folder", "pipe", "device"], "what")
    if which == "folder":
        Path("table/c.parquet").mkdir()
        return use(case, rows())
    if which == "pipe":
        os.mkfifo("table/c.parquet")
    else:
        os.symlink(case.one_of(["/dev/null", "/dev/zero"], "device"), "table/c.parquet")
    return use(case, None)


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
def metadata_that_lies(case: Case) -> Outcome:
    """Keys of this package and of Arrow on what is none of theirs."""
    junk = case.one_of(
        [b"", b"{}", b"[]", b"null", b"1", b'{"version": 1}', b"\xff\xfe", b"list_dict", b"AAAA"]
    )
    key = case.one_of(
        [
            b"recd.layout",
            b"recd.statistics",
            b"recd.papercal",
            b"ARROW:schema",
            b"pandas",
            b"PARQUET:field_id",
        ]
    )
    data = table()
    if case.draw(st.booleans(), "of a field"):
        name = case.one_of(data.column_names, "column")
        field = data.schema.field(name).with_metadata({key: junk})
        data = data.cast(data.schema.set(data.schema.get_field_index(name), field))
    else:
        data = data.replace_schema_metadata({key: junk})
    write(
        FILES[0], data, store_schema=case.draw(st.booleans(), "schema") and key != b"ARROW:schema"
    )
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


@KINDS.add
def paths_that_are_none(case: Case) -> Outcome:
    write_two()
    path = case.one_of(
        [
            "tabel",
            "table/a.parquet/x",
            "table/*.parquet",
            "~/table",
            "$HOME",
            "file://table",
            "x://y/z",
            " ",
            "table/c",
            "x" * 300,
            "table/\x7f",
        ]
    )
    done = tables.recd("cluster", path, "new")
    return done.refused(path.replace("//", "/")[:20])


@KINDS.add
def a_filter_and_statistics_that_are_missing(case: Case) -> Outcome:
    """Rows that a filter keeps are the same with and without statistics."""
    options = {
        "write_statistics": case.one_of([True, False, ["ts"]]),
        "row_group_size": case.one_of([1, 5, 48]),
    }
    write(FILES[0], table(), **options)
    column = case.one_of(["ts", "label", "price", "session_id"], "column")
    values = sorted({row[column] for row in rows()})
    value = case.one_of(values, "value")
    op = case.one_of(["==", "!=", "<", "<=", ">", ">="], "op")
    kept = {
        "==": lambda one: one == value,
        "!=": lambda one: one != value,
        "<": lambda one: one < value,
        "<=": lambda one: one <= value,
        ">": lambda one: one > value,
        ">=": lambda one: one >= value,
    }[op]
    meant = [row for row in rows() if kept(row[column])]
    Path("registry.yaml").write_text(tables.registry(where=[[column, op, value]]), encoding="utf-8")
    found = tables.losses()
    if not isinstance(found, list):
        if len(meant) >= tables.BATCH:
            tables.wrong(f"{len(meant)} rows are left, yet: {found.output}")
        return found.refused("table")
    if found != tables.losses_of(meant):
        tables.wrong(f"losses {found}")
    return Outcome.RIGHT


@KINDS.add
def conditions_that_are_none(case: Case) -> Outcome:
    write_two()
    condition = case.one_of(
        [
            ["ts", "~", 1],
            ["ts", "==", "x"],
            ["ts", "==", 1.5],
            ["ts", "==", 1 << 70],
            ["ts", "in", []],
            ["ts", "in", 5],
            ["ts", "in", [[]]],
            ["ts", "is null", 1],
            ["ts"],
            [],
            {},
            "ts > 1",
            ["", "==", 1],
            ["user", "==", 1],
            ["user", "==", [1]],
            ["price", "==", "1"],
            ["price", "<", True],
            ["label", "==", 1000],
            ["ts", "==", None],
            [["ts"], "==", 1],
            ["ts", "==", {"a": 1}],
        ]
    )
    Path("registry.yaml").write_text(tables.registry(where=[condition]), encoding="utf-8")
    found = tables.losses()
    if isinstance(found, list):
        tables.wrong(f"{condition} was taken")
    return found.refused("registry.yaml" if "registry.yaml" in found.output else "table")


test_parquet = KINDS.test()
