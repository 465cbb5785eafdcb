"""Words, places and flags for options of commands, and environments."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st
from tests.fuzz import tables
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.options import WORDS, nothing, tables_same, tried
from tests.fuzz.oracle import Done, Outcome, recd, wrong

KINDS = Kinds("option words")


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
        ["log", "profile.parquet", "registry.yaml", "table", "log/log.json"],
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
    }
    given = [*command[:-1], place, command[-1]] if command[-1] == "new" else [*command, place]
    done = recd(*given)
    if not done.ok:
        return done.refused()
    if (" ".join(command), place) not in good:
        wrong(f"{done} succeeded: {done.output[-300:]}")
    return Outcome.RIGHT


test_option_words = KINDS.test()
