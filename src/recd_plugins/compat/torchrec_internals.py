"""Lists the private names of torch, TorchRec and FBGEMM that this package uses.

Plugins list the names they use with the hook ``register_internals``. tests/test_internals.py checks
that the lists are complete and have no unused names.
"""

from __future__ import annotations

from recd_plugins.runtime.versions import Internal

#: Attributes and modules, keyed by their owner: a module or ``module:Class``.
_NAMES: dict[str, str] = {
    **dict.fromkeys(
        (
            f"torchrec.distributed.batched_embedding_kernel:Batched{kind}Embedding{bag}"
            for kind in ("Dense", "Fused")
            for bag in ("", "Bag")
        ),
        "_config _local_rows _local_cols _feature_table_map _emb_module",
    ),
    "torchrec.distributed.dist_data:KJTAllToAllTensorsAwaitable": (
        "_workers _input _input_splits _output_splits _input_tensors _awaitables _recat _stagger "
        "_stride_per_rank _keys _device"
    ),
    "torchrec.distributed.dist_data:KJTAllToAll": "_splits",
    "torchrec.distributed.dist_data": "_get_recat",
    "torchrec.distributed.dist_data:SequenceEmbeddingsAllToAll": "_pg",
    "torchrec.distributed.dist_data:SequenceEmbeddingsAwaitable": "_tensor_awaitable",
    "torchrec.distributed.embedding:EmbeddingCollectionSharder": "_use_index_dedup",
    "torchrec.distributed.embedding:ShardedEmbeddingCollection": (
        "_lookups _create_lookups _input_dists _create_input_dist _output_dists _need_indices "
        "_use_index_dedup _env "
        "_embedding_configs _sharding_type_to_sharding post_lookup_tracker_fn"
    ),
    "torchrec.distributed.embedding_sharding": "_fx_wrap_batch_size_per_feature",
    "torchrec.distributed.embedding_lookup:GroupedEmbeddingsLookup": (
        "_create_embedding_kernel _emb_modules"
    ),
    "torchrec.distributed.embedding_lookup:GroupedPooledEmbeddingsLookup": (
        "_create_embedding_kernel _forward _forward_with_vbe_merging _world_size"
    ),
    "torchrec.distributed.embeddingbag:ShardedEmbeddingBagCollection": (
        "_lookups _create_lookups _input_dists _create_input_dist _output_dists _device "
        "_embedding_names _embedding_dims _embedding_shardings _has_mean_pooling_callback "
        "_env post_lookup_tracker_fn"
    ),
    "torchrec.distributed.embeddingbag:VariableBatchEmbeddingBagCollectionAwaitable": (
        "_awaitables _batch_size_per_feature_pre_a2a _resize_awaitables"
    ),
    "torchrec.distributed.mc_embedding_modules:BaseShardedManagedCollisionEmbeddingCollection": (
        "_table_to_tbe_and_index"
    ),
    "torchrec.distributed.mc_embeddingbag:ManagedCollisionEmbeddingBagCollectionSharder": (
        "_mc_sharder"
    ),
    "torchrec.distributed.mc_modules:ShardedManagedCollisionCollection": (
        "_managed_collision_modules _sharding_tables _sharding_per_table_feature_splits "
        "_feature_names"
    ),
    "torchrec.distributed.model_parallel:DefaultDataParallelWrapper": "_find_unused_parameters",
    "torchrec.distributed.model_parallel:DistributedModelParallel": (
        "_dmp_wrapped_module _sharded_parameter_names"
    ),
    "torchrec.distributed.planner.enumerators:EmbeddingEnumerator": (
        "_get_num_buckets _compute_device _world_size"
    ),
    "torchrec.distributed.planner.shard_estimators": "_get_optimizer_multipler",
    "torchrec.distributed.sharding.dp_sharding:BaseDpEmbeddingSharding": (
        "_grouped_embedding_configs_per_rank"
    ),
    "torchrec.distributed.sharding.rw_sharding:BaseRwEmbeddingSharding": (
        "_grouped_embedding_configs_per_rank _pg"
    ),
    "torchrec.distributed.sharding.tw_sharding:BaseTwEmbeddingSharding": (
        "_grouped_embedding_configs_per_rank"
    ),
    "torchrec.distributed.sharding.tw_sharding:TwSparseFeaturesDist": "_dist",
    "torchrec.distributed.sharding.twrw_sharding:BaseTwRwEmbeddingSharding": (
        "_grouped_embedding_configs_per_rank"
    ),
    "torchrec.distributed.train_pipeline.runtime_forwards:BaseForward": "_module",
    "torchrec.distributed.train_pipeline.train_pipelines:TrainPipelineSparseDist": (
        "_model _pipelined_modules _backward _data_dist_stream _device "
        "_init_pipelined_modules _model_attached _model_fwd _optimizer "
        "_pipelined_forward_type _set_module_context _stream_context"
    ),
    "torchrec.distributed.types:LazyAwaitable": "_wait_impl",
    "torchrec.distributed.types:ModuleSharder": "_qcomm_codecs_registry",
    "torchrec.modules.fp_embedding_modules:FeatureProcessedEmbeddingBagCollection": (
        "_feature_processors _embedding_bag_collection"
    ),
    "torchrec.modules.mc_embedding_modules:BaseManagedCollisionEmbeddingCollection": (
        "_embedding_module _managed_collision_collection _return_remapped_features"
    ),
    "torchrec.modules.mc_modules:ManagedCollisionCollection": "_managed_collision_modules",
    "torchrec.optim.keyed:OptimizerWrapper": "_optimizer",
    "torchrec.sparse.jagged_tensor": (
        "_kjt_flatten _kjt_flatten_spec _kjt_flatten_with_keys _kjt_unflatten"
    ),
    "fbgemm_gpu.quantize_comm:QuantizedCommCodec": "_loss_scale _comm_precision",
    "torch": "_C _foreach_add _foreach_copy_",
    "torch._C": "_current_autograd_node _current_graph_task_id _autograd _distributed_c10d",
    "torch._C._distributed_c10d:Backend.Options": "_timeout",
    "torch._ops:OpOverload": "_schema",
    "torch.ops:fbgemm.permute_1D_sparse_data": "_qualified_op_name",
    "torch.distributed": "_shard",
    "torch.distributed._shard.sharded_tensor:ShardedTensor": "_local_shards",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "_MEM_FORMAT_ENCODING",
    "torch.distributed.distributed_c10d": "_resolve_process_group",
    "torch.distributed.optim": "_apply_optimizer_in_backward",
    "torch.distributed.optim.apply_optimizer_in_backward:_apply_optimizer_in_backward": (
        "_optimizer_classes _optimizer_kwargs"
    ),
    "torch.autograd:Variable": "_execution_engine",
    "torch.distributed:ProcessGroup": "_get_backend",
    "torch.fx": "_pytree",
    "torch.nn.parallel:DistributedDataParallel": "_comm_hooks",
    "torch.nn:Module": "_buffers _parameters _modules _apply _non_persistent_buffers_set",
    "torch.ops:aten": (
        "_scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention_for_cpu_backward"
    ),
    "torch.serialization": "_get_layout",
    "torch.optim.optimizer": "_foreach_supported_types",
    "torch.utils": "_foreach_utils _python_dispatch _pytree",
    "torch.utils._foreach_utils": "_foreach_supported_types",
    "torch.utils._python_dispatch": "_disable_current_modes",
    "torch.utils.backend_registration": (
        "_DummyBackendModule _setup_privateuseone_for_python_backend"
    ),
    "torch:Tensor": "_make_wrapper_subclass _version",
    "torch:UntypedStorage": "_cdata",
    "torch:_C": "_only_lift_cpu_tensors _set_only_lift_cpu_tensors",
    "fsspec:AbstractFileSystem": "_open",
    "multiprocessing.forkserver": "_forkserver",
    "multiprocessing.forkserver:ForkServer": "_forkserver_address",
}
#: Names used by recd_plugins itself.
INTERNALS = tuple(
    Internal(of, tuple(names.split()), "recd-plugins") for of, names in _NAMES.items()
)
