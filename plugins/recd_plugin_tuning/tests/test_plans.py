"""`recd plan --auto`, `--scaling` and `--batch-size auto`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from tests.cli.plan_cases import folder, plan
from tests.commands import invoke

from recd_plugins.planning.step_cost import Compute, Operations
from recd_plugins.planning.study import study, with_plugins
from recd_plugins.planning.topologies import load_topology
from recd_plugins.runtime.errors import NoPlanError

__all__ = ["folder"]


def test_a_step_by_the_number_of_ranks(folder: Path) -> None:
    huge = YAML(typ="safe").load(folder / "registry.yaml")
    huge["model"]["num_embeddings"] = 10**11
    (folder / "huge.yaml").write_text(json.dumps(huge))
    cluster = ("--topology", "ndv4", "--ranks-per-node", "2", "--nodes", "3")
    others = ("--global-batch", "120", "--beside", "huge.yaml", "--json", "p", "--plot", "p.png")
    result = plan("--scaling", *cluster, *others)
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
    assert "--global-batch 15 is too small for 16 ranks" in few.output
    again = plan("--scaling", "--beside", "registry.yaml")
    assert "already named 'registry' in the plot" in again.output


def test_the_line_of_plain_torchrec_is_no_registrys(folder: Path) -> None:
    (folder / "stock.yaml").write_text((folder / "registry.yaml").read_text())
    said = "stock.yaml: another registry or baseline is already named 'stock'"
    alone = invoke("plan", "stock.yaml", "--scaling")
    for refused in (alone, plan("--scaling", "--beside", "stock.yaml")):
        assert refused.exit_code == 2
        assert said in " ".join(refused.output.split())


def test_a_batch_that_no_choice_fits_is_too_large(make_registry, table: Path) -> None:
    one = {"use": "recd.session_parquet", "options": {"path": str(table), "sparse": ["item_0"]}}
    registry = make_registry(sharding=[{"use": "auto"}], dataset=one, pooling=[])
    spec = load_topology("machine", ranks=2).model_copy(update={"ddr_bytes": 300_000})
    nothing = Compute(Operations(), Operations(), 0)
    largest = study(registry, "machine", spec, None, lambda _: None, nothing).plugins
    assert largest.largest_batch_size == largest.batch_size < 256
    more = {"batch_size": largest.batch_size + (largest.batch_step or 0)}
    with pytest.raises(NoPlanError, match="'auto' found no plan that fits"):
        with_plugins(registry.with_training(more), spec)
