from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.fuzz import tables
from tests.fuzz.cases import Case, fuzz, recd, wrong

Lines = Sequence[Sequence[str]]


def criteo_lines() -> list[list[str]]:
    return [
        [
            str(at % 2),
            *("" if (at + column) % 5 == 0 else str(at * column - 3) for column in range(13)),
            *("" if (at + column) % 7 == 0 else f"{at * 31 + column:08x}" for column in range(26)),
        ]
        for at in range(20)
    ]


def tsv(lines: Lines) -> bytes:
    return "".join("\t".join(line) + "\n" for line in lines).encode()


def criteo(files: dict[str, bytes], meant: Lines | None) -> None:
    Path("days").mkdir()
    for name, content in files.items():
        Path("days", name).write_bytes(content)
    done = recd("criteo", "convert", "days", "new")
    if not done.ok:
        done.refused("days")
        return
    if meant is None:
        wrong(f"{done} took what it should refuse")
    found = [tuple(row.values()) for row in tables.rows_in("new")]
    expected = [
        (
            int(line[0]),
            *(int(text or "0") for text in line[1:14]),
            *(int(text or "0", 16) for text in line[14:]),
        )
        for line in meant
    ]
    if found != expected:
        wrong(f"{len(found)} rows, not the {len(expected)} that are meant, or other values")


def is_criteo(line: Sequence[str]) -> bool:
    digits, hexadecimal = set("0123456789"), set("0123456789abcdefABCDEF")
    numbers = [text.removeprefix("-") for text in line[1:14] if text]
    return (
        len(line) == 40
        and line[0] in ("0", "1")
        and all(0 < len(text) < 19 and set(text) <= digits for text in numbers)
        and all(len(text) < 16 and set(text) <= hexadecimal for text in line[14:])
    )


@fuzz
def test_criteo_with_other_values(case: Case) -> None:
    column, texts = case.one_of(
        [
            (0, ["2", "", "-1", "1.0", "01", "+1"]),
            (3, ["1.5", "x", "+5", "-", "1" * 19, "9" * 18, "-" + "9" * 18, " 5", "1e3", "-0"]),
            (20, ["xyz", "0x1f", "1" * 16, "f" * 15, "ABCDEF", "-1", "f" * 16, " ", "é", "\0"]),
        ],
        "column",
    )
    lines = criteo_lines()
    at = case.number(0, 19, "line")
    lines[at][column] = case.one_of(texts, "text")
    criteo({"day_0": tsv(lines)}, lines if is_criteo(lines[at]) else None)


@fuzz
def test_criteo_with_lines_of_another_form(case: Case) -> None:
    lines = criteo_lines()
    at = case.number(0, 19, "line")
    line = lines[at]
    others = [line[:-1], [*line, ""], [], ["x"], ["\0"], line[1:], [" ".join(line)], ["", *line]]
    lines[at] = case.one_of([*others, [",".join(line)]], "form")
    criteo({"day_0": tsv(lines)}, None)


@fuzz
def test_criteo_damaged(case: Case) -> None:
    """Text has no checksum: lines that are Criteo's may be taken."""
    data = case.damaged(tsv(criteo_lines()))
    try:
        lines = [line.removesuffix("\r").split("\t") for line in data.decode("ascii").split("\n")]
    except UnicodeDecodeError:
        lines = [[]]
    lines = lines[:-1] if lines[-1] == [""] else lines
    criteo({"day_0": data}, lines if lines and all(map(is_criteo, lines)) else None)
