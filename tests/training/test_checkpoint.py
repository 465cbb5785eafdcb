"""Checkpoints survive a kill at any moment, and load on another number of ranks."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.training.checkpoint_cases import Trainer
from torch import nn

from recd_plugins.runtime.errors import RecdError, SetupError
from recd_plugins.runtime.launch import launch
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training import checkpoint
from recd_plugins.training.checkpoint import Checkpoints
from recd_plugins.training.checkpoint_files import Progress


def save_three(rank: int, world_size: int, folder: Path, die_at: str | None) -> Any:
    """Checkpoints after steps 1 to 3, dying in the one of step 3."""
    checkpoints = Checkpoints(folder, keep=1)
    with checkpoints.reserve(resume=False) if rank == 0 else nullcontext():
        dist.barrier()
        trainer = Trainer(world_size)
        states = []
        for step in range(1, 4):
            trainer.step()
            states.append(trainer.everything())
            if step == 3 and die_at is not None and rank == 0:
                _die_at(die_at)
            checkpoints.save(trainer.dmp, trainer.optimizer, Progress(step, losses=[0.0] * step))
    return states


def _die_at(moment: str) -> None:
    def die(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "while tensors are written":
        checkpoint.save = die
    elif moment == "before progress is written":
        Path.write_text = die  # type: ignore[method-assign]
    elif moment == "before the rename":
        os.replace = die  # type: ignore[assignment]
    elif moment == "while an old one is deleted":
        shutil.rmtree = die  # type: ignore[assignment]


def load(rank: int, world_size: int, folder: Path) -> Any:
    trainer = Trainer(world_size)
    progress = Checkpoints(folder, keep=1).load(trainer.dmp, trainer.optimizer)
    return progress, trainer.everything()


MOMENTS = {
    "while tensors are written": 2,
    "before progress is written": 2,
    "before the rename": 2,
    "while an old one is deleted": 3,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with the checkpoint of step 3, and the state after each step."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, launch(save_three, 2, folder, None)[0]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_leaves_a_whole_checkpoint(
    tmp_path: Path, whole: tuple[Path, Any], moment: str
) -> None:
    with pytest.raises(SetupError, match="killed"):
        launch(save_three, 2, tmp_path, moment)
    with Checkpoints(tmp_path, keep=1).reserve(resume=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{MOMENTS[moment]:09d}"]
    for progress, state in launch(load, 2, tmp_path):
        assert progress.step == MOMENTS[moment]
        assert state == whole[1][progress.step - 1]


@pytest.mark.parametrize("world_size", [1, 4])
def test_another_number_of_ranks(whole: tuple[Path, Any], world_size: int) -> None:
    folder, states = whole
    assert states[2] != states[1]
    for progress, state in launch(load, world_size, folder):
        assert progress.step == 3
        assert state == states[2]


def load_into_a_larger_table(rank: int, world_size: int, folder: Path) -> None:
    trainer = Trainer(world_size, rows=32)
    Checkpoints(folder, keep=1).load(trainer.dmp, trainer.optimizer)


def test_a_checkpoint_of_another_model(whole: tuple[Path, Any]) -> None:
    with pytest.raises(RecdError, match=r"step-000000003: cannot be loaded .* registry"):
        launch(load_into_a_larger_table, 1, whole[0])


def test_a_damaged_checkpoint(tmp_path: Path, whole: tuple[Path, Any]) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(whole[0], damaged)
    (damaged / "step-000000003" / "progress.json").write_text("{", encoding="utf-8")
    with pytest.raises(RecdError, match=r"no checkpoint is whole .*progress.json: has 1 bytes"):
        launch(load, 1, damaged)


def test_a_folder_in_use_or_not_to_be_written(tmp_path: Path, whole: tuple[Path, Any]) -> None:
    with (
        pytest.raises(RecdError, match="--resume"),
        Checkpoints(whole[0], keep=1).reserve(resume=False),
    ):
        pass
    (tmp_path / "file").write_text("", encoding="utf-8")
    with (
        pytest.raises(RecdError, match=r"file: cannot be written .*training.checkpoint.path"),
        Checkpoints(tmp_path / "file", keep=1).reserve(resume=False),
    ):
        pass


def meet_names(rank: int, world_size: int, folder: Path) -> None:
    trainer = Trainer(world_size)
    table = nn.ModuleDict({"t": nn.Linear(4, 16, bias=False)})
    trainer.dmp.module.replicated_bags = nn.ModuleDict({"embedding_bags": table})
    checkpoints = Checkpoints(folder, keep=1)
    said = r"bags\.embedding_bags\.t\.weight .* have one name in checkpoints"
    with pytest.raises(SetupError, match=said):
        checkpoints.load(trainer.dmp, trainer.optimizer)  # before anything is trained
    with pytest.raises(SetupError, match=said):
        checkpoints.save(trainer.dmp, trainer.optimizer, Progress(1))


def test_parameters_that_would_have_one_name(tmp_path: Path) -> None:
    run_on_ranks(meet_names, 1, tmp_path)
    assert not list(tmp_path.iterdir())
