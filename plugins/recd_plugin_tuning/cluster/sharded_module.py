"""What a step of a sharded module takes, however little it looks up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_tuning.cluster.timing import Effort, StepSeconds, steps_in_a_row
from recd_plugins.api.distributed import ranks_of_each_node

# Tables, on as many ranks: others wait for these.
_TABLES = 4
_ROWS, _DIM = 64, 16


@dataclass(frozen=True)
class ModuleSeconds:
    """A step of TorchRec's own sharded module.

    Attributes:
        step: with a table on each of some ranks.
        with_tables: processor seconds that a rank has more of it than one without tables.
    """

    step: StepSeconds
    with_tables: float


def module_seconds(device: torch.device, effort: Effort) -> ModuleSeconds:
    """Forward and backward, with an id for each table. Collective; of two ranks or more.

    Beside what a collective takes alone: sizes that are sent first, and what Python does.
    """
    tables = min(_TABLES, dist.get_world_size())
    step = _step(device, effort, list(range(tables)))
    on_one = _step(device, effort, [0] * tables)
    with_tables = fmean(step.processors[:tables]) - fmean(on_one.processors[1:])
    return ModuleSeconds(step, max(0.0, with_tables))


def _step(device: torch.device, effort: Effort, ranks: Sequence[int]) -> StepSeconds:
    """With one table on each of ``ranks``."""
    names = [f"t{number}" for number in range(len(ranks))]
    module = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=name,
                feature_names=[name],
                num_embeddings=_ROWS,
                embedding_dim=_DIM,
                # None is drawn: a run whose start this is goes on with the generators as they are.
                init_fn=torch.nn.init.zeros_,
            )
            for name in names
        ],
        device=torch.device("meta"),
    )
    sharder = EmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
    )
    plan = construct_module_sharding_plan(
        module,
        {
            name: table_wise(rank=rank, compute_kernel=EmbeddingComputeKernel.FUSED.value)
            for rank, name in zip(ranks, names, strict=True)
        },
        sharder,
        local_size=ranks_of_each_node(),
        world_size=dist.get_world_size(),
        device_type=device.type,
    )
    sharded = sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD), device)
    ids = KeyedJaggedTensor.from_lengths_sync(
        names,
        torch.zeros(len(names), dtype=torch.int64, device=device),
        torch.ones(len(names), dtype=torch.int32, device=device),
    )

    def step() -> None:
        rows = sharded(ids)
        torch.autograd.backward(torch.cat([jagged.values() for jagged in rows.values()]).sum())

    step()
    return steps_in_a_row(step, device, effort)
