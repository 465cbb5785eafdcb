"""Ids that no row of a table has, on every way that ids take."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from tests.fuzz import tables
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Done, Outcome, recd, wrong

KINDS = Kinds("ids")

CONVERTERS = [
    "recd.kjt",
    "recd.ikjt",
    "recd.ikjt, options: {groups: [[user], [items]]}",
    "recd.ikjt, options: {groups: [[user, items]]}",
    "recd.ikjt, options: {groups: auto}",
    "recd.partial_ikjt",
]
SHARDINGS = ["", "torchrec.row_wise", "torchrec.data_parallel"]
#: Ids outside of a table, in int64.
OUTSIDE = [-1, tables.NUM_IDS, tables.NUM_IDS + 1, -(1 << 63), (1 << 63) - 1, 1 << 32, -(1 << 31)]
READ = tables.STEPS * tables.BATCH


def registry(case: Case, steps: str = "") -> str:
    """One of the ways: a converter, a pooling, a sharding."""
    text = tables.registry(buckets=None).replace("recd.ikjt", case.one_of(CONVERTERS, "converter"))
    if steps:
        text = text.replace("model:", f"preprocessing: {steps}\nmodel:", 1)
    if case.draw(st.booleans(), "pooled as a sequence"):
        text += "pooling: [{use: recd.mean, features: [items]}]\n"
    if sharding := case.one_of(SHARDINGS, "sharding"):
        text += f"sharding: [{{use: {sharding}, tables: ['t_*']}}]\n"
    return text


def put(
    case: Case, values: Sequence[Any], first: int = 0, last: int = READ - 1
) -> tuple[list[Any], str, int]:
    """The rows with one of ``values`` in a list of a row; the column and the row."""
    given = tables.rows()
    column = case.one_of(["user", "items"], "column")
    row = case.number(first, last, "row")
    ids = list(given[row][column])
    ids.insert(case.number(0, len(ids), "at"), case.one_of(values, "id"))
    given[row][column] = ids
    return given, column, row


def run(text: str) -> list[float] | Done:
    Path("registry.yaml").write_text(text, encoding="utf-8")
    return tables.losses()


@KINDS.add
def outside_of_the_table(case: Case) -> Outcome:
    """Refused by file, row, column and id."""
    given, column, row = put(case, OUTSIDE)
    tables.write("table/a.parquet", tables.table(given))
    found = run(registry(case))
    if isinstance(found, list):
        wrong(f"trained to {found}")
    (odd,) = [id for id in given[row][column] if not 0 <= id < tables.NUM_IDS]
    return found.refused("table/a.parquet", f"row {row}", column, odd)


@KINDS.add
def outside_in_another_width(case: Case) -> Outcome:
    """Also where ids of the file have fewer bits, or an unsigned type."""
    kind, value = case.one_of(
        [
            (pa.int8(), -1),
            (pa.int8(), 127),
            (pa.int16(), -(1 << 15)),
            (pa.int32(), -1),
            (pa.uint8(), 255),
            (pa.uint16(), 65535),
            (pa.uint32(), (1 << 32) - 1),
            (pa.uint64(), (1 << 64) - 1),
            (pa.uint64(), 1 << 63),
        ],
        "type",
    )
    given, column, _ = put(case, [value])
    data = tables.table(tables.rows())
    lists = pa.array([each[column] for each in given], pa.list_(kind))
    data = data.set_column(data.column_names.index(column), column, lists)
    tables.write("table/a.parquet", data)
    found = run(registry(case))
    if isinstance(found, list):
        wrong(f"trained to {found}")
    return found.refused("table/a.parquet", column, value)


@KINDS.add
def outside_in_rows_that_are_not_read(case: Case) -> Outcome:
    """Rows behind the last step say nothing."""
    given, _, _ = put(case, OUTSIDE, READ + tables.BATCH, tables.ROWS - 1)
    text = registry(case)
    tables.write("table/a.parquet", tables.table())
    expected = run(text)
    assert isinstance(expected, list), expected
    tables.write("table/a.parquet", tables.table(given))
    found = run(text)
    if isinstance(found, Done):
        return found.refused("table/a.parquet")
    if found != expected:
        wrong(f"losses {found}, not {expected}")
    return Outcome.RIGHT


@KINDS.add
def the_last_row_of_the_table(case: Case) -> Outcome:
    """Ids at both ends are right, whatever way they go: losses of one way are those of another."""
    given, _, _ = put(case, [0, tables.NUM_IDS - 1])
    tables.write("table/a.parquet", tables.table(given))
    sharding = case.one_of(SHARDINGS, "sharding")
    more = f"sharding: [{{use: {sharding}, tables: ['t_*']}}]\n" if sharding else ""
    plain, other = (
        run(tables.registry(buckets=None).replace("recd.ikjt", converter) + more)
        for converter in ("recd.kjt", case.one_of(CONVERTERS[1:], "converter"))
    )
    if isinstance(plain, Done) or isinstance(other, Done):
        wrong(f"refused: {plain} {other}")
    if max(abs(one - two) for one, two in zip(plain, other, strict=True)) > 1e-5:
        wrong(f"losses {other}, of plain batches {plain}")
    return Outcome.RIGHT


@KINDS.add
def out_of_a_step_of_preprocessing(case: Case) -> Outcome:
    """Ids that a step makes are checked like those of the data."""
    step, good = case.one_of(
        [
            ("recd.sigrid_hash, features: ['*'], options: {buckets: 41}", None),
            ("recd.sigrid_hash, features: ['*'], options: {buckets: 40}", True),
            ("recd.sigrid_hash, features: ['*'], options: {buckets: 1000000}", False),
            ("recd.sigrid_hash, features: ['*'], options: {buckets: 9223372036854775807}", False),
            ("recd.clamp, features: ['*'], options: {lower: 0, upper: 39}", True),
            ("recd.clamp, features: ['*'], options: {lower: -5, upper: -1}", False),
            ("recd.clamp, features: ['*'], options: {lower: 40, upper: 41}", False),
            ("recd.first_x, features: ['*'], options: {x: 1}", None),
            ("recd.first_x, features: ['*'], options: {x: 0}", None),
            ("recd.ngram, features: ['*'], options: {n: 2}", None),
        ],
        "step",
    )
    given, _, _ = put(case, OUTSIDE if good else [0])
    tables.write("table/a.parquet", tables.table(given))
    found = run(registry(case, f"[{{use: {step}}}]"))
    if isinstance(found, Done):
        if good:
            wrong(f"refused: {found.output}")
        return found.refused()
    if good is False:
        wrong(f"trained to {found}")
    return Outcome.RIGHT


@KINDS.add
def clamped(case: Case) -> Outcome:
    """Extreme ids become what Python's min and max make of them."""
    low, high = sorted((case.number(0, 39, "one"), case.number(0, 39, "two")))
    given, _, _ = put(case, [*OUTSIDE, 0, 39])
    step = f"recd.clamp, features: ['*'], options: {{lower: {low}, upper: {high}}}"
    return counted(given, step, lambda id: min(max(id, low), high))


