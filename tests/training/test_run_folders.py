from __future__ import annotations

from pathlib import Path

import pytest
from tests.small_registry import write_registry

from recd_plugins.config.from_file import load_registry
from recd_plugins.runtime.errors import RecdError
from recd_plugins.training.checkpoint_files import PROGRESS, Progress, progress_text, step_name
from recd_plugins.training.run_folders import (
    RunSettings,
    find_run,
    find_trained,
    new_run,
    read_settings,
    runs_in,
    settings_to_resume,
)


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    checkpoint = {"runs": f"{tmp_path}/runs"}
    return write_registry(tmp_path, "r.yaml", training={"checkpoint": checkpoint})


def train(registry: Path, *settings: str) -> Path:
    """Create a run folder with an empty checkpoint, as ``recd run`` would."""
    config = load_registry(registry, settings=settings)
    kept = RunSettings.of(config, settings, {"steps": 3}, None)
    with new_run(registry.parent / "runs", kept) as run:
        checkpoint = run / step_name(1)
        checkpoint.mkdir()
        (checkpoint / PROGRESS).write_text(progress_text(Progress(1)))
    return run


def test_runs_are_numbered(registry: Path) -> None:
    made = [train(registry) for _ in range(11)]
    assert [run.name for run in made] == [str(number) for number in range(1, 12)]
    assert runs_in(registry.parent / "runs") == made
    assert find_run(registry.parent / "runs") == made[-1]
    assert find_run(registry.parent / "runs", 2) == made[1]
    assert find_run(made[3]) == made[3]


def test_a_run_that_fails_before_its_first_checkpoint_leaves_no_folder(registry: Path) -> None:
    settings = RunSettings.of(load_registry(registry), (), {}, None)
    folder = registry.parent / "runs"

    def fail(checkpoint: str) -> None:
        with new_run(folder, settings) as run:
            (run / checkpoint).mkdir()
            raise ValueError("broken")

    for checkpoint, left in (("step", []), ("step-000000001", [folder / "1"])):
        with pytest.raises(ValueError, match="broken"):
            fail(checkpoint)
        assert runs_in(folder) == left


def test_settings_of_a_run_apply_again(registry: Path) -> None:
    train(registry, "training.seed=5")
    newest = train(registry, "training.seed=6", "model.embedding_dim=8")
    config = load_registry(registry)
    assert settings_to_resume(config, None) == ("training.seed=6", "model.embedding_dim=8")
    assert settings_to_resume(config, 1) == ("training.seed=5",)
    by_file = find_trained(registry)
    assert by_file.checkpoint == newest / "step-000000001"
    assert by_file.registry.training.seed == 6
    assert by_file.registry.training.steps is None
    assert find_trained(registry, run=1, settings=["training.seed=7"]).registry.training.seed == 7
    registry.write_text("version: 1\n")  # a run folder has its own copy
    by_folder = find_trained(newest, checkpoint="newest")
    assert by_folder.registry.training.seed == 6
    assert by_folder.checkpoint == by_file.checkpoint
    assert read_settings(newest).options == {"steps": 3}


@pytest.mark.parametrize(
    ("given", "run", "said"),
    [
        ("runs", 4, "there is no run 4. Use an existing run: 1"),
        ("other", None, "no run in this folder has a checkpoint"),
        ("r.yaml", 4, "there is no run 4"),
        ("fixed.yaml", 1, "--run needs training.checkpoint.runs"),
        ("runs/1", None, "not a folder that recd run has written"),
    ],
)
def test_runs_that_are_missing(registry: Path, given: str, run: int | None, said: str) -> None:
    folder = train(registry)
    (registry.parent / "other").mkdir()
    write_registry(registry.parent, "fixed.yaml", training={"checkpoint": {"path": "fixed"}})
    if given == "runs/1":
        (folder / "run.json").write_text("{}")
    with pytest.raises(RecdError, match=said):
        find_trained(registry.parent / given, run=run)
