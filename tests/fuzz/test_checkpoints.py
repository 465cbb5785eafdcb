from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tests.fuzz import tables
from tests.fuzz.cases import Case, fuzz, json_values, no_json, recd, wrong

FOLDER = Path("checkpoints")
STEPS = 8
_KEPT = tempfile.TemporaryDirectory(prefix="recd-fuzz-checkpoints-")


def write_registry() -> None:
    text = tables.registry().replace(f"steps: {tables.STEPS}", f"steps: {STEPS}, epochs: 2")
    tables.write_registry(
        text.replace(
            "device: cpu", "device: cpu, checkpoint: {path: checkpoints, every: 2, keep: 3}"
        )
    )


@cache
def whole_run() -> list[float]:
    write_registry()
    found = tables.losses("registry.yaml")
    assert isinstance(found, list), found
    shutil.rmtree(FOLDER)
    done = recd("run", "registry.yaml", "--steps", 6)
    assert done.ok, done.output
    shutil.copytree(FOLDER, _KEPT.name, dirs_exist_ok=True)
    shutil.rmtree(FOLDER)
    return found


def start() -> list[Path]:
    """The table, and the checkpoints of steps 2, 4 and 6 of a run that goes on to 8."""
    tables.write_two()
    whole_run()
    write_registry()
    shutil.copytree(_KEPT.name, FOLDER)
    return sorted(path for path in FOLDER.iterdir() if path.name.startswith("step-"))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def judge(*, same: bool = False) -> None:
    line = ("run", "registry.yaml", "--resume", "--json", "figures.json")
    done = recd(*line, leaves=["checkpoints"])
    if not done.ok:
        if same:
            wrong(f"what is whole is refused: {done.output}")
        done.refused("checkpoints")
    elif tables.figures() != whole_run():
        wrong(f"losses {tables.figures()}, not {whole_run()}: {done.output[:300]}")


@fuzz
def test_nothing_wrong(case: Case) -> None:
    for path in start()[case.number(1, 3, "left") :]:
        shutil.rmtree(path)
    judge(same=True)


@fuzz
def test_damaged_bytes(case: Case) -> None:
    case.damage(case.one_of(files(start()[-1]), "file"))
    judge()


@fuzz
def test_files_that_are_others(case: Case) -> None:
    given = start()
    path = case.one_of(files(given[-1]), "file")
    how = case.one_of(["missing", "step", "swapped", "no file", "more"], "how")
    if how == "missing":
        path.unlink()
    elif how == "step":
        shutil.copyfile(case.one_of(given[:-1], "of") / path.relative_to(given[-1]), path)
    elif how == "swapped":
        other = case.one_of(files(given[-1]), "with")
        first, second = path.read_bytes(), other.read_bytes()
        path.write_bytes(second)
        other.write_bytes(first)
    elif how == "no file":
        case.no_file(path)
    else:
        name = case.one_of(["notes", ".hidden", "__1_0.distcp", "x.json", "folder/x"], "name")
        (given[-1] / name).parent.mkdir(exist_ok=True)
        (given[-1] / name).write_bytes(b"mine")
    judge()


@fuzz
def test_checkpoints_that_are_others(case: Case) -> None:
    given = start()
    one = case.one_of(given, "checkpoint")
    how = case.one_of(["renamed", "twice", "swapped", "empty", "file"], "how")
    names = "step-000000009 step-000000001 step-6 step-999999999 step-000000006.bak copy"
    name = case.one_of([*names.split(), "Step-000000006", ".step-000000006.partial"], "name")
    if how == "renamed":
        one.rename(FOLDER / name)
    elif how == "twice":
        shutil.copytree(one, FOLDER / name, dirs_exist_ok=True)
    elif how == "swapped":
        given[-1].rename("aside")
        given[0].rename(given[-1])
        Path("aside").rename(given[0])
    else:
        shutil.rmtree(given[-1])
        given[-1].mkdir() if how == "empty" else given[-1].write_bytes(b"x")
    judge()


@fuzz
def test_json_of_a_checkpoint(case: Case) -> None:
    given = [path for path in files(start()[-1]) if path.suffix == ".json"]
    path = case.one_of(given, "file")
    text = case.draw(no_json, "text")
    said = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(said, dict) and said and case.flag("a field"):
        said[case.one_of([*sorted(said), "more"], "field")] = case.draw(json_values, "value")
        text = json.dumps(said)
    path.write_text(text, encoding="utf-8", errors="replace")
    judge()
