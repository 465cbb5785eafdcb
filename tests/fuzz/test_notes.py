"""Files that one command writes for another, or for itself, and that somebody changed meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from tests.fuzz import tables
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.damage import OTHERS, damaged
from tests.fuzz.oracle import Outcome, recd, wrong

KINDS = Kinds("notes")

TOPOLOGY: dict[str, Any] = {
    "device": "cuda",
    "ranks_per_node": 4,
    "nodes": 2,
    "hbm_bytes": 42949672960,
    "hbm_bandwidth": 1.555e12,
    "ddr_bytes": 137438953472,
    "ddr_bandwidth": 40.0e9,
    "hbm_to_ddr_bandwidth": 31.5e9,
    "intra_node_bandwidth": 300.0e9,
    "inter_node_bandwidth": 12.5e9,
    "flops": 19.5e12,
    "collectives": {
        name: {"bytes_per_second": 9.0e9, "seconds": 1.0e-3}
        for name in ("a2a_global", "a2a_intra", "ar_global", "ar_cross")
    },
    "tiers": {"memory_multiplier": 2.3, "saved_activations": 0.5},
}


@KINDS.add
def topologies_with_other_values(case: Case) -> Outcome:
    tables.write_two()
    Path("registry.yaml").write_text(tables.registry(), encoding="utf-8")
    spec = json.loads(json.dumps(TOPOLOGY))
    field = case.one_of([*sorted(spec), "more", "nothing"], "field")
    value = case.one_of(OTHERS, "value")
    if field == "collectives" and case.draw(st.booleans(), "inside"):
        spec[field]["a2a_global"][case.one_of(["bytes_per_second", "seconds"])] = value
    elif field == "tiers" and case.draw(st.booleans(), "inside"):
        spec[field][case.one_of(["memory_multiplier", "saved_activations"])] = value
    elif field == "nothing":
        del spec[case.one_of(sorted(spec), "gone")]
    else:
        spec[field] = value
    text = json.dumps(spec).replace("Infinity", ".inf").replace("NaN", ".nan")
    Path("t.yaml").write_text(text, encoding="utf-8")
    line = ("plan", "registry.yaml", "--topology", "t.yaml", "--json", "plan.json")
    done = recd(*line)
    if not done.ok:
        return done.refused()
    if isinstance(value, (str, list, bool)) and field not in ("nothing",):
        wrong(f"{done} took {field}: {value!r}")
    return Outcome.RIGHT


@KINDS.add
def topologies_damaged(case: Case) -> Outcome:
    tables.write_two()
    Path("registry.yaml").write_text(tables.registry(), encoding="utf-8")
    Path("t.yaml").write_text(json.dumps(TOPOLOGY), encoding="utf-8")
    damaged(case, "t.yaml")
    done = recd("plan", "registry.yaml", "--topology", "t.yaml")
    return Outcome.RIGHT if done.ok else done.refused()


def write_profile() -> str:
    tables.write_two()
    Path("registry.yaml").write_text(tables.registry(buckets=None), encoding="utf-8")
    assert recd("profile", "registry", "registry.yaml", "--all-rows", "-o", "p.parquet").ok
    return "p.parquet"


def shown(path: str) -> Any:
    """What ``recd profile show`` says of a profile, or how it was refused."""
    done = recd("profile", "show", path, "--json", "shown.json")
    return json.loads(Path("shown.json").read_text("utf-8"))["tables"] if done.ok else done


@KINDS.add
def access_profiles_damaged(case: Case) -> Outcome:
    path = write_profile()
    good = shown(path)
    damaged(case, path)
    found = shown(path)
    if isinstance(found, dict):
        if found != good:
            wrong(f"other counts of a damaged profile: {found}")
        return Outcome.RIGHT
    return found.refused(path)


@KINDS.add
def access_profiles_with_other_lines(case: Case) -> Outcome:
    path = write_profile()
    data = pq.read_table(path)
    column = case.one_of(["row", "accesses"], "column")
    values = data[column].to_pylist()
    at = case.number(0, len(values) - 1, "line")
    odd: dict[str, list[Any]] = {
        "row": [-1, tables.NUM_IDS, 1 << 62, values[at - 1], None],
        "accesses": [-1.0, float("nan"), float("inf"), 1e300, None, -0.0],
    }
    values[at] = case.one_of(odd[column], "value")
    field = data.schema.field(column)
    data = (
        data.set_column(data.schema.get_field_index(column), field, pa.array(values, field.type))
        if values[at] is not None
        else data.set_column(
            data.schema.get_field_index(column),
            field.with_nullable(True),
            pa.array(values, field.type),
        )
    )
    sizes = [pq.read_metadata(path).row_group(at).num_rows for at in range(2)]
    with pq.ParquetWriter(path, data.schema) as writer:
        writer.write_table(data.slice(0, sizes[0]))
        writer.write_table(data.slice(sizes[0]))
    found = shown(path)
    if isinstance(found, dict):
        if values[at] == 0:
            return Outcome.RIGHT
        wrong(f"{column} {values[at]} was taken: {found}")
    return found.refused(path)


@KINDS.add
def access_profiles_with_other_metadata(case: Case) -> Outcome:
    path = write_profile()
    data = pq.read_table(path)
    key = b"recd_plugins.access_profile"
    said = json.loads(data.schema.metadata[key])
    field = case.one_of(["version", "source", "tables", *sorted(said["tables"][0])], "field")
    inner = said if field in said else said["tables"][0]
    before = inner[field]
    inner[field] = case.one_of([*OTHERS[:-2], "[", [None], [[]]], "value")
    text = case.one_of([json.dumps(said), json.dumps(said), "", "null", "[" * 100_000], "text")
    data = data.replace_schema_metadata({**data.schema.metadata, key: text.encode()})
    sizes = [pq.read_metadata(path).row_group(at).num_rows for at in range(2)]
    with pq.ParquetWriter(path, data.schema) as writer:
        writer.write_table(data.slice(0, sizes[0]))
        writer.write_table(data.slice(sizes[0]))
    found = shown(path)
    if isinstance(found, dict):
        # Free text, bounds of errors and sizes may be others and well-formed.
        if field not in (
            "source",
            "table",
            "samples",
            "error",
            "total",
            "batch_size",
            "features",
            "dedupe_factor",
            "num_embeddings",
        ):
            wrong(f"{field} {inner[field]!r} in place of {before!r} was taken: {found}")
        return Outcome.RIGHT
    return found.refused(path)


@KINDS.add
def trace_profiles_damaged(case: Case) -> Outcome:
    Path("t.txt").write_text(" ".join(str(at * at % 7) for at in range(60)))
    assert recd("trace", "profile", "t.txt", "-o", "p.parquet").ok
    assert recd("trace", "generate", "p.parquet", "-o", "good.txt").ok
    damaged(case, "p.parquet")
    done = recd("trace", "generate", "p.parquet", "-o", "new.txt")
    if not done.ok:
        return done.refused("p.parquet")
    if Path("new.txt").read_bytes() != Path("good.txt").read_bytes():
        wrong("another trace of a damaged profile")
    return Outcome.RIGHT


@KINDS.add
def histograms_of_reuse(case: Case) -> Outcome:
    content = case.one_of(
        [
            b"",
            b"x\n",
            b"\xff\xfe",
            b"1 2 3\n",
            b"1,2\n3,x\n",
            b"-1,5\n",
            b"nan,1\n",
            b"\0",
            b"1" * 9999,
            b"name\n1 2\n",
            b"a: b\n",
            b"[1, 2]\n",
            b"1:2 3:4\n",
            b"{}",
        ]
    )
    Path("h.txt").write_bytes(content)
    line = (
        "profile",
        "reuse",
        "h.txt",
        "--name",
        "x",
        "--table",
        "t",
        "--length",
        3,
        "-o",
        "p.parquet",
    )
    return recd(
        *line, *case.one_of([(), ("--rows", 10), ("--rows", 10, "--read-rows", 5)])
    ).refused()


test_notes = KINDS.test()
