"""Files that one command writes for another, or for itself, and that somebody changed meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from tests.fuzz import tables
from tests.fuzz.cases import Case, fuzz, no_json, recd, wrong

from recd_plugins.cli import main

LINE = "\t".join(["1", *["5"] * 13, *["ab"] * 26]) + "\n"


def change_json(case: Case, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    digits = [at for at, letter in enumerate(text) if letter.isdigit()]
    how = case.one_of(["digit", "bytes", "text"], "how")
    if how == "digit" and digits:
        at = digits[case.place(len(digits), "at")]
        path.write_text(text[:at] + case.one_of("0123456789", "digit") + text[at + 1 :])
    elif how == "bytes":
        case.damage(path)
    else:
        path.write_text(case.draw(no_json, "text"), encoding="utf-8")


def shown(path: str) -> Any:
    done = recd("profile", "show", path, "--json", "shown.json")
    return json.loads(Path("shown.json").read_text("utf-8"))["tables"] if done.ok else done


@fuzz
def test_access_profiles_damaged(case: Case) -> None:
    tables.write_two()
    tables.write_registry(buckets=None)
    path = "p.parquet"
    assert recd("profile", "registry", "registry.yaml", "--all-rows", "-o", path).ok
    good = shown(path)
    case.damage(path)
    found = shown(path)
    if not isinstance(found, dict):
        found.refused(path)
    elif found != good:
        wrong(f"other counts of a damaged profile: {found}")


def broken_off(command: list[str], module: Any, name: str, times: int) -> list[Path]:
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
        CliRunner().invoke(main, command)
    finally:
        setattr(module, name, kept)
    return sorted(Path().glob(".*/**/*.json"))


@fuzz
def test_a_conversion_of_criteo_that_broke_off(case: Case) -> None:
    from recd_plugin_dlrm.criteo import convert

    Path("days").mkdir()
    for day in (0, 1):
        Path(f"days/day_{day}").write_text(LINE * 40)
    command = ["criteo", "convert", "days", "new", "--part-rows", "16"]
    notes = broken_off(command, convert.file_utils, "write_note", case.number(0, 4, "after"))
    if notes:
        change_json(case, case.one_of(notes, "note"))
    else:
        shutil.rmtree("new", ignore_errors=True)
    done = recd(*command, leaves=[".new.recd-criteo"])
    if not done.ok:
        done.refused()
        return
    found = tables.rows_in("new")
    if len(found) != 80 or any(row["cat_3"] != 0xAB or row["int_2"] != 5 for row in found):
        wrong(f"{len(found)} rows, or other values")


def write_log(folder: str = "log", *, seed: int = 0) -> list[Path]:
    tables.write(f"{folder}.parquet", tables.table(tables.rows(120, seed)))
    done = recd("logs", "write", f"{folder}.parquet", folder, "--shards", 3)
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
    case.damage(case.one_of(write_log(), "file"))
    done = recd("logs", "write", "log.parquet", "log", "--append", leaves=["log"])
    judge(meant=2 if done.ok else 1)


@fuzz
def test_offsets_that_were_changed(case: Case) -> None:
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
