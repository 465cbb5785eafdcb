"""Ids that no row of a table has, on every way that ids take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from tests.fuzz import tables
from tests.fuzz.cases import Case, Done, fuzz, wrong
from tests.fuzz.tables import READ

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


def registry(converter: str, sharding: str = "", steps: str = "", more: str = "") -> str:
    text = tables.registry(buckets=None).replace("recd.ikjt", converter)
    if steps:
        text = text.replace("model:", f"preprocessing: [{{use: {steps}}}]\nmodel:", 1)
    if sharding:
        more += f"sharding: [{{use: {sharding}, tables: ['t_*']}}]\n"
    return text + more


def one_way(case: Case, steps: str = "") -> str:
    pooling = "pooling: [{use: recd.mean, features: [items]}]\n" if case.flag("sequence") else ""
    converter, sharding = case.one_of(CONVERTERS, "converter"), case.one_of(SHARDINGS, "sharding")
    return registry(converter, sharding, steps, pooling)


def put(case: Case, values: Sequence[Any]) -> tuple[list[Any], str, int]:
    given = tables.rows()
    column = case.one_of(["user", "items"], "column")
    row = case.number(0, READ - 1, "row")
    ids = list(given[row][column])
    ids.insert(case.number(0, len(ids), "at"), case.one_of(values, "id"))
    given[row][column] = ids
    return given, column, row


def run(text: str) -> list[float] | Done:
    tables.write_registry(text)
    return tables.losses()


def refused(found: list[float] | Done) -> Done:
    if isinstance(found, list):
        wrong(f"trained to {found}")
    return found


@fuzz
def test_outside_of_the_table(case: Case) -> None:
    given, column, row = put(case, OUTSIDE)
    tables.write("table/a.parquet", tables.table(given))
    (odd,) = [id for id in given[row][column] if not 0 <= id < tables.NUM_IDS]
    refused(run(one_way(case))).refused("table/a.parquet", f"row {row}", column, odd)


@fuzz
def test_outside_in_another_width(case: Case) -> None:
    kind, value = case.one_of(
        [
            *((kind, -1) for kind in (pa.int8(), pa.int16(), pa.int32())),
            *((kind, (1 << kind.bit_width) - 1) for kind in (pa.uint8(), pa.uint16(), pa.uint32())),
            *((pa.uint64(), value) for value in ((1 << 64) - 1, 1 << 63)),
            (pa.int8(), 127),
        ],
        "type",
    )
    given, column, _ = put(case, [value])
    lists = pa.array([each[column] for each in given], pa.list_(kind))
    tables.write("table/a.parquet", tables.with_column(tables.table(), column, lists))
    refused(run(one_way(case))).refused("table/a.parquet", column, value)


@fuzz
def test_ids_that_are_right(case: Case) -> None:
    which = case.one_of(["ends", "huge", "empty batch", "empty"], "which")
    given, column, row = put(case, [0, tables.NUM_IDS - 1])
    if which == "huge":
        given[row]["items"] = [at % tables.NUM_IDS for at in range(20_000)]
    elif which != "ends":
        for each in given if which == "empty" else given[8:16]:
            each[column] = []
    tables.write("table/a.parquet", tables.table(given))
    sharding, other = case.one_of(SHARDINGS, "sharding"), case.one_of(CONVERTERS[1:], "converter")
    plain, found = run(registry("recd.kjt", sharding)), run(registry(other, sharding))
    if isinstance(plain, Done) or isinstance(found, Done):
        wrong(f"refused: {plain} {found}")
    if max(abs(one - two) for one, two in zip(plain, found, strict=True)) > 1e-5:
        wrong(f"losses {found}, of plain batches {plain}")


@fuzz
def test_out_of_a_step_of_preprocessing(case: Case) -> None:
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
            ("recd.ngram, features: ['*'], options: {n: 2}", None),
        ],
        "step",
    )
    given, _, _ = put(case, OUTSIDE if good else [0])
    tables.write("table/a.parquet", tables.table(given))
    found = run(one_way(case, step))
    if isinstance(found, Done):
        if good:
            wrong(f"refused: {found.output}")
        found.refused()
    elif good is False:
        wrong(f"trained to {found}")
