"""Files that are damaged: bits flipped, parts gone, others in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tests.fuzz.cases import Case

#: What may stand where a number stood.
OTHERS: list[Any] = [
    None,
    -1,
    0,
    1 << 70,
    1e400,
    float("nan"),
    "",
    "x",
    "5",
    True,
    [],
    {},
    0.5,
    1e-300,
]


def flip(case: Case, data: bytes) -> bytes:
    changed = bytearray(data)
    changed[case.place(data, "byte")] ^= 1 << case.number(0, 7, "bit")
    return bytes(changed)


def damaged(case: Case, path: str) -> bytes:
    """Flip a bit of a file, cut it off or write something behind; what it was before."""
    before = Path(path).read_bytes()
    how = case.one_of(["flip", "cut", "behind", "empty"], "how")
    after = {
        "flip": lambda: flip(case, before),
        "cut": lambda: before[: case.place(before, "bytes")],
        "behind": lambda: before + case.draw(st.binary(min_size=1, max_size=9), "more"),
        "empty": lambda: b"",
    }[how]()
    Path(path).write_bytes(after)
    return before
