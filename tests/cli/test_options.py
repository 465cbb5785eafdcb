"""What options refuse before any work is done."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from recd_plugins.cli import main

ZIPF = ["profile", "distribution", "zipf", "--table", "t", "--rows", "9", "--length", "2"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "registry.yaml").write_text("version: 1\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*ZIPF, "-o", "p", "--cap", "nan"], "nan is no finite number"),
        ([*ZIPF, "-o", "p", "--exponent", "inf"], "inf is no finite number"),
        ([*ZIPF, "-o", "p", "--length", "-1"], "-1.0 is not in the range"),
        ([*ZIPF, "-o", "registry.yaml/p"], "registry.yaml/p: cannot be written (Not a directory)"),
        ([*ZIPF, "-o", "p", "--json", "-"], "- is no file; name one"),
        (["run", "registry.yaml", "--json", "-"], "- is no file; name one"),
        ([*ZIPF, "-o", "p", "--json", "./p"], "./p is what '-o' / '--output' writes; name another"),
        (
            ["run", "registry.yaml", "--json", "r.svg", "--html", "r.svg"],
            "r.svg is what '--json' writes; name another one",
        ),
        ([*ZIPF, "-o", "p", "--json", "registry.yaml/j"], "registry.yaml/j: cannot be written"),
        ([*ZIPF, "-o", "p", "--plot", "registry.yaml/p.png"], "p.png: cannot be written"),
        ([*ZIPF, "-o", "p", "--plot", "p.txt"], "--plot p.txt ends in none of .png, .svg, .pdf"),
        (["plan", "registry.yaml", "--tiers", "--budget", "inf"], "inf is no finite number"),
        (["plan", "registry.yaml", "--tiers", "--overlap", "nan"], "nan is no finite number"),
        (["plan", "registry.yaml", "--json", "registry.yaml/j"], "registry.yaml/j: cannot be writ"),
        *(
            ([command, "registry.yaml", option, "registry.yaml"], "registry.yaml exists and is no")
            for command, option in (("run", "--json"), ("run", "--html"), ("analyze", "--json"))
        ),
        (
            ["plan", "registry.yaml", "--plot", "registry.yaml"],
            "registry.yaml ends in none of .png",
        ),
        (["generate", "."], ". is no name for something new; write one, as table"),
        (["cluster", "registry.yaml", ".."], ".. is no name for something new"),
        (["criteo", "convert", "registry.yaml", "."], ". is no name for something new"),
        (["report", "."], ".: is a folder; name a file that recd run --json wrote"),
        (["run", "registry.yaml", "--json", "s3://bucket/j"], "s3://bucket/j is a URL; it is writ"),
        (
            ["cluster", "registry.yaml", "--check", "--force"],
            "--check writes nothing: leave out --fo",
        ),
        (["cluster", "registry.yaml", "x", "--json", "registry.yaml/j"], "registry.yaml/j: cannot"),
        (["cluster", "registry.yaml", "file:///x"], "file:///x is a URL; it is written to this"),
        (
            ["init", "registry.yaml", "s3://bucket/x"],
            "s3://bucket/x is a URL; it is written to this",
        ),
        (["logs", "write", "registry.yaml", "s3://bucket/x"], "s3://bucket/x is a URL; it is writ"),
        (["convert-layout", "registry.yaml", "s3://bucket/x"], "s3://bucket/x is a URL; it is wri"),
        (["generate", "s3://bucket/x"], "s3://bucket/x is a URL; it is written to this machine"),
        (
            ["run", "registry.yaml", "training.checkpoint.path=s3://bucket/x"],
            "is a URL; checkpoints go into a folder that all ranks share",
        ),
    ],
)
def test_what_is_wrong_is_said_first(folder: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code != 0
    assert isinstance(result.exception, SystemExit)
    assert message in " ".join(result.output.split())
    assert [path.name for path in folder.iterdir()] == ["registry.yaml"]


@pytest.mark.parametrize(
    "command",
    [
        ["run", "registry.yaml"],
        ["evaluate", "registry.yaml"],
        ["predict", "registry.yaml", "new.parquet", "-o", "scores.parquet"],
    ],
)
def test_ranks_are_those_of_torchrun(folder: Path, command: list[str]) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2"}
    result = CliRunner().invoke(main, [*command, "--ranks", "1"], env=ranks)
    assert result.exit_code == 2, result.output
    assert "torchrun says which ranks there are: leave out --ranks" in result.stderr


@pytest.mark.parametrize("command", [ZIPF, ["report", "run.json"], ["trace", "profile", "ids.txt"]])
@pytest.mark.parametrize("name", ["registry.yaml", "clicks.parquet", "clicks.csv", "model.pt"])
def test_force_replaces_no_file_of_another_kind(
    folder: Path, command: list[str], name: str
) -> None:
    for other in ("ids.txt", "clicks.csv"):
        (folder / other).write_text("user,score_of_yesterday\n1,2\n")
    pq.write_table(pa.table({"user": [1], "click": [0]}), folder / "clicks.parquet")
    (folder / "model.pt").write_bytes(b"PK\3\4")
    before = (folder / name).read_bytes()
    result = CliRunner().invoke(main, [*command, "-o", name, "--force"])
    assert result.exit_code == 1, result.output
    assert f"{name} exists and is no file of the kind" in " ".join(result.output.split())
    assert (folder / name).read_bytes() == before
