"""What commands leave beside tables, changed since or of a run that broke off."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tests.fuzz import tables
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.damage import OTHERS, flip
from tests.fuzz.oracle import Outcome, recd, wrong

KINDS = Kinds("unfinished")


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
    from recd_plugin_recd.cluster import job

    for day in (1, 2):
        tables.write(f"table/day={day}/a.parquet", tables.table().slice(24 * day - 24, 24))
    after = case.number(0, 1, "after")
    notes = broken_off(case, ["cluster", "table", "new"], job, "write_note", after)
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


test_unfinished = KINDS.test()
