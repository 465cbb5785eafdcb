"""What each rank has of its own: kept, put back, and compared where it is to be alike."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.training.checkpoint_cases import Trainer

from recd_plugins.runtime.generators import GeneratorState, seed_generators
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint import Checkpoints
from recd_plugins.training.checkpoint_files import Progress
from recd_plugins.training.rank_state import (
    broadcast_state,
    put_back_generators,
)


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


def made_alike(rank: int, world_size: int) -> list[list[Any]]:
    generator = torch.Generator().manual_seed(rank)
    tensors = [
        torch.rand(3, 2, generator=generator).T,
        torch.tensor(rank),
        torch.tensor([rank == 0]),
        torch.zeros(0, 2),
        torch.full((2,), rank + 0.5, dtype=torch.bfloat16),
    ]
    broadcast_state(tensors)
    return [tensor.tolist() for tensor in tensors]


def test_tensors_are_made_those_of_rank_0() -> None:
    first, second = run_on_ranks(made_alike, 2)
    assert first == second
    assert first[1:] == [0, [True], [], [0.5, 0.5]]
    assert first[0] == torch.rand(3, 2, generator=torch.Generator().manual_seed(0)).T.tolist()
