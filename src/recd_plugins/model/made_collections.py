"""Replaces how TorchRec's collections are made while a context lasts; TorchRec has no hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from threading import get_ident
from typing import Any
from unittest import mock

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

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
