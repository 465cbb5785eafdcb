from __future__ import annotations

from pathlib import Path

from tests.fuzz import tables
from tests.fuzz.cases import Case, fuzz, recd, wrong

#: Numbers as people write them, text that is none, and numbers that are huge.
_NUMBERS = "-1 0 1 3 +2 1.5 1e1 1e400 nan inf -inf 0x10 1_0 ٣ ½ None true 1,5 -- 1e-320 -0"
NUMBERS = [*_NUMBERS.split(), "", " 5 ", "5 5", "7\n", "9" * 18, "9" * 19, "9" * 400]
_SIZES = "256MB 1GB 1.5GiB 1e9 -5MB 0 1 MB 1XB nanMB 1e400 ½GB 1MB1 0.0000001KB 1GBB ٣GB"
SIZES = [*_SIZES.split(), "300 MB", "1 PB", "", "9" * 400 + "GB"]
_PLACES = "folder file/x new/deep/x folder/ . .. / /proc/x /dev/null/x link -"
PLACES = [*_PLACES.split(), "", " ", "x" * 300, "a\0b", "\udcff"]
SAME = "same table"
#: Options of commands that take a number; what is right if the command succeeds.
COMMANDS: dict[str, tuple[dict[str, list[str]], str]] = {
    "cluster table new": (
        {"--row-group-rows": NUMBERS, "--seed": NUMBERS, "--memory": SIZES},
        SAME,
    ),
    "convert-layout table new --layout list_dict": ({"--row-group-rows": NUMBERS}, SAME),
    "logs write table log": ({"--shards": [*NUMBERS, "100000"]}, "log"),
    "run registry.yaml --json figures.json": ({"--steps": NUMBERS}, "steps"),
    "profile registry registry.yaml -o p.parquet": ({"--rows": NUMBERS, "--bound": NUMBERS}, ""),
    "plan registry.yaml --topology dgx-a100-80g": (
        {"--nodes": NUMBERS, "--ranks-per-node": NUMBERS, "--batch-size": [*NUMBERS, "AUTO"]},
        "",
    ),
    "plan cached.yaml --cache": ({"--memory": SIZES, "--steps": NUMBERS}, ""),
}


def check(what: str, value: str) -> None:
    if what == SAME:
        tables.check_rows("new")
    elif what == "log":
        assert recd("logs", "read", "log", "back.parquet").ok
        tables.check_rows("back.parquet")
    elif what == "steps":
        steps = len(tables.figures())
        if steps != min(int(value), tables.ROWS // tables.BATCH):
            wrong(f"{steps} steps, not {value}")


@fuzz
def test_numbers(case: Case) -> None:
    tables.write_two()
    tables.write_registry()
    text = tables.registry() + "cache:\n  - {use: scars.hot_rows, tables: ['t_*'], options: {}}\n"
    Path("cached.yaml").write_text(text, encoding="utf-8")
    line = case.one_of(list(COMMANDS), "command")
    options, what = COMMANDS[line]
    option = case.one_of(sorted(options), "option")
    value = case.one_of(options[option], "value")
    done = recd(*line.split(), f"{option}={value}")
    check(what, value) if done.ok else done.refused()


@fuzz
def test_places_of_outputs(case: Case) -> None:
    tables.write_two()
    tables.write_registry()
    Path("file").write_text("mine")
    Path("folder").mkdir()
    Path("link").symlink_to("link")
    place = case.one_of(PLACES, "place")
    lines = [
        *("analyze table --json", "analyze table --html", "cluster table new --json"),
        *("convert-layout table new --layout list --json", "logs read table"),
        *("profile registry registry.yaml -o", "trace profile registry.yaml -o"),
        *(f"plan registry.yaml --topology ndv4 {each}" for each in ("--json", "--scaling --plot")),
        *("run registry.yaml --json", "init papercal", "cluster table"),
    ]
    line = case.one_of([*lines, "generate --rows 20", "criteo sample --rows 5"], "command")
    done = recd(*line.split(), place, leaves=["new"])
    if Path("file").read_text() != "mine":
        wrong(f"{done} wrote over a file")
    if not done.ok:
        done.refused()


@fuzz
def test_a_source_as_its_own_target(case: Case) -> None:
    tables.write_two()
    Path("link").symlink_to("table")
    places = ["table", "./table", "table/", "table/new", "link", ".", "table/../table"]
    line = case.one_of(["cluster table", "convert-layout table --layout list", "logs write table"])
    force = ["--force"] if line[0] != "l" and case.flag("force") else []
    done = recd(*line.split(), case.one_of(places, "target"), *force)
    tables.check_rows("table")
    if not done.ok:
        done.refused()
