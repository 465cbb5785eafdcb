"""Numbers for options of commands, odd ones and huge ones."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import strategies as st
from tests.fuzz import tables
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.options import HUGE, NUMBERS, SIZES, numbered, tables_same, tried
from tests.fuzz.oracle import Outcome, recd, wrong

KINDS = Kinds("options")


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


test_options = KINDS.test()
