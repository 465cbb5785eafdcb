"""Replaces how TorchRec's collections are made while a context lasts; TorchRec has no hook."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from functools import partial, wraps
from threading import get_ident
from typing import Any
from unittest import mock

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

#: Makes a collection: given its class, that class's ``__init__`` and the arguments of it, the
#: module that is made the first of them.
Maker = Callable[..., None]


@contextmanager
def collections_made_by(maker: Maker) -> Iterator[None]:
    """Have ``maker`` make EmbeddingBagCollections and EmbeddingCollections of this thread.

    It makes the modules of managed collision around them as well, and is called as
    ``maker(collection, init, module, *arguments, **options)``, where ``init`` is the ``__init__``
    to call. A context inside of another comes first, and its ``init`` is the outer one's maker.
    """
    with ExitStack() as stack:
        for collection in (
            EmbeddingBagCollection,
            EmbeddingCollection,
            BaseManagedCollisionEmbeddingCollection,
        ):
            init = _made_by(maker, collection, get_ident())
            stack.enter_context(mock.patch.object(collection, "__init__", init))
        yield


def _made_by(maker: Maker, collection: type[nn.Module], thread: int) -> Callable[..., None]:
    before: Callable[..., None] = collection.__init__

    @wraps(before)
    def init(module: nn.Module, *arguments: Any, **options: Any) -> None:
        make = partial(maker, collection, before) if get_ident() == thread else before
        make(module, *arguments, **options)

    return init


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
