from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.plan_cases import folder, plan, write

__all__ = ["folder"]


def test_a_plan_for_this_machine(folder: Path) -> None:
    result = plan("--json", "plan.json")
    assert result.exit_code == 0, result.output
    for words in (
        "1 node of machine: 2 ranks on cpu",
        "the first 1,024 rows",
        "t_seq_0_0",
        "reserve",
    ):
        assert words in result.stdout
    report = json.loads((folder / "plan.json").read_text())
    assert report["topology"]["name"] == "machine"
    assert report["plugins"]["batch_size"] == report["plain"]["batch_size"] == 64


def test_the_ranks_of_this_machine_pretend_to_be_nodes(folder: Path) -> None:
    write(folder, ranks=4, ranks_per_node=2)
    assert "2 nodes of machine: 4 ranks on cpu" in plan().stdout
    assert "3 nodes of machine: 6 ranks on cpu" in plan("--nodes", "3").stdout
    assert "1 node of machine: 1 rank on cpu" in plan("--ranks-per-node", "1").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "dgx-h10"], "no topology is named 'dgx-h10'. Did you mean 'dgx-h100'?"),
        (["--topology", "own.yaml"], "own.yaml: the file cannot be read: No such file"),
        (["--topology", "registry.yaml"], "registry.yaml:1 version: unknown key of a topology"),
        (["--topology", "ndv4", "--ranks-per-node", "16"], "a node of topology 'ndv4' has 8 GPUs"),
        (["--batch-size", "many"], "'many' is not a positive number of rows"),
        (["--auto", "--batch-size", "2048"], "table has 1024 rows, too few for a batch of 2048"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, arguments: list[str], message: str) -> None:
    result = plan(*arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
