"""Conditions on rows of Parquet tables."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz import tables
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Outcome
from tests.fuzz.tables import rows, table, write, write_two

KINDS = Kinds("parquet filters")
FILES = ("table/a.parquet", "table/b.parquet")


@KINDS.add
def a_filter_and_statistics_that_are_missing(case: Case) -> Outcome:
    """Rows that a filter keeps are the same with and without statistics."""
    options = {
        "write_statistics": case.one_of([True, False, ["ts"]]),
        "row_group_size": case.one_of([1, 5, 48]),
    }
    write(FILES[0], table(), **options)
    column = case.one_of(["ts", "label", "price", "session_id"], "column")
    values = sorted({row[column] for row in rows()})
    value = case.one_of(values, "value")
    op = case.one_of(["==", "!=", "<", "<=", ">", ">="], "op")
    kept = {
        "==": lambda one: one == value,
        "!=": lambda one: one != value,
        "<": lambda one: one < value,
        "<=": lambda one: one <= value,
        ">": lambda one: one > value,
        ">=": lambda one: one >= value,
    }[op]
    meant = [row for row in rows() if kept(row[column])]
    Path("registry.yaml").write_text(tables.registry(where=[[column, op, value]]), encoding="utf-8")
    found = tables.losses()
    if not isinstance(found, list):
        if len(meant) >= tables.BATCH:
            tables.wrong(f"{len(meant)} rows are left, yet: {found.output}")
        return found.refused("table")
    if found != tables.losses_of(meant):
        tables.wrong(f"losses {found}")
    return Outcome.RIGHT


@KINDS.add
def conditions_that_are_none(case: Case) -> Outcome:
    write_two()
    condition = case.one_of(
        [
            ["ts", "~", 1],
            ["ts", "==", "x"],
            ["ts", "==", 1.5],
            ["ts", "==", 1 << 70],
            ["ts", "in", []],
            ["ts", "in", 5],
            ["ts", "in", [[]]],
            ["ts", "is null", 1],
            ["ts"],
            [],
            {},
            "ts > 1",
            ["", "==", 1],
            ["user", "==", 1],
            ["user", "==", [1]],
            ["price", "==", "1"],
            ["price", "<", True],
            ["label", "==", 1000],
            ["ts", "==", None],
            [["ts"], "==", 1],
            ["ts", "==", {"a": 1}],
        ]
    )
    Path("registry.yaml").write_text(tables.registry(where=[condition]), encoding="utf-8")
    found = tables.losses()
    if isinstance(found, list):
        tables.wrong(f"{condition} was taken")
    return found.refused("registry.yaml" if "registry.yaml" in found.output else "table")


test_parquet_filters = KINDS.test()
