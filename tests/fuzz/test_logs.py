"""Logs whose files are damaged, mixed up, or read with offsets that somebody changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.fuzz import tables
from tests.fuzz.cases import Case, fuzz, no_json, recd, wrong

SHARDS = 3


def write_log(folder: str = "log", *, seed: int = 0) -> list[Path]:
    """Write a log; its files."""
    tables.write(f"{folder}.parquet", tables.table(tables.rows(120, seed)))
    done = recd("logs", "write", f"{folder}.parquet", folder, "--shards", SHARDS)
    assert done.ok, done.output
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def judge(*, meant: int = 1) -> None:
    """The rows read are those written ``meant`` times, or fewer with a message."""
    expected = tables.counted(tables.rows_in("log.parquet") * meant)
    done = recd("logs", "read", "log", "back.parquet", leaves=["back.parquet"])
    found = tables.counted(tables.rows_in("back.parquet") if os.path.exists("back.parquet") else [])
    if found - expected:
        wrong(f"{done}: rows that nobody wrote, or twice: {found - expected}; {done.output}")
    if done.ok and found != expected:
        wrong(f"{done}: {(expected - found).total()} rows are missing, and it succeeded")
    if not done.ok:
        done.refused("log")


@fuzz
def test_damaged_bytes(case: Case) -> None:
    case.damage(case.one_of(write_log(), "file"))
    judge()


@fuzz
def test_files_that_are_others(case: Case) -> None:
    """Removed, swapped, renamed, twice, of another log, no file."""
    files = write_log()
    one, two = case.one_of(files, "file"), case.one_of(files, "other")
    how = case.one_of(["removed", "swapped", "renamed", "twice", "another", "no-file"], "how")
    if how == "removed":
        one.unlink()
    elif how == "swapped":
        content = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(content)
    elif how == "renamed":
        name = case.one_of([f"x{one.suffix}", f"{one.name}.bak", one.name.upper()], "name")
        one.rename(one.with_name(name))
    elif how == "twice":
        shutil.copyfile(one, one.with_name(f"copy{one.suffix}"))
    elif how == "another":
        others = write_log("other", seed=1)
        shutil.copyfile(others[case.place(len(others), "of")], one)
    else:
        case.no_file(one)
    judge()


@fuzz
def test_appended_after_damage(case: Case) -> None:
    """Rows that are added to a damaged log are all there, and no more of those before is lost."""
    case.damage(case.one_of(write_log(), "file"))
    done = recd("logs", "write", "log.parquet", "log", "--append", leaves=["log"])
    judge(meant=2 if done.ok else 1)


@fuzz
def test_offsets_that_were_changed(case: Case) -> None:
    """Nothing is invented and nothing comes twice."""
    write_log()
    offsets = Path("offsets.json")
    assert recd("logs", "read", "log", "one.parquet", "--offsets", offsets).ok
    text = offsets.read_text(encoding="utf-8")
    at = case.place(len(text), "at")
    changed = [text[:-5], text[:at] + "7" + text[at + 1 :], case.draw(no_json, "text")]
    offsets.write_text(case.one_of(changed, "changed"), encoding="utf-8")
    leaves = ["two.parquet", str(offsets)]
    done = recd("logs", "read", "log", "two.parquet", "--offsets", offsets, leaves=leaves)
    found = tables.counted(tables.rows_in("two.parquet") if os.path.exists("two.parquet") else [])
    if more := found - tables.counted(tables.rows_in("log.parquet")):
        wrong(f"{done}: rows that nobody wrote, or twice: {more}")
    if not done.ok:
        done.refused()