def counted(given: list[dict[str, Any]], step: str, meant: Callable[[int], int]) -> Outcome:
    """A profile of the ids that a step makes, next to plain counting."""
    tables.write("table/a.parquet", tables.table(given))
    text = tables.registry(buckets=None).replace(
        "model:", f"preprocessing: [{{use: {step}}}]\nmodel:", 1
    )
    Path("registry.yaml").write_text(text, encoding="utf-8")
    output = ("-o", "p.parquet", "--json", "p.json")
    done = recd("profile", "registry", "registry.yaml", "--all-rows", *output)
    if not done.ok:
        wrong(f"refused: {done.output}")
    found: dict[str, Counter[int]] = {}
    for row in tables.rows_in("p.parquet"):
        found.setdefault(row["table"], Counter())[row["row"]] += int(row["accesses"])
    for name in ("user", "items"):
        expected = Counter(meant(id) for row in given for id in row[name])
        if found[f"t_{name}"] != expected:
            wrong(f"{name}: {found[f't_{name}']}, not {expected}")
    return Outcome.RIGHT


@KINDS.add
def plain_counts(case: Case) -> Outcome:
    """A profile refuses ids that no row has, and counts all others."""
    values = case.one_of([OUTSIDE, [0, 39]], "ids")
    given, column, row = put(case, values, 0, tables.ROWS - 1)
    tables.write("table/a.parquet", tables.table(given))
    Path("registry.yaml").write_text(tables.registry(buckets=None), encoding="utf-8")
    done = recd(
        "profile", "registry", "registry.yaml", "--all-rows", "-o", "p.parquet", "--json", "p.json"
    )
    if not done.ok:
        return done.refused("table/a.parquet", f"row {row}", column)
    if values is OUTSIDE:
        wrong(f"{done} counted ids that no row has")
    figures = json.loads(Path("p.json").read_text(encoding="utf-8"))["tables"]
    for name in ("user", "items"):
        if figures[f"t_{name}"]["accesses"] != sum(len(each[name]) for each in given):
            wrong(f"{figures[f't_{name}']}")
    return Outcome.RIGHT


@KINDS.add
def huge_lists(case: Case) -> Outcome:
    """A list that is thousands of times as long as the others."""
    given = tables.rows()
    count = case.one_of([1000, 20_000], "ids")
    given[case.number(0, READ - 1, "row")]["items"] = [at % tables.NUM_IDS for at in range(count)]
    tables.write("table/a.parquet", tables.table(given))
    found = run(registry(case))
    return Outcome.RIGHT if isinstance(found, list) else found.refused()


@KINDS.add
def no_ids_at_all(case: Case) -> Outcome:
    """A feature whose lists are all empty, in a batch or in the whole table."""
    whole = case.draw(st.booleans(), "in the whole table")
    column = case.one_of(["user", "items"], "column")
    given = [
        {**row, column: []} if whole or 8 <= at < 16 else row
        for at, row in enumerate(tables.rows())
    ]
    tables.write("table/a.parquet", tables.table(given))
    plain, other = (
        run(tables.registry(buckets=None).replace("recd.ikjt", converter))
        for converter in ("recd.kjt", case.one_of(CONVERTERS[1:], "converter"))
    )
    if isinstance(plain, Done) or isinstance(other, Done):
        wrong(f"refused: {plain} {other}")
    if max(abs(one - two) for one, two in zip(plain, other, strict=True)) > 1e-5:
        wrong(f"losses {other}, of plain batches {plain}")
    return Outcome.RIGHT


test_ids = KINDS.test()
