"""`recd plan --scaling` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from tests.cli.plan_cases import REGISTRY, folder, plan

from recd_plugins.cli import main

__all__ = ["folder"]


def test_a_step_by_the_number_of_ranks(folder: Path) -> None:
    other = REGISTRY.replace("num_embeddings: 500", "num_embeddings: 100000000000")
    (folder / "huge.yaml").write_text(other, encoding="utf-8")
    result = plan(
        *("--scaling", "--topology", "ndv4", "--ranks-per-node", "2", "--nodes", "3"),
        *("--global-batch", "120", "--beside", "huge.yaml", "--json", "p", "--plot", "p.png"),
    )
    assert result.exit_code == 0, result.output
    assert "huge, weak, 2 ranks: no plan fits" in result.stdout
    report = json.loads((folder / "p").read_text())
    assert [each["ranks"] for each in report["weak"]["stock"]] == [2, 4, 6]
    assert [each["batch_size"] for each in report["weak"]["registry"]] == [64] * 3
    assert [each["batch_size"] for each in report["strong"]["registry"]] == [60, 30, 20]
    assert all("no plan fits" in each["problem"] for each in report["strong"]["huge"])
    assert "no plan fits" in result.stdout.partition("huge, strong, ")[2]
    assert "(of --global-batch 120)" in result.stdout.replace("\n", " ")
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG")
    few = plan("--scaling", "--topology", "ndv4", "--nodes", "2", "--global-batch", "15")
    assert few.exit_code == 2
    assert "--global-batch 15: no row for each of 16 ranks" in few.output
    again = plan("--scaling", "--beside", "registry.yaml")
    assert "there is a line named registry; rename the file" in again.output


def test_the_line_of_plain_torchrec_is_no_registrys(folder: Path) -> None:
    (folder / "registry.yaml").rename(folder / "stock.yaml")
    (folder / "registry.yaml").write_text(REGISTRY, encoding="utf-8")
    said = "stock.yaml: there is a line named stock"
    alone = CliRunner().invoke(main, ["plan", "stock.yaml", "--scaling"])
    for refused in (alone, plan("--scaling", "--beside", "stock.yaml")):
        assert refused.exit_code == 2
        assert said in " ".join(refused.output.split())
