"""FBGEMM's kernel over the memory of a backing store: names, shapes and state of the tables."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import fbgemm_gpu
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import Tensor
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.modules.embedding_configs import DataType

from recd_plugin_scars.runtime.backing_store import BackingStore
from recd_plugins.api import SetupError
from recd_plugins.api.distributed import require_attributes

_OPTIMIZERS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
_WEIGHT_DECAYS = (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE)
# What of fused_params is for the fast memory's kernel too.
_ARGUMENTS = (
    "eps",
    "gradient_clipping",
    "learning_rate",
    "max_gradient",
    "optimizer",
    "output_dtype",
    "stochastic_rounding",
    "weight_decay",
    "weight_decay_mode",
)
# What is for the tables' kernel only, or for a cache of FBGEMM's own.
_OTHERS = (
    "bounds_check_mode",
    "cache_algorithm",
    "cache_load_factor",
    "cache_precision",
    "cache_reserved_memory",
    "cache_sets",
    "embedding_table_index_type",
    "embedding_table_offset_type",
    "enable_raw_embedding_streaming",
    "enforce_hbm",
    "prefetch_pipeline",
    "uvm_host_mapped",
)
# Buffers that a check of bounds reads (fbgemm 1.6 to 1.9).
_OF_BOUNDS = ("D_offsets", "bounds_check_warning", "rows_per_table")


def fbgemm_arguments(config: GroupedEmbeddingConfig, device: torch.device) -> dict[str, Any]:
    """FBGEMM's arguments for the update of the rows.

    Args:
        config: of the kernel's tables.
        device: of the fast memory.

    Raises:
        SetupError: rows would need more than one float32 of state, or none of this is known,
            or an argument does nothing here.
    """
    names = ", ".join(dict.fromkeys(table.name for table in config.embedding_tables))
    params = config.fused_params or {}
    unknown = params.keys() - {*_ARGUMENTS, *_OTHERS}
    if unknown:
        raise SetupError(
            f"cached tables {names} have fused_params {', '.join(sorted(unknown))}, which cached "
            f"tables do not know; they know {', '.join(_ARGUMENTS)}"
        )
    if params.get("enable_raw_embedding_streaming"):
        raise SetupError(
            f"cached tables {names} have enable_raw_embedding_streaming, and only FBGEMM's own "
            "caches stream their rows: leave it out, or give the tables no cache"
        )
    if config.data_type != DataType.FP32:
        raise SetupError(
            f"cached tables {names} hold {config.data_type.name}; only FP32 can be cached"
        )
    optimizer = params.get("optimizer", EmbOptimType.EXACT_SGD)
    if optimizer not in _OPTIMIZERS:
        raise SetupError(
            f"cached tables {names} have the optimizer {optimizer.name}; cached tables learn by "
            f"{' or '.join(known.name for known in _OPTIMIZERS)}"
        )
    if params.get("weight_decay_mode", WeightDecayMode.NONE) not in _WEIGHT_DECAYS:
        raise SetupError(
            f"cached tables {names} have weight_decay_mode {params['weight_decay_mode'].name}, "
            "which changes rows that no batch reads; take "
            f"{', '.join(known.name for known in _WEIGHT_DECAYS)}"
        )
    if params.get("weight_decay") and device.type == "cpu":
        raise SetupError(
            f"cached tables {names} have weight_decay, with which FBGEMM's CPU kernels do nothing "
            "where they pool: leave it out, or train on a GPU"
        )
    return {name: params[name] for name in _ARGUMENTS if name in params}


def _check_fbgemm() -> None:
    known = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters
    if "preallocated_host_buffers" not in known:
        raise SetupError(
            "cached tables need FBGEMM's preallocated_host_buffers, which fbgemm_gpu "
            f"{fbgemm_gpu.__version__} has not: install torch 2.12, torchrec 1.7, fbgemm-gpu 1.7 "
            "or later, or give the tables no cache"
        )


class TablesInBackingStore(SplitTableBatchedEmbeddingBagsCodegen):
    """What TorchRec sees of cached tables: weights and optimizer state in the backing store.

    It looks nothing up. TorchRec's prefetch stage calls its ``prefetch``.

    Args:
        config: of the kernel's tables.
        specs: rows and columns of each table.
        feature_table_map: the table of each feature.
        pooling_mode: of the kernel.
        slow: the memory.
        arguments: of ``fbgemm_arguments``.
        lookahead: called by ``prefetch``; None: the tables do not look ahead.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        specs: list[tuple[int, int]],
        feature_table_map: list[int],
        pooling_mode: PoolingMode,
        slow: BackingStore,
        arguments: dict[str, Any],
        lookahead: Callable[[Tensor, list[int]], None] | None,
    ) -> None:
        _check_fbgemm()
        arguments = dict(arguments)
        bounds_check = (config.fused_params or {}).get("bounds_check_mode")
        if bounds_check is not None:
            arguments["bounds_check_mode"] = bounds_check
        memory = {"weights": slow.weights.view(-1)}
        if slow.state is not None:
            memory["momentum1"] = slow.state
        super().__init__(
            [(rows, columns, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, columns in specs],
            feature_table_map=feature_table_map,
            pooling_mode=pooling_mode,
            device=torch.device("cpu"),
            table_names=[table.name for table in config.embedding_tables],
            preallocated_host_buffers=memory,
            **arguments,
        )
        # By this name TorchRec asks whether a kernel can prefetch in a pipeline.
        self.prefetch_pipeline = lookahead is not None
        self._lookahead = lookahead

    def that_checks_bounds(self, device: torch.device) -> TablesInBackingStore:
        """One whose ``prepare_inputs`` takes ids on a device."""
        if device.type == "cpu":
            return self
        require_attributes(self, *_OF_BOUNDS)
        other = copy.copy(self)
        other._buffers = {
            name: buffer.to(device) if name in _OF_BOUNDS and buffer is not None else buffer
            for name, buffer in self._buffers.items()
        }
        return other

    def prefetch(
        self,
        indices: Tensor,
        offsets: Tensor,
        forward_stream: torch.cuda.Stream | None = None,  # noqa: ARG002 - lookups wait
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
    ) -> None:
        """Start to read the rows of a batch, as TorchRec's lookups call it."""
        if self._lookahead is None:
            return
        num_features = len(self.feature_table_map)
        if batch_size_per_feature_per_rank is None:
            bags = [(len(offsets) - 1) // num_features] * num_features
        else:
            bags = [sum(sizes) for sizes in batch_size_per_feature_per_rank]
        ends = torch.tensor([0, *bags]).cumsum(0).to(offsets.device)
        ids_per_feature = offsets.index_select(0, ends).diff().tolist()
        self._lookahead(indices, ids_per_feature)
