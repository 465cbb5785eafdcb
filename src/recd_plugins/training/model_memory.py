"""Whether the model of a registry fits into this machine, before its memory is asked for."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from recd_plugins.errors import SetupError
from recd_plugins.interfaces import FeatureSchema
from recd_plugins.model.build import build_model
from recd_plugins.model_tables import embedding_modules
from recd_plugins.registry import RunConfig


def check_model_fits(registry: RunConfig, schema: FeatureSchema) -> None:
    """Refuse a model whose parameters alone are more than the memory of these machines.

    Each has all layers, and its share of the tables.

    Raises:
        SetupError: names what they take, the largest of them, and what there is.
    """
    with torch.random.fork_rng([]), torch.device("meta"):
        model = build_model(registry, schema)
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    tables = {
        parameter
        for module in embedding_modules(model)
        if module.ours
        for parameter in module.shardable.parameters()
    }
    layers = sum(p.nbytes for p in model.parameters() if p not in tables)
    memory, machines = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _machines()
    if layers + (sum(sizes.values()) - layers) / machines > memory:
        largest = max(sizes, key=sizes.__getitem__)
        has = "this machine has" if machines == 1 else f"each of {machines} machines like this has"
        raise SetupError(
            f"{registry.path}: the model's parameters take {sum(sizes.values()) / 1e9:,.1f} GB, of "
            f"which {largest} takes {sizes[largest] / 1e9:,.1f} GB, and {has} "
            f"{memory / 1e9:,.1f} GB; take fewer rows or smaller layers in the section model"
        )


def _machines() -> int:
    if not dist.is_initialized():
        return 1
    ranks = dist.get_world_size()
    return max(1, ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
