"""Models whose tables have one row each, to count on what a model of any size computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import wraps
from typing import Any
from unittest.mock import patch

from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection


@contextmanager
def one_row_tables() -> Iterator[None]:
    """A context in which TorchRec's collections are made with one row a table, whoever makes them.

    A module that exists cannot be made smaller: it may take more memory than there is.
    """
    with ExitStack() as stack:
        for collection in (EmbeddingBagCollection, EmbeddingCollection):
            plain = collection.__init__
            stack.enter_context(patch.object(collection, "__init__", _with_one_row(plain)))
        yield


def _with_one_row(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def with_one_row(self: Any, tables: list[Any], *args: Any, **options: Any) -> None:
        small = [copy(table) for table in tables]
        for table in small:
            table.num_embeddings = 1
        init(self, small, *args, **options)

    return with_one_row
