"""Checkpoints of cached tables are those of plain ones, and have what the fast memory learned."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.training.checkpoint_cases import die
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.types import ShardedModule

from recd_plugin_scars.runtime.stores import BackingStore, FileStore
from recd_plugin_scars.tests.runtime.model import SHARDINGS, Case, Run, Trainer, Training, on_both
from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.launch import launch
from recd_plugins.testing.device import DEVICE, backend_of_tests
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training import checkpoint
from recd_plugins.training.checkpoint import Checkpoints, Progress
from recd_plugins.training.checkpoint_files import read_delta

# Sums of gradients are in any order on a GPU.
TOLERANCE = 1e-6 if DEVICE.type == "cuda" else 0.0
STEPS = 3  # before a checkpoint


def case_of(sharding: str, turn: int = 0, *, lookahead: bool = True) -> Case:
    return Case(Training(sharding, "unique", "rowwise_adagrad"), "some", lookahead, turn)


def _assert_equal(one: Run, other: Run) -> None:
    assert np.allclose(one.losses, other.losses, rtol=0, atol=TOLERANCE)
    assert one.state.keys() == other.state.keys()
    for name, values in one.state.items():
        assert torch.allclose(values, other.state[name], rtol=0, atol=TOLERANCE), name


def save(rank: int, world_size: int, case: Case, folder: Path) -> list[Run]:
    runs = []
    for kind, own in (("plain", None), ("cached", case)):
        trainer = Trainer(case.training, own, folder / "rows before")
        trainer.start()
        runs.append(trainer.run())
        if rank == 0:
            (folder / kind).mkdir()
        dist.barrier()
        Checkpoints(folder / kind, keep=1).save(trainer.dmp, trainer.optimizer, Progress(STEPS))
    return runs


def resume(rank: int, world_size: int, case: Case, folder: Path) -> list[Run]:
    runs = []
    for kind in ("plain", "cached"):
        for own in (None, case):
            trainer = Trainer(case.training, own, folder / f"rows after {kind}")
            # With batches in flight, whose rows are not those of the checkpoint.
            trainer.start()
            trainer.steps(1)
            Checkpoints(folder / kind, keep=1).load(trainer.dmp, trainer.optimizer)
            trainer.start(STEPS)
            runs.append(trainer.run())
    return runs


@pytest.mark.parametrize(
    ("sharding", "before", "after"),
    [("table_wise", 1, 2), ("row_wise", 2, 1), ("row_wise", 1, 2), ("column_wise", 2, 1)],
)
def test_checkpoints_on_another_number_of_ranks(
    tmp_path: Path, sharding: str, before: int, after: int
) -> None:
    case = case_of(sharding, turn=before)
    for plain, cached in run_on_ranks(save, before, case, tmp_path):
        _assert_equal(plain, cached)
    for first, *others in run_on_ranks(resume, after, case, tmp_path):
        for other in others:
            _assert_equal(first, other)


def round_trip(rank: int, world_size: int, case: Case) -> list[list[Run]]:
    with tempfile.TemporaryDirectory() as folder:
        trainers = [Trainer(case.training, own, Path(folder)) for own in (None, case, None)]
        for step, trainer in enumerate(trainers):
            trainer.start(step)
            trainer.steps(1 + step)  # batches are in flight when others' rows come
        runs = []
        for giver, taker in pairwise(trainers):
            taker.load(copy.deepcopy(giver.state_dict()))
            for trainer in (giver, taker):
                trainer.start()
            runs.append([giver.run(), taker.run()])
        return runs


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_from_stock_to_cached_and_back(sharding: str) -> None:
    case = case_of(sharding, SHARDINGS.index(sharding), lookahead=sharding != "row_wise")
    for runs in run_on_ranks(round_trip, 2, case):
        for giver, taker in runs:
            _assert_equal(giver, taker)


def fill_in_place(trainer: Trainer) -> Run:
    trainer.start()
    trainer.steps(2)
    for value in [*_tensors(trainer.state_dict())]:
        value.mul_(0.5)
    return trainer.run()


def keep_a_state_dict(trainer: Trainer) -> Run:
    held = trainer.state_dict()
    trainer.start()
    losses = trainer.steps()
    pickled = BytesIO()
    torch.save(held, pickled)
    assert b"AskedShardedTensor" not in pickled.getvalue()
    read = [value.cpu().clone() for value in _tensors(held)]
    losses += trainer.steps()
    pickled.seek(0)
    loaded = torch.load(pickled, weights_only=False)
    for value, now in zip(_tensors(loaded), _tensors(held), strict=True):
        now.copy_(value)
    losses += trainer.steps()
    return Run(losses, trainer.state() | {str(place): value for place, value in enumerate(read)})


def load_a_part(trainer: Trainer) -> Run:
    trainer.start()
    trainer.steps()
    before = copy.deepcopy(trainer.dmp.state_dict())
    trainer.steps()
    part = {name: value for name, value in before.items() if ".b1." not in name}
    trainer.dmp.load_state_dict(part, strict=False)
    return trainer.run()


def reset(trainer: Trainer) -> Run:
    trainer.start()
    trainer.steps()
    torch.manual_seed(trainer.rank)
    for module in trainer.dmp.modules():
        if isinstance(module, ShardedModule):
            module.reset_parameters()
    return trainer.run()


@pytest.mark.parametrize(
    ("procedure", "case"),
    [
        (fill_in_place, case_of("row_wise")),
        (keep_a_state_dict, case_of("row_wise", lookahead=False)),
        (keep_a_state_dict, case_of("column_wise")),
        (load_a_part, case_of("row_wise")),
        (reset, case_of("row_wise")),
    ],
)
def test_cached_tables_do_as_plain_ones(procedure: Callable[[Trainer], Run], case: Case) -> None:
    for plain, cached in run_on_ranks(on_both, 2, case, procedure):
        _assert_equal(plain, cached)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield shard.tensor.detach()
    elif isinstance(value, Tensor):
        yield value.detach()


def convert(rank: int, world_size: int, case: Case) -> dict[str, tuple[torch.dtype, bool]]:
    with tempfile.TemporaryDirectory() as folder:
        dmp = Trainer(case.training, case, Path(folder)).dmp
        before = {name: each.data_ptr() for name, each in dmp.named_parameters()}
        dmp.double()
        return {
            name: (each.dtype, each.data_ptr() == before[name])
            for name, each in dmp.named_parameters()
        }


def test_cached_tables_stay_where_they_are_when_the_model_moves() -> None:
    """To a GPU they would go as a whole, and state dicts would load into what is there."""
    for parameters in run_on_ranks(convert, 2, case_of("row_wise")):
        for name, found in parameters.items():
            stays = name.startswith(("bags.", "sequences."))
            assert found == ((torch.float32, True) if stays else (torch.float64, False))


def names(rank: int, world_size: int, case: Case) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for own in (None, case):
            torch.manual_seed(7)
            trainer = Trainer(case.training, own, Path(folder), with_weights=False)
            state = trainer.dmp.state_dict()
            shown = [
                {name: _shape(value) for name, value in state.items()},
                [(name, tuple(each.shape)) for name, each in trainer.dmp.named_parameters()],
                {
                    name: {key: _shape(value) for key, value in values.items()}
                    for name, values in trainer.optimizer.state_dict()["state"].items()
                },
            ]
            found.append((shown, [tensor.cpu().clone() for tensor in _tensors(state)]))
        return found


def _shape(value: Any) -> Any:
    if not isinstance(value, ShardedTensor):
        return type(value).__name__, tuple(getattr(value, "shape", ()))
    metadata = value.metadata()

    def place(placement: Any) -> Any:
        # Beside a GPU stock tables are in its memory, cached ones in that of the host.
        return str(placement) if DEVICE.type == "cpu" else placement.rank()

    shards = [
        (tuple(each.shard_offsets), tuple(each.shard_sizes), place(each.placement))
        for each in metadata.shards_metadata
    ]
    return tuple(metadata.size), str(metadata.tensor_properties.dtype), sorted(shards)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_names_shapes_and_first_weights_are_those_of_stock_tables(sharding: str) -> None:
    for (plain, first), (cached, weights) in run_on_ranks(names, 2, case_of(sharding)):
        assert cached == plain
        if DEVICE.type == "cpu":  # a GPU draws others
            torch.testing.assert_close(weights, first, rtol=0, atol=0)


MOMENTS = [
    "while rows are gathered",
    "between gather and write-back",
    "in the middle of a write-back",
    "while a checkpoint is written",
]


def train_to_the_end(
    rank: int, world_size: int, case: Case, folder: Path, die_at: str | None
) -> tuple[int, list[float]]:
    checkpoints = Checkpoints(folder / "checkpoints", keep=2)
    with checkpoints.reserve(resume=True) if rank == 0 else nullcontext():
        dist.barrier()
        trainer = Trainer(case.training, case, folder / "rows")
        first = checkpoints.load(trainer.dmp, trainer.optimizer).step
        losses = []
        trainer.start(first)
        for step in range(first + 1, 11):
            if step == 8 and die_at is not None and rank == world_size - 1:
                _die_at(die_at)
            losses += trainer.steps(1)
            if step % 3 == 0:
                checkpoints.save(trainer.dmp, trainer.optimizer, Progress(step))
    return first, losses


def _die_at(moment: str) -> None:
    def half_of(write: Any) -> Any:
        def half(store: Any, rows: Tensor, weights: Tensor, state: Tensor | None) -> None:
            number = (len(rows) + 1) // 2
            write(store, rows[:number], weights[:number], None if state is None else state[:number])
            die()

        return half

    for store in (BackingStore, FileStore):
        if moment == "between gather and write-back":
            store.write = die  # type: ignore[method-assign]
        elif moment == "in the middle of a write-back":
            store.write = half_of(store.write)  # type: ignore[method-assign]
        elif moment == "while rows are gathered":
            store.read = die  # type: ignore[method-assign]
    if moment == "while a checkpoint is written":
        checkpoint.save = die


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    runs = run_on_ranks(train_to_the_end, 2, case_of("row_wise"), folder, None)
    return [losses for _, losses in runs]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_loses_nothing_that_a_checkpoint_held(
    tmp_path: Path, uninterrupted: list[list[float]], moment: str
) -> None:
    case = case_of("row_wise", turn=MOMENTS.index(moment))
    local = 2 if DEVICE.type == "cpu" else 1
    launched: dict[str, Any] = {"backend": backend_of_tests(2), "local_world_size": local}
    with pytest.raises(SetupError, match="killed"):
        launch(train_to_the_end, 2, case, tmp_path, moment, **launched)
    resumed = run_on_ranks(train_to_the_end, 2, case, tmp_path, None)
    for rank, (first, losses) in enumerate(resumed):
        assert first == 6
        assert losses == uninterrupted[rank][6:]


def save_deltas(rank: int, world_size: int, case: Case, folder: Path) -> tuple[int, Run, Run]:
    """Save deltas of cached tables while the rows of later batches are prefetched."""
    trainer = Trainer(case.training, case, folder / "rows")
    trainer.start()
    (folder / "deltas").mkdir(exist_ok=True)
    checkpoints = Checkpoints(folder / "deltas", keep=9, full_every=9)
    for step in range(1, 5):
        losses = trainer.steps(1)
        checkpoints.save(trainer.dmp, trainer.optimizer, Progress(step))
    rows = {name for name in read_delta(checkpoints.of_step(4)).rows if "weight" in name}
    state = trainer.state()
    other = Trainer(case.training, None, folder / "rows", with_weights=False)
    checkpoints.load(other.dmp, other.optimizer)
    return len(rows), Run(losses, state), Run(losses, other.state())


@pytest.mark.parametrize(("sharding", "world_size"), [*zip(SHARDINGS, (1, 2, 2), strict=True)])
def test_deltas_of_cached_tables(sharding: str, world_size: int, tmp_path: Path) -> None:
    case = case_of(sharding)
    for tables, expected, found in run_on_ranks(save_deltas, world_size, case, tmp_path):
        assert tables > 0
        for name, values in expected.state.items():
            assert torch.equal(found.state[name], values), name
