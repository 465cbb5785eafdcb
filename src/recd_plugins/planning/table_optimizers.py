"""What trains a table where it is sharded, as its sharder will see it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from recd_plugins.distributed.row_updates import ELEMENTWISE, kind_of_update
from recd_plugins.model_tables import sharded_modules


@dataclass(frozen=True)
class TableOptimizer:
    """The optimizer that a table has in the backward pass.

    Attributes:
        in_backward: name of the class that the table's parameter brings, by
            ``apply_optimizer_in_backward``; empty where the sharder says the optimizer.
        elementwise: whether parts of a row are trained as a whole row is.
        fused_params: of the sharder.
    """

    in_backward: str
    elementwise: bool
    fused_params: Mapping[str, Any]


def table_optimizers(
    model: nn.Module, sharders: Iterable[ModuleSharder[nn.Module]]
) -> dict[str, TableOptimizer]:
    """The optimizers of the tables that ``sharders`` would shard, by table name."""
    found: dict[str, TableOptimizer] = {}
    for module, sharder in sharded_modules(model, sharders):
        params: Mapping[str, Any] = getattr(sharder, "fused_params", None) or {}
        for table, parameter in sharder.shardable_parameters(module).items():
            if isinstance(module, FusedEmbeddingBagCollection):
                classes, kwargs = [module.optimizer_type()], dict[str, Any]()
            else:
                # Set by torch.distributed.optim._apply_optimizer_in_backward, read by TorchRec.
                classes = getattr(parameter, "_optimizer_classes", [])
                kwargs = dict(*getattr(parameter, "_optimizer_kwargs", [{}])[:1])
            kind = params.get("optimizer", EmbOptimType.EXACT_SGD)
            if classes:
                kind = _kind(classes[0], kwargs)
            own = TableOptimizer(
                classes[0].__name__ if classes else "", kind in ELEMENTWISE, params
            )
            found[table] = _of_both(found.get(table, own), own)
    return found


def _of_both(first: TableOptimizer, second: TableOptimizer) -> TableOptimizer:
    """Of tables of one name, which share their constraints: no more than both allow."""
    if first == second:
        return first
    elementwise = first.elementwise and second.elementwise
    return TableOptimizer(first.in_backward or second.in_backward, elementwise, {})


def _kind(optimizer_class: Any, arguments: Mapping[str, Any]) -> EmbOptimType | None:
    """FBGEMM's name of it; None of one that it lacks, which its sharder refuses."""
    try:
        return kind_of_update(optimizer_class, arguments)
    except ValueError:
        return None
