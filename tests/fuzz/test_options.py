"""Numbers, words and places for options of commands, and environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.fuzz import tables
from tests.fuzz.cases import Case, Done, fuzz, recd, wrong

#: Numbers as people write them, text that is none, and numbers that are huge.
NUMBERS = [
    "-1",
    "0",
    "1",
    "3",
    "+2",
    "1.5",
    "1e1",
    "1e400",
    "nan",
    "NaN",
    "inf",
    "-inf",
    "0x10",
    "1_0",
    "٣",
    "½",
    "None",
    "true",
    "1,5",
    "--",
    "1e-320",
    "-0",
    "0.0",
]
NUMBERS += ["", " ", " 5 ", "5 5", "\t7", "7\n"]
HUGE = [*NUMBERS, "9" * 18, "9" * 19, "18446744073709551616", "9" * 400]
SIZES = [
    "256MB",
    "1GB",
    "1.5GiB",
    "1e9",
    "-5MB",
    "0",
    "1",
    "MB",
    "1XB",
    "nanMB",
    "1e400",
    "½GB",
    "1MB1",
    "0.0000001KB",
    "1GBB",
    "٣GB",
]
SIZES += ["300 MB", "1 PB", "1GB ", "", "9" * 400 + "GB"]
WORDS = ["", " ", "\udcff", "*", "[", "ä", "\x1b[31m", "a\nb", "a,b", "None", "../x", "{x}", "%s"]
WORDS += ["x" * 5000]
Options = dict[str, list[str]]


def tried(arguments: Sequence[object], check: Callable[[], object] = lambda: None) -> None:
    """Refused with a word, or right."""
    done = recd(*arguments)
    if done.ok:
        check()
    else:
        done.refused()


def numbered(case: Case, line: str, options: Options) -> list[object]:
    """A command line with one of the options that take a number."""
    option = case.one_of(sorted(options), "option")
    value = case.one_of(options[option], "value")
    return [*line.split(), *([f"{option}={value}"] if case.flag("with =") else [option, value])]


#: Commands that make the table anew by another way, and options of theirs.
TABLES: dict[str, Options] = {
    "cluster table new": {"--row-group-rows": HUGE, "--seed": HUGE, "--memory": SIZES},
    "convert-layout table new --layout list_dict": {
        "--row-group-rows": HUGE,
        "--compression-level": [*NUMBERS, "20", "-5"],
    },
}
#: Commands of which it is enough that they end, on a table and its registry.
OTHERS: dict[str, Options] = {
    "profile registry registry.yaml -o p.parquet": {"--rows": HUGE, "--bound": HUGE},
    "plan registry.yaml --topology dgx-a100-80g": {
        "--nodes": [*NUMBERS, "9" * 30],
        "--ranks-per-node": [*NUMBERS, "9" * 30],
        "--batch-size": [*NUMBERS, "AUTO", "auto ", "9" * 30],
    },
    "plan cached.yaml --cache": {
        "--memory": SIZES,
        "--profile-rows": [*NUMBERS, "all", "ALL", "9" * 30],
        "--steps": HUGE,
    },
    "criteo sample days --rows 12": {"--days": NUMBERS, "--seed": HUGE},
}


@fuzz
def test_numbers_of_commands_that_write_the_table(case: Case) -> None:
    tables.write_two()
    line = case.one_of(list(TABLES), "command")
    tried(numbered(case, line, TABLES[line]), lambda: tables.check_rows("new"))


@fuzz
def test_numbers_of_other_commands(case: Case) -> None:
    tables.write_two()
    tables.write_registry()
    text = tables.registry() + "cache:\n  - {use: scars.hot_rows, tables: ['t_*'], options: {}}\n"
    Path("cached.yaml").write_text(text, encoding="utf-8")
    line = case.one_of(list(OTHERS), "command")
    tried(numbered(case, line, OTHERS[line]))


@fuzz
def test_numbers_of_logs(case: Case) -> None:
    tables.write_two()

    def check() -> None:
        assert recd("logs", "read", "log", "back.parquet").ok
        tables.check_rows("back.parquet")

    options = {"--shards": [*NUMBERS, "100000", "9" * 30], "--level": [*NUMBERS, "23", "-5"]}
    tried(numbered(case, "logs write table log", options), check)


@fuzz
def test_numbers_of_run(case: Case) -> None:
    """Steps are those that were asked for, or all that there are."""
    tables.write_two()
    tables.write_registry()
    line = numbered(case, "run registry.yaml --json figures.json", {"--steps": HUGE})

    def check() -> None:
        steps = int(str(line[-1]).removeprefix("--steps="))
        if len(tables.figures()) != min(steps, tables.ROWS // tables.BATCH):
            wrong(f"{len(tables.figures())} steps, not {steps}")

    tried(line, check)


@fuzz
def test_words(case: Case) -> None:
    tables.write_two()
    tables.write_registry()
    line = case.one_of(
        [
            "profile registry registry.yaml -o p.parquet --tables",
            "run registry.yaml --sharding",
            "plan registry.yaml --topology",
            "plugins --kind",
            "init",
            "trace profile registry.yaml -o p.parquet --tables",
        ],
        "command",
    )
    tried([*line.split(), case.one_of(WORDS, "word")])


@fuzz
def test_places_of_outputs(case: Case) -> None:
    """An output goes where it was asked to go, or nothing is done."""
    tables.write_two()
    tables.write_registry()
    Path("file").write_text("mine")
    Path("folder").mkdir()
    Path("link").symlink_to("link")
    places = [
        "folder",
        "file/x",
        "new/deep/x",
        "folder/",
        ".",
        "..",
        "/",
        "/proc/x",
        "/dev/null/x",
        "link",
        "-",
    ]
    place = case.one_of([*places, "", " ", "x" * 300, "a\0b", "\udcff"], "place")
    lines = [
        *("analyze table --json", "analyze table --html", "cluster table new --json"),
        *("convert-layout table new --layout list --json", "logs read table"),
        *("profile registry registry.yaml -o", "trace profile registry.yaml -o"),
        *("plan registry.yaml --topology ndv4 --json", "plan registry.yaml --topology ndv4 --plot"),
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
    """A table is never replaced by itself, whatever ``--force`` says."""
    tables.write_two()
    Path("link").symlink_to("table")
    places = ["table", "./table", "table/", "table/new", "link", ".", "table/../table"]
    line = case.one_of(["cluster table", "convert-layout table --layout list", "logs write table"])
    force = ["--force"] if line[0] != "l" and case.flag("force") else []
    done = recd(*line.split(), case.one_of(places, "target"), *force)
    tables.check_rows("table")
    if not done.ok:
        done.refused()


@fuzz
def test_environments(case: Case) -> None:
    """Losses do not depend on them."""
    tables.write_two()
    tables.write_registry(where=[["ts", "<", 140]])
    name, values = case.one_of(
        [
            ("RANK", ["x", "", "-1", "1", "1.0", "9" * 30]),
            ("WORLD_SIZE", ["x", "", "0", "-1"]),
            ("LOCAL_RANK", ["x", "", "-1"]),
            ("LOCAL_WORLD_SIZE", ["x", "", "0", "-1", "7"]),
            ("MASTER_PORT", ["x", ""]),
            ("XDG_CACHE_HOME", ["", "registry.yaml", "missing", "/proc/x", "a" * 300]),
            ("COLUMNS", ["", "x", "0", "-1", "1"]),
            ("OMP_NUM_THREADS", ["", "x", "0"]),
            ("TZ", ["x"]),
        ],
        "name",
    )
    value = case.one_of(values, "value")
    line = ("run", "registry.yaml", "--json", "figures.json")
    done: Done = recd(*line, environ={name: value}, leaves=["missing"])
    if not done.ok:
        done.refused()
    elif tables.figures() != tables.losses_of(row for row in tables.rows() if row["ts"] < 140):
        wrong(f"{name}={value!r} changes losses")
