"""Text that becomes interactions."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from hypothesis import strategies as st
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Outcome, recd, wrong

KINDS = Kinds("interactions")
HEADER = ["user_id", "item_id", "rating", "timestamp"]
EVENTS = [[str(1 + at % 4), str(at % 9), str(1 + at % 5), str(1000 + 60 * at)] for at in range(30)]


def interactions(
    content: bytes, meant: Sequence[Sequence[Any]] | None, name: str = "log.csv"
) -> Outcome:
    """Events (user, item, value, time) go through the dataset; None has to be refused."""
    Path(name).write_bytes(content)
    options = {"path": name, "test_fraction": 0}
    Path("registry.yaml").write_text(
        f"version: 1\ndataset: {{use: recd.interactions, options: {json.dumps(options)}}}\n"
        "converter: {use: recd.kjt}\n",
        encoding="utf-8",
    )
    done = recd("logs", "write", "registry.yaml", "log", "--shards", 1)
    if not done.ok:
        return done.refused(name)
    if meant is None:
        wrong(f"{done} took what it should refuse")
    assert recd("logs", "read", "log", "back.parquet").ok
    found = Counter(
        (row["label"], math.floor(row["hour"][0]))
        for row in pq.read_table("back.parquet").to_pylist()
    )
    expected = Counter(
        (int(float(value) >= 4), int(float(time) // 3600 % 24)) for _, _, value, time in meant
    )
    if found != expected:
        wrong(f"labels and hours {found}, not {expected}")
    for column, name in enumerate(("user_id", "item_id")):
        values = pq.read_table("back.parquet")[name].to_pylist()
        counts = sorted(Counter(value for (value,) in values).values())
        if counts != sorted(Counter(event[column] for event in meant).values()):
            wrong(f"other {name} than those given: {values}")
    return Outcome.RIGHT


def csv_text(rows: Sequence[Sequence[str]], **options: Any) -> str:
    out = io.StringIO()
    csv.writer(out, **options).writerows(rows)
    return out.getvalue()


@KINDS.add
def interactions_in_another_encoding(case: Case) -> Outcome:
    events = [[f"ä{user}", *rest] for user, *rest in EVENTS]
    encoding = case.one_of(["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp037"])
    content = csv_text([HEADER, *events]).encode(encoding)
    return interactions(content, events if encoding == "utf-8-sig" else None)


@KINDS.add
def interactions_with_other_line_ends(case: Case) -> Outcome:
    end = case.one_of(["\n", "\r\n", "\r", "\n\n", "\n\r", "\r\r\n", "\x0b", "\u2028"])
    text = end.join(",".join(row) for row in [HEADER, *EVENTS])
    text += end * case.number(0, 2, "at the end")
    good = end in ("\n", "\r\n", "\r", "\n\n", "\n\r", "\r\r\n")
    return interactions(text.encode(), EVENTS if good else None)


@KINDS.add
def interactions_with_quotes(case: Case) -> Outcome:
    odd = ["a,b", 'a"b', "a\nb", "a\r\nb", " a", "a ", "'a'", "a\\", "\\n", "#", "a\tb"]
    events = [list(event) for event in EVENTS]
    for at in case.draw(st.sets(st.integers(0, 29), min_size=1, max_size=4), "lines"):
        events[at][case.number(0, 1, "column")] = case.one_of(odd, "id")
    quoting = case.one_of([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC], "quoting")
    return interactions(csv_text([HEADER, *events], quoting=quoting).encode(), events)


@KINDS.add
def interactions_with_quotes_that_do_not_end(case: Case) -> Outcome:
    lines = [",".join(row) for row in [HEADER, *EVENTS]]
    at = case.number(1, 30, "line")
    lines[at] = case.one_of(['"' + lines[at], lines[at] + '"', lines[at].replace(",", ',"', 1)])
    text = "\n".join(lines) + "\n"
    try:
        rows = list(csv.reader(io.StringIO(text), strict=True))[1:]
    except csv.Error:
        rows = []
    return interactions(text.encode(), _valid(rows))


def _valid(rows: Sequence[Sequence[str]]) -> list[Sequence[str]] | None:
    """Rows that are events, None where one is none."""
    kept = [row for row in rows if row]
    for row in kept:
        if len(row) != 4 or not row[0] or not row[1]:
            return None
        try:
            if not all(math.isfinite(float(text)) for text in row[2:]):
                return None
        except ValueError:
            return None
    return kept or None


@KINDS.add
def interactions_with_other_numbers(case: Case) -> Outcome:
    text, value = case.one_of(
        [
            ("", None),
            (" ", None),
            ("x", None),
            ("nan", None),
            ("NaN", None),
            ("inf", None),
            ("-Infinity", None),
            ("1e999", None),
            ("0x10", None),
            ("1_0", None),
            ("1,5", None),
            ("null", None),
            ("N/A", None),
            ("--1", None),
            ("true", None),
            ("٣", None),
            ("5.", 5.0),
            (".5", 0.5),
            ("+5", 5.0),
            ("5e0", 5.0),
            ("-5", -5.0),
            (" 5", 5.0),
            ("1e-320", 0.0),
        ]
    )
    events: list[list[Any]] = [list(event) for event in EVENTS]
    at = case.number(0, 29, "line")
    events[at][2] = text
    content = csv_text([HEADER, *events]).encode()
    if value is None:
        return interactions(content, None)
    events[at][2] = value
    Path("log.csv").write_bytes(content)
    return interactions(content, events)


@KINDS.add
def interactions_with_odd_times(case: Case) -> Outcome:
    time = case.one_of(["-1", "0", "1e18", "9223372036854775808", "1e300", "-1e19", "0.5", "1e15"])
    events = [list(event) for event in EVENTS]
    events[case.number(0, 29, "line")][3] = time
    return interactions(csv_text([HEADER, *events]).encode(), events)


@KINDS.add
def interactions_with_odd_ids(case: Case) -> Outcome:
    """Ids that differ as text are different ids."""
    pairs = [
        ("1", "01"),
        ("a", "A"),
        ("1", "1.0"),
        ("é", "e\u0301"),
        ("1", "+1"),
        ("9" * 18, "9" * 19),
        ("1", "١"),
        ("-1", "1"),
        ("a", "a\u200b"),
        ("1", "1 "),
        ("a", "a\x00"),
    ]
    one, two = case.one_of(pairs, "ids")
    column = case.number(0, 1, "column")
    events = [list(event) for event in EVENTS]
    for at, event in enumerate(events):
        event[column] = (one, two)[at % 2]
    return interactions(csv_text([HEADER, *events]).encode(), events)


@KINDS.add
def interactions_with_lines_of_another_form(case: Case) -> Outcome:
    lines = [",".join(row) for row in EVENTS]
    at = case.number(0, 29, "line")
    lines[at] = case.one_of(
        [
            lines[at] + ",",
            lines[at] + ",x",
            lines[at].rpartition(",")[0],
            "# comment",
            ",,,",
            ",",
            "\0",
            lines[at].replace(",", ";"),
            lines[at].replace(",", "\t"),
            "," + lines[at],
        ]
    )
    return interactions(("\n".join([",".join(HEADER), *lines]) + "\n").encode(), None)


@KINDS.add
def interactions_with_another_header(case: Case) -> Outcome:
    header = case.one_of(
        [
            None,
            [name.upper() for name in HEADER],
            ["user_id"] * 4,
            HEADER[:3],
            [*HEADER, "more"],
            [f" {name}" for name in HEADER],
            ['"' + name for name in HEADER],
            [""] * 4,
            HEADER[::-1],
            ["user_id:token", "item_id:token", "rating:float", "timestamp:float"],
        ]
    )
    rows = EVENTS if header is None else [header, *EVENTS]
    text = "\n".join(",".join(row) for row in rows) + "\n"
    same = header is not None and [name.strip().partition(":")[0] for name in header] == HEADER
    if header == HEADER[::-1]:
        return interactions(text.encode(), [event[::-1] for event in EVENTS])
    return interactions(text.encode(), EVENTS if same else None)


@KINDS.add
def interactions_cut_or_flipped(case: Case) -> Outcome:
    """Text has no checksum: what another reader of CSV takes for events may be taken."""
    data = bytearray(csv_text([HEADER, *EVENTS]).encode())
    if case.draw(st.booleans(), "cut"):
        del data[case.number(0, len(data) - 1, "bytes") :]
    else:
        data[case.number(0, len(data) - 1, "byte")] ^= 1 << case.number(0, 7, "bit")
    try:
        rows = list(csv.reader(io.StringIO(data.decode(), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error):
        return interactions(bytes(data), None)
    same = rows and [name.strip() for name in rows[0]] == HEADER
    return interactions(bytes(data), _valid(rows[1:]) if same else None)


test_interactions = KINDS.test()
