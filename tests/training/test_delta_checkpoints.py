from __future__ import annotations

import json
import random
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from tests.commands import recd, refusal
from tests.covering import by_night
from tests.distributed.changed_row_cases import TRAINING, batch, sharded_model
from tests.training import checkpoint_cases

from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.launch import launch
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training import checkpoint, checkpoint_rows
from recd_plugins.training.checkpoint import Checkpoints
from recd_plugins.training.checkpoint_dcp import read_weights
from recd_plugins.training.checkpoint_files import (
    DamagedError,
    Progress,
    chain_of,
    check_whole,
    checkpoints_in,
    read_delta,
)
from recd_plugins.training.optimizer import build_optimizer

STEPS = 5


class Trainer(checkpoint_cases.Trainer):
    """Trains a model with a table for each kind of sharding, on few rows of each."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.dmp = sharded_model()
        self.optimizer = build_optimizer(self.dmp, TRAINING)

    def train(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.dmp(batch(self.rank, step)).backward()
        self.optimizer.step()


def train(
    rank: int, world_size: int, folder: Path, steps: int, full_every: int, die: Any = None
) -> Any:
    """Load the newest checkpoint, and save one after each step up to ``steps``."""
    trainer = Trainer(rank)
    checkpoints = Checkpoints(folder, keep=2, full_every=full_every)
    with checkpoints.reserve(resume=True) if rank == 0 and die else nullcontext():
        dist.barrier()
        done = checkpoints.load(trainer.dmp, trainer.optimizer).step
        states = [trainer.everything()]
        for step in range(done + 1, steps + 1):
            if die and step == die["step"]:
                _die_at(die["moment"], rank)
            trainer.train(step)
            checkpoints.save(trainer.dmp, trainer.optimizer, Progress(step))
            states.append(trainer.everything())
    return states


def load(rank: int, world_size: int, folder: Path) -> Any:
    """Return the step and the state of the newest checkpoint, and the messages."""
    trainer, said = Trainer(rank), []
    checkpoints = Checkpoints(folder, keep=2, full_every=9)
    with mock.patch.object(checkpoint, "_say", said.append):
        step = checkpoints.load(trainer.dmp, trainer.optimizer).step
    return step, trainer.everything(), " ".join(said)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_on_ranks(train, 2, tmp_path_factory.mktemp("full"), STEPS, 1)[0]


@pytest.fixture(scope="module")
def deltas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks: a full one, three deltas, and another full one."""
    folder = tmp_path_factory.mktemp("deltas")
    run_on_ranks(train, 2, folder, 3, 4)
    assert [len(chain_of(path)) for path in checkpoints_in(folder)] == [1, 2, 3]
    run_on_ranks(train, 2, folder, STEPS, 4)
    return folder


def test_deltas_resume_as_full_checkpoints(deltas: Path, full: Any, tmp_path: Path) -> None:
    *before, last = checkpoints_in(deltas)
    assert [len(chain_of(path)) for path in before] == [1, 2, 3, 4]
    assert chain_of(last) == [last]
    by_rows = {name.split(".")[-1] for path in before[1:] for name in read_delta(path).rows}
    assert by_rows == {"weight", "momentum1"}
    folder = Path(shutil.copytree(deltas, tmp_path / "some"))
    shutil.rmtree(folder / last.name)
    for world_size in (1, 2, 4):
        assert run_on_ranks(load, world_size, folder)[0] == (4, full[4], "")


def test_they_last_as_long_as_they_are_needed(full: Any, tmp_path: Path) -> None:
    run_on_ranks(train, 1, tmp_path, 8, 3)
    names = [int(path.name.removeprefix("step-")) for path in checkpoints_in(tmp_path)]
    assert names == [4, 7, 8], "the latest two, and the full one before"


MOMENTS = ("while rows are written", *checkpoint_cases.MOMENTS)


