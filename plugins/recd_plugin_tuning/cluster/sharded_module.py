"""What a step of a sharded module takes, however little it looks up."""

from __future__ import annotations

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

from recd_plugin_tuning.cluster.timing import Effort, steps_in_a_row
from recd_plugins.api import ranks_of_each_node

# Tables, on as many ranks: others wait for these.
_TABLES = 4
_ROWS, _DIM = 64, 16


def module_seconds(device: torch.device, effort: Effort) -> float:
    """Return seconds of a step of TorchRec's own sharded module, an id a table. Collective.

    Beside what a collective takes alone: sizes that are sent first, and what Python does.
    """
    ranks = list(range(min(_TABLES, dist.get_world_size())))
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
