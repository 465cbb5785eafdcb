"""What each rank has of its own: kept, put back, and compared where it is to be alike."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.training.checkpoint_cases import Trainer

from recd_plugins.errors import PluginError
from recd_plugins.generators import GeneratorState, seed_generators
from recd_plugins.interfaces import Plugin
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint import Checkpoints
from recd_plugins.training.checkpoint_files.errors import DamagedError
from recd_plugins.training.checkpoint_files.progress import Progress
from recd_plugins.training.rank_state import (
    check_positions,
    make_alike,
    put_back_generators,
)


class Reads(Plugin):
    """Stand for a dataset."""

    kind = "dataset"
    name = "test.reads"


def draws() -> list[Any]:
    return [
        torch.rand(3).tolist(),
        np.random.rand(),
        np.random.randn(),
        random.random(),
        random.gauss(0, 1),
    ]


def test_generators_go_on_where_they_were() -> None:
    seed_generators(1 << 62)
    draws()
    state = {f"generator {name}": each for name, each in GeneratorState.now().arrays().items()}
    expected = draws()
    assert draws() != expected
    put_back_generators(state)
    assert draws() == expected
    put_back_generators({})
    del state["generator torch"]
    with pytest.raises(DamagedError, match=r"ranks\.npz: has no state of generators \('torch'\)"):
        put_back_generators(state)


def loaded(rank: int, world_size: int, folder: Path) -> tuple[list[Any], list[Any]]:
    """A rank's own buffer and draws after a checkpoint, and after a new trainer has loaded it."""
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


def check_position(rank: int, world_size: int, readers: list[Any]) -> None:
    check_positions(Reads(Reads.Options()), Progress(7, reader=readers[rank]))


@pytest.mark.parametrize(
    ("readers", "said"),
    [
        (
            [{"row": 1}, {"row": 2}],
            r'after step 7 .* is \{"row": 2\} on rank 1 and \{"row": 1\} on',
        ),
        ([{"row": 1}, {"row": {1}}], "state_dict of a reader failed at .* TypeError: .*set"),
    ],
)
def test_positions_are_json_and_the_same(readers: list[Any], said: str) -> None:
    with pytest.raises(PluginError, match=rf"test\.reads: {said}"):
        run_on_ranks(check_position, 2, readers)
    run_on_ranks(check_position, 2, [{"row": 1, "epoch": 2}, {"epoch": 2, "row": 1}])


def made_alike(rank: int, world_size: int) -> list[list[Any]]:
    generator = torch.Generator().manual_seed(rank)
    tensors = [
        torch.rand(3, 2, generator=generator).T,
        torch.tensor(rank),
        torch.tensor([rank == 0]),
        torch.zeros(0, 2),
        torch.full((2,), rank + 0.5, dtype=torch.bfloat16),
    ]
    make_alike(tensors)
    return [tensor.tolist() for tensor in tensors]


def test_tensors_are_made_those_of_rank_0() -> None:
    first, second = run_on_ranks(made_alike, 2)
    assert first == second
    assert first[1:] == [0, [True], [], [0.5, 0.5]]
    assert first[0] == torch.rand(3, 2, generator=torch.Generator().manual_seed(0)).T.tolist()
