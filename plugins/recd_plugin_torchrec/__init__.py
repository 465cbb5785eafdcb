"""TorchRec's own shardings, train pipelines, optimizers and metrics and FBGEMM's cache, by name."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugins.api import Cache, Plugin, Sharding, hookimpl

REQUIRES_API = 2


@hookimpl
def register_shardings() -> Sequence[type[Sharding]]:
    from recd_plugin_torchrec.column_wise import ColumnWise
    from recd_plugin_torchrec.data_parallel import DataParallel
    from recd_plugin_torchrec.planner import Planner
    from recd_plugin_torchrec.row_wise import RowWise
    from recd_plugin_torchrec.table_wise import TableWise

    return [TableWise, RowWise, ColumnWise, DataParallel, Planner]


@hookimpl
def register_caches() -> Sequence[type[Cache]]:
    from recd_plugin_torchrec.uvm import Uvm

    return [Uvm]


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    from recd_plugin_torchrec.optimizers import (
        Adagrad,
        Adam,
        Lamb,
        PartialRowWiseAdam,
        PartialRowWiseLamb,
        RowWiseAdagrad,
        Sgd,
    )
    from recd_plugin_torchrec.pipelines import Base, SparseDist
    from recd_plugin_torchrec.rec_metrics import RecMetrics

    return [
        *(Sgd, Adagrad, RowWiseAdagrad, Adam, PartialRowWiseAdam),
        *(Lamb, PartialRowWiseLamb, RecMetrics, Base, SparseDist),
    ]
