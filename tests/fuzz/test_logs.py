"""Log shards that are damaged, mixed up, or read with offsets that somebody changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tests.fuzz import tables
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Outcome, recd, wrong

KINDS = Kinds("logs")
SHARDS = 3


def write_log(
    folder: str = "log", *, seed: int = 0, shards: int = SHARDS, rows: int = 120
) -> list[Path]:
    """A log whose shards have some blocks each; its shards."""
    tables.write(f"{folder}.parquet", tables.table(tables.rows(rows, seed)))
    options = ("--shards", shards, "--block-size", 0.001)
    done = recd("logs", "write", f"{folder}.parquet", folder, *options)
    assert done.ok, done.output
    return shards_of(folder)


def shards_of(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.parquet"))


def judge(*, meant: int = 1, same: bool = False, folder: str = "log") -> Outcome:
    """What is read is what was written, or less with a word about it; ``stat`` agrees.

    Args:
        meant: how often the rows of ``folder.parquet`` were written.
        same: nothing is lost.
    """
    expected = tables.counted(tables.rows_in(f"{folder}.parquet") * meant)
    stat = recd("logs", "stat", folder)
    done = recd("logs", "read", folder, "back.parquet", leaves=["back.parquet"])
    found = tables.counted(tables.rows_in("back.parquet") if os.path.exists("back.parquet") else [])
    if found - expected:
        wrong(f"{done}: rows that nobody wrote, or twice: {found - expected}; {done.output}")
    if done.ok and found != expected:
        wrong(f"{done}: {(expected - found).total()} rows are missing, and it succeeded")
    if done.ok != stat.ok:
        wrong(f"{done} and stat do not agree: {done.output} / {stat.output}")
    if done.ok:
        return Outcome.RIGHT
    if same:
        wrong(f"{done} failed on a whole log: {done.output}")
    return done.refused("log")


def damage(case: Case, change: Callable[[bytes], bytes]) -> Outcome:
    path = case.one_of(write_log(), "shard")
    path.write_bytes(change(path.read_bytes()))
    return judge()


@KINDS.add
def flipped_bits(case: Case) -> Outcome:
    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(case.number(1, 3, "flips")):
            changed[case.number(0, len(data) - 1, "byte")] ^= 1 << case.number(0, 7, "bit")
        return bytes(changed)

    return damage(case, flip)


@KINDS.add
def cut_anywhere(case: Case) -> Outcome:
    return damage(case, lambda data: data[: case.number(0, len(data) - 1, "bytes")])


@KINDS.add
def bytes_behind(case: Case) -> Outcome:
    more = case.draw(st.binary(min_size=1, max_size=99), "bytes")
    return damage(case, lambda data: data + more)


@KINDS.add
def bytes_in_front(case: Case) -> Outcome:
    more = case.draw(st.binary(min_size=1, max_size=99), "bytes")
    return damage(case, lambda data: more + data)


@KINDS.add
def zeros_in_it(case: Case) -> Outcome:
    def zero(data: bytes) -> bytes:
        at, count = case.number(0, len(data) - 1, "at"), case.number(1, 600, "bytes")
        return data[:at] + bytes(min(count, len(data) - at)) + data[at + count :]

    return damage(case, zero)


@KINDS.add
def shards_swapped(case: Case) -> Outcome:
    one, two, _ = write_log()
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    return judge()


@KINDS.add
def a_shard_removed(case: Case) -> Outcome:
    case.one_of(write_log(), "shard").unlink()
    return judge()


@KINDS.add
def a_shard_of_another_log(case: Case) -> Outcome:
    """With the same columns, or with others."""
    one = case.one_of(write_log(), "shard")
    if case.draw(st.booleans(), "other columns"):
        tables.write("other.parquet", tables.table(tables.rows(120, 1)).drop_columns("price"))
        assert recd("logs", "write", "other.parquet", "other", "--shards", SHARDS).ok
        other = shards_of("other")
    else:
        other = write_log("other", seed=1)
    shutil.copyfile(other[case.number(0, 2, "of")], one)
    return judge()


@KINDS.add
def files_that_are_no_shards(case: Case) -> Outcome:
    write_log()
    name = case.one_of(["README", "shard-00000-000009.parquet", ".hidden", "_SUCCESS"])
    Path("log", name).write_bytes(case.draw(st.binary(max_size=20), "content"))
    return judge(same=True)


@KINDS.add
def shards_that_are_no_files(case: Case) -> Outcome:
    path = case.one_of(write_log(), "shard")
    path.unlink()
    what = case.one_of(["folder", "dangling", "device", "loop"], "what")
    if what == "folder":
        path.mkdir()
    else:
        to = {"dangling": "nowhere", "device": "/dev/null", "loop": path.name}[what]
        path.symlink_to(to)
    return judge()


@KINDS.add
def no_log_at_all(case: Case) -> Outcome:
    tables.write_two()
    Path("empty").mkdir()
    Path("file").write_bytes(case.draw(st.binary(max_size=30), "content"))
    path = case.one_of(["table", "empty", "file", "nowhere", "table/a.parquet", "file/x"], "path")
    commands: list[tuple[Any, ...]] = [("stat", path), ("read", path, "back.parquet")]
    return recd("logs", *case.one_of(commands, "command")).refused(path)


@KINDS.add
def the_index_damaged(case: Case) -> Outcome:
    write_log()
    path = Path("log", "log.json")
    how = case.one_of(["gone", "empty", "cut", "flip", "of another log", "deep"], "how")
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "of another log":
        write_log("other", seed=1)
        shutil.copyfile(Path("other", path.name), path)
    elif how == "flip":
        changed = bytearray(data)
        changed[case.number(0, len(data) - 1, "byte")] ^= 1 << case.number(0, 7, "bit")
        path.write_bytes(changed)
    else:
        path.write_bytes({"empty": b"", "deep": b"[" * 100_000}.get(how, data[:-5]))
    return judge()


@KINDS.add
def appended_after_damage(case: Case) -> Outcome:
    """Rows that are added to a damaged log are all there, and of those before no more is lost."""
    path = case.one_of(write_log(), "shard")
    data = bytearray(path.read_bytes())
    if case.draw(st.booleans(), "cut"):
        del data[case.number(1, len(data) - 1, "bytes") :]
    else:
        data[case.number(0, len(data) - 1, "byte")] ^= 1 << case.number(0, 7, "bit")
    path.write_bytes(data)
    done = recd("logs", "write", "log.parquet", "log", "--append", leaves=["log"])
    return judge(meant=2 if done.ok else 1)


@KINDS.add
def offsets_that_were_changed(case: Case) -> Outcome:
    """Of what is new since these offsets nothing is invented and nothing comes twice."""
    write_log()
    assert recd("logs", "read", "log", "one.parquet", "--offsets", "offsets.json").ok
    text = Path("offsets.json").read_text(encoding="utf-8")
    at = case.number(0, len(text) - 1, "at")
    changed = ["", "null", "[]", "{}", text[:-5], "[" * 100_000, text[:at] + "7" + text[at + 1 :]]
    Path("offsets.json").write_text(case.one_of(changed, "text"), encoding="utf-8")
    done = recd(
        "logs",
        "read",
        "log",
        "two.parquet",
        "--offsets",
        "offsets.json",
        leaves=["two.parquet", "offsets.json"],
    )
    rows = tables.counted(tables.rows_in("log.parquet"))
    found = tables.counted(tables.rows_in("two.parquet") if os.path.exists("two.parquet") else [])
    if found - rows:
        wrong(f"{done}: rows that nobody wrote, or twice: {found - rows}")
    return Outcome.RIGHT if done.ok else done.refused()


test_logs = KINDS.test()
