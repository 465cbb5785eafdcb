"""Command lines and environments that nobody meant."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from hypothesis import strategies as st
from tests.fuzz import tables
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Done, Outcome, recd, wrong

KINDS = Kinds("options")

#: Numbers as people write them, and what is none.
NUMBERS = [
    "-1",
    "0",
    "1",
    "3",
    "+2",
    "1.5",
    "1e1",
    "1e400",
    "",
    " ",
    " 5 ",
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
    "5 5",
    "1e-320",
    "-0",
    "0.0",
    "\t7",
    "7\n",
]
#: For what takes no longer with a large number.
HUGE = ["9" * 18, "9" * 19, "18446744073709551616", "9" * 400]
SIZES = [
    "256MB",
    "1GB",
    "300 MB",
    "1.5GiB",
    "1e9",
    "-5MB",
    "0",
    "1",
    "MB",
    "1XB",
    "1 PB",
    "nanMB",
    "1e400",
    "",
    "½GB",
    "1MB1",
    "1GB ",
    "0.0000001KB",
    "1GBB",
    "٣GB",
    "9" * 400 + "GB",
]
WORDS = [
    "",
    " ",
    "\udcff",
    "*",
    "[",
    "ä",
    "\x1b[31m",
    "a\nb",
    "a,b",
    "None",
    "../x",
    "{x}",
    "%s",
    "label",
    "items",
    "x" * 5000,
]


def tables_same(folder: str) -> Callable[[], None]:
    """The rows of ``table`` are in a folder or file, whatever their order."""

    def check() -> None:
        if tables.counted(tables.rows_in(folder)) != tables.counted(tables.rows()):
            wrong(f"the rows of {folder} are not those of the table")

    return check


def nothing() -> None:
    """Nothing to compare with."""


def tried(arguments: Sequence[object], check: Callable[[], None] = nothing) -> Outcome:
    """Refused with a word, or right."""
    done = recd(*arguments)
    if not done.ok:
        return done.refused()
    check()
    return Outcome.RIGHT


def numbered(
    case: Case, arguments: Sequence[object], options: dict[str, list[str]]
) -> list[object]:
    """A command line with one of the options that take a number."""
    option = case.one_of(sorted(options), "option")
    value = case.one_of(options[option], "value")
    if case.draw(st.booleans(), "with ="):
        return [*arguments, f"{option}={value}"]
    return [*arguments, option, value]


@KINDS.add
def numbers_of_cluster(case: Case) -> Outcome:
    tables.write_two()
    options = {"--row-group-rows": NUMBERS + HUGE, "--seed": NUMBERS + HUGE, "--memory": SIZES}
    return tried(numbered(case, ["cluster", "table", "new"], options), tables_same("new"))


@KINDS.add
def shares_of_cluster(case: Case) -> Outcome:
    """Whole sessions stay, or none of a session."""
    tables.write_two()

    def check() -> None:
        found = tables.rows_in("new")
        sessions = {row["session_id"] for row in found}
        kept = [row for row in tables.rows() if row["session_id"] in sessions]
        if tables.counted(found) != tables.counted(kept):
            wrong("some rows of a session stayed and others did not")

    line = numbered(case, ["cluster", "table", "new"], {"--downsample-sessions": [*NUMBERS, "0.5"]})
    return tried(line, check)


@KINDS.add
def numbers_of_convert_layout(case: Case) -> Outcome:
    tables.write_two()
    options = {"--row-group-rows": NUMBERS + HUGE, "--compression-level": [*NUMBERS, "20", "-5"]}
    line = numbered(case, ["convert-layout", "table", "new", "--layout", "list_dict"], options)
    return tried(line, tables_same("new"))


@KINDS.add
def numbers_of_logs(case: Case) -> Outcome:
    tables.write_two()
    options = {
        "--shards": [*NUMBERS, "100000", "9" * 30],
        "--block-size": [*NUMBERS, "0.0001", "1025"],
        "--level": [*NUMBERS, "23", "-5"],
    }
    line = numbered(case, ["logs", "write", "table", "log"], options)

    def check() -> None:
        assert recd("logs", "read", "log", "back.parquet").ok
        tables_same("back.parquet")()

    return tried(line, check)


@KINDS.add
def numbers_of_generate(case: Case) -> Outcome:
    options = {
        "--rows": NUMBERS,
        "--seed": NUMBERS + HUGE,
        "--files": NUMBERS,
        "--row-group-rows": NUMBERS + HUGE,
        "--scale": [*NUMBERS, "0.00001", "1.0000001"],
    }
    line = numbered(case, ["generate", "made"], options)
    if not any(str(each).startswith("--rows") for each in line):
        line += ["--rows", "40"]

    def check() -> None:
        rows = [str(each) for each in line]
        at = next(at for at, each in enumerate(rows) if each.startswith("--rows"))
        wanted = int(rows[at].partition("=")[2] or rows[at + 1])
        if len(tables.rows_in("made")) != wanted:
            wrong(f"{len(tables.rows_in('made'))} rows, not {wanted}")

    return tried(line, check)


@KINDS.add
def numbers_of_run(case: Case) -> Outcome:
    """Steps are those that were asked for, or all that there are."""
    tables.write_two()
    Path("registry.yaml").write_text(tables.registry(), encoding="utf-8")
    line = numbered(
        case, ["run", "registry.yaml", "--json", "figures.json"], {"--steps": NUMBERS + HUGE}
    )

    def check() -> None:
        steps = int(str(line[-1]).removeprefix("--steps="))
        if len(tables.figures()) != min(steps, tables.ROWS // tables.BATCH):
            wrong(f"{len(tables.figures())} steps, not {steps}")

    return tried(line, check)


@KINDS.add
def numbers_of_analyze(case: Case) -> Outcome:
    tables.write_two()
    options = {"--batch-size": NUMBERS + HUGE, "--sample-mb": [*NUMBERS, "9" * 30]}

    def check() -> None:
        if json.loads(Path("a.json").read_text(encoding="utf-8"))["rows"] != tables.ROWS:
            wrong("other rows")

    return tried(numbered(case, ["analyze", "table", "--json", "a.json"], options), check)


@KINDS.add
def numbers_of_profiles(case: Case) -> Outcome:
    tables.write_two()
    Path("registry.yaml").write_text(tables.registry(), encoding="utf-8")
    if case.draw(st.booleans(), "of the registry"):
        options = {"--rows": NUMBERS + HUGE, "--bound": NUMBERS + HUGE}
        return tried(
            numbered(case, ["profile", "registry", "registry.yaml", "-o", "p.parquet"], options)
        )
    options = {
        "--rows": [*NUMBERS, "9" * 30],
        "--length": [*NUMBERS, "1e300"],
        "--exponent": [*NUMBERS, "1e300"],
        "--shift": [*NUMBERS, "1e300"],
        "--seed": NUMBERS + HUGE,
    }
    line: list[object] = ["profile", "distribution", case.one_of(["zipf", "uniform", "normal", ""])]
    line += ["--table", "t_x", "--rows", "20", "--length", "3", "-o", "p.parquet"]
    return tried(numbered(case, line, options), lambda: _shown("p.parquet"))


def _shown(path: str) -> None:
    done = recd("profile", "show", path, "--json", "shown.json")
    if not done.ok:
        wrong(f"what was written is refused: {done.output}")
    if "nan" in Path("shown.json").read_text("utf-8").lower():
        wrong("a figure is no number")


@KINDS.add
def numbers_of_plans(case: Case) -> Outcome:
    tables.write_two()
    Path("registry.yaml").write_text(tables.registry(), encoding="utf-8")
    options = {
        "--nodes": [*NUMBERS, "9" * 30],
        "--ranks-per-node": [*NUMBERS, "9" * 30],
        "--batch-size": [*NUMBERS, "AUTO", "auto ", "9" * 30],
    }
    line = numbered(case, ["plan", "registry.yaml", "--topology", "dgx-a100-80g"], options)
    return tried(
        [*line, "--json", "plan.json"], lambda: json.loads(Path("plan.json").read_text("utf-8"))
    )


@KINDS.add
def numbers_of_cache_plans(case: Case) -> Outcome:
    tables.write_two()
    text = tables.registry() + "cache:\n  - {use: scars.hot_rows, tables: ['t_*'], options: {}}\n"
    Path("registry.yaml").write_text(text, encoding="utf-8")
    options = {
        "--memory": SIZES,
        "--profile-rows": [*NUMBERS, "all", "ALL", "9" * 30],
        "--steps": NUMBERS + HUGE,
    }
    return tried(numbered(case, ["plan", "registry.yaml", "--cache"], options))


@KINDS.add
def numbers_of_criteo(case: Case) -> Outcome:
    options = {"--rows": [*NUMBERS, "12"], "--days": NUMBERS, "--seed": NUMBERS + HUGE}
    line = numbered(case, ["criteo", "sample", "days"], options)
    given = [str(each) for each in line]
    if not any(each.startswith("--rows") for each in given):
        line += ["--rows", "12"]
    done = recd(*line)
    if not done.ok:
        return done.refused()
    options = {
        "--part-rows": NUMBERS + HUGE,
        "--row-group-rows": NUMBERS + HUGE,
        "--max-bad-lines": NUMBERS + HUGE,
    }
    lines = sum(path.read_bytes().count(b"\n") for path in Path("days").iterdir())

    def check() -> None:
        if len(tables.rows_in("new")) != lines:
            wrong(f"{len(tables.rows_in('new'))} rows of {lines} lines")

    return tried(numbered(case, ["criteo", "convert", "days", "new"], options), check)


@KINDS.add
def numbers_of_traces(case: Case) -> Outcome:
    Path("t.txt").write_text(" ".join(str(at * at % 7) for at in range(40)))
    done = recd(
        *numbered(
            case, ["trace", "profile", "t.txt", "-o", "p.parquet"], {"--rows": NUMBERS + HUGE}
        )
    )
    if not done.ok:
        return done.refused()
    options = {
        "--accesses": NUMBERS,
        "--seed": NUMBERS + HUGE,
        "--min-new": [*NUMBERS, "0.999999", "1"],
    }
    line = numbered(case, ["trace", "generate", "p.parquet", "-o", "new.txt"], options)

    def check() -> None:
        ids = Path("new.txt").read_text().split()
        wanted = [str(each).removeprefix("--accesses=") for each in line][-1]
        if any("--accesses" in str(each) for each in line) and len(ids) != int(wanted):
            wrong(f"{len(ids)} accesses, not {wanted}")

    return tried(line, check)


@KINDS.add
def words_for_columns(case: Case) -> Outcome:
    tables.write_two()
    word = case.one_of([each for each in WORDS if each not in ("label", "items")], "word")
    option = case.one_of(["--session", "--timestamp"], "option")
    command = case.one_of(
        [
            ["cluster", "table", "new"],
            ["analyze", "table"],
            ["convert-layout", "table", "new", "--layout", "list"],
        ]
    )
    return recd(*command, option, word).refused()


@KINDS.add
def columns_that_are_something_else(case: Case) -> Outcome:
    """Another column may be the session or the time, if it has values to sort by."""
    tables.write_two()
    column = case.one_of(["label", "price", "ts", "session_id", "user", "items"], "column")
    option = case.one_of(["--session", "--timestamp"], "option")
    done = recd("cluster", "table", "new", option, column)
    if not done.ok:
        return done.refused("table")
    tables_same("new")()
    return Outcome.RIGHT


@KINDS.add
def words_for_tables(case: Case) -> Outcome:
    tables.write_two()
    Path("registry.yaml").write_text(tables.registry(), encoding="utf-8")
    word = case.one_of(WORDS, "word")
    command: list[object] = case.one_of(
        [
            ["profile", "registry", "registry.yaml", "-o", "p.parquet", "--tables"],
            ["run", "registry.yaml", "--sharding"],
            ["plan", "registry.yaml", "--topology"],
            ["plugins", "--kind"],
            ["bench"],
            ["init"],
            ["trace", "profile", "registry.yaml", "-o", "p.parquet", "--tables"],
        ],
        "command",
    )
    return tried([*command, word])


@KINDS.add
def places_of_outputs(case: Case) -> Outcome:
    """An output goes where it was asked to go, or nothing is done."""
    tables.write_two()
    Path("registry.yaml").write_text(tables.registry(), encoding="utf-8")
    Path("file").write_text("mine")
    Path("folder").mkdir()
    place = case.one_of(
        [
            "folder",
            "file/x",
            "",
            " ",
            "x" * 300,
            "new/deep/x",
            "folder/",
            ".",
            "..",
            "/",
            "a\0b",
            "/proc/x",
            "/dev/null/x",
            "link",
            "\udcff",
            "-",
        ],
        "place",
    )
    Path("link").symlink_to("link")
    command: list[object] = case.one_of(
        [
            ["analyze", "table", "--json", place],
            ["analyze", "table", "--html", place],
            ["cluster", "table", "new", "--json", place],
            ["convert-layout", "table", "new", "--layout", "list", "--json", place],
            ["logs", "read", "table", place],
            ["profile", "registry", "registry.yaml", "-o", place],
            ["trace", "profile", "registry.yaml", "-o", place],
            ["plan", "registry.yaml", "--topology", "ndv4", "--json", place],
            ["plan", "registry.yaml", "--topology", "ndv4", "--plot", place],
            ["run", "registry.yaml", "--json", place],
            ["init", "papercal", place],
            ["generate", place, "--rows", "20"],
            ["cluster", "table", place],
            ["criteo", "sample", place, "--rows", "5"],
        ],
        "command",
    )
    done = recd(*command, leaves=["new"])
    if Path("file").read_text() != "mine":
        wrong(f"{done} wrote over a file")
    return Outcome.RIGHT if done.ok else done.refused()


@KINDS.add
def a_source_as_its_own_target(case: Case) -> Outcome:
    """A table is never replaced by itself, whatever ``--force`` says."""
    tables.write_two()
    target = case.one_of(
        ["table", "./table", "table/", "table/new", "link", ".", "table/../table"], "target"
    )
    Path("link").symlink_to("table")
    command: list[object] = case.one_of(
        [
            ["cluster", "table", target],
            ["convert-layout", "table", target, "--layout", "list"],
            ["logs", "write", "table", target],
        ]
    )
    force = ["--force"] if command[0] != "logs" and case.draw(st.booleans(), "force") else []
    done = recd(*command, *force)
    tables_same("table")()
    return Outcome.RIGHT if done.ok else done.refused()


@KINDS.add
def flags_that_exclude_each_other(case: Case) -> Outcome:
    tables.write_two()
    Path("registry.yaml").write_text(tables.registry(), encoding="utf-8")
    command, flags = case.one_of(
        [
            (
                "plan",
                ["--tiers", "--cache", "--readers", "--no-lookahead", "--budget=2", "--memory=1MB"],
            ),
            ("cluster", ["--check", "--force", "--json=x.json", "--engine=spark"]),
            (
                "run",
                [
                    "--resume",
                    "--compare",
                    "--sharding=torchrec.row_wise",
                    "--sharding=torchrec.table_wise",
                ],
            ),
        ]
    )
    chosen = sorted(case.draw(st.sets(st.sampled_from(flags), min_size=2), "flags"))
    paths = ["table", "new"] if command == "cluster" else ["registry.yaml"]
    return tried([command, *paths, *chosen], nothing)


@KINDS.add
def lines_of_another_form(case: Case) -> Outcome:
    line = case.one_of(
        [
            [""],
            ["rnu"],
            ["run"],
            ["run", "a", "b"],
            ["--nothing"],
            ["run", "--step", "5"],
            ["cluster", "a"],
            ["cluster"],
            ["run", "--json"],
            ["logs"],
            ["logs", "x"],
            ["--plugins-dir"],
            ["--plugins-dir", "x"],
            ["run", "--ranks", "1", "2"],
            ["\udcff"],
            ["run", "--", "--json"],
            ["--version", "--nothing"],
            ["validate", "-"],
            ["analyze", "-"],
            ["x" * 9999],
            ["profile", "table"],
            ["criteo", "convert", "-", "-"],
        ]
    )
    done = recd(*line)
    return done.refused() if not done.ok else Outcome.RIGHT


@KINDS.add
def environments(case: Case) -> Outcome:
    """What training comes to does not depend on them."""
    tables.write_two()
    Path("registry.yaml").write_text(tables.registry(where=[["ts", "<", 140]]), encoding="utf-8")
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
            ("RECD_TRACE_PLUGINS", ["1", "x"]),
            ("NO_COLOR", ["1"]),
            ("TERM", ["", "dumb"]),
            ("TZ", ["x"]),
        ],
        "name",
    )
    value = case.one_of(values, "value")
    done: Done = recd(
        "run", "registry.yaml", "--json", "figures.json", environ={name: value}, leaves=["missing"]
    )
    if not done.ok:
        return done.refused()
    kept = [row for row in tables.rows() if row["ts"] < 140]
    if tables.figures() != tables.losses_of(kept):
        wrong(f"{name}={value!r} changes losses")
    return Outcome.RIGHT


@KINDS.add
def registries_where_a_table_belongs(case: Case) -> Outcome:
    """Files of one kind in place of another."""
    tables.write_two()
    Path("registry.yaml").write_text(tables.registry(), encoding="utf-8")
    recd("logs", "write", "table", "log", "--shards", "1")
    recd("profile", "registry", "registry.yaml", "-o", "profile.parquet")
    place = case.one_of(
        ["log", "profile.parquet", "registry.yaml", "table", "log/shard-00000-of-00001.recdlog"],
        "given",
    )
    command = case.one_of(
        [
            ["run"],
            ["validate"],
            ["plan"],
            ["profile", "show"],
            ["profile", "merge", "-o", "x.parquet"],
            ["trace", "generate", "-o", "x.txt"],
            ["logs", "stat"],
            ["simulate"],
            ["criteo", "convert", "new"],
        ],
        "command",
    )
    good = {
        ("run", "registry.yaml"),
        ("validate", "registry.yaml"),
        ("plan", "registry.yaml"),
        ("profile show", "profile.parquet"),
        ("profile merge -o x.parquet", "profile.parquet"),
        ("logs stat", "log"),
        ("logs stat", "log/shard-00000-of-00001.recdlog"),
    }
    given = [*command[:-1], place, command[-1]] if command[-1] == "new" else [*command, place]
    done = recd(*given)
    if not done.ok:
        return done.refused()
    if (" ".join(command), place) not in good:
        wrong(f"{done} succeeded: {done.output[-300:]}")
    return Outcome.RIGHT


test_options = KINDS.test()
