"""Models whose tables have one row each, to count on what a model of any size computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugins.model.made_collections import collections_made_by


def one_row_tables() -> AbstractContextManager[None]:
    """A context in which TorchRec's collections are made with one row a table, whoever makes them.

    A module that exists cannot be made smaller: it may take more memory than there is. Collision
    maps keep their size, and map every id to row 0.
    """
    return collections_made_by(_with_one_row)


def _with_one_row(
    _: type[nn.Module], init: Callable[..., None], module: nn.Module, *args: Any, **options: Any
) -> None:
    bound = inspect.signature(init).bind(module, *args, **options)
    if "tables" in bound.arguments:
        small = [copy(table) for table in bound.arguments["tables"]]
        for table in small:
            table.num_embeddings = 1
        bound.arguments["tables"] = small
    else:
        _map_to_row_0(
            bound.arguments["managed_collision_collection"], bound.arguments["embedding_module"]
        )
    init(*bound.args, **bound.kwargs)


def _map_to_row_0(
    maps: ManagedCollisionCollection, tables: EmbeddingBagCollection | EmbeddingCollection
) -> None:
    """Have collision maps suit tables of one row."""
    # Private, torchrec 1.6 to 1.9: compared to the configs of the tables.
    maps._embedding_configs = (
        tables.embedding_bag_configs()
        if isinstance(tables, EmbeddingBagCollection)
        else tables.embedding_configs()
    )
    for each in maps.modules():
        if isinstance(each, ManagedCollisionModule):
            each.register_forward_hook(_to_row_0)


def _to_row_0(*call: Any) -> dict[str, JaggedTensor]:
    """Replace the ids that a collision map returns, the last argument of a forward hook."""
    return {
        name: JaggedTensor(torch.zeros_like(ids.values()), lengths=ids.lengths())
        for name, ids in call[-1].items()
    }
