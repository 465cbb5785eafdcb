"""Text that becomes traces."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Outcome, recd, wrong
from tests.fuzz.squeezed import squeezed

KINDS = Kinds("traces")
TRACE = [at * at % 13 for at in range(60)]


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


@KINDS.add
def traces_in_damaged_gzip(case: Case) -> Outcome:
    data = "".join(f"{id}\n" for id in TRACE).encode()
    content, good = squeezed(case, data, gzip.compress(data, mtime=0))
    meant = None if good is None else [int(word) for word in good.split()]
    return trace(content, meant, "trace.txt.gz")


test_traces = KINDS.test()
