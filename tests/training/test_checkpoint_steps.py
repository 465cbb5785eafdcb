"""Steps that FBGEMM's Adam learns by, which no state dict of TorchRec's has, are in checkpoints."""

from __future__ import annotations

import io
import pickle
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.training.checkpoint_cases import TRAINING, Model, reseal
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from recd_plugins.compat.lookup_kernels import step_counts
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint import Checkpoints
from recd_plugins.training.checkpoint_files import Progress
from recd_plugins.training.optimizer import build_optimizer


def sharded(world_size: int, sharding: str) -> DistributedModelParallel:
    """A model whose table counts its steps as if it had Adam, which FBGEMM has for CUDA alone."""
    sharder: Any = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})
    model = Model(16)
    of_table = {
        "row_wise": row_wise(compute_kernel="fused"),
        "table_wise": table_wise(world_size - 1, compute_kernel="fused"),
    }
    plan = construct_module_sharding_plan(
        model.bags,
        {"t": of_table[sharding]},
        sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    dmp = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"bags": plan}),
        sharders=[sharder],
    )
    for kernel in kernels_of(dmp):
        kernel.register_buffer("iter", kernel.iter)  # persistent
    return dmp


def kernels_of(dmp: DistributedModelParallel) -> list[Any]:
    lookups = dmp.module.bags._lookups
    return [each for lookup in lookups for each in lookup.modules() if hasattr(each, "iter")]


def counts_of(dmp: DistributedModelParallel) -> list[Any]:
    return [count for kernel in kernels_of(dmp) for count in step_counts([kernel])]


def save(rank: int, world_size: int, folder: Path) -> None:
    """After 5 steps, each of which looked up the table twice, as CUDA kernels count it."""
    dmp = sharded(world_size, "row_wise")
    for count in counts_of(dmp):
        count.fill_(10)
    Checkpoints(folder, keep=1).save(dmp, build_optimizer(dmp, TRAINING), Progress(5))


def load(rank: int, world_size: int, folder: Path, sharding: str) -> tuple[set[int], str]:
    """The steps of this rank's kernels, and what was said."""
    dmp = sharded(world_size, sharding)
    with redirect_stderr(io.StringIO()) as said:
        Checkpoints(folder, keep=1).load(dmp, build_optimizer(dmp, TRAINING))
    told = [line for line in said.getvalue().splitlines() if "earlier version" in line]
    return {int(count) for count in counts_of(dmp)}, "".join(told)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run_on_ranks(save, 2, tmp_path)
    return tmp_path


def test_tables_learn_on_from_their_step_on_any_plan(folder: Path) -> None:
    assert run_on_ranks(load, 2, folder, "row_wise") == [({10}, "")] * 2
    by_rank = run_on_ranks(load, 2, folder, "table_wise")
    assert sorted(steps for steps, _ in by_rank) == [set(), {10}]  # of which one has the table
    assert run_on_ranks(load, 1, folder, "row_wise") == [({10}, "")]


def test_of_an_earlier_version_it_is_the_number_of_steps(folder: Path) -> None:
    checkpoint = folder / "step-000000005"
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    name = "steps.bags.t"
    del metadata.state_dict_metadata[name]
    metadata.storage_data = {
        index: place for index, place in metadata.storage_data.items() if index.fqn != name
    }
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(checkpoint)
    (first, said), (second, nothing) = run_on_ranks(load, 2, folder, "row_wise")
    assert first == second == {5}
    assert "the optimizer step of bags.t: taken for 5" in said
    assert nothing == ""
