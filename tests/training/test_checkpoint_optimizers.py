"""Checkpoints have all state of a trainer's own optimizers, also of those that make it lazily."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.sharded import CPU, shard
from tests.training.checkpoint_cases import TRAINING, Model, Trainer, change_metadata
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import table_wise
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from recd_plugins.compat.lookup_kernels import step_counts
from recd_plugins.config import TrainingSpec
from recd_plugins.runtime.errors import RecdError, SetupError
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint import Checkpoints
from recd_plugins.training.checkpoint_files import Progress
from recd_plugins.training.optimizer import build_optimizer

OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=0.1),
}
#: ``training.dense_optimizer``, and what it is in PyTorch.
DENSE: dict[str, Any] = {
    "dense adam": torch.optim.Adam,
    "dense adamw": torch.optim.AdamW,
    "dense adagrad": partial(torch.optim.Adagrad, eps=1e-8),
    "dense sgd": torch.optim.SGD,
}


def trainer_with(optimizer: str, world_size: int) -> Trainer:
    trainer = Trainer(world_size)
    if optimizer in DENSE:
        name = cast(Any, optimizer.removeprefix("dense "))
        spec = TrainingSpec(dense_optimizer=name, dense_learning_rate=0.1)
        trainer.optimizer = build_optimizer(trainer.dmp, spec)
        return trainer
    outside = dict(in_backward_optimizer_filter(trainer.dmp.named_parameters()))
    own = KeyedOptimizerWrapper(outside, OPTIMIZERS[optimizer])
    trainer.optimizer = CombinedOptimizer([trainer.dmp.fused_optimizer, own])
    return trainer


def save(rank: int, world_size: int, folder: Path, optimizer: str) -> Any:
    trainer = trainer_with(optimizer, world_size)
    trainer.step()
    trainer.step()
    Checkpoints(folder, keep=1).save(trainer.dmp, trainer.optimizer, Progress(2, losses=[0.0] * 2))
    trainer.step()
    return trainer.everything()


def go_on(rank: int, world_size: int, folder: Path, optimizer: str) -> Any:
    trainer = trainer_with(optimizer, world_size)
    Checkpoints(folder, keep=1).load(trainer.dmp, trainer.optimizer)
    trainer.step()
    return trainer.everything()


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, *DENSE])
def test_a_trainer_goes_on_as_if_it_had_never_ended(tmp_path: Path, optimizer: str) -> None:
    expected = run_on_ranks(save, 2, tmp_path, optimizer)
    assert run_on_ranks(go_on, 2, tmp_path, optimizer) == expected


def steps_of_both(rank: int, world_size: int, optimizer: str) -> Any:
    trainer = trainer_with(optimizer, world_size)
    dense = {name: each for name, each in trainer.dmp.named_parameters() if "top" in name}
    copies = [each.detach().clone() for each in dense.values()]
    alone = DENSE[optimizer](copies, lr=0.1)
    for _ in range(2):
        trainer.step()
        for copy, each in zip(copies, dense.values(), strict=True):
            copy.grad = each.grad
        alone.step()
    return [each.tolist() for each in dense.values()], [copy.tolist() for copy in copies]


@pytest.mark.parametrize("optimizer", DENSE)
def test_the_dense_optimizer_is_that_of_torch(optimizer: str) -> None:
    ours, expected = run_on_ranks(steps_of_both, 1, optimizer)[0]
    assert ours == expected


def test_state_that_the_optimizer_lacks_is_not_dropped(tmp_path: Path) -> None:
    run_on_ranks(save, 1, tmp_path, "adam")
    lacks = r"the checkpoint has the optimizer state 'optimizer\.state\.\S+', but"
    with pytest.raises(RecdError, match=lacks):
        run_on_ranks(go_on, 1, tmp_path, "sgd")


def dense_alone(rank: int, world_size: int, folder: Path, of_table: str) -> list[str]:
    kind = {"sgd": EmbOptimType.EXACT_SGD, "adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}[of_table]
    model, sharder = Model(16), EmbeddingBagCollectionSharder({"optimizer": kind})
    dmp = shard(model, [sharder], table_wise(1, compute_kernel="fused"), CPU)
    dense = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    own = KeyedOptimizerWrapper(dense, OPTIMIZERS["sgd"])
    plain: Any = torch.optim.SGD(dense.values(), lr=0.1)
    checkpoints, said = Checkpoints(folder, keep=1), []
    for optimizer in (own, plain):
        try:
            checkpoints.save(dmp, optimizer, Progress(1))
            checkpoints.load(dmp, optimizer)
        except SetupError as error:
            said.append(str(error))
            with pytest.raises(SetupError):
                checkpoints.load(dmp, optimizer)
    return said


def test_tables_do_not_lose_what_they_learn_by(tmp_path: Path) -> None:
    unnamed = "SGD has no parameter names"
    lost = r"lacks the fused optimizer state of '\S+\.t\.weight'. Use CombinedOptimizer\(\[dmp"
    for of_rank in run_on_ranks(dense_alone, 2, tmp_path, "adagrad"):
        for text, told in zip(of_rank, (lost, unnamed), strict=True):
            assert re.search(told, text)
    assert not list(tmp_path.iterdir())
    for of_rank in run_on_ranks(dense_alone, 2, tmp_path, "sgd"):  # which has no state
        assert len(of_rank) == 1
        assert unnamed in of_rank[0]


def warmed_up(world_size: int, *, around_all: bool) -> Trainer:
    def warm(optimizer: Any, name: str) -> WarmupOptimizer:
        stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=10, value=0.1)]
        return WarmupOptimizer(optimizer, stages, lr=0.1, param_name=name)

    trainer = Trainer(world_size)
    dense = dict(in_backward_optimizer_filter(trainer.dmp.named_parameters()))
    fused, own = trainer.dmp.fused_optimizer, KeyedOptimizerWrapper(dense, OPTIMIZERS["adam"])
    if around_all:
        trainer.optimizer = cast(Any, warm(CombinedOptimizer([fused, own]), "__warmup"))
    else:
        trainer.optimizer = CombinedOptimizer([warm(fused, "__tables"), warm(own, "__layers")])
    return trainer


def warm_up(rank: int, world_size: int, folder: Path, around_all: bool) -> tuple[Any, Any]:
    first = warmed_up(world_size, around_all=around_all)
    for _ in range(3):
        first.step()
    Checkpoints(folder, keep=1).save(first.dmp, first.optimizer, Progress(3, losses=[0.0] * 3))
    second = warmed_up(world_size, around_all=around_all)
    Checkpoints(folder, keep=1).load(second.dmp, second.optimizer)
    for trainer in (first, second):
        trainer.step()
    return first.everything(), second.everything()


def test_a_warm_up_goes_on_where_it_was(tmp_path: Path) -> None:
    ((expected, found),) = run_on_ranks(warm_up, 1, tmp_path, False)
    assert found == expected


def test_a_warm_up_whose_steps_nobody_saves_is_refused(tmp_path: Path) -> None:
    lost = "state_dict\\(\\) lacks the state of '__warmup"
    with pytest.raises(SetupError, match=lost):
        run_on_ranks(warm_up, 1, tmp_path, True)
    assert not list(tmp_path.iterdir())


def with_steps(sharding: str) -> DistributedModelParallel:
    sharder: Any = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})
    dmp = shard(Model(16), [sharder], sharding, CPU)
    for kernel in kernels_of(dmp):
        kernel.register_buffer("iter", kernel.iter)  # persistent
    return dmp


def kernels_of(dmp: DistributedModelParallel) -> list[Any]:
    lookups = dmp.module.bags._lookups
    return [each for lookup in lookups for each in lookup.modules() if hasattr(each, "iter")]


def counts_of(dmp: DistributedModelParallel) -> list[Any]:
    return [count for kernel in kernels_of(dmp) for count in step_counts([kernel])]


def save_steps(rank: int, world_size: int, folder: Path) -> None:
    dmp = with_steps("row_wise")
    for count in counts_of(dmp):
        count.fill_(10)
    Checkpoints(folder, keep=1).save(dmp, build_optimizer(dmp, TRAINING), Progress(5))


def load_steps(rank: int, world_size: int, folder: Path, sharding: str) -> set[int]:
    dmp = with_steps(sharding)
    Checkpoints(folder, keep=1).load(dmp, build_optimizer(dmp, TRAINING))
    return {int(count) for count in counts_of(dmp)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run_on_ranks(save_steps, 2, tmp_path)
    return tmp_path


def test_tables_learn_on_from_their_step_on_any_plan(folder: Path) -> None:
    assert run_on_ranks(load_steps, 2, folder, "row_wise") == [{10}, {10}]
    by_rank = run_on_ranks(load_steps, 2, folder, "table_wise")
    assert sorted(by_rank) == [set(), {10}]  # one rank has the table


def test_of_an_earlier_version_it_is_the_number_of_steps(folder: Path) -> None:
    name = "steps.bags.t"

    def change(metadata: Any) -> None:
        del metadata.state_dict_metadata[name]
        for index in [index for index in metadata.storage_data if index.fqn == name]:
            del metadata.storage_data[index]

    change_metadata(folder / "step-000000005", change)
    assert run_on_ranks(load_steps, 2, folder, "row_wise") == [{5}, {5}]
