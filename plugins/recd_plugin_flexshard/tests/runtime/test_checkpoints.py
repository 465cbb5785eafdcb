"""Checkpoints of tiered tables are those of the tables: both ways, on any ranks and nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from recd_plugin_flexshard.runtime import RowTiers, rows
from recd_plugin_flexshard.tests.runtime.model import (
    OPTIMIZERS,
    RATES,
    ROWS,
    TIERS,
    Job,
    Optimizer,
    TierModel,
    Tiers,
    largest_difference,
    make_batch,
)
from recd_plugins.runtime.errors import RecdError
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint import Checkpoints
from recd_plugins.training.checkpoint_files import Progress, read_delta

T = TypeVar("T")
STEPS = 3
TOLERANCE = 1e-6
MINE = TIERS["moving"]
OTHERS: Tiers = {"a": RowTiers(flex=[30, 31, 0]), "b": RowTiers(hot=range(23))}
PARTS = ("weights", "state")
# Nodes and ranks of a node.
Layout = tuple[int, int]
# Who saves with tiers and where, and who goes on.
TO_STOCK: list[tuple[Layout, Layout]] = [((2, 1), (1, 4)), ((2, 2), (1, 1))]
FROM_STOCK: list[tuple[Layout, Layout]] = [((2, 1), (2, 2)), ((2, 2), (1, 2))]


class Plain(NamedTuple):
    losses: list[float]
    half_way: dict[str, Tensor]
    last: dict[str, Tensor]


def make_job(optimizer: Optimizer, tiers: Tiers | None, retier_every: int | None = None) -> Job:
    return Job(optimizer, tiers, shardings={"c": "table_wise"}, retier_every=retier_every)


def run(layout: Layout, function: Callable[..., T], *args: object) -> list[T]:
    nodes, ranks = layout
    return run_on_ranks(function, nodes * ranks, *args, local_world_size=ranks)


def train_plainly(rank: int, world_size: int, optimizer: Optimizer) -> Plain:
    job = make_job(optimizer, None)
    losses = job.train(range(STEPS))
    half_way = job.everything()
    losses += job.train(range(STEPS, 2 * STEPS))
    return Plain(_of_all_ranks(losses), half_way, job.everything())


def train_and_save(
    rank: int, world_size: int, optimizer: Optimizer, tiers: Tiers | None, folder: Path
) -> None:
    job = make_job(optimizer, tiers)
    job.train(range(STEPS), pipelined=tiers is not None)
    job.save(folder, STEPS)


def load_and_go_on(
    rank: int,
    world_size: int,
    optimizer: Optimizer,
    tiers: Tiers | None,
    folder: Path,
    plain: Plain,
) -> list[float]:
    job = make_job(optimizer, tiers)
    job.train(range(40, 42))  # what a checkpoint finds is to make no difference
    assert job.load(folder) == STEPS
    loaded = largest_difference(job.everything(), plain.half_way)
    losses = _of_all_ranks(job.train(range(STEPS, 2 * STEPS), pipelined=True))
    apart = [abs(a - b) for a, b in zip(losses, plain.losses[STEPS:], strict=True)]
    return [loaded, *apart, largest_difference(job.everything(), plain.last)]


def _of_all_ranks(losses: list[Tensor]) -> list[float]:
    stacked = torch.stack(losses).double()
    dist.all_reduce(stacked)
    return (stacked / dist.get_world_size()).tolist()


@pytest.fixture(scope="module", params=OPTIMIZERS)
def optimizer(request: pytest.FixtureRequest) -> Optimizer:
    return request.param


@pytest.fixture(scope="module")
def plain(optimizer: Optimizer) -> Plain:
    return run_on_ranks(train_plainly, 2, optimizer)[0]


Saved = Callable[[Layout, bool], Path]


@pytest.fixture(scope="module")
def saved(optimizer: Optimizer, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folders: dict[tuple[Layout, bool], Path] = {}

    def make(layout: Layout, tiered: bool) -> Path:
        if (layout, tiered) not in folders:
            folders[layout, tiered] = folder = tmp_path_factory.mktemp("saved")
            run(layout, train_and_save, optimizer, MINE if tiered else None, folder)
        return folders[layout, tiered]

    return make


@pytest.mark.parametrize(
    ("layouts", "tiered", "tiers"),
    [
        *((layouts, True, None) for layouts in TO_STOCK),
        *((layouts, False, MINE) for layouts in FROM_STOCK),
        *((layouts, True, OTHERS) for layouts in FROM_STOCK),
    ],
    ids=str,
)
def test_another_job_goes_on(
    saved: Saved,
    optimizer: Optimizer,
    plain: Plain,
    layouts: tuple[Layout, Layout],
    tiered: bool,
    tiers: Tiers | None,
) -> None:
    one, other = layouts
    for differences in run(other, load_and_go_on, optimizer, tiers, saved(one, tiered), plain):
        assert max(differences) <= TOLERANCE


def test_an_unsharded_model_goes_on(saved: Saved, optimizer: Optimizer, plain: Plain) -> None:
    model = TierModel(None)
    state = {"model": model.state_dict()}
    load(state, checkpoint_id=saved((2, 2), True) / f"step-{STEPS:09d}", no_dist=True)
    model.load_state_dict(state["model"])
    assert _difference(model, plain.half_way) <= TOLERANCE
    if optimizer == "sgd":
        sgd = torch.optim.SGD(model.parameters(), lr=RATES["sgd"])
        for step in range(STEPS, 2 * STEPS):
            sgd.zero_grad()
            model(make_batch(0, 1, step))[0].backward()
            sgd.step()
        assert _difference(model, plain.last) <= TOLERANCE


def _difference(model: TierModel, want: Mapping[str, Tensor]) -> float:
    mine = {f"model/{name}": value for name, value in model.state_dict().items()}
    return largest_difference(mine, {name: want[name] for name in mine})


def stop_in_between(
    rank: int, world_size: int, optimizer: Optimizer, pipelined: bool
) -> list[float]:
    rows.PIECE_BYTES = 48  # a row and a half
    undisturbed, read, loaded = (make_job(optimizer, MINE) for _ in range(3))
    want = undisturbed.train(range(2 * STEPS), pipelined=pipelined)
    apart = []
    for step, loss in enumerate(want):
        apart += [abs(float(each.train(range(step, step + 1), pipelined=pipelined)[0] - loss))
                  for each in (read, loaded)]  # fmt: skip
        read.everything()
        model, state = loaded.dmp.state_dict(), loaded.optimizer.state_dict()
        if step % 2:
            loaded.optimizer.load_state_dict(state)
        loaded.dmp.load_state_dict(model)
    last = undisturbed.everything()
    rows.PIECE_BYTES = 64 << 20
    return apart + [largest_difference(each.everything(), last) for each in (read, loaded)]


@pytest.mark.parametrize(("layout", "pipelined"), [((2, 1), False), ((2, 2), True)], ids=str)
def test_saving_and_loading_do_not_disturb(
    optimizer: Optimizer, layout: Layout, pipelined: bool
) -> None:
    for differences in run(layout, stop_in_between, optimizer, pipelined):
        assert set(differences) == {0.0}


def load_parts(rank: int, world_size: int, optimizer: Optimizer) -> list[float]:
    found = []
    for order in (["weights"], ["state"], ["weights", "state"], ["state", "weights"]):
        results = []
        for tiers in (MINE, None):
            source, target = make_job(optimizer, tiers), make_job(optimizer, tiers)
            source.train(range(2))
            target.train(range(5, 8))
            for part in order:
                one, other = (target.dmp, source.dmp)
                if part == "state":
                    one, other = target.optimizer, source.optimizer
                one.load_state_dict(other.state_dict())
            target.train(range(2, 4))
            results.append(target.everything())
        found.append(largest_difference(*results))
    return found


def test_parts_of_a_state_are_loaded_alone(optimizer: Optimizer) -> None:
    for differences in run((2, 1), load_parts, optimizer):
        assert max(differences) <= TOLERANCE


def go_back_to_a_copy(rank: int, world_size: int, optimizer: Optimizer) -> float:
    job = make_job(optimizer, MINE)
    job.train(range(2))
    kept = copy.deepcopy((job.dmp.state_dict(), job.optimizer.state_dict()))
    want = job.everything()
    job.train(range(2, 4))
    assert largest_difference(job.everything(), want) > 0
    job.dmp.load_state_dict(kept[0])
    job.optimizer.load_state_dict(kept[1])
    return largest_difference(job.everything(), want)


def test_a_copy_of_a_state_dict_is_loaded_back(optimizer: Optimizer) -> None:
    assert run((2, 2), go_back_to_a_copy, optimizer) == [0.0] * 4


def fill_in_place(rank: int, world_size: int, part: str, folder: Path) -> float:
    results = []
    for number, tiers in enumerate((MINE, None)):
        source, target = (make_job("rowwise_adagrad", tiers) for _ in range(2))
        source.train(range(2))
        target.train(range(5, 8))
        checkpoint = folder / str(number)
        save({part: _part(source, part)}, checkpoint_id=checkpoint)
        load({part: _part(target, part)}, checkpoint_id=checkpoint)
        target.train(range(2, 4))
        results.append(target.everything())
    return largest_difference(*results)


def fill_after_an_evaluation(rank: int, world_size: int, part: str, folder: Path) -> float:
    results = []
    for tiers in (MINE, None):
        job = make_job("rowwise_adagrad", tiers)
        held = _part(job, part)
        job.train(range(2))
        job.everything()
        job.evaluate(7)
        job.evaluate(8)
        for each in _tensors(held):
            for shard in each.local_shards():
                shard.tensor.detach().fill_(0.25)
        job.train(range(2, 4))
        results.append(job.everything())
    return largest_difference(*results)


@pytest.mark.parametrize("fill", [fill_in_place, fill_after_an_evaluation])
@pytest.mark.parametrize("part", PARTS)
def test_a_state_dict_that_is_filled(tmp_path: Path, fill: Any, part: str) -> None:
    assert max(run((2, 1), fill, part, tmp_path)) <= TOLERANCE


def use_a_state_dict_of_before(rank: int, world_size: int, part: str, folder: Path) -> None:
    job = make_job("rowwise_adagrad", MINE)
    held = _part(job, part)
    save({part: held}, checkpoint_id=folder)
    before = job.everything()
    job.train(range(2))
    uses: list[Callable[[], object]] = [
        lambda: save({part: held}, checkpoint_id=folder / "again"),
        lambda: load({part: held}, checkpoint_id=folder),
        lambda: [each.local_shards() for each in _tensors(held)],
        lambda: torch.save(_tensors(held), BytesIO()),
    ]
    if part == "weights":
        uses.append(lambda: job.dmp.load_state_dict(dict(held)))
    for use in uses:
        refused = "updates of the tables 'a', 'b' are missing"
        with pytest.raises((RecdError, CheckpointException), match=refused):
            use()
    _part(job, part)
    load({part: held}, checkpoint_id=folder)
    name = "model/sequences" if part == "weights" else "optimizer/sequences"
    after = job.everything()
    assert all(after[key].equal(before[key]) for key in before if key.startswith(name))


@pytest.mark.parametrize("part", PARTS)
def test_a_state_dict_of_before_training_is_refused(tmp_path: Path, part: str) -> None:
    run((2, 2), use_a_state_dict_of_before, part, tmp_path)


def _part(job: Job, part: str) -> dict[str, Any]:
    return job.dmp.state_dict() if part == "weights" else job.optimizer.state_dict()


def _tensors(state: dict[str, Any]) -> list[ShardedTensor]:
    of_tables = state.get("state", {"": state}).values()
    return [t for each in of_tables for t in each.values() if isinstance(t, ShardedTensor)]


def train_with_deltas(rank: int, world_size: int, optimizer: Optimizer, folder: Path) -> Any:
    """Save deltas between steps that are looked up ahead, with other copied rows after two."""
    job = make_job(optimizer, MINE, retier_every=2)
    checkpoints = Checkpoints(folder, keep=9, full_every=9)
    for step in range(5):
        job.train(range(step, step + 1), pipelined=True)
        checkpoints.save(job.dmp, job.optimizer, Progress(step + 1))
    rows = {name for name in read_delta(checkpoints.of_step(5)).rows if "weight" in name}
    loaded = make_job(optimizer, MINE)
    loaded.load(folder)
    return len(rows), job.everything(), loaded.everything()


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [("rowwise_adagrad", (1, 1)), ("sgd", (2, 1)), ("rowwise_adagrad", (1, 2))],
)
def test_deltas_have_the_rows_of_copies(
    optimizer: Optimizer, layout: Layout, tmp_path: Path
) -> None:
    for tables, expected, found in run(layout, train_with_deltas, optimizer, tmp_path):
        assert tables >= len(ROWS)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
