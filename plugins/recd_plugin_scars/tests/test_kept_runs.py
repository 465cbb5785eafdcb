"""Runs with cached tables whose files a later run goes on with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from recd_plugin_scars.tests.cache_cases import train_each, write_registry
from recd_plugin_scars.tests.runtime.kept_cases import contents
from recd_plugins.cli import main
from recd_plugins.distributed.lookup_kernels import close_kernels
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint_files import checkpoints_in
from recd_plugins.training.job import Job
from recd_plugins.training.result import Result
from recd_plugins.training.trained import TrainedJob, load_trained


def kept_registry(folder: Path, table: Path) -> Path:
    options = {"rows": 100, "storage": {"file": str(folder / "stores"), "keep": True}}
    checkpoint = {"path": str(folder / "checkpoints"), "every": 2}
    training = {"ranks": 1, "steps": 2, "checkpoint": checkpoint}
    return write_registry(folder / "registry.yaml", table, options, training=training)


@pytest.fixture(scope="module")
def kept(table: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Result]:
    """A run that has kept its tables, and what it came to."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "checkpoints").mkdir()
    job = Job(kept_registry(folder, table))
    (result,) = run_on_ranks(train_each, 1, [job])[0]
    assert isinstance(result, Result)
    return job, result


def test_what_scores_or_compares_leaves_kept_tables_alone(kept: tuple[Job, Result]) -> None:
    job, result = kept
    stores = job.registry.parent / "stores"
    before = contents(stores)
    assert any(path.name == "weights" for path in before)
    run_on_ranks(scored, 1, job)
    assert contents(stores) == before
    side = replace(job, lasting=False, overrides={"checkpoint": {}})
    for side_result in run_on_ranks(train_each, 1, [side, side])[0]:
        assert isinstance(side_result, Result)
        assert side_result.losses == result.losses, "from the same weights"
    assert contents(stores) == before


def scored(rank: int, world_size: int, job: Job) -> None:
    checkpoint = checkpoints_in(job.registry.parent / "checkpoints")[-1]
    trained = load_trained(TrainedJob(job.registry, checkpoint))
    assert trained.step == 2
    close_kernels(trained.parts.dmp)


def test_a_run_that_fails_before_its_first_step_leaves_them_to_the_next(
    kept: tuple[Job, Result],
) -> None:
    job, first = kept
    before = contents(job.registry.parent / "stores")
    (said,) = run_on_ranks(train_each, 1, [replace(job, overrides={"seed": 7})])[0]
    assert isinstance(said, str)
    assert "is of another run" in said
    assert contents(job.registry.parent / "stores") == before
    second = replace(job, lasting=True, overrides={"checkpoint": {}})
    (result,) = run_on_ranks(train_each, 1, [second])[0]
    assert isinstance(result, Result)
    assert result.losses != first.losses, "from what the first has learned"


def test_recd_run_compare_keeps_nothing(table: Path, tmp_path: Path) -> None:
    registry = kept_registry(tmp_path, table)
    result = CliRunner().invoke(main, ["run", str(registry), "--compare"])
    assert result.exit_code == 0, result.output
    assert "losses" in result.output
    assert not [path for path in tmp_path.rglob("*") if path.name == "weights"]
