"""Files that one command writes for another, or for itself, and that somebody changed meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from tests.fuzz import tables
from tests.fuzz.cases import Case, Kinds
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
#: What may stand where a number stood.
OTHERS: list[Any] = [
    None,
    -1,
    0,
    1 << 70,
    1e400,
    float("nan"),
    "",
    "x",
    "5",
    True,
    [],
    {},
    0.5,
    1e-300,
]


def flip(case: Case, data: bytes) -> bytes:
    changed = bytearray(data)
    changed[case.place(data, "byte")] ^= 1 << case.number(0, 7, "bit")
    return bytes(changed)


def damaged(case: Case, path: str) -> bytes:
    """Flip a bit of a file, cut it off or write something behind; what it was before."""
    before = Path(path).read_bytes()
    how = case.one_of(["flip", "cut", "behind", "empty"], "how")
    after = {
        "flip": lambda: flip(case, before),
        "cut": lambda: before[: case.place(before, "bytes")],
        "behind": lambda: before + case.draw(st.binary(min_size=1, max_size=9), "more"),
        "empty": lambda: b"",
    }[how]()
    Path(path).write_bytes(after)
    return before


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


@KINDS.add
def counts_of_rows_changed(case: Case) -> Outcome:
    """What a filter keeps is counted once and noted; a note that was changed is counted anew."""
    tables.write_two()
    Path("registry.yaml").write_text(tables.registry(where=[["label", "==", 0]]), encoding="utf-8")
    cache = Path("cache").resolve()
    environ = {"XDG_CACHE_HOME": str(cache)}
    run = ("run", "registry.yaml", "--json", "figures.json")
    assert recd(*run, environ=environ).ok
    (note,) = cache.glob("recd/row_counts/*.json")
    change_json(case, note)
    done = recd(*run, environ=environ, leaves=["cache"])
    if not done.ok:
        return done.refused()
    if tables.figures() != tables.losses_of(row for row in tables.rows() if not row["label"]):
        wrong("other rows than the filter keeps")
    return Outcome.RIGHT


def change_json(case: Case, path: Path) -> None:
    """Another number somewhere, another value, or no JSON at all."""
    text = path.read_text(encoding="utf-8")
    digits = [at for at, letter in enumerate(text) if letter.isdigit()]
    how = case.one_of(["digit", "flip", "text"], "how")
    if how == "digit" and digits:
        at = digits[case.place(digits, "at")]
        text = text[:at] + case.one_of("0123456789", "digit") + text[at + 1 :]
    elif how == "flip" and text:
        path.write_bytes(flip(case, text.encode()))
        return
    else:
        text = case.one_of(
            [
                "",
                "null",
                "[]",
                "{}",
                "5",
                '"x"',
                "[[1]]",
                "[" * 100_000,
                "\0",
                '{"version": 1}',
                text[:-3],
            ],
            "text",
        )
    path.write_text(text, encoding="utf-8")


def broken_off(case: Case, command: list[str], module: Any, name: str, times: int) -> list[Path]:
    """A command is stopped as by Ctrl-C in a call; the files of JSON that it leaves."""
    kept: Callable[..., Any] = getattr(module, name)
    left = times

    def stops(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return kept(*arguments, **options)

    setattr(module, name, stops)
    try:
        from click.testing import CliRunner

        from recd_plugins.cli import main

        CliRunner().invoke(main, command)
    finally:
        setattr(module, name, kept)
    return sorted(Path().glob(".*/**/*.json"))


@KINDS.add
def a_cluster_run_that_broke_off(case: Case) -> Outcome:
    """What it left is changed; the same command still gives the whole table."""
    from recd_plugin_recd.cluster import embedded, job

    for day in (1, 2):
        tables.write(f"table/day={day}/a.parquet", tables.table().slice(24 * day - 24, 24))
    module = case.one_of([job, embedded], "module")
    after = case.number(0, 2, "after")
    notes = broken_off(case, ["cluster", "table", "new"], module, "write_note", after)
    if notes:
        change_json(case, case.one_of(notes, "note"))
    else:
        shutil.rmtree("new", ignore_errors=True)  # it was done before it could break off
    done = recd("cluster", "table", "new", leaves=[".new.recd-cluster"])
    if not done.ok:
        return done.refused()
    if tables.counted(tables.rows_in("new")) != tables.counted(tables.rows()):
        wrong(f"{done}: other rows")
    if left := [name for name in os.listdir() if name.startswith(".")]:
        wrong(f"{left} is left behind")
    return Outcome.RIGHT


@KINDS.add
def a_conversion_of_criteo_that_broke_off(case: Case) -> Outcome:
    from recd_plugin_dlrm.criteo import convert

    line = "\t".join(["1", *["5"] * 13, *["ab"] * 26]) + "\n"
    Path("days").mkdir()
    for day in (0, 1):
        Path(f"days/day_{day}").write_text(line * 40)
    command = ["criteo", "convert", "days", "new", "--part-rows", "16"]
    notes = broken_off(case, command, convert, "write_note", case.number(0, 4, "after"))
    if notes:
        change_json(case, case.one_of(notes, "note"))
    else:
        shutil.rmtree("new", ignore_errors=True)
    done = recd(*command, leaves=[".new.recd-criteo"])
    if not done.ok:
        return done.refused()
    found = tables.rows_in("new")
    if len(found) != 80 or any(row["cat_3"] != 0xAB or row["int_2"] != 5 for row in found):
        wrong(f"{len(found)} rows, or other values")
    return Outcome.RIGHT


@KINDS.add
def an_index_of_criteo_changed(case: Case) -> Outcome:
    line = "\t".join(["1", *["5"] * 13, *["ab"] * 26]) + "\n"
    Path("days").mkdir()
    Path("days/day_0").write_text(line * 40)
    Path("registry.yaml").write_text(
        "version: 1\ndataset: {use: dlrm.criteo, options: {path: days, buckets: 8, prefetch: 0, "
        "evaluate: nothing}}\nconverter: {use: recd.kjt}\nmodel: {embedding_dim: 4, "
        "num_embeddings: 8, bottom_mlp: [4], top_mlp: [4]}\n"
        "training: {batch_size: 8, device: cpu}\n",
        encoding="utf-8",
    )
    run = ("run", "registry.yaml", "--json", "figures.json")
    assert recd(*run).ok
    good = tables.figures()
    (note,) = Path("days/.recd-criteo").glob("*.json")
    change_json(case, note)
    done = recd(*run, leaves=["days"])
    if not done.ok:
        return done.refused()
    if tables.figures() != good:
        wrong(f"losses {tables.figures()}, not {good}")
    return Outcome.RIGHT


@KINDS.add
def statistics_in_footers(case: Case) -> Outcome:
    """What ``recd cluster`` notes in footers is for advice; what is none is told, or not used."""
    tables.write_two()
    assert recd("cluster", "table", "new").ok
    (path,) = tables.files_of("new")
    data = pq.read_table(path)
    said = json.loads(pq.read_metadata(path).metadata[b"recd.statistics"])
    name = case.one_of(sorted(said), "field")
    said[name] = case.one_of([*OTHERS, [None], {"user": None}, {"x": {}}], "value")
    text = case.one_of([json.dumps(said), "", "[]", "[" * 100_000, "\x01"], "text")
    metadata = {b"recd.statistics": text.encode()}
    write = {"row_group_size": 12, "write_page_checksum": True}
    pq.write_table(data.replace_schema_metadata(metadata), path, **write)
    os.rename("table", "before")
    os.rename("new", "table")
    Path("registry.yaml").write_text(tables.registry(), encoding="utf-8")
    command = case.one_of(
        [["run", "registry.yaml"], ["analyze", "table"], ["plan", "registry.yaml"]]
    )
    done = recd(*command)
    return Outcome.RIGHT if done.ok else done.refused("table")


@KINDS.add
def generated_tables_changed(case: Case) -> Outcome:
    """A table that a registry would generate, and that somebody has put something else into."""
    text = (
        "version: 1\ndataset: {use: recd.session_parquet, options: {path: made, prefetch: 0, "
        "generate: {rows: 24}}}\nconverter: {use: recd.kjt}\n"
        "preprocessing: [{use: recd.sigrid_hash, features: ['*'], options: {buckets: 9}}]\n"
        "model: {embedding_dim: 4, num_embeddings: 9, bottom_mlp: [4], top_mlp: [4]}\n"
        "training: {batch_size: 8, steps: 1, device: cpu}\n"
    )
    Path("registry.yaml").write_text(text, encoding="utf-8")
    assert recd("generate", "made", "--rows", 24).ok
    path = Path("made/part-00000.parquet")
    how = case.one_of(["flip", "cut", "metadata", "other", "gone", "rows"], "how")
    if how == "flip":
        path.write_bytes(flip(case, path.read_bytes()))
    elif how == "cut":
        path.write_bytes(path.read_bytes()[: case.number(0, 2000, "bytes")])
    elif how == "gone":
        path.unlink()
    elif how == "other":
        tables.write(path, tables.table())
    elif how == "rows":
        Path("registry.yaml").write_text(text.replace("rows: 24", "rows: 23"), encoding="utf-8")
    else:
        data = pq.read_table(path)
        value = case.one_of([b"", b"[]", b"null", b"[" * 100_000, b"{}", b"\xff"], "metadata")
        pq.write_table(
            data.replace_schema_metadata(dict.fromkeys(data.schema.metadata, value)), path
        )
    done = recd("run", "registry.yaml")
    if done.ok and how != "flip":
        wrong(f"{how} was taken")
    return Outcome.RIGHT if done.ok else done.refused("made")


test_notes = KINDS.test()
