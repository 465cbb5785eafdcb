"""What options refuse before any work is done."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.commands import invoke, recd, refusal

ZIPF = ["profile", "zipf", "--table", "t", "--rows", "9", "--length", "2"]


@pytest.fixture
def folder(cwd: Path) -> Path:
    (cwd / "registry.yaml").write_text("version: 1\n", encoding="utf-8")
    return cwd


REFUSED = {
    "profile zipf --table t --rows 9 --length -1 -o p": "-1.0 is not in the range",
    "run registry.yaml --json -": "'-' is not the path of a file",
    "plan registry.yaml --json registry.yaml/j": "registry.yaml/j: the file cannot be written",
    "generate .": ". is not a new path. Use a new path, such as table",
    "run registry.yaml --json s3://bucket/j": "s3://bucket/j is a URL, not a local path",
    "cluster registry.yaml file:///x": "file:///x is a URL, not a local path",
    "run registry.yaml training.checkpoint.path=s3://bucket/x": "the path is a URL",
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_wrong_is_said_first(folder: Path, command: str) -> None:
    result = invoke(*command.split())
    assert result.exit_code != 0
    assert REFUSED[command] in " ".join(result.output.split())
    assert [path.name for path in folder.iterdir()] == ["registry.yaml"]


def test_ranks_are_those_of_torchrun(folder: Path) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2"}
    result = invoke("evaluate", "registry.yaml", "--ranks", "1", env=ranks)
    assert result.exit_code == 2, result.output
    assert "torchrun sets the number of ranks. Remove --ranks." in result.stderr


def test_files_are_replaced_by_force_alone(folder: Path) -> None:
    recd(*ZIPF, "-o", "p")
    assert "p already exists" in refusal(*ZIPF, "-o", "p")
    recd(*ZIPF, "-o", "p", "--force")
    said = refusal("profile", "merge", "p", "-o", "p", "--force")
    assert "p: this file is also an input" in said


@pytest.mark.parametrize("command", [ZIPF, ["report", "run.json"], ["trace", "profile", "ids.txt"]])
def test_force_replaces_no_file_of_another_kind(folder: Path, command: list[str]) -> None:
    (folder / "clicks.csv").write_text("user,score_of_yesterday\n1,2\n")
    pq.write_table(pa.table({"user": [1], "click": [0]}), folder / "clicks.parquet")
    for name in ("registry.yaml", "clicks.csv", "clicks.parquet"):
        before = (folder / name).read_bytes()
        said = refusal(*command, "-o", name, "--force")
        assert f"{name}: --force does not replace this file" in said
        assert (folder / name).read_bytes() == before
