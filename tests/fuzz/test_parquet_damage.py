"""Damaged bytes of Parquet files, and metadata that lies."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tests.fuzz import tables, thrift
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Outcome
from tests.fuzz.tables import ROWS, rows, table, use, write, write_two

KINDS = Kinds("parquet damage")
FILES = ("table/a.parquet", "table/b.parquet")


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


test_parquet_damage = KINDS.test()
