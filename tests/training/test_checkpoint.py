from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.small_disk import small_disk
from tests.training.checkpoint_cases import MOMENTS, Trainer, die_at
from torch import nn

from recd_plugins.runtime.errors import RecdError, SetupError
from recd_plugins.runtime.generators import seed_generators
from recd_plugins.runtime.launch import launch
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint import Checkpoints
from recd_plugins.training.checkpoint_files import Progress, problems, put
from recd_plugins.training.rank_state import copy_weights


def save_three(rank: int, world_size: int, folder: Path, moment: str | None) -> Any:
    checkpoints = Checkpoints(folder, keep=1)
    with checkpoints.reserve(resume=False) if rank == 0 else nullcontext():
        dist.barrier()
        trainer = Trainer(world_size)
        states = []
        for step in range(1, 4):
            trainer.step()
            states.append(trainer.everything())
            if step == 3 and moment is not None and rank == 0:
                die_at(moment)
            checkpoints.save(trainer.dmp, trainer.optimizer, Progress(step, losses=[0.0] * step))
    return states


def load(rank: int, world_size: int, folder: Path, rows: int = 16) -> Any:
    trainer = Trainer(world_size, rows)
    progress = Checkpoints(folder, keep=1).load(trainer.dmp, trainer.optimizer)
    return progress, trainer.everything()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, run_on_ranks(save_three, 2, folder, None)[0]


@pytest.mark.parametrize("moment", MOMENTS)
def test_kills_leave_a_checkpoint(tmp_path: Path, whole: tuple[Path, Any], moment: str) -> None:
    with pytest.raises(SetupError, match="killed"):
        launch(save_three, 2, tmp_path, moment)
    with Checkpoints(tmp_path, keep=1).reserve(resume=True):
        pass
    step = 3 if moment == "while an old one is deleted" else 2
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{step:09d}"]
    for progress, state in run_on_ranks(load, 2, tmp_path):
        assert progress.step == step
        assert state == whole[1][step - 1]


@pytest.mark.parametrize("world_size", [1, 4])
def test_another_number_of_ranks(whole: tuple[Path, Any], world_size: int) -> None:
    folder, states = whole
    assert states[2] != states[1]
    for progress, state in run_on_ranks(load, world_size, folder):
        assert progress.step == 3
        assert state == states[2]


def test_a_checkpoint_of_another_model(whole: tuple[Path, Any]) -> None:
    message = r"step-000000003: the checkpoint cannot be loaded .* registry"
    with pytest.raises(RecdError, match=message):
        run_on_ranks(load, 1, whole[0], 32)


def refuses(folder: Path, message: str, *, resume: bool = False) -> None:
    reserved = Checkpoints(folder, keep=1).reserve(resume=resume)
    with pytest.raises(RecdError, match=message), reserved:
        pass


def test_a_folder_in_use_or_not_to_be_written(tmp_path: Path, whole: tuple[Path, Any]) -> None:
    refuses(whole[0], "--resume")
    (tmp_path / "file").touch()
    refuses(tmp_path / "file", "file: the folder cannot be written .*training.checkpoint.path")


def meet_names(rank: int, world_size: int, folder: Path) -> None:
    trainer = Trainer(world_size)
    table = nn.ModuleDict({"t": nn.Linear(4, 16, bias=False)})
    trainer.dmp.module.replicated_bags = nn.ModuleDict({"embedding_bags": table})
    checkpoints = Checkpoints(folder, keep=1)
    with pytest.raises(SetupError, match=r"named 'bags\.embedding_bags\.t\.weight' in checkpoints"):
        checkpoints.save(trainer.dmp, trainer.optimizer, Progress(1))


def test_parameters_that_would_have_one_name(tmp_path: Path) -> None:
    run_on_ranks(meet_names, 1, tmp_path)
    assert not list(tmp_path.iterdir())


def test_one_run_at_a_time(tmp_path: Path) -> None:
    being_written = tmp_path / ".step-000000001.0123abcd.partial"
    with Checkpoints(tmp_path, keep=1).reserve(resume=False):
        being_written.mkdir()
        refuses(tmp_path, rf"process {os.getpid()} on .* is writing to this", resume=True)
        assert being_written.exists(), "the living run writes it"
    with Checkpoints(tmp_path, keep=1).reserve(resume=True):
        assert not being_written.exists()


