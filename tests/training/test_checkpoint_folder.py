"""A folder of checkpoints: one run at a time, no links, and a disk that is full."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.small_disk import small_disk
from tests.training.checkpoint_cases import Trainer

from recd_plugins.runtime.errors import RecdError
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint import Checkpoints
from recd_plugins.training.checkpoint_files import Progress, problems, put


def test_one_run_at_a_time(tmp_path: Path) -> None:
    being_written = tmp_path / ".step-000000001.0123abcd.partial"
    with Checkpoints(tmp_path, keep=1).reserve(resume=False):
        being_written.mkdir()
        for resume in (False, True):
            with (
                pytest.raises(RecdError, match=rf"process {os.getpid()} on .* is writing there"),
                Checkpoints(tmp_path, keep=1).reserve(resume),
            ):
                pass
        assert being_written.exists(), "the living run writes it"
    with Checkpoints(tmp_path, keep=1).reserve(resume=True):
        assert not being_written.exists()


def save(rank: int, world_size: int, folder: Path, step: int) -> str:
    """One checkpoint, of which one is kept; what is said."""
    trainer = Trainer(world_size)
    with redirect_stderr(StringIO()) as said:
        Checkpoints(folder, keep=1).save(trainer.dmp, trainer.optimizer, Progress(step))
    return said.getvalue()


def test_a_step_before_the_newest_is_refused(tmp_path: Path) -> None:
    """A run that counts anew would have each of its checkpoints deleted in favour of that one."""
    run_on_ranks(save, 1, tmp_path, 7)
    told = r"step-000000003: is of an earlier step than step-000000007, which would"
    with pytest.raises(RecdError, match=told):
        run_on_ranks(save, 1, tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000007"]
    run_on_ranks(save, 1, tmp_path, 7)


@pytest.mark.parametrize(("renamed", "kept"), [(1, "before"), (2, "after")])
def test_a_kill_between_two_names_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamed: int, kept: str
) -> None:
    """The one that was to go has its name back as the next run starts, where no other has it."""
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
    """A checkpoint that fits, and others that do not: what is said of each."""
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
        try:
            checkpoints.save(trainer.dmp, trainer.optimizer, Progress(step))
        except RecdError as error:
            said.append(str(error))
        else:
            said.append("")
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
        assert re.search(
            rf"step-{step:09d}: cannot be written \(No space left on device\); --resume goes on",
            first[step - 1],
        )
    names = sorted(path.name for path in disk.iterdir() if path.name != "filler")
    assert names == [f"step-{step:09d}" for step in range(1, 8) if step not in failed]
    for name in names:
        assert problems(disk / name) == ([], [])
