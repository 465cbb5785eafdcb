"""Checks of the row updates that FBGEMM's kernels run in the backward pass.

FBGEMM (1.6 to 1.9) silently ignores some optimizer arguments, and TorchRec ignores a class's
default learning rate. Kernels of some optimizers do not support variable batches on CUDA. With
``gradient_clipping`` FBGEMM clips the gradient of each looked-up row, and a clipped sum differs
from the sum of clipped gradients.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)

from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.runtime.errors import ExactnessError, SetupError
from recd_plugins.runtime.text import shortened

logger = logging.getLogger(__name__)

_RATE = (
    inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__)
    .parameters["learning_rate"]
    .default
)
#: Optimizers for which FBGEMM has CPU kernels.
ON_CPU = {
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
}
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

    Raises:
        ValueError: FBGEMM has no such optimizer.
    """
    kind: EmbOptimType = arguments.get("optimizer") or optimizer_type_to_emb_opt_type(optimizer)
    return kind


def unheeded_argument(
    kind: EmbOptimType, arguments: Mapping[str, Any], device_type: str | None
) -> str:
    """Return an error message for an argument that FBGEMM ignores, or an empty string."""
    for name, kinds in _HEEDED_BY.items():
        if not arguments.get(name):
            continue
        if kind not in kinds:
            return f"FBGEMM's kernels of {kind.value} do nothing with {name}: leave it out"
        if device_type == "cpu":
            return (
                f"FBGEMM's CPU kernels do nothing with {name} where they pool: leave it out, or "
                "train on a GPU"
            )
    return ""


def check_updates(
    params: Mapping[str, ParameterSharding],
    parameters: Mapping[str, nn.Parameter],
    fused_params: Mapping[str, Any] | None,
    device: torch.device | None,
) -> None:
    """Refuse optimizer arguments that FBGEMM ignores, and warn of updates that differ from torch's.

    Raises:
        SetupError: names the table and the argument.
    """
    device_type = "cpu" if device is None else device.type
    without_rate: dict[str, list[str]] = {}
    split: list[str] = []
    for table, sharding in params.items():
        if sharding.compute_kernel not in _fused_on(device_type):
            continue
        parameter = parameters.get(table)
        kind, given = kind_of_update(torch.optim.SGD, fused_params or {}), dict(fused_params or {})
        for optimizer, arguments in _brought(parameter):
            kind, given = kind_of_update(optimizer, arguments), {**given, **arguments}
            if _has_other_rate(optimizer, given):
                without_rate.setdefault(optimizer.__name__, []).append(table)
        if why := unheeded_argument(kind, given, device_type):
            raise SetupError(f"table {table}: {why}")
        shards = getattr(sharding.sharding_spec, "shards", None) or ()
        width = max((shard.shard_sizes[1] for shard in shards), default=0)
        if width < getattr(parameter, "shape", (0, width))[1] and kind not in ELEMENTWISE:
            split.append(table)
    if split:
        logger.warning(
            "%s: split by columns, and each shard has sums and norms of its own part of a row, "
            "which is another update than that of whole rows: shard them by rows or as wholes, or "
            "take an optimizer that works number by number (SGD, Adagrad)",
            shortened(split),
        )
    for name, tables in without_rate.items():
        logger.warning(
            "%s: %s was given no lr, and FBGEMM's default of %g counts, not that of the class: "
            "give it one",
            *(shortened(tables), name, _RATE),
        )


def check_update_of_fused(
    name: str,
    module: FusedEmbeddingBagCollection | FusedEmbeddingCollection,
    params: Mapping[str, ParameterSharding],
    device: torch.device | None,
) -> None:
    """Run ``check_updates`` for a module that has one optimizer for all its tables."""
    device_type = "cpu" if device is None else device.type
    if any(each.compute_kernel in _fused_on(device_type) for each in params.values()):
        given = module.optimizer_kwargs()
        kind = kind_of_update(module.optimizer_type(), given)
        if why := unheeded_argument(kind, given, device_type):
            raise SetupError(f"{name}: {why}")


def copy_optimizer_arguments(parameters: Iterable[nn.Parameter]) -> None:
    """Give each table parameter its own copy of the optimizer arguments set on it.

    TorchRec (1.6 to 1.9) writes a table's optimizer type into these arguments. If two optimizers
    were given the same dict, tables of the second would silently be trained by the first.
    """
    for parameter in parameters:
        # Set by torch.distributed.optim._apply_optimizer_in_backward.
        if given := getattr(parameter, "_optimizer_kwargs", None):
            parameter._optimizer_kwargs = [dict(each) for each in given]  # type: ignore[attr-defined]


def plain_updates(
    module: EmbeddingBagCollection | FusedEmbeddingBagCollection,
    fused_params: Mapping[str, Any] | None,
    device_type: str,
) -> dict[str, str]:
    """Return an unsharded module's tables whose kernels need plain batches."""
    found: dict[str, str] = {}
    for config in module.embedding_bag_configs() if device_type != "cpu" else ():
        kind = kind_of_update(torch.optim.SGD, fused_params or {})
        if isinstance(module, FusedEmbeddingBagCollection):
            kind = kind_of_update(module.optimizer_type(), module.optimizer_kwargs())
        else:
            for optimizer, arguments in _brought(module.embedding_bags[config.name].weight):
                kind = kind_of_update(optimizer, arguments)
        if kind not in _VARIABLE_ON_CUDA:
            found[config.name] = kind.value
    return found