def save_one(rank: int, world_size: int, folder: Path) -> None:
    trainer, checkpoints = Trainer(world_size), Checkpoints(folder, keep=1)
    checkpoints.save(trainer.dmp, trainer.optimizer, Progress(7))
    with pytest.raises(RecdError, match="already has a checkpoint of a later step, step-000000007"):
        checkpoints.save(trainer.dmp, trainer.optimizer, Progress(3))
    checkpoints.save(trainer.dmp, trainer.optimizer, Progress(7))


def test_a_step_before_the_newest_is_refused(tmp_path: Path) -> None:
    run_on_ranks(save_one, 1, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000007"]


@pytest.mark.parametrize(("renamed", "kept"), [(1, "before"), (2, "after")])
def test_a_kill_between_two_names_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamed: int, kept: str
) -> None:
    checkpoint, partial = tmp_path / "step-000000001", tmp_path / ".step-000000001.0.partial"
    for folder, file in ((checkpoint, "before"), (partial, "after")):
        folder.mkdir()
        (folder / file).touch()
    replace, left = os.replace, [None] * renamed

    def killed(old: Path, new: Path) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        replace(old, new)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            put(partial, checkpoint)
    with Checkpoints(tmp_path, keep=1).reserve(resume=True):
        assert list(tmp_path.glob(".step-*.before")) == []
    assert [path.name for path in checkpoint.iterdir()] == [kept]


def save_on_a_full_disk(rank: int, world_size: int, folder: Path) -> list[str]:
    trainer = Trainer(world_size)
    checkpoints = Checkpoints(folder, keep=2)
    said = []
    # Pages that are free: enough for all of it, for nothing, or for all but its last files.
    for step, pages in enumerate((16, 0, 1, 2, 3, 4, 5), 1):
        if rank == 0:
            filler = folder / "filler"
            filler.unlink(missing_ok=True)
            filler.write_bytes(bytes(max(0, shutil.disk_usage(folder).free - pages * 4096)))
        dist.barrier()
        said.append("")
        try:
            checkpoints.save(trainer.dmp, trainer.optimizer, Progress(step))
        except RecdError as error:
            said[-1] = str(error)
    return said


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "64k") as mounted:
        yield mounted


def test_a_full_disk_leaves_the_checkpoints_before_it(disk: Path) -> None:
    first, second = run_on_ranks(save_on_a_full_disk, 2, disk)
    assert first == second
    assert first[0] == ""
    failed = [step for step, said in enumerate(first, 1) if said]
    assert len(failed) >= 3
    for step in failed:
        message = f"step-{step:09d}: the checkpoint cannot be written (No space left on device)"
        assert message in first[step - 1]
    names = sorted(path.name for path in disk.iterdir() if path.name != "filler")
    assert names == [f"step-{step:09d}" for step in range(1, 8) if step not in failed]
    for name in names:
        assert problems(disk / name) == ([], [])


def draws() -> list[Any]:
    ours = np.random.rand(), np.random.randn(), random.random(), random.gauss(0, 1)
    return [torch.rand(3).tolist(), *ours]


def loaded(rank: int, world_size: int, folder: Path) -> tuple[list[Any], list[Any]]:
    trainer, again = Trainer(world_size), Trainer(world_size)
    trainer.dmp.module.register_buffer("seen", torch.tensor(rank + 0.5))
    again.dmp.module.register_buffer("seen", torch.tensor(0.0))
    seed_generators(rank)
    Checkpoints(folder, keep=1).save(trainer.dmp, trainer.optimizer, Progress(1))
    expected = draws()
    Checkpoints(folder, keep=1).load(again.dmp, again.optimizer)
    return [rank + 0.5, expected], [again.dmp.module.seen.item(), draws()]


def test_a_trainer_that_loads_a_checkpoint_goes_on_with_what_each_rank_had(tmp_path: Path) -> None:
    (one, one_loaded), (other, other_loaded) = run_on_ranks(loaded, 2, tmp_path)
    assert (one_loaded, other_loaded) == (one, other)
    assert one != other


def test_a_collision_map_keeps_the_segments_of_its_shards() -> None:
    name = "maps.t._output_segments_tensor"
    sharded = {name: torch.tensor([0, 2, 4]), "over.weight": torch.zeros(2)}
    copy_weights(sharded, {name: torch.tensor([0, 4, -1]), "over.weight": torch.ones(2)})
    assert sharded[name].tolist() == [0, 2, 4]
    assert sharded["over.weight"].tolist() == [1, 1]
