"""Thrift's compact protocol as far as a Parquet footer uses it: read, changed and written again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)


@dataclass
class Number:
    """A whole number of a footer."""

    kind: int
    value: int


@dataclass
class Struct:
    """Fields by their id, in the order of the file; values are the other classes here."""

    fields: list[tuple[int, int, Any]]

    def __getitem__(self, field: int) -> Any:
        return next(value for id, _, value in self.fields if id == field)


@dataclass
class Sequence:
    """A list of values of one kind."""

    kind: int
    items: list[Any]


def numbers(value: Any, path: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], Number]]:
    """Every whole number below a value, and the field ids and indices that lead to it."""
    if isinstance(value, Number):
        return [(path, value)]
    if isinstance(value, Struct):
        inner = [(id, each) for id, _, each in value.fields]
    elif isinstance(value, Sequence):
        inner = list(enumerate(value.items))
    else:
        return []
    return [found for key, each in inner for found in numbers(each, (*path, key))]


def read(data: bytes) -> Struct:
    """A struct, such as the footer of a Parquet file without the 8 bytes at its end."""
    return _Reader(data).struct()


def write(struct: Struct) -> bytes:
    """The bytes of a struct."""
    out = bytearray()
    last = 0
    for id, kind, value in struct.fields:
        assert 0 < id - last < 16, "Parquet's structs have no larger gaps"
        out.append((id - last) << 4 | kind)
        last = id
        if kind not in (_TRUE, _FALSE):
            out += _value(kind, value)
    return bytes(out) + b"\0"


def _value(kind: int, value: Any) -> bytes:
    if isinstance(value, Number):
        if kind == _BYTE:
            return bytes([value.value & 0xFF])
        return _varint((value.value << 1) ^ (value.value >> 63))
    if isinstance(value, Struct):
        return write(value)
    if isinstance(value, Sequence):
        count = len(value.items)
        head = bytes([count << 4 | value.kind]) if count < 15 else bytes([0xF0 | value.kind])
        head += b"" if count < 15 else _varint(count)
        if value.kind in (_TRUE, _FALSE):
            return head + bytes(value.items)
        return head + b"".join(_value(value.kind, item) for item in value.items)
    assert isinstance(value, bytes)
    return value if kind == _DOUBLE else _varint(len(value)) + value


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def struct(self) -> Struct:
        fields: list[tuple[int, int, Any]] = []
        last = 0
        while head := self._byte():
            assert head >> 4, "Parquet's structs have no larger gaps"
            last += head >> 4
            kind = head & 15
            fields.append((last, kind, None if kind in (_TRUE, _FALSE) else self._value(kind)))
        return Struct(fields)

    def _value(self, kind: int) -> Any:
        if kind == _BYTE:
            return Number(kind, self._byte())
        if kind in (_I16, _I32, _I64):
            raw = self._varint()
            return Number(kind, (raw >> 1) ^ -(raw & 1))
        if kind == _DOUBLE:
            return self._bytes(8)
        if kind == _BINARY:
            return self._bytes(self._varint())
        if kind == _STRUCT:
            return self.struct()
        assert kind in (_LIST, _SET), "Parquet has no maps"
        head = self._byte()
        count = head >> 4 if head >> 4 < 15 else self._varint()
        inner = head & 15
        if inner in (_TRUE, _FALSE):
            return Sequence(inner, list(self._bytes(count)))
        return Sequence(inner, [self._value(inner) for _ in range(count)])

    def _byte(self) -> int:
        return self._bytes(1)[0]

    def _bytes(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]

    def _varint(self) -> int:
        number = shift = 0
        while (byte := self._byte()) & 128:
            number |= (byte & 127) << shift
            shift += 7
        return number | byte << shift
