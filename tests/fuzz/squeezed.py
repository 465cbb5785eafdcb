"""Compressed files that are damaged."""

from __future__ import annotations

from hypothesis import strategies as st
from tests.fuzz.cases import Case


def squeezed(case: Case, data: bytes, packed: bytes) -> tuple[bytes, bytes | None]:
    """A damaged compressed file, and what is in it if it is as good as ever."""
    how = case.one_of(["cut", "flip", "twice", "garbage behind", "zeros behind", "plain", "empty"])
    if how == "cut":
        return packed[: case.number(0, len(packed) - 1, "bytes")], None
    if how == "flip":
        changed = bytearray(packed)
        changed[case.number(0, len(packed) - 1, "byte")] ^= 1 << case.number(0, 7, "bit")
        return bytes(changed), data  # bits of a header that say nothing may change
    if how == "twice":
        return packed + packed, data + data
    if how == "garbage behind":
        return packed + case.draw(st.binary(min_size=1, max_size=20), "garbage"), None
    if how == "zeros behind":
        return packed + bytes(16), data
    return (data if how == "plain" else b""), None