def _die_at(moment: str, rank: int) -> None:
    def write_and_die(*arguments: Any, **named: Any) -> None:
        write_table(*arguments, **named)
        checkpoint_cases.die()

    write_table = pq.write_table
    if moment == "while rows are written":
        checkpoint_rows.pq.write_table = write_and_die  # on the first rank that has any
    elif rank == 0 and moment == "at any moment":
        threading.Timer(random.uniform(0, 0.3), checkpoint_cases.die).start()
    elif rank == 0:
        checkpoint_cases.die_at(moment)


def test_kills_lose_no_step_that_was_saved(tmp_path: Path) -> None:
    """By night ten kills in saves, of each kind twice, and ten at random moments."""
    kills = [each for moment in MOMENTS for each in (moment, "at any moment")]
    kills = kills * 2 if by_night() else kills[:2]
    (tmp_path / "full").mkdir()
    expected = run_on_ranks(train, 2, tmp_path / "full", 10 * len(kills), 1)[0]
    folder, at = tmp_path / "deltas", 0
    for moment in kills:
        with pytest.raises(SetupError, match="killed by SIGKILL"):
            launch(train, 2, folder, len(expected), 3, {"step": at + 1, "moment": moment})
        before, (at, state, _) = at, run_on_ranks(load, 2, folder)[0]
        assert at >= before
        assert state == expected[at]
    assert launch(train, 2, folder, at + 1, 3)[0][-1] == expected[at + 1]


def test_every_flip_is_noticed_and_falls_back(deltas: Path, full: Any, tmp_path: Path) -> None:
    newest = checkpoints_in(deltas)[3]
    files = sorted(path for link in chain_of(newest) for path in link.iterdir())
    choice = random.Random(0)
    for _ in range(30):
        path, place = choice.choice(files), choice.random()
        content = path.read_bytes()
        checkpoint_cases.flip(path, place)
        with pytest.raises(DamagedError):
            check_whole(newest)
        path.write_bytes(content)
    check_whole(newest)

    folder = Path(shutil.copytree(deltas, tmp_path / "some"))
    shutil.rmtree(folder / "step-000000005")
    rows = sorted((folder / "step-000000003").glob("*.parquet"))
    checkpoint_cases.flip(rows[-1])
    step, state, said = run_on_ranks(load, 2, folder)[0]
    assert (step, state) == (2, full[2])
    assert "step-000000004 is damaged and was renamed to step-000000004.damaged-1" in said
    assert f"step-000000003/{rows[-1].name}: the content of the file has changed" in said
    assert "resuming from step-000000002" in said

    folder = Path(shutil.copytree(deltas, tmp_path / "gap"))
    shutil.rmtree(folder / "step-000000005")
    shutil.rmtree(folder / "step-000000002")
    step, state, said = run_on_ranks(load, 1, folder)[0]
    assert (step, state) == (1, full[1])
    assert "step-000000002: the checkpoint is missing, but step-000000003 needs it" in said


def test_commands(deltas: Path, full: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(deltas, tmp_path / "some"))
    shutil.rmtree(folder / "step-000000005")
    newest = folder / "step-000000004"
    told = json.loads(recd("checkpoint", "list", folder, "--json"))["checkpoints"]
    assert [each["base"] for each in told] == [None, *(Path(e["path"]).name for e in told[:3])]
    assert "step-000000004: 1" not in (shown := recd("checkpoint", "show", folder))
    assert "step 4, epoch 0, a delta that needs step-000000001, step-000000002" in shown
    assert len(json.loads(recd("checkpoint", "verify", newest, "--json"))["checkpoints"]) == 4
    said = refusal("checkpoint", "compact", folder / "step-000000002")
    assert "needs this checkpoint unchanged" in said
    names = [".".join(name.split(".")[1:]) for name in read_delta(newest).rows]
    before = read_weights(newest)
    assert {name for name in names if name.endswith("weight")} <= before.keys()

    assert "is now a full checkpoint" in recd("checkpoint", "compact", folder)
    assert "is already" in recd("checkpoint", "compact", folder)
    for old in checkpoints_in(folder)[:-1]:
        shutil.rmtree(old)
    after = read_weights(newest)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in after)
    assert run_on_ranks(train, 2, folder, STEPS, 4)[0] == full[4:]
    assert [len(chain_of(path)) for path in checkpoints_in(folder)] == [1, 2]
