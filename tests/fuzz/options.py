"""Values for options, and what becomes of command lines that have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st
from tests.fuzz import tables
from tests.fuzz.cases import Case
from tests.fuzz.oracle import Outcome, recd, wrong

#: Numbers as people write them, and what is none.
NUMBERS = [
    "-1",
    "0",
    "1",
    "3",
    "+2",
    "1.5",
    "1e1",
    "1e400",
    "",
    " ",
    " 5 ",
    "nan",
    "NaN",
    "inf",
    "-inf",
    "0x10",
    "1_0",
    "٣",
    "½",
    "None",
    "true",
    "1,5",
    "--",
    "5 5",
    "1e-320",
    "-0",
    "0.0",
    "\t7",
    "7\n",
]
#: For what takes no longer with a large number.
HUGE = ["9" * 18, "9" * 19, "18446744073709551616", "9" * 400]
SIZES = [
    "256MB",
    "1GB",
    "300 MB",
    "1.5GiB",
    "1e9",
    "-5MB",
    "0",
    "1",
    "MB",
    "1XB",
    "1 PB",
    "nanMB",
    "1e400",
    "",
    "½GB",
    "1MB1",
    "1GB ",
    "0.0000001KB",
    "1GBB",
    "٣GB",
    "9" * 400 + "GB",
]
WORDS = [
    "",
    " ",
    "\udcff",
    "*",
    "[",
    "ä",
    "\x1b[31m",
    "a\nb",
    "a,b",
    "None",
    "../x",
    "{x}",
    "%s",
    "label",
    "items",
    "x" * 5000,
]


def tables_same(folder: str) -> Callable[[], None]:
    """The rows of ``table`` are in a folder or file, whatever their order."""

    def check() -> None:
        if tables.counted(tables.rows_in(folder)) != tables.counted(tables.rows()):
            wrong(f"the rows of {folder} are not those of the table")

    return check


def nothing() -> None:
    """Nothing to compare with."""


def tried(arguments: Sequence[object], check: Callable[[], None] = nothing) -> Outcome:
    """Refused with a word, or right."""
    done = recd(*arguments)
    if not done.ok:
        return done.refused()
    check()
    return Outcome.RIGHT


def numbered(
    case: Case, arguments: Sequence[object], options: dict[str, list[str]]
) -> list[object]:
    """A command line with one of the options that take a number."""
    option = case.one_of(sorted(options), "option")
    value = case.one_of(options[option], "value")
    if case.draw(st.booleans(), "with ="):
        return [*arguments, f"{option}={value}"]
    return [*arguments, option, value]
