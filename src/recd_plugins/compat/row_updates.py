"""Checks of the optimizer arguments of FBGEMM kernels, which update rows in the backward pass.

FBGEMM (1.6 to 1.9) silently ignores some arguments. The kernels of some optimizers do not support
variable batches (VBE) on CUDA. With ``gradient_clipping`` FBGEMM clips the gradient of each lookup,
so results change if a deduplicated row is looked up once with the sum of its gradients.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)

from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.runtime.errors import ExactnessError, SetupError
from recd_plugins.runtime.text import shortened

logger = logging.getLogger(__name__)

# Learning rate of FBGEMM's kernels if none is given.
_RATE = 0.01
_DROPPED = (
    "as in stock TorchRec, DistributedModelParallel ignores apply_optimizer_in_backward for "
    "data-parallel tables. Train them with the dense optimizer, or use another sharding type."
)
_COLUMNS = (
    "a row-wise optimizer on column shards trains differently from whole rows. Use another "
    "sharding type, or SGD or Adagrad."
)
#: Elementwise optimizers; others use sums or norms over a row.
ELEMENTWISE = {
    EmbOptimType.SGD,
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.ADAM,
}
# FBGEMM accepts these arguments for every optimizer, but uses them only here, and only on CUDA.
_HEEDED_BY = {
    "weight_decay": {
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        EmbOptimType.ADAM,
        EmbOptimType.LAMB,
        EmbOptimType.PARTIAL_ROWWISE_ADAM,
        EmbOptimType.PARTIAL_ROWWISE_LAMB,
    },
    "max_norm": {EmbOptimType.EXACT_ROWWISE_ADAGRAD},
    "momentum": set[EmbOptimType](),
}
# The other optimizers have no CPU kernels.
_ON_CPU = {
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
# The other optimizers fail an assertion at the first variable batch on CUDA.
_VARIABLE_ON_CUDA = {
    EmbOptimType.SGD,
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD,
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
    EmbOptimType.ADAM,
}
# Compute kernels of FBGEMM's tables. On CPU a plugin provides the cached kernels.
_FUSED = {EmbeddingComputeKernel.FUSED.value}
_FUSED_ON_CUDA = _FUSED | {
    EmbeddingComputeKernel.FUSED_UVM.value,
    EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
}


def kind_of_update(
    optimizer: type[torch.optim.Optimizer], arguments: Mapping[str, Any]
) -> EmbOptimType:
    """Return FBGEMM's optimizer type for an optimizer class and its arguments.

    Raises ValueError if FBGEMM has no such optimizer.
    """
    kind: EmbOptimType = arguments.get("optimizer") or optimizer_type_to_emb_opt_type(optimizer)
    return kind


def unheeded_argument(
    kind: EmbOptimType, arguments: Mapping[str, Any], device_type: str | None
) -> str:
    """Return an error message if FBGEMM would ignore one of the arguments, else ""."""
    for name, kinds in _HEEDED_BY.items():
        if not arguments.get(name):
            continue
        if kind not in kinds:
            return (
                f"FBGEMM's {kind.value} kernels ignore the argument {name!r}. Remove the argument."
            )
        if device_type == "cpu":
            return (
                f"FBGEMM's pooled CPU kernels ignore the argument {name!r}. Remove the argument, "
                "or train on a GPU."
            )
    return ""


def update_of_table(
    module: Any, table: str, fused_params: Mapping[str, Any] | None
) -> tuple[EmbOptimType, dict[str, Any]]:
    """Return the optimizer of a table in an unsharded module: FBGEMM's type, and its arguments."""
    if isinstance(module, FusedEmbeddingBagCollection | FusedEmbeddingCollection):
        given = dict(module.optimizer_kwargs())
        return kind_of_update(module.optimizer_type(), given), given
    weight = _weight(module, table)
    given = dict(fused_params or {})
    kind = kind_of_update(torch.optim.SGD, given)
    # Set by torch.distributed.optim._apply_optimizer_in_backward, read by TorchRec.
    classes = getattr(weight, "_optimizer_classes", ())
    for optimizer, arguments in zip(classes, getattr(weight, "_optimizer_kwargs", ()), strict=True):
        kind, given = kind_of_update(optimizer, arguments), {**given, **arguments}
    return kind, given


