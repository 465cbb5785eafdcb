from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.cli import programs
from tests.small_registry import hashed, papercal, write_registry
from tests.training.checkpoint_cases import flip, reseal

from recd_plugins.cli import main


def write(folder: Path, **training: object) -> Path:
    checkpoint = {"path": f"{folder}/checkpoints", "every": 2}
    settings = {"batch_size": 32, "steps": 4, "learning_rate": 0.1, "evaluate": False}
    return write_registry(
        folder,
        dataset=papercal(folder, 512, 128, sparse=["usr_0", "item_0"]),
        converter={"use": "recd.ikjt"},
        preprocessing=hashed(50),
        model={"num_embeddings": 50},
        training={**settings, "device": "auto", "checkpoint": checkpoint, **training},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    write(folder)
    assert recd(folder).exit_code == 0
    return folder


def recd(folder: Path, *arguments: str):
    return CliRunner().invoke(main, ["run", str(folder / "registry.yaml"), *arguments])


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    write(tmp_path)
    return tmp_path


def told(folder: Path, *arguments: str) -> str:
    """What it says on stderr, its ranks too: they have that of the process that started them."""
    done = programs.recd("run", folder / "registry.yaml", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_damaged_one_is_named_and_the_one_before_is_taken(folder: Path) -> None:
    checkpoints = folder / "checkpoints"
    flip(checkpoints / "step-000000004" / "__0_0.distcp")
    said = told(folder, "--resume")
    assert "step-000000004 is damaged and was renamed to step-000000004.damaged-1" in said
    assert "__0_0.distcp: the content of the file has changed" in said
    assert "resuming from step-000000002" in said
    assert "resumed at step 2" in said
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["step-000000002", "step-000000004", "step-000000004.damaged-1"]

    for name in names[:2]:
        flip(checkpoints / name / "progress.json")
    refused = recd(folder, "--resume")
    assert refused.exit_code == 1
    assert "all checkpoints are damaged" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_complete_run_is_not_reported_again(folder: Path) -> None:
    done = recd(folder, "--resume")
    assert done.exit_code == 0, done.output
    assert done.stdout == "The run is already complete: all 4 steps are trained.\n"


def test_another_run_is_refused_and_a_learning_rate_allowed(folder: Path) -> None:
    write(folder, learning_rate=0.3)
    refused = recd(folder, "--resume", "--steps", "6")
    assert refused.exit_code == 1
    first, dense = (f"training.{n}learning_rate was 0.1 and is now 0.3" for n in ("", "dense_"))
    of_another = "step-000000004: the checkpoint belongs to another run"
    assert f"{of_another}: {first}; {dense}" in refused.stderr
    fields = ["training.learning_rate", "training.dense_learning_rate"]
    said = told(folder, "--resume", "--steps", "6", *(f"--allow={field}" for field in fields))
    assert f"resuming from step-000000004 with changed settings: {first}" in said
    assert "training.steps was 4 and is now 6" in said


def test_a_run_with_another_dense_optimizer_goes_on_with_the_same_losses(folder: Path) -> None:
    whole = folder / "whole"
    whole.mkdir()
    changed = {"dense_optimizer": "adam", "dense_learning_rate": 0.001, "ranks": 2}
    write(whole, **changed)
    assert recd(whole, "--json", str(whole / "all.json")).exit_code == 0
    shutil.rmtree(whole / "checkpoints" / "step-000000004")
    assert recd(whole, "--resume", "--json", str(whole / "rest.json")).exit_code == 0
    every, rest = (json.loads((whole / name).read_bytes()) for name in ("all.json", "rest.json"))
    assert rest["losses"] == every["losses"]
    write(whole, ranks=2)
    assert "training.dense_optimizer was " in recd(whole, "--resume").stderr


def test_unknown_losses_stay_so_and_the_best_stays_where_nobody_validates(folder: Path) -> None:
    best = {"metric": "auc", "mode": "max", "steps": [2, 4], "values": [0.9, 0.8]}
    path = folder / "checkpoints" / "step-000000004" / "progress.json"
    progress = json.loads(path.read_text()) | {"losses": [], "validation": best}
    path.write_text(json.dumps(progress))
    reseal(path.parent)
    assert recd(folder, "--resume", "--steps", "7", "--json", str(folder / "r.json")).exit_code == 0
    losses = json.loads((folder / "r.json").read_text(encoding="utf-8"))["losses"]
    assert losses[:4] == [None] * 4
    assert all(isinstance(loss, float) for loss in losses[4:])
    assert len(losses) == 7
    kept = sorted((folder / "checkpoints").glob("step-*"))
    assert [path.name[-1] for path in kept] == ["2", "6", "7"]
    saved = json.loads((kept[-1] / "progress.json").read_text(encoding="utf-8"))
    assert saved["losses"] == []
    assert saved["validation"] == best