def why_plain_kernels(
    shardings: Mapping[str, ParameterSharding], updates: Mapping[str, str], *, on_cpu: bool
) -> str:
    """Return why kernels of bags need plain batches; empty if they do not.

    On CPU data-parallel tables support variable batches. ``updates`` is the result of
    ``plain_updates``.
    """
    replicated, dense = ShardingType.DATA_PARALLEL.value, EmbeddingComputeKernel.DENSE.value
    plain = [
        name
        for name, sharding in shardings.items()
        if (
            not on_cpu if sharding.sharding_type == replicated else sharding.compute_kernel == dense
        )
    ]
    if plain:
        return f"as dense kernels, those of tables {', '.join(plain)}, take no other"
    if updates:
        kinds, names = " and ".join(sorted({*updates.values()})), shortened([*updates])
        return f"as kernels of {kinds} for CUDA, those of tables {names}, take no other"
    return ""


def _fused_on(device_type: str) -> set[str]:
    return _FUSED_ON_CUDA if device_type == "cuda" else _FUSED


def _brought(parameter: Any) -> Iterator[tuple[type[torch.optim.Optimizer], Mapping[str, Any]]]:
    """Yield the optimizers and arguments that _apply_optimizer_in_backward set on a parameter."""
    classes = getattr(parameter, "_optimizer_classes", ())
    yield from zip(classes, getattr(parameter, "_optimizer_kwargs", ()), strict=True)


def _has_other_rate(optimizer: type[torch.optim.Optimizer], given: Mapping[str, Any]) -> bool:
    """Return whether FBGEMM's default learning rate differs from the optimizer class's default."""
    of_class = inspect.signature(optimizer).parameters.get("lr")
    return (
        given.keys().isdisjoint({"lr", "learning_rate"})
        and of_class is not None
        and of_class.default != _RATE
    )


_OPTION = "gradient_clipping"


class ClippedGradients:
    """Tables of an unsharded module whose optimizers clip gradients.

    Models are searched only if ``in_use`` is True, which means that a module of this process clips.

    Raises:
        SetupError: a coalesced table clips.
    """

    in_use: ClassVar[bool] = False

    def __init__(
        self,
        module: EmbeddingBagCollection | EmbeddingCollection,
        params: Mapping[str, ParameterSharding],
        fused_params: Mapping[str, Any] | None,
        coalesced: Collection[str] = (),
    ) -> None:
        pooled = isinstance(module, EmbeddingBagCollection)
        configs: Any = module.embedding_bag_configs() if pooled else module.embedding_configs()
        tables: Any = module.embedding_bags if pooled else module.embeddings
        clipped = []
        for config in configs:
            given = dict(fused_params or {})
            # Set by torch.distributed.optim._apply_optimizer_in_backward, read by TorchRec.
            for arguments in getattr(tables[config.name].weight, "_optimizer_kwargs", []):
                given |= arguments
            dense = params[config.name].compute_kernel == EmbeddingComputeKernel.DENSE.value
            if clips(given) and not dense:
                clipped.append(config)
        self.tables = tuple(config.name for config in clipped)
        self._features = frozenset(name for config in clipped for name in config.feature_names)
        ClippedGradients.in_use |= bool(clipped)
        if both := [name for name in self.tables if name in coalesced]:
            raise SetupError(
                f"tables {shortened(both)} are to be coalesced and have {_OPTION}, which clips the "
                "gradient of each row that is looked up: of ids that are sent once it would clip "
                "their sums. Leave one of the two out"
            )

    @property
    def why_plain(self) -> str:
        """Return why bags need plain batches, or an empty string."""
        if not self.tables:
            return ""
        return f"as {_OPTION} of tables {shortened(self.tables)} clips the gradient of each row"

    def check_stored(self, features: Collection[str]) -> None:
        """Refuse features whose equal rows are looked up and pooled only once.

        Raises:
            ExactnessError: the named tables clip gradients and have such features.
        """
        if clipped := sorted(self._features.intersection(features)):
            raise ExactnessError(
                f"features {shortened(clipped)} are deduplicated, and their tables "
                f"{shortened(self.tables)} have {_OPTION}, which clips the gradient of each row "
                "that is looked up: of rows that are stored once it would clip their sums. Leave "
                "these features out of the converter or of dedup, or clipping out of the optimizer"
            )


def why_clipped(sharded: nn.Module) -> str:
    """Return why a module with an EmbeddingBagCollection inside needs plain batches, or ""."""
    return next(filter(None, (clipped.why_plain for clipped in _inside(sharded))), "")


def check_deduplicated(model: nn.Module, batch: ModelInput) -> None:
    """Refuse a batch with deduplicated sequences for tables that clip gradients."""
    if ClippedGradients.in_use:
        for clipped in _inside(model):
            clipped.check_stored({*batch.inverse_lookup, *batch.segments})


def clips(arguments: Mapping[str, Any]) -> bool:
    """Return whether a kernel's arguments enable gradient clipping."""
    return bool(arguments.get(_OPTION))


def _inside(model: nn.Module) -> Iterator[ClippedGradients]:
    for module in model.modules():
        if isinstance(clipped := getattr(module, "clipped", None), ClippedGradients):
            yield clipped
