"""Text that becomes tables: Criteo's logs, interactions, traces, counts and histograms."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tests.fuzz import tables
from tests.fuzz.cases import Case, fuzz, recd, wrong

HEADER = ["user_id", "item_id", "rating", "timestamp"]
EVENTS = [[str(1 + at % 4), str(at % 9), str(1 + at % 5), str(1000 + 60 * at)] for at in range(30)]
TRACE = [at * at % 13 for at in range(60)]
Lines = Sequence[Sequence[str]]


def squeezed(case: Case, data: bytes, pack: Callable[[bytes], bytes]) -> tuple[bytes, bytes | None]:
    """A damaged compressed file, and its content if it is as good as ever."""
    packed = pack(data)
    how = case.one_of(["damaged", "twice", "garbage", "zeros", "plain", "empty"], "how")
    changed = case.damaged(packed)
    return {
        # Bits of a header may change that say nothing.
        "damaged": (changed, data if len(changed) == len(packed) else None),
        "twice": (packed + packed, data + data),
        "garbage": (packed + b"garbage", None),
        "zeros": (packed + bytes(16), data),
        "plain": (data, None),
        "empty": (b"", None),
    }[how]


def criteo_lines() -> list[list[str]]:
    return [
        [
            str(at % 2),
            *("" if (at + column) % 5 == 0 else str(at * column - 3) for column in range(13)),
            *("" if (at + column) % 7 == 0 else f"{at * 31 + column:08x}" for column in range(26)),
        ]
        for at in range(20)
    ]


def tsv(lines: Lines, end: str = "\n") -> bytes:
    return "".join("\t".join(line) + end for line in lines).encode()


def criteo(files: dict[str, bytes], meant: Lines | None, *options: str, skipped: int = 0) -> None:
    """Lines go through a conversion; None has to be refused."""
    Path("days").mkdir()
    for name, content in files.items():
        Path("days", name).write_bytes(content)
    done = recd("criteo", "convert", "days", "new", "--json", "figures.json", *options)
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
    figures = json.loads(Path("figures.json").read_text(encoding="utf-8"))
    if skipped and skipped not in figures.values():
        wrong(f"{skipped} lines were skipped, and the figures are {figures}")


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
    """With ``--bad-lines skip`` the others are as they were."""
    lines = criteo_lines()
    at = case.number(0, 19, "line")
    line = lines[at]
    others = [line[:-1], [*line, ""], [], ["x"], ["\0"], line[1:], [" ".join(line)], ["", *line]]
    lines[at] = case.one_of([*others, [",".join(line)]], "form")
    if case.flag("skip"):
        kept = [*lines[:at], *lines[at + 1 :]]
        criteo({"day_0": tsv(lines)}, kept, "--bad-lines", "skip", skipped=1)
    else:
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


def interactions(content: bytes, meant: Sequence[Sequence[Any]] | None) -> None:
    """Events (user, item, value, time) go through the dataset; None has to be refused."""
    Path("log.csv").write_bytes(content)
    options = {"path": "log.csv", "test_fraction": 0}
    dataset = f"dataset: {{use: recd.interactions, options: {json.dumps(options)}}}"
    tables.write_registry(f"version: 1\n{dataset}\nconverter: {{use: recd.kjt}}\n")
    done = recd("logs", "write", "registry.yaml", "log", "--shards", 1)
    if not done.ok:
        done.refused("log.csv")
        return
    if meant is None:
        wrong(f"{done} took what it should refuse")
    assert recd("logs", "read", "log", "back.parquet").ok
    back = pq.read_table("back.parquet")
    found = Counter((row["label"], math.floor(row["hour"][0])) for row in back.to_pylist())
    expected = Counter((int(float(v) >= 4), int(float(t) // 3600 % 24)) for _, _, v, t in meant)
    if found != expected:
        wrong(f"labels and hours {found}, not {expected}")
    for column, name in enumerate(("user_id", "item_id")):
        counts = sorted(Counter(value for (value,) in back[name].to_pylist()).values())
        if counts != sorted(Counter(event[column] for event in meant).values()):
            wrong(f"other {name} than those given")


def csv_text(rows: Lines, **options: Any) -> str:
    out = io.StringIO()
    csv.writer(out, **options).writerows(rows)
    return out.getvalue()


def events_in(text: str) -> Lines | None:
    """The events of a text as another reader of CSV has them, None where one is none."""
    try:
        header, *rows = csv.reader(io.StringIO(text, newline=""), strict=True)
        kept = [row for row in rows if row]
        good = all(len(row) == 4 and row[0] and row[1] for row in kept)
        good = good and all(math.isfinite(float(value)) for row in kept for value in row[2:])
    except (csv.Error, ValueError):
        return None
    return kept if good and kept and [name.strip() for name in header] == HEADER else None


@fuzz
def test_interactions_with_other_values(case: Case) -> None:
    """Numbers that are none, odd times, and ids that differ as text."""
    events: list[list[Any]] = [list(event) for event in EVENTS]
    at, what = case.number(0, 29, "line"), case.one_of(["value", "time", "ids"], "what")
    if what == "ids":
        pairs = ["1 01", "a A", "1 1.0", "é é", "1 +1", "1 ١", "-1 1", "a a\u200b", "a a\x00"]
        column, pair = case.number(0, 1, "column"), case.one_of(pairs, "ids").split(" ")
        for number, event in enumerate(events):
            event[column] = pair[number % 2]
    elif what == "time":
        times = ["-1", "0", "1e18", "9223372036854775808", "1e300", "-1e19", "0.5", "1e15"]
        events[at][3] = case.one_of(times, "time")
    else:
        good = {"5.": 5.0, ".5": 0.5, "+5": 5.0, "5e0": 5.0, "-5": -5.0, " 5": 5.0, "1e-320": 0.0}
        bad = [
            "x",
            "nan",
            "NaN",
            "inf",
            "-Infinity",
            "1e999",
            "0x10",
            "1_0",
            "1,5",
            "null",
            "N/A",
            "--1",
            "true",
            "٣",
        ]
        text = case.one_of([*good, *bad, "", " "], "text")
        events[at][2] = text
        content = csv_text([HEADER, *events]).encode()
        events[at][2] = good.get(text)
        interactions(content, events if text in good else None)
        return
    interactions(csv_text([HEADER, *events]).encode(), events)


@fuzz
def test_interactions_damaged(case: Case) -> None:
    """Text has no checksum: what another reader of CSV takes for events may be taken."""
    data = case.damaged(csv_text([HEADER, *EVENTS]).encode())
    try:
        interactions(data, events_in(data.decode()))
    except UnicodeDecodeError:
        interactions(data, None)


def trace(content: bytes, meant: Sequence[int] | None, *options: str, gz: str = "") -> None:
    """Ids go through a profile; None has to be refused."""
    name = f"trace.txt{gz}"
    Path(name).write_bytes(content)
    done = recd("trace", "profile", name, "-o", "profile.parquet", "--json", "p.json", *options)
    if not done.ok:
        done.refused(name)
        return
    if meant is None:
        wrong(f"{done} took what it should refuse")
    (figures, *_) = json.loads(Path("p.json").read_text(encoding="utf-8"))["tables"].values()
    if (figures["accesses"], figures["ids"]) != (len(meant), len(set(meant))):
        wrong(f"{figures}, not {len(meant)} accesses to {len(set(meant))} ids")


@fuzz
def test_traces(case: Case) -> None:
    """Spaces, numbers, encodings, columns, nothing, compression."""
    words = list(map(str, TRACE))
    at = case.number(0, 29, "at")
    how = case.one_of(["spaces", "number", "encoding", "columns", "nothing", "gzip"], "how")
    if how == "spaces":
        good = [" ", "\t", "\n", "\r\n", "\r", "  \n", "\x0b", "\x0c"]
        space = case.one_of([*good, ",", ";", "\u00a0", "\0", "\u2003", "|"], "space")
        text = space.join(words) + case.one_of(["", space, "\n\n"], "end")
        trace(text.encode(), TRACE if space in good else None)
    elif how == "number":
        numbers = {"9223372036854775807": (1 << 63) - 1, "007": 7, "0" * 40 + "5": 5, "-1": -1}
        bad = ["+1", "1.0", "1e3", "0x1f", "1_0", "x", "9223372036854775808", "-", "٣", "nan", "#"]
        words[at] = case.one_of([*numbers, *bad, "1" * 99], "text")
        meant = [*TRACE[:at], numbers.get(words[at], 0), *TRACE[at + 1 :]]
        trace("\n".join(words).encode(), meant if words[at] in numbers else None)
    elif how == "encoding":
        trace("\n".join(words).encode(case.one_of(["utf-16", "utf-32", "utf-8-sig"])), None)
    elif how == "columns":
        lines = [f"{one} {two}" for one, two in zip(words[::2], words[1::2], strict=True)]
        lines[at] = case.one_of(["1", "1 2 3", "1\t2\t", "", " ", "1 2 x", "1,2"], "line")
        kept = {"1\t2\t": [1], "": [], " ": []}.get(lines[at])
        columns = None if kept is None else [*TRACE[0 : 2 * at : 2], *kept, *TRACE[2 * at + 2 :: 2]]
        trace(("\n".join(lines) + "\n").encode(), columns, "--columns", "user,item")
    elif how == "nothing":
        trace(case.one_of([b"", b" ", b"\n\n", b"\0", b"\xef\xbb\xbf", b"\r"]), None)
    else:
        data = "".join(f"{word}\n" for word in words).encode()
        content, kept_data = squeezed(case, data, lambda data: gzip.compress(data, mtime=0))
        ids = None if kept_data is None else [int(word) for word in kept_data.split()]
        trace(content, ids, gz=".gz")
