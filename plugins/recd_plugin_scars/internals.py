"""Private attributes of TorchRec, FBGEMM and torch that this package uses."""

from __future__ import annotations

from recd_plugins.api import Internal

_KERNELS = "torchrec.distributed.batched_embedding_kernel"
_OF_KERNEL = ("_config", "_feature_table_map", "_local_cols", "_local_rows", "_pg")
_TABLES = (
    "fbgemm_gpu.split_table_batched_embeddings_ops_training:SplitTableBatchedEmbeddingBagsCodegen"
)

INTERNALS = (
    Internal(f"{_KERNELS}:BaseBatchedEmbeddingBag", (*_OF_KERNEL, "_pooling"), "a cached kernel"),
    Internal(f"{_KERNELS}:BaseBatchedEmbedding", _OF_KERNEL, "a cached kernel"),
    Internal(f"{_KERNELS}:BatchedFusedEmbeddingBag", ("_emb_module",), "a cached kernel"),
    Internal(f"{_KERNELS}:BatchedFusedEmbedding", ("_emb_module",), "a cached kernel"),
    Internal(
        _TABLES,
        (
            *("hash_size_cumsum", "learning_rate_tensor", "momentum1_offsets", "optimizer_args"),
            *("rows_per_table", "total_hash_size", "total_hash_size_bits", "weights_offsets"),
        ),
        "fast memory that grows",
    ),
    Internal(_TABLES, ("timesteps_prefetched", "lxu_cache_locations_list"), "FBGEMM's UVM cache"),
    Internal(_TABLES, ("lxu_cache_locations", "lxu_cache_locking_counter"), "FBGEMM's UVM cache"),
    Internal("torch:Tensor", ("_version",), "seeing that prefetched ids changed"),
    Internal("torch.distributed.remote_device", ("_remote_device",), "describing of shards"),
)
