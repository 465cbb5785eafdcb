"""TorchRec's shardings, train pipelines, optimizers, metrics and UVM cache as plugins."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugins.api import Cache, Plugin, Sharding, hookimpl

REQUIRES_API = 2


@hookimpl
def register_shardings() -> Sequence[type[Sharding]]:
    from recd_plugin_torchrec import shardings as found

    return [found.TableWise, found.RowWise, found.ColumnWise, found.DataParallel, found.Planner]


@hookimpl
def register_caches() -> Sequence[type[Cache]]:
    from recd_plugin_torchrec.shardings import Uvm

    return [Uvm]


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    from recd_plugin_torchrec import optimizers as found
    from recd_plugin_torchrec.training import Base, RecMetrics, SparseDist

    return [
        *(found.Sgd, found.Adagrad, found.RowWiseAdagrad, found.Adam, found.PartialRowWiseAdam),
        *(found.Lamb, found.PartialRowWiseLamb, RecMetrics, Base, SparseDist),
    ]
