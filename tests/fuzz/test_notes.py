"""Files that one command writes for another, or for itself, and that somebody changed meanwhile."""

from __future__ import annotations

import json
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
    """Another digit somewhere, damaged bytes, or no JSON object at all."""
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
    """The counts that ``recd profile show`` shows, or how it was refused."""
    done = recd("profile", "show", path, "--json", "shown.json")
    return json.loads(Path("shown.json").read_text("utf-8"))["tables"] if done.ok else done


def write_profile() -> str:
    tables.write_two()
    tables.write_registry(buckets=None)
    assert recd("profile", "registry", "registry.yaml", "--all-rows", "-o", "p.parquet").ok
    return "p.parquet"


@fuzz
def test_access_profiles_damaged(case: Case) -> None:
    path = write_profile()
    good = shown(path)
    case.damage(path)
    found = shown(path)
    if not isinstance(found, dict):
        found.refused(path)
    elif found != good:
        wrong(f"other counts of a damaged profile: {found}")


def broken_off(command: list[str], module: Any, name: str, times: int) -> list[Path]:
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
