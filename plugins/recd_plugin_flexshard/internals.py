"""Private attributes of TorchRec, FBGEMM and torch that this package uses."""

from __future__ import annotations

from recd_plugins.api import Internal

_SEQUENCES = "torchrec.distributed.embedding:ShardedEmbeddingCollection"
_FBGEMM = "fbgemm_gpu.split_table_batched_embeddings_ops_training"

INTERNALS = (
    Internal(
        _SEQUENCES,
        ("_lookups", "_need_indices", "_use_index_dedup"),
        "lookups in tables with tiers",
    ),
    Internal(
        _SEQUENCES,
        ("_optim", "_model_parallel_name_to_sharded_tensor"),
        "state dicts of tables with tiers",
    ),
    Internal("torchrec.modules.embedding_modules:EmbeddingCollection", ("_device",), "tiers"),
    Internal(
        "torchrec.distributed.embedding_sharding:KJTListSplitsAwaitable",
        ("_sharding_types",),
        "sending ids to other ranks of the node",
    ),
    Internal("torchrec.distributed.types:Awaitable", ("_wait_impl",), "waiting for ids and rows"),
    Internal(
        f"{_FBGEMM}:SplitTableBatchedEmbeddingBagsCodegen",
        ("optimizer", "optimizer_args", "get_learning_rate", "output_dtype"),
        "training copies of rows like FBGEMM's kernel",
    ),
    Internal("torch.autograd:Variable", ("_execution_engine",), "the end of a backward pass"),
    Internal("torch.distributed", ("_shard",), "state dicts of tables with tiers"),
    Internal(
        "torch.distributed._shard.sharded_tensor:ShardedTensor",
        ("_process_group",),
        "copying state dicts of tables with tiers",
    ),
    Internal(
        "torch.nn:Module",
        ("_register_load_state_dict_pre_hook",),
        "loading state dicts of tables with tiers",
    ),
)
