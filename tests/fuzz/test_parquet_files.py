"""Files of a Parquet table: none, odd, doubled, linked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from hypothesis import strategies as st
from tests.fuzz import tables
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Outcome
from tests.fuzz.tables import ROWS, rows, table, use, write, write_two

KINDS = Kinds("parquet files")
FILES = ("table/a.parquet", "table/b.parquet")


@KINDS.add
def empty_files(case: Case) -> Outcome:
    write_two()
    for name in case.draw(st.sets(st.sampled_from(["0", "aa", "c"]), min_size=1), "names"):
        write(f"table/{name}.parquet", table().slice(0, 0))
        if case.draw(st.booleans(), "no row group"):
            with pq.ParquetWriter(f"table/{name}.parquet", tables.SCHEMA, store_schema=False):
                pass
    return use(case, rows())


@KINDS.add
def empty_row_groups(case: Case) -> Outcome:
    with pq.ParquetWriter("table.parquet", tables.SCHEMA, store_schema=False) as writer:
        for at in range(0, ROWS, 12):
            if case.draw(st.booleans(), "empty"):
                writer.write_table(table().slice(0, 0))
            writer.write_table(table().slice(at, 12))
        writer.write_table(table().slice(0, 0))
    Path("table").mkdir()
    Path("table.parquet").rename(FILES[0])
    return use(case, rows())


@KINDS.add
def nothing_in_the_table(case: Case) -> Outcome:
    which = case.one_of(["rows", "files", "folder", "batch"], "nothing")
    if which == "rows":
        write(FILES[0], table().slice(0, 0))
        return use(case, None, "run")
    if which == "batch":
        write(FILES[0], table().slice(0, tables.BATCH - 1))
        return use(case, None, "run")
    if which == "files":
        Path("table").mkdir()
    return use(case, None)


@KINDS.add
def hidden_files(case: Case) -> Outcome:
    write_two()
    names = [
        "_SUCCESS",
        "_metadata",
        ".a.parquet",
        "_b.parquet",
        "a.parquet.crc",
        "x.csv",
        ".tmp/c.parquet",
    ]
    for name in case.draw(st.sets(st.sampled_from(names), min_size=1), "names"):
        path = Path("table", name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(case.draw(st.binary(max_size=9), "content"))
    return use(case, rows())


@KINDS.add
def odd_names(case: Case) -> Outcome:
    write_two()
    name = case.one_of(
        [
            "a b",
            "50%",
            "%41",
            "a\nb",
            "a'b",
            'a"b',
            "ä",
            "日本",
            "a=b",
            "-x",
            "*",
            "[a]",
            "a\\b",
            "x" * 200,
            "a\tb",
            "#",
            "?q",
            "a;b",
            "{a}",
            "a.parquet",
        ],
        "name",
    )
    at = case.one_of(["file", "folder"], "of")
    if at == "file":
        os.rename(FILES[1], f"table/{name}.parquet")
    else:
        Path("table", name).mkdir()
        os.rename(FILES[1], f"table/{name}/b.parquet")
    return use(case, tables.rows_in("table"))


@KINDS.add
def the_same_file_twice(case: Case) -> Outcome:
    write_two()
    how: Callable[..., Any] = case.one_of([os.link, shutil.copyfile], "how")
    how(FILES[0], "table/c.parquet")
    return use(case, [*rows(), *rows()[: ROWS // 2]])


@KINDS.add
def symbolic_links(case: Case) -> Outcome:
    write_two()
    which = case.one_of(["file", "folder", "folder in it", "dangling", "loop", "itself"], "to")
    if which == "file":
        os.rename(FILES[1], "elsewhere")
        os.symlink("../elsewhere", FILES[1])
        return use(case, rows())
    if which == "folder":
        os.rename("table", "elsewhere")
        os.symlink("elsewhere", "table")
        return use(case, rows())
    if which == "folder in it":
        os.mkdir("elsewhere")
        os.rename(FILES[1], "elsewhere/b.parquet")
        os.symlink("../elsewhere", "table/day=2")
        return use(case, None)
    if which == "dangling":
        os.symlink("nowhere", "table/c.parquet")
        return use(case, None)
    if which == "loop":
        os.symlink(".", "table/loop")
        return use(case, None)
    os.symlink("c.parquet", "table/c.parquet")
    return use(case, None)


@KINDS.add
def no_regular_file(case: Case) -> Outcome:
    write_two()
    which = case.one_of(["folder", "pipe", "device"], "what")
    if which == "folder":
        Path("table/c.parquet").mkdir()
        return use(case, rows())
    if which == "pipe":
        os.mkfifo("table/c.parquet")
    else:
        os.symlink(case.one_of(["/dev/null", "/dev/zero"], "device"), "table/c.parquet")
    return use(case, None)


@KINDS.add
def paths_that_are_none(case: Case) -> Outcome:
    write_two()
    path = case.one_of(
        [
            "tabel",
            "table/a.parquet/x",
            "table/*.parquet",
            "~/table",
            "$HOME",
            "file://table",
            "x://y/z",
            " ",
            "table/c",
            "x" * 300,
            "table/\x7f",
        ]
    )
    done = tables.recd("cluster", path, "new")
    return done.refused(path.replace("//", "/")[:20])


test_parquet_files = KINDS.test()
