"""How much of each table a plan caches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from recd_plugin_scars.runtime.spec import TableCache


def as_planned(
    caches: Mapping[str, TableCache],
    params: Mapping[str, ParameterSharding],
    configs: Iterable[BaseEmbeddingConfig],
) -> dict[str, TableCache]:
    """The caches with the load factors of a plan, where TorchRec's planner has sized them.

    A static cache never has more rows than its ``hot_rows``: nobody knows of others whether they
    are read.

    Args:
        caches: by table, those of other modules too.
        params: how each table of one module is sharded.
        configs: of the tables of that module.
    """
    planned = dict(caches)
    for config in configs:
        cache, sharding = caches.get(config.name), params.get(config.name)
        if cache is None or sharding is None or sharding.cache_params is None:
            continue
        load_factor = sharding.cache_params.load_factor
        if load_factor is None:
            continue
        rows = round(load_factor * config.num_embeddings)
        if cache.policy_class.only_hot:
            rows = min(rows, 0 if cache.hot_rows is None else len(cache.hot_rows))
        planned[config.name] = replace(cache, load_factor=rows / config.num_embeddings)
    return planned
