"""Text that becomes rows: interactions, traces, Criteo's logs, and counts of reads."""

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

import numpy as np
import pyarrow.parquet as pq
import zstandard
from hypothesis import strategies as st
from tests.fuzz import tables
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Outcome, recd, wrong

KINDS = Kinds("text tables")

HEADER = ["user_id", "item_id", "rating", "timestamp"]
EVENTS = [[str(1 + at % 4), str(at % 9), str(1 + at % 5), str(1000 + 60 * at)] for at in range(30)]
TRACE = [at * at % 13 for at in range(60)]

# Interactions


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


# Traces


def trace(
    content: bytes, meant: Sequence[int] | None, name: str = "trace.txt", *options: str
) -> Outcome:
    """Ids go through a profile; None has to be refused."""
    Path(name).write_bytes(content)
    done = recd("trace", "profile", name, "-o", "profile.parquet", "--json", "p.json", *options)
    if not done.ok:
        return done.refused(name)
    if meant is None:
        wrong(f"{done} took what it should refuse")
    found = json.loads(Path("p.json").read_text(encoding="utf-8"))["tables"]
    figures = next(iter(found.values()))
    if (figures["accesses"], figures["ids"]) != (len(meant), len(set(meant))):
        wrong(f"{figures}, not {len(meant)} accesses to {len(set(meant))} ids")
    last: dict[int, int] = {}
    distances = []
    for at, id in enumerate(meant):
        if id in last:
            distances.append(len(set(meant[last[id] + 1 : at])) + 1)
        last[id] = at
    if distances and figures["median_distance"] not in (
        sorted(distances)[len(distances) // 2],
        sorted(distances)[(len(distances) - 1) // 2],
        float(np.median(distances)),
    ):
        wrong(f"median distance {figures['median_distance']}, not {np.median(distances)}")
    return Outcome.RIGHT


@KINDS.add
def traces_with_other_spaces(case: Case) -> Outcome:
    space = case.one_of(
        [
            " ",
            "\t",
            "\n",
            "\r\n",
            "\r",
            "  \n",
            ",",
            ";",
            "\x0b",
            "\x0c",
            "\u00a0",
            "\0",
            "\u2003",
            "|",
        ]
    )
    good = space in (" ", "\t", "\n", "\r\n", "\r", "  \n", "\x0b", "\x0c")
    text = space.join(map(str, TRACE)) + case.one_of(["", space, "\n\n"], "end")
    return trace(text.encode(), TRACE if good else None)


@KINDS.add
def traces_with_other_numbers(case: Case) -> Outcome:
    text, id = case.one_of(
        [
            ("-1", None),
            ("+1", None),
            ("1.0", None),
            ("1e3", None),
            ("0x1f", None),
            ("1_0", None),
            ("x", None),
            ("9223372036854775808", None),
            ("1" * 99, None),
            ("-", None),
            ("٣", None),
            ("nan", None),
            ("#", None),
            ("9223372036854775807", (1 << 63) - 1),
            ("007", 7),
            ("0" * 40 + "5", 5),
        ]
    )
    ids: list[Any] = list(TRACE)
    at = case.number(0, len(ids) - 1, "at")
    ids[at] = id
    words = [str(each) for each in TRACE]
    words[at] = text
    # A negative id has a meaning, too, if it is taken.
    if text == "-1":
        ids[at] = -1
        return trace("\n".join(words).encode(), ids)
    return trace("\n".join(words).encode(), None if id is None else ids)


@KINDS.add
def traces_in_another_encoding(case: Case) -> Outcome:
    encoding = case.one_of(["utf-16", "utf-32", "utf-8-sig", "utf-16-be"])
    return trace("\n".join(map(str, TRACE)).encode(encoding), None)


@KINDS.add
def traces_with_ragged_columns(case: Case) -> Outcome:
    lines = [f"{one} {two}" for one, two in zip(TRACE[::2], TRACE[1::2], strict=True)]
    at = case.number(0, len(lines) - 1, "line")
    lines[at] = case.one_of(["1", "1 2 3", "1\t2\t", "", " ", "1 2 x", "1,2"])
    good = {"1\t2\t": [1], "": [], " ": []}.get(lines[at])
    meant = None if good is None else [*TRACE[0 : 2 * at : 2], *good, *TRACE[2 * at + 2 :: 2]]
    return trace(("\n".join(lines) + "\n").encode(), meant, "trace.txt", "--columns", "user,item")


@KINDS.add
def traces_with_nothing(case: Case) -> Outcome:
    return trace(case.one_of([b"", b" ", b"\n\n", b"\0", b"\xef\xbb\xbf", b"\r"]), None)


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


@KINDS.add
def traces_in_damaged_gzip(case: Case) -> Outcome:
    data = "".join(f"{id}\n" for id in TRACE).encode()
    content, good = squeezed(case, data, gzip.compress(data, mtime=0))
    meant = None if good is None else [int(word) for word in good.split()]
    return trace(content, meant, "trace.txt.gz")


# Criteo


def criteo_lines(count: int = 20) -> list[list[str]]:
    return [
        [
            str(at % 2),
            *("" if (at + column) % 5 == 0 else str(at * column - 3) for column in range(13)),
            *("" if (at + column) % 7 == 0 else f"{at * 31 + column:08x}" for column in range(26)),
        ]
        for at in range(count)
    ]


def criteo(
    files: dict[str, bytes], meant: Sequence[Sequence[str]] | None, *options: str, skipped: int = 0
) -> Outcome:
    """Lines go through a conversion; None has to be refused."""
    Path("days").mkdir()
    for name, content in files.items():
        Path("days", name).write_bytes(content)
    done = recd("criteo", "convert", "days", "new", "--json", "figures.json", *options)
    if not done.ok:
        return done.refused("days")
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
    return Outcome.RIGHT


def tsv(lines: Sequence[Sequence[str]], end: str = "\n") -> bytes:
    return "".join("\t".join(line) + end for line in lines).encode()


@KINDS.add
def criteo_with_other_values(case: Case) -> Outcome:
    column, text, good = case.one_of(
        [
            (0, "2", False),
            (0, "", False),
            (0, "-1", False),
            (0, "1.0", False),
            (0, "01", False),
            (0, "+1", False),
            (3, "1.5", False),
            (3, "x", False),
            (3, "+5", False),
            (3, "-", False),
            (3, "1" * 19, False),
            (3, "9" * 18, True),
            (3, "-" + "9" * 18, True),
            (3, " 5", False),
            (3, "1e3", False),
            (3, "-0", True),
            (3, "0" * 18, True),
            (20, "xyz", False),
            (20, "0x1f", False),
            (20, "1" * 16, False),
            (20, "f" * 15, True),
            (20, "ABCDEF", True),
            (20, "-1", False),
            (20, "f" * 16, False),
            (20, " ", False),
            (20, "é", False),
            (20, "\0", False),
        ]
    )
    lines = criteo_lines()
    lines[case.number(0, 19, "line")][column] = text
    return criteo({"day_0": tsv(lines)}, lines if good else None)


@KINDS.add
def criteo_with_lines_of_another_form(case: Case) -> Outcome:
    """With ``--bad-lines skip`` the others are as they were."""
    lines: list[Any] = criteo_lines()
    at = case.number(0, 19, "line")
    line = lines[at]
    lines[at] = case.one_of(
        [
            line[:-1],
            [*line, ""],
            [*line, "1"],
            [],
            ["x"],
            ["\0"],
            line[1:],
            [" ".join(line)],
            [",".join(line)],
            ["", *line],
        ]
    )
    if case.draw(st.booleans(), "skip"):
        kept = [each for number, each in enumerate(lines) if number != at]
        return criteo({"day_0": tsv(lines)}, kept, "--bad-lines", "skip", skipped=1)
    return criteo({"day_0": tsv(lines)}, None)


@KINDS.add
def criteo_with_other_line_ends(case: Case) -> Outcome:
    end = case.one_of(["\n", "\r\n", "\r", "\n\n", "\0", "\t\n"])
    content = tsv(criteo_lines(), end)
    if case.draw(st.booleans(), "none at the end"):
        content = content[: -len(end)]
    return criteo({"day_0": content}, criteo_lines() if end in ("\n", "\r\n") else None)


@KINDS.add
def criteo_in_another_encoding(case: Case) -> Outcome:
    encoding = case.one_of(["utf-16", "utf-8-sig", "utf-32"])
    return criteo({"day_0": tsv(criteo_lines()).decode().encode(encoding)}, None)


@KINDS.add
def criteo_in_damaged_compression(case: Case) -> Outcome:
    data = tsv(criteo_lines())
    which = case.one_of(["gz", "zst"], "format")
    pack: Callable[[bytes], bytes] = (
        (lambda data: gzip.compress(data, mtime=0))
        if which == "gz"
        else zstandard.ZstdCompressor(write_checksum=True).compress
    )
    content, good = squeezed(case, data, pack(data))
    meant = None if good is None else [line.split("\t") for line in good.decode().splitlines()]
    return criteo({f"day_0.{which}": content}, meant)


@KINDS.add
def criteo_days_that_do_not_belong_together(case: Case) -> Outcome:
    lines = tsv(criteo_lines())
    files = case.one_of(
        [
            {"day_0": lines, "day_2": lines},
            {"day_1": lines},
            {"day_0": lines, "day_0.gz": gzip.compress(lines)},
            {"day_0": lines, "day_1.gz": gzip.compress(lines)},
            {"day_0": lines, "day_00": lines},
            {"day_0": lines, "train.txt": lines},
            {"day_-1": lines},
            {"test.txt": lines},
            {"day_0": b""},
            {"day_0": b"\n"},
            {},
            {"day_x": lines},
        ]
    )
    return criteo(files, None)


@KINDS.add
def criteo_cut_or_flipped(case: Case) -> Outcome:
    """Text has no checksum: lines that are Criteo's may be taken."""
    data = bytearray(tsv(criteo_lines()))
    if case.draw(st.booleans(), "cut"):
        del data[case.number(0, len(data) - 1, "bytes") :]
    else:
        data[case.number(0, len(data) - 1, "byte")] ^= 1 << case.number(0, 7, "bit")
    try:
        text = bytes(data).decode("ascii")
    except UnicodeDecodeError:
        return criteo({"day_0": bytes(data)}, None)
    lines = [line.removesuffix("\r").split("\t") for line in text.split("\n")]
    lines = lines[:-1] if lines[-1] == [""] else lines
    return criteo({"day_0": bytes(data)}, lines if lines and all(map(_is_criteo, lines)) else None)


def _is_criteo(line: Sequence[str]) -> bool:
    digits, hexadecimal = set("0123456789"), set("0123456789abcdefABCDEF")
    return (
        len(line) == 40
        and line[0] in ("0", "1")
        and all(
            not text
            or (0 < len(text.removeprefix("-")) < 19 and set(text.removeprefix("-")) <= digits)
            for text in line[1:14]
        )
        and all(len(text) < 16 and set(text) <= hexadecimal for text in line[14:])
    )


@KINDS.add
def criteo_npy_of_another_form(case: Case) -> Outcome:
    """Files of numpy, one of which is of another shape or type, or would run code."""
    arrays: dict[str, Any] = {
        "dense": np.ones((40, 13), np.float32),
        "sparse": np.ones((40, 26), np.int32),
        "labels": np.arange(40, dtype=np.int32).reshape(40, 1) % 2,
    }
    which = case.one_of(list(arrays), "file")
    good = arrays[which]
    arrays[which] = case.one_of(
        [
            good[:, :-1],
            good[:-1],
            good[None],
            good.astype("S4"),
            good.astype(object),
            good.astype(np.complex64),
            good.astype(">M8[s]"),
            good[:0],
            good[0, 0],
        ]
    )
    Path("days").mkdir()
    for day in (0, 1):
        for name, array in arrays.items():
            np.save(f"days/day_{day}_{name}.npy", array, allow_pickle=True)
    return _train_on_days(None)


@KINDS.add
def criteo_npy_damaged(case: Case) -> Outcome:
    Path("days").mkdir()
    for day in (0, 1):
        np.save(f"days/day_{day}_dense.npy", np.ones((40, 13), np.float32))
        np.save(f"days/day_{day}_sparse.npy", np.ones((40, 26), np.int32))
        np.save(f"days/day_{day}_labels.npy", np.arange(40, dtype=np.int32)[:, None] % 2)
    path = Path(f"days/day_0_{case.one_of(['dense', 'sparse', 'labels'], 'file')}.npy")
    data = path.read_bytes()
    if case.draw(st.booleans(), "cut"):
        path.write_bytes(data[: case.number(0, len(data) - 1, "bytes")])
    else:
        text = case.one_of([b"{'descr': '|O', ", b"__import__('os')", b"{{", b"\xff\xff"])
        path.write_bytes(data[:10] + text + data[10 + len(text) :])
    return _train_on_days(None)


def _train_on_days(meant: list[float] | None) -> Outcome:
    Path("registry.yaml").write_text(
        "version: 1\ndataset: {use: dlrm.criteo, options: {path: days, buckets: 8, prefetch: 0, "
        "evaluate: nothing}}\nconverter: {use: recd.kjt}\nmodel: {embedding_dim: 4, "
        "num_embeddings: 8, bottom_mlp: [4], top_mlp: [4]}\n"
        "training: {batch_size: 8, steps: 1, device: cpu}\n",
        encoding="utf-8",
    )
    done = recd("run", "registry.yaml", leaves=["days"])
    if not done.ok:
        return done.refused("days")
    if meant is None:
        wrong(f"{done} took what it should refuse")
    return Outcome.RIGHT


# Other lists


@KINDS.add
def popularity_of_another_form(case: Case) -> Outcome:
    """How often features are read, for the order of columns: taken or refused, rows stay."""
    name, content = case.one_of(
        [
            ("p.csv", b"items,5\nuser,x\n"),
            ("p.csv", b"items,-1\n"),
            ("p.csv", b"items,nan\n"),
            ("p.csv", b"items,inf\n"),
            ("p.csv", b"items\n"),
            ("p.csv", b"items,1,2\n"),
            ("p.csv", b"items,1\nitems,2\n"),
            ("p.csv", b""),
            ("p.csv", b"\xff\xfe"),
            ("p.csv", b"nobody,1\n"),
            ("p.csv", b"items,1e999\n"),
            ("p.csv", b'"items,1\n'),
            ("p.json", b"[]"),
            ("p.json", b"{"),
            ("p.json", b'{"items": "5"}'),
            ("p.json", b'{"items": null}'),
            ("p.json", b'{"items": NaN}'),
            ("p.json", b'{"items": -1}'),
            ("p.json", b'{"items": true}'),
            ("p.json", b'{"items": 1, "items": 2}'),
            ("p.json", b"[" * 100000),
            ("p.json", b'{"a":' * 100000),
            ("p.json", b'{"items": 1' + b"0" * 5000 + b"}"),
            ("p.json", b"null"),
        ]
    )
    Path(name).write_bytes(content)
    tables.write_two()
    options = ("--layout", "list", "--popularity", name)
    done = recd("convert-layout", "table", "new", *options)
    if not done.ok:
        return done.refused(name)
    if tables.texts(tables.rows_in("new")) != tables.texts(tables.rows()):
        wrong(f"{done}: other rows")
    # Counts of one feature add up.
    if content not in (b"items,1\nitems,2\n", b'{"items": 1, "items": 2}'):
        wrong(f"{done} took {content[:40]!r}")
    return Outcome.RIGHT


test_text_tables = KINDS.test()
