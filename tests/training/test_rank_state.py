"""What each rank has of its own: kept, put back, and compared where it is to be alike."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from recd_plugins.errors import PluginError
from recd_plugins.generators import GeneratorState, seed_generators
from recd_plugins.interfaces import Plugin
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint_files.errors import DamagedError
from recd_plugins.training.checkpoint_files.progress import Progress
from recd_plugins.training.rank_state import (
    check_made_alike,
    check_positions,
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


def check_model(rank: int, world_size: int, unlike: bool) -> None:
    linear, norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
    for parameter in linear.parameters():
        nn.init.constant_(parameter, rank if unlike else 1)
    assert norm.running_mean is not None
    norm.running_mean += rank  # as training leaves it
    check_made_alike(nn.Sequential(linear, norm), "the model")


def test_models_are_made_alike() -> None:
    run_on_ranks(check_model, 2, False)
    with pytest.raises(
        PluginError, match=r"the model has another 0\.weight on rank 1 than on rank"
    ):
        run_on_ranks(check_model, 2, True)
