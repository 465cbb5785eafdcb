"""What is relied on of TorchRec, FBGEMM, torch and others that has no public form, in one list.

Plugins list theirs by the hook ``register_internals``. tests/test_internals.py finds in
the source what is not listed, and what is listed and not used; the table in docs/exactness.md is
``table(INTERNALS)``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

from recd_plugins.errors import SetupError
from recd_plugins.values.internal import Internal, lacks, refuse_missing
from recd_plugins.versions import one_of_the_sets

_LOOKUPS = "torchrec.distributed.embedding_lookup"
_PLANNER = "torchrec.distributed.planner"
_BAGS = "torchrec.distributed.embeddingbag:ShardedEmbeddingBagCollection"
_SEQUENCES = "torchrec.distributed.embedding:ShardedEmbeddingCollection"
_SHARDED = (_BAGS, _SEQUENCES)
_PIPELINE = "torchrec.distributed.train_pipeline.train_pipelines:TrainPipelineSparseDist"
_CHECKPOINT = "torch.distributed.checkpoint"
_OUTPUT = ("_embedding_names", "_embedding_dims", "_embedding_shardings")

#: Those of the framework. ``require_attributes`` looks again where objects are used.
INTERNALS = (
    # TorchRec
    *(Internal(of, ("_lookups",), "putting CPU kernels in place") for of in _SHARDED),
    *(Internal(of, ("_create_lookups",), "putting in kernels of plugins") for of in _SHARDED),
    *(Internal(of, ("_output_dists",), "looking up ahead beside copies") for of in _SHARDED),
    *(
        Internal(of, ("_create_embedding_kernel",), "putting in kernels of plugins")
        for of in (
            f"{_LOOKUPS}:GroupedPooledEmbeddingsLookup",
            f"{_LOOKUPS}:GroupedEmbeddingsLookup",
        )
    ),
    Internal(
        f"{_LOOKUPS}:GroupedEmbeddingsLookup", ("_emb_modules",), "putting in kernels of plugins"
    ),
    *(
        Internal(
            f"torchrec.distributed.batched_embedding_kernel:{kernel}",
            ("_config", "_local_rows", "_local_cols", "_feature_table_map", "_emb_module"),
            "lookup without FBGEMM, or of all its tables as one",
        )
        for kernel in (
            "BatchedFusedEmbeddingBag",
            "BatchedDenseEmbeddingBag",
            "BatchedFusedEmbedding",
            "BatchedDenseEmbedding",
        )
    ),
    Internal(
        f"{_LOOKUPS}:GroupedPooledEmbeddingsLookup",
        (
            "_forward",
            "_forward_with_vbe_merging",
            "_world_size",
        ),
        "joining kernels under VBE",
    ),
    Internal(
        _BAGS,
        ("_pooling_type_to_rs_features", "_device", *_OUTPUT),
        "mean pooling",
    ),
    Internal(
        _BAGS,
        ("_has_mean_pooling_callback", *_OUTPUT),
        "coalescing, which pools on the rank that asked,",
    ),
    Internal(
        "torchrec.distributed.embeddingbag:VariableBatchEmbeddingBagCollectionAwaitable",
        ("_awaitables", "_batch_size_per_feature_pre_a2a"),
        "coalescing, which takes rows before they are expanded,",
    ),
    Internal(_SEQUENCES, ("_need_indices", "_use_index_dedup"), "coalescing of sequences"),
    Internal(
        "torchrec.distributed.types:LazyAwaitable", ("_wait_impl",), "waiting for coalesced rows"
    ),
    *(Internal(of, ("_env",), "finding the ranks that deduplicate together") for of in _SHARDED),
    Internal(_BAGS, ("_embedding_bag_configs",), "keeping rows of an earlier run"),
    Internal(_SEQUENCES, ("_embedding_configs",), "keeping rows of an earlier run"),
    Internal(_BAGS, ("_embedding_shardings",), "saying which optimizer each table has"),
    Internal(_SEQUENCES, ("_sharding_type_to_sharding",), "saying which optimizer each table has"),
    *(
        Internal(
            f"torchrec.distributed.sharding.{sharding}",
            ("_grouped_embedding_configs_per_rank",),
            "saying which optimizer each table has",
        )
        for sharding in (
            "tw_sharding:BaseTwEmbeddingSharding",
            "rw_sharding:BaseRwEmbeddingSharding",
            "twrw_sharding:BaseTwRwEmbeddingSharding",
            "dp_sharding:BaseDpEmbeddingSharding",
        )
    ),
    *(Internal(of, ("post_lookup_tracker_fn",), "counting of ids") for of in _SHARDED),
    Internal(
        "torchrec.distributed.embedding:EmbeddingCollectionSharder",
        ("_use_index_dedup",),
        "taking over what a trainer chose",
    ),
    Internal(
        "fbgemm_gpu.quantize_comm:QuantizedCommCodec",
        ("_loss_scale",),
        "gradients through codecs of bf16",
    ),
    Internal(
        "fbgemm_gpu.quantize_comm:QuantizedCommCodec",
        ("_comm_precision",),
        "deduplicated batches over codecs of blocks",
    ),
    Internal(
        "torchrec.distributed.embeddingbag:EmbeddingBagCollectionSharder",
        ("_sharded_module_order_overwrite",),
        "taking over what a trainer chose",
    ),
    Internal(
        "torchrec.distributed.types:ModuleSharder",
        ("_qcomm_codecs_registry",),
        "taking over what a trainer chose",
    ),
    Internal(
        "torchrec.modules.fp_embedding_modules:FeatureProcessedEmbeddingBagCollection",
        ("_feature_processors", "_embedding_bag_collection"),
        "seeing what a feature processor cannot do",
    ),
    Internal(
        "torchrec.modules.mc_embedding_modules:BaseManagedCollisionEmbeddingCollection",
        ("_managed_collision_collection",),
        "planning managed collision by MCH",
    ),
    Internal(
        "torchrec.modules.mc_embedding_modules:BaseManagedCollisionEmbeddingCollection",
        ("_return_remapped_features",),
        "managed collision over unique rows",
    ),
    *(
        Internal(
            f"torchrec.{module}",
            ("_managed_collision_modules",),
            "managed collision over unique rows",
        )
        for module in (
            "modules.mc_modules:ManagedCollisionCollection",
            "distributed.mc_modules:ShardedManagedCollisionCollection",
        )
    ),
    Internal(
        "torchrec.distributed.mc_modules:ShardedManagedCollisionCollection",
        ("_sharding_tables", "_sharding_per_table_feature_splits", "_feature_names"),
        "managed collision over unique rows",
    ),
    Internal(
        "torchrec.distributed.sharding.rw_sharding:BaseRwEmbeddingSharding",
        ("_pg",),
        "managed collision over unique rows",
    ),
    Internal(
        "torchrec.distributed.mc_embedding_modules:BaseShardedManagedCollisionEmbeddingCollection",
        ("_table_to_tbe_and_index",),
        "eviction of managed collision on CPU",
    ),
    Internal(
        "torchrec.distributed.mc_embeddingbag:ManagedCollisionEmbeddingBagCollectionSharder",
        ("_mc_sharder",),
        "managed collision over unique rows",
    ),
    Internal(
        f"{_PLANNER}.enumerators:EmbeddingEnumerator",
        ("_get_num_buckets",),
        "planning managed collision by MCH",
    ),
    Internal(
        f"{_PLANNER}.shard_estimators", ("_get_optimizer_multipler",), "planning of optimizer state"
    ),
    Internal(
        _PIPELINE, ("_model", "_pipelined_modules"), "the check that every module is pipelined"
    ),
    Internal(
        "torchrec.distributed.train_pipeline.runtime_forwards:BaseForward",
        ("_module",),
        "looking up ahead beside copies",
    ),
    Internal(
        _PIPELINE,
        (
            *("_backward", "_data_dist_stream", "_device", "_init_pipelined_modules"),
            *("_model_attached", "_model_fwd", "_optimizer"),
            *("_pipelined_forward_type", "_set_module_context", "_stream_context"),
        ),
        "the pipeline with lookahead",
    ),
    Internal(
        "torchrec.distributed.embedding_sharding:FusedKJTListSplitsAwaitable",
        ("_awaitables",),
        "joining ids of modules in one collective",
    ),
    Internal(
        "torchrec.distributed.dist_data:SequenceEmbeddingsAllToAll",
        ("_pg",),
        "sending equal gradients of rows once",
    ),
    Internal(
        "torchrec.distributed.dist_data:SequenceEmbeddingsAwaitable",
        ("_tensor_awaitable",),
        "sending equal gradients of rows once",
    ),
    Internal(
        "torchrec.distributed.dist_data:KJTAllToAllTensorsAwaitable",
        ("_output_splits", "_output_tensors", "_awaitables"),
        "joining ids of modules in one collective",
    ),
    Internal(
        "torchrec.optim.keyed:OptimizerWrapper",
        ("_optimizer",),
        "state that checkpoints would lack",
    ),
    # FBGEMM: public names that nothing documents
    Internal(
        "fbgemm_gpu.split_table_batched_embeddings_ops_training:SplitTableBatchedEmbeddingBagsCodegen",
        (
            *("use_cpu", "dims", "pooling_mode", "is_nobag", "total_D", "D_offsets"),
            *("total_hash_size", "hash_size_cumsum", "rows_per_table", "weights_offsets"),
            *("bounds_check_mode_int", "embedding_table_index_type", "prepare_inputs"),
            *("table_names", "feature_table_map"),
        ),
        "lookup of all its tables as one",
    ),
    Internal(
        "fbgemm_gpu.split_table_batched_embeddings_ops_training:SplitTableBatchedEmbeddingBagsCodegen",
        (
            *("optimizer", "optimizer_args", "weights_precision", "output_dtype", "weights_host"),
            *(
                "momentum1_host",
                "momentum1_offsets",
                "learning_rate_tensor",
                "_indices",
                "_offsets",
            ),
            "placeholder_autograd_tensor",
            "_used_rowwise_adagrad_with_counter",
            "_used_rowwise_adagrad_with_global_weight_decay",
        ),
        "row-wise Adagrad on CPU with a backward pass of ours",
    ),
    # torch
    Internal(
        "torch.distributed.optim.apply_optimizer_in_backward:_apply_optimizer_in_backward",
        ("_optimizer_classes", "_optimizer_kwargs"),
        "seeing the optimizer that a table brings",
    ),
    Internal(
        "torch.distributed.optim", ("_apply_optimizer_in_backward",), "optimizers of registry files"
    ),
    Internal("torch.nn:Module", ("_buffers", "_parameters"), "copying of kernels and of memory"),
    Internal("torch.nn:Module", ("_modules",), "the look for shared tables"),
    Internal("torch.nn:Module", ("_apply",), "models that move, beside tables that do not"),
    Internal("torch._ops:OpOverload", ("_schema",), "counting of bytes and of work"),
    Internal("torch:Tensor", ("_make_wrapper_subclass",), "the fake device of tests"),
    Internal(
        "torch:_C",
        ("_only_lift_cpu_tensors", "_set_only_lift_cpu_tensors"),
        "the fake device of tests",
    ),
    Internal(
        "torch.utils.backend_registration",
        ("_DummyBackendModule", "_setup_privateuseone_for_python_backend"),
        "the fake device of tests",
    ),
    Internal("torch.utils", ("_python_dispatch",), "counting of bytes and of work"),
    Internal(
        "torch.utils._python_dispatch",
        ("_disable_current_modes",),
        "ranks that agree at their start",
    ),
    Internal("torch:UntypedStorage", ("_cdata",), "tables that are made shard by shard"),
    Internal(
        "torchrec.sparse.jagged_tensor",
        ("_kjt_flatten", "_kjt_flatten_spec", "_kjt_flatten_with_keys", "_kjt_unflatten"),
        "deduplicated batches in torch's pytrees",
    ),
    Internal("torch.fx", ("_pytree",), "deduplicated batches in torch's pytrees"),
    Internal("torch.utils", ("_pytree",), "counting of work, and moving of batches,"),
    Internal("torch", ("_C",), "what is listed of torch._C"),
    Internal("torch._C", ("_current_graph_task_id",), "counting bytes of backward passes"),
    Internal("torch._C", ("_autograd",), "telling the stages of a profile"),
    Internal("torch._C", ("_distributed_c10d",), "watching for ranks that hang"),
    Internal(
        "torch.distributed.distributed_c10d", ("_resolve_process_group",), "counting of bytes"
    ),
    Internal(
        "torch.distributed:ProcessGroup", ("_get_backend",), "groups with the trainer's timeout"
    ),
    Internal(
        "torch._C._distributed_c10d:Backend.Options",
        ("_timeout",),
        "groups with the trainer's timeout",
    ),
    Internal(
        "torch.ops:aten",
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        ),
        "counting the work of attention",
    ),
    Internal("torch:Tensor", ("_version",), "tables that are set before they are sharded"),
    Internal("torch:UntypedStorage", ("_new_shared",), "handing batches over in shared memory"),
    Internal(
        "torch.nn:Module", ("_non_persistent_buffers_set",), "buffers of each rank in checkpoints"
    ),
    Internal("torch.distributed", ("_shard",), "reading of sharded weights"),
    Internal(
        "torch.distributed._shard.sharded_tensor:ShardedTensor",
        ("_local_shards",),
        "state dicts that stay live",
    ),
    Internal(f"{_CHECKPOINT}.filesystem", ("_StorageInfo",), "reading of checkpoints"),
    Internal(f"{_CHECKPOINT}.metadata", ("_MEM_FORMAT_ENCODING",), "reading of checkpoints"),
    Internal("torch.serialization", ("_get_layout",), "reading of checkpoints"),
    # Others
    Internal(
        "torch.nn.parallel:DistributedDataParallel",
        ("_comm_hooks",),
        "a trainer's own sums of gradients, where ranks overlap",
    ),
    Internal("multiprocessing.forkserver", ("_forkserver",), "sharing of one fork server"),
    Internal(
        "multiprocessing.forkserver:ForkServer",
        ("_forkserver_address",),
        "sharing of one fork server",
    ),
    Internal(
        "multiprocessing.forkserver:ForkServer",
        ("_forkserver_pid",),
        "naming why a fork server ended",
    ),
    Internal("fsspec:AbstractFileSystem", ("_open", "_strip_protocol"), "counting of reads"),
)


@cache
def refuse_other_versions() -> None:
    """Refuse an installation that lacks one of ``INTERNALS``, once in a process.

    Modules that nothing has imported are left out: torch.distributed.optim alone takes 0.3 s.

    Raises:
        SetupError: names each that is missing, what needs it and what to install.
    """
    refuse_missing(each for each in INTERNALS if each.of.partition(":")[0] in sys.modules)


def require_attributes(owner: Any, *names: str) -> None:
    """Refuse a TorchRec whose ``owner`` lacks one of ``names``, rather than do nothing silently.

    Raises:
        SetupError: names the attribute, what needs it and what to install.
    """
    for name in names:
        if not hasattr(owner, name):
            cls = owner if isinstance(owner, type) else type(owner)
            packages = [base.__module__.partition(".")[0] for base in cls.__mro__]
            package = "fbgemm_gpu" if "fbgemm_gpu" in packages else "torchrec"
            needs = dict.fromkeys(each.used_for for each in INTERNALS if name in each.names)
            message = lacks(package, f"{cls.__name__}.{name}", next(iter(needs), "exact training"))
            raise SetupError(f"{message}: {one_of_the_sets()}")


def table(internals: Iterable[Internal]) -> str:
    """A table of Markdown, as in docs/exactness.md: owners of the same names in one line."""
    owners: dict[tuple[str, str], list[str]] = {}
    for each in internals:
        names = ", ".join(f"`{name}`" for name in each.names)
        owners.setdefault((names, each.used_for), []).append(f"`{each.of.rpartition(':')[2]}`")
    lines = [
        f"| {names} | {', '.join(of)} | {needs.rstrip(',')} |"
        for (names, needs), of in owners.items()
    ]
    return "\n".join(["| internal | of | needed by |", "|---|---|---|", *lines])
