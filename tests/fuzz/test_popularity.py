"""Counts of reads, for the order of columns."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz import tables
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Outcome, recd, wrong

KINDS = Kinds("popularity")


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


test_popularity = KINDS.test()