def check_updates(
    module: nn.Module,
    params: Mapping[str, ParameterSharding],
    fused_params: Mapping[str, Any] | None,
    device: torch.device | None,
) -> None:
    """Check the optimizers of a module's tables against the sharding plan.

    Rank 0 logs a warning if a table would train differently from the unsharded module.

    Raises:
        SetupError: FBGEMM would ignore an argument, or has no CPU kernel for an optimizer. The
            message names the table.
    """
    device_type = "cpu" if device is None else device.type
    dropped, columns, unset = list[str](), list[str](), list[str]()
    for table, sharding in params.items():
        kind, given = update_of_table(module, table, fused_params)
        fused = isinstance(module, FusedEmbeddingBagCollection | FusedEmbeddingCollection)
        weight = None if fused else _weight(module, table)
        # Set by torch.distributed.optim._apply_optimizer_in_backward.
        classes = getattr(weight, "_optimizer_classes", ())
        if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
            dropped += [table] if classes else []
        elif sharding.compute_kernel in (_FUSED_ON_CUDA if device_type == "cuda" else _FUSED):
            if device_type == "cpu" and kind not in _ON_CPU:
                raise SetupError(
                    f"table {table!r}: FBGEMM has no CPU kernels for the optimizer {kind.value!r}. "
                    "Use row-wise Adagrad, Adagrad or SGD for tables, or train on a GPU. "
                    "training.dense_optimizer sets the optimizer of the dense layers only."
                )
            if why := unheeded_argument(kind, given, device_type):
                raise SetupError(f"table {table!r}: {why}")
            shards = getattr(sharding.sharding_spec, "shards", None) or ()
            if kind not in ELEMENTWISE and any(shard.shard_offsets[1] for shard in shards):
                columns.append(table)
            rate = [inspect.signature(each).parameters.get("lr") for each in classes]
            if given.keys().isdisjoint({"lr", "learning_rate"}) and any(
                each is not None and each.default != _RATE for each in rate
            ):
                unset.append(table)
    for tables, message in (
        (dropped, _DROPPED),
        (columns, _COLUMNS),
        (unset, f"their optimizer has no lr, so FBGEMM's default of {_RATE} applies. Set lr."),
    ):
        if tables and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.warning("tables %s: %s", shortened(tables), message)


def _weight(module: Any, table: str) -> Any:
    tables = module.embedding_bags if hasattr(module, "embedding_bags") else module.embeddings
    return tables[table].weight


def copy_optimizer_arguments(parameters: Iterable[nn.Parameter]) -> None:
    """Copy the dict of optimizer arguments that apply_optimizer_in_backward set on each parameter.

    TorchRec (1.6 to 1.9) writes the optimizer type into this dict. If two optimizers share a dict,
    the tables of the second would silently be trained with the first.
    """
    for parameter in parameters:
        # Set by torch.distributed.optim._apply_optimizer_in_backward.
        if given := getattr(parameter, "_optimizer_kwargs", None):
            parameter._optimizer_kwargs = [dict(each) for each in given]  # type: ignore[attr-defined]


def why_plain_kernels(
    module: nn.Module,
    shardings: Mapping[str, ParameterSharding],
    fused_params: Mapping[str, Any] | None,
    device_type: str,
) -> str:
    """Return why the kernels of a module do not support variable batches (VBE), as text.

    Returns an empty string if all kernels support them.
    """
    on_cpu, dense = device_type == "cpu", EmbeddingComputeKernel.DENSE.value
    for name, sharding in shardings.items():
        replicated = sharding.sharding_type == ShardingType.DATA_PARALLEL.value
        if not on_cpu if replicated else sharding.compute_kernel == dense:
            return f"because dense kernels (table {name!r}) need plain batches"
        if not on_cpu:
            kind, _ = update_of_table(module, name, fused_params)
            if kind not in _VARIABLE_ON_CUDA:
                return f"because CUDA kernels of {kind.value} (table {name!r}) need plain batches"
    return ""


_OPTION = "gradient_clipping"


@dataclass(frozen=True)
class ClippedTables:
    """Names of the tables whose optimizer clips gradients, and of the features that use them."""

    tables: tuple[str, ...]
    features: frozenset[str]

    @property
    def why_plain(self) -> str:
        """Return why these tables do not support deduplicated bags; empty without tables."""
        return f"because {_OPTION} clips the gradient of each row" if self.tables else ""

    def check_stored(self, features: Collection[str]) -> None:
        """Check that none of ``features``, all deduplicated, uses a table that clips gradients.

        Raises ExactnessError if a feature uses such a table.
        """
        if clipped := sorted(self.features.intersection(features)):
            raise ExactnessError(
                f"features {shortened(clipped)} are deduplicated, but their tables "
                f"{shortened(self.tables)} have {_OPTION}, which would clip sums of gradients. "
                f"Exclude these features from deduplication, or remove {_OPTION} from the "
                "optimizer."
            )


def clipped_tables(
    module: Any, params: Mapping[str, ParameterSharding], fused_params: Mapping[str, Any] | None
) -> ClippedTables:
    """Return the tables of an unsharded module whose FBGEMM optimizer clips gradients."""
    pooled = hasattr(module, "embedding_bags")
    clipped = [
        config
        for config in (module.embedding_bag_configs() if pooled else module.embedding_configs())
        if params[config.name].compute_kernel != EmbeddingComputeKernel.DENSE.value
        and update_of_table(module, config.name, fused_params)[1].get(_OPTION)
    ]
    return ClippedTables(
        tuple(config.name for config in clipped),
        frozenset(name for config in clipped for name in config.feature_names),
    )


def tables_clipped_inside(model: nn.Module) -> Iterator[ClippedTables]:
    """Yield the tables whose optimizer clips gradients, for each sharded module in ``model``."""
    for module in model.modules():
        if isinstance(clipped := getattr(module, "clipped", None), ClippedTables):
            yield clipped


def check_deduplicated(model: nn.Module, batch: ModelInput) -> None:
    """Raise ExactnessError if a deduplicated sequence uses a table that clips gradients."""
    if features := {*batch.inverse_lookup, *batch.segments}:
        for clipped in tables_clipped_inside(model):
            clipped.check_stored(features)
