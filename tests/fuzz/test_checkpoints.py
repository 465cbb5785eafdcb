"""Checkpoints that are damaged or mixed up: resumed to the last bit, or refused."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.fuzz import tables
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Done, Outcome, recd, wrong

KINDS = Kinds("checkpoints")

FOLDER = Path("checkpoints")
STEPS = 8


def write_registry(**changes: str) -> None:
    text = tables.registry().replace(f"steps: {tables.STEPS}", f"steps: {STEPS}, epochs: 2")
    text = text.replace(
        "device: cpu", "device: cpu, checkpoint: {path: checkpoints, every: 2, keep: 3}"
    )
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new, 1)
    Path("registry.yaml").write_text(text, encoding="utf-8")


@cache
def whole_run() -> list[float]:
    """Losses of a run that nothing interrupts; copies of its checkpoints are in ``kept``."""
    write_registry()
    found = tables.losses("registry.yaml")
    assert isinstance(found, list), found
    shutil.rmtree(FOLDER)
    done = recd("run", "registry.yaml", "--steps", 6)
    assert done.ok, done.output
    shutil.copytree(FOLDER, kept(), dirs_exist_ok=True)
    shutil.rmtree(FOLDER)
    return found


@cache
def kept() -> str:
    return _KEPT.name


_KEPT = tempfile.TemporaryDirectory(prefix="recd-fuzz-checkpoints-")


def start() -> list[Path]:
    """The table, and the checkpoints of steps 2, 4 and 6 of a run that goes on to 8."""
    tables.write_two()
    whole_run()
    write_registry()
    shutil.copytree(kept(), FOLDER)
    return steps()


def steps() -> list[Path]:
    return sorted(path for path in FOLDER.iterdir() if path.name.startswith("step-"))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def judge(*, same: bool = False) -> Outcome:
    """Go on: losses are those of the whole run, or it is refused."""
    done = recd(
        "run", "registry.yaml", "--resume", "--json", "figures.json", leaves=["checkpoints"]
    )
    if not done.ok:
        if same:
            wrong(f"what is whole is refused: {done.output}")
        return done.refused("checkpoints")
    if tables.figures() != whole_run():
        wrong(f"losses {tables.figures()}, not {whole_run()}: {done.output[:300]}")
    return Outcome.RIGHT


def damage(case: Case, change: Callable[[bytes], bytes]) -> Outcome:
    """Change a file of the newest checkpoint."""
    path = case.one_of(files(start()[-1]), "file")
    path.write_bytes(change(path.read_bytes()))
    return judge()


@KINDS.add
def nothing_wrong(case: Case) -> Outcome:
    """The runs that the others are held against agree."""
    start()
    for path in steps()[case.number(1, 3, "left") :]:
        shutil.rmtree(path)
    return judge(same=True)


@KINDS.add
def flipped_bits(case: Case) -> Outcome:
    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        if data:
            changed[case.number(0, len(data) - 1, "byte")] ^= 1 << case.number(0, 7, "bit")
        return bytes(changed)

    return damage(case, flip)


@KINDS.add
def cut_off(case: Case) -> Outcome:
    return damage(case, lambda data: data[: case.number(0, max(0, len(data) - 1), "bytes")])


@KINDS.add
def bytes_behind(case: Case) -> Outcome:
    return damage(case, lambda data: data + bytes(case.number(1, 99, "bytes")))


@KINDS.add
def zeros_for_bytes(case: Case) -> Outcome:
    def zero(data: bytes) -> bytes:
        at = case.number(0, max(0, len(data) - 1), "at")
        return data[:at] + bytes(len(data) - at)

    return damage(case, zero)


@KINDS.add
def a_file_is_missing(case: Case) -> Outcome:
    case.one_of(files(start()[-1]), "file").unlink()
    return judge()


@KINDS.add
def a_file_more(case: Case) -> Outcome:
    name = case.one_of(["notes", ".hidden", "__1_0.distcp", "x.json", "folder/x"], "name")
    path = start()[-1] / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"mine")
    return judge()


@KINDS.add
def a_file_of_another_step(case: Case) -> Outcome:
    given = start()
    path = case.one_of(files(given[-1]), "file")
    shutil.copyfile(case.one_of(given[:-1], "of") / path.relative_to(given[-1]), path)
    return judge()


@KINDS.add
def two_files_swapped(case: Case) -> Outcome:
    given = files(start()[-1])
    one = case.one_of(given, "one")
    two = case.one_of([path for path in given if path != one], "two")
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    return judge()


@KINDS.add
def a_checkpoint_by_another_name(case: Case) -> Outcome:
    given = start()
    name = case.one_of(
        [
            "step-000000009",
            "step-000000001",
            "step-6",
            "step-999999999",
            "step-000000006.bak",
            "Step-000000006",
            ".step-000000006.partial",
        ],
        "name",
    )
    case.one_of(given, "checkpoint").rename(FOLDER / name)
    return judge()


@KINDS.add
def a_checkpoint_twice(case: Case) -> Outcome:
    given = start()
    name = case.one_of(["step-000000008", "step-000000007", "step-000000100", "copy"], "name")
    shutil.copytree(case.one_of(given, "checkpoint"), FOLDER / name)
    return judge()


@KINDS.add
def checkpoints_swapped(case: Case) -> Outcome:
    given = start()
    one, two = given[-1], case.one_of(given[:-1], "with")
    one.rename("aside")
    two.rename(one)
    Path("aside").rename(two)
    return judge()


@KINDS.add
def json_of_a_checkpoint(case: Case) -> Outcome:
    """A field of a file of JSON is something else."""
    given = [path for path in files(start()[-1]) if path.suffix == ".json"]
    path = case.one_of(given, "file")
    said = json.loads(path.read_text(encoding="utf-8"))
    value: Any = case.one_of(
        [None, -1, 0, 1, 7, 1 << 70, 0.5, "", "x", [], {}, True, [[]]], "value"
    )
    if isinstance(said, dict) and said:
        said[case.one_of([*sorted(said), "more"], "field")] = value
    else:
        said = value
    path.write_text(json.dumps(said), encoding="utf-8")
    return judge()


@KINDS.add
def json_that_is_none(case: Case) -> Outcome:
    given = [path for path in files(start()[-1]) if path.suffix == ".json"]
    text = case.one_of(
        ["", "null", "[]", "{", "{}", "[" * 100_000, "NaN", "\0", "\ufeff{}"], "text"
    )
    case.one_of(given, "file").write_text(text, encoding="utf-8")
    return judge()


@KINDS.add
def no_regular_files(case: Case) -> Outcome:
    path = case.one_of(files(start()[-1]), "file")
    path.unlink()
    what = case.one_of(["folder", "dangling", "device", "loop", "linked"], "what")
    if what == "folder":
        path.mkdir()
    elif what == "linked":
        other = Path(kept(), *path.parts[1:])
        path.symlink_to(other)
    else:
        path.symlink_to({"dangling": "nowhere", "device": "/dev/zero", "loop": path.name}[what])
    return judge()


@KINDS.add
def a_folder_that_is_none(case: Case) -> Outcome:
    """Of all checkpoints, or of the newest."""
    newest = start()[-1]
    what = case.one_of(["empty newest", "file for newest", "file", "empty", "loop", "gone"], "what")
    if "newest" in what:
        shutil.rmtree(newest)
        newest.mkdir() if what.startswith("empty") else newest.write_bytes(b"x")
        return judge()
    shutil.rmtree(FOLDER)
    if what == "file":
        FOLDER.write_bytes(b"x")
    elif what == "loop":
        FOLDER.symlink_to(FOLDER.name)
    elif what == "empty":
        FOLDER.mkdir()
    return judge(same=what in ("empty", "gone"))


@KINDS.add
def every_checkpoint_damaged(case: Case) -> Outcome:
    """None is left to go on from: that is no reason to begin anew without a word."""
    for folder in start():
        path = case.one_of(files(folder), "file")
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
    done = recd("run", "registry.yaml", "--resume", leaves=["checkpoints"])
    return done.refused("checkpoints")


@KINDS.add
def another_run(case: Case) -> Outcome:
    """A registry that changes what the weights mean does not go on from them without a word."""
    start()
    old, new = case.one_of(
        [
            ("buckets: 40", "buckets: 20"),
            ("num_embeddings: 40", "num_embeddings: 41"),
            ("embedding_dim: 4", "embedding_dim: 8"),
            ("bottom_mlp: [4]", "bottom_mlp: [8]"),
            ("top_mlp: [4]", "top_mlp: [4, 4]"),
            ("device: cpu", "device: cpu, optimizer: sgd"),
            ("bottom_mlp: [4]", "bottom_mlp: [4], bag_pooling: mean"),
            ("batch_size: 8", "batch_size: 4"),
            ("learning_rate: 0.5", "learning_rate: 0.25"),
            ("bottom_mlp: [4]", "bottom_mlp: [4], architecture: dcn"),
        ],
        "change",
    )
    write_registry(**{old: new})
    done = recd("run", "registry.yaml", "--resume", leaves=["checkpoints"])
    return done.refused("checkpoints")


@KINDS.add
def other_data(case: Case) -> Outcome:
    start()
    seed = case.number(1, 9, "seed")
    which = case.one_of(["rows", "fewer", "file more"], "what")
    if which == "rows":
        tables.write("table/b.parquet", tables.table(tables.rows(seed=seed)).slice(24))
    elif which == "fewer":
        tables.write("table/b.parquet", tables.table().slice(24, 24 - seed))
    else:
        tables.write("table/c.parquet", tables.table().slice(0, seed))
    done: Done = recd("run", "registry.yaml", "--resume", leaves=["checkpoints"])
    return done.refused("checkpoints" if "checkpoints" in done.output else "table")


test_checkpoints = KINDS.test()
