"""A say in how TorchRec's collections are made, whoever makes them, while a context lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from threading import Lock
from typing import Any

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

#: Makes a collection: given its class, that class's ``__init__`` and the arguments of it, the
#: module that is made the first of them.
Maker = Callable[..., None]

# Of this thread: others make collections as ever, whatever goes on here.
_makers: ContextVar[tuple[Maker, ...]] = ContextVar("makers", default=())
_lock = Lock()
_installed = False


@contextmanager
def collections_made_by(maker: Maker) -> Iterator[None]:
    """A context in which ``maker`` makes EmbeddingBagCollections and EmbeddingCollections.

    It makes the modules of managed collision around them as well.
    It is called as ``maker(collection, init, module, *arguments, **options)``, of subclasses too,
    and calls ``init`` where the plain ``__init__`` would do. A context inside of another comes
    first, and its ``init`` is the outer one's maker. TorchRec has no hook for it: from the first
    context on the ``__init__`` of the three classes asks for makers of its thread, and without any
    does what it did.
    """
    _install()
    token = _makers.set((*_makers.get(), maker))
    try:
        yield
    finally:
        _makers.reset(token)


def _install() -> None:
    global _installed
    with _lock:
        if not _installed:
            for collection in (
                EmbeddingBagCollection,
                EmbeddingCollection,
                BaseManagedCollisionEmbeddingCollection,
            ):
                _ask_makers(collection)
            _installed = True


def _ask_makers(collection: type[nn.Module]) -> None:
    plain: Callable[..., None] = collection.__init__

    @wraps(plain)
    def init(module: nn.Module, *arguments: Any, **options: Any) -> None:
        _make(_makers.get(), module, *arguments, **options)

    def _make(makers: tuple[Maker, ...], module: nn.Module, *args: Any, **options: Any) -> None:
        if not makers:
            plain(module, *args, **options)
            return
        *outer, inner = makers

        @wraps(plain)
        def outside(module: nn.Module, *args: Any, **options: Any) -> None:
            _make(tuple(outer), module, *args, **options)

        inner(collection, outside, module, *args, **options)

    collection.__init__ = init  # type: ignore[method-assign, assignment]
